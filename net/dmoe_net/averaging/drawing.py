"""The draw of the numbers that a group averages, where it averages a few only (SPARTA, Beton et al. 2025).

They follow from the id of the group, which its leader has drawn: all members know it, no index travels, and every group
averages others, whatever step its peers are at. The vector is cut into as many stretches of equal length as there are
numbers to draw, and one is drawn from each: none twice, each with the same chance, up to the rounding of the lengths.
"""

import hashlib
import math

import numpy as np

from dmoe_net.types import Array


def drawn_size(size: int, share: float) -> int:
    """Number of numbers in a share of `size`, above 0 and at most 1: at least 1."""
    if not 0 < share <= 1:
        raise ValueError(f"the share of the numbers that are averaged is above 0 and at most 1, got {share}")
    return min(size, max(1, math.ceil(share * size)))


def drawn_places(group_id: bytes, size: int, count: int) -> Array:
    """The places of `count` of `size` numbers, int64 [count], ascending: the same for all members of the group."""
    starts = np.arange(count + 1, dtype=np.uint64) * np.uint64(size) // np.uint64(count)
    # The raw numbers of a bit generator are the same in all versions of NumPy; what `Generator` makes of them is not.
    key = int.from_bytes(hashlib.sha256(b"averaged places\n" + group_id).digest()[:16], "little")
    chance = np.random.Philox(key=key).random_raw(count)
    return (starts[:-1] + chance % (starts[1:] - starts[:-1])).astype(np.int64)


def put_back(vector: Array, places: Array, numbers: Array) -> Array:
    """A copy of the vector with other numbers at these places."""
    whole = vector.copy()
    whole[places] = numbers
    return whole
