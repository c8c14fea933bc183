"""Calls of a group's members to each other, which a busy moment at its beginning must not end.

All members dial each other at once then, and some hear of the group earlier than others. So a caller tries again
(`placed`), and a peer that is called waits until it has heard of the group (`KnownGroups`).
"""

from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

from dmoe_net.errors import CallRefused, DialFailed, PeerBusy
from dmoe_net.identity import PeerId
from dmoe_net.rpc.base import Reply

T = TypeVar("T")

MAX_CALLS = 4096
"""Calls of one method served at once, of all groups: a full window of 256 members."""

MAX_EARLY_CALLS = 512
"""Calls among these for a group that this member has not heard of yet."""

_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Seconds before a call that the other has not had is placed again: of two connections that meet one goes, and whoever
has just been too busy may not be for long."""

_MAX_PAST_GROUPS = 64
"""Groups that are over and still known, so that late calls are refused at once."""


async def placed(call: Callable[[], Awaitable[Reply]]) -> Reply:
    """Place a call, and a few times more if the other has not had it. The last failure is raised."""
    for pause_s in _PAUSES_S:
        try:
            return await call()
        except (DialFailed, PeerBusy):
            await trio.sleep(pause_s)
    return await call()


class KnownGroups(Generic[T]):
    """The work under way here, by the ids of the groups; calls may come before a group is heard of.

    Args:
      doing: what groups do, for people.
      max_early: calls of one peer that may wait for groups, each for `wait_s`.
    """

    def __init__(self, doing: str, *, max_early: int, wait_s: float) -> None:
        self._doing = doing
        self._max_early = max_early
        self._wait_s = wait_s
        self.at_work: dict[bytes, T] = {}
        """The work that can be called now, the oldest first."""
        self._past: deque[bytes] = deque(maxlen=_MAX_PAST_GROUPS)
        self._num_early: Counter[PeerId] = Counter()
        self._early = trio.lowlevel.ParkingLot()  # where calls wait for the next group

    def __contains__(self, group_id: bytes) -> bool:
        """True if this group is or was at work here: a sound leader draws a new id for each."""
        return group_id in self.at_work or group_id in self._past

    def begin(self, group_id: bytes, work: T) -> None:
        """Serve calls of this group from now on."""
        self.at_work[group_id] = work
        self._early.unpark_all()

    def end(self, group_id: bytes) -> None:
        """Refuse calls of this group from now on."""
        del self.at_work[group_id]
        self._past.append(group_id)

    async def find(self, peer_id: PeerId, group_id: bytes) -> T:
        """Return the work of a group that this peer names, once it is known; refuse if it is over or does not come."""
        if (work := self.at_work.get(group_id)) is not None:
            return work
        if self._num_early[peer_id] >= self._max_early or self._num_early.total() >= MAX_EARLY_CALLS:
            raise PeerBusy("too many calls wait for groups to be heard of")
        self._num_early[peer_id] += 1
        try:
            with trio.move_on_after(self._wait_s):
                while group_id not in self._past:
                    if (work := self.at_work.get(group_id)) is not None:
                        return work
                    await self._early.park()
        finally:
            self._num_early[peer_id] -= 1
            if not self._num_early[peer_id]:
                del self._num_early[peer_id]
        raise CallRefused(f"this peer does not {self._doing} with group {group_id.hex()}")
