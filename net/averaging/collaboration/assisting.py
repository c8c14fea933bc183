"""An auxiliary peer of a collaboration: no model and no gradients; it reduces for those who have them (DeDLOC).

It learns from the DHT what is averaged and which step is at hand, and from the others when a group begins.
"""

import math
import random
from collections.abc import Callable
from dataclasses import replace

import trio

from net.averaging.assisting import plan_to_assist
from net.averaging.collaboration.board import ProgressBoard
from net.averaging.collaboration.progress import NO_CHAIN, Report, next_chain, progress_key
from net.averaging.collaboration.rounds import Averaged, RoundConfig, StepAveraging
from net.averaging.grouping.group import Role
from net.averaging.plan import AveragingPlan, wait_for_plan
from net.dht.node import DhtNode
from net.nursery import background_nursery
from net.rpc.base import Caller


async def is_collaboration(dht: DhtNode, prefix: str) -> bool:
    """Wait until something is averaged under this name; whether its peers gather for one large batch.

    Raises:
      NetError: the DHT cannot be asked.
    """
    plan = await wait_for_plan(dht, prefix)
    return await dht.get(progress_key(plan.within(prefix))) is not None


async def assist_collaboration(
    caller: Caller,
    dht: DhtNode,
    *,
    prefix: str,
    rng: random.Random,
    config: RoundConfig = RoundConfig(),  # noqa: B008 (frozen)
    on_plan: Callable[[AveragingPlan], None] = lambda plan: None,
    on_step: Callable[[Averaged], None] = lambda done: None,
) -> None:
    """Reduce for a collaboration, step after step, until cancelled.

    Args:
      caller: places and serves the calls; it must listen. dht: where the others report.
      prefix: names the collaboration.
      rng: draws what is drawn.
      config: timeouts as the others have them; the role is not looked at.
      on_plan: told what is averaged, once that is known.
      on_step: told of each step in which this peer took part.

    Raises:
      ValueError: the caller listens nowhere.
    """
    plan = await plan_to_assist(caller, dht, prefix, on_plan)
    config = replace(config, role=Role.AUXILIARY)
    async with background_nursery() as nursery:
        assistant = _Assistant(
            caller, dht, plan, prefix=prefix, config=config, nursery=nursery, rng=rng, on_step=on_step
        )
        try:
            await assistant.run()
        finally:
            assistant.averaging.close()


class _Assistant:
    """The step at hand, and the group that is under way."""

    def __init__(
        self,
        caller: Caller,
        dht: DhtNode,
        plan: AveragingPlan,
        *,
        prefix: str,
        config: RoundConfig,
        nursery: trio.Nursery,
        rng: random.Random,
        on_step: Callable[[Averaged], None],
    ) -> None:
        self._caller = caller
        self._dht = dht
        self._nursery = nursery
        self._on_step = on_step
        self._step, self._chain, self._trained = 0, NO_CHAIN, 0.0
        self._begins_at: float | None = None
        within = plan.within(prefix)
        self._board = ProgressBoard(
            caller,
            dht,
            prefix=within,
            own=self._report,
            target=math.inf,  # others tell when a step is near
            silence_s=config.silence_s,
            on_begin=self._heard,
        )
        self.averaging = StepAveraging(
            caller, dht, prefix=within, plan=plan, config=config, nursery=nursery, rng=rng, on_lost=self._board.forget
        )

    async def run(self) -> None:
        """Report, follow and assist until cancelled."""
        self._nursery.start_soon(self._follow)
        await self._board.run()

    def _report(self) -> Report:
        return Report(
            peer_id=self._caller.peer_id,
            address=self._caller.address,
            role=Role.AUXILIARY,
            step=self._step,
            chain=self._chain,
            samples=0.0,
            rate=0.0,
            at=self._dht.clock.now(),
            trained=self._trained,
        )

    async def _follow(self) -> None:
        """Go where whoever is furthest is, after each reading of the DHT."""
        while True:
            await self._board.wait_for_news()
            leader = self._board.view.leader
            if leader is not None and self._begins_at is None:
                self._step, self._chain, self._trained = leader.step, leader.chain, leader.trained
                self._board.refresh()

    def _heard(self, step: int, chain: bytes, at: float | None) -> float | None:
        if at is None or at > self._dht.clock.now() + 60:
            return None
        if self._begins_at is None and step >= self._step:
            self._step, self._chain, self._begins_at = step, chain, at
            self._nursery.start_soon(self._assist)
            return self._begins_at
        is_ours = (step, chain) == (self._step, self._chain)
        if is_ours and self._begins_at is not None and at > self._begins_at:
            self._begins_at = at
            self.averaging.postpone(at)
        return self._begins_at

    async def _assist(self) -> None:
        assert self._begins_at is not None
        try:
            group = await self.averaging.find_group(
                step=self._step,
                chain=self._chain,
                begins_at=self._begins_at,
                others=self._board.contacts,
                fewest=lambda: self._board.view.quorum,
            )
            done = None if group is None else await self.averaging.average(group, None)
            if done is not None:
                self._step, self._chain = self._step + 1, next_chain(self._chain, done.group_id)
                self._trained += done.weight
                self._board.advanced(done.members, self._step, self._chain)
                self._on_step(done)
        finally:
            self._begins_at = None
            self._board.refresh()
