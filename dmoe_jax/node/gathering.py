"""Whether a device waits a moment before a long batch, for requests that would share it.

Theory of operation. A batch of a large expert takes about as long for one row as for eight: what it costs is to read
and to step the parameters. Callers whose answers were just handed out mostly ask it again at once, after a forward
call always; a device that begins with what is there meanwhile serves them in two groups that take turns for ever, each
in batches of half the size. So as long as nothing else is to be done the device waits for those who have not come back
to the same expert yet, for at most a quarter of what the batch will take.

Trainers that compute for long between two calls do not come back in time, and waiting for them is in vain. So it is
noted what waiting has brought, rows by those that were there, and what it has cost, time by that of the batch: when it
cost more, the device waits no more, but for a trial now and then.
"""

from collections import Counter
from collections.abc import Callable, Iterable

import trio

_SHARE = 0.25
"""Of a batch's time, that it may wait."""

_LEAST_S = 8e-3
"""Shorter batches do not wait: a quarter of them is hardly more than the way there and back."""

_NEWEST = 0.2
"""Weight of the newest wait in the mean of what waiting has brought."""

_LEAST_PROFIT = -0.1
"""It is not remembered worse than so, and one good trial is enough to begin again."""

_TRIAL_EVERY = 32
"""Batches, where it has brought too little."""


class Gathering:
    """Waits before long batches, and knows whether that is worth it.

    Args:
      rows_waiting: how many rows the queue has now.
    """

    def __init__(self, rows_waiting: Callable[[], int]) -> None:
        self._rows_waiting = rows_waiting
        self._answered_at = float("-inf")
        self._missing: Counter[str] = Counter()  # requests of the last turn that have not come again, by expert
        self._arrived = trio.Event()
        self._came: set[str] = set()  # experts that were asked since a batch began to wait
        self._profit = _SHARE  # of waiting: what it brought less what it cost, mean of the last times
        self._refused = 0

    def has_arrived(self, uid: str) -> None:
        """A request for this expert was submitted."""
        self._missing[uid] -= 1
        self._came.add(uid)
        self._arrived.set()

    def have_answered(self, uids: Iterable[str]) -> None:
        """Requests were answered, with one turn of the device: the expert of each."""
        self._missing, self._answered_at = Counter(uids), trio.current_time()

    async def wait(self, uid: str, expected_s: float) -> None:
        """Return when a batch that will take so long had better begin: mostly at once.

        Args:
          uid: its expert.
          expected_s: infinite if nobody knows.
        """
        until = self._answered_at + _SHARE * expected_s
        if self._missing[uid] <= 0 or not _LEAST_S <= expected_s < float("inf") or until <= trio.current_time():
            return
        if self._profit < 0.0:
            self._refused += 1
            if self._refused % _TRIAL_EVERY:
                return
        before, since = self._rows_waiting(), trio.current_time()
        with trio.move_on_at(until):
            self._came.clear()
            while self._missing[uid] > 0:
                self._arrived = trio.Event()
                await self._arrived.wait()
                if not self._came <= {uid}:
                    return  # there is something else to do
        brought = (self._rows_waiting() - before) / max(before, 1)
        profit = brought - (trio.current_time() - since) / expected_s
        self._profit = max(_LEAST_PROFIT, self._profit + _NEWEST * (profit - self._profit))
