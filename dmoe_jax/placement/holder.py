"""A node that holds experts which others hold too."""

from collections.abc import Mapping
from dataclasses import dataclass

from dmoe_jax.machine.device import Device
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.peers.peer import SwarmPeer
from dmoe_jax.placement.config import PlacementConfig
from dmoe_net.identity import Contact


@dataclass(frozen=True, kw_only=True, eq=False)
class Holder:
    """A node, as its averages and its states see it."""

    peer: SwarmPeer
    """The node's; it listens."""
    swarm: str
    backends: Mapping[str, ExpertBackend]
    """Its experts by uid, which may come and go."""
    device: Device
    """Copies and changes their states between two batches."""
    config: PlacementConfig

    @property
    def contact(self) -> Contact:
        """Contact of the node."""
        assert self.peer.own_contact is not None
        return self.peer.own_contact
