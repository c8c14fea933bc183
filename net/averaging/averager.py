"""One peer's part in Moshpit averaging: find this round's group, average within it, move on.

    async with open_averager(peer, dht, prefix="trunk", size=sent.size, grid=MoshpitGrid(side=8), rng=rng) as averager:
        done = await averager.step(sent)
        vector += done.average - sent        # what happened to it meanwhile is kept

Theory of operation. A step ends by its deadline, whatever others do. Until then a peer looks for a group under the key
of its place on the grid (`group_key`), averages within it (`all_reduce`), and if that gave it nothing at all, looks
again. Then it moves on: its round counts up whether or not it met anybody, so that peers that began together stay
together.

Sparse vectors (`net.wire.sparse`) are gathered and not reduced: with a `SparseLayout` the group exchanges payloads
(`gathering`), and each member computes the mean. Nobody reduces for others then, so there are no auxiliary peers.
"""

import functools
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import trio

from net.averaging.gathering.payloads import GatherConfig
from net.averaging.gathering.sparse_mean import Compute, SparseGather, SparseLayout, inline
from net.averaging.grouping.group import Group, Member, Role
from net.averaging.grouping.group_key import MoshpitGrid, check_prefix
from net.averaging.grouping.matchmaker import Matchmaker
from net.averaging.grouping.matchmaking import AssemblyConfig
from net.averaging.line.monitor import LineMonitor
from net.averaging.plan import AveragingPlan, announce_plan
from net.averaging.reduction.all_reduce import AllReduce
from net.averaging.reduction.partition import AllReduceConfig, traffic_of
from net.averaging.reduction.reducer import is_finite
from net.averaging.speeds import UNKNOWN, Speeds
from net.averaging.state.download import download_state
from net.averaging.state.sharing import SharedState, StateSharing, StateSharingConfig, StateSource
from net.dht.node import DhtNode
from net.identity import PeerId
from net.nursery import background_nursery
from net.rpc.base import Caller
from net.types import Array
from net.wire.compression import Compression
from net.wire.sparse import SparseVector, to_dense

LOST_IN_ALL_REDUCE = "lost in the all-reduce"


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragerConfig:
    """Settings of an averager and its parts."""

    step_timeout_s: float = 60.0
    """Longest that a step takes."""
    assembly: AssemblyConfig = field(default_factory=AssemblyConfig)
    """How groups are found."""
    all_reduce: AllReduceConfig = field(default_factory=AllReduceConfig)
    """How a group averages."""
    gather: GatherConfig = field(default_factory=GatherConfig)
    """How a group exchanges sparse vectors."""
    state: StateSharingConfig = field(default_factory=StateSharingConfig)
    """How whole states are shared."""

    def __post_init__(self) -> None:
        if not 0 < self.step_timeout_s < math.inf:
            raise ValueError(f"step_timeout_s must be a positive number of seconds, got {self.step_timeout_s}")

    @classmethod
    def of(cls, *, window_s: float, timeout_s: float, compression: Compression) -> "AveragerConfig":
        """Settings from the few that a user gives; all peers that average together should have the same.

        Args:
          window_s: how long a group waits for more members.
          timeout_s: longest that a round takes.
          compression: how numbers travel.

        Raises:
          ValueError: a setting is out of range.
        """
        return cls(
            step_timeout_s=timeout_s,
            assembly=AssemblyConfig(window_s=window_s, request_timeout_s=min(3.0, window_s / 2)),
            all_reduce=AllReduceConfig(sender_timeout_s=timeout_s / 3, timeout_s=timeout_s, compression=compression),
            gather=GatherConfig(sender_timeout_s=timeout_s / 4, timeout_s=timeout_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AveragingStep:
    """The outcome of a step."""

    average: Array
    """float32 [size]: the group's mean where its reducers answered, elsewhere the vector as it was."""
    received: float
    """Share of the vector that holds a mean, 0 to 1; 0 when nobody was met."""
    peers: tuple[PeerId, ...]
    """The group, this peer included; only this peer when nobody was met."""
    round_number: int
    """The round that this was, from 0."""
    weight: float
    """What the average stands for: the mean weight of the vectors in it, as far as this peer knows; its own when nobody
    was met. Given to the next step of the same vector, several rounds come to the weighted mean of all: with the first
    weights in every round, those who met a heavy one would count for too much."""
    moved_bytes: float = 0.0
    """What this peer sent in the all-reduce, and received as many, in bytes of float32: less if compressed. Of sparse
    vectors: the bytes of payloads that it sent, just as they are."""
    lost: Mapping[PeerId, str] = field(default_factory=dict)
    """Members that the average, or this peer's own part of it, goes without, and why."""


class _Exchanged(NamedTuple):
    """What came of one group's exchange."""

    average: Array
    received: float
    lost: Mapping[PeerId, str]
    lost_senders: Collection[PeerId]
    moved_bytes: float
    is_complete: bool


@dataclass(kw_only=True, eq=False)
class Averager:
    """Averages one vector, a round at a time. Made by `open_averager`."""

    caller: Caller
    dht: DhtNode
    size: int
    grid: MoshpitGrid
    role: Role
    speeds: Speeds | Callable[[], Speeds]
    """What is known of this machine from the beginning, or a function that says what is known now."""
    monitor: LineMonitor | None
    """Finds out what is not."""
    is_compressed: bool
    """Whether numbers travel in fewer bytes than float32 has."""
    matchmaker: Matchmaker
    all_reduce: AllReduce
    gather: SparseGather | None
    """Takes the place of the all-reduce where vectors are sparse."""
    compute: Compute
    """Where vectors are packed and read."""
    nursery: trio.Nursery
    step_timeout_s: float
    download_state: Callable[..., Awaitable[SharedState | None]]
    """`state.download.download_state` with its arguments up to `config` given."""
    cell: int
    """Where this peer is on the grid."""
    round_number: int = 0
    """Rounds so far. May be set to another peer's when joining late."""

    def __post_init__(self) -> None:
        self._is_stepping = False

    def known_speeds(self) -> Speeds:
        """What is known of this machine now."""
        if self.monitor is not None:
            return self.monitor.speeds()
        return self.speeds if isinstance(self.speeds, Speeds) else self.speeds()

    async def step(self, vector: Array | SparseVector | None, *, weight: float = 1.0) -> AveragingStep:
        """Average with this round's group.

        If cancelled, the group goes on without this peer's part, and the round does not count.

        Args:
          vector: float32 [size], finite, not to be written to meanwhile; None for an auxiliary peer. Where the averager
            was opened with `sparse`, a sparse vector of that layout.
          weight: of the vector, such as the samples behind it; see `group.WEIGHTS` for what it may be.

        Raises:
          ValueError: the vector is not what was announced or not finite, or the weight is out of range.
          RuntimeError: another step is under way.
        """
        if self._is_stepping:
            raise RuntimeError("an averager takes one step at a time")
        if self.gather is None:
            self._check(vector)
        else:
            self.gather.layout.check(vector)
        member = Member(
            peer_id=self.caller.peer_id,
            address=None if self.role is Role.CLIENT else self.caller.address,
            role=self.role,
            wanted_slot=self.grid.slot(self.cell, self.round_number),
            weight=weight,
            speeds=self.known_speeds(),
        )
        self._is_stepping = True
        try:
            deadline = self.dht.clock.now() + self.step_timeout_s
            offer = await self.gather.packed(vector) if isinstance(vector, SparseVector) and self.gather else vector
            done = await self._find_and_average(member, offer, deadline)
            if done is None:
                done = await self._alone(member, vector)
        finally:
            self._is_stepping = False
        self.round_number += 1
        return done

    def _check(self, vector: Array | SparseVector | None) -> None:
        if isinstance(vector, SparseVector):
            raise ValueError(
                "this averager reduces vectors that are not sparse: open it with the layout of sparse ones"
            )
        if (vector is None) != (self.role is Role.AUXILIARY):
            raise ValueError(f"an auxiliary peer has no vector, all others have one; this peer's role is {self.role}")
        if vector is None:
            return
        if vector.dtype != np.float32 or vector.shape != (self.size,) or not vector.flags.c_contiguous:
            shape = list(vector.shape)
            raise ValueError(f"expected contiguous float32 [{self.size}], got {vector.dtype} {shape}")
        if not is_finite(vector):  # before others wait for it
            raise ValueError("some of the vector's values are not finite: others would refuse them")

    async def _find_and_average(self, me: Member, offer: Any, deadline: float) -> AveragingStep | None:
        """None if nobody was met by the deadline.

        Args:
          offer: this peer's vector, or its payload where it is gathered.
        """
        while self.dht.clock.now() < deadline:
            group = await self.matchmaker.find_group(
                me, cell=self.cell, round_number=self.round_number, deadline=deadline
            )
            if group is None:
                break
            # The declaration by which the group was found is taken back meanwhile.
            self.nursery.start_soon(self.matchmaker.withdraw)
            if (self.gather or self.all_reduce).knows(group.group_id):
                continue  # its leader makes one group of two
            began = trio.current_time()
            done = await self._exchange(group, offer, timeout_s=deadline - self.dht.clock.now())
            self._learn(group, done.moved_bytes if done.is_complete else 0.0, trio.current_time() - began)
            there = [each for each in group.members if each.peer_id not in done.lost and each.peer_id != me.peer_id]
            if done.received == 0 or not there:
                continue  # nobody else did its part, as far as this peer can tell
            self.cell = self.grid.move(self.cell, self.round_number, group.slots[group.index(me.peer_id)])
            weights = [each.weight for each in group.members if each.sends and each.peer_id not in done.lost_senders]
            return AveragingStep(
                average=done.average,
                received=done.received,
                peers=tuple(each.peer_id for each in group.members),
                round_number=self.round_number,
                weight=math.fsum(weights) / len(weights) if weights else me.weight,
                moved_bytes=done.moved_bytes,
                lost=done.lost,
            )
        return None

    async def _exchange(self, group: Group, offer: Any, *, timeout_s: float) -> _Exchanged:
        """Reduce with the group, or gather."""
        if self.gather is not None:
            mean = await self.gather.run(group, offer, timeout_s=timeout_s)
            received = 1.0 if mean.num_others else 0.0
            return _Exchanged(
                mean.average, received, mean.lost, mean.lost.keys(), float(mean.sent_bytes), not mean.lost
            )
        result = await self.all_reduce.run(group, offer, size=self.size, timeout_s=timeout_s)
        moved_bytes = traffic_of(group, group.index(self.caller.peer_id), self.size)
        lost = dict.fromkeys((*result.lost_reducers, *result.lost_senders), LOST_IN_ALL_REDUCE)
        return _Exchanged(result.average, result.received, lost, result.lost_senders, moved_bytes, result.complete)

    async def _alone(self, me: Member, vector: Array | SparseVector | None) -> AveragingStep:
        """The outcome of a step in which nobody was met."""
        average: Array = np.zeros(self.size, np.float32)
        if isinstance(vector, SparseVector):
            average = await self.compute(to_dense, vector)
        elif vector is not None:
            average = vector
        return AveragingStep(
            average=average,
            received=0.0,
            peers=(me.peer_id,),
            round_number=self.round_number,
            weight=me.weight,
        )

    def _learn(self, group: Group, moved_bytes: float, seconds: float) -> None:
        """What an all-reduce tells of this peer's line, and whether to ask the group for more."""
        if self.monitor is None:
            return
        if not self.is_compressed:
            self.monitor.carried(up_bytes=moved_bytes, down_bytes=moved_bytes, seconds=seconds)
        self.monitor.measure_if_due(group, self.nursery)


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
    cell: int | None = None,
    role: Role | None = None,
    speeds: Speeds | Callable[[], Speeds] = UNKNOWN,
    measures_line: bool = False,
    state: StateSource | None = None,
    sparse: SparseLayout | None = None,
    compute: Compute = inline,
    config: AveragerConfig = AveragerConfig(),
) -> AsyncIterator[Averager]:
    """An averager that lives as long as the block.

    Args:
      caller: places and serves the calls. dht: where groups and donors are found.
      prefix: what is averaged, 1 to 64 letters, digits, '_' or '-'; one averager for each prefix and caller.
      size: numbers in the vector.
      grid: the same for all peers.
      rng: draws the cell and the ids of groups.
      schema: what the numbers mean (names and shapes of the parameters): peers of another schema are refused.
      cell: where on the grid to begin, 0 to `grid.num_cells` - 1; None: anywhere.
      role: None: a client if the caller cannot be called, else a node.
      speeds: of this machine, for the share that it reduces; or a function that says what is known of them now.
      measures_line: whether to find out what `speeds` does not say of the line; see `net.averaging.line.monitor`.
      state: this peer's whole state, for newcomers; None: it is no donor.
      sparse: what vectors look like, if they are sparse; the same at all peers, or they do not meet.
      compute: runs what takes long with sparse vectors, off the event loop; by default, in it.

    Raises:
      ValueError: an argument is out of range, or a peer is to be an auxiliary for sparse vectors.
    """
    if sparse is not None:
        if sparse.size != size:
            raise ValueError(f"the sparse layout has {sparse.size} values, and size is {size}")
        schema = f"{sparse.schema}\n{schema}"
    plan = AveragingPlan.of(size=size, grid=grid, schema=schema)
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
    compute: Compute = inline,
    config: AveragerConfig = AveragerConfig(),
) -> AsyncIterator[Averager]:
    """Do as `open_averager` does, with a plan that was made already, or that other peers have announced.

    Args:
      plan: size, grid and schema in one. Whoever has a vector announces it, for auxiliary peers.
    """
    check_prefix(prefix)
    size, grid, agreed = plan.size, plan.grid, plan.schema
    if cell is not None and not 0 <= cell < grid.num_cells:
        raise ValueError(f"cells go from 0 to {grid.num_cells - 1}, got {cell}")
    role = _role_of(caller, role)
    if sparse is not None:
        if role is Role.AUXILIARY:
            raise ValueError(
                "sparse vectors are gathered and not reduced: an auxiliary peer has nothing to do for them"
            )
        sparse.check_memory(grid.side, config.gather)
    async with AsyncExitStack() as stack:
        # Each serves calls from its making on, until it is closed; then the prefix is free again.
        matchmaker = Matchmaker(caller, dht, prefix=prefix, grid=grid, schema=agreed, rng=rng, config=config.assembly)
        stack.callback(matchmaker.close)
        all_reduce = AllReduce(caller, prefix=prefix, config=config.all_reduce)
        stack.callback(all_reduce.close)
        gather = None
        if sparse is not None:
            gather = SparseGather(caller, prefix=prefix, layout=sparse, config=config.gather, compute=compute)
            stack.callback(gather.close)
        monitor = None
        if measures_line:
            # Chance of its own, but not of another kind than all of this peer's: simulations repeat.
            known = speeds if isinstance(speeds, Speeds) else speeds()
            monitor = LineMonitor(caller, prefix=prefix, known=known, rng=random.Random(caller.peer_id.raw))
            stack.callback(monitor.close)
        nursery = await stack.enter_async_context(background_nursery())
        if role is not Role.AUXILIARY and sparse is None:  # plans are for auxiliary peers
            nursery.start_soon(announce_plan, dht, prefix, caller.peer_id, plan)
        if state is not None:
            nursery.start_soon(StateSharing(caller, dht, prefix=prefix, source=state, config=config.state).run)
        yield Averager(
            caller=caller,
            dht=dht,
            size=size,
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
            download_state=functools.partial(
                _download, monitor, caller, dht, prefix=prefix, rng=rng, config=config.state
            ),
            nursery=nursery,
            step_timeout_s=config.step_timeout_s,
        )
