"""The families of every process of a swarm: its connections, and its part of the DHT."""

from collections.abc import Iterator

from dmoe_jax.metrics.families import Family, by_label, counter, gauge, labelled
from dmoe_jax.peers.peer import SwarmPeer
from dmoe_net.dht.node import DhtNode
from dmoe_net.rpc.connections import RpcStatistics
from dmoe_net.rpc.peer import RpcPeer


def peer_families(peer: SwarmPeer) -> Iterator[Family]:
    """The traffic of a peer's connections, as far as they are its own (`RpcPeer`), and its part of the DHT."""
    address = "" if peer.rpc.address is None else str(peer.rpc.address)
    who = {"peer_id": str(peer.rpc.peer_id), "address": address}
    yield labelled("gauge", "dmoe_peer_info", "1; who this peer is, and where it is called.", [(who, 1)])
    if isinstance(peer.rpc, RpcPeer):
        yield from _network_families(peer.rpc.statistics())
    yield from _dht_families(peer.dht)


def _network_families(now: RpcStatistics) -> Iterator[Family]:
    text = "Bytes received, with what encryption and framing add."
    yield counter("dmoe_network_received_bytes_total", text, now.received_bytes)
    text = "Bytes sent, with what encryption and framing add."
    yield counter("dmoe_network_sent_bytes_total", text, now.sent_bytes)
    connections = {"outgoing": now.outgoing, "incoming": now.incoming}
    yield by_label("gauge", "dmoe_network_connections", "Open connections, by who dialled.", "direction", connections)
    calls = {"placed": now.calls_placed, "served": now.calls_served}
    text = "Calls under way: placed with others, or served to them."
    yield by_label("gauge", "dmoe_network_calls_in_flight", text, "direction", calls)
    text = "Calls of others that were not admitted: too many of a method ran already, or there is no such method."
    turned_away = {"busy": 0, "unknown method": 0} | dict(now.turned_away)
    yield by_label("counter", "dmoe_network_calls_turned_away_total", text, "reason", turned_away)


def _dht_families(dht: DhtNode) -> Iterator[Family]:
    now = dht.statistics()
    yield gauge("dmoe_dht_records", "Records kept for the swarm.", now.records)
    yield gauge("dmoe_dht_record_bytes", "Size of these records, an upper bound.", now.record_bytes)
    yield gauge("dmoe_dht_peers", "Peers in the routing table.", now.contacts)
    yield gauge("dmoe_dht_blocked_peers", "Peers left alone now because they did not answer.", len(now.blacklisted))
    yield counter("dmoe_dht_lookups_total", "Lookups finished.", now.lookups)
    yield counter("dmoe_dht_queries_total", "Questions asked in lookups.", now.queries)
    yield counter("dmoe_dht_dropped_jobs_total", "Follow-ups dropped because their queue was full.", now.dropped_jobs)
    text = "Swarm time of peers that answered of late minus our own. Beyond some seconds records end too early or late."
    yield gauge("dmoe_dht_clock_skew_seconds", text, now.clock_skew_s)
