"""What a `Swarm` offers to those who train together: averaging, one large batch, and being listed."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import jax
import optax

from dmoe_jax.averaging import Round, TreeAverager, TreeAveragerConfig, open_tree_averager
from dmoe_jax.collaboration import Collaboration, CollaborationConfig, GlobalStep, open_collaboration
from dmoe_jax.collaboration.trainers import CollaborativeTrainers
from dmoe_jax.device import Device
from dmoe_jax.members import listed_member
from dmoe_jax.model import Model
from dmoe_jax.optim.collaborative import LossScale, Shared, collaborative
from dmoe_jax.peer import SwarmPeer
from dmoe_jax.trainer import iterators_of
from dmoe_jax.types import PyTree
from net.dht.node import DhtNode
from net.dht.records import Value
from net.identity import Contact, PeerId
from net.rpc.base import Caller


class AveragingSwarm:
    """The part of `dmoe_jax.swarm.Swarm` that is about training together."""

    name: str
    peer: SwarmPeer
    device: Device
    seed: int

    @property
    def rpc(self) -> Caller:
        """Places and serves calls."""
        return self.peer.rpc

    @property
    def dht(self) -> DhtNode:
        """Finds peers and records."""
        return self.peer.dht

    @property
    def peer_id(self) -> PeerId:
        """Who this process is."""
        return self.rpc.peer_id

    @asynccontextmanager
    async def announced(self, role: str, facts: Callable[[], Mapping[str, Value]]) -> AsyncIterator[None]:
        """List this process in the swarm in a role, such as "trainer", as long as the block lasts.

        Args:
          facts: what `dmoe status` shows of it, asked again every ten seconds; see `dmoe_jax.members.Member`.
        """
        contact = None if self.rpc.address is None else Contact(self.rpc.peer_id, self.rpc.address)

        def own() -> dict[str, Value]:
            return {"role": role, **facts()}

        async with listed_member(self.dht, self.name, self.peer_id, contact, own):
            yield

    @asynccontextmanager
    async def averager(
        self,
        params: PyTree,
        optimizer: optax.GradientTransformation,
        *,
        name: str,
        state: Callable[[], tuple[int, PyTree]] | None = None,
        config: TreeAveragerConfig = TreeAveragerConfig(),  # noqa: B008 (frozen)
        on_round: Callable[[Round], None] = lambda done: None,
    ) -> AsyncIterator[TreeAverager]:
        """This process's part in averaging with others, for a training loop of one's own; see `dmoe_jax.averaging`.

        Args:
          params: the model's, for their names and shapes.
          optimizer: an optimiser with one `moshpit_average` in it.
          name: peers that give the same name average with each other.
          state: (how far this peer is, its whole state), which newcomers may take; None: parameters and optimiser
            state, as `TreeAverager.step` is given them, and a late joiner's `step` takes them.
          config: groups, windows, compression, role and speeds.
          on_round: called after each round.

        Raises:
          ValueError: as of `open_tree_averager`.
        """
        async with (
            open_tree_averager(
                self.rpc,
                self.dht,
                params,
                optimizer=optimizer,
                name=name,
                state=state,
                config=config,
                device=self.device,
                rng=self.peer.rng,
                on_round=on_round,
            ) as averager,
            self.announced("averager", lambda: {"group": name, "averages": averager.totals.done}),
        ):
            yield averager

    @asynccontextmanager
    async def collaboration(
        self,
        params: PyTree,
        optimizer: optax.GradientTransformation,
        *,
        target_batch_size: int = 4096,
        average: Shared = "gradients",
        outer: optax.GradientTransformation | None = None,
        loss_scale: LossScale | None = None,
        name: str = "collaboration",
        config: CollaborationConfig = CollaborationConfig(),  # noqa: B008 (frozen)
        on_step: Callable[[GlobalStep], None] = lambda done: None,
    ) -> AsyncIterator[Collaboration]:
        """This process's part in one large batch, for a training loop of one's own; see `dmoe_jax.collaboration`.

        Args:
          params: the model's, to begin with if nobody else has begun.
          loss_scale: for gradients of few bits; None: losses are as they are.
          optimizer, target_batch_size, average, outer, name, config, on_step: as of `collaborate`.

        Raises:
          ValueError: an argument is out of range.
        """
        async with (
            open_collaboration(
                self.rpc,
                self.dht,
                params,
                together=collaborative(optimizer, shared=average, outer=outer, loss_scale=loss_scale),
                name=name,
                config=replace(config, target_batch_size=target_batch_size),
                device=self.device,
                rng=self.peer.rng,
                on_step=on_step,
            ) as peer,
            self.announced("collaborator", lambda: {"group": name, **peer.facts()}),
        ):
            yield peer

    @asynccontextmanager
    async def collaborate(
        self,
        model: Model,
        optimizer: optax.GradientTransformation,
        batches: Iterator[Any] | Sequence[Iterator[Any]],
        *,
        target_batch_size: int = 4096,
        average: Shared = "gradients",
        outer: optax.GradientTransformation | None = None,
        name: str = "collaboration",
        params: PyTree | None = None,
        seed: int | None = None,
        config: CollaborationConfig = CollaborationConfig(),  # noqa: B008 (frozen)
        on_step: Callable[[GlobalStep], None] = lambda done: None,
    ) -> AsyncIterator[CollaborativeTrainers]:
        """Train one model with all who give the same name, as one machine with a large batch (DeDLOC).

        Args:
          model: what is trained. optimizer: of its own parameters, the same for all; schedules count global steps.
          batches: one iterator for each trainer of this process, other data than the other processes'.
          target_batch_size: samples (for a language model: tokens) of all processes that make a step.
          average: what is shared: gradients; or parameters, or DiLoCo's pseudo-gradients, of processes that step by
            themselves in between. outer: optimiser of the pseudo-gradients.
          name: whose batch it is.
          params: parameters to begin with, if nobody else has begun; None: `model.init`, from the seed.
          seed: of initial parameters and of all chance in training; None: the swarm's.
          config: role, times and bandwidth; `target_batch_size` here stands, and `model.meaning`.
          on_step: called after each global step.

        Raises:
          ValueError: an argument is out of range.
        """
        several, seed = iterators_of(batches), self.seed if seed is None else seed
        params = model.init(jax.random.key(seed)) if params is None else params
        async with self.collaboration(
            params,
            optimizer,
            target_batch_size=target_batch_size,
            average=average,
            outer=outer,
            name=name,
            config=replace(config, meaning=model.meaning or config.meaning),
            on_step=on_step,
        ) as peer:
            yield CollaborativeTrainers(model, peer, several, seed=seed)
