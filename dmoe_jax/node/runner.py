"""Carrying out what waits in a node's queues: batch by batch on each device, within what is compiled.

Each device has a queue, turns and a thread of its own; a request goes to the device on which its expert lives. What is
bounded for one queue is bounded for each of them: a device whose experts nobody asks does not make room for the
others' requests, which it could not compute. Small batches of several experts share a turn (`dmoe_jax.node.turn`).

Serving does not wait for the compiler. The first programs are compiled before the experts are announced; batches are
no larger than what is compiled, and when more waits, the next size is compiled beside the device (`Device.aside`). A
single request that is larger is answered in parts, or, since a backward in parts would be several updates, waits for
its program while others are served.

A batch of a large expert takes about as long for one row as for eight. Callers whose answers were just handed out
mostly ask it again at once; a device that begins with what is there meanwhile serves them in two groups that take turns
for ever. So before a long batch with fewer requests than its expert's last one, when nothing else is to be done, it
waits a moment for the others (`NodeConfig.max_queue_delay_s`).

A batch whose update would not be finite changes nothing. Its requests are then run one by one, so that only the guilty
ones are refused.
"""

import functools
import logging
import math
import operator
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, cast

import trio

from dmoe_jax.device import DeviceTime
from dmoe_jax.metrics.node import KINDS, NodeRecorder
from dmoe_jax.node.backend import ExpertBackend, UpdateRejected
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.devices import PlacedDevice
from dmoe_jax.node.figures import BatchCounts, BatchTimes
from dmoe_jax.node.host_calls import one_at_a_time
from dmoe_jax.node.job import Job, learnt_before
from dmoe_jax.node.placement import bytes_by_place
from dmoe_jax.node.queue import BatchQueue
from dmoe_jax.node.turn import Jobs, backend_of, below_one_another, joined, rows_of, run_turn, sharing_programs
from net.errors import CallRefused, RemoteFailure
from net.types import Array

logger = logging.getLogger(__name__)

_LONG_BATCH = 4
"""Times the delay in the queue, that a batch takes which waits."""


class BatchRunner:
    """Runs the requests for all experts of a node.

    Args:
      backends: the experts by uid; some may be added while it runs, and taken off when `finish` has returned.
      devices: where they live, place by place.
      config: bounds of batches and queues.
      recorder: is told of every batch.

    Raises:
      ValueError: an expert lives where there is no device.
    """

    def __init__(
        self,
        backends: Mapping[str, ExpertBackend],
        devices: Sequence[PlacedDevice],
        config: NodeConfig,
        recorder: NodeRecorder | None = None,
    ) -> None:
        for uid, backend in backends.items():
            if not backend.place.number < len(devices):
                raise ValueError(f"expert {uid} lives at place {backend.place.number}, but there are {len(devices)}")
        self._backends = backends
        self._first_rows = min(config.warm_up_rows, config.max_batch_rows)
        recorder = recorder or NodeRecorder()
        self._loops = [_DeviceLoop(backends, each, config, recorder) for each in devices]

    async def run(self) -> None:
        """Serve all queues for ever. If cancelled, the batches that run are finished first (see `Device.run`)."""
        async with trio.open_nursery() as nursery:
            for loop in self._loops:
                nursery.start_soon(loop.run)

    def submit(self, job: Job) -> None:
        """Put a job into the queue of the device on which its expert lives.

        Raises:
          QueueFull: if too much waits there already.
        """
        self._loop_of(self._backends[job.uid]).submit(job)

    def withdraw(self, job: Job) -> bool:
        """Take a job back, whose caller has given up. Returns True if it was still waiting."""
        return any(loop.withdraw(job) for loop in self._loops)

    async def finish(self, uid: str) -> None:
        """Return when nothing waits or runs for an expert any more, for which no further jobs are submitted."""
        await self._loop_of(self._backends[uid]).finish(uid)

    @property
    def counts(self) -> BatchCounts:
        """What all devices have done together."""
        return functools.reduce(operator.add, (loop.counts for loop in self._loops))

    @property
    def waiting_rows(self) -> int:
        """Rows that wait now, for whichever device."""
        return sum(loop.queue.waiting_rows for loop in self._loops)

    @property
    def warm_rows(self) -> int:
        """Rows for which all experts are compiled."""
        return min((backend.warm_rows for backend in self._backends.values()), default=0)

    def status(self) -> list[dict[str, Any]]:
        """What each device does, as plain CBOR data.

        Keys: `name` of the device or mesh, the `experts` that live there and their `nbytes`, seconds `busy_s` in which
        it worked on batches, `batches` and their `rows`, and `waiting_rows` in its queue.
        """
        backends = list(self._backends.values())
        nbytes = bytes_by_place(((each.place, each.nbytes) for each in backends), len(self._loops))
        return [
            {
                "name": loop.place.name,
                "experts": sum(backend.place.number == loop.place.number for backend in backends),
                "nbytes": nbytes[loop.place.number],
                "busy_s": loop.counts.busy_s,
                "batches": loop.counts.batches,
                "rows": loop.counts.rows,
                "waiting_rows": loop.queue.waiting_rows,
            }
            for loop in self._loops
        ]

    def cold_programs(self, prototypes: Sequence[ExpertBackend] = ()) -> list[tuple[ExpertBackend, int]]:
        """What is to be compiled before the experts are announced, smallest first: nothing where it takes no time.

        Args:
          prototypes: experts of further kinds.

        Returns: pairs of a backend, one of those that share its programs, and a number of rows.
        """
        if not self._loops[0].device.compiles_aside or not self._first_rows:
            return []
        kinds = {backend.programs.kind: backend for backend in (*prototypes, *self._backends.values())}.values()
        cold = [
            (backend, bucket)
            for backend in kinds
            for bucket in backend.buckets_up_to(self._first_rows)
            if bucket not in backend.programs.warm
        ]
        return sorted(cold, key=lambda each: each[1])

    async def compile(self, backend: ExpertBackend, bucket: int) -> None:
        """Compile for batches of so many rows, beside the device, unless that is done; one program at a time."""
        await self._loop_of(backend).compile(backend, bucket)

    async def aside(self, function: Any, *args: Any) -> None:
        """Do what concerns the whole process beside the devices; not in virtual time, where many nodes share one."""
        if self._loops[0].device.compiles_aside:
            await self._loops[0].device.aside(function, *args)

    def _loop_of(self, backend: ExpertBackend) -> "_DeviceLoop":
        return self._loops[backend.place.number]


class _DeviceLoop:
    """Takes what waits for one device, runs it there, and answers."""

    def __init__(
        self, backends: Mapping[str, ExpertBackend], placed: PlacedDevice, config: NodeConfig, recorder: NodeRecorder
    ) -> None:
        self.place, self.device = placed.place, placed.device
        self.queue: BatchQueue[Job] = BatchQueue(
            max_batch_rows=config.max_batch_rows,
            max_waiting_rows=config.max_waiting_rows,
            max_wait_s=config.max_wait_s,
            head_starts={"forward": config.forward_head_start_s},
        )
        self.counts = BatchCounts()
        self._backends = backends
        self._recorder = recorder
        self._max_batch_rows, self._delay_s = config.max_batch_rows, config.max_queue_delay_s
        self._times = BatchTimes()
        self._row_times = BatchTimes()
        self._compiling = trio.Lock()
        self._growing: set[int] = set()
        self._work_arrived = trio.Event()
        self._answered_at = -math.inf
        self._together: dict[str, int] = {}  # requests of each expert's last batch, of the last turn
        self._running: Counter[str] = Counter()  # batches that were taken from the queue, by uid
        self._finishing: set[trio.Event] = set()  # of those who wait until an expert has no work any more

    def submit(self, job: Job) -> None:
        row_s = self._row_times.expected_s(self._work_of(job))
        job.expected_s = job.rows * row_s if math.isfinite(row_s) else 0.0
        self.queue.submit(job)
        self._work_arrived.set()

    def withdraw(self, job: Job) -> bool:
        was_waiting = self.queue.withdraw(job)
        self._notify()
        return was_waiting

    async def finish(self, uid: str) -> None:
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
        async with self._compiling:
            if bucket not in backend.programs.warm:
                await self.device.aside(backend.warm_up_bucket, bucket)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                await self._wait_for_others()
                if turn := self._take_turn(nursery):
                    together = {_uid_of(jobs[0].key): len(jobs) for jobs in turn}
                    await self._run_turn(turn)
                    self._together, self._answered_at = together, trio.current_time()
                    self._has_run(turn)
                else:
                    await self._news()

    async def _news(self) -> None:
        self._work_arrived = trio.Event()
        await self._work_arrived.wait()

    async def _wait_for_others(self) -> None:
        """Return when what waits had better begin: mostly at once."""
        until = self._answered_at + self._delay_s
        if trio.current_time() >= until:
            return
        with trio.move_on_at(until):
            while jobs := self.queue.only_batch():
                expected_s = self._times.expected_s(self._size_of(jobs))
                is_long = _LONG_BATCH * self._delay_s <= expected_s < math.inf
                if not is_long or len(jobs) >= self._together.get(_uid_of(jobs[0].key), 0):
                    return
                await self._news()

    def _take_turn(self, nursery: trio.Nursery) -> list[Jobs]:
        """The batches that the device is given next, each of another expert; empty when nothing waits.

        Compiles in `nursery` what they want, or would want.
        """
        turn: dict[str, Jobs] = {}
        expected_s = 0.0
        while not turn or expected_s < self.device.turn_s:
            taken = self.queue.take(self._row_limit, may_run=lambda key: _uid_of(key) not in turn)
            if not taken:
                break
            if not (jobs := self._still_new(taken)):
                continue
            key, backend = jobs[0].key, backend_of(jobs, self._backends)
            rows, limit = rows_of(jobs), self._row_limit(key)
            self._running[jobs[0].uid] += 1
            if rows > limit or (self.queue.waits(key) and limit < self._max_batch_rows):
                nursery.start_soon(self._grow, backend, backend.bucket_of(max(rows, limit + 1)))
            if rows > limit and (limit == 0 or jobs[0].kind == "backward"):
                nursery.start_soon(self._run_cold, backend, jobs, backend.bucket_of(rows))
            else:
                turn[jobs[0].uid] = jobs
                expected_s += self._expected_s(jobs, turn)
        return list(turn.values())

    def _still_new(self, jobs: Jobs) -> Jobs:
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

    def _turn_s(self, turn: Sequence[Jobs]) -> float:
        """Seconds that these batches will take together; infinite if nobody knows."""
        if any(self._calls_host(jobs) for jobs in turn):
            return math.inf  # It may even wait for something that the event loop does.
        return sum(self._times.expected_s(self._size_of(jobs)) for jobs in turn)

    def _expected_s(self, jobs: Jobs, turn: Iterable[str]) -> float:
        """Seconds by which this batch makes the turn longer, which has those of these experts, its own among them."""
        share, backend = self._times.expected_s(self._size_of(jobs)), backend_of(jobs, self._backends)
        if not backend.programs.at_once:
            return share
        # What is computed at the same time takes about as long as one: only when there is no room left it counts.
        most = backend.programs.most_together(rows_of(jobs))
        return 0.0 if sum(self._backends[uid].group is backend.group for uid in turn) % most else most * share

    def _has_run(self, turn: Sequence[Jobs]) -> None:
        """These batches were answered."""
        for jobs in turn:
            self._running[_uid_of(jobs[0].key)] -= 1
        self._notify()

    def _size_of(self, jobs: Jobs) -> Hashable:
        """What decides how long a batch takes."""
        backend = backend_of(jobs, self._backends)
        return (*self._work_of(jobs[0]), backend.bucket_of(rows_of(jobs)))

    def _work_of(self, job: Job) -> tuple[Hashable, ...]:
        """What decides how long a row takes: the program."""
        _, *kind = job.key
        return (self._backends[job.uid].programs.kind, *kind)

    def _calls_host(self, jobs: Jobs) -> bool:
        """True if the program of these jobs is known to call the host."""
        return backend_of(jobs, self._backends).programs.calls_host

    def _row_limit(self, key: Hashable) -> int:
        """The most rows of a batch that compiles nothing; of any batch, where compiling takes no time."""
        if not self.device.compiles_aside:
            return self._max_batch_rows
        return min(self._backends[_uid_of(key)].warm_rows, self._max_batch_rows)

    async def _grow(self, backend: ExpertBackend, bucket: int) -> None:
        """Compile for larger batches, because they are wanted; one size at a time, and after a failure no more."""
        if backend.programs.kind in self._growing:
            return
        self._growing.add(backend.programs.kind)
        try:
            await self.compile(backend, bucket)
        except Exception:
            logger.exception(
                "expert %s does not compile for %d rows; batches stay smaller", backend.expert.name, bucket
            )
            return
        self._growing.discard(backend.programs.kind)

    async def _run_cold(self, backend: ExpertBackend, jobs: Jobs, bucket: int) -> None:
        """Run a batch whose program must be compiled first, while others are served."""
        try:
            await self.compile(backend, bucket)
        except Exception as error:
            self._fail(jobs, error)
        else:
            await self._run_batch(jobs)
        self._has_run([jobs])

    async def _run_turn(self, turn: Sequence[Jobs]) -> None:
        """Run batches together, if there are several; by themselves those that must be cut into parts or call the
        host."""
        whole = [jobs for jobs in turn if rows_of(jobs) <= self._row_limit(jobs[0].key) and not self._calls_host(jobs)]
        together = whole if len(whole) > 1 else []
        if together:
            await self._run_together(together)
        for jobs in turn:
            if jobs not in together:
                await self._run_batch(jobs)

    async def _run_together(self, turn: Sequence[Jobs]) -> None:
        """Have XLA begin all of it before anybody waits for the first; batches of one group share a program."""
        started, spent = trio.current_time(), DeviceTime()
        programs, expected_s = sharing_programs(turn, self._backends), self._turn_s(turn)
        try:
            done = await self.device.run(
                run_turn, programs, self._backends, time.perf_counter, spent=spent, expected_s=expected_s
            )
        finally:
            self.counts.busy_s += spent.seconds
        for jobs, outcome, seconds in done:
            if isinstance(outcome, Exception):
                await self._go_without(jobs, outcome)
            else:
                self._note_time(jobs, self._size_of(jobs), seconds)
                self._answer(jobs, outcome, started, seconds)

    async def _run_batch(self, jobs: Jobs) -> None:
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

    async def _go_without(self, jobs: Jobs, error: Exception) -> None:
        """The batch failed: refuse who is guilty, if that can be told, and answer the others."""
        if not isinstance(error, UpdateRejected):
            self._fail(jobs, error)
        elif len(jobs) == 1:
            self._refuse(jobs[0], error)
        else:
            for job in jobs:
                await self._run_batch([job])

    def _note_time(self, jobs: Jobs, size: Hashable, seconds: float) -> None:
        self._times.note(size, seconds)
        self._row_times.note(self._work_of(jobs[0]), seconds / rows_of(jobs))

    def _answer(self, jobs: Jobs, results: Sequence[Array], started: float, device_s: float) -> None:
        """Hand the jobs of a batch that began at `started` their rows of the results."""
        backend, now = backend_of(jobs, self._backends), trio.current_time()
        kind, before = jobs[0].kind, backend.update_count - 1
        self._recorder.batch(
            kind,
            jobs[0].uid,
            rows=[job.rows for job in jobs],
            waited_s=[started - job.arrived_at for job in jobs],
            device_s=device_s,
            staleness=[max(0, before - job.seen) for job in jobs] if kind == "backward" else (),
            received_bytes=sum(job.nbytes for job in jobs),
            sent_bytes=sum(result.nbytes for result in results),
        )
        self.counts.batches += 1
        self.counts.answered += len(jobs)
        self.counts.rows += rows_of(jobs)
        self.counts.call_s += sum(now - job.arrived_at for job in jobs)
        stop = 0
        for job in jobs:
            start, stop = stop, stop + job.rows
            job.answer(tuple(result[start:stop] for result in results), backend.update_count)

    async def _compute(self, jobs: Jobs, spent: DeviceTime) -> tuple[Array, ...]:
        """Output, or gradients of the inputs, for the rows of all jobs; the device's seconds are added to `spent`."""
        backend = backend_of(jobs, self._backends)
        batch = joined(jobs)
        inputs, keys, grads = batch.inputs, batch.keys, batch.output_grads
        run = functools.partial(self.device.run, spent=spent, expected_s=self._turn_s([jobs]))
        forward, backward = backend.forward, backend.backward
        if self._calls_host(jobs):
            forward, backward = one_at_a_time(forward), one_at_a_time(backward)
        if grads is not None:
            gradients: tuple[Array, ...] = await run(backward, inputs, grads, keys, batch.seen, batch.requests)
            return gradients
        step = min(batch.rows, self._row_limit(jobs[0].key))
        outputs = []
        for start in range(0, batch.rows, step):
            some = slice(start, start + step)
            own_keys = None if keys is None else keys[some]
            outputs.append(await run(forward, [array[some] for array in inputs], own_keys))
        return (below_one_another(outputs),)

    def _refuse(self, job: Job, rejected: UpdateRejected) -> None:
        self.counts.rejected[rejected.reason] += 1
        uid = job.uid
        what = {
            "update": f"its gradient would make expert {uid} not finite",
            "input gradient": "the gradient of its input is not finite",
        }[rejected.reason]
        job.fail(CallRefused(f"expert {uid} did not learn from the request: {what}"))

    def _fail(self, jobs: Jobs, error: Exception) -> None:
        """Answer the jobs of a batch that raised. Whatever XLA says concerns these requests, not the node."""
        text, uid = "a batch of %d requests for expert %s failed", jobs[0].uid
        logger.error(text, len(jobs), uid, exc_info=error)
        self.counts.failed += len(jobs)
        for job in jobs:
            job.fail(RemoteFailure(f"expert {uid} failed to compute; see the node's log"))


def _uid_of(key: Hashable) -> str:
    uid, _, _ = cast(tuple[str, str, bool], key)
    return uid
