"""Comparison of routers: the same mixture trained with one after the other, on several seeds, put side by side."""
