"""The batches of a node that has several devices: each device has a queue, turns and a thread of its own.

A request goes to the device on which its expert lives. What is bounded for one queue is bounded for each of them: a
device whose experts nobody asks does not make room for the others' requests, which it could not compute.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import trio

from dmoe_jax.metrics.node import NodeRecorder
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.devices import PlacedDevice
from dmoe_jax.node.job import Job
from dmoe_jax.node.placement import bytes_by_place
from dmoe_jax.node.runner import BatchCounts, BatchRunner


class DeviceRunners:
    """Runs the requests for all experts of a node.

    Args:
      backends: the experts by uid; a mapping that may change.
      devices: where they live, place by place.
      max_batch_rows: the most rows of one batch.
      max_waiting_rows, max_wait_s: the most rows, and seconds of work, in the queue of a device.
      forward_head_start_s: as of `NodeConfig`.
      warm_up_rows: rows for which programs are compiled first, on a device that compiles aside.
      recorder: is told of every batch.

    Raises:
      ValueError: an expert lives where there is no device.
    """

    def __init__(
        self,
        backends: Mapping[str, ExpertBackend],
        devices: Sequence[PlacedDevice],
        *,
        max_batch_rows: int,
        max_waiting_rows: int,
        warm_up_rows: int,
        max_wait_s: float = math.inf,
        forward_head_start_s: float = 0.0,
        recorder: NodeRecorder | None = None,
    ) -> None:
        for uid, backend in backends.items():
            if not backend.place.number < len(devices):
                raise ValueError(f"expert {uid} lives at place {backend.place.number}, but there are {len(devices)}")
        self._backends = backends
        self._places = [each.place for each in devices]
        self._first_device = devices[0].device
        self._compiles_aside = self._first_device.compiles_aside
        self._first_rows = min(warm_up_rows, max_batch_rows)
        recorder = recorder or NodeRecorder()
        self._runners = [
            BatchRunner(
                backends,
                each.device,
                max_batch_rows=max_batch_rows,
                max_waiting_rows=max_waiting_rows,
                max_wait_s=max_wait_s,
                forward_head_start_s=forward_head_start_s,
                recorder=recorder,
            )
            for each in devices
        ]

    def submit(self, job: Job) -> None:
        """Put a job into the queue of the device on which its expert lives.

        Raises:
          QueueFull: if too much waits there already.
        """
        self._runner_of(self._backends[job.uid]).submit(job)

    def withdraw(self, job: Job) -> bool:
        """Take a job back (its caller gave up). Returns whether it was still waiting."""
        return any(runner.withdraw(job) for runner in self._runners)

    async def finish(self, uid: str) -> None:
        """Return when nothing waits or runs for an expert any more, for which no further jobs are submitted."""
        await self._runner_of(self._backends[uid]).finish(uid)

    @property
    def counts(self) -> BatchCounts:
        """What all devices have done together."""
        return functools.reduce(operator.add, (runner.counts for runner in self._runners))

    @property
    def waiting_rows(self) -> int:
        """Rows that wait now, for whichever device."""
        return sum(runner.queue.waiting_rows for runner in self._runners)

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
        nbytes = bytes_by_place(((each.place, each.nbytes) for each in backends), len(self._places))
        return [
            {
                "name": place.name,
                "experts": sum(backend.place.number == place.number for backend in backends),
                "nbytes": nbytes[place.number],
                "busy_s": runner.counts.busy_s,
                "batches": runner.counts.batches,
                "rows": runner.counts.rows,
                "waiting_rows": runner.queue.waiting_rows,
            }
            for place, runner in zip(self._places, self._runners, strict=True)
        ]

    def cold_programs(self, prototypes: Sequence[ExpertBackend] = ()) -> list[tuple[ExpertBackend, int]]:
        """What is to be compiled before the experts are announced, smallest first: nothing where it takes no time.

        Args:
          prototypes: experts of further kinds.

        Returns: pairs of a backend, one of those that share its programs, and a number of rows.
        """
        if not self._compiles_aside or not self._first_rows:
            return []
        kinds = {id(backend.programs): backend for backend in (*prototypes, *self._backends.values())}.values()
        cold = [
            (backend, bucket)
            for backend in kinds
            for bucket in backend.buckets_up_to(self._first_rows)
            if bucket not in backend.programs.warm
        ]
        return sorted(cold, key=lambda each: each[1])

    async def compile(self, backend: ExpertBackend, bucket: int) -> None:
        """Compile for batches of so many rows; see `BatchRunner.compile`."""
        await self._runner_of(backend).compile(backend, bucket)

    async def aside(self, function: Callable[..., object], *args: Any) -> None:
        """Do what concerns the whole process beside the devices; not in virtual time, where many nodes share one."""
        if self._compiles_aside:
            await self._first_device.aside(function, *args)

    async def run(self) -> None:
        """Serve all queues for ever. If cancelled, the batches that run are finished first (see `Device.run`)."""
        async with trio.open_nursery() as nursery:
            for runner in self._runners:
                nursery.start_soon(runner.run)

    def _runner_of(self, backend: ExpertBackend) -> BatchRunner:
        return self._runners[backend.place.number]
