"""A peer's part in training with one large batch; see `dmoe_jax.collaboration`."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import trio

from dmoe_jax.collaboration.following import Following
from dmoe_jax.collaboration.forming import StepForming
from dmoe_jax.collaboration.peer_state import PeerState
from dmoe_jax.collaboration.remarks import Remarks
from dmoe_jax.collaboration.settings import CollaborationConfig, CollaborationTotals, GlobalStep
from dmoe_jax.collaboration.standing import Standing
from dmoe_jax.collaboration.stepping import Stepping
from dmoe_jax.optim.collaborative import CollaborativeState
from dmoe_jax.types import PyTree
from net.averaging.collaboration.board import ProgressBoard
from net.averaging.collaboration.progress import Forecast, Pace, Report, facts
from net.averaging.collaboration.rounds import StepAveraging
from net.averaging.collaboration.step_log import StepLog
from net.averaging.grouping.group import Role
from net.dht.node import DhtNode
from net.rpc.base import Caller

_AWAY = 4.0
"""Multiple of the usual time of a micro-batch after which, and `late_s` more, the others do without this peer."""
_LATE_S = 1.0
"""Seconds after the time foretold for a full batch at which this peer stops waiting for it."""


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
        rng: random.Random,
        on_step: Callable[[GlobalStep], None],
    ) -> None:
        self._state = state
        self._rounds = rounds
        self._caller = caller
        self._dht = dht
        self._role = role
        self._config = config
        self._standing = standing = Standing(chain=state.digest())
        self._remarks = Remarks(config.target_batch_size, standing.totals)
        self._micro_batch = 1
        self._pace = Pace()
        self._since = trio.current_time()
        """Time (trio's) at which this peer began its next micro-batch, or began to wait after its last one."""
        self._waits = False
        self._forming = StepForming(
            rounds, clock=dht.clock, lead_s=config.lead_s, nursery=nursery, where=lambda: self._where
        )
        self.board = self._forming.board = self._make_board(name)
        """Who is how far."""
        log = StepLog(caller, prefix=name)

        def stepped(done: GlobalStep) -> None:
            self._following.in_step()
            self._remarks.stepped(done, num_behind=self.board.num_behind)
            on_step(done)

        self._stepping = Stepping(
            state,
            standing,
            rounds=rounds,
            forming=self._forming,
            board=self.board,
            own=caller.peer_id,
            log=log,
            delayed=config.delayed,
            nursery=nursery,
            on_step=stepped,
        )
        self._following = Following(
            state,
            standing,
            caller=caller,
            dht=dht,
            name=name,
            forming=self._forming,
            board=self.board,
            log=log,
            rng=rng,
        )

    def _make_board(self, name: str) -> ProgressBoard:
        return ProgressBoard(
            self._caller,
            self._dht,
            prefix=name,
            own=lambda: None if self._is_away else self.report(),
            target=self._config.target_batch_size,
            config=self._config.board(),
            on_begin=self._forming.heard,
        )

    @property
    def params(self) -> PyTree:
        """The parameters now; they are never donated."""
        return self._state.now.params

    @property
    def scale(self) -> Any:
        """What the loss is to be multiplied by; None without a `LossScale`."""
        return self._state.now.scale

    @property
    def step(self) -> int:
        """Global steps of the swarm that this peer has made or taken over."""
        return self._standing.step

    @property
    def totals(self) -> CollaborationTotals:
        """What has become of this peer's work."""
        return self._standing.totals

    @property
    def chain(self) -> bytes:
        """Names the steps that led here: peers with the same have the same parameters."""
        return self._standing.chain

    @property
    def samples_trained(self) -> float:
        """Samples in all steps so far, of all peers: the swarm's place in the data."""
        return self._standing.trained

    @property
    def samples_at_hand(self) -> float:
        """Samples that this peer has gathered for the step to come."""
        return self._standing.gathered

    @property
    def view(self) -> Forecast:
        """The whole swarm, as this peer sees it."""
        return self.board.view

    def facts(self) -> Mapping[str, Any]:
        """What `dmoe status` shows of it: the whole swarm as this peer sees it."""
        return {**facts(self.view, self._config.target_batch_size), "averaged_s": self._stepping.averaged_s}

    @property
    def measurements(self) -> Mapping[str, int]:
        """How many measurements of its line this peer has made, by what became of them."""
        return self._rounds.measurements

    @property
    def is_left_behind(self) -> bool:
        """Whether somebody is further, or in a chain that goes on where this one does not."""
        return self._forming.coming is None and self.view.leader is not None

    @property
    def is_averaging(self) -> bool:
        """Whether it averages with a group now, and waits for that."""
        coming = self._forming.coming
        return coming is not None and self._waits and coming.group is not None

    @property
    def quiet_s(self) -> float:
        """Seconds until groups form for the next step, as far as the swarm's progress foretells it; 0 if they do, or if
        somebody is behind and takes the state, which measurements would hold up."""
        if self._forming.coming is not None or self.board.num_behind:
            return 0.0
        return max(0.0, self._forming.ends_at - self._forming.lead_s - self._dht.clock.now())

    def report(self) -> Report:
        """What this peer says of itself."""
        now = self._dht.clock.now()
        return Report(
            peer_id=self._caller.peer_id,
            address=None if self._role is Role.CLIENT else self._caller.address,
            role=self._role,
            step=self.step,
            chain=self.chain,
            samples=self.samples_at_hand + self._in_progress(),
            rate=0.0 if self._is_idle else self._pace.rate,
            at=now,
            trained=self.samples_trained,
        )

    @property
    def _is_away(self) -> bool:
        """True if the loop has long been doing something other than its micro-batch: the others neither wait for this
        peer nor need it for a step."""
        usual_s = self._pace.seconds_for(self._micro_batch)
        late_s = trio.current_time() - self._since - _AWAY * usual_s
        return not self._waits and usual_s > 0 and late_s > self._config.late_s

    @property
    def _where(self) -> tuple[int, bytes] | None:
        return None if self._is_away else self._standing.where

    @property
    def _is_idle(self) -> bool:
        """True if this peer waits for a batch to which it has brought nothing: the others fill it, or nobody does."""
        return self._waits and not self.samples_at_hand

    def _in_progress(self) -> float:
        """Samples' worth of work in the micro-batch that is being computed: without it every peer would be taken to
        have half a micro-batch less than it has. A peer that waits for the end of the batch counts as computing until
        then: otherwise the foretold end would move away while everybody waits for it."""
        if self._is_idle:
            return 0.0
        return min(self._pace.rate * (trio.current_time() - self._since), float(self._micro_batch))

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
        now = trio.current_time()
        self._pace.measured(samples, now - self._since if took_s is None else took_s)
        self._since, self._waits = now, True
        self._standing.gathered += samples
        self._micro_batch = samples
        changed = False
        while not self._has_time_for_more():
            has_stepped = await self._global_step(now)
            if has_stepped is None:
                break
            changed |= has_stepped
        if changed or self._forming.coming is None:
            changed |= await self.catch_up()
        self._remarks.gathered()
        self._since, self._waits = trio.current_time(), False
        return changed

    def _has_time_for_more(self) -> bool:
        """Whether another micro-batch would end before the step begins, or not further after it than before."""
        return self._dht.clock.now() + self._pace.seconds_for(self._micro_batch) / 2 <= self._forming.ends_at

    async def catch_up(self) -> bool:
        """Take the state of somebody that is further, if there is anybody; whether that was done."""
        return await self._following.keep_up()

    async def run(self) -> None:
        """Form groups when steps are near, and give the state to newcomers, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._forming.run)
            nursery.start_soon(self._following.serve)

    async def _global_step(self, stopped_at: float) -> bool | None:
        """Make the step that is due, or take the state of those who have made it.

        Returns: True if the parameters have changed; None if no step began at the foretold time. This peer then goes
          on, rather than wait for a batch that others may not fill.
        """
        forming, now = self._forming, self._dht.clock.now
        latest = max(forming.ends_at, now()) + _LATE_S
        while forming.coming is None:
            if (is_known := self._standing.where is not None) and self.view.leader is not None:
                return await self.catch_up()
            if self._has_time_for_more():
                return False
            if is_known and now() > latest:
                return None
            await forming.news()
        return await self._stepping.step(stopped_at)

    @property
    def state(self) -> PyTree:
        """What decides what follows, but for what this peer has gathered itself: what checkpoints and newcomers get."""
        return self._state.shared

    async def snapshot(self) -> tuple[int, PyTree]:
        """The step, and a copy of `state` after it on the host."""
        return await self._following.snapshot()

    def saved_facts(self) -> dict[str, Any]:
        """What JSON can hold of the rest."""
        return self._standing.saved()

    def restore(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        """Go on from `snapshot` and `saved_facts`; not while a gradient is computed.

        A swarm that was stopped as a whole so goes on where the furthest of its peers was.
        """
        self._state.restore(state)
        self._standing.restore(step, facts)
        self.board.refresh()
