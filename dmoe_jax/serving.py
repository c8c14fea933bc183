"""Experts that a process serves, from their compilation to their withdrawal; those that it claims, too."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

import trio

from dmoe_jax.claims.claimer import Claimer
from dmoe_jax.claims.host import Claimable, ClaimingNode, checkpoints_of
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.saving import ExpertSaver
from dmoe_jax.node.server import ExpertNode, open_expert_node
from dmoe_jax.node.sharding import PlacedDevice, all_of
from dmoe_jax.peer import SwarmPeer
from dmoe_jax.replicas import ReplicaConfig, Replicas, replicating
from net.identity import Contact
from net.nursery import background_nursery


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
        """By uid: parameters and optimiser states, as they are now. Of a node that claims experts they come and go."""
        self._leave = trio.Event()
        self._gone = trio.Event()

    @property
    def uids(self) -> tuple[str, ...]:
        """Which experts."""
        return tuple(self.backends)

    async def close(self) -> None:
        """Refuse new calls, withdraw the experts from the swarm, answer what was accepted, and save once more if they
        are saved. How long answers may take says `NodeConfig.leave_timeout_s`."""
        self._leave.set()
        await self._gone.wait()

    @property
    def is_closed(self) -> bool:
        """Whether they are served no more."""
        return self._gone.is_set()


def _replicating(
    peer: SwarmPeer,
    devices: Sequence[PlacedDevice],
    backends: Mapping[str, ExpertBackend],
    swarm: str,
    config: ReplicaConfig | None,
    on_progress: Callable[[str], None],
) -> AbstractAsyncContextManager[Replicas | None]:
    device = all_of(devices)
    return replicating(
        peer.rpc, peer.dht, backends, swarm=swarm, device=device, rng=peer.rng, config=config, on_progress=on_progress
    )


async def serve_until_left(
    peer: SwarmPeer,
    devices: Sequence[PlacedDevice],
    backends: dict[str, ExpertBackend],
    config: NodeConfig,
    saver: ExpertSaver | None,
    *,
    period_s: float,
    on_progress: Callable[[str], None],
    claimable: Claimable | None = None,
    compiling: AbstractAsyncContextManager[object] = nullcontext(),  # noqa: B008 (stateless)
    replicate: ReplicaConfig | None = None,
    task_status: trio.TaskStatus[Served] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve experts until `Served.close`; they are saved every `period_s` seconds and once more at the end.

    Args:
      backends: the experts to begin with; none, if it claims some.
      claimable: what it may claim; those are claimed that nobody serves, at first while the programs are compiled. They
        begin with what the saver's folder has, else with their seeds.
      compiling: see `open_expert_node`.
      replicate: the experts are replicas of those that other nodes serve, and begin with the state that they have
        there.

    Raises:
      CheckpointError: some experts could not be saved at the end.
    """
    served: Served | None = None
    claimer: Claimer | None = None

    def begin_to_claim(node: ExpertNode) -> None:
        nonlocal claimer
        if claimable is not None:
            # No living copies among the sources: an expert of which there is one is not vacant.
            sources = () if saver is None else (checkpoints_of(saver),)
            host = ClaimingNode(node, backends, devices, claimable.make, sources)
            claimer = host.claimer(peer, claimable, on_progress=on_progress)
            nursery.start_soon(claimer.run)

    try:
        async with (
            background_nursery() as nursery,
            _replicating(peer, devices, backends, config.swarm, replicate, on_progress) as replicas,
            open_expert_node(
                peer.rpc,
                peer.dht,
                backends,
                device=devices,
                config=config,
                prototypes=() if claimable is None else claimable.prototypes,
                on_progress=on_progress,
                on_open=begin_to_claim,
                listing=replicas,
                compiling=compiling,
            ) as node,
        ):
            if saver is not None:
                nursery.start_soon(saver.run, period_s)
            if claimer is not None:
                await claimer.settled.wait()
            served = Served(node, backends)
            task_status.started(served)
            await served._leave.wait()
            if claimer is not None:
                claimer.stop()
    finally:
        try:
            if served is not None and saver is not None:
                # After the withdrawal: nobody sends gradients any more.
                with trio.CancelScope(shield=True):
                    await saver.save()
        finally:
            if saver is not None:
                saver.close()
            if served is not None:
                served._gone.set()
