"""What is averaged: every member's vector, and what must come out."""

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from net.averaging.reduction.reducer import mean_into

_TILE_SIZE = 2**20

Vector = npt.NDArray[np.float32]


def vector_of(index: int, size: int, seed: int) -> Vector:
    """float32 [size], uniform in [0, 1), of the member with this number."""
    vector = np.empty(size, np.float32)
    np.random.default_rng((seed, index)).random(dtype=np.float32, out=vector)
    return vector


def digest_of(vector: Vector) -> str:
    """By which two averages are told apart, in hexadecimal."""
    return hashlib.blake2b(vector.data, digest_size=16).hexdigest()


def expected_digest(num_members: int, size: int, seed: int) -> str:
    """Of the mean of all members' vectors, summed in member order: what everybody must get, to the last bit."""
    digest = hashlib.blake2b(digest_size=16)
    for tiles in zip(*(_tiles(index, size, seed) for index in range(num_members)), strict=True):
        mean = np.empty(tiles[0].size, np.float32)
        mean_into(mean, tiles, [1.0] * num_members)
        digest.update(mean.data)
    return digest.hexdigest()


def _tiles(index: int, size: int, seed: int) -> Iterator[Vector]:
    """A vector piece by piece: all members' vectors at once would not fit everywhere."""
    rng = np.random.default_rng((seed, index))
    for start in range(0, size, _TILE_SIZE):
        yield rng.random(min(_TILE_SIZE, size - start), dtype=np.float32)
