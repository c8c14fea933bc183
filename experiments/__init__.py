"""Experiments: one folder a claim, each run as `python -m experiments.<claim>`."""
