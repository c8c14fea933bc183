"""Who reduces how much: shares of the vector by bandwidth (DeDLOC: Diskin et al., NeurIPS 2021, section 3.2).

In a butterfly all-reduce among n peers, peer i, reducing the share f_i, sends and receives the rest of its own vector
once, 1 - f_i, and its part of the n - 1 others', (n - 1) f_i: in each direction

    t_i = (1 + (n - 2) f_i) / b_i

seconds for a vector of one byte over b_i bytes a second. The group is done when its slowest member is, so the shares
solve the linear programme  min T  with  t_i <= T, sum f_i = 1, f_i >= 0.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import linprog

Array = np.ndarray[Any, np.dtype[Any]]

_SLOWEST = 1e-6
"""Of the fastest bandwidth: slower peers reduce nothing. The solver needs numbers of like size."""

MIN_SHARE = 1e-3
"""Shares below it are not worth a connection: their owners reduce nothing."""


def peer_fractions(bandwidths: Sequence[float | None]) -> tuple[float, ...]:
    """The share of the vector that each member reduces, for the earliest end.

    Args:
      bandwidths: bytes a second of each member, in the order of the group; 0 for one that cannot be called and reduces
        nothing (client mode), None for one that does not know: it counts as the mean of those that do.

    Returns: shares that add up to 1. With two members, or one that reduces, nothing is to be won by unequal ones.

    Raises:
      ValueError: a bandwidth is negative or not finite, or nobody can reduce.
    """
    for bandwidth in bandwidths:
        if bandwidth is not None and not 0 <= bandwidth < math.inf:
            raise ValueError(f"a bandwidth is a finite number of bytes a second from 0, or None, got {bandwidth}")
    known = [bandwidth for bandwidth in bandwidths if bandwidth]
    assumed = sum(known) / len(known) if known else 1.0
    speeds = np.array([assumed if bandwidth is None else bandwidth for bandwidth in bandwidths])
    reducers = np.flatnonzero(speeds > _SLOWEST * speeds.max(initial=0.0))
    if not reducers.size:
        raise ValueError(f"nobody in a group of {len(bandwidths)} can reduce")
    shares = np.zeros(len(speeds))
    shares[reducers] = 1 / reducers.size
    if len(speeds) > 2 and len(set(speeds[reducers])) > 1:
        shares[reducers] = _solve(speeds[reducers] / speeds.max(), len(speeds))
        shares[shares < MIN_SHARE] = 0.0
    return tuple((shares / shares.sum()).tolist())


def _solve(speeds: Array, num_peers: int) -> Array:
    """The linear programme, in the unknowns (f_1, ..., f_n, T)."""
    count = len(speeds)
    # (n - 2) f_i - b_i T <= -1. Members that only send are never the last: their time does not depend on the shares.
    bounds = np.hstack([(num_peers - 2) * np.eye(count), -speeds[:, None]])
    solution = linprog(
        c=[0.0] * count + [1.0],
        A_ub=bounds,
        b_ub=-np.ones(count),
        A_eq=[[1.0] * count + [0.0]],
        b_eq=[1.0],
        method="highs",
    )
    assert solution.success  # equal shares are always feasible
    shares: Array = np.clip(solution.x[:count], 0.0, 1.0)
    return shares


def split_by_shares(size: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers near size * share that add up to `size`, by the method of largest remainders.

    Zero shares stay zero. Every member computes the same from the same list.

    Raises:
      ValueError: `size` is negative, or no share is positive.
    """
    total = math.fsum(shares)
    if size < 0 or not total > 0 or min(shares) < 0:
        raise ValueError(f"expected a size and shares from 0 upwards, one of them above, got {size} and {shares}")
    exact = [size * share / total for share in shares]
    counts = [math.floor(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda member: (counts[member] - exact[member], member))
    for member in [each for each in by_remainder if shares[each] > 0][: size - sum(counts)]:
        counts[member] += 1
    return tuple(counts)
