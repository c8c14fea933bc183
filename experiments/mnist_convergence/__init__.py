"""Convergence under latency on MNIST: Learning@home's figure 5."""
