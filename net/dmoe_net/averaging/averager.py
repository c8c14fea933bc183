"""One peer's part in Moshpit averaging: find this round's group, average within it, move on.

    plan = AveragingPlan.of(size=sent.size, grid=MoshpitGrid(side=8))
    async with open_averager(peer, dht, plan, prefix="trunk", rng=rng) as averager:
        done = await averager.step(sent)
        vector += done.average - sent        # what happened to it meanwhile is kept

Until a step's deadline a peer looks for a group under the key of its place on the grid (`group_key`), averages within
it, and if that gave it nothing at all, looks again. Then its round counts up whether or not it met anybody, so that
peers that began together stay together. Vectors are reduced; sparse ones are gathered.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import trio

from dmoe_net.averaging.config import AveragerConfig
from dmoe_net.averaging.drawing import drawn_places, put_back
from dmoe_net.averaging.gathering import AllGather, mean_untrusted
from dmoe_net.averaging.grouping.group import Group, Member, Role
from dmoe_net.averaging.grouping.matchmaker import Matchmaker
from dmoe_net.averaging.piecewise import Outcome, Told, hear, outcome_of, tell_group, tell_over
from dmoe_net.averaging.plan import AveragingPlan, why_apart
from dmoe_net.averaging.reduction.all_reduce import AllReduce, AllReduceResult
from dmoe_net.averaging.reduction.reducer import is_finite
from dmoe_net.averaging.replica import Replica, ReplicaLost
from dmoe_net.averaging.speeds import BANDWIDTHS_BPS, UNKNOWN, Speeds
from dmoe_net.averaging.state.download import download_state
from dmoe_net.averaging.state.sharing import SharedState
from dmoe_net.dht.node import DhtNode
from dmoe_net.errors import NetError
from dmoe_net.identity import PeerId
from dmoe_net.rpc.base import Caller
from dmoe_net.types import Array
from dmoe_net.wire.sparse import SparseVector, encode_sparse, to_dense

LOST_IN_ALL_REDUCE = "lost in the all-reduce"


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
    """Weight of the average: the mean weight of the vectors in it, as far as this peer knows; its own when nobody
    was met. Given to the next step of the same vector, several rounds come to the weighted mean of all: with the first
    weights in every round, those who met a heavy one would count for too much."""
    moved_bytes: float = 0.0
    """Bytes of float32 that this peer sent in the all-reduce, and received as many: less if compressed. With sparse
    vectors: bytes of payloads that it sent, just as they are."""
    lost: Mapping[PeerId, str] = field(default_factory=dict)
    """Members that the average, or this peer's own part of it, goes without, and why."""


@dataclass(kw_only=True, eq=False)
class Averager:
    """Averages one vector, a round at a time. Made by `open_averager`."""

    caller: Caller
    dht: DhtNode
    name: str
    """Name of what is averaged."""
    plan: AveragingPlan
    config: AveragerConfig
    role: Role
    matchmaker: Matchmaker
    all_reduce: AllReduce
    gather: AllGather | None
    """Takes the place of the all-reduce where vectors are sparse."""
    nursery: trio.Nursery
    rng: Random
    cell: int
    """This peer's place on the grid."""
    replica: Replica | None = None
    """The processes of which this one is part; None: this process is a peer by itself."""
    round_number: int = 0
    """Rounds so far. May be set to another peer's when joining late."""

    def __post_init__(self) -> None:
        self._seen = UNKNOWN
        self._is_stepping = False

    def known_speeds(self) -> Speeds:
        """Return what the config says of this machine, and of the rest what the last download has shown."""
        # Averages show nothing: in a group all end together, so that the speeds which their times suggest are those
        # that make the very shares that the members have, however wrong.
        return self.config.known_speeds().or_else(self._seen)

    async def why_apart(self) -> str:
        """Return a sentence about peers that average something else under this name, see `plan.why_apart`."""
        return await why_apart(self.dht, self.name, self.plan)

    async def download_state(self, **settings: Any) -> SharedState | None:
        """Download the whole state of a peer that is further, see `state.download.download_state` for the settings."""
        prefix, began = self.plan.within(self.name), trio.current_time()
        state = await download_state(
            self.caller, self.dht, prefix=prefix, rng=self.rng, config=self.config.state, **settings
        )
        if state is not None and (seconds := trio.current_time() - began) > 0:
            nbytes = sum(tensor.nbytes for tensor in state.tensors)
            least, most = BANDWIDTHS_BPS
            self._seen = Speeds(down=min(max(nbytes / seconds, least), most))
        return state

    async def step(self, vector: Array | SparseVector | None, *, weight: float = 1.0, mark: str = "") -> AveragingStep:
        """Average with this round's group.

        If cancelled, the group goes on without this peer's part, and the round does not count.

        Args:
          vector: float32 [plan.vector_size], finite, not to be written to meanwhile; None for an auxiliary peer. Where
            the plan has a sparse layout, a sparse vector of that.
          weight: of the vector, such as the samples behind it; see `group.WEIGHTS` for what it may be.
          mark: of this step, where a replica has several processes, which all take it; the same in all, and new.

        Raises:
          ValueError: the vector is not what was announced or not finite, or the weight is out of range.
          RuntimeError: another step is under way.
          NetError: with several processes, whatever the leader failed with.
        """
        if self._is_stepping:
            raise RuntimeError("an averager takes one step at a time")
        self._check(vector)
        member = Member(
            peer_id=self.caller.peer_id,
            address=None if self.role is Role.CLIENT else self.caller.address,
            role=self.role,
            wanted_slot=self.plan.grid.slot(self.cell, self.round_number),
            weight=weight,
            speeds=self.known_speeds(),
        )
        self._is_stepping = True
        try:
            deadline, offer = self.dht.clock.now() + self.config.step_timeout_s, vector
            if isinstance(vector, SparseVector):
                offer = np.frombuffer(await self.config.compute(encode_sparse, vector), np.uint8)
            if self.replica is not None and not self.replica.leads:
                done = await self._follow(self.replica, mark, member, offer)
            elif self.replica is not None:
                done = await self._lead(self.replica, mark, member, offer, deadline)
            else:
                done = await self._find_and_average(member, offer, deadline, mark)
            if done is None:
                done = await self._alone(member, vector)
        finally:
            self._is_stepping = False
        self.round_number += 1
        return done

    def _check(self, vector: Array | SparseVector | None) -> None:
        if self.plan.sparse is not None:
            self.plan.sparse.check(vector)
            return
        if isinstance(vector, SparseVector):
            raise ValueError(
                "this averager reduces vectors that are not sparse: open it with the layout of sparse ones"
            )
        if (vector is None) != (self.role is Role.AUXILIARY):
            raise ValueError(f"an auxiliary peer has no vector, all others have one; this peer's role is {self.role}")
        if vector is None:
            return
        size, shape = self.plan.vector_size, list(vector.shape)
        if vector.dtype != np.float32 or shape != [size] or not vector.flags.c_contiguous:
            raise ValueError(f"expected contiguous float32 [{size}], got {vector.dtype} {shape}")
        if not is_finite(vector):  # before others wait for it
            raise ValueError("some of the vector's values are not finite: others would refuse them")

    async def _lead(self, replica: Replica, mark: str, me: Member, offer: Any, deadline: float) -> AveragingStep | None:
        """Do as `_find_and_average`, and let the other processes know of the end."""
        try:
            done = await self._find_and_average(me, offer, deadline, mark)
        except ReplicaLost:
            raise
        except NetError as error:
            await tell_over(replica, mark, failure=f"{type(error).__name__}: {error}")
            raise
        await tell_over(replica, mark, failure=None, is_done=done is not None, cell=self.cell)
        return done

    async def _follow(self, replica: Replica, mark: str, me: Member, offer: Any) -> AveragingStep | None:
        """Average in the groups that the leader finds; the outcome is that of the last one, if there is one."""
        done: AveragingStep | None = None
        while isinstance(told := await hear(replica, mark), Told):
            done = await self._average(told, me, offer, mark)
        if (failure := told.get("failure")) is not None:
            raise NetError(f"process 0 of this replica failed: {failure}")
        return done if told.get("is_done") else None

    async def _find_and_average(self, me: Member, offer: Any, deadline: float, mark: str) -> AveragingStep | None:
        """Average what is offered, a vector or the payload of a sparse one; None if nobody was met by the deadline."""
        while self.dht.clock.now() < deadline:
            group = await self.matchmaker.find_group(
                me, cell=self.cell, round_number=self.round_number, deadline=deadline
            )
            if group is None:
                break
            # The declaration by which the group was found is taken back meanwhile.
            self.nursery.start_soon(self.matchmaker.withdraw)
            if group.group_id in (self.gather or self.all_reduce).groups:
                continue  # its leader makes one group of two
            timeout_s = deadline - self.dht.clock.now()
            if self.replica is None:
                told = Told(group=group, part=group, timeout_s=timeout_s)
            else:
                told = await tell_group(self.replica, mark, group, timeout_s)
            done = await self._average(told, me, offer, mark)
            there = [each for each in group.members if each.peer_id not in done.lost and each.peer_id != me.peer_id]
            if done.received == 0 or not there:
                continue  # nobody else did its part, as far as this peer can tell
            self.cell = self.plan.grid.move(self.cell, self.round_number, group.slots[group.index(me.peer_id)])
            return done
        return None

    async def _average(self, told: Told, me: Member, offer: Any, mark: str) -> AveragingStep:
        group = told.group
        if self.gather is not None and self.plan.sparse is not None:
            gathered = await self.gather.run(group, offer, timeout_s=told.timeout_s)
            average, lost = await mean_untrusted(gathered, group, self.plan.sparse, self.config.compute)
            lost_senders: Collection[PeerId] = lost.keys()
            received = 1.0 if sum(member.sends for member in group.members) - len(lost) > 1 else 0.0
            moved_bytes = float(gathered.sent_bytes)
        else:
            result, average = None, offer
            if told.part is not None:
                result, average = await self._reduce(told.part, offer, timeout_s=told.timeout_s)
            moved_bytes = 0.0 if result is None else result.moved_bytes
            outcome: AllReduceResult | Outcome | None = result
            if self.replica is not None:
                outcome = await outcome_of(self.replica, mark, told, result)
            assert outcome is not None
            lost_senders, received = outcome.lost_senders, outcome.received
            lost = dict.fromkeys((*outcome.lost_reducers, *lost_senders), LOST_IN_ALL_REDUCE)
        weights = [each.weight for each in group.members if each.sends and each.peer_id not in lost_senders]
        return AveragingStep(
            average=average,
            received=received,
            peers=tuple(each.peer_id for each in group.members),
            round_number=self.round_number,
            weight=math.fsum(weights) / len(weights) if weights else me.weight,
            moved_bytes=moved_bytes,
            lost=lost,
        )

    async def _reduce(self, group: Group, vector: Array | None, *, timeout_s: float) -> tuple[AllReduceResult, Array]:
        """The outcome for the numbers that are averaged, and the whole vector with them in their places."""
        plan, compute, run = self.plan, self.config.compute, self.all_reduce.run
        if plan.drawn_from is None or vector is None:
            result = await run(group, vector, size=plan.size, timeout_s=timeout_s)
            return result, result.average
        places = await compute(drawn_places, group.group_id, plan.drawn_from, plan.size)
        part = await compute(np.take, vector, places)
        result = await run(group, part, size=plan.size, timeout_s=timeout_s)
        return result, await compute(put_back, vector, places, result.average)

    async def _alone(self, me: Member, vector: Array | SparseVector | None) -> AveragingStep:
        """The outcome of a step in which nobody was met."""
        average = np.zeros(self.plan.vector_size, np.float32) if vector is None else vector
        if isinstance(average, SparseVector):
            average = await self.config.compute(to_dense, average)
        return AveragingStep(
            average=average, received=0.0, peers=(me.peer_id,), round_number=self.round_number, weight=me.weight
        )
