"""The trunk parameters of trainers in different processes, kept together by Moshpit averaging.

Every process trains on as before. Now and then one sends its parameters as they are to its group, and when the mean
comes back, what it differs from what was sent is added to the parameters as they are by then: progress made meanwhile
is kept (Ryabinin et al. 2021, section 3; hivemind's delayed averaging). The optimiser's statistics stay each process's
own, but for a newcomer, which takes them with everything else from a donor.
"""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax.device import Device
from dmoe_jax.optim.tree_vectors import TreeLayout
from dmoe_jax.trunk import SharedTrunk
from net.averaging.averager import Averager, AveragingStep
from net.averaging.state.download import MAX_VERSION, SharedState, StateUnavailable
from net.averaging.state.sharing import StateSource

MISSED_BEFORE_CATCHING_UP = 3
"""Averages in a row that may come to nothing before a process asks whether the others have left it behind."""

_CATCH_UP_TIMEOUT_S = 120.0
_CATCH_UP_ATTEMPTS = 3
"""A connection may break; that nobody is ahead is no reason to wait."""


@dataclass(slots=True)
class AveragingTotals:
    """What a run's averaging came to."""

    done: int = 0
    """Averages that were applied."""
    missed: int = 0
    """Rounds in which nobody was met, or nothing came back."""
    rejected: int = 0
    """Averages that were not finite, or not made since the own parameters were not."""
    peers_met: int = 0
    """Sum of the others in the groups of those that were applied."""
    caught_up: int = 0
    """Whole states taken from others."""


def trunk_source(trunk: SharedTrunk) -> StateSource:
    """The trunk as a donor's state: parameters and optimiser state, of the version that its step says."""

    async def snapshot() -> SharedState:
        step, state = await trunk.snapshot()
        return SharedState(version=step, tensors=tuple(np.asarray(leaf) for leaf in jax.tree.leaves(state)))

    return StateSource(lambda: trunk.step, snapshot)


def _is_finite(state: SharedState) -> bool:
    return all(np.isfinite(tensor).all() for tensor in state.tensors if jnp.issubdtype(tensor.dtype, jnp.inexact))


class TrunkAveraging:
    """Averages one process's trunk with others'.

    Args:
      trunk: shared by the trainers of this process.
      averager: of this process, for vectors of the layout.
      layout: of the trunk's parameters.
      device: runs the copies.
      max_step: states that claim to be further are not taken: a run has an end, and a claim costs nothing.
    """

    def __init__(
        self, trunk: SharedTrunk, averager: Averager, layout: TreeLayout, device: Device, *, max_step: int | None = None
    ) -> None:
        self._trunk = trunk
        self._averager = averager
        self._layout = layout
        self._device = device
        self._max_step = MAX_VERSION if max_step is None else max_step
        self._missed_in_a_row = 0
        self.why_not = ""
        """Why there is no averaging now; empty if there is."""
        self.totals = AveragingTotals()

    async def average(self, *, weight: float = 1.0) -> AveragingStep | None:
        """One round, beside the training. If cancelled, the trunk has the whole difference or nothing of it.

        After some rounds in a row that came to nothing, a state that is ahead of this one is taken up. As long as
        others are ahead and their state cannot be had, there is no average: this trunk would hold theirs back.

        Returns: what the round came to; None if there was none.
        """
        if self.why_not:
            await self.catch_up(min_lead=1)
        if self.why_not:
            self.totals.missed += 1
            return None
        sent = await self._device.run(self._layout.to_vector, self._trunk.params)
        if not np.isfinite(sent).all():
            self.why_not = "the trunk's parameters are not finite"
            self.totals.rejected += 1
            return None
        done = await self._averager.step(sent, weight=weight)
        if done.received == 0:
            self.totals.missed += 1
            self._missed_in_a_row += 1
            if self._missed_in_a_row >= MISSED_BEFORE_CATCHING_UP:
                self._missed_in_a_row = 0
                await self.catch_up(min_lead=1)
            return done
        self._missed_in_a_row = 0
        difference = done.average - sent
        if not np.isfinite(difference).all():
            self.totals.rejected += 1
            return done
        await self._trunk.shift(await self._device.run(self._layout.to_tree, difference))
        self.totals.done += 1
        self.totals.peers_met += len(done.peers) - 1
        return done

    async def catch_up(self, *, min_lead: int, timeout_s: float = _CATCH_UP_TIMEOUT_S) -> bool:
        """Take up the state of a peer that is at least `min_lead` updates ahead; whether that was done.

        Not while a trainer is in the middle of an update; steps that are under way end as stale ones. Updates made
        while the state was on its way are kept if it is no longer ahead. A state of other shapes, of a step beyond
        the run's end or with values that are not finite is passed over.
        """
        leaves, structure = jax.tree.flatten(self._trunk.state)
        table = [[leaf.dtype.name, list(leaf.shape)] for leaf in leaves]
        try:
            state = await self._averager.download_state(
                min_version=self._trunk.step + min_lead,
                timeout_s=timeout_s,
                attempts=_CATCH_UP_ATTEMPTS,
                expects=lambda version, theirs: version <= self._max_step and theirs == table,
                accepts=_is_finite,
            )
        except StateUnavailable as error:
            self.why_not = str(error)
            return False
        self.why_not = ""
        if state is None:
            return False
        tree = jax.tree.unflatten(structure, [jnp.array(tensor) for tensor in state.tensors])
        if not await self._trunk.replace(state.version, tree, min_lead=min_lead):
            return False
        self.totals.caught_up += 1
        return True

    def headline(self) -> dict[str, Any]:
        """Totals for a report."""
        totals = asdict(self.totals)
        met = totals.pop("peers_met")
        named = {f"averages_{name}": value for name, value in totals.items() if name != "caught_up"}
        mean = 1 + met / self.totals.done if self.totals.done else None
        return {**named, "mean_group_size": mean, "states_taken": self.totals.caught_up}
