"""Sparse vectors in few bytes: the largest values of each block, two or four bits a value, one scale a block.

This is what a compressor with error feedback sends (`dmoe_jax.optim.compression`; SparseLoCo, arXiv 2508.15706): of
each block of 4096 values the 64 largest, quantised. The compressor chooses and rounds; this module only packs, so that
both ends hold exactly the same numbers.

Format. A payload is `HEADER_BYTES` of header and then one row for each block. The header is `44 53` ("DS"), the
version 1, the bits of a value, then block size - 1 and kept - 1 as unsigned 16-bit integers. The vector consists of
segments (the arrays of a model, in order) whose sizes both ends know; each is cut into blocks of its own, the last of
them may be shorter, and a block of n values has room for k = ceil(n * kept / block_size). A row is, all little-endian:

    scale     float32, at least 0
    high      k + ((n - 1) >> l) bits, where l = floor(log2(n / k)): see below
    low       k times l bits
    codes     k times 2 or 4 bits

each of the last three filled up with zero bits to whole bytes, bits in the order from least to most significant. The
indices are in the code of Elias and Fano: index i, the j-th of the block in rising order, has its l lowest bits in
place j of `low`, and bit (i >> l) + j of `high` is set. So the bits that are set say how many values there are, which
may be fewer than k; places of `low` and `codes` that are left over are zero. A code is magnitude - 2, and its highest
bit is set for negative values; a value is magnitude * scale, with magnitudes 2 and 3 for two bits, 2 to 9 for four. (No
magnitude is near 0: what is worth an index is large.) The scale is 0 just when there are no values. So a content has
one form, the length is known beforehand, and a whole block of 4096 with 64 values of 2 bits takes 4 + 16 + 48 + 16 = 84
bytes, 195 times less than float32. Twelve bits an index would take 116 bytes; the logarithm of the number of ways to
choose 64 of 4096 is 59 bytes, where this has 64.

How m members average. The mean of m sparse vectors has up to m times as many values and no longer a common scale, so
answers of an all-reduce would be larger than what was asked: with 64 of 4096 and m = 8, each of two places that hold
values hold different ones in most cases, and 512 indices (320 bytes) with 8 bits a value take 836 bytes a block where
float32 takes 16,384. An all-gather costs less up to about ten members: everybody sends its payload to the m - 1 others,
receives m - 1, and computes `mean_of_sparse` itself, in the order of the group's list, so that all hold the same bits.
`all_gather_nbytes` and `all_reduce_nbytes` say what leaves (and reaches) a member of either. In larger swarms small
groups, as Moshpit's, keep m small.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dmoe_net.errors import RemoteProtocolError
from dmoe_net.types import Array

LEAST_LEVEL = 2
"""The smallest magnitude in units of the scale. Kept values lie between a threshold and the block's largest, mostly
near the threshold: for normal values from 2.4 to 3.6 standard deviations. Two levels in the ratio 2 : 3 fit that better
than 1 : 2."""

MAX_BLOCK_SIZE = 2**16
"""So that block size and kept fit into 16 bits."""

MAX_SEGMENTS = 2**16
"""Arrays of a model; the largest have some thousand."""

MAX_VALUES = 2**40
"""As `tensors.MAX_TENSOR_BYTES`: where sizes stop being believable."""

_HEADER = struct.Struct("<2sBBHH")
_MAGIC, _VERSION = b"DS", 1
HEADER_BYTES = _HEADER.size
"""Eight."""

_TILE_BLOCKS = 256
"""Blocks that are worked on together: temporaries are some MiB, whatever the vector's size."""

_SCALE_BYTES = 4
_FLOAT32 = np.dtype("<f4")


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseCoding:
    """Settings of sparse vectors: how much of a vector is kept, and in how many bits. The same at all peers of a run.

    Attributes:
      block_size: values that share a scale, 1 to 65,536.
      kept: how many of a whole block are kept, 1 to `block_size`.
      bits: of a kept value, with its sign: 2 or 4.

    Raises:
      ValueError: one of them is something else.
    """

    block_size: int = 4096
    kept: int = 64
    bits: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise ValueError(f"block_size must be from 1 to {MAX_BLOCK_SIZE}, got {self.block_size}")
        if not 1 <= self.kept <= self.block_size:
            raise ValueError(f"kept must be from 1 to the block size {self.block_size}, got {self.kept}")
        if self.bits not in (2, 4):
            raise ValueError(f"bits must be 2 or 4, got {self.bits}")

    @property
    def greatest_level(self) -> int:
        """The largest magnitude in units of the scale: 3 or 9."""
        return LEAST_LEVEL + (1 << (self.bits - 1)) - 1

    def blocks(self, size: int) -> Iterator["BlockGroup"]:
        """The blocks of a segment of `size` values: the whole ones together, then the short one, if there are such."""
        count, rest = divmod(size, self.block_size)
        if count:
            yield BlockGroup(0, count, self.block_size, self.kept)
        if rest:
            yield BlockGroup(size - rest, 1, rest, -(-rest * self.kept // self.block_size))


class BlockGroup(NamedTuple):
    """Blocks of one length, side by side.

    Attributes:
      start: of the first, in its segment.
      num_blocks: how many.
      length: values of each.
      kept: the most that may be sent of each.
    """

    start: int
    num_blocks: int
    length: int
    kept: int


class SparseBlocks(NamedTuple):
    """Kept values of a `BlockGroup`. NumPy arrays here; `dmoe_jax` has JAX arrays in it.

    Attributes:
      indices: int [num_blocks, kept], each within its block.
      levels: int8 [num_blocks, kept], the values in units of the scale; 0 where there is none, whatever its index.
      scales: float32 [num_blocks].
    """

    indices: Any
    levels: Any
    scales: Any


# Compared by identity: arrays have no single answer to `==`.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SparseVector:
    """A vector of several segments of which few values are not zero.

    Attributes:
      coding: how it is cut and packed.
      sizes: values in each segment.
      parts: for each segment, for each of its `coding.blocks(size)`, in order.
    """

    coding: SparseCoding
    sizes: tuple[int, ...]
    parts: tuple[SparseBlocks, ...]


def sparse_nbytes(coding: SparseCoding, sizes: Sequence[int]) -> int:
    """Bytes of a payload for segments of these sizes. Python integers: no overflow."""
    groups = (group for size in sizes for group in coding.blocks(size))
    return HEADER_BYTES + sum(group.num_blocks * _Row.of(group, coding).nbytes for group in groups)


def all_gather_nbytes(coding: SparseCoding, sizes: Sequence[int], members: int) -> int:
    """Bytes that leave, and reach, each of `members` when all send their payloads to all."""
    return (members - 1) * sparse_nbytes(coding, sizes)


def all_reduce_nbytes(size: int, members: int) -> int:
    """Bytes that leave, and reach, each of `members` when a float32 vector of `size` values is reduced in equal parts.

    Everybody sends the others their parts, and its own part's mean to the others: 2 (m - 1) / m vectors.
    """
    return round(2 * (members - 1) / members * size * _FLOAT32.itemsize)


def encode_sparse(vector: SparseVector) -> memoryview:
    """The payload, in a fresh buffer of `sparse_nbytes` bytes. Entries may stand in any order within a block.

    Raises:
      ValueError: the vector is not one of its coding (shapes, an index outside its block or twice, a level that two or
        four bits cannot hold), or a scale is not finite. Nothing is sent of a vector that has a fault.
    """
    groups = [group for size in _checked_sizes(vector.sizes) for group in vector.coding.blocks(size)]
    if len(groups) != len(vector.parts):
        raise ValueError(f"segments of sizes {vector.sizes} have {len(groups)} parts, got {len(vector.parts)}")
    payload = np.zeros(sparse_nbytes(vector.coding, vector.sizes), np.uint8)
    payload[:HEADER_BYTES] = np.frombuffer(_header(vector.coding), np.uint8)
    place = HEADER_BYTES
    for group, part in zip(groups, vector.parts, strict=True):
        part = _checked_shapes(group, part)
        row = _Row.of(group, vector.coding)
        rows = payload[place : place + group.num_blocks * row.nbytes].reshape(group.num_blocks, row.nbytes)
        for tile in _tiles(group.num_blocks):
            _encode_blocks(SparseBlocks(*(each[tile] for each in part)), rows[tile], group, vector.coding)
        place += rows.size
    return payload.data


def parse_sparse_untrusted(payload: memoryview, coding: SparseCoding, sizes: Sequence[int]) -> SparseVector:
    """Read what a peer sent. Memory is taken only once the length is right: five bytes for each value that may be
    kept and four for each block, and some MiB for the work.

    Args:
      payload: from the network.
      coding: what this peer expects; no other is accepted.
      sizes: the segments that this peer expects.

    Returns: a vector that `encode_sparse` turns into the very same bytes. Its indices rise within each block, and
      entries that are absent come last, with index and level 0.

    Raises:
      RemoteProtocolError: it is anything but a payload of this coding and these sizes, in its one form.
    """
    expected = sparse_nbytes(coding, sizes)
    if payload.nbytes != expected:
        raise RemoteProtocolError(
            f"a sparse vector of {sum(sizes)} values takes {expected} bytes, got {payload.nbytes}"
        )
    received = np.frombuffer(payload, np.uint8)
    header = received[:HEADER_BYTES].tobytes()
    if header != _header(coding):
        raise RemoteProtocolError(f"the head of a sparse vector must be {_header(coding).hex()}, got {header.hex()}")
    parts, place = [], HEADER_BYTES
    for size in sizes:
        for group in coding.blocks(size):
            row = _Row.of(group, coding)
            rows = received[place : place + group.num_blocks * row.nbytes].reshape(group.num_blocks, row.nbytes)
            part = _empty_part(group)
            for tile in _tiles(group.num_blocks):
                for whole, some in zip(part, _parse_blocks_untrusted(rows[tile], group, coding), strict=True):
                    whole[tile] = some
            parts.append(part)
            place += rows.size
    return SparseVector(coding=coding, sizes=tuple(sizes), parts=tuple(parts))


def to_dense(vector: SparseVector) -> Array:
    """All its values, float32 [sum of sizes], zeros included."""
    return mean_of_sparse([vector], [1.0])


def mean_of_sparse(vectors: Sequence[SparseVector], weights: Sequence[float]) -> Array:
    """The weighted mean of what the members of a group sent, sum_i w_i v_i / sum_i w_i, as a dense vector.

    It is computed in float64 in the order of the vectors, and rounded once: members that agree on the order hold the
    same bits.

    Args:
      vectors: at least one, all of one coding and of the same sizes; a member's own is one of them.
      weights: one for each, finite and at least 0, for instance samples; not all 0.

    Returns: float32 [sum of sizes].

    Raises:
      ValueError: the vectors or the weights are not so.
    """
    total = sum(weights)
    if not vectors or len(vectors) != len(weights):
        raise ValueError(f"expected a weight for each of at least one vector, got {len(vectors)} and {len(weights)}")
    if not all(weight >= 0 for weight in weights) or not 0 < total < float("inf"):
        raise ValueError(f"weights must be finite, at least 0 and not all 0, got {list(weights)}")
    coding, sizes = vectors[0].coding, vectors[0].sizes
    for vector in vectors:
        if (vector.coding, vector.sizes) != (coding, sizes):
            raise ValueError(f"vectors differ: {coding} of {sizes}, and {vector.coding} of {vector.sizes}")
    means = np.empty(sum(sizes), np.float32)
    starts = np.cumsum([0, *sizes]).tolist()
    groups = [(start, group) for start, size in zip(starts, sizes, strict=False) for group in coding.blocks(size)]
    for number, (start, group) in enumerate(groups):
        first = start + group.start
        out = means[first : first + group.num_blocks * group.length].reshape(group.num_blocks, group.length)
        for tile in _tiles(group.num_blocks):
            sums = np.zeros(out[tile].shape, np.float64)
            for vector, weight in zip(vectors, weights, strict=True):
                indices, levels, scales = (np.asarray(each[tile]) for each in vector.parts[number])
                rows, places = np.nonzero(levels)
                # Rounded to float32 first: that is the number which the sender holds, and takes off its residual.
                values = levels[rows, places].astype(np.float32) * scales[rows]
                # No index comes twice in a vector, so this adds each value once.
                sums[rows, indices[rows, places]] += weight / total * values.astype(np.float64)
            out[tile] = sums
    return means


class _Row(NamedTuple):
    """Numbers of bits and bytes in the parts of a block's row."""

    low_bits: int
    high_bits: int
    high_bytes: int
    low_bytes: int
    code_bytes: int

    @classmethod
    def of(cls, group: BlockGroup, coding: SparseCoding) -> "_Row":
        low_bits = (group.length // group.kept).bit_length() - 1
        high_bits = group.kept + ((group.length - 1) >> low_bits)
        bits = high_bits, group.kept * low_bits, group.kept * coding.bits
        return cls(low_bits, high_bits, *(-(-each // 8) for each in bits))

    @property
    def nbytes(self) -> int:
        return _SCALE_BYTES + self.high_bytes + self.low_bytes + self.code_bytes

    def cut(self, rows: Array) -> tuple[Array, Array, Array, Array]:
        """Views of scales, high, low and codes in rows uint8 [count, nbytes]."""
        ends = np.cumsum([_SCALE_BYTES, self.high_bytes, self.low_bytes]).tolist()
        scales, high, low, codes = np.split(rows, ends, axis=1)
        return scales, high, low, codes


def _header(coding: SparseCoding) -> bytes:
    return _HEADER.pack(_MAGIC, _VERSION, coding.bits, coding.block_size - 1, coding.kept - 1)


def _checked_sizes(sizes: Sequence[int]) -> Sequence[int]:
    if len(sizes) > MAX_SEGMENTS or sum(sizes) > MAX_VALUES or not all(size >= 0 for size in sizes):
        raise ValueError(f"expected up to {MAX_SEGMENTS} sizes of {MAX_VALUES} values in all, got {sizes!r:.80}")
    return sizes


def _tiles(count: int) -> Iterator[slice]:
    return (slice(first, min(first + _TILE_BLOCKS, count)) for first in range(0, count, _TILE_BLOCKS))


def _empty_part(group: BlockGroup) -> SparseBlocks:
    shape = (group.num_blocks, group.kept)
    return SparseBlocks(np.empty(shape, np.int32), np.empty(shape, np.int8), np.empty(group.num_blocks, np.float32))


def _checked_shapes(group: BlockGroup, part: SparseBlocks) -> SparseBlocks:
    """The part in NumPy arrays."""
    indices, levels, scales = (np.asarray(each) for each in part)
    shape = (group.num_blocks, group.kept)
    if (indices.shape, levels.shape, scales.shape) != (shape, shape, shape[:1]):
        raise ValueError(f"expected indices and levels {shape}, got {indices.shape}, {levels.shape}, {scales.shape}")
    return SparseBlocks(indices, levels, scales)


def _checked_levels(levels: Array, scales: Array, coding: SparseCoding) -> Array:
    """The levels as int64, 0 where the scale makes them nothing."""
    with np.errstate(all="ignore"):
        is_finite = np.isfinite(scales * np.float32(coding.greatest_level))
    if not (is_finite & (scales >= 0)).all():
        raise ValueError(f"scales must be finite and at least 0, got {scales.min()} to {scales.max()}")
    levels = np.where(scales[:, np.newaxis] > 0, levels, 0).astype(np.int64)
    magnitudes = np.abs(levels)
    if not ((levels == 0) | ((magnitudes >= LEAST_LEVEL) & (magnitudes <= coding.greatest_level))).all():
        bounds = f"{LEAST_LEVEL} to {coding.greatest_level}"
        raise ValueError(f"levels must be 0 or of magnitude {bounds}, got {levels.min()} to {levels.max()}")
    return levels


def _encode_blocks(part: SparseBlocks, rows: Array, group: BlockGroup, coding: SparseCoding) -> None:
    """Write to rows, uint8 [some blocks, bytes of a row], all zero before."""
    indices, scales = part.indices, part.scales.astype(_FLOAT32)
    levels = _checked_levels(part.levels, scales, coding)
    is_there = levels != 0
    # Absent ones last: their places are then the zeros that the format wants.
    order = np.argsort(np.where(is_there, indices, group.length), axis=1, kind="stable")
    indices, levels, is_there = (np.take_along_axis(each, order, axis=1) for each in (indices, levels, is_there))
    blocks, places = np.nonzero(is_there)
    found = indices[blocks, places].astype(np.int64)
    same_block = np.diff(blocks) == 0
    if ((found < 0) | (found >= group.length)).any() or (same_block & (np.diff(found) <= 0)).any():
        raise ValueError(f"indices must differ within a block, and be from 0 to {group.length - 1}")

    row = _Row.of(group, coding)
    scale_bytes, high, low, codes = row.cut(rows)
    scale_bytes[:] = np.where(is_there.any(axis=1), scales, 0).astype(_FLOAT32)[:, np.newaxis].view(np.uint8)
    bitmap = np.zeros((len(rows), row.high_bits), np.uint8)
    bitmap[blocks, (found >> row.low_bits) + places] = 1
    high[:] = np.packbits(bitmap, axis=1, bitorder="little")
    low[:] = _pack(np.where(is_there, indices, 0) & ((1 << row.low_bits) - 1), row.low_bits)
    code = np.abs(levels) - LEAST_LEVEL + ((levels < 0) << (coding.bits - 1))
    codes[:] = _pack(np.where(is_there, code, 0), coding.bits)


def _parse_blocks_untrusted(rows: Array, group: BlockGroup, coding: SparseCoding) -> SparseBlocks:
    """Read rows uint8 [some blocks, bytes of a row] of any content."""
    row = _Row.of(group, coding)
    scale_bytes, high, low, codes = row.cut(rows)
    scales = np.ascontiguousarray(scale_bytes).view(_FLOAT32)[:, 0].astype(np.float32)
    bitmap = np.unpackbits(high, axis=1, bitorder="little")
    counts = bitmap.sum(axis=1, dtype=np.int64)
    with np.errstate(all="ignore"):
        is_finite = np.isfinite(scales * np.float32(coding.greatest_level))
    _require(not bitmap[:, row.high_bits :].any(), "bits set behind the indices of a block")
    _require((counts <= group.kept).all(), f"more than {group.kept} values in a block")
    _require(is_finite.all() and not np.signbit(scales).any(), "a scale that is negative or not finite")
    _require(((scales == 0) == (counts == 0)).all(), "a scale of 0 for values, or another for none")

    blocks, bits = np.nonzero(bitmap)
    places = np.arange(len(blocks)) - (np.cumsum(counts) - counts)[blocks]
    is_there = np.arange(group.kept) < counts[:, np.newaxis]
    lows = _unpack(low, row.low_bits, group.kept)
    code = _unpack(codes, coding.bits, group.kept)
    found = ((bits - places) << row.low_bits) | lows[blocks, places]
    _require((found < group.length).all(), f"an index outside a block of {group.length}")
    _require(not ((np.diff(blocks) == 0) & (np.diff(found) <= 0)).any(), "indices that do not rise")
    _require(not lows[~is_there].any() and not code[~is_there].any(), "a place that is left over and not zero")

    indices = np.zeros((len(rows), group.kept), np.int32)
    indices[blocks, places] = found
    sign = 1 << (coding.bits - 1)
    levels = ((code & (sign - 1)) + LEAST_LEVEL) * np.where(code & sign, -1, 1)
    return SparseBlocks(indices, np.where(is_there, levels, 0).astype(np.int8), scales)


def _require(is_so: Any, fault: str) -> None:
    if not is_so:
        raise RemoteProtocolError(f"a sparse vector with {fault}")


def _pack(numbers: Array, width: int) -> Array:
    """Integers [rows, n] below 2**width as uint8 [rows, bytes], least significant bits first."""
    bits = (numbers[:, :, np.newaxis] >> np.arange(width)) & 1
    return np.packbits(bits.astype(np.uint8).reshape(len(numbers), -1), axis=1, bitorder="little")


def _unpack(packed: Array, width: int, count: int) -> Array:
    """The integers, int32 [rows, count]. Raises `RemoteProtocolError` if the bits that fill the bytes are not zero."""
    bits = np.unpackbits(packed, axis=1, bitorder="little")
    _require(not bits[:, count * width :].any(), "bits set behind the values of a block")
    bits = bits[:, : count * width].reshape(len(packed), count, width).astype(np.int32)
    numbers: Array = (bits << np.arange(width, dtype=np.int32)).sum(axis=2, dtype=np.int32)
    return numbers
