"""The expert node: serves experts to trainers, batch by batch.

Theory of operation. Each call is checked and becomes a job in the queue of a `BatchRunner`, which runs batches on the
device, off the event loop. While a batch runs, further requests gather, so a busy node makes larger batches by itself.
An `Announcer` lists the experts in the DHT and withdraws them at the end. Jobs whose caller has given up leave the
queue before they cost anything.

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

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio

from dmoe_jax.device import Device
from dmoe_jax.grid import parse_uid
from dmoe_jax.node import requests
from dmoe_jax.node.announcing import Announcer
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.batching import QueueFull, Ticket
from dmoe_jax.node.replay import ReplayCache
from dmoe_jax.node.runner import BatchRunner, Job
from net.dht.node import DhtNode
from net.errors import PeerBusy
from net.identity import Contact
from net.nursery import background_nursery
from net.rpc.base import Caller, Reply, Request
from net.wire.compression import Compression
from net.wire.tensors import as_outgoing


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
        self.uids = tuple(backends)
        """The experts that it serves."""
        self._backends = dict(backends)
        self._runner = BatchRunner(
            self._backends,
            device,
            max_batch_rows=config.max_batch_rows,
            max_waiting_rows=config.max_waiting_rows,
            warm_up_rows=config.warm_up_rows,
        )
        self._replays: ReplayCache[tuple[Job, Ticket[Job]]] = ReplayCache()
        self._started_at = trio.current_time()
        self.state = "compiling"
        """What the node is at: "compiling" until it is warm, then "serving"."""
        self._counts = {"forward": 0, "backward": 0, "busy": 0, "replayed": 0}

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
        runner = self._runner
        return {
            **self._counts,
            "batches": runner.batches,
            "failed": runner.failed,
            "rejected": dict(runner.rejected),
            "state": self.state,
            "warm_rows": runner.warm_rows,
            "uptime_s": trio.current_time() - self._started_at,
            "busy_s": runner.busy_s,
            "waiting_rows": runner.queue.waiting_rows,
            "updates": {uid: backend.update_count for uid, backend in self._backends.items()},
        }

    async def run(self) -> None:
        """Serve the queue for ever. If cancelled, the batch that runs is finished first (see `Device.run`)."""
        await self._runner.run()

    async def warm_up(self, announcer: Announcer, on_progress: Callable[[str], None]) -> None:
        """Compile for batches of up to `warm_up_rows`, listed as compiling, and then announce the experts.

        Calls are answered meanwhile, as soon as the program that they need is compiled.

        Args:
          on_progress: told each state on the way, such as "compiling 2 of 5".
        """

        def compiling(number: int, count: int) -> None:
            self.state = f"compiling {number} of {count}"
            on_progress(self.state)

        if self._runner.must_compile:
            await announcer.announce()
            await self._runner.warm_up(compiling)
        self.state = "serving"
        await announcer.announce()

    async def _status(self, request: Request) -> Reply:
        del request
        return Reply(body=self.status())

    async def _info(self, request: Request) -> Reply:
        uid = requests.uid_of(request, self.uids)
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
        uid = requests.uid_of(request, self.uids)
        parsed = requests.parse_forward(request, uid, self._backends[uid].expert, max_rows=self.config.max_batch_rows)
        job = Job(parsed)
        return await self._finish(job, self._submit("forward", job), parsed.compression)

    async def _backward(self, request: Request) -> Reply:
        uid = requests.uid_of(request, self.uids)
        parsed = requests.parse_backward(request, uid, self._backends[uid].expert, max_rows=self.config.max_batch_rows)
        assert parsed.request_id is not None
        # Trainer and expert are part of the key: equal ids of others do not get these gradients.
        replay_key = request.peer_id.raw + uid.encode() + b"/" + parsed.request_id
        known = self._replays.find(replay_key)
        if known is not None:
            self._counts["replayed"] += 1
            return await self._finish(*known, parsed.compression, replay_key=replay_key)
        job = Job(parsed)
        ticket = self._submit("backward", job)
        self._replays.remember(replay_key, (job, ticket), nbytes=sum(array.nbytes for array in parsed.inputs))
        return await self._finish(job, ticket, parsed.compression, replay_key=replay_key)

    def _submit(self, kind: str, job: Job) -> Ticket[Job]:
        try:
            ticket = self._runner.submit(kind, job)
        except QueueFull as full:
            self._counts["busy"] += 1
            raise PeerBusy(f"the node is busy: {full}") from full
        self._counts[kind] += 1
        return ticket

    async def _finish(
        self, job: Job, ticket: Ticket[Job], compression: Compression, *, replay_key: bytes | None = None
    ) -> Reply:
        """Wait for a job. If cancelled while it still waits in the queue, and nobody else wants it, it is dropped."""
        job.waiters += 1
        try:
            await job.done.wait()
        finally:
            job.waiters -= 1
            if not job.waiters and self._runner.queue.withdraw(ticket) and replay_key is not None:
                self._replays.forget(replay_key)
        if job.error is not None:
            raise job.error
        tensors = tuple(as_outgoing(result, compression) for result in job.results)
        return Reply(body={"updates": job.updates}, tensors=tensors)


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
            nursery.start_soon(node.run)
            try:
                nursery.start_soon(announcer.run)
                await node.warm_up(announcer, on_progress)
                yield node
            finally:
                nursery.cancel_scope.cancel()
                with trio.move_on_after(2.0, shield=True):
                    await announcer.withdraw()
    finally:
        node.unregister(caller)
