"""When a collaboration's next step begins, and the group that makes it; beside the computing."""

from dataclasses import dataclass, replace

import trio

from dmoe_jax.collaboration.state import CollaborationState, ComingStep
from dmoe_jax.peers.peer import SwarmPeer
from dmoe_net.averaging.collaboration.board import ProgressBoard
from dmoe_net.averaging.collaboration.progress import Report
from dmoe_net.averaging.collaboration.rounds import Averaged, StepAveraging
from dmoe_net.averaging.grouping.group import Group
from dmoe_net.averaging.plan import AveragingPlan
from dmoe_net.averaging.replica import Replica
from dmoe_net.nursery import background_nursery


@dataclass(kw_only=True, eq=False)
class StepForming:
    """Hears how far the others are, and finds and asks the groups of steps."""

    state: CollaborationState
    peer: SwarmPeer
    plan: AveragingPlan
    name: str
    """Prefix of the collaboration, within the plan."""
    nursery: trio.Nursery
    replica: Replica | None = None
    """The processes of which this one is part; None: this one alone."""

    def __post_init__(self) -> None:
        config = self.state.config
        self._changed = trio.Event()
        self.board = board = ProgressBoard(
            caller=self.peer.rpc,
            dht=self.peer.dht,
            prefix=self.name,
            own=self._report,
            target=config.target_batch_size,
            silence_s=config.silence_s,
            on_begin=self._heard,
        )
        self.rounds = StepAveraging(
            board=board,
            plan=self.plan,
            config=config.rounds(),
            nursery=self.nursery,
            rng=self.peer.rng,
            replica=self.replica,
        )

    def _report(self) -> Report | None:
        own, now, local_s = self.peer.rpc, self.peer.dht.clock.now(), trio.current_time()
        if self.state.is_away(local_s):
            return None
        return self.state.report(own.peer_id, own.address, self.rounds.role, now=now, local_s=local_s)

    async def run(self) -> None:
        """Form groups when steps are near, until cancelled."""
        while True:
            at = self.state.due(self.board.view, now=self.peer.dht.clock.now(), local_s=trio.current_time())
            if at is not None:
                self.nursery.start_soon(self._form, self.state.begin(at))
                self.nursery.start_soon(self._tell, at)
                self.wake()
            await self.news()

    async def news(self) -> None:
        """Wait for a change, or until it is time to look again."""
        view = self.board.view
        left = view.ends_at - self.peer.dht.clock.now() - self.state.lead_s(view)
        with trio.move_on_after(min(max(left, 0.05), 0.5)):
            await self._changed.wait()

    async def changes(self) -> None:
        await self._changed.wait()

    def wake(self) -> None:
        """Have those look again who wait for a change."""
        self._changed.set()
        self._changed = trio.Event()

    def changed(self) -> None:
        """Wake them, and let the others know what has changed."""
        self.board.refresh()
        self.wake()

    def arrived(self) -> None:
        """Tell the others, who may be about to begin, that this peer has come to where they are."""
        self.changed()
        self.nursery.start_soon(self._tell, None)

    async def average(self, group: Group | None, own: Averaged, mark: str = "") -> Averaged | None:
        """Return the average of the group, or without one of this peer alone; None if the group did not settle.

        `mark` names the step for the other processes of a replica.
        """
        if group is None:
            me = self.peer.rpc.peer_id
            return replace(own, group_id=me.raw, members=(me,))
        averaged = await self.rounds.average(group, own.mean, weight=own.weight, note=own.notes, mark=mark)
        if averaged is None:
            self.state.totals.reasons["the group did not settle"] += 1
        return averaged

    async def _tell(self, at: float | None) -> None:
        self.state.answer_s = await self.board.tell(at) or self.state.answer_s

    def _heard(self, step: int, chain: bytes, at: float | None) -> float | None:
        coming = self.state.coming
        before = None if coming is None else coming.begins_at
        view, now, local_s = self.board.view, self.peer.dht.clock.now(), trio.current_time()
        begins_at = self.state.heard((step, chain), at, view, now=now, local_s=local_s)
        if coming is None and self.state.coming is not None:
            self.nursery.start_soon(self._form, self.state.coming)
            self.wake()
        elif begins_at is not None and before is not None and begins_at > before:
            self.rounds.postpone(begins_at)
        return begins_at

    async def _form(self, coming: ComingStep) -> None:
        """Look for the group of a step, beside the computing."""
        with trio.move_on_after(max(0.0, coming.begins_at - self.peer.dht.clock.now())):
            while not self.board.view.others:
                await self.board.wait_for_news()
        if self.board.view.others:
            coming.has_company = True
            async with background_nursery() as nursery:
                nursery.start_soon(self._until_made, coming.chain, nursery.cancel_scope)
                coming.group = await self.rounds.find_group(
                    step=coming.step, chain=coming.chain, begins_at=coming.begins_at
                )
        coming.is_found = True
        self.wake()

    async def _until_made(self, chain: bytes, scope: trio.CancelScope) -> None:
        """Cancel `scope` once others have made the step: whoever is missed there need not look on."""
        # With delayed updates somebody of our chain may be a step further and have it under way, with us.
        while (leader := self.board.view.leader) is None or leader.chain == chain:
            await self.board.wait_for_news()
        scope.cancel()
