"""Rounds of averaging beside a training loop: see `dmoe_jax.averaging`."""

import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import optax
import trio

from dmoe_jax.arrays import PyTree
from dmoe_jax.averaging.donor import LoopState, donor_source, is_finite_state, table_of, tree_like
from dmoe_jax.averaging.replica import CopyTogether, replica_of
from dmoe_jax.averaging.settings import AveragingTotals, Round, TreeAveragerConfig, mark_of
from dmoe_jax.averaging.wire_form import WireForm, wire_forms
from dmoe_jax.machine.device import Device, ThreadDevice
from dmoe_jax.optim.host_state import (
    Sent,
    averaging_due,
    host_state,
    is_going_over,
    taken_over,
    what_to_send,
    with_average,
    without_gathered,
)
from dmoe_jax.peers.peer import SwarmPeer
from dmoe_net.averaging.averager import Averager, AveragingStep
from dmoe_net.averaging.grouping.group import WEIGHTS
from dmoe_net.averaging.opening import open_averager
from dmoe_net.averaging.plan import AveragingPlan
from dmoe_net.averaging.replica import Replica
from dmoe_net.averaging.state.buffer import Table
from dmoe_net.averaging.state.download import StateRefused
from dmoe_net.averaging.state.sharing import MAX_VERSION, SharedState, StateSource
from dmoe_net.errors import NetError
from dmoe_net.nursery import background_nursery
from dmoe_net.types import Array
from dmoe_net.wire.fields import MAPPING
from dmoe_net.wire.sparse import SparseVector

_log = logging.getLogger(__name__)

MISSED_BEFORE_CATCHING_UP = 3
"""Rounds in a row that may come to nothing before a peer should ask whether the others have left it behind."""

_ASK_AGAIN_S = 5.0
"""Seconds until those who are ahead are asked again, if their loops stood still."""
_STEP = "step"
"""Mark under which the processes of a replica agree on what a step does."""
_CATCH_UP_TIMEOUT_S = 120.0
_CATCH_UP_ATTEMPTS = 3
"""A connection may break; that nobody is ahead is no reason to wait."""


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A round, and its average once that has come."""

    sent: Sent
    mark: str
    """Mark of the round, the same in all processes of a replica."""
    averaged: PyTree | None = None
    """The average; for a model over several processes this one's vector, of which all make a tree together."""
    done: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


@dataclass(slots=True, eq=False, kw_only=True)
class Fragment:
    """A part of the model that is averaged by itself, and its round."""

    number: int
    averager: Averager
    form: WireForm
    turn: trio.Lock = field(default_factory=trio.Lock)
    """A dropped round has to end before the next."""
    under_way: _UnderWay | None = None
    begun: int = 0
    """Rounds that were begun."""


@dataclass(kw_only=True, eq=False)
class TreeAverager:
    """Averages what an optimiser offers with the peers of one name. Made by `Swarm.averager`."""

    fragments: Sequence[Fragment]
    what: str
    """Kind of what is averaged."""
    loop: LoopState | None = None
    """The state that `step` gives to newcomers, and takes from others."""
    device: Device
    nursery: trio.Nursery
    on_round: Callable[[Round], None]
    replica: Replica | None = None
    """The processes of which this one is part, all of which step alike; None: this one alone."""
    totals: AveragingTotals = field(default_factory=AveragingTotals)
    """Counts of the rounds so far."""
    why_not: str = ""
    """Reason for which the last round came to nothing, or there are none now; empty if it gave an average."""

    def __post_init__(self) -> None:
        self._missed_in_a_row = 0
        self._left_behind = trio.Event()
        self._held_back = ""
        self._ask_at = -math.inf  # trio's time at which a late state is asked for, beside when rounds come to nothing
        self._is_refused = False  # when last asked: those who are ahead had no state to give
        self._is_of_others = False  # when last asked: a state that was offered has other arrays than this peer's

    @property
    def is_under_way(self) -> bool:
        """True while the outcome of a round is not in an optimiser's state yet."""
        return any(fragment.under_way is not None for fragment in self.fragments)

    @property
    def is_left_behind(self) -> bool:
        """True if `catch_up` should be called: rounds came to nothing, or were left out because others are ahead."""
        return self._left_behind.is_set()

    async def wait_until_left_behind(self) -> None:
        await self._left_behind.wait()

    async def step(self, opt_state: PyTree, params: PyTree, *, wait: bool = False) -> PyTree:
        """Begin a round if one is due, and put the outcome of the last one into the state if it has come.

        Call it after each update. The next update applies what has come; after a `wait`, `optim.apply_average` does so
        at once. If cancelled, the round goes on, and a later call gives its outcome.

        If the averager was opened without `state`, a peer that joins late or is left behind takes the state of the
        peer that is furthest: this call waits for that state, and the next update leads to its parameters. Else it
        waits for nobody, unless told to.

        Args:
          opt_state: of the optimiser with which the averager was opened; not donated while this runs.
          params: the parameters after the update.
          wait: True to wait until a round that is due or under way is over (synchronous averaging).

        Returns: the state to go on with.

        Raises:
          ValueError: the state or the parameters are of another optimiser or model.
        """
        if self.loop is None:
            return await self._step(opt_state, params, wait=wait)
        async with self.loop.at_hand(params, opt_state) as own:
            ready: list[int] | None = None
            if self.replica is None:
                taken = await self._late_state(self.loop, own)
            else:
                taken, ready = await self._alike(self.replica, self.loop, own)
            if taken is not None:
                return taken_over(**taken)
            if await self.device.run(is_going_over, opt_state):
                return opt_state
            return await self._step(own["opt_state"], params, wait=wait, ready=ready)

    async def _alike(self, replica: Replica, loop: LoopState, own: PyTree) -> tuple[PyTree | None, list[int] | None]:
        """Do what all processes of a replica do now: return the state that they take, if there is one, and the
        fragments whose rounds are over for all."""
        orders: dict[str, Any] | None = None
        late: SharedState | None = None
        if replica.leads:
            if self._is_late:
                late = await self._late_download(loop, own)
                late = None if late is None or loop.progress_of_untrusted(late.facts) < 0 else late
            over = [
                each.number for each in self.fragments if each.under_way is not None and each.under_way.done.is_set()
            ]
            facts = None if late is None else dict(late.facts)
            orders = {"copy": loop.wanted.is_set(), "take": facts, "ready": over}
        told = MAPPING.read_untrusted(await replica.decided(_STEP, orders), "the leader's orders")
        if told.get("copy"):
            await loop.copy_together()
        facts = told.get("take")
        if facts is None:
            return None, list(told.get("ready") or [])
        assert loop.together is not None
        tensors: Sequence[Array] | None = None if late is None else late.tensors
        if not replica.leads:
            tensors = await loop.together.fetch_untrusted(facts, table_of(own))
        if not all(await replica.agree(_STEP, tensors is not None)) or tensors is None:
            return None, []
        taken = without_gathered(await self.device.run(tree_like, own, tensors))
        self.state_was_taken()
        loop.progress = loop.progress_of_untrusted(facts)
        return taken, None

    @property
    def _is_late(self) -> bool:
        return self.is_left_behind or trio.current_time() >= self._ask_at

    async def _late_state(self, loop: LoopState, own: PyTree) -> PyTree | None:
        state = await self._late_download(loop, own) if self._is_late else None
        if state is None:
            return None
        taken = without_gathered(await self.device.run(tree_like, own, state.tensors))
        self.state_was_taken()
        return taken

    async def _late_download(self, loop: LoopState, own: PyTree) -> SharedState | None:
        self._is_of_others, self._is_refused, self._ask_at = False, False, math.inf
        state = await self._download(loop.version, own, min_lead=1, max_version=MAX_VERSION)
        if self._is_refused:
            self._ask_at = trio.current_time() + _ASK_AGAIN_S
        if state is None and self._is_of_others:  # the others share a `state` of their callers': not for this peer
            self.why_not = self._held_back = ""
        return state

    async def _step(self, opt_state: PyTree, params: PyTree, *, wait: bool, ready: list[int] | None = None) -> PyTree:
        """Begin what is due, and put in what has come: of all that is over, or of these fragments."""
        for fragment in self.fragments:
            if fragment.under_way is None and await self.device.run(averaging_due, opt_state, fragment.number):
                await self._begin(fragment, opt_state, params)
        if wait and self.replica is not None:
            await self._wait_alike(self.replica)
        for fragment in self.fragments:
            this = fragment.under_way
            if this is None:
                continue
            if wait or (ready is not None and fragment.number in ready):
                await this.done.wait()
            if this.done.is_set() and (wait or ready is None or fragment.number in ready):
                averaged = this.averaged
                if fragment.form.mean.spans and averaged is not None:
                    averaged = await self.device.run(fragment.form.mean.to_tree, averaged)
                receive = partial(with_average, fragment=fragment.number)
                opt_state = await self.device.run(receive, opt_state, this.sent, averaged)
                fragment.under_way = None
        return opt_state

    async def _wait_alike(self, replica: Replica) -> None:
        """Wait until the rounds are over for all processes, which copy their state meanwhile for who wants it."""
        assert self.loop is not None
        loop, under_way = self.loop, [each.under_way for each in self.fragments if each.under_way is not None]

        async def cancel_when_wanted(scope: trio.CancelScope) -> None:
            await loop.wanted.wait()
            scope.cancel()

        is_over = not under_way
        while not is_over:
            orders: dict[str, Any] | None = None
            if replica.leads:
                async with background_nursery() as nursery:
                    nursery.start_soon(cancel_when_wanted, nursery.cancel_scope)
                    for this in under_way:
                        await this.done.wait()
                orders = {"copy": loop.wanted.is_set(), "over": all(this.done.is_set() for this in under_way)}
            told = MAPPING.read_untrusted(await replica.decided(_STEP, orders), "the leader's orders")
            if told.get("copy"):
                await loop.copy_together()
            is_over = bool(told.get("over"))

    async def _begin(self, fragment: Fragment, opt_state: PyTree, params: PyTree) -> None:
        if (kind := host_state(opt_state).kind) != self.what:
            raise ValueError(f"the averager is for {self.what}, the optimiser averages {kind}")

        def offer() -> Sent:
            sent = what_to_send(opt_state, params, fragment=fragment.number)
            fragment.form.layout.check(sent.tree)
            return sent._replace(tree=fragment.form.layout.laid_out(sent.tree))

        fragment.begun += 1
        mark = f"round {fragment.number}.{fragment.begun}"
        fragment.under_way = _UnderWay(await self.device.run(offer), mark)
        self.nursery.start_soon(self._carry, fragment, fragment.under_way)

    async def catch_up(
        self, version: int, tree: PyTree, *, min_lead: int = 1, max_version: int = MAX_VERSION
    ) -> tuple[int, PyTree] | None:
        """Fetch the whole state of the peer that is furthest ahead; None if nobody is, or it cannot be had.

        As long as others are ahead and their state cannot be had, this peer takes no part in averages, since it would
        hold theirs back: `why_not` says so. A round that is under way is dropped when a state is taken.

        Args:
          version: how far this peer's state is, such as its number of updates.
          tree: this peer's state, of the same arrays as others': of other shapes none is taken.
          min_lead: how far ahead the other must be, at least.
          max_version: states that claim to be further are not taken. A run has an end, and a claim costs nothing.

        Returns: the other's version and state.
        """
        taken = await self.fetch_state(version, tree, min_lead=min_lead, max_version=max_version)
        if taken is not None:
            self.state_was_taken()
        return taken

    async def fetch_state(
        self, version: int, tree: PyTree, *, min_lead: int, max_version: int
    ) -> tuple[int, PyTree] | None:
        """Do as `catch_up` does, but leave it to the caller to take the state and then to call `state_was_taken`."""
        state = await self._download(version, tree, min_lead=min_lead, max_version=max_version)
        if state is None:
            return None
        return state.version, without_gathered(await self.device.run(tree_like, tree, state.tensors))

    async def _download(self, version: int, tree: PyTree, *, min_lead: int, max_version: int) -> SharedState | None:
        """The state of the peer that is furthest ahead, or this process's pieces of it."""
        if self.is_left_behind:  # else somebody may wait for this very event
            self._left_behind = trio.Event()
        self._missed_in_a_row = 0
        table = table_of(tree)

        def is_of_use(theirs: int, offered: Table) -> bool:
            self._is_of_others |= offered != table
            return theirs <= max_version and offered == table

        try:
            state = await self.fragments[0].averager.download_state(
                min_version=version + min_lead,
                timeout_s=_CATCH_UP_TIMEOUT_S,
                attempts=_CATCH_UP_ATTEMPTS,
                expects=is_of_use,
                accepts=is_finite_state,
            )
        except StateRefused:  # nobody averages with an old state while its owner has none: no reason to wait
            state, self._is_refused = None, True
        except NetError as error:
            self.why_not = self._held_back = str(error)
            return None
        if self._held_back:  # else it says why rounds were lost
            self.why_not = self._held_back = ""
        return state

    def state_was_taken(self) -> None:
        """Drop the rounds that are under way, for their difference belongs to a state that is no more."""
        self.totals.states_taken += 1
        for fragment in self.fragments:
            if fragment.under_way is not None:
                fragment.under_way.scope.cancel()
                fragment.under_way.done.set()
                fragment.under_way = None

    async def _carry(self, fragment: Fragment, under_way: _UnderWay) -> None:
        number, began, done = fragment.averager.round_number, trio.current_time(), None
        with under_way.scope:
            async with fragment.turn:
                done, why_lost = await self._attempt(fragment, under_way)
        if self.replica is not None:
            self.replica.forget(under_way.mark)
        if under_way.scope.cancelled_caught:
            return
        self.why_not = why_lost
        under_way.done.set()
        took_s = trio.current_time() - began
        over = Round(number=number, fragment=fragment.number, took_s=took_s, why_lost=why_lost)
        if done is not None:
            met, received = len(done.peers), done.received
            over = replace(over, peers=met, received=received, moved_bytes=done.moved_bytes, lost=done.lost)
            if not why_lost:
                self.totals.last = over = replace(over, group=mark_of(done.peers))
        self.on_round(over)

    async def _attempt(self, fragment: Fragment, under_way: _UnderWay) -> tuple[AveragingStep | None, str]:
        """Carry a round out, and leave its average in `under_way`; return what it came to and why it is lost."""
        held_back = (await self._agree(under_way, self._held_back))[0]
        if held_back:
            self._left_behind.set()
            return None, self._missed(held_back, reason="held back")
        vector, is_finite = await self.device.run(fragment.form.vector_of, under_way.sent)
        if not isinstance(vector, SparseVector):
            self.totals.piece_bytes = max(self.totals.piece_bytes, vector.nbytes)
        samples = under_way.sent.samples
        weight = 1.0 if samples is None else await self.device.run(float, samples)
        name = self.what.replace("_", "-")
        if not all(await self._agree(under_way, is_finite)):
            if self.what != "gradients":  # they are gone with their round, parameters stay
                self._left_behind.set()
            return None, self._rejected(f"this peer's {name} are not finite")
        if not WEIGHTS[0] <= weight <= WEIGHTS[1]:
            return None, self._rejected(f"a weight of {weight:g} samples is not from {WEIGHTS[0]:g} to {WEIGHTS[1]:g}")
        try:
            done = await fragment.averager.step(vector, weight=weight, mark=f"{under_way.mark} groups")
        except NetError as error:
            return None, self._missed(f"the network failed: {error}", reason=f"network: {type(error).__name__}")
        if done.received == 0:
            leads = self.replica is None or self.replica.leads
            others = (await self._agree(under_way, await fragment.averager.why_apart() if leads else ""))[0]
            reason = "nobody was met, others average something else" if others else "nobody was met"
            return done, self._missed(f"nobody was met: {others}" if others else reason, reason=reason)
        self._missed_in_a_row = 0
        if not all(await self._agree(under_way, bool(np.isfinite(done.average).all()))):
            return done, self._rejected(f"the average of {name} is not finite")
        mean = fragment.form.mean
        under_way.averaged = (
            done.average if mean.spans else await self.device.run(mean.to_tree, done.average, under_way.sent.tree)
        )
        self.totals.done += 1
        self.totals.peers_met += len(done.peers) - 1
        self.totals.moved_bytes += done.moved_bytes
        self.totals.peers_lost.update(done.lost.values())
        return done, ""

    async def _agree(self, under_way: _UnderWay, value: Any) -> list[Any]:
        """The values of all processes of the replica; this one's alone if there is none."""
        return [value] if self.replica is None else await self.replica.agree(under_way.mark, value)

    def _missed(self, why: str, *, reason: str) -> str:
        self.totals.missed += 1
        self.totals.reasons[reason] += 1
        self._missed_in_a_row += 1
        if self._missed_in_a_row >= MISSED_BEFORE_CATCHING_UP:
            self._left_behind.set()
        return why

    def _rejected(self, why: str) -> str:
        self.totals.rejected += 1
        self.totals.reasons[why] += 1
        return why


@asynccontextmanager
async def open_tree_averager(
    peer: SwarmPeer,
    params: PyTree,
    *,
    optimizer: optax.GradientTransformation,
    name: str,
    state: Callable[[], tuple[int, PyTree]] | StateSource | None = None,
    config: TreeAveragerConfig = TreeAveragerConfig(),  # noqa: B008 (frozen)
    device: Device | None = None,
    on_round: Callable[[Round], None] = lambda done: None,
) -> AsyncIterator[TreeAverager]:
    """This peer's averaging, as long as the block lasts. Rounds under way are given up at its end.

    Args:
      peer: finds groups and donors, and draws its place on the grid.
      params: of the model, for names, shapes and types. Peers with others, or of another `config.meaning`, are not met.
      optimizer: with one `moshpit_average`, `noloco` or `streaming_diloco` in it, which leaves averaging to the host.
      name: peers that give the same name average with each other; 1 to 64 letters, digits, '_' or '-'. With several
        fragments (`streaming_diloco`) they meet under name-0, name-1 and so on.
      state: (how far this peer is, its state) for newcomers, where more than parameters and optimiser state belongs to
        it, or `step` is not to change them; the peer then calls `catch_up` itself. It is called from the event loop:
        keep version and state in one tuple if they change in a thread. None: what `step` is given is the state, and
        it takes that of others.
      device: copies between arrays and vectors; None: a worker thread of its own. In virtual time, an `InlineDevice`.
      on_round: called after each round, in the event loop.

    Raises:
      ValueError: an argument is out of range, or as of `wire_forms`.
    """
    device = device or ThreadDevice()
    async with AsyncExitStack() as stack:
        replica = await stack.enter_async_context(replica_of(peer, params, name=name, settings=repr(config)))
        if replica is not None and state is not None:
            raise ValueError("state= is for a model on one process; of several, `step` is given the whole state")
        if replica is None:
            what, forms = wire_forms(optimizer, params, config)
        else:  # makes arrays, as the other processes do now
            what, forms = await device.run(wire_forms, optimizer, params, config)
        plans = [
            AveragingPlan.of(
                size=form.layout.size,
                grid=config.grid(),
                schema=f"{what}\n{form.layout.schema}",
                meaning=config.meaning,
                sparse=form.sparse,
                share=config.share,
            )
            for form in forms
        ]
        prefixes = [name] if len(forms) == 1 else [f"{name}-{number}" for number in range(len(forms))]
        loop, settings = None, replace(config.averager(), compute=device.run)
        if state is None:
            together = None
            if replica is not None:
                within = plans[0].within(prefixes[0])
                together = CopyTogether(replica, peer, prefix=within, is_of_use=is_finite_state)
                stack.enter_context(together.serving())
            loop = LoopState(device, together)
            source = loop.source
            # Its versions are rounds, of which each counts.
            settings = replace(settings, state=replace(settings.state, max_lag=0))
        else:
            source = state if isinstance(state, StateSource) else donor_source(state, device)
        fragments = list[Fragment]()
        for number, (form, plan, prefix) in enumerate(zip(forms, plans, prefixes, strict=True)):
            is_first = number == 0
            if form.layout.rounding:
                _log.warning("averages of %r: %s", name, form.layout.rounding)
            if not is_first:  # one line: what the first averager knows of it counts for all
                settings = replace(settings, speeds=fragments[0].averager.known_speeds)
            shared = source if is_first else None
            opened = open_averager(
                peer.rpc, peer.dht, plan, prefix=prefix, rng=peer.rng, state=shared, replica=replica, config=settings
            )
            averager = await stack.enter_async_context(opened)
            fragments.append(Fragment(number=number, averager=averager, form=form))
        async with background_nursery() as nursery:
            yield TreeAverager(
                fragments=fragments,
                what=what,
                loop=loop,
                device=device,
                nursery=nursery,
                on_round=on_round,
                replica=replica,
            )
