"""One step's averaging: a group that begins at a time agreed on, an exact mean, and the certainty that all have it.

Theory of operation. Groups form while their members still compute. How many samples each will bring nobody knows then;
so the weight of a vector comes with its chunks, and the sum of all weights with the means. What a group has settled on
(`settlement`) is the weighted mean over all of its members, for all of them or for nobody; where somebody died, those
that are left average once more. All hold the very same numbers afterwards, under compression, too: what they vote on is
a digest of the average and of the weights behind it.

Where lines are slow a sign of life waits behind vectors, and members that live take each other for dead, so that
nothing is settled. After such a step everybody is twice as patient with the silent, and less again as steps are made.

A replica of several processes is one member: its first process finds groups and votes, for the pieces of all of them.
"""

import hashlib
import math
import random
import struct
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import trio

from dmoe_net.averaging.collaboration.board import ProgressBoard
from dmoe_net.averaging.collaboration.settlement import DIGEST_BYTES, Outcome, Settlement, Vote
from dmoe_net.averaging.grouping.group import MAX_GROUP_SIZE, Group, Member, Role
from dmoe_net.averaging.grouping.matchmaker import Matchmaker
from dmoe_net.averaging.grouping.matchmaking import AssemblyConfig
from dmoe_net.averaging.piecewise import Told, hear, outcome_of, tell_group, tell_over
from dmoe_net.averaging.plan import AveragingPlan
from dmoe_net.averaging.reduction.all_reduce import AllReduce, AllReduceResult
from dmoe_net.averaging.reduction.partition import TOTAL_WEIGHT, AllReduceConfig
from dmoe_net.averaging.replica import Replica
from dmoe_net.averaging.speeds import UNKNOWN, Speeds
from dmoe_net.dht.calls import PEER_ERRORS
from dmoe_net.errors import CallFailed, DialFailed, PeerUnavailable, RemoteProtocolError
from dmoe_net.identity import Contact, PeerId
from dmoe_net.nursery import background_nursery
from dmoe_net.rpc.liveness import ping
from dmoe_net.types import Array
from dmoe_net.wire.fields import PEER_ID, Field, integer, octets, real, row_untrusted, several

_MAX_ATTEMPTS = 4
"""All-reduces of one step at most: one more for each time that members die in it."""
_POLL_S = 0.5
"""Seconds between two questions to a member of a group that averages, whether it lives."""
_MOST_PATIENT = 8.0
"""Times `silence_s` that a silent member is waited for at most."""
_CALMING = 0.98
"""Factor of patience after a step that settled: too little of it costs a step, so that is tried rarely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundConfig:
    """Settings of a peer that takes part in exact averages; times are best the same for all."""

    role: Role | None = None
    """None: a client if the caller cannot be called, else a node."""
    speeds: Speeds = UNKNOWN
    """Capacity of this peer's line as far as it is known, for the share that it reduces."""
    lead_s: float = 3.0
    """Seconds that a group forms before it begins, and for which a peer that has found none by then looks on."""
    silence_s: float = 2.0
    """A member is gone if nothing has moved between it and us for so long; longer after steps that did not settle."""
    all_reduce: AllReduceConfig = field(default_factory=AllReduceConfig)
    """Settings of the all-reduce, compression included; `is_identical` is taken to be set."""

    def __post_init__(self) -> None:
        for name in ("lead_s", "silence_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a positive number of seconds, got {getattr(self, name)}")
        self.assembly()  # which refuses what is too long

    def assembly(self) -> AssemblyConfig:
        return AssemblyConfig(
            window_s=max(self.lead_s, 1.0),
            request_timeout_s=max(self.lead_s, 1.0) / 2,
            poll_s=max(self.lead_s / 8, 0.1),
            silence_s=self.silence_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Averaged:
    """The mean that a group has settled on; without a group, what a peer brings."""

    mean: Array
    """float32 [size]: of what the members brought, weighted. Zeros if nobody brought any weight, and of no meaning for
    an auxiliary member, which has its part alone. Not to be written to."""
    weight: float
    """Sum of the members' weights."""
    notes: float
    """Sum of their notes."""
    group_id: bytes = b""
    members: tuple[PeerId, ...] = ()
    """All of the group, where they are known."""
    attempts: int = 0
    """All-reduces that it took."""


@dataclass(kw_only=True, eq=False)
class StepAveraging:
    """Finds groups and averages in them, one step at a time.

    Raises:
      ValueError: the caller serves the prefix already.
    """

    board: ProgressBoard
    """Knows who else is at the step. Calls and groups go by its caller, its DHT and its prefix."""
    plan: AveragingPlan
    config: RoundConfig
    nursery: trio.Nursery
    """Runs what goes on beside the steps."""
    rng: random.Random
    replica: Replica | None = None
    """The processes of which this one is part; None: this process is a peer by itself."""

    def __post_init__(self) -> None:
        config, plan, rng = self.config, self.plan, self.rng
        caller, prefix = self.board.caller, self.board.prefix
        self.role = config.role or (Role.CLIENT if caller.address is None else Role.NODE)
        """This peer's, in every group."""
        self._patience = 1.0
        self._cell = rng.randrange(plan.grid.num_cells)
        self._matchmaker = Matchmaker(
            caller, self.board.dht, prefix=prefix, grid=plan.grid, schema=plan.schema, rng=rng, config=config.assembly()
        )
        self._all_reduce = AllReduce(caller, prefix=prefix, config=replace(config.all_reduce, is_identical=True))
        self._settlement = Settlement(
            caller=caller, prefix=prefix, rng=rng, timeout_s=config.all_reduce.timeout_s, silence_s=config.silence_s
        )

    def close(self) -> None:
        for part in (self._matchmaker, self._all_reduce, self._settlement):
            part.close()

    async def find_group(self, *, step: int, chain: bytes, begins_at: float) -> Group | None:
        """Find the group that makes this step with us at about `begins_at`, swarm time; None if there is nobody.

        If cancelled, the others go on without us.
        """
        board = self.board
        me = Member(
            peer_id=board.caller.peer_id,
            address=None if self.role is Role.CLIENT else board.caller.address,
            role=self.role,
            wanted_slot=self._cell,
            speeds=self.config.speeds,
        )
        group = await self._matchmaker.find_group(
            me,
            cell=self._cell,
            round_number=0,
            deadline=max(begins_at, board.dht.clock.now()) + max(self.config.lead_s, 2.0),
            begins_at=begins_at,
            schema=hashlib.sha256(self.plan.schema + step.to_bytes(8, "big") + chain).digest(),
            hints=board.contacts,
            fewest=lambda: board.view.fewest,
        )
        if group is not None:
            group = cautious(group)
            # From now on, though we may compute for a while: others who ask are told that we shall vote.
            self._settlement.open(group)
            self._greet(group)
        return group

    def postpone(self, begins_at: float) -> None:
        self._matchmaker.postpone(begins_at)

    async def average(
        self, group: Group, vector: Array | None, *, weight: float = 0.0, note: float = 0.0, mark: str = ""
    ) -> Averaged | None:
        """Average exactly. Returns the same in all members, or None: then this peer does not know what became of it.

        Args:
          group: from the last `find_group`.
          vector: float32 [size], contiguous and finite. Nobody may write to it until this returns, and a moment longer
            if it is cancelled. None for an auxiliary peer.
          weight: of the vector, such as its samples, 0 to `MAX_WEIGHT`; with 0 it takes no part.
          note: a number whose sum over the members all are told.
          mark: of this step, where a replica has several processes: the others `follow` under it.

        Raises:
          ValueError: the weight is out of range.
        """
        averaged = await self._average(group, vector, weight, note, mark)
        if self.replica is not None:
            await tell_over(self.replica, mark, settled=None if averaged is None else _settled_row(averaged))
        self._patience = min(max((2.0 if averaged is None else _CALMING) * self._patience, 1.0), _MOST_PATIENT)
        self._settlement.silence_s = self._patience * self.config.silence_s
        return averaged

    async def follow(self, vector: Array, *, weight: float, mark: str) -> Averaged | None:
        """As another process of a replica than its first: take part in the averages of that one's groups with this
        process's piece. Returns what the first one does, with this piece."""
        assert self.replica is not None
        mean = vector
        while isinstance(told := await hear(self.replica, mark), Told):
            average, _ = await self._reduce(told, vector, weight, mark)
            mean = vector if average is None else average
        if (row := told.get("settled")) is None:
            return None
        total, notes, group_id, members, attempts = row_untrusted(row, "a settled average", **_SETTLED)
        if len(members) == 1:
            mean = vector if weight > 0 else np.zeros(self.plan.size, np.float32)
        return Averaged(mean=mean, weight=total, notes=notes, group_id=group_id, members=members, attempts=attempts)

    async def _average(
        self, group: Group, vector: Array | None, weight: float, note: float, mark: str
    ) -> Averaged | None:
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                if self.replica is None:
                    told = Told(group=group, part=group, timeout_s=math.inf)
                else:
                    told = await tell_group(self.replica, mark, group, self.config.all_reduce.timeout_s)
                average, vote = await self._reduce(told, vector, weight, mark, note)
                outcome = await self._settlement.settle(group, vote)
            except BaseException:
                self._settlement.give_up(group)
                raise
            if outcome is None:
                return None
            if outcome.committed:
                if not vote.complete or average is None:  # settled without us
                    return None
                total = outcome.weight if vote.weight is None else vote.weight
                return _averaged(average, total, outcome.notes, group, attempt)
            following = self._after(group, outcome)
            if following is None:
                return None
            group = following
            self._settlement.open(group)
            if len(group.members) == 1:
                alone = vector if vector is not None and weight > 0 else np.zeros(self.plan.size, np.float32)
                return _averaged(alone, weight, note, group, attempt)
        return None

    def _after(self, group: Group, outcome: Outcome) -> Group | None:
        """The group that averages once more; None if this peer does not."""
        following = outcome.group_after(group)
        there = {member.peer_id for member in following.members}
        for member in group.members:
            if member.peer_id not in there:
                self.board.forget(member.peer_id)
        return following if self.board.caller.peer_id in there and has_majority(group, following) else None

    async def _reduce(
        self, told: Told, vector: Array | None, weight: float, mark: str, note: float = 0.0
    ) -> tuple[Array | None, Vote]:
        """Average this process's piece; the vote that goes with it says whether all pieces are whole."""
        result: AllReduceResult | None = None
        if (group := told.part) is not None:
            # How long it takes tells nothing of the line: others may compress what they send.
            async with background_nursery() as nursery:
                for member in group.members:
                    if member.peer_id != self.board.caller.peer_id:
                        nursery.start_soon(self._watch, group, member)
                result = await self._all_reduce.run(
                    group, vector, size=self.plan.size, weight=weight, timeout_s=told.timeout_s
                )
        average, complete, weights, digest = None, False, None, b""
        if result is not None:
            average, complete, weights = result.average, result.complete, result.weight
            if vector is not None and complete:
                digest = _digest(average.data, struct.pack("<d", weights))
        if self.replica is not None:
            outcome = await outcome_of(self.replica, mark, told, result, digest=digest)
            complete, weights = outcome.complete, outcome.weight
            digest = _digest(*outcome.digests) if complete else b""
        return average, Vote(complete=complete, digest=digest, note=note, weight=weights)

    async def _watch(self, group: Group, member: Member) -> None:
        """Go on without a member that falls silent. A client is asked over the connection that it has made."""
        target = member.peer_id if member.address is None else member.contact
        heard_at = trio.current_time()
        while True:
            await trio.sleep(_POLL_S)
            silence_s = self._patience * self.config.silence_s
            try:
                await ping(self.board.caller, target, silence_s=silence_s)
            except PeerUnavailable as error:
                is_awaited = member.address is None and isinstance(error, DialFailed)
                if is_awaited and trio.current_time() - heard_at < silence_s:
                    continue
                self._all_reduce.lose(group.group_id, member.peer_id)
                return
            except (CallFailed, RemoteProtocolError):
                pass  # it lives
            heard_at = trio.current_time()

    def _greet(self, group: Group) -> None:
        """Connect with those who will wait for this peer, if they cannot: then they see whether it lives."""
        if self.role is not Role.CLIENT:
            return

        async def connect(contact: Contact) -> None:
            with suppress(*PEER_ERRORS):
                await ping(self.board.caller, contact, silence_s=self.config.silence_s)

        for member in group.members:
            if member.address is not None:
                self.nursery.start_soon(connect, member.contact)


def cautious(group: Group) -> Group:
    """The group with unknown lines taken to be as slow as the slowest that is known of those who can reduce.

    A slow peer that has not told its line must not get more than an equal share because others are known to be fast.
    """
    reducers = [member.speeds for member in group.members if member.role is not Role.CLIENT]
    least = Speeds(
        up=min((each.up for each in reducers if each.up is not None), default=None),
        down=min((each.down for each in reducers if each.down is not None), default=None),
    )
    members = tuple(replace(member, speeds=member.speeds.or_else(least)) for member in group.members)
    return replace(group, members=members)


def has_majority(group: Group, following: Group) -> bool:
    """True if this part of a group may go on: not so if another part could.

    Members that do not answer may be dead, or on the other side of a slow line where they think the same of us. So only
    more than half go on, or the half that has the first member.
    """
    before = [member.peer_id for member in group.members if member.sends]
    left = {member.peer_id for member in following.members if member.sends}
    return 2 * len(left) > len(before) or (2 * len(left) == len(before) and before[0] in left)


def _digest(*parts: bytes | memoryview) -> bytes:
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        hashed.update(part)
    return hashed.digest()


_SETTLED: dict[str, Field[Any]] = {
    "weight": TOTAL_WEIGHT,
    "notes": real(),
    "group_id": octets(0, 64),
    "members": several(PEER_ID, MAX_GROUP_SIZE),
    "attempts": integer(0, _MAX_ATTEMPTS),
}


def _settled_row(averaged: Averaged) -> list[Any]:
    members = [peer_id.raw for peer_id in averaged.members]
    return [float(averaged.weight), float(averaged.notes), averaged.group_id, members, averaged.attempts]


def _averaged(mean: Array, weight: float, notes: float, group: Group, attempts: int) -> Averaged:
    members = tuple(member.peer_id for member in group.members)
    return Averaged(mean=mean, weight=weight, notes=notes, group_id=group.group_id, members=members, attempts=attempts)
