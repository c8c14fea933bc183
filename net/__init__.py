"""Networking for decentralised training: frames, links, RPC and a DHT on trio.

This package sees bytes, flat arrays and peers; it never imports JAX or anything of `dmoe_jax`. Modules are of two
kinds. A *core* is pure, synchronous and deterministic: clocks, generators and ids are arguments. A *shell* is async
and thin: it owns nurseries, sockets and clocks. `tests/test_import_rules.py` holds the list and enforces it.
"""
