"""Opening an averager: what it serves, and what runs beside it as long as its block lasts."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing

from dmoe_net.averaging.averager import Averager
from dmoe_net.averaging.config import AveragerConfig
from dmoe_net.averaging.gathering import AllGather
from dmoe_net.averaging.grouping.group import Role
from dmoe_net.averaging.grouping.group_key import check_prefix
from dmoe_net.averaging.grouping.matchmaker import Matchmaker
from dmoe_net.averaging.plan import AveragingPlan, announce_plan
from dmoe_net.averaging.reduction.all_reduce import AllReduce
from dmoe_net.averaging.replica import Replica
from dmoe_net.averaging.state.sharing import StateSharing, StateSource
from dmoe_net.dht.node import DhtNode
from dmoe_net.nursery import background_nursery
from dmoe_net.rpc.base import Caller

DEFAULTS = AveragerConfig()


@asynccontextmanager
async def open_averager(
    caller: Caller,
    dht: DhtNode,
    plan: AveragingPlan,
    *,
    prefix: str,
    rng: random.Random,
    state: StateSource | None = None,
    replica: Replica | None = None,
    config: AveragerConfig = DEFAULTS,
) -> AsyncIterator[Averager]:
    """An averager that lives as long as the block.

    Args:
      caller: places and serves the calls. dht: where groups and donors are found.
      plan: what is averaged, made by `AveragingPlan.of` or announced by other peers: only peers of one plan meet.
        Whoever has a vector announces it, for auxiliary peers, and for those of another plan, who are told.
      prefix: names what is averaged, 1 to 64 letters, digits, '_' or '-'; one averager for each prefix and caller.
      rng: draws the cell and the ids of groups.
      state: this peer's whole state, for newcomers; None: it is no donor.
      replica: the processes that take part as one; `plan` is of this process's own piece. None: this one alone.

    Raises:
      ValueError: an argument is out of range, or a peer is to be an auxiliary for sparse vectors.
    """
    within, grid, num_cells = plan.within(check_prefix(prefix)), plan.grid, plan.grid.num_cells
    if config.cell is not None and not 0 <= config.cell < num_cells:
        raise ValueError(f"cells go from 0 to {num_cells - 1}, got {config.cell}")
    role = _role_of(caller, config.role)
    if replica is not None and (role is not Role.NODE or plan.sparse is not None):
        raise ValueError(
            "processes of one replica call each other and reduce their pieces: each must listen, and sparse vectors, "
            "which are gathered, are for peers of one process"
        )
    if plan.sparse is not None:
        if role is Role.AUXILIARY:
            raise ValueError(
                "sparse vectors are gathered and not reduced: an auxiliary peer has nothing to do for them"
            )
        plan.sparse.check_memory(grid.side, config.gather)
    async with AsyncExitStack() as stack:
        # Each serves calls from its making on, until it is closed; then the prefix is free again.
        opened = stack.enter_context
        search = Matchmaker(caller, dht, prefix=within, grid=grid, schema=plan.schema, rng=rng, config=config.assembly)
        matchmaker = opened(closing(search))
        all_reduce = opened(closing(AllReduce(caller, prefix=within, config=config.all_reduce)))
        gather = None
        if plan.sparse is not None:
            gather = opened(closing(AllGather(caller, prefix=within, config=config.gather)))
        nursery = await stack.enter_async_context(background_nursery())
        leads = replica is None or replica.leads
        if role is not Role.AUXILIARY and leads:
            nursery.start_soon(announce_plan, dht, prefix, plan)
        if state is not None and leads:
            nursery.start_soon(StateSharing(caller, dht, prefix=within, source=state, config=config.state).run)
        yield Averager(
            caller=caller,
            dht=dht,
            name=prefix,
            plan=plan,
            config=config,
            role=role,
            matchmaker=matchmaker,
            all_reduce=all_reduce,
            gather=gather,
            nursery=nursery,
            rng=rng,
            replica=replica,
            cell=rng.randrange(num_cells) if config.cell is None else config.cell,
        )


def _role_of(caller: Caller, role: Role | None) -> Role:
    """The role that was asked for, or the one that suits the caller.

    Raises:
      ValueError: others would have to call one who listens nowhere.
    """
    if role is None:
        return Role.CLIENT if caller.address is None else Role.NODE
    if caller.address is None and role is not Role.CLIENT:
        raise ValueError(f"a peer that listens nowhere can only be a client, got role {role}")
    return role
