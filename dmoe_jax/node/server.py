"""The expert node: serves experts to trainers, batch by batch, and lists them in the DHT.

Each call is checked and becomes jobs (`dmoe_jax.node.requests`) in the queue of a `BatchRunner`, which runs batches on
a device, off the event loop. While a batch runs, further requests gather, so a busy node makes larger batches by
itself. Experts may come and go while others are served: queue, runner and savers share one mapping.

RPC methods (body -> body):
  expert.info      {uid} -> {calls, kind, inputs, output, takes_key, meaning, updates, max_rows, warm_rows}; "calls" is
                   the version of calls and records (`dmoe_net.wire.versions`)
  expert.forward, expert.backward    see `dmoe_jax.mixture.expert_calls`
  node.status      {} -> counters, see `ExpertNode.status`
"""

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import trio

from dmoe_jax.directory.directory import Announcer, find_replicas
from dmoe_jax.directory.grid import ExpertUid, parse_uid
from dmoe_jax.directory.members import MAX_GRIDS, Facts, declare_member, traffic, withdraw_member
from dmoe_jax.machine.device import Device
from dmoe_jax.machine.freed_memory import give_back
from dmoe_jax.metrics.node import NodeRecorder
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.requests import Answering
from dmoe_jax.node.runner import BatchRunner
from dmoe_jax.node.sharding import PlacedDevice, placed
from dmoe_jax.node.stacked import Strategies
from dmoe_net.dht.entries import Value
from dmoe_net.dht.node import DhtNode
from dmoe_net.identity import Contact
from dmoe_net.nursery import background_nursery
from dmoe_net.rpc.base import Caller, Handler, Reply, Request, handlers

logger = logging.getLogger(__name__)

_TIDY_S = 10.0
_MOST_FREE_BYTES = 64 << 20
"""Freed memory that a node keeps when nobody has called it for so many seconds."""
_NAMED = 4
"""Experts that a warning names."""


class Replicating(Protocol):
    """Experts that other nodes serve too, see `dmoe_jax.placement.replicas.Replicas`."""

    def status(self) -> dict[str, Any]:
        """Return its part of `node.status`, as plain CBOR data."""

    def facts(self) -> dict[str, Value]:
        """Return facts for the node's entry as a member, see `dmoe_jax.directory.members.Member.info`."""


class ExpertNode:
    """Answers the calls for `backends` and lists them in the DHT; `open_expert_node` runs it.

    Args:
      backends: the experts by uid; the node adds to this mapping what it adopts, and takes off what it gives up.
      contact: where they are called.
      dht: where they are listed.
      device: runs and compiles them; or several, one for each place in which experts live.
      config: settings.
      prototypes: experts of the kinds that it may adopt later, for which it compiles beforehand.
      shares: True if other nodes serve the same experts on purpose; else the node warns of those that do.

    Raises:
      ValueError: if there is nothing to serve, now or later, or an expert lives where there is no device.
    """

    def __init__(
        self,
        backends: dict[str, ExpertBackend],
        contact: Contact,
        dht: DhtNode,
        *,
        device: Device | Sequence[PlacedDevice],
        config: NodeConfig,
        prototypes: Sequence[ExpertBackend] = (),
        shares: bool = False,
    ) -> None:
        if not backends and not prototypes:
            raise ValueError("an expert node needs at least one expert")
        self.config = config
        self.state = "compiling"
        """State of the node: "compiling" until it is warm, then "serving", at last "leaving"."""
        self.recorder = NodeRecorder()
        """Counts for its metrics."""
        self.claims: Callable[[], dict[str, Any]] | None = None
        """Returns the status of its claims (`dmoe_jax.placement`), with `room` and `scope`; None: it claims nothing."""
        self.traffic: Callable[[], Facts] = dict
        """Returns the facts on the bytes of its process."""
        self.warm = trio.Event()
        """Set when its programs are compiled and its experts announced."""
        self.replicas: Replicating | None = None
        """Its experts beside the same ones at other nodes, if it replicates them (`dmoe_jax.placement`)."""
        self._dht, self._contact, self._shares = dht, contact, shares
        self._announcer = Announcer(dht, contact, life_s=config.record_lifetime_s)
        self._warned_of: set[ExpertUid] = set()
        self._backends = backends
        self._experts = {uid: backend.expert for uid, backend in backends.items()}  # without those it is giving up
        self._uids = {uid: parse_uid(uid) for uid in backends}  # the same ones
        self._prototypes = tuple(prototypes)
        devices = placed(device)
        self._runner = BatchRunner(self._backends, devices, config, self.recorder)
        self._answering = Answering(
            self._experts, backends, self._runner, max_rows=config.max_batch_rows, recorder=self.recorder
        )
        self._strategies = Strategies(backends, devices, config, may_adopt=bool(prototypes))
        self.handlers: Mapping[str, Handler] = {**self._answering.handlers, "node.status": self._status}
        """Its RPC methods."""
        self._started_at = trio.current_time()
        self._gone = (0, 0.0)  # steps and staleness of experts that were given up
        self._last_load = (self._started_at, 0, 0, 0.0)  # what `_load` looked at the last time

    def status(self) -> dict[str, Any]:
        """Return the work of the node since its start, as plain CBOR data.

        Keys: `state` ("compiling", "serving" or "leaving"), `warm_rows` (rows for which all its experts are compiled),
        calls served by kind, `busy` calls turned away, `rejected` (requests whose update was not finite, by reason),
        `waiting_rows` in the queue, seconds `uptime_s`, seconds `busy_s` in which devices worked on batches, `devices`,
        which is what each device does (see `BatchRunner.status`) and sums up to the `batches`, `rows` and so on here,
        `strategies` by which they are run (see `Strategies.status`), `updates` of each expert, `steps`, the updates of
        all of them since the start, and their mean `staleness`, None before the first; `answered` calls, their `rows`,
        and the seconds `call_s` that they spent here; if it replicates experts `replicas`, see `Replicas.status`; and
        if it claims experts `claims`, see `Claimer.status`.
        """
        runner, counts, backends = self._runner, self._runner.counts, self._backends.values()
        steps = self._gone[0] + sum(backend.steps_here for backend in backends)
        staleness = self._gone[1] + sum(backend.staleness_total for backend in backends)
        status = {
            **self._answering.counts,
            "batches": counts.batches,
            "failed": counts.failed,
            "rejected": dict(counts.rejected),
            "state": self.state,
            "warm_rows": runner.warm_rows,
            "uptime_s": trio.current_time() - self._started_at,
            "busy_s": counts.busy_s,
            "answered": counts.answered,
            "rows": counts.rows,
            "call_s": counts.call_s,
            "waiting_rows": runner.waiting_rows,
            "devices": runner.status(),
            "strategies": self._strategies.status(),
            "updates": {uid: self._backends[uid].update_count for uid in self._experts},
            "steps": steps,
            "staleness": staleness / steps if steps else None,
        }
        if self.replicas is not None:
            status["replicas"] = self.replicas.status()
        return status if self.claims is None else status | {"claims": self.claims()}

    async def run(self) -> None:
        """Serve and announce for ever. If cancelled, the batch that runs is finished first (see `Device.run`)."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._runner.run)
            nursery.start_soon(self._tidy)
            while True:
                await trio.sleep(self.config.announce_period_s)
                await self.introduce()

    async def _tidy(self) -> None:
        """Give freed memory back when nobody calls; by itself, since it waits for what is compiled. While batches run
        they would only have to wait for the system to clear the same pages again."""
        batches = 0
        while True:
            await trio.sleep(_TIDY_S)
            before, batches = batches, self._runner.counts.batches
            if batches == before:
                await self._runner.aside(give_back, _MOST_FREE_BYTES)

    async def warm_up(self, on_progress: Callable[[str], None]) -> None:
        """Compile for batches of up to `warm_up_rows`, listed as compiling, and then announce the experts. Calls are
        answered meanwhile, as soon as the program that they need is compiled."""
        if self._runner.cold_programs(self._prototypes):
            await self.introduce()
        await self._strategies.settle(on_progress)
        cold = self._runner.cold_programs(self._prototypes)
        for number, (backend, bucket) in enumerate(cold, start=1):
            self.state = f"compiling {number} of {len(cold)}"
            on_progress(self.state)
            await self._runner.compile(backend, bucket)
        self._prototypes = ()
        if cold:
            await self._runner.aside(give_back)  # compiling leaves holes in the heap
        self.state = "serving"
        await self.introduce()
        self.warm.set()

    async def introduce(self, uids: Iterable[str] | None = None) -> None:
        """List the node, and once it serves these of its experts too, None: all, for `record_lifetime_s`; nothing if it
        leaves. Experts that the node does not serve any more are passed over."""
        if self.state == "leaving":
            return
        grids = list(dict.fromkeys(uid.prefix for uid in self._uids.values()))[:MAX_GRIDS]
        facts: dict[str, Value] = {"role": "node", "experts": len(self._uids), "grids": grids}
        load = self._load()
        facts |= {"state": self.state, "waiting_rows": self._runner.waiting_rows, **load, **self.traffic()}
        if self.replicas is not None:
            facts |= self.replicas.facts()
        if self.claims is not None:
            claims = self.claims()
            facts |= {"room": claims["room"], "scope": claims["scope"]}
        life_s = self.config.record_lifetime_s
        await declare_member(self._dht, self.config.swarm, self._contact, facts, life_s=life_s)
        if self.state == "serving":
            some = self._uids if uids is None else uids
            await self._announce([self._uids[uid] for uid in some if uid in self._uids], load.get("call_s"))

    async def _announce(self, uids: Sequence[ExpertUid], call_s: float | None) -> None:
        """Announce experts; warn of those that nobody keeps a record of, and of others that serve them too."""
        if not self._shares and (fresh := [uid for uid in uids if uid not in self._warned_of]):
            self._warned_of.update(fresh)
            await self._warn_of_others(fresh)
            if self.state == "leaving":  # meanwhile
                return
        if missing := await self._announcer.announce(uids, call_s):
            doubts = self._dht.clock.doubts()
            logger.warning(
                "%d experts could not be announced, among them %s%s", len(missing), missing[0], doubts and f"; {doubts}"
            )

    async def _warn_of_others(self, uids: Sequence[ExpertUid]) -> None:
        own, taken = self._contact.peer_id, []
        for uid, replicas in (await find_replicas(self._dht, uids)).items():
            others = [replica.contact for replica in replicas if replica.contact.peer_id != own]
            taken += [f"{uid} ({contact})" for contact in others[:1]]
        if taken:
            named = ", ".join(taken[:_NAMED]) + (", ..." if len(taken) > _NAMED else "")
            logger.warning(
                "%d experts are announced by other nodes as well: %s. A node that claimed one gives it up; otherwise "
                "some trainers call one copy and some another, and the copies go apart, unless all of them replicate "
                "(--replicas 2); a node that has died goes by itself",
                len(taken),
                named,
            )

    def _load(self) -> dict[str, float]:
        """The load since the last time: rows a second, and the mean seconds that a call spent here; none without a
        call, since what was true before may not be true now."""
        counts, (then, *before) = self._runner.counts, self._last_load
        self._last_load = now, *after = trio.current_time(), counts.answered, counts.rows, counts.call_s
        calls, rows, seconds = (new - old for new, old in zip(after, before, strict=True))
        load = {"rows_per_s": rows / max(now - then, 1e-9)}
        return load | {"call_s": seconds / calls} if calls else load

    def adopt(self, uid: str, backend: ExpertBackend) -> None:
        """Answer calls for a further expert from now on; `introduce` lists it. Raises ValueError if the node serves it
        already, or is still giving it up, or the uid is none."""
        if uid in self._backends:
            raise ValueError(f"this node serves {uid} already")
        self._uids[uid] = parse_uid(uid)
        self._experts[uid] = backend.expert
        self._backends[uid] = backend

    async def give_up(self, uid: str) -> None:
        """Leave an expert, which this node serves, to the other nodes that serve it too.

        Further calls for it are refused, its announcement is taken back, and accepted calls are answered; then the node
        forgets it.
        """
        del self._experts[uid]
        await self._announcer.withdraw([self._uids.pop(uid)])
        await self._runner.finish(uid)
        backend = self._backends.pop(uid)
        self._gone = (self._gone[0] + backend.steps_here, self._gone[1] + backend.staleness_total)

    def refuse_calls(self) -> None:
        """Refuse forward and backward calls from now on, so that callers turn elsewhere at once. Accepted calls go on,
        and those that were asked before may be asked again."""
        self.state = "leaving"
        self._answering.is_leaving = True

    async def leave(self) -> None:
        """Refuse new calls, then take the announcements back, within two seconds (what cannot be reached expires), and
        answer what was accepted, within `leave_timeout_s`."""
        self.refuse_calls()
        with trio.move_on_after(2.0, shield=True):
            await self._announcer.withdraw(list(self._uids.values()))
            await withdraw_member(self._dht, self.config.swarm, "node")
        with trio.move_on_after(self.config.leave_timeout_s):
            await self._answering.answer_accepted()

    async def _status(self, request: Request) -> Reply:
        del request
        return Reply(body=self.status())


@asynccontextmanager
async def open_expert_node(
    caller: Caller,
    dht: DhtNode,
    backends: dict[str, ExpertBackend],
    *,
    device: Device | Sequence[PlacedDevice],
    config: NodeConfig,
    prototypes: Sequence[ExpertBackend] = (),
    on_progress: Callable[[str], None] = lambda text: None,
    on_open: Callable[[ExpertNode], None] = lambda node: None,
    compiling: AbstractAsyncContextManager[object] = nullcontext(),  # noqa: B008 (stateless)
    shares: bool = False,
) -> AsyncIterator[ExpertNode]:
    """Serve `backends` (by uid) at `caller` while the context is open, and announce node and experts in the DHT.

    On entry the node is listed as compiling and answers `node.status`; its experts are announced, and the block begins,
    when it is warm. At the end it leaves (`ExpertNode.leave`), for which `caller` and `dht` must still run, and the
    methods are taken back. If everything is cancelled at once, accepted calls are dropped.

    Args:
      backends, device, config, prototypes, shares: see `ExpertNode`.
      on_progress: told each state on the way, such as "compiling 2 of 5".
      on_open: told of the node before it is warm: it may adopt experts from then on.
      compiling: what to compile in, so that processes of one machine do not all do the same work.

    Raises:
      ValueError: if there is no expert, one lives where there is no device, or the peer does not listen or serves
        experts already.
    """
    if caller.address is None:
        raise ValueError("an expert node must listen: its peer is in client mode")
    contact = Contact(caller.peer_id, caller.address)
    node = ExpertNode(backends, contact, dht, device=device, config=config, prototypes=prototypes, shares=shares)
    node.traffic = partial(traffic, caller)
    with handlers(caller, node.handlers, max_concurrent=config.max_concurrent_calls):
        async with background_nursery() as nursery:
            nursery.start_soon(node.run)
            try:
                on_open(node)
                async with compiling:
                    await node.warm_up(on_progress)
                yield node
            finally:
                await node.leave()
                nursery.cancel_scope.cancel()
