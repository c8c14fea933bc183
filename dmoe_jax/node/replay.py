"""Remembering what was asked, so that a retry never trains twice.

A backward request carries an id drawn by its trainer. If the connection breaks after the node has stepped the expert
but before the reply arrives, the trainer sends the same id again and gets the remembered work instead of a second
optimiser step. Beyond the bounds the oldest finished entries are forgotten. What still waits or runs is never
forgotten, whatever came after it: its retry would train a second time. The node's queue bounds how much that is.

A remembered reply keeps no more of its batch than its own rows (`Job.answer`), but replies of all sizes that come and
go leave holes in the heap. So a node holds more than the bound says: with 64 MiB it grew by 125 MB in four minutes of
mixed load, with 16 MiB by 23. Whose answer is forgotten is refused, which costs a trainer that part of one gradient.

What an expert has learnt from it knows by itself for a minute at least, and through a restart too, though without the
answers (`ExpertBackend.learnt_from`): such a retry is refused. The copies of an expert tell each other
(`dmoe_jax.replicas.learnt`), so a retry at another copy is known there as soon as what was learnt from it is.
"""

import hashlib
from collections.abc import Callable
from typing import Generic, TypeVar

from net.errors import CallRefused

Work = TypeVar("Work")

NAME_BYTES = 16


def name_of(peer: bytes, uid: str, request_id: bytes) -> bytes:
    """Of a backward request. Trainer and expert are part of it: equal ids of others do not get these gradients."""
    return hashlib.blake2b(peer + uid.encode() + b"/" + request_id, digest_size=NAME_BYTES).digest()


def learnt_before(uid: str) -> CallRefused:
    """What the caller of a retry is told whose answer is not kept."""
    return CallRefused(f"expert {uid} has learnt from this request before; its answer is not kept any more")


class ReplayCache(Generic[Work]):
    """Request ids and the work done for them; what is finished is bounded in entries and bytes.

    Args:
      is_finished: whether work has its reply.
      max_entries: how many ids are remembered.
      max_bytes: how large the remembered replies may be together.
    """

    def __init__(
        self, *, is_finished: Callable[[Work], bool], max_entries: int = 1024, max_bytes: int = 8 << 20
    ) -> None:
        self._is_finished = is_finished
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: dict[bytes, tuple[Work, int]] = {}  # oldest first
        self._bytes = 0

    def find(self, request_id: bytes) -> Work | None:
        """The work under this id, or None."""
        work, _ = self._entries.get(request_id, (None, 0))
        return work

    def remember(self, request_id: bytes, work: Work, *, nbytes: int) -> None:
        """Keep `work`, whose reply takes about `nbytes`, and forget the oldest finished beyond the bounds."""
        self.forget(request_id)
        self._entries[request_id] = (work, nbytes)
        self._bytes += nbytes
        while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
            each = ((key, work) for key, (work, _) in self._entries.items() if key != request_id)
            oldest = next((key for key, work in each if self._is_finished(work)), None)
            if oldest is None:
                return
            self.forget(oldest)

    def forget(self, request_id: bytes) -> None:
        """Drop an id, if it is known."""
        _, nbytes = self._entries.pop(request_id, (None, 0))
        self._bytes -= nbytes
