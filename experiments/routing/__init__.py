"""Benefit and cost of balance in a mixture of experts."""
