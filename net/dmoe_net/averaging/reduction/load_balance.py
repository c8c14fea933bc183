"""Shares of the vector that members reduce, by bandwidth (DeDLOC: Diskin et al., NeurIPS 2021, section 3.2).

In a butterfly all-reduce of a vector of one byte, among members of which s have a vector of their own, the member that
reduces the share f sends, and receives, so many bytes; and what a member can reduce within T seconds is its capacity:

    a node            1 + (s - 2) f   its own but for f, and s - 1 answers    max(0, min((b T - 1) / (s - 2), r T / s))
    an auxiliary      s f             s answers of f                          min(b, r) T / s
    a client          1               its own vector                          0

with b = min(up, down), as the slower direction counts, and r bytes a second that it adds up at the same time. DeDLOC
minimises the latest end by a linear programme. Its solution: T is the first moment at which capacities add up to 1,
exactly, as they are straight lines between the moments at which a member begins to have time left, and at which its
adding up becomes its limit. A member that cannot even send its own vector by then is last whatever it reduces, and
reduces nothing. With two vectors the nodes alone reduce; a single vector is its own mean: a node keeps it.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dmoe_net.averaging.grouping.group import Role
from dmoe_net.averaging.speeds import Speeds

MIN_SHARE = 0.01
"""Shares below this part of an equal one are not worth a connection: their owners reduce nothing."""

_Floats = np.ndarray[Any, np.dtype[np.float64]]


def peer_fractions(roles: Sequence[Role], speeds: Sequence[Speeds]) -> tuple[float, ...]:
    """The share of the vector that each member reduces, for the earliest end.

    Args:
      roles: of each member, in the order of the group.
      speeds: of each. An unknown bandwidth counts as the mean of those that are known in its direction, of all who
        can reduce; unknown reducing as no limit.

    Returns: shares that add up to 1; 0 for clients.

    Raises:
      ValueError: nobody can reduce, or there are not as many speeds as roles.
    """
    capacity = _capacity(roles, speeds)
    # Whoever is not limited at all (inf) leaves nothing to the others.
    shares = np.isinf(np.minimum(capacity.line, capacity.adding)).astype(float)
    if not shares.any():
        shares = capacity.at(capacity.end())
        shares[shares < min(MIN_SHARE / len(shares), shares.max())] = 0.0
    return tuple((shares / shares.sum()).tolist())


def bytes_each_way(role: Role, share: float, *, num_vectors: int) -> float:
    """Bytes that a member sends, and receives as many, in an all-reduce of `num_vectors` vectors of one byte."""
    answers = num_vectors * share
    return answers if role is Role.AUXILIARY else 1 + answers - 2 * share


def split_by_shares(size: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers near size * share that add up to `size`, by the method of largest remainders; zeros stay."""
    total = math.fsum(shares)
    exact = [size * share / total for share in shares]
    counts = [math.floor(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda member: (counts[member] - exact[member], member))
    for member in [each for each in by_remainder if shares[each] > 0][: size - sum(counts)]:
        counts[member] += 1
    return tuple(counts)


class _Capacity(NamedTuple):
    """Share that each member can reduce by the time T: max(0, min(line T - spent, adding T))."""

    line: _Floats
    spent: _Floats
    adding: _Floats

    def at(self, time: float) -> _Floats:
        return np.maximum(np.minimum(self.line * time - self.spent, self.adding * time), 0.0)

    def end(self) -> float:
        """The first time at which they add up to 1. No slope is infinite, and one at least is above 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            begins = self.spent / self.line
            bends = self.spent / (self.line - self.adding)
        times = np.unique(np.concatenate(([0.0], *(each[np.isfinite(each) & (each > 0)] for each in (begins, bends)))))
        # By halving: the sum does not fall. Between two of these times it is a straight line.
        before, after = 0, len(times)
        while after - before > 1:
            middle = (before + after) // 2
            before, after = (before, middle) if self.at(times[middle]).sum() >= 1 else (middle, after)
        between = (times[before] + times[after]) / 2 if after < len(times) else 2 * times[before] + 1
        of_line = self.line * between - self.spent
        by_line, by_adding = (of_line > 0) & (of_line <= self.adding * between), of_line > self.adding * between
        slope = self.line[by_line].sum() + self.adding[by_adding].sum()
        return float((1 + self.spent[by_line].sum()) / slope)


def _capacity(roles: Sequence[Role], speeds: Sequence[Speeds]) -> _Capacity:
    """Capacity of each member, in units of the fastest line: it must not matter how large the numbers are."""
    is_client = np.array([role is Role.CLIENT for role in roles], bool)
    if is_client.all():
        raise ValueError(f"nobody in a group of {len(roles)} can reduce")
    reducers = [speed for role, speed in zip(roles, speeds, strict=True) if role is not Role.CLIENT]
    up, down = _assumed([each.up for each in reducers]), _assumed([each.down for each in reducers])
    lines = np.array([min(each.up or up, each.down or down) for each in speeds])
    lines = np.where(is_client, 0.0, np.where(np.isinf(lines), 1.0, lines))  # if nobody knows anything, all are alike
    adding = np.array([each.reducing or math.inf for each in speeds])
    lines, adding = lines / lines.max(), adding / lines.max()
    num_vectors = sum(role is not Role.AUXILIARY for role in roles)
    # One alone is not added to anything.
    adding = np.where(is_client, 0.0, adding / num_vectors if num_vectors > 1 else math.inf)
    is_node = np.array([role is Role.NODE for role in roles])
    spent = np.where(is_node & (num_vectors > 2), 1 / max(1, num_vectors - 2), 0.0)
    of_node = lines / (num_vectors - 2) if num_vectors > 2 else math.inf
    line = np.where(is_node, of_node, lines / max(1, num_vectors))
    return _Capacity(line=np.where(spent > 0, line, np.minimum(line, adding)), spent=spent, adding=adding)


def _assumed(values: Sequence[float | None]) -> float:
    """The value of an unknown bandwidth: the mean of the known ones, no limit if there are none."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else math.inf
