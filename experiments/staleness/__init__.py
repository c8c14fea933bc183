"""Cost of asynchrony to a mixture of experts, and remedies that win some of it back."""
