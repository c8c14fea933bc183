"""Figures that a process tells of itself, for Prometheus, a trace of its calls, and records for an experiment tracker.

Theory of operation. Whoever works counts, in plain numbers and `Histogram`s, whether anybody looks or not: `node` is
the expert node's recorder, `training` the trainer's, `net` and the DHT have counters of their own. When somebody asks,
functions make `Family` objects of these counters (`families`), which `monitor` serves as text. So looking costs
something and counting next to nothing. `trace` and `trackers` stand by themselves.

Names follow Prometheus: `dmoe_` and what counts, base units (`_seconds`, `_bytes`), `_total` for what only grows.
"""
