"""Who reduces how much: shares of the vector by bandwidth (DeDLOC: Diskin et al., NeurIPS 2021, section 3.2).

In a butterfly all-reduce among n peers, peer i, reducing the share f_i, sends and receives the rest of its own vector
once, 1 - f_i, and its part of the n - 1 others', (n - 1) f_i: in each direction

    t_i = (1 + (n - 2) f_i) / b_i

seconds for a vector of one byte over b_i bytes a second. DeDLOC minimises the largest t_i by a linear programme. A
member that cannot even send its own vector in the time that the others need decides that largest t_i whatever it
reduces, and then the programme has many solutions, some of them absurd for everybody else. Here all who reduce anything
end at one moment T, as early as can be, and who would take longer with nothing to reduce (1 / b_i >= T) reduces
nothing: a solution of the programme, and the only one that is earliest for the others, too. With sum f_i = 1 over k
reducers

    T = (n - 2 + k) / sum b_i,    f_i = (b_i T - 1) / (n - 2).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

MIN_SHARE = 1e-3
"""Shares below it are not worth a connection: their owners reduce nothing."""


def peer_fractions(bandwidths: Sequence[float | None]) -> tuple[float, ...]:
    """The share of the vector that each member reduces, for the earliest end.

    Args:
      bandwidths: bytes a second of each member, in the order of the group; 0 for one that cannot be called and reduces
        nothing (client mode), None for one that does not know: it counts as the mean of those that do.

    Returns: shares that add up to 1. With two members, or one that reduces, nothing is to be won by unequal ones.

    Raises:
      ValueError: nobody can reduce.
    """
    known = [bandwidth for bandwidth in bandwidths if bandwidth]
    assumed = sum(known) / len(known) if known else 1.0
    speeds = np.array([assumed if bandwidth is None else bandwidth for bandwidth in bandwidths])
    if not speeds.any():
        raise ValueError(f"nobody in a group of {len(bandwidths)} can reduce")
    speeds /= speeds.max()
    if len(speeds) <= 2:
        shares = (speeds > 0).astype(float)
    else:
        shares = np.maximum(speeds * _end(np.sort(speeds)[::-1]) - 1, 0) / (len(speeds) - 2)
        shares[shares < min(MIN_SHARE, shares.max())] = 0.0
    return tuple((shares / shares.sum()).tolist())


def _end(speeds: np.ndarray[Any, np.dtype[Any]]) -> float:
    """When those who reduce are done: T of the fastest k, the largest k all of whom have something to reduce.

    Args:
      speeds: of three members or more, the fastest first.
    """
    counts = np.arange(1, len(speeds) + 1)
    ends = (len(speeds) - 2 + counts) / np.cumsum(speeds)
    return float(ends[np.flatnonzero(speeds * ends > 1)[-1]])


def split_by_shares(size: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers near size * share that add up to `size`, by the method of largest remainders.

    Zero shares stay zero; one at least is above. Every member computes the same from the same list.
    """
    total = math.fsum(shares)
    exact = [size * share / total for share in shares]
    counts = [math.floor(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda member: (counts[member] - exact[member], member))
    for member in [each for each in by_remainder if shares[each] > 0][: size - sum(counts)]:
        counts[member] += 1
    return tuple(counts)
