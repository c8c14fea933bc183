"""Averaging within a group: each member reduces a part of the vector and sends it back (butterfly all-reduce)."""
