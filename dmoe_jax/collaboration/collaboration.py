"""A peer's part in training with one large batch; see `dmoe_jax.collaboration`."""

import math
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import trio

from dmoe_jax.averaging.donor import is_finite_state, table_of
from dmoe_jax.collaboration.forming import StepForming
from dmoe_jax.collaboration.peer_state import PeerState
from dmoe_jax.collaboration.settings import CollaborationConfig, CollaborationTotals, GlobalStep
from dmoe_jax.device import Device, ThreadDevice
from dmoe_jax.optim.collaborative import Collaborative, CollaborativeState
from dmoe_jax.types import PyTree
from net.averaging.collaboration.board import ProgressBoard
from net.averaging.collaboration.progress import Forecast, Pace, Report, facts, next_chain
from net.averaging.collaboration.rounds import Averaged, StepAveraging, plan_of
from net.averaging.grouping.group import Group, Role
from net.averaging.plan import announce_plan
from net.averaging.state.download import download_state
from net.averaging.state.sharing import SharedState, StateSharing, StateSharingConfig, StateSource
from net.dht.node import DhtNode
from net.errors import NetError
from net.nursery import background_nursery
from net.rpc.base import Caller
from net.types import Array

_CATCH_UP_TIMEOUT_S = 600.0


@dataclass(slots=True, eq=False)
class _UnderWay:
    """An averaging beside the next batch."""

    own_samples: float
    stopped_at: float
    averaged: Averaged | None = None
    done: trio.Event = field(default_factory=trio.Event)
    """Set when it is over; `averaged` is None if it came to nothing."""


class Collaboration:
    """This peer among those that make one large batch together. Made by `open_collaboration`."""

    def __init__(
        self,
        state: PeerState,
        rounds: StepAveraging,
        *,
        caller: Caller,
        dht: DhtNode,
        name: str,
        role: Role,
        config: CollaborationConfig,
        nursery: trio.Nursery,
        download: Callable[..., Any],
        on_step: Callable[[GlobalStep], None],
    ) -> None:
        self._state = state
        self._rounds = rounds
        self._caller = caller
        self._dht = dht
        self._role = role
        self._config = config
        self._nursery = nursery
        self._download = download
        self._on_step = on_step
        self._chain = state.digest()
        self._trained = self._gathered = 0.0
        self._micro_batch = 1
        self._averaged_s = 0.0
        self._pace = Pace()
        self._last_step_at = trio.current_time()
        self._gathering_since: float | None = trio.current_time()
        """When this peer began to compute its next micro-batch; None while it waits for others."""
        self._under_way: _UnderWay | None = None
        self._forming = StepForming(rounds, clock=dht.clock, lead_s=config.lead_s, nursery=nursery, where=self._where)
        self.board = self._forming.board = ProgressBoard(
            caller,
            dht,
            prefix=name,
            own=self.report,
            target=config.target_batch_size,
            config=config.board(),
            on_begin=self._forming.heard,
        )
        """Who is how far."""
        self.step = 0
        """Global steps of the swarm that this peer has made or taken over."""
        self.totals = CollaborationTotals()
        """What has become of this peer's work."""

    @property
    def params(self) -> PyTree:
        """The parameters now; they are never donated."""
        return self._state.now.params

    @property
    def scale(self) -> Any:
        """What the loss is to be multiplied by; None without a `LossScale`."""
        return self._state.now.scale

    @property
    def chain(self) -> bytes:
        """Names the steps that led here: peers with the same have the same parameters."""
        return self._chain

    @property
    def samples_trained(self) -> float:
        """Samples in all steps so far, of all peers: the swarm's place in the data."""
        return self._trained

    @property
    def samples_at_hand(self) -> float:
        """Samples that this peer has gathered for the step to come."""
        return self._gathered

    @property
    def view(self) -> Forecast:
        """The whole swarm, as this peer sees it."""
        return self.board.view

    def facts(self) -> Mapping[str, Any]:
        """What `dmoe status` shows of it: the whole swarm as this peer sees it."""
        return {**facts(self.view, self._config.target_batch_size), "averaged_s": self._averaged_s}

    @property
    def is_left_behind(self) -> bool:
        """Whether somebody is further, or in a chain that goes on where this one does not."""
        return self._forming.coming is None and self.view.leader is not None

    @property
    def is_averaging(self) -> bool:
        """Whether it averages with a group now, and waits for that."""
        coming = self._forming.coming
        return coming is not None and self._gathering_since is None and coming.group is not None

    def report(self) -> Report:
        """What this peer says of itself."""
        now = self._dht.clock.now()
        return Report(
            peer_id=self._caller.peer_id,
            address=None if self._role is Role.CLIENT else self._caller.address,
            role=self._role,
            step=self.step,
            chain=self._chain,
            samples=self._gathered + self._in_progress(),
            rate=self._pace.rate,
            at=now,
            trained=self._trained,
        )

    def _in_progress(self) -> float:
        """Samples' worth of work in the micro-batch that is being computed: without it every peer would be taken to
        have half a micro-batch less than it has."""
        if self._gathering_since is None:
            return 0.0
        return min(self._pace.rate * (trio.current_time() - self._gathering_since), float(self._micro_batch))

    async def add(self, grads: PyTree, *, samples: int, took_s: float | None = None) -> bool:
        """Take in the mean gradient of a micro-batch; make the global step if it is due.

        Args:
          grads: of `params`; times `scale` if there is one.
          samples: how many it is a mean of.
          took_s: seconds of computing them; None: since the last call returned.

        Returns: whether the parameters have changed.
        """
        await self.gather(grads, samples=samples)
        return await self.gathered(samples, took_s)

    async def gather(self, grads: PyTree, *, samples: int) -> None:
        """Take in a gradient, of several that are computed side by side; then call `gathered` once for all."""
        self._check_samples(samples)
        await self._state.gather(grads, samples)

    async def on_device(self, function: Callable[[], None]) -> None:
        """Run something where the gradients are."""
        await self._state.device.run(function)

    async def work(self, function: Callable[..., tuple[Any, CollaborativeState]], samples: int, *args: Any) -> Any:
        """Run a `gathering_gradient` on the device, and make the global step if it is due.

        Args:
          function: (state, samples, *args) -> (value, state), compiled by `keeping_params`.
          samples: of this micro-batch.

        Returns: the value.
        """
        self._check_samples(samples)
        began = trio.current_time()
        value = await self._state.change(function, np.float32(samples), *args)
        await self.gathered(samples, trio.current_time() - began)
        return value

    def _check_samples(self, samples: int) -> None:
        if not (samples > 0):
            raise ValueError(f"a micro-batch has a positive number of samples, got {samples}")

    async def gathered(self, samples: int, took_s: float | None = None) -> bool:
        """So many samples were gathered: make the global step if it is due, and take the swarm's state if it is ahead.

        Args:
          took_s: seconds of computing them; None: since the last call returned.

        Returns: whether the parameters have changed.
        """
        if took_s is None:
            assert self._gathering_since is not None
            took_s = trio.current_time() - self._gathering_since
        self._gathering_since = None
        self._pace.measured(samples, took_s)
        self._gathered += samples
        self._micro_batch = samples
        changed = False
        while not self._has_time_for_more():
            changed |= await self._global_step()
        if changed or self._forming.coming is None:
            changed |= await self._keep_up()
        self._gathering_since = trio.current_time()
        return changed

    def _has_time_for_more(self) -> bool:
        """Whether another micro-batch would end before the step begins, or not further after it than before."""
        return self._dht.clock.now() + self._pace.seconds_for(self._micro_batch) / 2 <= self._forming.ends_at

    async def catch_up(self) -> bool:
        """Take the state of somebody that is further, if there is anybody; whether that was done."""
        return await self._keep_up()

    def _where(self) -> tuple[int, bytes] | None:
        """Step and chain of the batch that is gathered; None until it is known what became of the one before."""
        if self._under_way is not None and not self._under_way.done.is_set():
            return None
        return self.step, self._chain

    async def run(self) -> None:
        """Form groups when steps are near, until cancelled."""
        await self._forming.run()

    async def _global_step(self) -> bool:
        """Bring what is gathered, and step with what all brought. Returns whether the parameters have changed."""
        stopped_at, forming = trio.current_time(), self._forming
        while forming.coming is None:
            if self.view.leader is not None and self._where() is not None:
                return await self._keep_up()
            if self._has_time_for_more():
                return False
            await forming.news()
        coming = forming.coming
        await coming.found.wait()
        try:
            if coming.group is None and (self.view.others or self.view.leader is not None):
                self.totals.reasons["no group found"] += 1
                return False
            vector, samples, overflows = await self._state.contribution()
            begun = _UnderWay(samples, stopped_at)
            if self._config.delayed:
                return await self._step_with_the_last(begun, coming.group, vector, overflows)
            await self._average(begun, coming.group, vector, overflows)
            if begun.averaged is None:
                return False
            self._gathered = 0.0
            await self._state.step(begun.averaged.mean, begun.averaged.weight, begun.averaged.notes)
            self.step += 1
            self._settled(begun)
            return True
        finally:
            forming.over(found=coming.group is not None or not self.view.others)

    async def _step_with_the_last(self, begun: _UnderWay, group: Group | None, vector: Array, overflows: float) -> bool:
        """Make the step whose averaging ran beside this batch, and leave the averaging of this batch to run beside the
        next one. Returns whether the parameters have changed."""
        last, self._under_way = self._under_way, begun
        self._gathered = 0.0
        self.step += 1
        if last is None or last.averaged is None:
            await self._state.empty()
        else:
            await self._state.step(last.averaged.mean, last.averaged.weight, last.averaged.notes)

        async def average() -> None:
            await self._average(begun, group, vector, overflows)
            if self._under_way is begun:  # else another peer's state was taken meanwhile
                if begun.averaged is None:
                    self.totals.samples_lost += begun.own_samples
                else:
                    self._settled(begun)
            begun.done.set()
            self._forming.changed()

        self._nursery.start_soon(average)
        return last is not None and last.averaged is not None

    async def _average(self, begun: _UnderWay, group: Group | None, vector: Array, overflows: float) -> None:
        """Average with the group, or alone; the outcome is in `begun`."""
        samples = begun.own_samples
        if group is None:
            own = self._caller.peer_id
            begun.averaged = Averaged(
                mean=vector, weight=samples, notes=overflows, group_id=own.raw, members=(own,), attempts=0
            )
            return
        begun.averaged = await self._rounds.average(group, vector, weight=samples, note=overflows)
        if begun.averaged is None:
            self.totals.reasons["the group did not settle"] += 1

    def _settled(self, begun: _UnderWay) -> None:
        """All members of the group have the average, and know it."""
        averaged, now = begun.averaged, trio.current_time()
        assert averaged is not None
        self._chain = next_chain(self._chain, averaged.group_id)
        self._trained += averaged.weight
        self.totals.steps += 1
        self.totals.alone += not averaged.attempts
        self.totals.samples += begun.own_samples
        self.totals.whole += averaged.weight
        self.board.advanced(averaged.members, self.step, self._chain)
        done = GlobalStep(
            number=self.step,
            peers=len(averaged.members),
            samples=averaged.weight,
            own_samples=begun.own_samples,
            gathered_s=now - self._last_step_at,
            averaged_s=now - begun.stopped_at,
            attempts=averaged.attempts,
        )
        self._last_step_at, self._averaged_s = now, done.averaged_s
        self._on_step(done)

    async def _keep_up(self) -> bool:
        """Take the state of whoever is further, if somebody is; whether that was done."""
        leader = self.view.leader
        if leader is None or self._forming.coming is not None or self._where() is None:
            return False
        table = table_of(self._state.shared)
        try:
            taken = await self._download(
                min_version=leader.step,
                timeout_s=_CATCH_UP_TIMEOUT_S,
                attempts=3,
                expects=lambda version, offered: version >= self.step and offered == table,
                accepts=lambda state: is_finite_state(state) and _is_chain(state.facts),
            )
        except NetError as error:
            self.totals.reasons[f"no state: {type(error).__name__}"] += 1
            taken = None
        if taken is None or (taken.version, taken.facts["trained"]) <= (self.step, self._trained):
            self.board.refresh()
            await self.board.wait_for_news()
            return False
        await self._take(taken)
        return True

    async def _take(self, taken: SharedState) -> None:
        await self._state.take(taken.tensors)
        self.step, self._chain, self._trained = taken.version, taken.facts["chain"], taken.facts["trained"]
        self.totals.samples_lost += self._gathered
        self.totals.states_taken += 1
        self._gathered, self._under_way = 0.0, None
        self._last_step_at = trio.current_time()
        self._forming.changed()

    async def shared_state(self) -> SharedState:
        """What a newcomer takes."""
        step, tree = await self._consistent()
        facts = {"chain": self._chain, "trained": float(self._trained)}
        return SharedState(version=step, tensors=tuple(jax.tree.leaves(tree)), facts=facts)

    @property
    def state(self) -> PyTree:
        """What decides what follows, but for what this peer has gathered itself: what checkpoints and newcomers get."""
        return self._state.shared

    async def snapshot(self) -> tuple[int, PyTree]:
        """The step, and a copy of `state` after it on the host."""
        return await self._consistent()

    def saved_facts(self) -> dict[str, Any]:
        """What JSON can hold of the rest."""
        return {"chain": self._chain.hex(), "samples_trained": self._trained}

    def restore(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        """Go on from `snapshot` and `saved_facts`; not while a gradient is computed.

        A swarm that was stopped as a whole so goes on where the furthest of its peers was.
        """
        self._state.restore(state)
        self.step, self._chain, self._trained = step, bytes.fromhex(facts["chain"]), float(facts["samples_trained"])
        self._gathered, self._under_way = 0.0, None
        self.board.refresh()

    async def _consistent(self) -> tuple[int, PyTree]:
        while True:
            before, under_way = self.step, self._under_way
            if under_way is not None:
                # What is averaged is in the copy: whoever takes it has nothing under way.
                await under_way.done.wait()
            last = None if under_way is None else under_way.averaged
            whole = None if last is None else (last.mean, last.weight, last.notes)
            tree = await self._state.snapshot(whole)
            if (before, under_way) == (self.step, self._under_way):
                return before, tree


def _is_chain(facts: Mapping[str, Any]) -> bool:
    chain, trained = facts.get("chain"), facts.get("trained")
    return isinstance(chain, bytes) and isinstance(trained, float) and math.isfinite(trained)


@asynccontextmanager
async def open_collaboration(
    caller: Caller,
    dht: DhtNode,
    params: PyTree,
    *,
    together: Collaborative,
    name: str,
    config: CollaborationConfig = CollaborationConfig(),  # noqa: B008 (frozen)
    device: Device | None = None,
    rng: random.Random | None = None,
    on_step: Callable[[GlobalStep], None] = lambda done: None,
) -> AsyncIterator[Collaboration]:
    """This peer's part in a collaboration, as long as the block lasts.

    It has taken the swarm's state when the block begins, if there is a swarm that has made a step.

    Args:
      caller: places and serves the calls. dht: where peers report and groups form.
      params: of the model. Peers with others of these shapes join all the same: the swarm's are taken.
      together: the optimiser; see `dmoe_jax.optim.collaborative`.
      name: peers that give the same name train together; 1 to 64 letters, digits, '_' or '-'.
      device: runs what changes the state; None: a worker thread of its own. In virtual time, an `InlineDevice`.
      rng: draws what is drawn; None: the system's.
      on_step: called after each global step, in the event loop.

    Raises:
      ValueError: an argument is out of range, or a parameter is not of floating-point numbers.
    """
    device, rng = device or ThreadDevice(), rng or random.SystemRandom()
    role = Role(config.role) if config.role != "auto" else (Role.CLIENT if caller.address is None else Role.NODE)
    state = PeerState(together, params, device)

    async def download(**wanted: Any) -> SharedState | None:
        return await download_state(caller, dht, prefix=name, rng=rng, config=sharing, **wanted)

    schema = f"{together.shared} {config.target_batch_size}\n{state.layout.schema}"
    plan = plan_of(size=state.layout.size, side=config.side, schema=schema)
    sharing = StateSharingConfig(announce_period_s=10.0, max_lag=0)
    rounds = StepAveraging(
        caller,
        dht,
        prefix=name,
        plan=plan,
        role=role,
        speeds=lambda: config.speeds,
        rng=rng,
        config=config.rounds(),
        on_lost=lambda peer_id: peer.board.forget(peer_id),
    )
    try:
        async with background_nursery() as nursery:
            peer = Collaboration(
                state,
                rounds,
                caller=caller,
                dht=dht,
                name=name,
                role=role,
                config=config,
                nursery=nursery,
                download=download,
                on_step=on_step,
            )
            nursery.start_soon(peer.board.run)
            await peer.board.wait_for_news()
            await peer.catch_up()
            source = StateSource(lambda: peer.step, peer.shared_state)
            nursery.start_soon(StateSharing(caller, dht, prefix=name, source=source, config=sharing).run)
            nursery.start_soon(announce_plan, dht, name, caller.peer_id, plan)
            nursery.start_soon(peer.run)
            yield peer
    finally:
        rounds.close()
