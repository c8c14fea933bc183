"""One peer's part in Moshpit averaging: find this round's group, average within it, move on.

    async with open_averager(peer, dht, prefix="trunk", size=sent.size, grid=MoshpitGrid(side=8), rng=rng) as averager:
        done = await averager.step(sent)
        vector += done.average - sent        # what happened to it meanwhile is kept

Theory of operation. A step ends by its deadline, whatever others do. Until then a peer looks for a group under the key
of its place on the grid (`group_key`), averages within it (`all_reduce`), and if that gave it nothing at all, looks
again. Then it moves on: its round counts up whether or not it met anybody, so that peers that began together stay
together.
"""

import hashlib
import math
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import trio

from net.averaging.grouping.group import Group, Member, Role
from net.averaging.grouping.group_key import MoshpitGrid, check_prefix
from net.averaging.grouping.join_messages import WEIGHTS
from net.averaging.grouping.matchmaker import Matchmaker
from net.averaging.grouping.matchmaking import AssemblyConfig
from net.averaging.reduction.all_reduce import AllReduce, AllReduceConfig, AllReduceResult
from net.averaging.reduction.reducer import is_finite
from net.averaging.state.download import StateDownload
from net.averaging.state.sharing import StateSharing, StateSharingConfig, StateSource
from net.dht.node import DhtNode
from net.identity import PeerId
from net.nursery import background_nursery
from net.rpc.base import Caller
from net.types import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragerConfig:
    """Settings of an averager and its parts."""

    step_timeout_s: float = 60.0
    """Longest that a step takes."""
    assembly: AssemblyConfig = field(default_factory=AssemblyConfig)
    """How groups are found."""
    all_reduce: AllReduceConfig = field(default_factory=AllReduceConfig)
    """How a group averages."""
    state: StateSharingConfig = field(default_factory=StateSharingConfig)
    """How whole states are shared."""

    def __post_init__(self) -> None:
        if not 0 < self.step_timeout_s < math.inf:
            raise ValueError(f"step_timeout_s must be a positive number of seconds, got {self.step_timeout_s}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AveragingStep:
    """What a step came to."""

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


class Averager:
    """Made by `open_averager`. One step at a time."""

    def __init__(
        self,
        caller: Caller,
        *,
        size: int,
        grid: MoshpitGrid,
        cell: int,
        role: Role,
        bandwidth: float | None,
        matchmaker: Matchmaker,
        all_reduce: AllReduce,
        download: StateDownload,
        dht: DhtNode,
        nursery: trio.Nursery,
        step_timeout_s: float,
    ) -> None:
        self._caller = caller
        self._size = size
        self._grid = grid
        self._role = role
        self._bandwidth = bandwidth
        self._matchmaker = matchmaker
        self._all_reduce = all_reduce
        self._dht = dht
        self._nursery = nursery
        self._step_timeout_s = step_timeout_s
        self._is_stepping = False
        self.cell = cell
        """Where this peer is on the grid."""
        self.round_number = 0
        """Rounds so far. May be set to another peer's when joining late."""
        self.download_state = download.run
        """Fetches the freshest whole state of a donor, see `StateDownload.run`."""

    async def step(self, vector: Array | None, *, weight: float = 1.0, timeout_s: float | None = None) -> AveragingStep:
        """Average with this round's group.

        If cancelled, the group goes on without this peer's part, and the round does not count.

        Args:
          vector: float32 [size], finite, not to be written to meanwhile; None for an auxiliary peer.
          weight: of the vector, such as the samples behind it; see `join_messages.WEIGHTS` for what it may be.
          timeout_s: the longest it may take; None: as configured.

        Raises:
          ValueError: the vector is not what was announced or not finite, or the weight is out of range.
          RuntimeError: another step is under way.
        """
        self._check(vector, weight)
        if self._is_stepping:
            raise RuntimeError("an averager takes one step at a time")
        self._is_stepping = True
        try:
            timeout_s = self._step_timeout_s if timeout_s is None else timeout_s
            done = await self._find_and_average(vector, weight, self._dht.clock.now() + timeout_s)
        finally:
            self._is_stepping = False
        self.round_number += 1
        return done

    def _check(self, vector: Array | None, weight: float) -> None:
        lightest, heaviest = WEIGHTS
        if not lightest <= weight <= heaviest:
            raise ValueError(f"a weight is from {lightest:g} to {heaviest:g}, got {weight}")
        if (vector is None) != (self._role is Role.AUXILIARY):
            raise ValueError(f"an auxiliary peer has no vector, all others have one; this peer's role is {self._role}")
        if vector is not None and (vector.dtype != np.float32 or vector.shape != (self._size,)):
            raise ValueError(f"expected float32 [{self._size}], got {vector.dtype} {list(vector.shape)}")
        if vector is not None and not is_finite(vector):  # before others wait for it
            raise ValueError("some of the vector's values are not finite: others would refuse them")

    async def _find_and_average(self, vector: Array | None, weight: float, deadline: float) -> AveragingStep:
        member = Member(
            peer_id=self._caller.peer_id,
            address=None if self._role is Role.CLIENT else self._caller.address,
            role=self._role,
            wanted_slot=self._grid.slot(self.cell, self.round_number),
            weight=weight,
            bandwidth=self._bandwidth,
        )
        while self._dht.clock.now() < deadline:
            group = await self._matchmaker.find_group(
                member, cell=self.cell, round_number=self.round_number, deadline=deadline
            )
            if group is None:
                break
            # The declaration by which the group was found is taken back meanwhile.
            self._nursery.start_soon(self._matchmaker.withdraw)
            if self._all_reduce.knows(group.group_id):
                continue  # its leader makes one group of two
            result = await self._all_reduce.run(
                group, vector, size=self._size, timeout_s=deadline - self._dht.clock.now()
            )
            if self._has_met_anybody(group, result):
                self._move(group)
                return AveragingStep(
                    average=result.average,
                    received=result.received,
                    peers=tuple(each.peer_id for each in group.members),
                    round_number=self.round_number,
                    weight=_mean_weight(group, result, own=weight),
                )
        alone = np.zeros(self._size, np.float32) if vector is None else vector
        return AveragingStep(
            average=alone,
            received=0.0,
            peers=(self._caller.peer_id,),
            round_number=self.round_number,
            weight=weight,
        )

    def _has_met_anybody(self, group: Group, result: AllReduceResult) -> bool:
        """Whether at least one other member did its part, as far as this peer can tell."""
        lost = {*result.lost_reducers, *result.lost_senders, self._caller.peer_id}
        return result.received > 0 and any(each.peer_id not in lost for each in group.members)

    def _move(self, group: Group) -> None:
        slot = group.slots[group.index(self._caller.peer_id)]
        self.cell = self._grid.move(self.cell, self.round_number, slot)


def _mean_weight(group: Group, result: AllReduceResult, *, own: float) -> float:
    """Of those whose vectors came."""
    weights = [each.weight for each in group.members if each.sends and each.peer_id not in result.lost_senders]
    return math.fsum(weights) / len(weights) if weights else own


def schema_of(size: int, grid: MoshpitGrid, schema: str) -> bytes:
    """What peers must agree on to average: digest of the vector's size, the grid, and what its numbers mean."""
    return hashlib.sha256(f"{size} float32 {grid.side} {grid.dims}\n{schema}".encode()).digest()


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
    bandwidth: float | None = None,
    state: StateSource | None = None,
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
      bandwidth: of this machine, bytes a second, for the share that it reduces; None: unknown.
      state: this peer's whole state, for newcomers; None: it is no donor.
      config: see there.

    Raises:
      ValueError: an argument is out of range.
    """
    check_prefix(prefix)
    if cell is not None and not 0 <= cell < grid.num_cells:
        raise ValueError(f"cells go from 0 to {grid.num_cells - 1}, got {cell}")
    if size < 1:
        raise ValueError(f"a vector has at least one number, got size {size}")
    if role is None:
        role = Role.CLIENT if caller.address is None else Role.NODE
    if caller.address is None and role is not Role.CLIENT:
        raise ValueError(f"a peer that listens nowhere can only be a client, got role {role}")
    async with AsyncExitStack() as stack:
        # Each serves calls from its making on, until it is closed; then the prefix is free again.
        matchmaker = Matchmaker(
            caller, dht, prefix=prefix, grid=grid, schema=schema_of(size, grid, schema), rng=rng, config=config.assembly
        )
        stack.callback(matchmaker.close)
        all_reduce = AllReduce(caller, prefix=prefix, config=config.all_reduce)
        stack.callback(all_reduce.close)
        nursery = await stack.enter_async_context(background_nursery())
        if state is not None:
            nursery.start_soon(StateSharing(caller, dht, prefix=prefix, source=state, config=config.state).run)
        yield Averager(
            caller,
            size=size,
            grid=grid,
            cell=rng.randrange(grid.num_cells) if cell is None else cell,
            role=role,
            bandwidth=bandwidth,
            matchmaker=matchmaker,
            all_reduce=all_reduce,
            download=StateDownload(caller, dht, prefix=prefix, rng=rng, config=config.state),
            dht=dht,
            nursery=nursery,
            step_timeout_s=config.step_timeout_s,
        )
