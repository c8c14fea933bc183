"""Who reduces what where a large group averages in two rounds: the cells of a grid, and the lanes of its vector.

Theory of operation. Moshpit All-Reduce (Ryabinin et al., NeurIPS 2021, algorithm 1) puts M^2 peers on a grid: they
average in the rows, then in the columns, and everybody has the exact mean. From the first round to the second a peer
carries a coordinate, which is the number of the chunk that it has reduced. Here it carries nothing else: the mean of a
chunk is with its reducer as soon as the row's members have brought it, so that one goes across, and what comes back is
the answer to the row. The paper's peers answer within the row first and take the whole vector across; the outcome is
the same, for twice the bytes:

    whole vectors across     2 * 2 (M - 1) / M vectors sent by each, and as many received
    chunks across            2 (M - 1) / M + 2 (M - 1) / M^2 = 2 (1 - 1 / M^2): those of one group of M^2

A *lane* is a stretch of the vector that one member of each row reduces. Rows share the vector out by themselves, by
what their members can carry (`load_balance`), and there is a lane between any two neighbouring ends of shares. So rows
need not be of equal length nor their members alike: whoever has a large share is in several lanes, clients are in none,
and auxiliary peers are in lanes without a vector of their own. Across the rows each owner of a lane reduces an equal
range of its chunks.

Why all have the same bits. Each number of the mean is computed once, by one member, and everybody else gets a copy.
Nothing depends on equal rounding in two places. The rounding differs from that of one group of all, though: it is that
of a mean of means.

Every member makes the same grid of the same group, without a message.
"""

import hashlib
import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from net.averaging.grouping.group import GROUP_ID_BYTES, Group, Role
from net.averaging.reduction.load_balance import peer_fractions, split_by_shares
from net.averaging.reduction.partition import AllReduceConfig, Part
from net.identity import PeerId
from net.wire.compression import BLOCK_SIZE

_MIN_RANGE = 1024
"""Numbers in a range of chunks that are worth a call: shorter lanes are not cut for the sake of equal ranges. Cut, they
make as many calls, as long ones, as one group of all would; not cut, one owner has all of a lane to reduce across, for
which 64 peers on lines of 100 Mb/s took 2.0 s and not 1.1 s, of a million numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A stretch of the vector that goes across all rows."""

    part: Part
    """Where it is, and its chunks."""
    owners: tuple[int, ...]
    """Of each row the member that reduces it there, by its place in the group."""
    ranges: tuple[Part, ...]
    """Of each row, the chunks that its owner reduces for all rows: whole chunks of the lane, perhaps none."""

    def row_of_chunk(self, chunk: int) -> int:
        """The row whose owner reduces this chunk for all rows."""
        start = self.part.chunk(chunk).start
        return next(row for row, each in enumerate(self.ranges) if each.start <= start < each.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionGrid:
    """A group on a grid. Made by `grid_of`."""

    group: Group
    """All of it."""
    rows: tuple[tuple[int, ...], ...]
    """The members of each row, by their places in the group, in its order."""
    lanes: tuple[Lane, ...]
    """In the order of the vector."""

    def row_of(self, place: int) -> int:
        """The row of a member."""
        return next(row for row, members in enumerate(self.rows) if place in members)

    def within(self, lane: int, row: int) -> Group:
        """The members of a row, as the group that reduces a lane for it."""
        members = tuple(self.group.members[place] for place in self.rows[row])
        return Group(group_id=self._id(b"within", lane, row), members=members, side=self.group.side)

    def across(self, lane: int) -> Group:
        """The owners of a lane, one of each row, as the group that reduces it for all. All of them have a vector here:
        their row's mean."""
        owners = (self.group.members[place] for place in self.lanes[lane].owners)
        members = tuple(replace(member, role=Role.NODE, weight=1.0) for member in owners)
        return Group(group_id=self._id(b"across", lane, 0), members=members, side=self.group.side)

    def num_vectors(self, row: int) -> int:
        """Members of a row that have a vector."""
        return sum(self.group.members[place].sends for place in self.rows[row])

    def partners(self, place: int) -> frozenset[PeerId]:
        """With whom a member exchanges anything: its row, and the other owners of its lanes."""
        places = set(self.rows[self.row_of(place)])
        for lane in self.lanes:
            if place in lane.owners:
                places.update(lane.owners)
        return frozenset(self.group.members[each].peer_id for each in places - {place})

    def _id(self, round_name: bytes, lane: int, row: int) -> bytes:
        """A name of its own for each of the exchanges, that nobody need be told."""
        found = hashlib.blake2b(self.group.group_id + round_name, digest_size=GROUP_ID_BYTES)
        found.update(lane.to_bytes(4, "big") + row.to_bytes(4, "big"))
        return found.digest()


def grid_of(group: Group, size: int, *, group_size: int, config: AllReduceConfig) -> ReductionGrid | None:
    """The grid on which a group averages; None where it is one row: then all average together.

    There are as few rows as give none more than `group_size` members, and rows differ by one member at most. Every row
    has a member with a vector that can be called, so that where clients and auxiliary peers outnumber those there may
    be fewer rows, and longer ones. Of more than `group_size` ** 2 members there are more than `group_size` rows.

    Args:
      size: numbers in the vector.
      group_size: most members of a row, 2 or more.
      config: decides the size of chunks.

    Raises:
      ValueError: the group size is below 2.
    """
    if group_size < 2:
        raise ValueError(f"a group within which peers average has at least 2 members, got group_size {group_size}")
    num_nodes = sum(member.role is Role.NODE for member in group.members)
    num_rows = min(math.ceil(len(group.members) / group_size), num_nodes)
    if num_rows < 2:
        return None
    rows = _rows(group, num_rows)
    ends = [_ends(group, row, size) for row in rows]
    lanes = list[Lane]()
    for start, end in itertools.pairwise(sorted({0, *itertools.chain(*ends)})):
        owners = tuple(row[bisect_right(ends[number], start)] for number, row in enumerate(rows))
        part = Part(start=start, end=end, chunk_size=_chunk_size(end - start, rows, config))
        lanes.append(Lane(part=part, owners=owners, ranges=_ranges(part, num_rows, first=len(lanes))))
    return ReductionGrid(group=group, rows=rows, lanes=tuple(lanes))


def _rows(group: Group, num_rows: int) -> tuple[tuple[int, ...], ...]:
    """Deal the members out: nodes first, the fastest first, so that all rows have some and are about equally fast."""
    roles = (Role.NODE, Role.AUXILIARY, Role.CLIENT)

    def rank(place: int) -> tuple[int, float, int]:
        member = group.members[place]
        up, down = member.speeds.up or 0.0, member.speeds.down or 0.0
        return roles.index(member.role), -min(up, down), place

    dealt = sorted(range(len(group.members)), key=rank)
    return tuple(tuple(sorted(dealt[row::num_rows])) for row in range(num_rows))


def _ends(group: Group, row: Sequence[int], size: int) -> list[int]:
    """Where the share of each member of a row ends."""
    members = [group.members[place] for place in row]
    shares = peer_fractions([member.role for member in members], [member.speeds for member in members])
    return list(itertools.accumulate(split_by_shares(size, shares)))


def _chunk_size(length: int, rows: Sequence[Sequence[int]], config: AllReduceConfig) -> int:
    """Numbers in a chunk of a lane: as many as settings allow, and so few that all rows get as many chunks."""
    num_rows = len(rows)
    num_chunks = math.ceil(length / config.chunk_size(max(num_rows, *map(len, rows))))
    if length >= num_rows * _MIN_RANGE:
        num_chunks = num_rows * math.ceil(num_chunks / num_rows)
    numbers = math.ceil(length / num_chunks)
    # Whole blocks of numbers that share a scale, where they travel in 8 bits.
    return numbers + -numbers % BLOCK_SIZE if num_chunks > 1 and numbers > BLOCK_SIZE else numbers


def _ranges(part: Part, num_rows: int, *, first: int) -> tuple[Part, ...]:
    """The chunks of each row. The row that begins differs from lane to lane: of short lanes it is the only one."""
    ranges = {}
    for number in range(num_rows):
        begin, end = (each * part.num_chunks // num_rows for each in (number, number + 1))
        ranges[(first + number) % num_rows] = Part(
            start=min(part.start + begin * part.chunk_size, part.end),
            end=min(part.start + end * part.chunk_size, part.end),
            chunk_size=part.chunk_size,
        )
    return tuple(ranges[row] for row in range(num_rows))
