"""The expert node: serves experts to trainers, batch by batch.

Theory of operation. Each call is checked and becomes a job in the `BatchQueue`; one task takes batches and runs them
on the device, off the event loop. While a batch runs, further requests gather, so a busy node makes larger batches by
itself. A second task announces the experts in the DHT and withdraws them at the end. Jobs whose caller has given up
leave the queue before they cost anything.

Tensors arrive decoded, however their trainer chose to send them; those of the answer are compressed only if the
request names a compression. They are activations and gradients: no method sends an expert's parameters.

RPC methods (body; tensors -> body; tensors), of which "compression" is optional:
  expert.info      {uid}              -> {kind, inputs, output, updates, max_rows}
  expert.forward   {uid, compression}; inputs -> {updates}; output
  expert.backward  {uid, request_id, compression}; inputs, output gradient
                                      -> {updates}; gradients of the differentiable inputs
  node.status      {}                 -> counters, see `ExpertNode.status`
"""

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import trio

from dmoe_jax import directory, members
from dmoe_jax.device import Device
from dmoe_jax.grid import ExpertUid, parse_uid
from dmoe_jax.node import requests
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.batching import BatchQueue, QueueFull, Ticket
from dmoe_jax.node.replay import ReplayCache
from dmoe_jax.node.requests import ExpertRequest
from net.dht.node import DhtNode
from net.errors import NetError, PeerBusy, RemoteFailure
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
    """Serves `backends` to whoever calls. Made by `open_expert_node`."""

    def __init__(self, backends: Mapping[str, ExpertBackend], device: Device, config: NodeConfig) -> None:
        self._backends = dict(backends)
        self._uids = tuple(self._backends)
        self._device = device
        self._config = config
        self._queue: BatchQueue[_Job] = BatchQueue(
            max_batch_rows=config.max_batch_rows, max_waiting_rows=config.max_waiting_rows
        )
        self._work_arrived = trio.Event()
        self._replays: ReplayCache[tuple[_Job, Ticket[_Job]]] = ReplayCache()
        self._started_at = trio.current_time()
        self._busy_s = 0.0
        self._counts = {"forward": 0, "backward": 0, "busy": 0, "failed": 0, "replayed": 0, "batches": 0}

    def register(self, caller: Caller) -> None:
        """Add this node's methods to a peer."""
        limit = self._config.max_concurrent_calls
        caller.add_handler("expert.info", self._info, max_concurrent=limit)
        caller.add_handler("expert.forward", self._forward, max_concurrent=limit)
        caller.add_handler("expert.backward", self._backward, max_concurrent=limit)
        caller.add_handler("node.status", self._status, max_concurrent=16)

    def status(self) -> dict[str, Any]:
        """Counters since the start: calls served by kind, calls turned away, rows waiting, busy seconds, and the
        update count of each expert. Plain CBOR data."""
        return {
            **self._counts,
            "uptime_s": trio.current_time() - self._started_at,
            "busy_s": self._busy_s,
            "waiting_rows": self._queue.waiting_rows,
            "updates": {uid: backend.update_count for uid, backend in self._backends.items()},
        }

    async def run_batches(self) -> None:
        """Serve the queue for ever. If cancelled, the batch that runs is finished first (see `Device.run`)."""
        while True:
            batch = self._queue.take()
            if batch:
                await self._run_batch([ticket.payload for ticket in batch])
            else:
                self._work_arrived = trio.Event()
                await self._work_arrived.wait()

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
            "updates": backend.update_count,
            "max_rows": self._config.max_batch_rows,
        }
        return Reply(body=body)

    async def _forward(self, request: Request) -> Reply:
        uid = requests.uid_of(request, self._uids)
        parsed = requests.parse_forward(request, uid, self._backends[uid].expert, max_rows=self._config.max_batch_rows)
        job = _Job(parsed)
        return await self._finish(job, self._submit("forward", job), parsed.compression)

    async def _backward(self, request: Request) -> Reply:
        uid = requests.uid_of(request, self._uids)
        parsed = requests.parse_backward(request, uid, self._backends[uid].expert, max_rows=self._config.max_batch_rows)
        assert parsed.request_id is not None
        # The trainer is part of the key: ids of two trainers may coincide without one getting the other's gradients.
        replay_key = request.peer_id.raw + parsed.request_id
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
            ticket = self._queue.submit((job.request.uid, kind), job.request.rows, job)
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
        inputs = [_stack([job.request.inputs[i] for job in jobs]) for i in range(len(jobs[0].request.inputs))]
        started = trio.current_time()
        results: tuple[Array, ...]
        try:
            if jobs[0].request.output_grads is None:
                results = (await self._device.run(backend.forward, inputs),)
            else:
                grads = _stack([job.request.output_grads for job in jobs if job.request.output_grads is not None])
                results = await self._device.run(backend.backward, inputs, grads)
        except Exception:
            # The supervisor of the device: whatever XLA says concerns these requests, not the node.
            logger.exception("a batch of %d requests for expert %s failed", len(jobs), jobs[0].request.uid)
            self._counts["failed"] += len(jobs)
            for job in jobs:
                job.error = RemoteFailure(f"expert {job.request.uid} failed to compute; see the node's log")
                job.done.set()
            return
        self._busy_s += trio.current_time() - started
        self._counts["batches"] += 1
        self._hand_out(jobs, results, backend.update_count)

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
) -> AsyncIterator[ExpertNode]:
    """Serve `backends` (by uid) at `caller` and announce them in the DHT while the context is open.

    The experts should be warm (`ExpertBackend.warm_up`) before: they are announced at once. On leaving they
    are withdrawn from the DHT within two seconds, for which `caller` and `dht` must still run, and waiting requests are
    dropped. If everything is cancelled at once, they expire instead.

    Raises:
      ValueError: if the peer does not listen, or there is nothing to serve.
    """
    if caller.address is None:
        raise ValueError("an expert node must listen: its peer is in client mode")
    if not backends:
        raise ValueError("an expert node needs at least one expert")
    node = ExpertNode(backends, device, config)
    node.register(caller)
    announcer = _Announcer(dht, [parse_uid(uid) for uid in backends], Contact(caller.peer_id, caller.address), config)
    async with background_nursery() as nursery:
        nursery.start_soon(node.run_batches)
        await announcer.announce()
        nursery.start_soon(announcer.run)
        try:
            yield node
        finally:
            nursery.cancel_scope.cancel()
            with trio.move_on_after(2.0, shield=True):
                await announcer.withdraw()


class _Announcer:
    """Keeps a node's experts and the node itself listed in the DHT."""

    def __init__(self, dht: DhtNode, uids: list[ExpertUid], contact: Contact, config: NodeConfig) -> None:
        self._dht = dht
        self._uids = uids
        self._contact = contact
        self._config = config

    async def announce(self) -> None:
        """Announce everything once, until `record_lifetime_s` from now."""
        expiration = self._dht.clock.now() + self._config.record_lifetime_s
        listed = await directory.declare_experts(self._dht, self._uids, self._contact, expiration=expiration)
        grids = sorted({uid.prefix for uid in self._uids})[: members.MAX_GRIDS]
        info = {"role": "node", "state": "serving", "experts": len(self._uids), "grids": grids}
        peer_id = self._contact.peer_id
        await members.declare_member(self._dht, self._config.swarm, peer_id, self._contact, info, expiration=expiration)
        if missing := [str(uid) for uid, stands in listed.items() if not stands]:
            logger.warning("%d experts could not be announced, among them %s", len(missing), missing[0])

    async def run(self) -> None:
        """Announce again and again."""
        while True:
            await trio.sleep(self._config.announce_period_s)
            await self.announce()

    async def withdraw(self) -> None:
        """Take the announcements back, so that trainers stop calling at once; what cannot be reached expires."""
        await directory.withdraw_experts(self._dht, self._uids, self._contact)
        await members.withdraw_member(self._dht, self._config.swarm, self._contact.peer_id, "node")
