"""Carrying out what waits in a node's queues: batch by batch on each device, within what is compiled.

Each device has a queue, turns and a thread of its own; a job goes to the device on which its expert lives. What is
bounded for one queue is bounded for each of them: a device whose experts nobody asks does not make room for the
others' requests, which it could not compute.

A batch whose update would not be finite changes nothing. Its requests are then run one by one, so that only the guilty
ones are refused.
"""

import functools
import logging
import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import trio

from dmoe_jax.machine.device import DeviceTime
from dmoe_jax.metrics.node import NodeRecorder
from dmoe_jax.mixture.expert_calls import below_one_another
from dmoe_jax.node.backend import ExpertBackend, ExpertGroup, Outcome, UpdateRejected
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.host_calls import one_at_a_time
from dmoe_jax.node.programs import Batch, warm_bucket_of
from dmoe_jax.node.queue import BatchQueue, Job, Key, learnt_before
from dmoe_jax.node.sharding import PlacedDevice, bytes_by_place
from dmoe_net.errors import CallRefused, RemoteFailure
from dmoe_net.types import Array

logger = logging.getLogger(__name__)

Jobs = Sequence[Job]
"""Jobs of one batch, so all for one expert; at least one."""
Backends = Mapping[str, ExpertBackend]
"""The experts by uid."""

_LONG_BATCH = 4
"""Times the delay in the queue, that a batch takes which waits."""
_NEWEST = 0.2
"""Weight of the newest time in the mean: of the last five, about."""
_FEW_ROWS = 16
"""Up to so many, what a batch costs is mostly the optimiser's step."""
_MOST_PADDING, _MOST_PADDING_OF_FEW = 2, 4
"""A batch is filled up to at most so many times its bucket."""


@dataclass(slots=True)
class BatchCounts:
    """Work done since the start; everything here only grows."""

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
    """Rows of these requests."""
    call_s: float = 0.0
    """Seconds that these requests spent here in all, waiting and computed."""

    def __add__(self, other: "BatchCounts") -> "BatchCounts":
        return BatchCounts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


class BatchRunner:
    """Runs the jobs for all experts of a node on the devices of its places. Some may be added to `backends` while it
    runs, and taken off when `finish` has returned. Raises ValueError if an expert lives where there is no device."""

    def __init__(
        self, backends: Backends, devices: Sequence[PlacedDevice], config: NodeConfig, recorder: NodeRecorder
    ) -> None:
        for uid, backend in backends.items():
            if not backend.place.number < len(devices):
                raise ValueError(f"expert {uid} lives at place {backend.place.number}, but there are {len(devices)}")
        self._backends = backends
        self._first_rows = min(config.warm_up_rows, config.max_batch_rows)
        self._loops = [_DeviceLoop(backends, each, config, recorder) for each in devices]

    async def run(self) -> None:
        """Serve all queues for ever. If cancelled, the batches that run are finished first (see `Device.run`)."""
        async with trio.open_nursery() as nursery:
            for loop in self._loops:
                nursery.start_soon(loop.run)

    def submit(self, job: Job) -> None:
        """Put a job into the queue of the device on which its expert lives. Raises QueueFull as `BatchQueue` does."""
        self._loop_of(self._backends[job.uid]).submit(job)

    def withdraw(self, job: Job) -> bool:
        """Take a job back, whose caller has given up. Return True if it was still waiting."""
        return any(loop.withdraw(job) for loop in self._loops)

    async def finish(self, uid: str) -> None:
        """Return when nothing waits or runs for an expert any more, for which no further jobs are submitted."""
        await self._loop_of(self._backends[uid]).finish(uid)

    @property
    def counts(self) -> BatchCounts:
        """Work of all devices together."""
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
        """Return the work of each device, as plain CBOR data: `name` of the device or mesh, the `experts` that live
        there and their `nbytes`, seconds `busy_s` in which it worked on batches, `batches` and their `rows`, and
        `waiting_rows` in its queue."""
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
        """Programs to compile before the experts are announced, for `prototypes` of further kinds, too: (a backend of
        those that share it, number of rows), smallest first; none where compiling takes no time."""
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
    """Takes what waits for one device, runs it there, and answers.

    Serving does not wait for the compiler. The first programs are compiled before the experts are announced; batches
    are no larger than what is compiled, and when more waits, the next size is compiled beside the device. A single
    request that is larger is answered in parts, or, since a backward in parts would be several updates, waits for its
    program while others are served.
    """

    def __init__(self, backends: Backends, placed: PlacedDevice, config: NodeConfig, recorder: NodeRecorder) -> None:
        self.place, self.device = placed.place, placed.device
        self.queue = BatchQueue(
            max_batch_rows=config.max_batch_rows,
            max_waiting_rows=config.max_waiting_rows,
            max_wait_s=config.max_wait_s,
            head_starts={"forward": config.forward_head_start_s},
        )
        self.counts = BatchCounts()
        self._backends = backends
        self._recorder = recorder
        self._max_batch_rows, self._delay_s = config.max_batch_rows, config.max_queue_delay_s
        self._times: dict[Hashable, float] = {}  # mean seconds of batches, by `_size_of`, and of rows, by `_work_of`
        self._compiling = trio.Lock()
        self._growing: set[int] = set()
        self._work_arrived = trio.Event()
        self._answered_at = -math.inf
        self._together: dict[str, int] = {}  # requests of each expert's last batch, of the last turn
        self._running: Counter[str] = Counter()  # batches that were taken from the queue, by uid
        self._work_left = trio.Event()  # set, and replaced, when some has ended or was withdrawn

    def submit(self, job: Job) -> None:
        job.expected_s = job.rows * self._times.get(self._work_of(job), 0.0)
        self.queue.submit(job)
        self._work_arrived.set()

    def withdraw(self, job: Job) -> bool:
        was_waiting = self.queue.withdraw(job)
        self._notify()
        return was_waiting

    async def finish(self, uid: str) -> None:
        while self._running[uid] or self.queue.waits_for(uid):
            await self._work_left.wait()
        del self._running[uid]

    def _notify(self) -> None:
        self._work_left.set()
        self._work_left = trio.Event()

    async def compile(self, backend: ExpertBackend, bucket: int) -> None:
        async with self._compiling:
            if bucket not in backend.programs.warm:
                await self.device.aside(backend.warm_up_bucket, bucket)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                await self._wait_for_others()
                if turn := self._take_turn(nursery):
                    together = {jobs[0].uid: len(jobs) for jobs in turn}
                    await self._run_turn(turn)
                    self._together, self._answered_at = together, trio.current_time()
                    self._has_run(turn)
                else:
                    await self._news()

    async def _news(self) -> None:
        self._work_arrived = trio.Event()
        await self._work_arrived.wait()

    async def _wait_for_others(self) -> None:
        """Return when what waits had better begin: mostly at once.

        A batch of a large expert takes about as long for one row as for eight. Callers whose answers were just handed
        out mostly ask it again at once; a device that begins with what is there meanwhile serves them in two groups
        that take turns for ever. So before a long batch with fewer requests than its expert's last one, when nothing
        else is to be done, it waits a moment for the others.
        """
        until = self._answered_at + self._delay_s
        if trio.current_time() >= until:
            return
        with trio.move_on_at(until):
            while jobs := self.queue.only_batch():
                expected_s = self._times.get(self._size_of(jobs), math.inf)
                is_long = _LONG_BATCH * self._delay_s <= expected_s < math.inf
                if not is_long or len(jobs) >= self._together.get(jobs[0].uid, 0):
                    return
                await self._news()

    def _take_turn(self, nursery: trio.Nursery) -> list[Jobs]:
        """Take the batches that the device is given next, each of another expert; none when nothing waits. Compile in
        `nursery` what they want, or would want."""
        turn: dict[str, Jobs] = {}
        expected_s = 0.0
        while not turn or expected_s < self.device.turn_s:
            taken = self.queue.take(self._row_limit, may_run=lambda key: key[0] not in turn)
            if not taken:
                break
            if not (jobs := self._still_new(taken)):
                continue
            backend, uid, key = backend_of(jobs, self._backends), jobs[0].uid, jobs[0].key
            rows, limit = rows_of(jobs), self._row_limit(key)
            self._running[uid] += 1
            if rows > limit or (self.queue.waits(key) and limit < self._max_batch_rows):
                nursery.start_soon(self._grow, backend, backend.bucket_of(max(rows, limit + 1)))
            if rows > limit and (limit == 0 or jobs[0].kind == "backward"):
                nursery.start_soon(self._run_cold, backend, jobs, backend.bucket_of(rows))
            else:
                turn[uid] = jobs
                expected_s += self._expected_s(jobs, turn)
        return list(turn.values())

    def _still_new(self, jobs: Jobs) -> Jobs:
        """The jobs from which the expert has not learnt: while they waited it may have been given the state of another
        copy that has."""
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
        return sum(self._times.get(self._size_of(jobs), math.inf) for jobs in turn)

    def _expected_s(self, jobs: Jobs, turn: Iterable[str]) -> float:
        """Seconds by which this batch makes the turn longer, which has batches of these experts, its own among them."""
        share, backend = self._times.get(self._size_of(jobs), math.inf), backend_of(jobs, self._backends)
        if not backend.programs.at_once:
            return share
        # What is computed at the same time takes about as long as one: only when there is no room left it counts.
        most = backend.programs.most_together(rows_of(jobs))
        return 0.0 if sum(self._backends[uid].group is backend.group for uid in turn) % most else most * share

    def _has_run(self, turn: Sequence[Jobs]) -> None:
        for jobs in turn:
            self._running[jobs[0].uid] -= 1
        self._notify()

    def _size_of(self, jobs: Jobs) -> Hashable:
        """Decides how long a batch takes."""
        return (*self._work_of(jobs[0]), backend_of(jobs, self._backends).bucket_of(rows_of(jobs)))

    def _work_of(self, job: Job) -> tuple[Hashable, ...]:
        """Decides how long a row takes: the program."""
        return (self._backends[job.uid].programs.kind, *job.key[1:])

    def _calls_host(self, jobs: Jobs) -> bool:
        return backend_of(jobs, self._backends).programs.calls_host

    def _row_limit(self, key: Key) -> int:
        """The most rows of a batch that compiles nothing; of any batch, where compiling takes no time."""
        if not self.device.compiles_aside:
            return self._max_batch_rows
        return min(self._backends[key[0]].warm_rows, self._max_batch_rows)

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
        try:
            await self.compile(backend, bucket)
        except Exception as error:
            self._fail(jobs, error)
        else:
            await self._run_batches([jobs])
        self._has_run([jobs])

    async def _run_turn(self, turn: Sequence[Jobs]) -> None:
        """Run batches together, but by themselves those that must be cut into parts or call the host."""
        whole = [jobs for jobs in turn if rows_of(jobs) <= self._row_limit(jobs[0].key) and not self._calls_host(jobs)]
        if len(whole) > 1:
            await self._run_batches(whole)
        for jobs in turn:
            if len(whole) < 2 or jobs not in whole:
                await self._run_batches([jobs])

    async def _run_batches(self, turn: Sequence[Jobs]) -> None:
        """Run batches in one turn of the device and answer them; of one that fails refuse who is guilty, if that can
        be told, and answer the others."""
        started, spent = trio.current_time(), DeviceTime()
        try:
            done = await self._compute(turn, spent)
        finally:
            self.counts.busy_s += spent.seconds
        for jobs, outcome, seconds in done:
            if not isinstance(outcome, Exception):
                for kind, took_s in ((self._size_of(jobs), seconds), (self._work_of(jobs[0]), seconds / rows_of(jobs))):
                    before = self._times.get(kind, took_s)
                    self._times[kind] = before + _NEWEST * (took_s - before)
                self._answer(jobs, outcome, started, seconds)
            elif not isinstance(outcome, UpdateRejected):
                self._fail(jobs, outcome)
            elif len(jobs) == 1:
                self._refuse(jobs[0], outcome)
            else:
                for job in jobs:
                    await self._run_batches([[job]])

    async def _compute(self, turn: Sequence[Jobs], spent: DeviceTime) -> "list[Done]":
        """Have the device compute batches; its seconds are added to `spent`."""
        run = functools.partial(self.device.run, spent=spent, expected_s=self._turn_s(turn))
        if len(turn) > 1:
            programs = sharing_programs(turn, self._backends)
            done: list[Done] = await run(run_turn, programs, self._backends, time.perf_counter)
            return done
        (jobs,) = turn
        outcome: Outcome | Exception
        try:
            outcome = await self._compute_one(jobs, run)
        except Exception as error:
            outcome = error
        return [Done(jobs, outcome, spent.seconds)]

    async def _compute_one(self, jobs: Jobs, run: Callable[..., Any]) -> tuple[Array, ...]:
        """Output, or gradients of the inputs, for the rows of all jobs."""
        backend, batch = backend_of(jobs, self._backends), joined(jobs)
        forward, backward = backend.forward, backend.backward
        if self._calls_host(jobs):
            forward, backward = one_at_a_time(forward), one_at_a_time(backward)
        inputs, keys = batch.inputs, batch.keys
        if batch.output_grads is not None:
            gradients: tuple[Array, ...] = await run(
                backward, inputs, batch.output_grads, keys, batch.seen, batch.requests
            )
            return gradients
        step = min(batch.rows, self._row_limit(jobs[0].key))
        outputs = []
        for start in range(0, batch.rows, step):
            some = slice(start, start + step)
            own_keys = None if keys is None else keys[some]
            outputs.append(await run(forward, [array[some] for array in inputs], own_keys))
        return (below_one_another(outputs),)

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

    def _refuse(self, job: Job, rejected: UpdateRejected) -> None:
        self.counts.rejected[rejected.reason] += 1
        what = "the gradient of its input is not finite"
        if rejected.reason == "update":
            what = f"its gradient would make expert {job.uid} not finite"
        job.fail(CallRefused(f"expert {job.uid} did not learn from the request: {what}"))

    def _fail(self, jobs: Jobs, error: Exception) -> None:
        """Answer the jobs of a batch that raised. Whatever XLA says concerns these requests, not the node."""
        uid = jobs[0].uid
        logger.error("a batch of %d requests for expert %s failed", len(jobs), uid, exc_info=error)
        self.counts.failed += len(jobs)
        for job in jobs:
            job.fail(RemoteFailure(f"expert {uid} failed to compute; see the node's log"))


class Done(NamedTuple):
    """The end of a batch: its arrays, or why there are none, and its share of the seconds of a turn."""

    jobs: Jobs
    outcome: Outcome | Exception
    seconds: float


def run_turn(programs: Sequence[Sequence[Jobs]], backends: Backends, clock: Callable[[], float]) -> list[Done]:
    """Begin all programs, then wait for one after the other. What one of them raises concerns its batches alone.

    The way to the device's thread and back costs about as much as a small batch. So a turn takes as many batches, of
    different experts, as are worth it. The seconds of a program, by `clock`, are those from the end of the one before
    it: their sum is that of the turn.
    """
    before = clock()

    def begin(batches: Sequence[Jobs]) -> Callable[[], list[Outcome]]:
        asked = [(backend_of(jobs, backends), joined(jobs)) for jobs in batches]
        return asked[0][0].group.begin(asked)

    begun = [_tried(begin, batches) for batches in programs]
    done: list[Done] = []
    for batches, wait in zip(programs, begun, strict=True):
        outcomes = wait if isinstance(wait, Exception) else _tried(wait)
        now = clock()
        share_s = (now - before) / len(batches)
        for number, jobs in enumerate(batches):
            done.append(Done(jobs, outcomes if isinstance(outcomes, Exception) else outcomes[number], share_s))
        before = now
    return done


def sharing_programs(turn: Sequence[Jobs], backends: Backends) -> list[list[Jobs]]:
    """The batches of a turn, together where they share a program: of one group of experts and one kind of call, the
    largest first, the others filled up to their bucket. The program of the first batch is the first."""
    kinds: dict[Hashable, list[tuple[int, int]]] = {}  # (bucket, position) of each batch
    for position, jobs in enumerate(turn):
        backend = backend_of(jobs, backends)
        bucket = warm_bucket_of(rows_of(jobs), backend.programs)
        kinds.setdefault((id(backend.group), *jobs[0].key[1:]), []).append((bucket, position))
    programs: list[list[int]] = []
    for batches in kinds.values():
        group = backend_of(turn[batches[0][1]], backends).group
        batches.sort(key=lambda batch: -batch[0])
        while batches:
            taken = batches[: _fitting([bucket for bucket, _ in batches], group)]
            del batches[: len(taken)]
            programs.append(sorted(position for _, position in taken))
    return [[turn[position] for position in program] for program in sorted(programs)]


def _fitting(buckets: Sequence[int], group: ExpertGroup) -> int:
    """Number of batches, of which the first has the most rows, that a program takes."""
    first = buckets[0]
    least = first // (_MOST_PADDING_OF_FEW if first <= _FEW_ROWS else _MOST_PADDING)
    return min(max(1, group.programs.most_together(first)), sum(bucket >= least for bucket in buckets))


def backend_of(jobs: Jobs, backends: Backends) -> ExpertBackend:
    return backends[jobs[0].uid]


def rows_of(jobs: Jobs) -> int:
    return sum(job.rows for job in jobs)


def joined(jobs: Jobs) -> Batch:
    """The rows of all jobs."""
    inputs = tuple(below_one_another(arrays) for arrays in zip(*(job.inputs for job in jobs), strict=True))
    grads = [job.output_grads for job in jobs if job.output_grads is not None]
    keys = [job.keys for job in jobs if job.keys is not None]
    return Batch(
        inputs=inputs,
        output_grads=below_one_another(grads) if grads else None,
        keys=below_one_another(keys) if keys else None,
        # Not how stale they are: until the device has time for them, other batches may step the expert.
        seen=np.repeat([job.seen for job in jobs], [job.rows for job in jobs]),
        # By which an expert remembers that it has learnt from these requests.
        requests={job.replay_key: job.arrived_at for job in jobs if job.replay_key is not None},
    )


def _tried(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        return error
