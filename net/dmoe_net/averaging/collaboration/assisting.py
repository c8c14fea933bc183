"""An auxiliary peer of a collaboration: no model and no gradients; it reduces for those who have them (DeDLOC).

It learns from the DHT what is averaged and which step is at hand, and from the others when a group begins.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import trio

from dmoe_net.averaging.assisting import plan_to_assist
from dmoe_net.averaging.collaboration.board import ProgressBoard
from dmoe_net.averaging.collaboration.progress import Report, next_chain, progress_key
from dmoe_net.averaging.collaboration.rounds import Averaged, RoundConfig, StepAveraging
from dmoe_net.averaging.grouping.group import Role
from dmoe_net.averaging.plan import AveragingPlan, wait_for_plan
from dmoe_net.dht.node import DhtNode
from dmoe_net.nursery import background_nursery
from dmoe_net.rpc.base import Caller


async def is_collaboration(dht: DhtNode, prefix: str) -> bool:
    """Wait until something is averaged under this name; return True if its peers gather for one large batch.

    Raises:
      NetError: the DHT cannot be asked.
    """
    plan = await wait_for_plan(dht, prefix)
    return bool(await dht.get(progress_key(plan.within(prefix))))


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
        assistant = _Assistant(caller, dht, plan, prefix, config, nursery, rng, on_step)
        try:
            nursery.start_soon(assistant.follow)
            await assistant.board.run()
        finally:
            assistant.averaging.close()


@dataclass(eq=False)
class _Assistant:
    """The step at hand, and the group that is under way."""

    caller: Caller
    dht: DhtNode
    plan: AveragingPlan
    prefix: str
    config: RoundConfig
    nursery: trio.Nursery
    rng: random.Random
    on_step: Callable[[Averaged], None]

    def __post_init__(self) -> None:
        caller, clock = self.caller, self.dht.clock
        self._own = Report(peer_id=caller.peer_id, address=caller.address, role=Role.AUXILIARY, at=clock.now())
        self._begins_at: float | None = None
        self.board = ProgressBoard(
            caller=caller,
            dht=self.dht,
            prefix=self.plan.within(self.prefix),
            own=lambda: replace(self._own, at=clock.now()),
            target=math.inf,  # others tell when a step is near
            silence_s=self.config.silence_s,
            on_begin=self._heard,
        )
        self.averaging = StepAveraging(
            board=self.board, plan=self.plan, config=self.config, nursery=self.nursery, rng=self.rng
        )

    async def follow(self) -> None:
        """Go where whoever is furthest is, after each reading of the DHT."""
        while True:
            await self.board.wait_for_news()
            leader = self.board.view.leader
            if leader is not None and self._begins_at is None:
                self._own = replace(self._own, step=leader.step, chain=leader.chain, trained=leader.trained)
                self.board.refresh()

    def _heard(self, step: int, chain: bytes, at: float | None) -> float | None:
        if at is None or at > self.dht.clock.now() + 60:
            return None
        if self._begins_at is None and step >= self._own.step:
            self._own, self._begins_at = replace(self._own, step=step, chain=chain), at
            self.nursery.start_soon(self._assist)
        elif self._begins_at is not None and (step, chain) == self._own.where and at > self._begins_at:
            self._begins_at = at
            self.averaging.postpone(at)
        return self._begins_at

    async def _assist(self) -> None:
        own, board = self._own, self.board
        assert self._begins_at is not None
        try:
            group = await self.averaging.find_group(step=own.step, chain=own.chain, begins_at=self._begins_at)
            done = None if group is None else await self.averaging.average(group, None)
            if done is not None:
                chain = next_chain(own.chain, done.group_id)
                self._own = replace(own, step=own.step + 1, chain=chain, trained=own.trained + done.weight)
                board.advanced(done.members, own.step + 1, chain)
                self.on_step(done)
        finally:
            self._begins_at = None
            board.refresh()
