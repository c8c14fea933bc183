"""When a collaboration's next step begins, and the group that makes it; beside the computing."""

import random
from dataclasses import replace

import trio

from dmoe_jax.collaboration.state import CollaborationState, ComingStep, fewest_of
from net.averaging.collaboration.board import ProgressBoard
from net.averaging.collaboration.progress import Report
from net.averaging.collaboration.rounds import Averaged, StepAveraging
from net.averaging.grouping.group import Group
from net.averaging.plan import AveragingPlan
from net.dht.node import DhtNode
from net.nursery import background_nursery
from net.rpc.base import Caller


class StepForming:
    """Hears how far the others are, and finds and asks the groups of steps.

    Args:
      state: of this peer.
      caller: places and serves the calls. dht: where peers report and groups form.
      plan: what all agree on. name: of the collaboration, within the plan.
      rng: draws what is drawn.
    """

    def __init__(
        self,
        state: CollaborationState,
        caller: Caller,
        dht: DhtNode,
        *,
        plan: AveragingPlan,
        name: str,
        nursery: trio.Nursery,
        rng: random.Random,
    ) -> None:
        self._state = state
        self._caller = caller
        self._clock = dht.clock
        self._nursery = nursery
        self._changed = trio.Event()
        config = state.config
        self.board = ProgressBoard(
            caller,
            dht,
            prefix=name,
            own=self._report,
            target=config.target_batch_size,
            silence_s=config.silence_s,
            on_begin=self._heard,
        )
        """Reports of everybody."""
        self.rounds = StepAveraging(
            caller,
            dht,
            prefix=name,
            plan=plan,
            config=config.rounds(),
            quiet_s=lambda: state.quiet_s(self.board.view, self.board.num_behind, self._clock.now()),
            nursery=nursery,
            rng=rng,
            on_lost=self.board.forget,
        )
        """Finds groups, and averages in them."""

    def _report(self) -> Report | None:
        own, now, local_s = self._caller, self._clock.now(), trio.current_time()
        if self._state.is_away(local_s):
            return None
        return self._state.report(own.peer_id, own.address, self.rounds.role, now=now, local_s=local_s)

    async def run(self) -> None:
        """Form groups when steps are near, until cancelled."""
        while True:
            at = self._state.due(self.board.view, now=self._clock.now(), local_s=trio.current_time())
            if at is not None:
                self._nursery.start_soon(self._form, self._state.begin(at))
                self._nursery.start_soon(self._tell, at)
                self.wake()
            await self.news()

    async def news(self) -> None:
        """Wait for a change, or until it is time to look again."""
        view = self.board.view
        left = view.ends_at - self._clock.now() - self._state.lead_s(view)
        with trio.move_on_after(min(max(left, 0.05), 0.5)):
            await self._changed.wait()

    async def changes(self) -> None:
        """Wait for a change."""
        await self._changed.wait()

    def wake(self) -> None:
        """Have those look again who wait for a change."""
        self._changed.set()
        self._changed = trio.Event()

    def changed(self) -> None:
        """Something has changed that the others shall know."""
        self.board.refresh()
        self.wake()

    def arrived(self) -> None:
        """This peer has come to where the others are: tell them, who may be about to begin."""
        self.changed()
        self._nursery.start_soon(self._tell, None)

    async def average(self, group: Group | None, own: Averaged) -> Averaged | None:
        """The average of the group, or without one of this peer alone; None if the group did not settle."""
        if group is None:
            me = self._caller.peer_id
            return replace(own, group_id=me.raw, members=(me,))
        averaged = await self.rounds.average(group, own.mean, weight=own.weight, note=own.notes)
        if averaged is None:
            self._state.totals.reasons["the group did not settle"] += 1
        return averaged

    async def _tell(self, at: float | None) -> None:
        self._state.answer_s = await self.board.tell(at) or self._state.answer_s

    def _heard(self, step: int, chain: bytes, at: float | None) -> float | None:
        coming = self._state.coming
        before = None if coming is None else coming.begins_at
        view, now, local_s = self.board.view, self._clock.now(), trio.current_time()
        begins_at = self._state.heard((step, chain), at, view, now=now, local_s=local_s)
        if coming is None and self._state.coming is not None:
            self._nursery.start_soon(self._form, self._state.coming)
            self.wake()
        elif begins_at is not None and before is not None and begins_at > before:
            self.rounds.postpone(begins_at)
        return begins_at

    async def _form(self, coming: ComingStep) -> None:
        """Look for the group of a step, beside the computing."""
        with trio.move_on_after(max(0.0, coming.begins_at - self._clock.now())):
            while not self.board.view.others:
                await self.board.wait_for_news()
        if self.board.view.others:
            coming.has_company = True
            async with background_nursery() as nursery:
                nursery.start_soon(self._until_made, coming.chain, nursery.cancel_scope)
                coming.group = await self.rounds.find_group(
                    step=coming.step,
                    chain=coming.chain,
                    begins_at=coming.begins_at,
                    others=self.board.contacts,
                    fewest=lambda: fewest_of(self.board.view),
                )
        coming.is_found = True
        self.wake()

    async def _until_made(self, chain: bytes, scope: trio.CancelScope) -> None:
        """Cancel `scope` once others have made the step: whoever is missed there need not look on."""
        # With delayed updates somebody of our chain may be a step further and have it under way, with us.
        while (leader := self.board.view.leader) is None or leader.chain == chain:
            await self.board.wait_for_news()
        scope.cancel()
