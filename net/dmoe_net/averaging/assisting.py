"""An auxiliary peer: it has no vector and no model, and reduces for those who do (DeDLOC's CPU averagers).

It learns from the DHT what they average (`dmoe_net.averaging.plan`), and looks again when it has met nobody for a
while: a swarm may have begun again with another model.
"""

import random
from collections.abc import Callable
from dataclasses import replace

import trio

from dmoe_net.averaging.averager import AveragingStep
from dmoe_net.averaging.config import AveragerConfig
from dmoe_net.averaging.grouping.group import Role
from dmoe_net.averaging.opening import DEFAULTS, open_averager
from dmoe_net.averaging.plan import AveragingPlan, find_plan, wait_for_plan
from dmoe_net.dht.node import DhtNode
from dmoe_net.errors import NetError
from dmoe_net.rpc.base import Caller

_PAUSE_S = 1.0
"""After a failure of the network."""


async def plan_to_assist(
    caller: Caller, dht: DhtNode, prefix: str, on_plan: Callable[[AveragingPlan], None]
) -> AveragingPlan:
    """Wait until peers of this name average, and return and tell what.

    Raises:
      ValueError: the caller listens nowhere, or the prefix is malformed.
    """
    if caller.address is None:
        raise ValueError("an auxiliary peer must listen somewhere: others bring it what it is to reduce")
    plan = await wait_for_plan(dht, prefix)
    on_plan(plan)
    return plan


async def assist(
    caller: Caller,
    dht: DhtNode,
    *,
    prefix: str,
    rng: random.Random,
    config: AveragerConfig = DEFAULTS,
    on_plan: Callable[[AveragingPlan], None] = lambda plan: None,
    on_round: Callable[[AveragingStep], None] = lambda done: None,
) -> None:
    """Reduce for the peers of one name, round after round, until cancelled.

    Args:
      caller, dht, prefix, rng: as of `open_averager`; the caller must listen.
      config: timeouts as the others have them; the role is not looked at.
      on_plan: told what is averaged, once that is known and whenever it has changed.
      on_round: told of each round in which this peer reduced something.

    Raises:
      ValueError: the caller listens nowhere, or the prefix is malformed.
    """
    config = replace(config, role=Role.AUXILIARY)
    while True:
        plan = await plan_to_assist(caller, dht, prefix, on_plan)
        async with open_averager(caller, dht, plan, prefix=prefix, rng=rng, config=config) as averager:
            newest: AveragingPlan | None = plan
            while newest in (None, plan):
                try:
                    done = await averager.step(None)
                    if done.received:
                        on_round(done)
                    else:
                        newest = await find_plan(dht, prefix)
                except NetError:
                    await trio.sleep(_PAUSE_S)
