"""Networking for decentralised training: frames, links, RPC and a DHT on trio.

From the bottom: `wire` turns messages and tensors into frames, `transport` carries frames over links (plain TCP, TLS
1.3 with proved identities, or a simulated network in virtual time), `rpc` runs many calls at once over one connection
for each pair of peers, `dht` finds peers and records. Beside them: who a peer is (`identity`, `keys`, `key_files`),
what can go wrong (`errors`), the swarm's time (`clock`) and repeatable chance (`chance`).

This package sees bytes, flat arrays and peers; it never imports JAX or anything of `dmoe_jax`. Modules are of two
kinds. A *core* is pure, synchronous and deterministic: clocks, generators and ids are arguments. A *shell* is async
and thin: it owns nurseries, sockets and clocks. `tests/test_import_rules.py` holds the list and enforces it.
"""
