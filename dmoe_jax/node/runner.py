"""Carrying out what waits in a node's queue: batch by batch on the device, within what is compiled.

Small batches of several experts share a turn of the device (`dmoe_jax.node.turns`).

Serving does not wait for the compiler. The first programs are compiled before the experts are announced; batches are
no larger than what is compiled, and when more waits, the next size is compiled beside the device (`Device.aside`). A
single request that is larger is answered in parts, or, since a backward in parts would be several updates, waits for
its program while others are served.

A batch whose update would not be finite changes nothing. Its requests are then run one by one, so that only the guilty
ones are refused.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import cast

import trio

from dmoe_jax.device import Device, DeviceTime
from dmoe_jax.metrics.node import KINDS, NodeRecorder
from dmoe_jax.node.backend import ExpertBackend, UpdateRejected, stack_of
from dmoe_jax.node.batching import BatchQueue
from dmoe_jax.node.gathering import Gathering
from dmoe_jax.node.job import Job
from dmoe_jax.node.replay import learnt_before
from dmoe_jax.node.turns import BatchTimes, backend_of, below_one_another, groups_of, joined, rows_of, run_turn
from net.errors import CallRefused, RemoteFailure
from net.types import Array

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class BatchCounts:
    """What was run since the start; everything here only grows."""

    batches: int = 0
    """Batches that were computed."""
    failed: int = 0
    """Requests whose batch raised."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Requests whose update was not finite, by `UpdateRejected.reason`."""
    busy_s: float = 0.0
    """Seconds in which the device worked on batches, see `Device.busy_s`; rejected ones too."""
    answered: int = 0
    """Requests that were computed."""
    rows: int = 0
    """Their rows."""
    call_s: float = 0.0
    """Seconds that they spent here in all, waiting and computed."""

    def __add__(self, other: "BatchCounts") -> "BatchCounts":
        return BatchCounts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


class BatchRunner:
    """Runs the requests in `queue`, in its order.

    Args:
      backends: the experts by uid, and others; some may be added while it runs, and taken off when `finish` has
        returned.
      device: runs and compiles them.
      max_batch_rows: the most rows of one batch.
      max_waiting_rows, max_wait_s: the most rows, and seconds of work, in the queue.
      forward_head_start_s: as of `NodeConfig`.
      recorder: is told of every batch.
    """

    def __init__(
        self,
        backends: Mapping[str, ExpertBackend],
        device: Device,
        *,
        max_batch_rows: int,
        max_waiting_rows: int,
        max_wait_s: float = math.inf,
        forward_head_start_s: float = 0.0,
        recorder: NodeRecorder | None = None,
    ) -> None:
        self.queue: BatchQueue[Job] = BatchQueue(
            max_batch_rows=max_batch_rows,
            max_waiting_rows=max_waiting_rows,
            max_wait_s=max_wait_s,
            head_starts={"forward": forward_head_start_s},
        )
        self.counts = BatchCounts()
        """What it has done."""
        self._backends = backends
        self._device = device
        self._recorder = recorder or NodeRecorder()
        self._max_batch_rows = max_batch_rows
        self._times = BatchTimes()
        self._row_times = BatchTimes()
        self._compiling = trio.Lock()
        self._growing: set[int] = set()
        self._work_arrived = trio.Event()
        self._gathering = Gathering(lambda: self.queue.waiting_rows)
        self._running: Counter[str] = Counter()  # batches that were taken from the queue, by uid
        self._finishing: set[trio.Event] = set()  # of those who wait until an expert has no work any more

    def submit(self, job: Job) -> None:
        """Put a job into the queue.

        Raises:
          QueueFull: if too much waits already.
        """
        row_s = self._row_times.expected_s(self._work_of(job))
        job.expected_s = job.rows * row_s if math.isfinite(row_s) else 0.0
        self.queue.submit(job)
        self._work_arrived.set()
        self._gathering.has_arrived(job.request.uid)

    def withdraw(self, job: Job) -> bool:
        """Take a job back, whose caller has given up. Returns whether it was still waiting."""
        was_waiting = self.queue.withdraw(job)
        self._notify()
        return was_waiting

    async def finish(self, uid: str) -> None:
        """Return when nothing waits or runs for an expert any more, for which no further jobs are submitted."""
        while self._running[uid] or any(
            self.queue.waits((uid, kind, has_keys)) for kind in KINDS for has_keys in (False, True)
        ):
            news = trio.Event()
            self._finishing.add(news)
            try:
                await news.wait()
            finally:
                self._finishing.discard(news)
        del self._running[uid]

    def _notify(self) -> None:
        for event in self._finishing:
            event.set()

    async def compile(self, backend: ExpertBackend, bucket: int) -> None:
        """Compile for batches of so many rows, beside the device, unless that is done; one program at a time."""
        async with self._compiling:
            if bucket not in backend.programs.warm:
                await self._device.aside(backend.warm_up_bucket, bucket)

    async def run(self) -> None:
        """Serve the queue for ever. If cancelled, the batch that runs is finished first (see `Device.run`)."""
        async with trio.open_nursery() as nursery:
            while True:
                if jobs := self.queue.only_batch():
                    await self._gathering.wait(_uid_of(jobs[0].key), self._times.expected_s(self._size_of(jobs)))
                if turn := self._take_turn(nursery):
                    await self._run_turn(turn)
                    self._gathering.have_answered(_uid_of(job.key) for jobs in turn for job in jobs)
                    self._has_run(turn)
                else:
                    self._work_arrived = trio.Event()
                    await self._work_arrived.wait()

    def _take_turn(self, nursery: trio.Nursery) -> list[Sequence[Job]]:
        """The batches that the device is given next, each of another expert; empty when nothing waits.

        Compiles in `nursery` what they want, or would want.
        """
        turn: dict[str, Sequence[Job]] = {}
        expected_s = 0.0
        while not turn or expected_s < self._device.turn_s:
            taken = self.queue.take(self._row_limit, may_run=lambda key: _uid_of(key) not in turn)
            if not taken:
                break
            if not (jobs := self._still_new(taken)):
                continue
            key, backend = jobs[0].key, backend_of(jobs, self._backends)
            rows, limit = rows_of(jobs), self._row_limit(key)
            self._running[jobs[0].request.uid] += 1
            if rows > limit or (self.queue.waits(key) and limit < self._max_batch_rows):
                nursery.start_soon(self._grow, backend, backend.bucket_of(max(rows, limit + 1)))
            if rows > limit and (limit == 0 or jobs[0].kind == "backward"):
                nursery.start_soon(self._run_cold, backend, jobs, backend.bucket_of(rows))
            else:
                turn[jobs[0].request.uid] = jobs
                expected_s += self._expected_s(jobs, turn)
        return list(turn.values())

    def _still_new(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """Those from which the expert has not learnt: while they waited it may have been given another copy's state
        that has."""
        known = backend_of(jobs, self._backends).learnt_from
        if not any(job.replay_key in known for job in jobs):
            return jobs
        for job in jobs:
            if job.replay_key in known:
                job.fail(learnt_before(job.uid))
        self._notify()
        return [job for job in jobs if job.replay_key not in known]

    def _turn_s(self, turn: Sequence[Sequence[Job]]) -> float:
        """Seconds that these batches will take together; infinite if nobody knows."""
        return sum(self._times.expected_s(self._size_of(jobs)) for jobs in turn)

    def _expected_s(self, jobs: Sequence[Job], turn: Iterable[str]) -> float:
        """Seconds by which this batch makes the turn longer, which has those of these experts, its own among them."""
        share, backend = self._times.expected_s(self._size_of(jobs)), backend_of(jobs, self._backends)
        stack = stack_of(backend)
        if stack is None or stack.form == "looped":
            return share
        # What is computed at the same time takes about as long as one: only when there is no room left it counts.
        most = stack.most_together(rows_of(jobs))
        return 0.0 if sum(stack_of(self._backends[uid]) is stack for uid in turn) % most else most * share

    def _has_run(self, turn: Sequence[Sequence[Job]]) -> None:
        """These batches were answered."""
        for jobs in turn:
            self._running[_uid_of(jobs[0].key)] -= 1
        self._notify()

    def _size_of(self, jobs: Sequence[Job]) -> Hashable:
        """What decides how long a batch takes."""
        backend = backend_of(jobs, self._backends)
        return (*self._work_of(jobs[0]), backend.bucket_of(rows_of(jobs)))

    def _work_of(self, job: Job) -> tuple[Hashable, ...]:
        """What decides how long a row takes: the program."""
        _, *kind = job.key
        return (id(self._backends[job.request.uid].programs), *kind)

    def _row_limit(self, key: Hashable) -> int:
        """The most rows of a batch that compiles nothing; of any batch, where compiling takes no time."""
        if not self._device.compiles_aside:
            return self._max_batch_rows
        return min(self._backends[_uid_of(key)].warm_rows, self._max_batch_rows)

    async def _grow(self, backend: ExpertBackend, bucket: int) -> None:
        """Compile for larger batches, because they are wanted; one size at a time, and after a failure no more."""
        if id(backend.programs) in self._growing:
            return
        self._growing.add(id(backend.programs))
        try:
            await self.compile(backend, bucket)
        except Exception:
            logger.exception(
                "expert %s does not compile for %d rows; batches stay smaller", backend.expert.name, bucket
            )
            return
        self._growing.discard(id(backend.programs))

    async def _run_cold(self, backend: ExpertBackend, jobs: Sequence[Job], bucket: int) -> None:
        """Run a batch whose program must be compiled first, while others are served."""
        try:
            await self.compile(backend, bucket)
        except Exception as error:
            self._fail(jobs, error)
        else:
            await self._run_batch(jobs)
        self._has_run([jobs])

    async def _run_turn(self, turn: Sequence[Sequence[Job]]) -> None:
        """Run batches together, if there are several; one that must be cut into parts is run by itself."""
        whole = [jobs for jobs in turn if rows_of(jobs) <= self._row_limit(jobs[0].key)]
        together = whole if len(whole) > 1 else []
        if together:
            await self._run_together(together)
        for jobs in turn:
            if jobs not in together:
                await self._run_batch(jobs)

    async def _run_together(self, turn: Sequence[Sequence[Job]]) -> None:
        """Have XLA begin all of it before anybody waits for the first; batches of one stack share a program."""
        started, spent = trio.current_time(), DeviceTime()
        groups = groups_of(turn, self._backends)
        expected_s = self._turn_s(turn)
        try:
            outcomes = await self._device.run(
                run_turn, groups, self._backends, time.perf_counter, spent=spent, expected_s=expected_s
            )
        finally:
            self.counts.busy_s += spent.seconds
        for group, outcome in zip(groups, outcomes, strict=True):
            share_s = outcome.seconds / len(group)
            found = outcome.results or [outcome.error] * len(group)
            for jobs, results in zip(group, found, strict=True):
                if isinstance(results, Exception):
                    await self._go_without(jobs, results)
                else:
                    self._note_time(jobs, self._size_of(jobs), share_s)
                    self._answer(jobs, results, started, share_s)

    async def _run_batch(self, jobs: Sequence[Job]) -> None:
        started, spent, size = trio.current_time(), DeviceTime(), self._size_of(jobs)
        try:
            results = await self._compute(jobs, spent)
        except Exception as error:
            await self._go_without(jobs, error)
            return
        finally:
            self.counts.busy_s += spent.seconds
        self._note_time(jobs, size, spent.seconds)
        self._answer(jobs, results, started, spent.seconds)

    async def _go_without(self, jobs: Sequence[Job], error: Exception) -> None:
        """The batch failed: refuse who is guilty, if that can be told, and answer the others."""
        if not isinstance(error, UpdateRejected):
            self._fail(jobs, error)
        elif len(jobs) == 1:
            self._refuse(jobs[0], error)
        else:
            for job in jobs:
                await self._run_batch([job])

    def _note_time(self, jobs: Sequence[Job], size: Hashable, seconds: float) -> None:
        self._times.note(size, seconds)
        self._row_times.note(self._work_of(jobs[0]), seconds / rows_of(jobs))

    def _answer(self, jobs: Sequence[Job], results: Sequence[Array], started: float, device_s: float) -> None:
        """Hand the jobs of a batch that began at `started` their rows of the results."""
        backend, now = backend_of(jobs, self._backends), trio.current_time()
        self._record(backend, jobs, started, device_s, sum(result.nbytes for result in results))
        self.counts.batches += 1
        self.counts.answered += len(jobs)
        self.counts.rows += rows_of(jobs)
        self.counts.call_s += sum(now - job.arrived_at for job in jobs)
        stop = 0
        for job in jobs:
            start, stop = stop, stop + job.rows
            job.answer(tuple(result[start:stop] for result in results), backend.update_count)

    def _record(
        self, backend: ExpertBackend, jobs: Sequence[Job], started: float, device_s: float, sent_bytes: int
    ) -> None:
        """Tell the recorder of a batch, before the requests are forgotten."""
        kind, before = jobs[0].kind, backend.update_count - 1
        self._recorder.batch(
            kind,
            jobs[0].request.uid,
            rows=[job.rows for job in jobs],
            waited_s=[started - job.arrived_at for job in jobs],
            device_s=device_s,
            staleness=[max(0, before - job.request.seen) for job in jobs] if kind == "backward" else (),
            received_bytes=sum(job.request.nbytes for job in jobs),
            sent_bytes=sent_bytes,
        )

    async def _compute(self, jobs: Sequence[Job], spent: DeviceTime) -> tuple[Array, ...]:
        """Output, or gradients of the inputs, for the rows of all jobs; the device's seconds are added to `spent`."""
        backend = backend_of(jobs, self._backends)
        batch = joined(jobs)
        inputs, keys, grads = batch.inputs, batch.keys, batch.output_grads
        expected_s = self._turn_s([jobs])
        if grads is not None:
            return await self._device.run(
                backend.backward,
                inputs,
                grads,
                keys,
                batch.seen,
                batch.requests,
                spent=spent,
                expected_s=expected_s,
            )
        rows = inputs[0].shape[0]
        step = min(rows, self._row_limit(jobs[0].key))
        outputs = []
        for start in range(0, rows, step):
            some = slice(start, start + step)
            own_keys = None if keys is None else keys[some]
            own = [array[some] for array in inputs]
            outputs.append(await self._device.run(backend.forward, own, own_keys, spent=spent, expected_s=expected_s))
        return (below_one_another(outputs),)

    def _refuse(self, job: Job, rejected: UpdateRejected) -> None:
        self.counts.rejected[rejected.reason] += 1
        uid = job.request.uid
        what = {
            "update": f"its gradient would make expert {uid} not finite",
            "input gradient": "the gradient of its input is not finite",
        }[rejected.reason]
        job.fail(CallRefused(f"expert {uid} did not learn from the request: {what}"))

    def _fail(self, jobs: Sequence[Job], error: Exception) -> None:
        """Answer the jobs of a batch that raised. Whatever XLA says concerns these requests, not the node."""
        text, uid = "a batch of %d requests for expert %s failed", jobs[0].request.uid
        logger.error(text, len(jobs), uid, exc_info=error)
        self.counts.failed += len(jobs)
        for job in jobs:
            job.fail(RemoteFailure(f"expert {uid} failed to compute; see the node's log"))


def _uid_of(key: Hashable) -> str:
    uid, _, _ = cast(tuple[str, str, bool], key)
    return uid
