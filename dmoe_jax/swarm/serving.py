"""Experts that a process serves, from their making to their withdrawal; those that it claims, too."""

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import optax
import trio

from dmoe_jax.experts.base import Expert
from dmoe_jax.node.backend import ExpertBackend, make_backends
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.saving import ExpertSaver
from dmoe_jax.node.server import ExpertNode, open_expert_node
from dmoe_jax.node.sharding import PlacedDevice, all_of
from dmoe_jax.peers.peer import SwarmPeer
from dmoe_jax.placement.claimer import Claimer
from dmoe_jax.placement.config import PlacementConfig
from dmoe_jax.placement.holder import Holder
from dmoe_jax.placement.host import Claimable, ClaimingNode, claimable_of, fixed_of
from dmoe_jax.placement.replicas import Replicas, replicating
from dmoe_net.identity import Contact
from dmoe_net.nursery import background_nursery

_log = logging.getLogger(__name__)

_SLOW_S = 5.0
"""Seconds after which the log tells the progress of `serve`."""


@contextmanager
def told_when_slow(on_progress: Callable[[str], None] | None) -> Iterator[Callable[[str], None]]:
    """Pass on the progress that the block tells; without `on_progress` to the log, after five seconds and then ever
    less often, so that nobody waits for minutes without a word."""
    if on_progress is not None:
        yield on_progress
        return
    doing, done, began = "preparing experts", threading.Event(), time.monotonic()

    def note(text: str) -> None:
        nonlocal doing
        doing = text

    def tell() -> None:  # in a thread: in virtual time, and while XLA compiles, nothing else runs
        pause_s = _SLOW_S
        while not done.wait(pause_s):
            _log.warning("serve, after %.0f s: %s", time.monotonic() - began, doing)
            pause_s *= 2

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield note
    finally:
        done.set()


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
class Hand:
    """Experts that were made for a node, and the means to claim and save more. Made by `Serving.prepare`."""

    backends: dict[str, ExpertBackend]
    """Experts to begin with; none, if the node claims some."""
    claimable: Claimable | None
    """Experts that it may claim, at first while programs are compiled. They begin with the state of another holder,
    where several are wanted, else with what the saver's folder has, else with their seeds."""
    saver: ExpertSaver | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Settings of serving, as `Swarm.serve` has read them."""

    peer: SwarmPeer
    devices: Sequence[PlacedDevice]
    config: NodeConfig
    folder: Path | None
    """Folder of the experts' checkpoints."""
    period_s: float
    """Seconds between saves."""
    placement: PlacementConfig
    compiling: AbstractAsyncContextManager[object]
    """Context to compile in, see `open_expert_node`."""
    on_progress: Callable[[str], None]

    async def prepare(
        self, experts: Mapping[str, Expert], optimizer: optax.GradientTransformation | None, *, seed: int
    ) -> Hand:
        """Make the experts, and take up those that were saved. Arguments and errors are those of `Swarm.serve`."""
        device, places = all_of(self.devices), [each.place for each in self.devices]
        claimable: Claimable | None = None
        if self.placement.claims:
            make_claimable = functools.partial(claimable_of, seed=seed, places=places)
            claimable = await device.run(make_claimable, experts, self.placement, optimizer)
            experts = fixed_of(experts, self.placement)
        backends: dict[str, ExpertBackend] = {}
        if claimable is None or experts:
            make = functools.partial(make_backends, seed=seed, places=places)
            backends = await device.run(make, experts, optimizer)
        saver = None if self.folder is None else ExpertSaver(self.folder, backends, self.devices)
        # Those that claim or replicate share a folder: they hand experts to each other, or serve the same ones.
        alone = not (self.placement.claims or self.placement.replicates)
        if saver is not None and (restored := await saver.restore(alone=alone)):
            several = f"{len(restored)} of {len(backends)} experts"
            self.on_progress(f"{several} go on from {self.folder} ({sum(restored.values())} updates)")
        return Hand(backends=backends, claimable=claimable, saver=saver)

    async def run(self, hand: Hand, task_status: trio.TaskStatus[Served]) -> None:
        """Serve until `Served.close`.

        Raises:
          CheckpointError: some experts could not be saved at the end.
        """
        served: Served | None = None
        claimer: Claimer | None = None

        def opened(node: ExpertNode, replicas: Replicas | None) -> None:
            nonlocal claimer
            node.replicas = replicas
            if hand.claimable is not None:
                # Where one holder is wanted there is no living one to ask: the expert would not be vacant.
                host = ClaimingNode(
                    node=node,
                    backends=hand.backends,
                    devices=self.devices,
                    make=hand.claimable.make,
                    replicas=replicas,
                    saver=hand.saver,
                )
                claimer = Claimer(holder, hand.claimable.uids, host, on_progress=self.on_progress)
                node.claims = claimer.status
                nursery.start_soon(claimer.run)

        peer = self.peer
        holder = Holder(
            peer=peer,
            swarm=self.config.swarm,
            backends=hand.backends,
            device=all_of(self.devices),
            config=self.placement,
        )
        try:
            async with (
                background_nursery() as nursery,
                replicating(holder, self.on_progress) as replicas,
                open_expert_node(
                    peer.rpc,
                    peer.dht,
                    hand.backends,
                    device=self.devices,
                    config=self.config,
                    prototypes=() if hand.claimable is None else hand.claimable.prototypes,
                    on_progress=self.on_progress,
                    on_open=lambda node: opened(node, replicas),
                    shares=self.placement.claims or self.placement.replicates,
                    compiling=self.compiling,
                ) as node,
            ):
                if hand.saver is not None:
                    nursery.start_soon(hand.saver.run, self.period_s)
                if claimer is not None:
                    await claimer.settled.wait()
                served = Served(node, hand.backends)
                task_status.started(served)
                await served._leave.wait()
                if claimer is not None:
                    claimer.scope.cancel()
        finally:
            try:
                if served is not None and hand.saver is not None:
                    # After the withdrawal: nobody sends gradients any more.
                    with trio.CancelScope(shield=True):
                        await hand.saver.save()
            finally:
                if hand.saver is not None:
                    hand.saver.close()
                if served is not None:
                    served._gone.set()
