"""Which requests of a node run next, and together.

Theory of operation. The request that has waited longest is served next, and with it, in order of arrival, as many
others of its *key* (expert and kind of work) as fit into `max_batch_rows`: they become one XLA call. (The Learning@home
prototype took the queue with the *newest* request, against its own intention; papers.md 1f.)

One kind of work may have a head start over the others, as if it had come so many seconds earlier. A node gives one to
forward requests: a backward call with its optimiser's step costs several times as much, and hardly more for many rows
than for one. While those gather that wait for one, the cheap work is done; its callers come back with backward requests
and make larger batches of these. Nobody waits longer for that than the head start and what came within it.

What waits is bounded, in rows and in the time that it will take: beyond it a request is turned away at once, so that
an overloaded node says "busy" while the trainer can still choose another expert, instead of answering when nobody waits
any more. Of each bound one kind of work may take three quarters, so that a flood of backward requests leaves room for
forward ones.
"""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

KIND_SHARE = 0.75
"""Of the queue, for one kind of work."""


class QueueFull(Exception):
    """The queue holds as much as it may. The message says how much waits.

    Args:
      waiting_s: seconds of work that wait.
    """

    def __init__(self, message: str, *, waiting_s: float) -> None:
        super().__init__(message)
        self.waiting_s = waiting_s


@runtime_checkable
class Waiting(Protocol):
    """A request that waits; two of them are never equal."""

    @property
    def key(self) -> Hashable:
        """Requests of equal keys run together."""
        ...

    @property
    def kind(self) -> str:
        """The kind of work, "forward" or "backward"."""
        ...

    @property
    def rows(self) -> int:
        """How many rows it brings."""
        ...

    @property
    def expected_s(self) -> float:
        """Seconds that it will take, as far as that is known."""
        ...

    @property
    def arrived_at(self) -> float:
        """When it came, seconds."""
        ...


Item = TypeVar("Item", bound=Waiting)


@dataclass(slots=True)
class _Total:
    """What waits."""

    rows: int = 0
    seconds: float = 0.0


class BatchQueue(Generic[Item]):
    """Waiting requests of a node.

    Args:
      max_batch_rows: the most rows of one batch; a single request may not be larger.
      max_waiting_rows: the most rows that wait in all.
      max_wait_s: the most seconds of work that wait in all; a single request may bring more.
      head_starts: seconds by which a kind of work goes ahead of others, by kind; none: in order of arrival.
    """

    def __init__(
        self,
        *,
        max_batch_rows: int,
        max_waiting_rows: int,
        max_wait_s: float = math.inf,
        head_starts: Mapping[str, float] | None = None,
    ) -> None:
        if not 1 <= max_batch_rows <= max_waiting_rows:
            raise ValueError(
                f"expected 1 <= max_batch_rows <= max_waiting_rows, got {max_batch_rows} and {max_waiting_rows}"
            )
        self._max_batch_rows = max_batch_rows
        self._max_waiting_rows = max_waiting_rows
        self._max_wait_s = max_wait_s
        self._head_starts = dict(head_starts or {})
        self._waiting: list[Item] = []  # oldest first; at most `max_waiting_rows` long
        self._totals: dict[str, _Total] = {}  # by kind

    @property
    def waiting_rows(self) -> int:
        """Rows that wait now."""
        return sum(total.rows for total in self._totals.values())

    def waits(self, key: Hashable) -> bool:
        """Whether a request of this key waits now."""
        return any(item.key == key for item in self._waiting)

    def only_batch(self) -> tuple[Item, ...]:
        """All that waits, if it would be one batch; else nothing."""
        if not self._waiting or self.waiting_rows > self._max_batch_rows:
            return ()
        key = self._waiting[0].key
        return tuple(self._waiting) if all(item.key == key for item in self._waiting) else ()

    def submit(self, item: Item) -> None:
        """Put a request at the end.

        Raises:
          ValueError: if it has no rows or more than a batch may have.
          QueueFull: if it would exceed a bound, or the share of its kind.
        """
        if not 1 <= item.rows <= self._max_batch_rows:
            raise ValueError(f"expected 1 to {self._max_batch_rows} rows in one request, got {item.rows}")
        own = self._totals.setdefault(item.kind, _Total())
        whole = _Total(self.waiting_rows, sum(total.seconds for total in self._totals.values()))
        for what, total, share in (("", whole, 1.0), (f" of {item.kind} requests", own, KIND_SHARE)):
            most_rows = max(int(share * self._max_waiting_rows), self._max_batch_rows)
            most_s = share * self._max_wait_s
            full = ""
            if total.rows + item.rows > most_rows:
                full = f"{total.rows} rows{what} wait already, at most {most_rows} may"
            elif total.rows and total.seconds + item.expected_s > most_s:
                full = f"{total.seconds:.2g} s of work{what} wait already, at most {most_s:.2g} s may"
            if full:
                raise QueueFull(full, waiting_s=whole.seconds)
        self._waiting.append(item)
        own.rows += item.rows
        own.seconds += item.expected_s

    def withdraw(self, item: Item) -> bool:
        """Take a request back (its caller gave up). Returns whether it was still waiting."""
        if item not in self._waiting:
            return False
        self._waiting.remove(item)
        self._take_off(item)
        return True

    def take(
        self,
        row_limit: Callable[[Hashable], int] | None = None,
        *,
        may_run: Callable[[Hashable], bool] = lambda key: True,
    ) -> tuple[Item, ...]:
        """The next batch, oldest request first but for head starts; empty when nothing waits that may run.

        Args:
          row_limit: the most rows for now of a batch of this key; a single larger request is taken all the same.
          may_run: whether a request of this key may run now.
        """
        first = self._first(may_run)
        if first is None:
            return ()
        key = first.key
        limit = self._max_batch_rows if row_limit is None else min(self._max_batch_rows, row_limit(key))
        batch: dict[Item, None] = {}
        rows = 0
        for item in self._waiting:
            if item.key == key:
                if batch and rows + item.rows > limit:
                    break
                batch[item] = None
                rows += item.rows
        self._waiting = [item for item in self._waiting if item not in batch]
        for item in batch:
            self._take_off(item)
        return tuple(batch)

    def _first(self, may_run: Callable[[Hashable], bool]) -> Item | None:
        """The request whose turn it is: the earliest, head starts included, of the oldest of each kind that may run."""
        oldest: dict[str, Item] = {}
        kinds = sum(total.rows > 0 for total in self._totals.values())
        for item in self._waiting:
            if item.kind not in oldest and may_run(item.key):
                oldest[item.kind] = item
                if len(oldest) == kinds:
                    break
        return min(oldest.values(), key=self._counts_from, default=None)

    def _counts_from(self, item: Item) -> float:
        return item.arrived_at - self._head_starts.get(item.kind, 0.0)

    def _take_off(self, item: Item) -> None:
        total = self._totals[item.kind]
        total.rows -= item.rows
        # Not what rounding would leave when nothing waits.
        total.seconds = total.seconds - item.expected_s if total.rows else 0.0
