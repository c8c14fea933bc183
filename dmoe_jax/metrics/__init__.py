"""Figures that a process tells of itself, for Prometheus, a trace of its calls, and records for an experiment tracker.

Whoever works counts, in plain numbers and `Histogram`s, whether anybody looks or not: counting costs next to nothing.
When somebody asks, functions make `Family` objects of these counters (`families`), which `monitor` serves as text.

Names follow Prometheus: `dmoe_` and what counts, base units (`_seconds`, `_bytes`), `_total` for what only grows.
"""
