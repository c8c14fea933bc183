"""What asynchrony costs a mixture of experts, and what wins some of it back."""
