"""When a collaboration's next step begins, and the group that makes it; beside the computing."""

from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from net.averaging.collaboration.board import Beginning, ProgressBoard
from net.averaging.collaboration.progress import Forecast
from net.averaging.collaboration.rounds import StepAveraging
from net.averaging.grouping.group import MAX_GROUP_SIZE, Group
from net.clock import SwarmClock
from net.nursery import background_nursery

_MOST_LEADS = 8
"""How many times as long as it is to be the time may become in which groups form."""
_ANSWERS = 8.0
"""Lead in multiples of the time that others took to answer. Forming takes half as many: peers are told, ask each other
and join. If the batch is full already, only half of the lead is left."""
_PAUSE_S = 0.2
"""Seconds added to that lead: a peer that asked too early pauses before it asks again."""


@dataclass(slots=True, eq=False)
class ComingStep:
    """A step about to be made."""

    step: int
    """Which, from 0."""
    chain: bytes
    """Of which chain."""
    begins_at: float
    """Swarm time."""
    group: Group | None = None
    """Who makes it; None while that is looked for, and if nobody was found."""
    has_company: bool = False
    """True if others were at this step when its group was looked for; False: this peer makes it alone."""
    found: trio.Event = field(default_factory=trio.Event)
    """Set when `group` is what it will be."""


def fewest_of(view: Forecast) -> int:
    """How many members with gradients make the step at hand: most of those at it.

    Nobody any more once others have made it: those who are left may be most of those that are at this step still, but
    not most of the swarm, and would go on in a chain that comes to nothing.
    """
    return view.quorum if view.leader is None else MAX_GROUP_SIZE + 1


class StepForming:
    """Finds out when steps begin, and looks for their groups meanwhile.

    Args:
      rounds: finds groups. board: who is how far; set before anything else is called.
      lead_s: how long before a step groups form; see `lead_s`.
      where: step and chain of the step at hand; None while that is not known.
    """

    def __init__(
        self,
        rounds: StepAveraging,
        *,
        clock: SwarmClock,
        lead_s: float,
        nursery: trio.Nursery,
        where: Callable[[], tuple[int, bytes] | None],
    ) -> None:
        self._rounds = rounds
        self._clock = clock
        self._set_lead_s = lead_s
        self._factor = 1.0  # which grows where no group is found
        self._nursery = nursery
        self._where = where
        self._changed = trio.Event()
        self.board: ProgressBoard
        """Who is how far."""
        self.coming: ComingStep | None = None
        """The step whose group forms, or averages."""

    @property
    def _view(self) -> Forecast:
        return self.board.view

    @property
    def lead_s(self) -> float:
        """Seconds between the forming of groups and the end of the batch.

        As was set, but at most half of the time that a batch takes, and at least the time that forming a group takes,
        judged by how soon others answer. It is longer after steps for which no group was found.
        """
        answer_s = self.board.answer_s
        needed = _ANSWERS * answer_s + _PAUSE_S if answer_s else self._set_lead_s
        lead_s = max(min(self._set_lead_s, self._view.batch_s / 2), needed)
        return min(self._factor * lead_s, _MOST_LEADS * self._set_lead_s)

    @property
    def ends_at(self) -> float:
        """Swarm time at which the batch is full or the step begins, as far as is known."""
        ends_at = self._view.ends_at
        return ends_at if self.coming is None else min(ends_at, self.coming.begins_at)

    async def run(self) -> None:
        """Form groups when steps are near, until cancelled."""
        while True:
            where = self._where()
            if self.coming is None and where is not None:
                now, view, lead_s = self._clock.now(), self._view, self.lead_s
                if view.ends_at - now <= lead_s and view.leader is None and view.samples > 0:
                    self._begin(where, max(view.ends_at, now + lead_s / 2 if view.others else now), tell=True)
            await self.news()

    async def news(self) -> None:
        """Wait for a change, or until it is time to look again."""
        left = self._view.ends_at - self._clock.now() - self.lead_s
        with trio.move_on_after(min(max(left, 0.05), 0.5)):
            await self._changed.wait()

    def over(self) -> None:
        """The step was made; or nobody was found for it, or nothing came of it.

        Groups form for longer next time if nobody was found, unless others were and have made it meanwhile.
        """
        coming = self.coming
        is_lost = coming is not None and coming.has_company and coming.group is None and self._view.leader is None
        self._factor = min(max((2.0 if is_lost else 0.9) * self._factor, 1.0), _MOST_LEADS)
        self.coming = None
        self.changed()

    def arrived(self) -> None:
        """This peer has come to where the others are: tell them, who may be about to begin."""
        self.changed()
        self._nursery.start_soon(self.board.tell, None)

    def changed(self) -> None:
        """Look again: something has changed."""
        self.board.refresh()
        self._changed.set()
        self._changed = trio.Event()

    def heard(self, beginning: Beginning) -> float | None:
        """Another peer is at a step, and may say when it begins; returns when it begins here, if it does.

        Of several times the latest stands, for everybody hears of it.
        """
        where, at = self._where(), beginning.at
        if (beginning.step, beginning.chain) != where:
            return None
        now, coming = self._clock.now(), self.coming
        known = None if coming is None or coming.found.is_set() else coming.begins_at
        if at is None or at > now + 2 * _MOST_LEADS * self._set_lead_s:
            return known
        if coming is None:
            # Whoever says so cannot make a batch of nothing: it must be nearly full by what everybody reports.
            if self._view.ends_at - now > 4 * max(self._set_lead_s, self.lead_s, at - now):
                return None
            return self._begin(where, max(now, at), tell=False)
        if known is not None and at > known:
            coming.begins_at = at
            self._rounds.postpone(at)
        return coming.begins_at

    def _begin(self, where: tuple[int, bytes], at: float, *, tell: bool) -> float:
        """Look for the group of the step at hand, beside the computing."""
        self.coming = ComingStep(*where, at)
        self._nursery.start_soon(self._form, self.coming)
        if tell:
            self._nursery.start_soon(self.board.tell, at)
        self._changed.set()
        self._changed = trio.Event()
        return at

    async def _form(self, coming: ComingStep) -> None:
        with trio.move_on_after(max(0.0, coming.begins_at - self._clock.now())):
            while not self._view.others:
                await self.board.wait_for_news()
        if self._view.others:
            coming.has_company = True
            async with background_nursery() as nursery:
                nursery.start_soon(self._until_made, nursery.cancel_scope)
                coming.group = await self._rounds.find_group(
                    step=coming.step,
                    chain=coming.chain,
                    begins_at=coming.begins_at,
                    others=self.board.contacts,
                    fewest=lambda: fewest_of(self._view),
                )
        coming.found.set()

    async def _until_made(self, scope: trio.CancelScope) -> None:
        """Cancel `scope` once others have made the step: whoever is missed there need not look on."""
        assert self.coming is not None
        chain = self.coming.chain
        # With delayed updates somebody of our chain may be a step further and have it under way, with us.
        while (leader := self._view.leader) is None or leader.chain == chain:
            await self.board.wait_for_news()
        scope.cancel()
