"""The trunk of one process kept together with those of others, while its trainers go on.

`SharedTrunk.apply` calls the tree averager after each update, so rounds begin and are applied just as in a loop of
one's own. What is added here is for a process that was left behind: it takes the whole state of the one that is
furthest, parameters, optimiser state and step.
"""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import jax
import numpy as np

from dmoe_jax.averaging import (
    AveragingTotals,
    Round,
    TreeAverager,
    TreeAveragerConfig,
    open_tree_averager,
)
from dmoe_jax.averaging.settings import DEFAULTS
from dmoe_jax.device import Device
from dmoe_jax.trunk import SharedTrunk
from net.averaging.state.sharing import MAX_VERSION, SharedState, StateSource
from net.dht.node import DhtNode
from net.nursery import background_nursery
from net.rpc.base import Caller


class TrunkAveraging:
    """A trunk's averaging. Made by `open_trunk_averaging`.

    Args:
      trunk: shared by the trainers of this process; its updates drive the averager from now on.
      averager: of this process, for the trunk's parameters and optimiser.
      max_step: where the run ends; states that claim to be further are not taken.
    """

    def __init__(self, trunk: SharedTrunk, averager: TreeAverager, *, max_step: int | None = None) -> None:
        self._trunk = trunk
        self._averager = averager
        self._max_step = MAX_VERSION if max_step is None else max_step
        trunk.average_with(averager)

    @property
    def totals(self) -> AveragingTotals:
        """What the rounds so far came to."""
        return self._averager.totals

    @property
    def why_not(self) -> str:
        """Why the last round came to nothing, or why there are none now; empty if it gave an average."""
        return self._averager.why_not

    def headline(self) -> dict[str, Any]:
        """The totals by the names that reports give them."""
        return self.totals.headline()

    async def run(self) -> None:
        """Catch up whenever rounds come to nothing or others are ahead; runs until cancelled."""
        while True:
            await self._averager.wait_until_left_behind()
            await self.catch_up(min_lead=1)

    async def catch_up(self, *, min_lead: int) -> bool:
        """Take up the state of a process that is at least `min_lead` updates ahead; whether that was done.

        Not while a trainer is in the middle of an update; steps that are under way end as stale ones. Updates made
        while the state was on its way are kept if it is no longer ahead. A state of other shapes, of a step beyond
        the run's end or with values that are not finite is passed over.
        """
        taken = await self._averager.fetch_state(
            self._trunk.step, self._trunk.state, min_lead=min_lead, max_version=self._max_step
        )
        return taken is not None and await self._trunk.replace(*taken, min_lead=min_lead)


@asynccontextmanager
async def open_trunk_averaging(
    caller: Caller,
    dht: DhtNode,
    trunk: SharedTrunk,
    *,
    name: str,
    config: TreeAveragerConfig = DEFAULTS,
    max_step: int | None = None,
    device: Device | None = None,
    rng: random.Random | None = None,
    on_round: Callable[[Round], None] = lambda done: None,
) -> AsyncIterator[TrunkAveraging]:
    """The averaging of a trunk whose optimiser has a `moshpit_average` in it, as long as the block lasts.

    It makes this process a donor of its state. Arguments and errors are those of `open_tree_averager`; `max_step` is
    where the run ends.
    """
    async with (
        open_tree_averager(
            caller,
            dht,
            trunk.params,
            optimizer=trunk.optimizer,
            name=name,
            state=trunk_source(trunk),
            config=config,
            device=device,
            rng=rng,
            on_round=on_round,
        ) as averager,
        background_nursery() as nursery,
    ):
        averaging = TrunkAveraging(trunk, averager, max_step=max_step)
        nursery.start_soon(averaging.run)
        try:
            yield averaging
        finally:
            trunk.average_with(None)


def trunk_source(trunk: SharedTrunk) -> StateSource:
    """The trunk as a donor's state: parameters and optimiser state, of the version that its step says."""

    async def snapshot() -> SharedState:
        step, state = await trunk.snapshot()
        return SharedState(version=step, tensors=tuple(np.asarray(leaf) for leaf in jax.tree.leaves(state)))

    return StateSource(lambda: trunk.step, snapshot)
