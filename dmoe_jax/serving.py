"""Experts that a process serves, from their compilation to their withdrawal."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import trio

from dmoe_jax.device import Device
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.saving import ExpertSaver
from dmoe_jax.node.server import ExpertNode, NodeConfig, open_expert_node
from dmoe_jax.peer import SwarmPeer
from dmoe_jax.replicas import ReplicaConfig, replicating
from net.identity import Contact


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
        self.backends = dict(backends)
        """By uid: parameters and optimiser states, as they are now."""
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


async def serve_until_left(
    peer: SwarmPeer,
    device: Device,
    backends: dict[str, ExpertBackend],
    config: NodeConfig,
    saver: ExpertSaver | None,
    *,
    period_s: float,
    on_progress: Callable[[str], None],
    replicate: ReplicaConfig | None = None,
    task_status: trio.TaskStatus[Served] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve experts until `Served.close`; they are saved every `period_s` seconds and once more at the end.

    With `replicate` they are replicas of those that other nodes serve, and begin with the state that they have there.
    """
    served: Served | None = None
    try:
        async with (
            replicating(
                peer.rpc,
                peer.dht,
                backends,
                swarm=config.swarm,
                device=device,
                rng=peer.rng,
                config=replicate,
                on_progress=on_progress,
            ) as listing,
            open_expert_node(
                peer.rpc, peer.dht, backends, device=device, config=config, on_progress=on_progress, listing=listing
            ) as node,
        ):
            served = Served(node, backends)
            task_status.started(served)
            async with trio.open_nursery() as nursery:
                if saver is not None:
                    nursery.start_soon(saver.run, period_s)
                await served._leave.wait()
                nursery.cancel_scope.cancel()
    finally:
        if served is not None:
            # After the withdrawal: nobody sends gradients any more.
            with trio.CancelScope(shield=True):
                if saver is not None:
                    await saver.save()
            served._gone.set()
