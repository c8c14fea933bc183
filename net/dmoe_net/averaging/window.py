"""Bytes that an exchange keeps under way towards a peer: enough for the line, within the memory of the process."""

import math
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence

import trio

from dmoe_net.averaging.grouping.group import Group
from dmoe_net.dht.calls import PEER_ERRORS
from dmoe_net.identity import PeerId
from dmoe_net.rpc.bulk import GAIN, BulkTraffic, MemoryBudget


class BulkWindow:
    """The bytes that one exchange, or one download, has under way towards one peer.

    It begins with `start_bytes`, and follows the path beyond them: `GAIN` times what fills it. What goes beyond
    `start_bytes` is taken from the process's budget, and given back with the answers.

    Args:
      full_bytes: what fills the path, as known now: its rate times how long an answer takes at least.
      most_bytes: what the other end allows; may be changed at any time.
    """

    def __init__(
        self, budget: MemoryBudget, *, start_bytes: int, full_bytes: Callable[[], float], most_bytes: int
    ) -> None:
        self._budget = budget
        self._start_bytes = start_bytes
        self._full_bytes = full_bytes
        self._reserved_bytes = 0
        self._waiting = trio.lowlevel.ParkingLot()
        self.under_way_bytes = 0
        self.most_bytes = most_bytes

    @classmethod
    def towards(
        cls, bulk: BulkTraffic, peer_id: PeerId, *, start_bytes: int, most_bytes: int = sys.maxsize
    ) -> "BulkWindow":
        """Make the window of the whole path to or from a peer."""
        path = bulk.path(peer_id)
        return cls(bulk.budget, start_bytes=start_bytes, full_bytes=lambda: path.under_way_bytes, most_bytes=most_bytes)

    @property
    def wanted_bytes(self) -> int:
        """Bytes that the path asks for, whatever memory there is and the other end allows."""
        return max(self._start_bytes, int(GAIN * self._full_bytes()))

    async def take(self, nbytes: int) -> None:
        """Wait until so many more bytes may be under way. At least one call always may."""
        while not self.try_take(nbytes):
            await self._waiting.park()

    def try_take(self, nbytes: int) -> bool:
        """Take so many if they may be under way now."""
        under_way = self.under_way_bytes + nbytes
        if self.under_way_bytes and under_way > min(self.wanted_bytes, max(self.most_bytes, self._start_bytes)):
            return False
        more = max(0, under_way - self._start_bytes) - self._reserved_bytes
        if more > 0:
            if self._budget.reserve(more):
                self._reserved_bytes += more
            elif self.under_way_bytes:
                return False  # else nothing would ever come back here, and one call goes without
        self.under_way_bytes = under_way
        return True

    async def move(self, starts: Iterable[int], piece_bytes: int, move: Callable[[int], Awaitable[None]]) -> None:
        """Move the pieces that begin at these places, each as soon as there is room for it; fail with the first."""
        failed = list[Exception]()

        async def one(start: int, scope: trio.CancelScope) -> None:
            try:
                await move(start)
            except PEER_ERRORS as error:
                failed.append(error)
                scope.cancel()
            finally:
                self.give_back(piece_bytes)

        async with trio.open_nursery() as nursery:
            for start in starts:
                await self.take(piece_bytes)
                nursery.start_soon(one, start, nursery.cancel_scope)
        if failed:
            raise failed[0]

    def give_back(self, nbytes: int) -> None:
        """Note that so many are no longer under way."""
        self.under_way_bytes -= nbytes
        spare = self._reserved_bytes - max(0, self.under_way_bytes - self._start_bytes)
        if spare > 0:
            self._reserved_bytes -= spare
            self._budget.release(spare)
        self._waiting.unpark_all()


class Pace:
    """Bytes that one member of an all-reduce keeps under way to fill its line, for each reducer.

    All parts should be done at the same time: the rate that all paths to reducers have together is shared in proportion
    to the parts, whatever each path got.

    A chunk is averaged when the furthest sender has brought it, which is no further from the reducer than from this
    member plus from there to the reducer: so a mean takes up to half of the round trip to the furthest sender longer
    than the round trip to its reducer.

    Args:
      own: this member's place in the group.
      lengths: numbers that each member reduces.
    """

    def __init__(self, bulk: BulkTraffic, group: Group, own: int, lengths: Sequence[int]) -> None:
        self._line = bulk.line
        self._paths = {index: bulk.path(member.peer_id) for index, member in enumerate(group.members) if index != own}
        self._senders = [path for index, path in self._paths.items() if group.members[index].sends]
        self._lengths = {index: lengths[index] for index in self._paths}
        self._total = max(1, sum(self._lengths.values()))

    def full_bytes(self, reducer: int) -> float:
        """Bytes of chunks for this reducer with which the line is full."""
        rate = min(self._line.rate, math.fsum(path.rate for index, path in self._paths.items() if self._lengths[index]))
        furthest_s = max((path.round_trip_s or 0.0 for path in self._senders), default=0.0)
        answer_s = (self._paths[reducer].round_trip_s or 0.0) + 0.5 * furthest_s
        return rate * self._lengths[reducer] / self._total * answer_s
