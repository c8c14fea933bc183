"""What balance is worth to a mixture of experts, and what it costs."""
