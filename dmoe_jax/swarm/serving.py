"""Experts that a process serves, from their compilation to their withdrawal; those that it claims, too."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import trio

from dmoe_jax.claims.claimer import Claimer
from dmoe_jax.claims.host import Claimable, ClaimingNode, checkpoints_of
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.saving import ExpertSaver
from dmoe_jax.node.server import ExpertNode, open_expert_node
from dmoe_jax.node.sharding import PlacedDevice, all_of
from dmoe_jax.peers.peer import SwarmPeer
from dmoe_jax.replicas import ReplicaConfig, replicating
from dmoe_net.identity import Contact
from dmoe_net.nursery import background_nursery


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedExpert:
    """An expert that somebody serves now."""

    contact: Contact
    """The node that serves it."""
    updates: int
    """Optimiser steps that it has taken."""


class Served:
    """Experts that this process serves. Made by `Swarm.serve`; they are served until `close` or the swarm's end."""

    def __init__(self, node: ExpertNode, backends: Mapping[str, ExpertBackend]) -> None:
        self.node = node
        self.backends = backends
        """Parameters and optimiser states by uid, as they are now. Claimed experts come and go."""
        self._leave = trio.Event()
        self._gone = trio.Event()

    @property
    def uids(self) -> tuple[str, ...]:
        """Uids of the experts."""
        return tuple(self.backends)

    async def close(self) -> None:
        """Refuse new calls, withdraw the experts from the swarm, answer what was accepted, and save once more if they
        are saved. `NodeConfig.leave_timeout_s` bounds the time for answers."""
        self._leave.set()
        await self._gone.wait()

    @property
    def is_closed(self) -> bool:
        """True if they are served no more."""
        return self._gone.is_set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Experts to serve, and the settings for it, as `Swarm.serve` has read them."""

    peer: SwarmPeer
    devices: Sequence[PlacedDevice]
    backends: dict[str, ExpertBackend]
    """Experts to begin with; none, if the node claims some."""
    config: NodeConfig
    saver: ExpertSaver | None
    period_s: float
    """Seconds between saves."""
    claimable: Claimable | None
    """Experts that it may claim, at first while programs are compiled. They begin with what the saver's folder has,
    else with their seeds."""
    replicas: ReplicaConfig | None
    compiling: AbstractAsyncContextManager[object]
    """Context to compile in, see `open_expert_node`."""
    on_progress: Callable[[str], None]

    async def run(self, task_status: trio.TaskStatus[Served]) -> None:
        """Serve until `Served.close`.

        Raises:
          CheckpointError: some experts could not be saved at the end.
        """
        served: Served | None = None
        claimer: Claimer | None = None

        def begin_to_claim(node: ExpertNode) -> None:
            nonlocal claimer
            if self.claimable is not None:
                # No living copies among the sources: an expert of which there is one is not vacant.
                sources = () if self.saver is None else (checkpoints_of(self.saver),)
                host = ClaimingNode(node, self.backends, self.devices, self.claimable.make, sources)
                claimer = host.claimer(self.peer, self.claimable, on_progress=self.on_progress)
                nursery.start_soon(claimer.run)

        peer = self.peer
        copies = replicating(
            peer.rpc,
            peer.dht,
            self.backends,
            swarm=self.config.swarm,
            device=all_of(self.devices),
            rng=peer.rng,
            config=self.replicas,
            on_progress=self.on_progress,
        )
        try:
            async with (
                background_nursery() as nursery,
                copies as replicas,
                open_expert_node(
                    peer.rpc,
                    peer.dht,
                    self.backends,
                    device=self.devices,
                    config=self.config,
                    prototypes=() if self.claimable is None else self.claimable.prototypes,
                    on_progress=self.on_progress,
                    on_open=begin_to_claim,
                    listing=replicas,
                    compiling=self.compiling,
                ) as node,
            ):
                if self.saver is not None:
                    nursery.start_soon(self.saver.run, self.period_s)
                if claimer is not None:
                    await claimer.settled.wait()
                served = Served(node, self.backends)
                task_status.started(served)
                await served._leave.wait()
                if claimer is not None:
                    claimer.stop()
        finally:
            try:
                if served is not None and self.saver is not None:
                    # After the withdrawal: nobody sends gradients any more.
                    with trio.CancelScope(shield=True):
                        await self.saver.save()
            finally:
                if self.saver is not None:
                    self.saver.close()
                if served is not None:
                    served._gone.set()
