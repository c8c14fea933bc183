"""Networking for decentralised training: frames, links, RPC, a DHT and averaging, on trio.

From the bottom: `wire` turns messages and tensors into frames, `transport` carries frames over links (plain TCP, TLS
1.3 with proved identities, or a simulated network in virtual time), `rpc` runs many calls at once over one connection
for each pair of peers, `dht` finds peers and records, `averaging` averages vectors among them.

Modules are of two kinds. A *core* is pure, synchronous and deterministic: clocks, generators and ids are arguments. A
*shell* is async and thin: it owns nurseries, sockets and clocks. `tests/test_import_rules.py` holds the list.

The promised names stand in `dmoe_net.public` and are loaded when first asked for:

    import dmoe_net

    async with dmoe_net.open_rpc_peer(dmoe_net.TcpTransport(), peer_id=identity.peer_id) as peer:
        reply = await peer.call(dmoe_net.Address("127.0.0.1", 7000), "rpc.ping", {}, timeout_s=5.0)
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmoe_net.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        """A promised name, or their list as `__all__`."""
        # Other names with underscores are Python's questions to any package: they are no reason to load everything.
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module 'dmoe_net' has no attribute {name!r}")
        import dmoe_net.public

        if name != "__all__" and name not in dmoe_net.public.__all__:
            raise AttributeError(f"module 'dmoe_net' has no attribute {name!r}")
        return getattr(dmoe_net.public, name)

    def __dir__() -> list[str]:
        """The promised names, and what Python adds."""
        import dmoe_net.public

        return sorted({*globals(), *dmoe_net.public.__all__})
