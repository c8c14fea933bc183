"""Which requests of a node run next, and together.

Theory of operation. Requests wait in one queue per (expert, kind of work). The queue whose head has waited longest is
served next, and as many of its requests as fit into `max_batch_rows` go into one XLA call. (The Learning@home
prototype took the queue with the *newest* request, against its own intention; papers.md 1f.) The total number of
waiting rows is bounded: beyond it a request is turned away at once, so that an overloaded node says "busy" while the
trainer can still choose another expert, instead of answering when nobody waits any more.
"""

import itertools
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Payload = TypeVar("Payload")


class QueueFull(Exception):
    """The queue holds as many rows as it may. The message says how many wait."""


@dataclass(frozen=True, slots=True, eq=False)
class Ticket(Generic[Payload]):
    """A waiting request; compared by identity.

    Attributes:
      key: what it may be batched with: requests of equal keys run together.
      rows: how many rows it brings.
      arrival: its place in the order of arrival.
      payload: whatever the submitter wants back.
    """

    key: Hashable
    rows: int
    arrival: int
    payload: Payload


class BatchQueue(Generic[Payload]):
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
        self._arrivals = itertools.count()
        self._queues: dict[Hashable, deque[Ticket[Payload]]] = {}
        self._waiting_rows = 0

    @property
    def waiting_rows(self) -> int:
        """Rows that wait now."""
        return self._waiting_rows

    def waits(self, key: Hashable) -> bool:
        """Whether a request of this key waits now."""
        return key in self._queues

    def submit(self, key: Hashable, rows: int, payload: Payload) -> Ticket[Payload]:
        """Put a request at the end of its queue.

        Raises:
          ValueError: if it has no rows or more than a batch may have.
          QueueFull: if it would exceed `max_waiting_rows`.
        """
        if not 1 <= rows <= self._max_batch_rows:
            raise ValueError(f"expected 1 to {self._max_batch_rows} rows in one request, got {rows}")
        if self._waiting_rows + rows > self._max_waiting_rows:
            raise QueueFull(f"{self._waiting_rows} rows wait already, at most {self._max_waiting_rows} may")
        ticket = Ticket(key, rows, next(self._arrivals), payload)
        self._queues.setdefault(key, deque()).append(ticket)
        self._waiting_rows += rows
        return ticket

    def withdraw(self, ticket: Ticket[Payload]) -> bool:
        """Take a request back (its caller gave up). Returns whether it was still waiting."""
        queue = self._queues.get(ticket.key)
        if queue is None or ticket not in queue:
            return False
        queue.remove(ticket)
        self._forget(ticket)
        return True

    def take(self, row_limit: Callable[[Hashable], int] | None = None) -> tuple[Ticket[Payload], ...]:
        """The next batch, oldest request first; empty when nothing waits.

        Args:
          row_limit: the most rows for now of a batch of this key; a single larger request is taken all the same.
        """
        if not self._queues:
            return ()
        # Linear in the number of busy queues, which is at most twice the experts of a node: some dozens.
        queue = min(self._queues.values(), key=lambda waiting: waiting[0].arrival)
        limit = min(self._max_batch_rows, row_limit(queue[0].key)) if row_limit is not None else self._max_batch_rows
        batch: list[Ticket[Payload]] = []
        rows = 0
        while queue and (not batch or rows + queue[0].rows <= limit):
            ticket = queue.popleft()
            rows += ticket.rows
            batch.append(ticket)
            self._forget(ticket)
        return tuple(batch)

    def _forget(self, ticket: Ticket[Payload]) -> None:
        self._waiting_rows -= ticket.rows
        if not self._queues[ticket.key]:
            del self._queues[ticket.key]
