"""A node that holds experts which others hold too."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from dmoe_jax.machine.device import Device
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.placement.config import PlacementConfig
from dmoe_net.dht.node import DhtNode
from dmoe_net.identity import Contact
from dmoe_net.rpc.base import Caller


@dataclass(frozen=True, kw_only=True, eq=False)
class Holder:
    """A node, as its averages and its states see it."""

    caller: Caller
    """Places and serves its calls; it listens."""
    dht: DhtNode
    """Finds the others."""
    swarm: str
    backends: Mapping[str, ExpertBackend]
    """Its experts by uid, which may come and go."""
    device: Device
    """Copies and changes their states between two batches."""
    rng: random.Random
    config: PlacementConfig

    @property
    def contact(self) -> Contact:
        """Contact of the node."""
        assert self.caller.address is not None
        return Contact(self.caller.peer_id, self.caller.address)
