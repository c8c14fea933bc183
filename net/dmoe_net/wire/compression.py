"""Tensors in fewer bytes, at the price of exactness: what travels, how far off it may be, and how it is computed.

Nothing is ever compressed unless it is wrapped in `Compressed`: gradients and activations bear the loss, parameters
may not. Only float32 is compressed. 16-bit tensors are short already, and whoever computes in float64 wants its digits.

    compression   bytes a value   largest error of a finite value
    float16       2               relative 2**-11 from 2**-14 (6.1e-5) to 65504, absolute 2**-25 below; beyond, +-65504
    bfloat16      2               relative 2**-8 from 2**-126 (1.2e-38) upwards, absolute 2**-134 below
    blockwise8    1.001           1/254 of the largest magnitude in its block of 4096, to within float32's rounding

NaN and infinity stay what they are in float16 and bfloat16; in blockwise8 they make the whole of their block NaN.
Compression must not hide a fault: receivers drop answers that are not finite, and an exploded gradient stays one.

Payloads. The casts: the values, little-endian. Blockwise: the tensor in C order is cut into blocks of `BLOCK_SIZE`, the
last may be shorter; first comes the largest magnitude of each block as float32, then an int8 from -127 to 127 for each
value, in units of 1/127 of that magnitude. So zeros, and the largest value of a block, come back exactly.

All work goes tile by tile: temporaries stay in the processor's cache, and their size does not depend on the tensor's.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from dmoe_net.errors import RemoteProtocolError
from dmoe_net.types import Array

BLOCK_SIZE = 4096
"""Values that share a scale, as in hivemind: the scales cost 0.1 %, and an outlier spoils no more than its block. (The
idea is that of Dettmers et al., "8-bit Optimizers via Block-wise Quantization"; the int8 scale here is linear.)"""

_TILE_BLOCKS = 64
_TILE_SIZE = _TILE_BLOCKS * BLOCK_SIZE
"""Values in 1 MiB of float32, which the second-level cache holds."""

_STEPS = 127.0
"""Steps of the int8 scale to either side of 0. Not 128: the scale is symmetric, and the largest value exact."""

_FLOAT32 = np.dtype("<f4")
_FLOAT32S = (_FLOAT32, np.dtype(">f4"))


class Compression(enum.StrEnum):
    """Form in which a tensor travels, by its name on the wire."""

    NONE = "none"  # as it is; for settings, never on the wire
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    BLOCKWISE_8BIT = "blockwise8"


COMPRESSIONS = {kind.value: kind for kind in Compression if kind is not Compression.NONE}
"""Compressions that a message may name, by name. `NONE` is said by saying nothing, so that one meaning has one form."""

_CASTS: dict[Compression, tuple[np.dtype[Any], float]] = {
    Compression.FLOAT16: (np.dtype("<f2"), 65504.0),
    Compression.BFLOAT16: (np.dtype(ml_dtypes.bfloat16), (2 - 2**-7) * 2.0**127),
}
"""Dtype that is sent, and its largest finite value."""


# Compared by identity: arrays have no single answer to `==`.
@dataclass(frozen=True, slots=True, eq=False)
class Compressed:
    """The wish that a tensor be sent compressed; the compressing itself happens when it is sent.

    Attributes:
      tensor: float32, of any shape. It must not be written to before the message has left.
      compression: any but `NONE`: a tensor that travels as it is needs no wrapping.
      payload: what travels, if it has been compressed already; `tensor` is then what the receiver gets. Made by
        `compressed_in_place`.
    """

    tensor: Array
    compression: Compression
    payload: memoryview | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.compression, Compression) or self.compression is Compression.NONE:
            raise ValueError(f"expected a compression among {', '.join(COMPRESSIONS)}, got {self.compression!r}")
        if not is_compressible(self.tensor):
            is_array = isinstance(self.tensor, np.ndarray)
            got = f"one of {self.tensor.dtype}" if is_array else f"a {type(self.tensor).__name__}"
            raise ValueError(f"expected a NumPy array of float32 to compress, got {got}")


def is_compressible(tensor: Array) -> bool:
    """Return True if `tensor` may be wrapped in `Compressed`: it is a NumPy array of float32, in either byte order."""
    return isinstance(tensor, np.ndarray) and tensor.dtype in _FLOAT32S


def encoded_nbytes(compression: Compression, size: int) -> int:
    """Bytes that a float32 tensor of `size` elements takes on the wire. Python integers: no overflow."""
    match compression:
        case Compression.NONE:
            return size * _FLOAT32.itemsize
        case Compression.FLOAT16 | Compression.BFLOAT16:
            return size * 2
        case Compression.BLOCKWISE_8BIT:
            return size + -(-size // BLOCK_SIZE) * _FLOAT32.itemsize


def encode(compressed: Compressed) -> memoryview:
    """The payload, in a fresh buffer of `encoded_nbytes` bytes, or the one that was made already.

    A tensor that is not C-contiguous or not in the machine's byte order is copied first.
    """
    if compressed.payload is not None:
        return compressed.payload
    values = np.ascontiguousarray(compressed.tensor, dtype=np.float32).reshape(-1)
    payload = np.empty(encoded_nbytes(compressed.compression, values.size), np.uint8)
    # NumPy would warn of infinities met on the way, which are the sender's to send.
    with np.errstate(all="ignore"):
        if compressed.compression is Compression.BLOCKWISE_8BIT:
            _encode_blocks(values, *_split(payload, values.size))
        else:
            dtype, limit = _CASTS[compressed.compression]
            _encode_cast(values, limit, payload.view(dtype))
    return payload.data


def compressed_in_place(values: Array, compression: Compression) -> Compressed:
    """Compress now what several receivers get, once for all of them, and leave in `values` what they will have.

    Args:
      values: float32, C-contiguous and writable; replaced by what the payload decodes to.
      compression: any but `NONE`.
    """
    payload = encode(Compressed(values, compression))
    decode_into_untrusted(payload, compression, values)
    return Compressed(values, compression, payload)


def decode_into_untrusted(payload: memoryview, compression: Compression, out: Array) -> None:
    """Write the decoded values to `out`. Every payload of the right length decodes to something.

    Args:
      payload: from the network. Scales may be NaN, infinite or negative; such blocks come out so, without a warning.
      compression: any but `NONE`.
      out: float32, C-contiguous and writable; its size says how many values to expect.

    Raises:
      RemoteProtocolError: `payload` does not have `encoded_nbytes` bytes.
    """
    expected = encoded_nbytes(compression, out.size)
    if payload.nbytes != expected:
        raise RemoteProtocolError(f"{out.size} values in {compression} take {expected} bytes, got {payload.nbytes}")
    assert out.dtype == np.float32
    assert out.flags.c_contiguous
    if not out.size:
        return
    values, received = out.reshape(-1), np.frombuffer(payload, np.uint8)
    with np.errstate(all="ignore"):
        if compression is Compression.BLOCKWISE_8BIT:
            _decode_blocks(*_split(received, values.size), values)
        else:
            np.copyto(values, received.view(_CASTS[compression][0]))


def _encode_cast(values: Array, limit: float, out: Array) -> None:
    for start in range(0, values.size, _TILE_SIZE):
        tile = values[start : start + _TILE_SIZE]
        # Rarely entered: on beyond the limit (the cast would make that infinite: in float16 from 65520 on, in bfloat16
        # the last 0.2 % of float32's range), and on NaN, which compares as false.
        if not (tile.max() <= limit and tile.min() >= -limit):
            clipped = np.clip(tile, -limit, limit)
            np.copyto(clipped, tile, where=np.isinf(tile))
            tile = clipped
        np.copyto(out[start : start + _TILE_SIZE], tile, casting="unsafe")


def _encode_blocks(values: Array, scales: Array, steps: Array) -> None:
    scratch = np.empty(min(values.size, _TILE_SIZE), np.float32)
    for blocks, elements in _tiles(values.size):
        tile = values[elements].reshape(blocks.stop - blocks.start, -1)
        scaled = scratch[: tile.size].reshape(tile.shape)
        largest = np.abs(tile, out=scaled).max(axis=1)
        is_faulty = ~np.isfinite(largest)
        largest[is_faulty] = np.nan
        scales[blocks] = largest
        # Divided by the magnitude first, which is exact at the magnitude itself; 127 / largest, multiplied once, would
        # save a pass but be infinite for a block of subnormal numbers.
        np.divide(tile, np.where(largest > 0, largest, 1)[:, np.newaxis], out=scaled)
        np.multiply(scaled, _STEPS, out=scaled)
        np.rint(scaled, out=scaled)
        scaled[is_faulty] = 0  # which integer NaN becomes depends on the processor
        np.copyto(steps[elements].reshape(tile.shape), scaled, casting="unsafe")


def _decode_blocks(scales: Array, steps: Array, out: Array) -> None:
    for blocks, elements in _tiles(out.size):
        tile = out[elements].reshape(blocks.stop - blocks.start, -1)
        np.copyto(tile, steps[elements].reshape(tile.shape))
        # In this order nothing exceeds the scale; scale / 127 first might round up, and overflow at float32's end.
        np.divide(tile, _STEPS, out=tile)
        np.multiply(tile, scales[blocks, np.newaxis], out=tile)


def _split(payload: Array, size: int) -> tuple[Array, Array]:
    """Views of the scales and of the int8 values in a blockwise payload of `size` values."""
    end = payload.size - size
    return payload[:end].view(_FLOAT32), payload[end:].view(np.int8)


def _tiles(size: int) -> Iterator[tuple[slice, slice]]:
    """The blocks and the elements of each tile: up to `_TILE_BLOCKS` whole blocks, at last the short one alone."""
    num_whole = size // BLOCK_SIZE
    for first in range(0, num_whole, _TILE_BLOCKS):
        last = min(first + _TILE_BLOCKS, num_whole)
        yield slice(first, last), slice(first * BLOCK_SIZE, last * BLOCK_SIZE)
    if size % BLOCK_SIZE:
        yield slice(num_whole, num_whole + 1), slice(num_whole * BLOCK_SIZE, size)
