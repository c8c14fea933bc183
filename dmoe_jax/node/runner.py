"""Carrying out what waits in a node's queue: batch by batch on the device, within what is compiled.

Serving does not wait for the compiler. The first programs are compiled before the experts are announced; batches are
no larger than what is compiled, and when more waits, the next size is compiled beside the device (`Device.aside`). A
single request that is larger is answered in parts, or, since a backward in parts would be several updates, waits for
its program while others are served.

A batch whose update would not be finite changes nothing. Its requests are then run one by one, so that only the guilty
ones are refused.
"""

import logging
from collections.abc import Callable, Hashable, Mapping
from typing import cast

import numpy as np
import trio

from dmoe_jax.device import Device
from dmoe_jax.node.backend import ExpertBackend, UpdateRejected, bucket_of, buckets_up_to
from dmoe_jax.node.batching import BatchQueue, Ticket
from dmoe_jax.node.requests import ExpertRequest
from net.errors import CallRefused, NetError, RemoteFailure
from net.types import Array

logger = logging.getLogger(__name__)


class Job:
    """One request on its way through the queue and the device."""

    __slots__ = ("done", "error", "request", "results", "updates", "waiters")

    def __init__(self, request: ExpertRequest) -> None:
        self.request = request
        self.done = trio.Event()
        self.results: tuple[Array, ...] = ()
        self.updates = 0
        self.error: NetError | None = None
        self.waiters = 0


class BatchRunner:
    """Runs the requests in `queue`, oldest first.

    Args:
      backends: the experts by uid.
      device: runs and compiles them.
      max_batch_rows: the most rows of one batch.
      max_waiting_rows: the most rows in the queue.
      warm_up_rows: rows for which `warm_up` compiles, on a device that compiles aside.
    """

    def __init__(
        self,
        backends: Mapping[str, ExpertBackend],
        device: Device,
        *,
        max_batch_rows: int,
        max_waiting_rows: int,
        warm_up_rows: int,
    ) -> None:
        self.queue: BatchQueue[Job] = BatchQueue(max_batch_rows=max_batch_rows, max_waiting_rows=max_waiting_rows)
        """What waits. Its keys are (uid, kind of work, whether rows have dropout keys)."""
        self.batches = 0
        """Batches that were computed."""
        self.failed = 0
        """Requests whose batch raised."""
        self.rejected: dict[str, int] = {}
        """Requests whose update was not finite, by `UpdateRejected.reason`."""
        self.busy_s = 0.0
        """Seconds in which batches were computed."""
        self._backends = dict(backends)
        self._device = device
        self._max_batch_rows = max_batch_rows
        self._first_rows = min(warm_up_rows, max_batch_rows)
        self._compiling = trio.Lock()
        self._growing: set[int] = set()
        self._work_arrived = trio.Event()

    def submit(self, kind: str, job: Job) -> Ticket[Job]:
        """Put a job into the queue.

        Raises:
          QueueFull: if too many rows wait already.
        """
        ticket = self.queue.submit((job.request.uid, kind, job.request.keys is not None), job.request.rows, job)
        self._work_arrived.set()
        return ticket

    @property
    def warm_rows(self) -> int:
        """Rows for which all experts are compiled."""
        return min(backend.warm_rows for backend in self._backends.values())

    @property
    def must_compile(self) -> bool:
        """Whether `warm_up` has something to do, which may take minutes."""
        buckets = set(self._first_buckets())
        return any(buckets - backend.programs.warm for backend in self._kinds())

    async def warm_up(self, on_program: Callable[[int, int], None]) -> None:
        """Compile for batches of up to `warm_up_rows`, smallest first.

        Args:
          on_program: called before each compilation with its number, from 1, and how many there are.
        """
        jobs = [(backend, bucket) for bucket in self._first_buckets() for backend in self._kinds()]
        for number, (backend, bucket) in enumerate(jobs, start=1):
            on_program(number, len(jobs))
            await self._compile(backend, bucket)

    async def run(self) -> None:
        """Serve the queue for ever. If cancelled, the batch that runs is finished first (see `Device.run`)."""
        async with trio.open_nursery() as nursery:
            while True:
                batch = self.queue.take(self._row_limit)
                if not batch:
                    self._work_arrived = trio.Event()
                    await self._work_arrived.wait()
                    continue
                jobs, backend = [ticket.payload for ticket in batch], self._backends[batch[0].payload.request.uid]
                rows, limit = sum(ticket.rows for ticket in batch), self._row_limit(batch[0].key)
                if rows > limit or (self.queue.waits(batch[0].key) and limit < self._max_batch_rows):
                    nursery.start_soon(self._grow, backend, bucket_of(max(rows, limit + 1)))
                if rows > limit and (limit == 0 or jobs[0].request.output_grads is not None):
                    nursery.start_soon(self._run_cold, backend, jobs, bucket_of(rows))
                else:
                    await self._run_batch(jobs)

    def _row_limit(self, key: Hashable) -> int:
        """The most rows of a batch that compiles nothing; of any batch, where compiling takes no time."""
        if not self._device.compiles_aside:
            return self._max_batch_rows
        uid = cast(tuple[str, str, bool], key)[0]
        return min(self._backends[uid].warm_rows, self._max_batch_rows)

    def _first_buckets(self) -> tuple[int, ...]:
        """What is compiled before the experts are announced: nothing, where compiling takes no time."""
        return buckets_up_to(self._first_rows) if self._device.compiles_aside and self._first_rows else ()

    def _kinds(self) -> list[ExpertBackend]:
        """One backend for each set of programs."""
        return list({id(backend.programs): backend for backend in self._backends.values()}.values())

    async def _compile(self, backend: ExpertBackend, bucket: int) -> None:
        async with self._compiling:
            if bucket not in backend.programs.warm:
                await self._device.aside(backend.warm_up_bucket, bucket)

    async def _grow(self, backend: ExpertBackend, bucket: int) -> None:
        """Compile for larger batches, because they are wanted; one size at a time, and after a failure no more."""
        if id(backend.programs) in self._growing:
            return
        self._growing.add(id(backend.programs))
        try:
            await self._compile(backend, bucket)
        except Exception:
            logger.exception(
                "expert %s does not compile for %d rows; batches stay smaller", backend.expert.name, bucket
            )
            return
        self._growing.discard(id(backend.programs))

    async def _run_cold(self, backend: ExpertBackend, jobs: list[Job], bucket: int) -> None:
        """Run a batch whose program must be compiled first, while others are served."""
        try:
            await self._compile(backend, bucket)
        except Exception:
            self._fail(jobs)
        else:
            await self._run_batch(jobs)

    async def _run_batch(self, jobs: list[Job]) -> None:
        backend = self._backends[jobs[0].request.uid]
        started = trio.current_time()
        try:
            results = await self._compute(backend, jobs)
        except UpdateRejected as rejected:
            if len(jobs) > 1:
                for job in jobs:
                    await self._run_batch([job])
            else:
                self._refuse(jobs[0], rejected)
            return
        except Exception:
            self._fail(jobs)
            return
        self.busy_s += trio.current_time() - started
        self.batches += 1
        self._hand_out(jobs, results, backend.update_count)

    async def _compute(self, backend: ExpertBackend, jobs: list[Job]) -> tuple[Array, ...]:
        """Output, or gradients of the inputs, for the rows of all jobs."""
        parts = [job.request for job in jobs]
        inputs = [_stack([part.inputs[i] for part in parts]) for i in range(len(parts[0].inputs))]
        keys = None if parts[0].keys is None else _stack([part.keys for part in parts if part.keys is not None])
        if parts[0].output_grads is not None:
            grads = _stack([part.output_grads for part in parts if part.output_grads is not None])
            return await self._device.run(backend.backward, inputs, grads, keys)
        rows = inputs[0].shape[0]
        step = min(rows, self._row_limit((parts[0].uid, "forward", keys is not None)))
        outputs = []
        for start in range(0, rows, step):
            some = slice(start, start + step)
            own_keys = None if keys is None else keys[some]
            outputs.append(await self._device.run(backend.forward, [array[some] for array in inputs], own_keys))
        return (_stack(outputs),)

    def _refuse(self, job: Job, rejected: UpdateRejected) -> None:
        self.rejected[rejected.reason] = self.rejected.get(rejected.reason, 0) + 1
        uid = job.request.uid
        what = {
            "update": f"its gradient would make expert {uid} not finite",
            "input gradient": "the gradient of its input is not finite",
        }[rejected.reason]
        job.error = CallRefused(f"expert {uid} did not learn from the request: {what}")
        job.done.set()

    def _fail(self, jobs: list[Job]) -> None:
        """Answer the jobs of a batch that raised. Whatever XLA says concerns these requests, not the node."""
        logger.exception("a batch of %d requests for expert %s failed", len(jobs), jobs[0].request.uid)
        self.failed += len(jobs)
        for job in jobs:
            job.error = RemoteFailure(f"expert {job.request.uid} failed to compute; see the node's log")
            job.done.set()

    def _hand_out(self, jobs: list[Job], results: tuple[Array, ...], updates: int) -> None:
        start = 0
        for job in jobs:
            stop = start + job.request.rows
            job.results = tuple(result[start:stop] for result in results)
            job.updates = updates
            # The inputs are no longer needed; a remembered job (replay) keeps its reply alone.
            job.request = ExpertRequest(uid=job.request.uid, inputs=job.request.inputs[:1])
            job.done.set()
            start = stop


def _stack(arrays: list[Array]) -> Array:
    """The requests' rows below one another; a single request is used as it came, without a copy."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
