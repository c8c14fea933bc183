"""Plans: the vectors that peers of one name average, announced in the DHT for each other and for auxiliary peers.

    DHT, PREFIX.plan                [size, side, dims, schema, whether it is reduced, meaning]

Peers of one name and one plan meet under `AveragingPlan.within(PREFIX)`: groups, states and progress of other plans are
elsewhere, so that numbers of different meaning never come together. Anybody can write here: an auxiliary peer takes the
plan that most peers have. One that nobody follows costs it nothing but waiting.
"""

import contextlib
import hashlib
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import trio

from dmoe_net.averaging.drawing import drawn_size
from dmoe_net.averaging.gathering import SparseLayout
from dmoe_net.averaging.grouping.group_key import MoshpitGrid
from dmoe_net.dht.entries import Value
from dmoe_net.dht.node import DhtNode
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.meaning import check_meaning, differing, is_meaning
from dmoe_net.wire.fields import FLAG, Field, integer, octets, row_untrusted

_log = logging.getLogger(__name__)

ANNOUNCE_PERIOD_S = 60.0
"""Seconds between two announcements, which live three times as long."""

MAX_SIZE = 2**40
"""Numbers in the largest vector that can be announced."""

MAX_ASSISTED_SIZE = 2**32
"""Numbers in the largest vector that is assisted with, 16 GiB: an auxiliary peer believes strangers what there is to be
averaged, and takes memory for its own part of it."""

_POLL_S = 2.0
_WITHDRAWAL_S = 1.0
_FIELDS: dict[str, Field[Any]] = {
    "size": integer(1, MAX_SIZE),
    "side": integer(2, 2**31),
    "dims": integer(1, 31),
    "schema": octets(32, 32),
    "kind": FLAG,
    "meaning": Field("a text that can be printed", is_meaning),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingPlan:
    """All that peers must agree on to average together.

    Raises:
      ValueError: the size, the grid or the meaning is out of range.
    """

    size: int
    """Number of numbers that are averaged."""
    grid: MoshpitGrid
    schema: bytes
    """Hash of all of it, and of what the numbers mean: peers of another one are refused."""
    is_reduced: bool = True
    """True if others can reduce the vectors; sparse ones are gathered."""
    meaning: str = ""
    """Meaning of the numbers beyond names and shapes, for people (`dmoe_net.meaning`)."""
    sparse: SparseLayout | None = field(default=None, compare=False)
    """Layout of sparse vectors; not announced."""
    drawn_from: int | None = field(default=None, compare=False)
    """Numbers in a whole vector of which a group averages a few (`dmoe_net.averaging.drawing`); not announced."""

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MAX_SIZE:
            raise ValueError(f"a vector has at least one number and at most {MAX_SIZE}, got size {self.size}")
        if self.grid.side < 2:
            raise ValueError(f"a grid of side {self.grid.side} has no groups of two")
        check_meaning(self.meaning)

    @classmethod
    def of(
        cls,
        *,
        size: int,
        grid: MoshpitGrid,
        schema: str = "",
        meaning: str = "",
        sparse: SparseLayout | None = None,
        share: float = 1.0,
    ) -> "AveragingPlan":
        """The plan of peers who know what their numbers mean.

        Args:
          size: numbers in a vector.
          schema: names and shapes of the parameters, and how they are averaged.
          share: of the numbers, drawn anew for each group, that are averaged; the rest stays (SPARTA).

        Raises:
          ValueError: an argument is out of range, or of sparse vectors a share is to be averaged.
        """
        count, drawn_from = drawn_size(size, share), None
        if count < size:
            if sparse is not None:
                raise ValueError(f"of sparse vectors all that is left is averaged, got a share of {share}")
            schema, size, drawn_from = f"{count} drawn from {size}\n{schema}", count, size
        if sparse is not None:
            if sparse.size != size:
                raise ValueError(f"the sparse layout has {sparse.size} values, and size is {size}")
            schema = f"{sparse.schema}\n{schema}"
        agreed = hashlib.sha256(f"{size} float32 {grid.side} {grid.dims}\n{schema}\n{meaning}".encode()).digest()
        return cls(
            size=size,
            grid=grid,
            schema=agreed,
            is_reduced=sparse is None,
            meaning=meaning,
            sparse=sparse,
            drawn_from=drawn_from,
        )

    @property
    def vector_size(self) -> int:
        """Numbers in a whole vector."""
        return self.size if self.drawn_from is None else self.drawn_from

    def within(self, prefix: str) -> str:
        """Prefix under which peers of this name and plan find each other, and no others."""
        return f"{prefix}.{self.schema.hex()[:16]}"

    def to_value(self) -> Value:
        """Return the plan as it is announced."""
        return [self.size, self.grid.side, self.grid.dims, self.schema, self.is_reduced, self.meaning]

    def facts(self) -> str:
        """The facts in which it may differ from other plans, for people, one a line."""
        grid = f"groups of {self.grid.side}" + (f" on {self.grid.dims} axes" if self.grid.dims > 1 else "")
        return f"{self.size:,} numbers\n{grid}\n{self.meaning}"


def plan_key(prefix: str) -> str:
    """The DHT key under which plans are announced."""
    return f"{prefix}.plan"


def parse_plan_untrusted(value: object) -> AveragingPlan:
    """Read what `AveragingPlan.to_value` made."""
    size, side, dims, schema, is_reduced, meaning = row_untrusted(value, "a plan", **_FIELDS)
    try:
        grid = MoshpitGrid(side=side, dims=dims)
        return AveragingPlan(size=size, grid=grid, schema=schema, is_reduced=is_reduced, meaning=meaning)
    except ValueError as error:
        raise RemoteProtocolError(f"bad plan: {error}") from error


async def announce_plan(dht: DhtNode, prefix: str, plan: AveragingPlan) -> None:
    """Announce the plan until cancelled, then withdraw it; warn of peers of this name who have another one."""
    said = ""
    try:
        while True:
            await dht.store(plan_key(prefix), plan.to_value(), life_s=3 * ANNOUNCE_PERIOD_S)
            others = await why_apart(dht, prefix, plan)
            if others and others != said:
                _log.warning("%s", others)
            said = others
            await trio.sleep(ANNOUNCE_PERIOD_S)
    finally:
        with trio.move_on_after(_WITHDRAWAL_S, shield=True):
            await dht.withdraw(plan_key(prefix))


async def why_apart(dht: DhtNode, prefix: str, plan: AveragingPlan) -> str:
    """A sentence about peers of this name that average by another plan, and so never meet this peer; empty if there are
    none."""
    others = [each for each in await _announced(dht, prefix) if each.schema != plan.schema]
    if not others:
        return ""
    theirs, ours = differing(others[0].facts(), plan.facts())
    if theirs == ours:
        theirs, ours = "other names, shapes or settings", "its own"
    several = "1 peer averages" if len(others) == 1 else f"{len(others)} peers average"
    return f"{several} something else under the name {prefix!r}: {theirs}; this one: {ours}. They do not meet"


async def find_plan(dht: DhtNode, prefix: str) -> AveragingPlan | None:
    """The plan to assist with that most peers have announced; None if there is none."""
    found = await _announced(dht, prefix)
    votes = Counter(plan for plan in found if plan.size <= MAX_ASSISTED_SIZE and plan.is_reduced)
    # The hash decides between equals: all who look choose the same.
    return max(votes, key=lambda plan: (votes[plan], plan.schema), default=None)


async def _announced(dht: DhtNode, prefix: str) -> list[AveragingPlan]:
    """Plans under this name that can be read."""
    found = []
    for entry in await dht.get(plan_key(prefix)):
        with contextlib.suppress(RemoteProtocolError):
            found.append(parse_plan_untrusted(entry.value))
    return found


async def wait_for_plan(dht: DhtNode, prefix: str) -> AveragingPlan:
    """Do as `find_plan` does, and look again until there is one."""
    while True:
        if (plan := await find_plan(dht, prefix)) is not None:
            return plan
        await trio.sleep(_POLL_S)
