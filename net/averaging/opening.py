"""Opening an averager: what it serves, and what runs beside it as long as its block lasts."""

import functools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from typing import Any

import trio

from net.averaging.averager import Averager, AveragerConfig
from net.averaging.drawing import drawn_size
from net.averaging.gathering.sparse_mean import Compute, SparseGather, SparseLayout, inline
from net.averaging.grouping.group import Role
from net.averaging.grouping.group_key import MoshpitGrid, check_prefix
from net.averaging.grouping.matchmaker import Matchmaker
from net.averaging.line.monitor import LineMonitor
from net.averaging.plan import AveragingPlan, announce_plan, why_apart
from net.averaging.reduction.all_reduce import AllReduce
from net.averaging.speeds import UNKNOWN, Speeds
from net.averaging.state.download import download_state
from net.averaging.state.sharing import SharedState, StateSharing, StateSource
from net.dht.node import DhtNode
from net.nursery import background_nursery
from net.rpc.base import Caller
from net.wire.compression import Compression

DEFAULTS = AveragerConfig()


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


def _check_sparse(sparse: SparseLayout, role: Role, grid: MoshpitGrid, config: AveragerConfig) -> None:
    """Refuse what cannot be done with sparse vectors. Raises `ValueError`."""
    if role is Role.AUXILIARY:
        raise ValueError("sparse vectors are gathered and not reduced: an auxiliary peer has nothing to do for them")
    sparse.check_memory(grid.side, config.gather)


async def _download(monitor: LineMonitor | None, *args: Any, **settings: Any) -> SharedState | None:
    """A whole state, by `download_state`; what it tells of this peer's line is noted."""
    began = trio.current_time()
    state = await download_state(*args, **settings)
    if monitor is not None and state is not None:
        nbytes = sum(tensor.nbytes for tensor in state.tensors)
        monitor.carried(down_bytes=nbytes, seconds=trio.current_time() - began)
    return state


@asynccontextmanager
async def open_averager(
    caller: Caller,
    dht: DhtNode,
    *,
    prefix: str,
    size: int,
    grid: MoshpitGrid,
    rng: random.Random,
    schema: str = "",
    meaning: str = "",
    cell: int | None = None,
    role: Role | None = None,
    speeds: Speeds | Callable[[], Speeds] = UNKNOWN,
    measures_line: bool = False,
    state: StateSource | None = None,
    sparse: SparseLayout | None = None,
    share: float = 1.0,
    compute: Compute = inline,
    config: AveragerConfig = DEFAULTS,
) -> AsyncIterator[Averager]:
    """An averager that lives as long as the block.

    Args:
      caller: places and serves the calls. dht: where groups and donors are found.
      prefix: what is averaged, 1 to 64 letters, digits, '_' or '-'; one averager for each prefix and caller.
      size: numbers in the vector.
      grid: the same for all peers.
      rng: draws the cell and the ids of groups.
      schema: names and shapes of the parameters: peers of another schema are not met, nor is their state taken.
      meaning: what the numbers mean beyond that, in the same way; it is told to peers of another (`net.meaning`).
      cell: where on the grid to begin, 0 to `grid.num_cells` - 1; None: anywhere.
      role: None: a client if the caller cannot be called, else a node.
      speeds: of this machine, for the share that it reduces; or a function that says what is known of them now.
      measures_line: whether to find out what `speeds` does not say of the line; see `net.averaging.line.monitor`.
      state: this peer's whole state, for newcomers; None: it is no donor.
      sparse: what vectors look like, if they are sparse; the same at all peers, or they do not meet.
      share: of the numbers, drawn anew for each group, that are averaged; the rest stays (SPARTA). The same at all
        peers.
      compute: runs what takes long with vectors of which few numbers travel, off the event loop; by default, in it.

    Raises:
      ValueError: an argument is out of range, a peer is to be an auxiliary for sparse vectors, or of these a share.
    """
    count = drawn_size(size, share)
    drawn_from = None
    if count < size:
        if sparse is not None:
            raise ValueError(f"of sparse vectors all that is left is averaged, got a share of {share}")
        schema, size, drawn_from = f"{count} drawn from {size}\n{schema}", count, size
    if sparse is not None:
        if sparse.size != size:
            raise ValueError(f"the sparse layout has {sparse.size} values, and size is {size}")
        schema = f"{sparse.schema}\n{schema}"
    plan = AveragingPlan.of(size=size, grid=grid, schema=schema, is_reduced=sparse is None, meaning=meaning)
    async with open_planned_averager(
        caller,
        dht,
        plan,
        prefix=prefix,
        rng=rng,
        cell=cell,
        role=role,
        speeds=speeds,
        measures_line=measures_line,
        state=state,
        sparse=sparse,
        drawn_from=drawn_from,
        compute=compute,
        config=config,
    ) as averager:
        yield averager


@asynccontextmanager
async def open_planned_averager(
    caller: Caller,
    dht: DhtNode,
    plan: AveragingPlan,
    *,
    prefix: str,
    rng: random.Random,
    cell: int | None = None,
    role: Role | None = None,
    speeds: Speeds | Callable[[], Speeds] = UNKNOWN,
    measures_line: bool = False,
    state: StateSource | None = None,
    sparse: SparseLayout | None = None,
    drawn_from: int | None = None,
    compute: Compute = inline,
    config: AveragerConfig = DEFAULTS,
) -> AsyncIterator[Averager]:
    """Do as `open_averager` does, with a plan that was made already, or that other peers have announced.

    Args:
      plan: size, grid and schema in one. Whoever has a vector announces it, for auxiliary peers.
      drawn_from: numbers of a vector, if only the size of the plan is averaged of it.
    """
    name, prefix = check_prefix(prefix), plan.within(prefix)
    size, grid, agreed = plan.size, plan.grid, plan.schema
    if cell is not None and not 0 <= cell < grid.num_cells:
        raise ValueError(f"cells go from 0 to {grid.num_cells - 1}, got {cell}")
    role = _role_of(caller, role)
    if sparse is not None:
        _check_sparse(sparse, role, grid, config)
    async with AsyncExitStack() as stack:
        # Each serves calls from its making on, until it is closed; then the prefix is free again.
        opened = stack.enter_context
        matchmaker = opened(
            closing(Matchmaker(caller, dht, prefix=prefix, grid=grid, schema=agreed, rng=rng, config=config.assembly))
        )
        all_reduce = opened(closing(AllReduce(caller, prefix=prefix, config=config.all_reduce)))
        gather = monitor = None
        if sparse is not None:
            gather = SparseGather(caller, prefix=prefix, layout=sparse, config=config.gather, compute=compute)
            opened(closing(gather))
        if measures_line:
            known = speeds if isinstance(speeds, Speeds) else speeds()
            monitor = opened(closing(LineMonitor(caller, prefix=prefix, known=known, vector_bytes=4 * size)))
        nursery = await stack.enter_async_context(background_nursery())
        if role is not Role.AUXILIARY:
            nursery.start_soon(announce_plan, dht, name, caller.peer_id, plan)
        if state is not None:
            nursery.start_soon(StateSharing(caller, dht, prefix=prefix, source=state, config=config.state).run)
        download = functools.partial(_download, monitor, caller, dht, prefix=prefix, rng=rng, config=config.state)
        yield Averager(
            caller=caller,
            dht=dht,
            size=size,
            drawn_from=drawn_from,
            grid=grid,
            cell=rng.randrange(grid.num_cells) if cell is None else cell,
            role=role,
            speeds=speeds,
            monitor=monitor,
            is_compressed=sparse is not None or config.all_reduce.compression is not Compression.NONE,
            matchmaker=matchmaker,
            all_reduce=all_reduce,
            gather=gather,
            compute=compute,
            download_state=download,
            why_apart=functools.partial(why_apart, dht, name, plan),
            nursery=nursery,
            step_timeout_s=config.step_timeout_s,
        )
