"""The expert node: serves experts to trainers, batch by batch.

Theory of operation. Each call is checked and becomes a job in the `BatchQueue`; one task takes batches and runs them
on the device, off the event loop. While a batch runs, further requests gather, so a busy node makes larger batches by
itself. A second task announces the experts in the DHT and withdraws them at the end. Jobs whose caller has given up
leave the queue before they cost anything.

Serving does not wait for the compiler. The first programs are compiled before the experts are announced; batches are
no larger than what is compiled, and when more waits, the next size is compiled beside the device (`Device.aside`). A
single request that is larger is answered in parts, or, since a backward in parts would be several updates, waits for
its program while others are served.

A batch whose update would not be finite changes nothing. Its requests are then run one by one, so that only the guilty
ones are refused.

Tensors arrive decoded, however their trainer chose to send them; those of the answer are compressed only if the
request names a compression. They are activations and gradients: no method sends an expert's parameters.

RPC methods (body; tensors -> body; tensors), of which "compression" and "dropout_seed" are optional:
  expert.info      {uid}              -> {kind, inputs, output, takes_key, updates, max_rows, warm_rows}
  expert.forward   {uid, compression, dropout_seed}; inputs -> {updates}; output
  expert.backward  {uid, request_id, compression, dropout_seed}; inputs, output gradient
                                      -> {updates}; gradients of the differentiable inputs
  node.status      {}                 -> counters, see `ExpertNode.status`
The seed of a layer call is the same forward and backward; without one an expert runs in evaluation mode.
"""

import logging
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import trio

from dmoe_jax.device import Device
from dmoe_jax.grid import parse_uid
from dmoe_jax.node import requests
from dmoe_jax.node.announcing import Announcer
from dmoe_jax.node.backend import ExpertBackend, UpdateRejected, bucket_of, buckets_up_to
from dmoe_jax.node.batching import BatchQueue, QueueFull, Ticket
from dmoe_jax.node.replay import ReplayCache
from dmoe_jax.node.requests import ExpertRequest
from net.dht.node import DhtNode
from net.errors import CallRefused, NetError, PeerBusy, RemoteFailure
from net.identity import Contact
from net.nursery import background_nursery
from net.rpc.base import Caller, Reply, Request
from net.types import Array
from net.wire.compression import Compression
from net.wire.tensors import as_outgoing

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Settings of an expert node."""

    swarm: str = "dmoe"
    """Name under which the node is listed in the DHT."""
    max_batch_rows: int = 256
    """Most rows of one XLA call, and of one request."""
    warm_up_rows: int = 16
    """Rows for which programs are compiled before the experts are announced, on a device that compiles aside."""
    max_waiting_rows: int = 4096
    """Most rows in the queue; beyond it requests are answered "busy". 16 full batches: about as long as a trainer
    waits before it goes on without us."""
    announce_period_s: float = 10.0
    """Seconds between announcements in the DHT."""
    record_lifetime_s: float = 30.0
    """Seconds for which an announcement is valid: three periods, so that one lost announcement does no harm."""
    max_concurrent_calls: int = 256
    """Calls of one method in progress at once, waiting ones included."""

    def __post_init__(self) -> None:
        if self.record_lifetime_s <= self.announce_period_s:
            raise ValueError(
                f"record_lifetime_s must exceed announce_period_s, or experts vanish between announcements; "
                f"got {self.record_lifetime_s} and {self.announce_period_s}"
            )


class _Job:
    """One request on its way through the queue and the device."""

    __slots__ = ("done", "error", "request", "results", "updates", "waiters")

    def __init__(self, request: ExpertRequest) -> None:
        self.request = request
        self.done = trio.Event()
        self.results: tuple[Array, ...] = ()
        self.updates = 0
        self.error: NetError | None = None
        self.waiters = 0


class ExpertNode:
    """Serves `backends` to whoever calls, once `serve_node` runs it.

    Args:
      backends: the experts by uid.
      device: runs and compiles them.
      config: settings.

    Raises:
      ValueError: if there is nothing to serve.
    """

    def __init__(self, backends: Mapping[str, ExpertBackend], device: Device, config: NodeConfig) -> None:
        if not backends:
            raise ValueError("an expert node needs at least one expert")
        self.config = config
        self._backends = dict(backends)
        self._uids = tuple(self._backends)
        self._device = device
        self._queue: BatchQueue[_Job] = BatchQueue(
            max_batch_rows=config.max_batch_rows, max_waiting_rows=config.max_waiting_rows
        )
        self._work_arrived = trio.Event()
        self._replays: ReplayCache[tuple[_Job, Ticket[_Job]]] = ReplayCache()
        self._started_at = trio.current_time()
        self._busy_s = 0.0
        self._state = "compiling"
        self._compiling = trio.Lock()
        self._grows: set[int] = set()
        self._rejected: dict[str, int] = {}
        self._counts = {"forward": 0, "backward": 0, "busy": 0, "failed": 0, "replayed": 0, "batches": 0}

    @property
    def state(self) -> str:
        """What the node is at: "compiling" and how far, until it is warm, then "serving"."""
        return self._state

    @property
    def must_compile(self) -> bool:
        """Whether `warm_up` has something to do, which may take minutes."""
        buckets = set(self._first_buckets())
        return any(buckets - backend.programs.warm for backend in self._kinds())

    @property
    def uids(self) -> tuple[str, ...]:
        """The experts that it serves."""
        return self._uids

    def register(self, caller: Caller) -> None:
        """Add this node's methods to a peer.

        Raises:
          ValueError: if the peer serves experts already.
        """
        limit = self.config.max_concurrent_calls
        caller.add_handler("expert.info", self._info, max_concurrent=limit)
        caller.add_handler("expert.forward", self._forward, max_concurrent=limit)
        caller.add_handler("expert.backward", self._backward, max_concurrent=limit)
        caller.add_handler("node.status", self._status, max_concurrent=16)

    def unregister(self, caller: Caller) -> None:
        """Take this node's methods back."""
        for method in ("expert.info", "expert.forward", "expert.backward", "node.status"):
            caller.remove_handler(method)

    def status(self) -> dict[str, Any]:
        """What the node does and has done since its start, as plain CBOR data.

        Keys: `state` ("compiling" or "serving"), `warm_rows` (rows for which all its experts are compiled), calls
        served by kind, `busy` calls turned away, `rejected` (requests whose update was not finite, by reason),
        `waiting_rows` in the queue, seconds up and busy, and `updates` of each expert.
        """
        return {
            **self._counts,
            "state": self._state,
            "warm_rows": min(backend.warm_rows for backend in self._backends.values()),
            "rejected": dict(self._rejected),
            "uptime_s": trio.current_time() - self._started_at,
            "busy_s": self._busy_s,
            "waiting_rows": self._queue.waiting_rows,
            "updates": {uid: backend.update_count for uid, backend in self._backends.items()},
        }

    async def warm_up(self, on_progress: Callable[[str], None] = lambda text: None) -> None:
        """Compile for batches of up to `warm_up_rows`; until then the node's state is "compiling 2 of 5" and the like.

        Calls are answered meanwhile, as soon as the program that they need is compiled.

        Args:
          on_progress: told each state of the compilation.
        """
        jobs = [(backend, bucket) for bucket in self._first_buckets() for backend in self._kinds()]
        for number, (backend, bucket) in enumerate(jobs, start=1):
            self._state = f"compiling {number} of {len(jobs)}"
            on_progress(self._state)
            await self._compile(backend, bucket)
        self._state = "serving"

    async def run_batches(self) -> None:
        """Serve the queue for ever. If cancelled, the batch that runs is finished first (see `Device.run`)."""
        async with trio.open_nursery() as nursery:
            while True:
                batch = self._queue.take(self._row_limit)
                if not batch:
                    self._work_arrived = trio.Event()
                    await self._work_arrived.wait()
                    continue
                jobs, backend = [ticket.payload for ticket in batch], self._backends[batch[0].payload.request.uid]
                rows, limit = sum(ticket.rows for ticket in batch), self._row_limit(batch[0].key)
                if rows > limit or (self._queue.waits(batch[0].key) and limit < self.config.max_batch_rows):
                    nursery.start_soon(self._grow, backend, bucket_of(max(rows, limit + 1)))
                if rows > limit and (limit == 0 or jobs[0].request.output_grads is not None):
                    nursery.start_soon(self._run_cold, backend, jobs, bucket_of(rows))
                else:
                    await self._run_batch(jobs)

    def _row_limit(self, key: Hashable) -> int:
        """The most rows of a batch that compiles nothing; of any batch, where compiling takes no time."""
        if not self._device.compiles_aside:
            return self.config.max_batch_rows
        uid = cast(tuple[str, str, bool], key)[0]
        return min(self._backends[uid].warm_rows, self.config.max_batch_rows)

    def _first_buckets(self) -> tuple[int, ...]:
        """What is compiled before the experts are announced: nothing, where compiling takes no time."""
        rows = min(self.config.warm_up_rows, self.config.max_batch_rows)
        return buckets_up_to(rows) if self._device.compiles_aside and rows else ()

    def _kinds(self) -> list[ExpertBackend]:
        """One backend for each set of programs."""
        return list({id(backend.programs): backend for backend in self._backends.values()}.values())

    async def _compile(self, backend: ExpertBackend, bucket: int) -> None:
        async with self._compiling:
            if bucket not in backend.programs.warm:
                await self._device.aside(backend.warm_up_bucket, bucket)

    async def _grow(self, backend: ExpertBackend, bucket: int) -> None:
        """Compile for larger batches, because they are wanted; one size at a time, and after a failure no more."""
        if id(backend.programs) in self._grows:
            return
        self._grows.add(id(backend.programs))
        try:
            await self._compile(backend, bucket)
        except Exception:
            logger.exception(
                "expert %s does not compile for %d rows; batches stay smaller", backend.expert.name, bucket
            )
            return
        self._grows.discard(id(backend.programs))

    async def _run_cold(self, backend: ExpertBackend, jobs: list[_Job], bucket: int) -> None:
        """Run a batch whose program must be compiled first, while others are served."""
        try:
            await self._compile(backend, bucket)
        except Exception:
            self._fail(jobs)
        else:
            await self._run_batch(jobs)

    async def _status(self, request: Request) -> Reply:
        del request
        return Reply(body=self.status())

    async def _info(self, request: Request) -> Reply:
        uid = requests.uid_of(request, self._uids)
        backend = self._backends[uid]
        body = {
            "kind": backend.expert.name,
            "inputs": [requests.describe_spec(spec) for spec in backend.expert.inputs],
            "output": requests.describe_spec(backend.expert.output),
            "takes_key": backend.expert.takes_key,
            "updates": backend.update_count,
            "max_rows": self.config.max_batch_rows,
            "warm_rows": backend.warm_rows,
        }
        return Reply(body=body)

    async def _forward(self, request: Request) -> Reply:
        uid = requests.uid_of(request, self._uids)
        parsed = requests.parse_forward(request, uid, self._backends[uid].expert, max_rows=self.config.max_batch_rows)
        job = _Job(parsed)
        return await self._finish(job, self._submit("forward", job), parsed.compression)

    async def _backward(self, request: Request) -> Reply:
        uid = requests.uid_of(request, self._uids)
        parsed = requests.parse_backward(request, uid, self._backends[uid].expert, max_rows=self.config.max_batch_rows)
        assert parsed.request_id is not None
        # Trainer and expert are part of the key: equal ids of others do not get these gradients.
        replay_key = request.peer_id.raw + uid.encode() + b"/" + parsed.request_id
        known = self._replays.find(replay_key)
        if known is not None:
            self._counts["replayed"] += 1
            return await self._finish(*known, parsed.compression, replay_key=replay_key)
        job = _Job(parsed)
        ticket = self._submit("backward", job)
        self._replays.remember(replay_key, (job, ticket), nbytes=sum(array.nbytes for array in parsed.inputs))
        return await self._finish(job, ticket, parsed.compression, replay_key=replay_key)

    def _submit(self, kind: str, job: _Job) -> Ticket[_Job]:
        try:
            key = (job.request.uid, kind, job.request.keys is not None)
            ticket = self._queue.submit(key, job.request.rows, job)
        except QueueFull as full:
            self._counts["busy"] += 1
            raise PeerBusy(f"the node is busy: {full}") from full
        self._counts[kind] += 1
        self._work_arrived.set()
        return ticket

    async def _finish(
        self, job: _Job, ticket: Ticket[_Job], compression: Compression, *, replay_key: bytes | None = None
    ) -> Reply:
        """Wait for a job. If cancelled while it still waits in the queue, and nobody else wants it, it is dropped."""
        job.waiters += 1
        try:
            await job.done.wait()
        finally:
            job.waiters -= 1
            if not job.waiters and self._queue.withdraw(ticket) and replay_key is not None:
                self._replays.forget(replay_key)
        if job.error is not None:
            raise job.error
        tensors = tuple(as_outgoing(result, compression) for result in job.results)
        return Reply(body={"updates": job.updates}, tensors=tensors)

    async def _run_batch(self, jobs: list[_Job]) -> None:
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
        self._busy_s += trio.current_time() - started
        self._counts["batches"] += 1
        self._hand_out(jobs, results, backend.update_count)

    async def _compute(self, backend: ExpertBackend, jobs: list[_Job]) -> tuple[Array, ...]:
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

    def _refuse(self, job: _Job, rejected: UpdateRejected) -> None:
        self._rejected[rejected.reason] = self._rejected.get(rejected.reason, 0) + 1
        uid = job.request.uid
        what = {
            "update": f"its gradient would make expert {uid} not finite",
            "input gradient": "the gradient of its input is not finite",
        }[rejected.reason]
        job.error = CallRefused(f"expert {uid} did not learn from the request: {what}")
        job.done.set()

    def _fail(self, jobs: list[_Job]) -> None:
        """Answer the jobs of a batch that raised. Whatever XLA says concerns these requests, not the node."""
        logger.exception("a batch of %d requests for expert %s failed", len(jobs), jobs[0].request.uid)
        self._counts["failed"] += len(jobs)
        for job in jobs:
            job.error = RemoteFailure(f"expert {job.request.uid} failed to compute; see the node's log")
            job.done.set()

    def _hand_out(self, jobs: list[_Job], results: tuple[Array, ...], updates: int) -> None:
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


@asynccontextmanager
async def open_expert_node(
    caller: Caller,
    dht: DhtNode,
    backends: Mapping[str, ExpertBackend],
    *,
    device: Device,
    config: NodeConfig,
    on_progress: Callable[[str], None] = lambda text: None,
) -> AsyncIterator[ExpertNode]:
    """Serve `backends` (by uid) at `caller` while the context is open; see `serve_node`."""
    async with serve_node(ExpertNode(backends, device, config), caller, dht, on_progress=on_progress) as node:
        yield node


@asynccontextmanager
async def serve_node(
    node: ExpertNode, caller: Caller, dht: DhtNode, *, on_progress: Callable[[str], None] = lambda text: None
) -> AsyncIterator[ExpertNode]:
    """Run a node at `caller` while the context is open, and announce it and its experts in the DHT.

    On entry the node is listed as compiling and answers `node.status`; its experts are announced, and the block begins,
    when it is warm. On leaving they are withdrawn from the DHT within two seconds, for which `caller` and `dht` must
    still run, waiting requests are dropped, and the methods are taken back. If everything is cancelled at once, the
    announcements expire instead.

    Raises:
      ValueError: if the peer does not listen, or serves experts already.
    """
    if caller.address is None:
        raise ValueError("an expert node must listen: its peer is in client mode")
    node.register(caller)
    announcer = Announcer(
        dht,
        [parse_uid(uid) for uid in node.uids],
        Contact(caller.peer_id, caller.address),
        swarm=node.config.swarm,
        period_s=node.config.announce_period_s,
        lifetime_s=node.config.record_lifetime_s,
        state=lambda: node.state,
    )
    try:
        async with background_nursery() as nursery:
            nursery.start_soon(node.run_batches)
            try:
                if node.must_compile:
                    await announcer.announce()
                nursery.start_soon(announcer.run)
                await node.warm_up(on_progress)
                await announcer.announce()
                yield node
            finally:
                nursery.cancel_scope.cancel()
                with trio.move_on_after(2.0, shield=True):
                    await announcer.withdraw()
    finally:
        node.unregister(caller)
