"""Experts found among ten thousand nodes: what it takes, in calls, bytes and virtual time."""
