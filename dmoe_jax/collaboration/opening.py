"""Opening a peer's part in a collaboration; see `dmoe_jax.collaboration`."""

import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from dmoe_jax.collaboration.collaboration import Collaboration
from dmoe_jax.collaboration.peer_state import PeerState
from dmoe_jax.collaboration.settings import CollaborationConfig, GlobalStep
from dmoe_jax.device import Device, ThreadDevice
from dmoe_jax.optim.collaborative import Collaborative
from dmoe_jax.types import PyTree
from net.averaging.collaboration.rounds import StepAveraging, plan_of
from net.averaging.grouping.group import Role
from net.averaging.plan import announce_plan
from net.dht.node import DhtNode
from net.nursery import background_nursery
from net.rpc.base import Caller

_log = logging.getLogger(__name__)


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
      params: of the model. Peers with others of these shapes and meaning (`config.meaning`) join all the same: the
        swarm's are taken.
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
    if state.layout.rounding:
        _log.warning("collaboration %r: %s", name, state.layout.rounding)

    schema = f"{together.shared} {config.target_batch_size}\n{state.layout.schema}"
    plan = plan_of(size=state.layout.size, side=config.side, schema=schema, meaning=config.meaning)
    within = plan.within(name)
    async with background_nursery() as nursery:
        rounds = StepAveraging(
            caller,
            dht,
            prefix=within,
            plan=plan,
            role=role,
            speeds=config.speeds,
            measures_line=config.measures_line,
            quiet_s=lambda: peer.quiet_s,
            nursery=nursery,
            rng=rng,
            config=config.rounds(),
            on_lost=lambda peer_id: peer.board.forget(peer_id),
        )
        try:
            peer = Collaboration(
                state,
                rounds,
                caller=caller,
                dht=dht,
                name=within,
                role=role,
                config=config,
                nursery=nursery,
                rng=rng,
                on_step=on_step,
            )
            nursery.start_soon(peer.board.run)
            await peer.board.wait_for_news()
            await peer.catch_up()
            nursery.start_soon(announce_plan, dht, name, caller.peer_id, plan)
            nursery.start_soon(peer.run)
            yield peer
        finally:
            rounds.close()
