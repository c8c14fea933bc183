"""Making a global step: what is gathered goes to the group, and the parameters follow what the group brought."""

from collections.abc import Callable

import trio

from dmoe_jax.collaboration.forming import StepForming
from dmoe_jax.collaboration.peer_state import PeerState
from dmoe_jax.collaboration.settings import GlobalStep
from dmoe_jax.collaboration.standing import Standing, UnderWay
from net.averaging.collaboration.board import ProgressBoard
from net.averaging.collaboration.progress import next_chain
from net.averaging.collaboration.rounds import Averaged, StepAveraging
from net.averaging.collaboration.step_log import StepBrought, StepLog
from net.averaging.grouping.group import Group
from net.identity import PeerId
from net.types import Array


class Stepping:
    """Makes steps with the group that was formed.

    Args:
      state, standing: of this peer.
      rounds: averages. forming: knows the group. board: who is how far.
      own: this peer. log: keeps what steps bring, where somebody wants it.
      delayed: whether averaging runs beside the next batch, in `nursery`.
      on_step: called after each global step.
    """

    def __init__(
        self,
        state: PeerState,
        standing: Standing,
        *,
        rounds: StepAveraging,
        forming: StepForming,
        board: ProgressBoard,
        own: PeerId,
        log: StepLog,
        delayed: bool,
        nursery: trio.Nursery,
        on_step: Callable[[GlobalStep], None],
    ) -> None:
        self._state = state
        self._standing = standing
        self._rounds = rounds
        self._forming = forming
        self._board = board
        self._own = own
        self._log = log
        self._delayed = delayed
        self._nursery = nursery
        self._on_step = on_step
        self.averaged_s = 0.0
        """Seconds from this peer's last micro-batch to the last step."""

    async def step(self, stopped_at: float) -> bool:
        """Bring what is gathered to the step that is coming, and step with what all brought.

        Args:
          stopped_at: when this peer ended its last micro-batch.

        Returns: whether the parameters have changed.
        """
        forming = self._forming
        coming = forming.coming
        assert coming is not None
        await coming.found.wait()
        view = self._board.view
        try:
            if coming.group is None and (view.others or view.leader is not None):
                self._standing.totals.reasons["no group found"] += coming.has_company
                return False
            vector, samples, overflows = await self._state.contribution()
            begun = UnderWay(samples, stopped_at)
            if self._delayed:
                return await self._step_with_the_last(begun, coming.group, vector, overflows)
            await self._average(begun, coming.group, vector, overflows)
            if begun.averaged is None:
                return False
            self._standing.gathered = 0.0
            await self._state.step(begun.averaged.mean, begun.averaged.weight, begun.averaged.notes)
            self._standing.step += 1
            self._settled(begun, begun.averaged)
            return True
        finally:
            forming.over()

    async def _step_with_the_last(self, begun: UnderWay, group: Group | None, vector: Array, overflows: float) -> bool:
        """Make the step whose averaging ran beside this batch, and leave the averaging of this batch to run beside the
        next one. Returns whether the parameters have changed."""
        standing = self._standing
        last, standing.under_way = standing.under_way, begun
        standing.gathered = 0.0
        standing.step += 1
        if last is None or last.averaged is None:
            await self._state.empty()
        else:
            await self._state.step(last.averaged.mean, last.averaged.weight, last.averaged.notes)

        async def average() -> None:
            await self._average(begun, group, vector, overflows)
            if standing.under_way is begun:  # else another peer's state was taken meanwhile
                if begun.averaged is None:
                    standing.totals.samples_lost += begun.own_samples
                else:
                    self._settled(begun, begun.averaged)
            begun.done.set()
            self._forming.changed()

        self._nursery.start_soon(average)
        return last is not None and last.averaged is not None

    async def _average(self, begun: UnderWay, group: Group | None, vector: Array, overflows: float) -> None:
        """Average with the group, or alone; the outcome is in `begun`."""
        samples = begun.own_samples
        if group is None:
            begun.averaged = Averaged(
                mean=vector, weight=samples, notes=overflows, group_id=self._own.raw, members=(self._own,), attempts=0
            )
            return
        begun.averaged = await self._rounds.average(group, vector, weight=samples, note=overflows)
        if begun.averaged is None:
            self._standing.totals.reasons["the group did not settle"] += 1

    def _settled(self, begun: UnderWay, averaged: Averaged) -> None:
        """All members of the group have the average, and know it."""
        standing, totals, now = self._standing, self._standing.totals, trio.current_time()
        brought = StepBrought(
            number=standing.step,
            chain_before=standing.chain,
            group_id=averaged.group_id,
            weight=averaged.weight,
            notes=averaged.notes,
            mean=averaged.mean,
        )
        if not self._state.is_exact(averaged.mean):  # else who follows with what travels would come to other numbers
            self._log.keep(brought)
        standing.chain = next_chain(standing.chain, averaged.group_id)
        standing.trained += averaged.weight
        totals.steps += 1
        totals.alone += not averaged.attempts
        totals.samples += begun.own_samples
        totals.whole += averaged.weight
        self._board.advanced(averaged.members, standing.step, standing.chain)
        done = GlobalStep(
            number=standing.step,
            peers=len(averaged.members),
            samples=averaged.weight,
            own_samples=begun.own_samples,
            gathered_s=now - standing.last_step_at,
            averaged_s=now - begun.stopped_at,
            attempts=averaged.attempts,
        )
        standing.last_step_at, self.averaged_s = now, done.averaged_s
        self._on_step(done)
