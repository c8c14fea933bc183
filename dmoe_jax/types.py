"""Types that many modules share."""

from typing import Any

PyTree = Any
"""A nested structure of tuples, lists, dictionaries and registered nodes with arrays as leaves, as JAX has it."""
