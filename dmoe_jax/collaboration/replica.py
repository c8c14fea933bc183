"""A replica of several processes in a collaboration: the first decides, and all change the state alike.

Only the first process hears of others: it decides when a step begins, finds the group, takes part in the settlement and
looks for states. Each change of the state is an *order*, which it gives before it carries it out, and which the other
processes carry out inside the same call of `add` or `gathered`: so all processes run the same programs in the same
order, as `jax.distributed` wants it. What they average are their own pieces (`dmoe_jax.mesh.shards`).
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any

import trio

from dmoe_jax.averaging.donor import table_of
from dmoe_jax.averaging.replica import ComingCopy, CopyTogether
from dmoe_jax.collaboration.peer_state import PeerState
from dmoe_jax.collaboration.settings import GlobalStep
from dmoe_jax.collaboration.state import CollaborationState
from dmoe_net.averaging.collaboration.progress import CHAIN_BYTES
from dmoe_net.averaging.collaboration.rounds import Averaged, StepAveraging
from dmoe_net.averaging.collaboration.step_log import POLL_S, StepFollower, StepLog
from dmoe_net.averaging.replica import Replica
from dmoe_net.averaging.state.sharing import SharedState
from dmoe_net.dht.calls import PEER_ERRORS
from dmoe_net.dht.messages import contact_to_wire, parse_contact_untrusted
from dmoe_net.errors import CallRefused, RemoteProtocolError
from dmoe_net.identity import Contact
from dmoe_net.rpc.base import Caller
from dmoe_net.wire.fields import FLAG, MAPPING, Field, integer, octets, optional, real, row_untrusted, rows, text

_ORDERS = "orders"
"""Mark under which orders are given."""
_COPY_TIMEOUT_S = 25.0
"""Seconds for which a newcomer waits for the next micro-batch. Shorter than `StateSharingConfig.call_timeout_s`."""
_MARK, _STEP, _TRAINED = text(0, 64), integer(0, 2**62), real(0.0)
_CHAIN = octets(CHAIN_BYTES, CHAIN_BYTES)
_MOST_DONORS = 2048
_GLOBAL_STEP: dict[str, Field[Any]] = {
    "number": _STEP,
    "peers": _STEP,
    "samples": real(),
    "own_samples": real(),
    "gathered_s": real(),
    "averaged_s": real(),
    "attempts": _STEP,
}


@dataclass(kw_only=True, eq=False)
class Leading:
    """The first process's end: gives orders, and carries them out here, too."""

    replica: Replica
    training: PeerState
    state: CollaborationState
    together: CopyTogether

    def __post_init__(self) -> None:
        self._coming: ComingCopy | None = None
        self._num_averages = 0
        self.follows = False
        """True while the other processes fetch what steps bring."""
        self._made: list[GlobalStep] = []

    async def order(self, kind: str, **facts: Any) -> None:
        """Have the other processes do the same as this one does next."""
        await self.replica.decided(_ORDERS, {"do": kind, **facts})

    def next_mark(self) -> str:
        self._num_averages += 1
        return f"average {self._num_averages}"

    def made(self, done: GlobalStep) -> None:
        """Note a global step, of which the other processes will hear."""
        self._made.append(done)

    async def go_on(self, changed: bool) -> None:
        """Let the other processes return to their loops."""
        made, self._made = [list(map(_plain, astuple(done))) for done in self._made], []
        await self.order(
            "go on",
            changed=changed,
            step=self.state.step,
            chain=self.state.chain,
            trained=float(self.state.trained),
            follows=self.follows,
            made=made,
        )

    async def copy_if_wanted(self) -> None:
        """Copy the state in all processes if a newcomer waits for it, and nothing is being averaged."""
        coming, under_way = self._coming, self.state.under_way
        if coming is None or (under_way is not None and not under_way.is_over):
            return
        averaged = None if under_way is None else under_way.averaged
        await self.order("copy", mark=None if under_way is None or averaged is None else under_way.mark)
        tensors = await self.training.pieces(averaged)
        facts = {"chain": self.state.chain, "trained": float(self.state.trained), **self.together.took(tensors)}
        coming.state = SharedState(version=self.state.step, tensors=tensors, facts=facts)
        coming.is_there.set()
        self._coming = None

    async def next_copy(self) -> SharedState:
        """Wait for a copy that all processes make, and return this process's pieces of it.

        Raises:
          CallRefused: the loop makes no micro-batch.
        """
        coming = self._coming = self._coming or ComingCopy()
        with trio.move_on_after(_COPY_TIMEOUT_S):
            await coming.is_there.wait()
        if coming.state is None:
            raise CallRefused(f"the training loop of this peer has made no micro-batch for {_COPY_TIMEOUT_S:g} s")
        return coming.state

    async def watch(self, donors: Sequence[Contact]) -> None:
        """Have the other processes fetch what the steps of these replicas bring, until this one is in step."""
        self.follows = True
        await self.order("watch", donors=list(map(contact_to_wire, donors)))

    async def all_have(self, step: int, chain: bytes) -> bool:
        """True if all processes have fetched what follows on a step."""
        await self.order("have", step=step, chain=chain)
        return all(await self.replica.agree(_ORDERS, True))

    async def take(self, taken: SharedState) -> bool:
        """Take a state in all processes, if each gets its pieces of it; return True if they did."""
        await self.order("take", facts=dict(taken.facts))
        if not all(await self.replica.agree(_ORDERS, True)):
            self.state.totals.reasons["no state: pieces are missing"] += 1
            return False
        await self.training.take(taken.tensors)
        return True


@dataclass(kw_only=True, eq=False)
class Led:
    """Another process's end: carries orders out."""

    replica: Replica
    training: PeerState
    state: CollaborationState
    together: CopyTogether
    rounds: StepAveraging
    nursery: trio.Nursery
    caller: Caller
    prefix: str
    """Prefix of the collaboration, of this process's piece."""

    def __post_init__(self) -> None:
        self._log = StepLog(self.caller, prefix=self.prefix)
        self._donors: list[Contact] = []
        self._follower = StepFollower(
            caller=self.caller,
            prefix=self.prefix,
            size=self.training.layout.size,
            donors=lambda: self._donors,
        )
        self._follows = trio.Event()
        self._brought: Averaged | None = None
        self._own: Averaged | None = None
        self._averages: dict[str, Averaged | None] = {}
        self._is_over: dict[str, trio.Event] = {}
        self.made: list[GlobalStep] = []
        """Global steps of which this process has heard, for whoever takes them."""

    async def serve(self) -> None:
        """Give this process's pieces of steps and states to newcomers, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._log.run)
            nursery.start_soon(self._follow_along)
            with self.together.serving():
                await trio.sleep_forever()

    async def until_told_to_go_on(self) -> bool:
        """Carry orders out until the first process lets the loops go on; return True if the parameters have changed."""
        while True:
            order = MAPPING.read_untrusted(await self.replica.decided(_ORDERS), "an order")
            kind = text(1, 32).of_untrusted(order, "do")
            if kind == "go on":
                return self._go_on(order)
            await self._carry_out(kind, order)

    async def _carry_out(self, kind: str, order: Mapping[str, Any]) -> None:
        if kind == "contribution":
            self._own = await self.training.contribution()
        elif kind == "average":
            await self._average(order)
        elif kind == "step":
            mark = _MARK.of_untrusted(order, "mark")
            averaged = await self._average_of(mark)
            if averaged is None:
                raise RemoteProtocolError("process 0 has an average to step with, and this process has none")
            self._forget(mark)
            await self.training.step(averaged)
        elif kind == "empty":
            await self.training.empty()
        elif kind == "copy":
            under_way = optional(_MARK).of_untrusted(order, "mark")
            averaged = None if under_way is None else await self._average_of(under_way)
            self.together.took(await self.training.pieces(averaged))
        elif kind == "watch":
            await self._watch(rows(_MOST_DONORS).of_untrusted(order, "donors"))
        elif kind == "have":
            step, chain = _STEP.of_untrusted(order, "step"), _CHAIN.of_untrusted(order, "chain")
            if (brought := self._follower.following(step, chain)) is None:
                await self._follower.ask()
                brought = self._follower.following(step, chain)
            self._brought = brought
            await self.replica.agree(_ORDERS, brought is not None)
        elif kind == "follow":
            if self._brought is None:
                raise RemoteProtocolError("process 0 follows a step that this process does not have")
            await self.training.step(self._brought)
        elif kind == "take":
            facts = MAPPING.of_untrusted(order, "facts")
            tensors = await self.together.fetch_untrusted(facts, table_of(self.training.shared))
            if all(await self.replica.agree(_ORDERS, tensors is not None)) and tensors is not None:
                await self.training.take(tensors)
        else:
            raise RemoteProtocolError(f"there is no order to {kind!r}")

    async def _average(self, order: Mapping[str, Any]) -> None:
        mark, own = _MARK.of_untrusted(order, "mark"), self._own
        if own is None:
            raise RemoteProtocolError("an average was ordered before a contribution")
        number, chain = _STEP.of_untrusted(order, "number"), _CHAIN.of_untrusted(order, "chain")
        self._is_over[mark] = trio.Event()
        if FLAG.of_untrusted(order, "alone"):
            self._settled(mark, own, number, chain)
        elif FLAG.of_untrusted(order, "beside"):
            self.nursery.start_soon(self._follow, mark, own, number, chain)
        else:
            await self._follow(mark, own, number, chain)

    async def _watch(self, donors: Sequence[object]) -> None:
        """Fetch what steps bring from the processes that have this one's piece, now and until in step."""
        self._donors = []
        for raw in donors:
            with suppress(*PEER_ERRORS):
                processes = await self.replica.processes_of(parse_contact_untrusted(raw))
                self._donors.append(processes[self.replica.index])
        self._follows.set()
        await self._follower.ask()

    async def _follow_along(self) -> None:
        while True:
            await self._follows.wait()
            await self._follower.ask()
            await trio.sleep(POLL_S)

    def _forget(self, mark: str) -> None:
        """Forget an average that was used, and those that came to nothing before it."""
        for each in list(self._is_over):
            self._averages.pop(each, None)
            del self._is_over[each]
            if each == mark:
                return

    async def _follow(self, mark: str, own: Averaged, number: int, chain: bytes) -> None:
        self._settled(mark, await self.rounds.follow(own.mean, weight=own.weight, mark=mark), number, chain)

    def _settled(self, mark: str, averaged: Averaged | None, number: int, chain: bytes) -> None:
        if averaged is not None and not self.training.is_exact(averaged.mean):
            self._log.keep(number, chain, averaged)
        self._averages[mark] = averaged
        self._is_over[mark].set()

    async def _average_of(self, mark: str) -> Averaged | None:
        if mark not in self._is_over:
            raise RemoteProtocolError(f"there is no average {mark!r}")
        await self._is_over[mark].wait()
        return self._averages.get(mark)

    def _go_on(self, order: Mapping[str, Any]) -> bool:
        state = self.state
        state.step, state.chain = _STEP.of_untrusted(order, "step"), _CHAIN.of_untrusted(order, "chain")
        state.trained = _TRAINED.of_untrusted(order, "trained")
        if not FLAG.of_untrusted(order, "follows") and self._follows.is_set():
            self._follows = trio.Event()
        for row in rows(2**16).of_untrusted(order, "made"):
            facts = row_untrusted(row, "a global step", **_GLOBAL_STEP)
            self.made.append(GlobalStep(**dict(zip(_GLOBAL_STEP, facts, strict=True))))
        return FLAG.of_untrusted(order, "changed")


def _plain(value: Any) -> Any:
    return value if isinstance(value, int) else float(value)


async def agreed_chain(replica: Replica, training: PeerState) -> bytes:
    """The chain of a replica's parameters, from what each of its processes holds."""
    own = await training.device.run(training.digest)
    digests = await replica.agree("chain", own)
    joined = b"".join(_CHAIN.read_untrusted(each, "a digest") for each in digests)
    return hashlib.blake2b(joined, digest_size=CHAIN_BYTES).digest()
