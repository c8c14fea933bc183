"""What the peers of one name average, as they leave it in the DHT for those who have no vector of their own.

    DHT, PREFIX.plan / peer id      [size, side, dims, schema], a group size may follow

Anybody can write there: an auxiliary peer takes the plan that most peers have. One that nobody follows costs it nothing
but waiting.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import trio

from net.averaging.grouping.group import MAX_GROUP_SIZE
from net.averaging.grouping.group_key import MoshpitGrid
from net.dht.node import DhtNode
from net.dht.records import Dictionary, Value
from net.errors import NetError, RemoteProtocolError
from net.identity import PeerId
from net.wire.fields import Field, integer, octets, row_untrusted

ANNOUNCE_PERIOD_S = 60.0
"""Seconds between two announcements, which live three times as long."""

MAX_SIZE = 2**40
"""Numbers in the largest vector that can be announced."""

_SCHEMA_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingPlan:
    """What peers must agree on to average together.

    Raises:
      ValueError: the size, the grid or the group size is out of range.
    """

    size: int
    """Numbers in the vector."""
    grid: MoshpitGrid
    """How its peers meet."""
    schema: bytes
    """Hash of all of it, and of what the numbers mean: peers of another one are refused."""
    group_size: int | None = None
    """Most members that average with each other in each of two rounds, 2 or more (`reduction.grid`); None: a group
    averages in one."""

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MAX_SIZE:
            raise ValueError(f"a vector has at least one number and at most {MAX_SIZE}, got size {self.size}")
        if self.grid.side < 2:
            raise ValueError(f"a grid of side {self.grid.side} has no groups of two")
        if self.group_size is not None and self.group_size < 2:
            raise ValueError(f"group_size must be at least 2 members, or None for all together, got {self.group_size}")

    @classmethod
    def of(cls, *, size: int, grid: MoshpitGrid, schema: str, group_size: int | None = None) -> "AveragingPlan":
        """The plan of peers who know what their numbers mean.

        Args:
          schema: says it, such as names and shapes of the parameters.
        """
        two_rounds = "" if group_size is None else f" in groups of {group_size}"
        agreed = hashlib.sha256(f"{size} float32 {grid.side} {grid.dims}{two_rounds}\n{schema}".encode()).digest()
        return cls(size=size, grid=grid, schema=agreed, group_size=group_size)

    def to_value(self) -> Value:
        """What `parse_plan_untrusted` reads."""
        row: list[Value] = [self.size, self.grid.side, self.grid.dims, self.schema]
        # Without groups as earlier versions have it. They do not read the other, and could not take part.
        return row if self.group_size is None else [*row, self.group_size]


def plan_key(prefix: str) -> str:
    """The DHT key under which plans are announced."""
    return f"{prefix}.plan"


def parse_plan_untrusted(value: object) -> AveragingPlan:
    """Read what `AveragingPlan.to_value` made.

    Raises:
      RemoteProtocolError: it did not make this.
    """
    number, schema = integer(1, MAX_SIZE), octets(_SCHEMA_BYTES, _SCHEMA_BYTES)
    fields: dict[str, Field[Any]] = {"size": number, "side": integer(2, 2**31), "dims": integer(1, 31)}
    fields["schema"] = schema
    if isinstance(value, list) and len(value) > len(fields):
        fields["group_size"] = integer(2, MAX_GROUP_SIZE)
    size, side, dims, agreed, *group_size = row_untrusted(value, "a plan", **fields)
    try:
        return AveragingPlan(
            size=size,
            grid=MoshpitGrid(side=side, dims=dims),
            schema=agreed,
            group_size=group_size[0] if group_size else None,
        )
    except ValueError as error:
        raise RemoteProtocolError(f"bad plan: {error}") from error


async def announce_plan(dht: DhtNode, prefix: str, peer_id: PeerId, plan: AveragingPlan) -> None:
    """Announce the plan again and again, until cancelled; what was announced runs out by itself."""
    while True:
        await dht.store(
            plan_key(prefix),
            plan.to_value(),
            subkey=str(peer_id),
            expiration=dht.clock.now() + 3 * ANNOUNCE_PERIOD_S,
        )
        await trio.sleep(ANNOUNCE_PERIOD_S)


async def find_plan(dht: DhtNode, prefix: str, *, max_size: int = MAX_SIZE) -> AveragingPlan | None:
    """The plan that most peers have announced; None if there is none.

    Args:
      max_size: plans of larger vectors do not count.

    Raises:
      NetError: the DHT cannot be asked.
    """
    record = await dht.get(plan_key(prefix))
    votes: Counter[AveragingPlan] = Counter()
    for entry in record.entries.values() if isinstance(record, Dictionary) else ():
        try:
            plan = parse_plan_untrusted(entry.value)
        except RemoteProtocolError:
            continue
        if plan.size <= max_size:
            votes[plan] += 1
    # The hash decides between equals: all who look choose the same.
    return max(votes, key=lambda plan: (votes[plan], plan.schema), default=None)


async def wait_for_plan(dht: DhtNode, prefix: str, *, max_size: int = MAX_SIZE, poll_s: float = 2.0) -> AveragingPlan:
    """Do as `find_plan` does, and look again until there is one."""
    while True:
        try:
            plan = await find_plan(dht, prefix, max_size=max_size)
        except NetError:
            plan = None
        if plan is not None:
            return plan
        await trio.sleep(poll_s)
