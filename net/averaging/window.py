"""How many bytes an exchange keeps under way towards a peer: enough for the line, within the memory of the process."""

from collections.abc import Callable

import trio

from net.rpc.bulk import GAIN, MemoryBudget


class BulkWindow:
    """The bytes that one exchange, or one download, has under way towards one peer.

    It begins with `start_bytes`, which are its own, and follows the path beyond them: `GAIN` times what fills it. What
    goes beyond `start_bytes` is taken from the budget, and given back with the answers; when the budget is used up the
    window stays as it is until answers come.

    Args:
      budget: of the process.
      start_bytes: what may be under way whatever the path.
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
        self._change = trio.Event()
        self.under_way_bytes = 0
        self.most_bytes = most_bytes

    @property
    def wanted_bytes(self) -> int:
        """What the path asks for, whatever memory there is and the other end allows."""
        return max(self._start_bytes, int(GAIN * self._full_bytes()))

    async def take(self, nbytes: int) -> None:
        """Wait until so many more bytes may be under way. At least one call always may."""
        while not self.try_take(nbytes):
            await self._change.wait()

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

    def give_back(self, nbytes: int) -> None:
        """So many are no longer under way."""
        self.under_way_bytes -= nbytes
        spare = self._reserved_bytes - max(0, self.under_way_bytes - self._start_bytes)
        if spare > 0:
            self._reserved_bytes -= spare
            self._budget.release(spare)
        self.tell()

    def tell(self) -> None:
        """Let those look again who wait in `take`: more may be allowed now."""
        self._change.set()
        self._change = trio.Event()
