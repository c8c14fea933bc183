"""Jobs, which wait at a node: each is the part of a request that one expert is to compute. Some are remembered.

A backward request carries an id drawn by its trainer. If the connection breaks after the node has stepped the expert
but before the reply arrives, the trainer sends the same id again and gets the remembered job's answer instead of a
second optimiser step. Beyond the bounds the oldest finished jobs are forgotten. What still waits or runs is never
forgotten, whatever came after it: its retry would train a second time. The node's queue bounds how much that is.

A remembered answer keeps no more of its batch than its own rows, but answers of all sizes that come and go leave holes
in the heap. So a node holds more than the bound says: with 64 MiB it grew by 125 MB in four minutes of mixed load, with
16 MiB by 23. Whose answer is forgotten is refused, which costs a trainer that part of one gradient.

What an expert has learnt from it knows by itself for a minute at least, and through a restart too, though without the
answers (`ExpertBackend.learnt_from`): such a retry is refused. The copies of an expert tell each other
(`dmoe_jax.replicas.learnt`), so a retry at another copy is known there as soon as what was learnt from it is.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import trio

from dmoe_jax.expert_calls import MAX_UPDATES, Answer, Outcome
from net.errors import CallFailed, CallRefused
from net.types import Array

NAME_BYTES = 16

NOT_STALE = MAX_UPDATES
"""A gradient that saw so many updates is never stale."""


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A checked part of a forward or backward request, on its way through the queue and the device."""

    uid: str
    """The expert."""
    inputs: tuple[Array, ...]
    """One array per input specification, [rows, ...]. Gone when the job has an outcome, as are the next ones: a job
    that is remembered keeps its answer alone."""
    output_grads: Array | None = None
    """Gradient of the output, [rows, ...]; None in a forward request."""
    keys: Array | None = None
    """uint32 [rows, 2], a dropout key for each row; None in evaluation, and for an expert that takes none."""
    seen: int = NOT_STALE
    """Updates that the expert had taken when it computed this request's forward."""
    replay_key: bytes | None = None
    """Names a backward request across retries, see `name_of`."""
    arrived_at: float = field(default_factory=trio.current_time)
    """When it came, by trio's clock."""
    expected_s: float = 0.0
    """Seconds of the device that it will take, as far as that is known."""
    outcome: Outcome | None = None
    """Its answer or its error; None as long as it waits or runs."""
    waiters: list[trio.Event] = field(default_factory=list)
    """Events of the calls that want the outcome, set when there is one."""
    kind: str = field(init=False)
    """The kind of work, "forward" or "backward"."""
    rows: int = field(init=False)
    """Number of rows that it brings."""
    key: tuple[str, str, bool] = field(init=False)
    """Jobs of equal keys run together: the expert, the kind, and whether rows have dropout keys."""

    def __post_init__(self) -> None:
        self.kind = "forward" if self.output_grads is None else "backward"
        self.rows = len(self.inputs[0])
        self.key = (self.uid, self.kind, self.keys is not None)

    @property
    def nbytes(self) -> int:
        """Size of its tensors as arrays."""
        grads = 0 if self.output_grads is None else self.output_grads.nbytes
        return grads + sum(array.nbytes for array in self.inputs)

    def answer(self, results: tuple[Array, ...], updates: int) -> None:
        """End it: it was computed, by an expert that has taken so many updates."""
        if self.replay_key is not None:  # it may be remembered: without what else was computed with it
            results = tuple(map(_own, results))
        self._end(Answer(updates=updates, tensors=results))

    def fail(self, error: CallFailed) -> None:
        """End it: it was not computed, or changed nothing."""
        self._end(error)

    def _end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.inputs, self.output_grads, self.keys = (), None, None
        for event in self.waiters:
            event.set()


async def one_has_ended(jobs: Iterable[Job]) -> None:
    """Return when one of these jobs, all of which wait or run, has an outcome."""
    news, waiting = trio.Event(), tuple(jobs)
    for job in waiting:
        job.waiters.append(news)
    try:
        await news.wait()
    finally:
        for job in waiting:
            job.waiters.remove(news)


def _own(array: Array) -> Array:
    """An array that keeps little more in memory than itself."""
    held = getattr(array.base, "nbytes", array.nbytes)
    return array if held <= 1.25 * array.nbytes else array.copy()


def name_of(peer: bytes, uid: str, request_id: bytes) -> bytes:
    """Name of a backward request. Trainer and expert are part of it: equal ids of others do not get these gradients."""
    return hashlib.blake2b(peer + uid.encode() + b"/" + request_id, digest_size=NAME_BYTES).digest()


def learnt_before(uid: str) -> CallRefused:
    """The refusal of a retry whose answer is not kept."""
    return CallRefused(f"expert {uid} has learnt from this request before; its answer is not kept any more")


class RememberedJobs:
    """Backward jobs by their names; those that have ended are bounded in number and bytes.

    Args:
      max_entries: how many are remembered.
      max_bytes: how large their answers may be together.
    """

    def __init__(self, *, max_entries: int = 1024, max_bytes: int = 8 << 20) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: dict[bytes, tuple[Job, int]] = {}  # oldest first; with the size of the answer
        self._bytes = 0

    def find(self, replay_key: bytes) -> Job | None:
        """The job of this name, or None."""
        job, _ = self._entries.get(replay_key, (None, 0))
        return job

    def remember(self, replay_key: bytes, job: Job) -> None:
        """Keep a job that has just come, and forget the oldest that have ended beyond the bounds."""
        self.forget(replay_key)
        nbytes = sum(array.nbytes for array in job.inputs)  # about as much as its answer
        self._entries[replay_key] = (job, nbytes)
        self._bytes += nbytes
        while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
            each = ((key, job) for key, (job, _) in self._entries.items() if key != replay_key)
            oldest = next((key for key, job in each if job.outcome is not None), None)
            if oldest is None:
                return
            self.forget(oldest)

    def forget(self, replay_key: bytes) -> None:
        """Drop a job, if it is known."""
        _, nbytes = self._entries.pop(replay_key, (None, 0))
        self._bytes -= nbytes
