"""All that waits for a GPU, in an order of worth, in commands of a few minutes each."""
