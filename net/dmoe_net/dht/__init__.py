"""Kademlia with expiring records: how the peers of a swarm find each other and each other's experts.

Theory of operation. A peer's 32-byte id and the SHA-256 of a key are points of one 256-bit space with the XOR metric. A
record lives on the `replicas` peers nearest to its key. Whoever needs a record walks towards the key: it asks the
nearest peers it knows for nearer ones (and for the record) until the nearest `beam_size` have all answered.

Nothing is for ever: each value carries an absolute expiration in swarm time, the later expiration wins, and owners
declare again while they live. A peer leaves by falling silent.

Cores: `routing_table` (contacts to keep), `records` (a key's values, and how copies merge), `storage` (bounded and
expiring), `lookup` (the walk as a state machine), `peer_book` (peers that answer or not), `messages` (the form on the
wire). Shells: `calls` (outgoing and incoming), `maintenance` (background), `node` (the whole, and its public face).
"""
