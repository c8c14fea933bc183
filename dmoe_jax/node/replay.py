"""Remembering what was asked, so that a retry never trains twice.

A backward request carries an id drawn by its trainer. If the connection breaks after the node has stepped the expert
but before the reply arrives, the trainer sends the same id again and gets the remembered work instead of a second
optimiser step. The oldest finished entries are forgotten first; a retry comes within one call deadline, so the bounds
only have to outlast that.
"""

from typing import Generic, TypeVar

Work = TypeVar("Work")

MAX_REQUEST_ID_BYTES = 32


class ReplayCache(Generic[Work]):
    """Request ids and the work done for them, bounded in entries and bytes.

    Args:
      max_entries: how many ids are remembered.
      max_bytes: how large the remembered replies may be together.
    """

    def __init__(self, *, max_entries: int = 1024, max_bytes: int = 64 << 20) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: dict[bytes, tuple[Work, int]] = {}  # oldest first
        self._bytes = 0

    def find(self, request_id: bytes) -> Work | None:
        """The work under this id, or None."""
        work, _ = self._entries.get(request_id, (None, 0))
        return work

    def remember(self, request_id: bytes, work: Work, *, nbytes: int) -> None:
        """Keep `work`, whose reply takes about `nbytes`, and forget the oldest beyond the bounds."""
        self.forget(request_id)
        self._entries[request_id] = (work, nbytes)
        self._bytes += nbytes
        while len(self._entries) > 1 and (len(self._entries) > self._max_entries or self._bytes > self._max_bytes):
            self.forget(next(iter(self._entries)))

    def forget(self, request_id: bytes) -> None:
        """Drop an id, if it is known."""
        _, nbytes = self._entries.pop(request_id, (None, 0))
        self._bytes -= nbytes
