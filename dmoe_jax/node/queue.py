"""Jobs that wait at a node, each the part of a request that one expert is to compute, and the order in which they run.

The job that has waited longest is served next, and with it, in order of arrival, as many others of its *key* (expert
and kind of work) as fit into `max_batch_rows`: they become one XLA call. (The Learning@home prototype took the queue
with the *newest* request, against its own intention.)

What waits is bounded, in rows and in the time that it will take: beyond it a job is turned away at once, so that an
overloaded node says "busy" while the trainer can still choose another expert, instead of answering when nobody waits
any more. Of each bound one kind of work may take three quarters, so that a flood of backward requests leaves room for
forward ones.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import trio

from dmoe_jax.mixture.expert_calls import MAX_UPDATES, Answer, Outcome
from dmoe_net.errors import CallFailed, CallRefused
from dmoe_net.types import Array

KIND_SHARE = 0.75
"""Share of the queue for one kind of work."""
NAME_BYTES = 16
NOT_STALE = MAX_UPDATES
"""A gradient that saw so many updates is never stale."""

Key = tuple[str, str, bool]
"""Expert, kind of work, and whether rows have dropout keys. Jobs of equal keys run together."""


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
    key: Key = field(init=False)

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
        """End it as computed, by an expert that has taken so many updates."""
        if self.replay_key is not None:  # it may be remembered: without what else was computed with it
            results = tuple(map(_own, results))
        self._end(Answer(updates=updates, tensors=results))

    def fail(self, error: CallFailed) -> None:
        """End it as not computed, or without effect."""
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
    """The array, or a copy if it keeps much more in memory than itself."""
    held = getattr(array.base, "nbytes", array.nbytes)
    return array if held <= 1.25 * array.nbytes else array.copy()


class QueueFull(Exception):
    """The queue holds as much as it may: the message says how much, and `waiting_s` how many seconds of work."""

    def __init__(self, message: str, *, waiting_s: float) -> None:
        super().__init__(message)
        self.waiting_s = waiting_s


@dataclass(slots=True)
class _Total:
    rows: int = 0
    seconds: float = 0.0


class BatchQueue:
    """Waiting jobs of a device.

    A node gives forward jobs a head start, as if they had come earlier: a backward call with its optimiser's step costs
    several times as much, and hardly more for many rows than for one. While those gather that wait for one, the cheap
    work is done; its callers come back with backward requests and make larger batches of these. Nobody waits longer for
    that than the head start and what came within it.

    Args:
      max_batch_rows: most rows of one batch, and of a job.
      max_waiting_rows: most rows that wait in all.
      max_wait_s: most seconds of work that wait in all; a single job may bring more.
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
        self._waiting: list[Job] = []  # oldest first; at most `max_waiting_rows` long
        self._totals: dict[str, _Total] = {}  # by kind

    @property
    def waiting_rows(self) -> int:
        """Rows that wait now."""
        return sum(total.rows for total in self._totals.values())

    def waits(self, key: Key) -> bool:
        """Return True if a job of this key waits."""
        return any(job.key == key for job in self._waiting)

    def waits_for(self, uid: str) -> bool:
        """Return True if a job for this expert waits."""
        return any(job.uid == uid for job in self._waiting)

    def only_batch(self) -> tuple[Job, ...]:
        """Return all that waits, if it would be one batch; else nothing."""
        if not self._waiting or self.waiting_rows > self._max_batch_rows:
            return ()
        key = self._waiting[0].key
        return tuple(self._waiting) if all(job.key == key for job in self._waiting) else ()

    def submit(self, job: Job) -> None:
        """Put a job at the end. Raises ValueError if it has no rows or more than a batch may have, and QueueFull if it
        would exceed a bound, or the share of its kind."""
        if not 1 <= job.rows <= self._max_batch_rows:
            raise ValueError(f"expected 1 to {self._max_batch_rows} rows in one request, got {job.rows}")
        own = self._totals.setdefault(job.kind, _Total())
        whole = _Total(self.waiting_rows, sum(total.seconds for total in self._totals.values()))
        for what, total, share in (("", whole, 1.0), (f" of {job.kind} requests", own, KIND_SHARE)):
            most_rows = max(int(share * self._max_waiting_rows), self._max_batch_rows)
            most_s = share * self._max_wait_s
            full = ""
            if total.rows + job.rows > most_rows:
                full = f"{total.rows} rows{what} wait already, at most {most_rows} may"
            elif total.rows and total.seconds + job.expected_s > most_s:
                full = f"{total.seconds:.2g} s of work{what} wait already, at most {most_s:.2g} s may"
            if full:
                raise QueueFull(full, waiting_s=whole.seconds)
        self._waiting.append(job)
        own.rows += job.rows
        own.seconds += job.expected_s

    def withdraw(self, job: Job) -> bool:
        """Take a job back (its caller gave up). Return True if it was still waiting."""
        if job not in self._waiting:
            return False
        self._waiting.remove(job)
        self._take_off(job)
        return True

    def take(
        self,
        row_limit: Callable[[Key], int] | None = None,
        *,
        may_run: Callable[[Key], bool] = lambda key: True,
    ) -> tuple[Job, ...]:
        """Take the next batch, oldest job first but for head starts; empty when nothing waits that may run.

        Args:
          row_limit: the most rows for now of a batch of this key; a single larger job is taken all the same.
          may_run: True if a job of this key may run now.
        """
        first = self._first(may_run)
        if first is None:
            return ()
        key = first.key
        limit = self._max_batch_rows if row_limit is None else min(self._max_batch_rows, row_limit(key))
        batch: dict[Job, None] = {}
        rows = 0
        for job in self._waiting:
            if job.key == key:
                if batch and rows + job.rows > limit:
                    break
                batch[job] = None
                rows += job.rows
        self._waiting = [job for job in self._waiting if job not in batch]
        for job in batch:
            self._take_off(job)
        return tuple(batch)

    def _first(self, may_run: Callable[[Key], bool]) -> Job | None:
        """The earliest, head starts included, of the oldest jobs of each kind that may run."""
        oldest: dict[str, Job] = {}
        kinds = sum(total.rows > 0 for total in self._totals.values())
        for job in self._waiting:
            if job.kind not in oldest and may_run(job.key):
                oldest[job.kind] = job
                if len(oldest) == kinds:
                    break
        starts = self._head_starts
        return min(oldest.values(), key=lambda job: job.arrived_at - starts.get(job.kind, 0.0), default=None)

    def _take_off(self, job: Job) -> None:
        total = self._totals[job.kind]
        total.rows -= job.rows
        # Not what rounding would leave when nothing waits.
        total.seconds = total.seconds - job.expected_s if total.rows else 0.0


def name_of(peer: bytes, uid: str, request_id: bytes) -> bytes:
    """Name of a backward request. Trainer and expert are part of it: equal ids of others do not get these gradients."""
    return hashlib.blake2b(peer + uid.encode() + b"/" + request_id, digest_size=NAME_BYTES).digest()


def learnt_before(uid: str) -> CallRefused:
    """The refusal of a retry whose answer is not kept."""
    return CallRefused(f"expert {uid} has learnt from this request before; its answer is not kept any more")


class RememberedJobs:
    """Backward jobs by their names; those that have ended are bounded in number and bytes.

    A backward request carries an id drawn by its trainer. If the connection breaks after the node has stepped the
    expert but before the reply arrives, the trainer sends the same id again and gets the remembered job's answer
    instead of a second optimiser step. Beyond the bounds the oldest finished jobs are forgotten. What still waits or
    runs is never forgotten, whatever came after it: its retry would train a second time. The queue bounds how much that
    is.

    A remembered answer keeps no more of its batch than its own rows, but answers of all sizes that come and go leave
    holes in the heap. So a node holds more than the bound says: with 64 MiB it grew by 125 MB in four minutes of mixed
    load, with 16 MiB by 23. A retry whose answer is forgotten is refused: an expert knows by itself what it has learnt
    from (`ExpertBackend.learnt_from`), through a restart too, and copies of an expert tell each other
    (`dmoe_jax.placement.learnt`). It costs a trainer that part of one gradient.
    """

    def __init__(self, *, max_entries: int = 1024, max_bytes: int = 8 << 20) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: dict[bytes, tuple[Job, int]] = {}  # oldest first; with the size of the answer
        self._bytes = 0

    def find(self, replay_key: bytes) -> Job | None:
        """Return the job of this name, or None."""
        return self._entries.get(replay_key, (None, 0))[0]

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
