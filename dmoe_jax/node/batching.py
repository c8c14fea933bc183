"""Which requests of a node run next, and together.

Theory of operation. The request that has waited longest is served next, and with it, in order of arrival, as many
others of its *key* (expert and kind of work) as fit into `max_batch_rows`: they become one XLA call. (The Learning@home
prototype took the queue with the *newest* request, against its own intention; papers.md 1f.) The total number of
waiting rows is bounded: beyond it a request is turned away at once, so that an overloaded node says "busy" while the
trainer can still choose another expert, instead of answering when nobody waits any more.
"""

from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar, runtime_checkable


class QueueFull(Exception):
    """The queue holds as many rows as it may. The message says how many wait."""


@runtime_checkable
class Waiting(Protocol):
    """A request that waits; two of them are never equal."""

    @property
    def key(self) -> Hashable:
        """Requests of equal keys run together."""
        ...

    @property
    def rows(self) -> int:
        """How many rows it brings."""
        ...


Item = TypeVar("Item", bound=Waiting)


class BatchQueue(Generic[Item]):
    """Waiting requests of a node.

    Args:
      max_batch_rows: the most rows of one batch; a single request may not be larger.
      max_waiting_rows: the most rows that wait in all.
    """

    def __init__(self, *, max_batch_rows: int, max_waiting_rows: int) -> None:
        if not 1 <= max_batch_rows <= max_waiting_rows:
            raise ValueError(
                f"expected 1 <= max_batch_rows <= max_waiting_rows, got {max_batch_rows} and {max_waiting_rows}"
            )
        self._max_batch_rows = max_batch_rows
        self._max_waiting_rows = max_waiting_rows
        self._waiting: list[Item] = []  # oldest first; at most `max_waiting_rows` long

    @property
    def waiting_rows(self) -> int:
        """Rows that wait now."""
        return sum(item.rows for item in self._waiting)

    def waits(self, key: Hashable) -> bool:
        """Whether a request of this key waits now."""
        return any(item.key == key for item in self._waiting)

    def submit(self, item: Item) -> None:
        """Put a request at the end.

        Raises:
          ValueError: if it has no rows or more than a batch may have.
          QueueFull: if it would exceed `max_waiting_rows`.
        """
        if not 1 <= item.rows <= self._max_batch_rows:
            raise ValueError(f"expected 1 to {self._max_batch_rows} rows in one request, got {item.rows}")
        if self.waiting_rows + item.rows > self._max_waiting_rows:
            raise QueueFull(f"{self.waiting_rows} rows wait already, at most {self._max_waiting_rows} may")
        self._waiting.append(item)

    def withdraw(self, item: Item) -> bool:
        """Take a request back (its caller gave up). Returns whether it was still waiting."""
        if item not in self._waiting:
            return False
        self._waiting.remove(item)
        return True

    def take(
        self,
        row_limit: Callable[[Hashable], int] | None = None,
        *,
        may_run: Callable[[Hashable], bool] = lambda key: True,
    ) -> tuple[Item, ...]:
        """The next batch, oldest request first; empty when nothing waits that may run.

        Args:
          row_limit: the most rows for now of a batch of this key; a single larger request is taken all the same.
          may_run: whether a request of this key may run now.
        """
        key = next((item.key for item in self._waiting if may_run(item.key)), None)
        if key is None:
            return ()
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
        return tuple(batch)
