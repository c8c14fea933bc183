"""Tensors as raw buffers: a small table in the header, the bytes in the body, no copies on either side.

Body layout: each tensor's elements in C order, little-endian, at the next multiple of 64 bytes (`ALIGNMENT`); the
gaps are zero and there is none after the last. Offsets follow from the table, so they are not sent: what can be
computed cannot be forged. A body is received into one fresh buffer that starts on a multiple of 64 as well, which
makes every tensor in it aligned, and XLA's CPU client then takes it without a copy.

The only module of `net.wire` that imports NumPy.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from net.errors import LocalProtocolError, RemoteProtocolError

Tensor = np.ndarray[Any, np.dtype[Any]]
"""A NumPy array of one of the dtypes of `DTYPES`."""

ALIGNMENT = 64
"""Bytes. XLA's CPU client aliases host buffers with this alignment and copies all others."""

MAX_TENSORS = 64
"""Per message. Calls here carry a handful; an expert's whole state has a few dozen."""

MAX_RANK = 8
"""NumPy would take 64, but nothing here has more than five dimensions."""

MAX_TENSOR_BYTES = 2**40
"""Where a table stops being believable. Sums stay far inside 64 bits; `frames` sets the real limit."""

DTYPES: dict[str, np.dtype[Any]] = {
    "bool": np.dtype(np.bool_),
    "int8": np.dtype(np.int8),
    "int16": np.dtype("<i2"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "uint8": np.dtype(np.uint8),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
    "uint64": np.dtype("<u8"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""What may travel, by its name on the wire. A constant: nobody writes to it."""

_BYTE_GAPS = tuple(bytes(size) for size in range(ALIGNMENT))


def aligned_buffer(nbytes: int) -> memoryview:
    """A fresh, writable buffer of `nbytes` bytes that starts on a multiple of `ALIGNMENT`.

    Its pages are not touched: above a few hundred KiB they cost no memory before something is written there, so a
    peer that announces 256 MiB and sends nothing costs address space only.
    """
    raw = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw.data[start : start + nbytes]


def describe(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """The table that travels in the header: `[dtype name, [dim, ...]]` for each tensor.

    Raises:
      LocalProtocolError: too many tensors, too many dimensions, a dtype outside `DTYPES`, or not an array at
        all (a JAX array is turned into a NumPy one above `net`).
    """
    if len(tensors) > MAX_TENSORS:
        raise LocalProtocolError(f"{len(tensors)} tensors, a message carries at most {MAX_TENSORS}")
    return [_describe_one(tensor) for tensor in tensors]


def buffers_of(tensors: Sequence[Tensor]) -> tuple[bytes | memoryview, ...]:
    """The body as a sequence of byte buffers, gaps included; they alias the tensors unless a copy is unavoidable.

    A copy is made of a tensor that is not C-contiguous or not little-endian. The others must not be written to until
    the message has left.
    """
    buffers: list[bytes | memoryview] = []
    end = 0
    for tensor in tensors:
        if tensor.nbytes == 0:
            continue
        gap = -end % ALIGNMENT
        if gap:
            buffers.append(_BYTE_GAPS[gap])
        buffers.append(_bytes_of(tensor))
        end += gap + tensor.nbytes
    return tuple(buffers)


def body_nbytes_untrusted(table: Any) -> int:
    """Length in bytes of the body that `table` describes. Allocates nothing.

    Raises:
      RemoteProtocolError: the table is malformed, or the total is beyond `MAX_TENSOR_BYTES`.
    """
    end = 0
    for _, _, start, nbytes in _layout_untrusted(table):
        end = start + nbytes
    return end


def view_untrusted(table: Any, body: memoryview) -> tuple[Tensor, ...]:
    """Read-only arrays that view `body`, one for each row of `table`; no copy.

    Args:
      table: what `describe` made, after its journey.
      body: the bytes, best in an `aligned_buffer`. Nobody may write to them again: JAX may alias the arrays.

    Raises:
      RemoteProtocolError: the table is malformed or does not describe exactly `body.nbytes` bytes.
    """
    described = body_nbytes_untrusted(table)
    if described != body.nbytes:
        raise RemoteProtocolError(f"tensor table describes {described} bytes, body has {body.nbytes}")
    frozen = body.toreadonly()
    return tuple(
        np.ndarray(shape, dtype, buffer=frozen, offset=start) if nbytes else _empty(shape, dtype)
        for dtype, shape, start, nbytes in _layout_untrusted(table)
    )


def _describe_one(tensor: Tensor) -> list[Any]:
    if not isinstance(tensor, np.ndarray):
        raise LocalProtocolError(f"a tensor is a NumPy array, got {type(tensor).__name__}")
    if DTYPES.get(tensor.dtype.name) != tensor.dtype.newbyteorder("<"):
        raise LocalProtocolError(f"dtype {tensor.dtype} cannot be sent; these can: {', '.join(DTYPES)}")
    if tensor.ndim > MAX_RANK:
        raise LocalProtocolError(f"tensor of rank {tensor.ndim}, at most {MAX_RANK} dimensions are allowed")
    return [tensor.dtype.name, list(tensor.shape)]


def _bytes_of(tensor: Tensor) -> memoryview:
    little = np.ascontiguousarray(tensor, dtype=DTYPES[tensor.dtype.name])
    # Through uint8, since the buffer protocol knows no bfloat16. `reshape` is a view: the array is contiguous.
    return little.reshape(-1).view(np.uint8).data


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
    """A tensor without elements views nothing: NumPy refuses an offset at the very end of a buffer."""
    empty = np.empty(shape, dtype)
    empty.flags.writeable = False
    return empty


def _layout_untrusted(table: Any) -> Iterator[tuple[np.dtype[Any], tuple[int, ...], int, int]]:
    """(dtype, shape, first byte, number of bytes) of each tensor."""
    if type(table) is not list or len(table) > MAX_TENSORS:
        raise RemoteProtocolError(f"tensor table must be a list of at most {MAX_TENSORS} rows")
    end = 0
    for row in table:
        dtype, shape = _row_untrusted(row)
        nbytes = math.prod(shape) * dtype.itemsize  # Python integers: no overflow
        start = end + -end % ALIGNMENT if nbytes else end
        end = start + nbytes
        if end > MAX_TENSOR_BYTES:
            raise RemoteProtocolError(f"tensor table describes more than {MAX_TENSOR_BYTES} bytes")
        yield dtype, shape, start, nbytes


def _row_untrusted(row: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    if type(row) is not list or len(row) != 2 or type(row[0]) is not str or type(row[1]) is not list:
        raise RemoteProtocolError("a row of the tensor table must be [dtype, [dim, ...]]")
    name, shape = row
    if name not in DTYPES:
        raise RemoteProtocolError(f"unknown dtype {name[:32]!r}")
    if len(shape) > MAX_RANK:
        raise RemoteProtocolError(f"tensor of rank {len(shape)}, at most {MAX_RANK} dimensions are allowed")
    for dim in shape:
        # The bound holds for each dimension too, or [2**62, 0] would pass with its product of zero.
        if type(dim) is not int or not 0 <= dim <= MAX_TENSOR_BYTES:
            raise RemoteProtocolError(f"a dimension must be an integer from 0 to {MAX_TENSOR_BYTES}")
    return DTYPES[name], tuple(shape)
