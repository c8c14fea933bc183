"""Tensors as raw buffers: a small table in the header, the bytes in the body, no copies on either side.

Body layout: each tensor's elements in C order, little-endian, at the next multiple of 64 bytes (`ALIGNMENT`); the
gaps are zero and there is none after the last. Offsets follow from the table, so they are not sent: what can be
computed cannot be forged. A body is received into one fresh buffer that starts on a multiple of 64 as well, which
makes every tensor in it aligned, and XLA's CPU client then takes it without a copy.

A tensor that its sender wrapped in `Compressed` travels as the payload of `dmoe_net.wire.compression` in the same
place; its row names the compression after the dtype and shape, which are those of the decoded tensor. It is decoded
into a fresh aligned buffer of its own, so that a receiver cannot tell the difference but by the values.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from dmoe_net.errors import LocalProtocolError, RemoteProtocolError
from dmoe_net.wire.compression import (
    COMPRESSIONS,
    Compressed,
    Compression,
    decode_into_untrusted,
    encode,
    encoded_nbytes,
    is_compressible,
)

Tensor = np.ndarray[Any, np.dtype[Any]]
"""A NumPy array of one of the dtypes of `DTYPES`."""

Outgoing = Tensor | Compressed
"""A tensor that can be sent: as it is, or wrapped, so that it may lose exactness to save bytes."""

ALIGNMENT = 64
"""Bytes. XLA's CPU client aliases host buffers with this alignment and copies all others."""

MAX_TENSORS = 64
"""Per message. Calls here carry a handful; an expert's whole state has a few dozen."""

MAX_RANK = 8
"""NumPy would take 64, but nothing here has more than five dimensions."""

MAX_TENSOR_BYTES = 2**40
"""Bytes and extents above which no table is believed. Sums stay far inside 64 bits; `frames` sets the real limit."""

MAX_DECODED_BYTES = 256 * 2**20
"""Most bytes of all compressed tensors of a message together, once decoded: twice as many as a frame's body has.
Without it, 8-bit tensors would make four bytes of each that a peer sends."""

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
"""Dtypes that may travel, by their names on the wire. A constant: nobody writes to it."""

_NAMES = {each: name for name, dtype in DTYPES.items() for each in (dtype.newbyteorder("<"), dtype.newbyteorder(">"))}
"""The names again, by dtype in either byte order: NumPy takes ten calls to make one."""

_BYTE_GAPS = tuple(bytes(size) for size in range(ALIGNMENT))


def name_of(dtype: np.dtype[Any]) -> str | None:
    """The name of a dtype on the wire, whatever its byte order; None: it cannot travel."""
    return _NAMES.get(dtype)


def aligned_buffer(nbytes: int) -> memoryview:
    """A fresh, writable buffer of `nbytes` bytes that starts on a multiple of `ALIGNMENT`.

    Its pages are not touched: above a few hundred KiB they cost no memory before something is written there, so a
    peer that announces 256 MiB and sends nothing costs address space only.
    """
    raw = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT  # `raw.ctypes` takes longer
    return raw.data[start : start + nbytes]


def plain(outgoing: Outgoing) -> Tensor:
    """The tensor itself, whichever way it is to travel."""
    return outgoing.tensor if isinstance(outgoing, Compressed) else outgoing


def as_outgoing(tensor: Tensor, compression: Compression) -> Outgoing:
    """`tensor` wrapped so as to travel compressed if it can be; itself if it cannot (not float32) or need not be.

    For activations and gradients, whose integer and boolean companions travel exactly. Not for parameters.
    """
    if compression is Compression.NONE or not is_compressible(tensor):
        return tensor
    return Compressed(tensor, compression)


def as_received(outgoing: Outgoing) -> Tensor:
    """`outgoing` as its receiver gets it: read-only, C-contiguous, little-endian, compression's losses included.

    For networks that hand over tensors and no bytes. Nothing is copied if the tensor is all that already.

    Raises:
      LocalProtocolError: it cannot be sent.
    """
    _describe_one(outgoing)
    tensor = plain(outgoing)
    dtype, flags = DTYPES[_NAMES[tensor.dtype]], tensor.flags
    is_plain = not isinstance(outgoing, Compressed)
    if is_plain and tensor.dtype == dtype and flags.c_contiguous and _is_frozen(tensor):
        return tensor
    if not tensor.size:
        return _empty(tensor.shape, dtype)
    buffer = aligned_buffer(tensor.nbytes)
    received = np.ndarray(tensor.shape, dtype, buffer=buffer)
    if isinstance(outgoing, Compressed):
        decode_into_untrusted(encode(outgoing), outgoing.compression, received)
    else:
        np.copyto(received, tensor)
    return np.ndarray(tensor.shape, dtype, buffer=_frozen(buffer))


def describe(tensors: Sequence[Outgoing]) -> list[list[Any]]:
    """The table that travels in the header: for each tensor `[dtype name, [dim, ...]]`, or
    `[dtype name, [dim, ...], compression]`.

    Raises:
      LocalProtocolError: too many tensors, too many dimensions, a dtype outside `DTYPES`, not an array at all (a
        JAX array is turned into a NumPy one above `dmoe_net`), or more than `MAX_DECODED_BYTES` of compressed tensors.
    """
    if len(tensors) > MAX_TENSORS:
        raise LocalProtocolError(f"{len(tensors)} tensors, a message carries at most {MAX_TENSORS}")
    table = [_describe_one(tensor) for tensor in tensors]
    decoded = sum(outgoing.tensor.nbytes for outgoing in tensors if isinstance(outgoing, Compressed))
    if decoded > MAX_DECODED_BYTES:
        most = MAX_DECODED_BYTES
        raise LocalProtocolError(f"{decoded} bytes of tensors to be compressed, a message carries at most {most}")
    return table


def buffers_of(tensors: Sequence[Outgoing]) -> tuple[bytes | memoryview, ...]:
    """The body as a sequence of byte buffers, gaps included; they alias the tensors unless a copy is unavoidable.

    A copy is made of a tensor that is not C-contiguous or not little-endian, and compression writes to a buffer of its
    own. The others must not be written to until the message has left.
    """
    buffers: list[bytes | memoryview] = []
    end = 0
    for outgoing in tensors:
        if plain(outgoing).nbytes == 0:
            continue
        gap = -end % ALIGNMENT
        if gap:
            buffers.append(_BYTE_GAPS[gap])
        buffer = encode(outgoing) if isinstance(outgoing, Compressed) else _bytes_of(outgoing)
        buffers.append(buffer)
        end += gap + buffer.nbytes
    return tuple(buffers)


class Placed(NamedTuple):
    """A row of the table and where its bytes are in the body. `dtype` and `shape` are those of the decoded tensor."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    compression: Compression
    start: int
    nbytes: int


class Layout(NamedTuple):
    """Content of a table that has been checked.

    Attributes:
      rows: of the table.
      nbytes: length of the body.
    """

    rows: tuple[Placed, ...]
    nbytes: int


def layout_untrusted(table: Any) -> Layout:
    """Check a table, and say where the tensors that it describes are in the body. Allocates nothing.

    Args:
      table: what `describe` made, after its journey.

    Raises:
      RemoteProtocolError: the table is malformed, its total is beyond `MAX_TENSOR_BYTES`, or its compressed tensors
        would take more than `MAX_DECODED_BYTES` once decoded.
    """
    if type(table) is not list or len(table) > MAX_TENSORS:
        raise RemoteProtocolError(f"tensor table must be a list of at most {MAX_TENSORS} rows")
    rows: list[Placed] = []
    end = decoded = 0
    for row in table:
        dtype, shape, compression = _row_untrusted(row)
        size = math.prod(shape)  # Python integers: no overflow
        nbytes = size * dtype.itemsize
        if compression is not Compression.NONE:
            decoded += nbytes
            nbytes = encoded_nbytes(compression, size)
        start = end + -end % ALIGNMENT if nbytes else end
        end = start + nbytes
        if end > MAX_TENSOR_BYTES:
            raise RemoteProtocolError(f"tensor table describes more than {MAX_TENSOR_BYTES} bytes")
        if decoded > MAX_DECODED_BYTES:
            raise RemoteProtocolError(f"tensor table describes more than {MAX_DECODED_BYTES} bytes once decoded")
        rows.append(Placed(dtype, shape, compression, start, nbytes))
    return Layout(tuple(rows), end)


def views_untrusted(layout: Layout, body: memoryview) -> tuple[Tensor, ...]:
    """Read-only arrays, one for each row of a table: views of `body`, or decoded into aligned buffers of their own.

    Args:
      layout: of the table, see `layout_untrusted`.
      body: the bytes, best in an `aligned_buffer`. Nobody may write to them again: JAX may alias the arrays.

    Raises:
      RemoteProtocolError: the table does not describe exactly `body.nbytes` bytes, or a truth value is none.
    """
    if layout.nbytes != body.nbytes:
        raise RemoteProtocolError(f"tensor table describes {layout.nbytes} bytes, body has {body.nbytes}")
    frozen = _frozen(body)
    return tuple([_tensor_untrusted(row, frozen) for row in layout.rows])


def _tensor_untrusted(row: Placed, body: memoryview) -> Tensor:
    if not row.nbytes:
        return _empty(row.shape, row.dtype)
    if row.compression is Compression.NONE:
        if row.dtype == np.bool_ and np.frombuffer(body, np.uint8, row.nbytes, row.start).max() > 1:
            raise RemoteProtocolError("a truth value is 0 or 1")  # NumPy would count another byte as true, or as two
        return np.ndarray(row.shape, row.dtype, buffer=body, offset=row.start)
    buffer = aligned_buffer(math.prod(row.shape) * row.dtype.itemsize)
    payload = body[row.start : row.start + row.nbytes]
    decode_into_untrusted(payload, row.compression, np.ndarray(row.shape, row.dtype, buffer=buffer))
    return np.ndarray(row.shape, row.dtype, buffer=_frozen(buffer))


def _frozen(buffer: memoryview) -> memoryview:
    """The buffer, which nobody writes to any more: `as_received` then knows that of the arrays in it."""
    if isinstance(buffer.obj, np.ndarray):
        buffer.obj.flags.writeable = False
    return buffer.toreadonly()


def _is_frozen(tensor: Tensor) -> bool:
    """Nobody can write to it through a NumPy array: neither it nor one that it is a view of is writeable."""
    array: Any = tensor
    while isinstance(array, np.ndarray):
        if array.flags.writeable:
            return False
        array = array.base
    return True


def _describe_one(outgoing: Outgoing) -> list[Any]:
    tensor = plain(outgoing)
    if not isinstance(tensor, np.ndarray):
        raise LocalProtocolError(f"a tensor is a NumPy array, got {type(tensor).__name__}")
    name = name_of(tensor.dtype)
    if name is None:
        raise LocalProtocolError(f"dtype {tensor.dtype} cannot be sent; these can: {', '.join(DTYPES)}")
    if tensor.ndim > MAX_RANK:
        raise LocalProtocolError(f"tensor of rank {tensor.ndim}, at most {MAX_RANK} dimensions are allowed")
    row: list[Any] = [name, list(tensor.shape)]
    return [*row, outgoing.compression.value] if isinstance(outgoing, Compressed) else row


def _bytes_of(tensor: Tensor) -> memoryview:
    little = np.ascontiguousarray(tensor, dtype=DTYPES[_NAMES[tensor.dtype]])
    # Through uint8, since the buffer protocol knows no bfloat16. `reshape` is a view: the array is contiguous.
    return little.reshape(-1).view(np.uint8).data


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
    """A tensor without elements views nothing: NumPy refuses an offset at the very end of a buffer."""
    empty = np.empty(shape, dtype)
    empty.flags.writeable = False
    return empty


def _row_untrusted(row: Any) -> tuple[np.dtype[Any], tuple[int, ...], Compression]:
    if type(row) is not list or len(row) not in (2, 3) or type(row[0]) is not str or type(row[1]) is not list:
        raise RemoteProtocolError("a row of the tensor table must be [dtype, [dim, ...]], a compression may follow")
    name, shape = row[:2]
    if name not in DTYPES:
        raise RemoteProtocolError(f"unknown dtype {name[:32]!r}")
    if len(shape) > MAX_RANK:
        raise RemoteProtocolError(f"tensor of rank {len(shape)}, at most {MAX_RANK} dimensions are allowed")
    for dim in shape:
        # The bound holds for each dimension too, or [2**62, 0] would pass with its product of zero.
        if type(dim) is not int or not 0 <= dim <= MAX_TENSOR_BYTES:
            raise RemoteProtocolError(f"a dimension must be an integer from 0 to {MAX_TENSOR_BYTES}")
    if 0 in shape and math.prod(dim or 1 for dim in shape) > MAX_TENSOR_BYTES:
        # NumPy refuses such a shape even where a dimension of 0 leaves no elements.
        raise RemoteProtocolError(f"the dimensions of a tensor, those of 0 aside, exceed {MAX_TENSOR_BYTES} together")
    compression = _compression_untrusted(name, row[2]) if len(row) == 3 else Compression.NONE
    return DTYPES[name], tuple(shape), compression


def _compression_untrusted(dtype: str, name: Any) -> Compression:
    compression = COMPRESSIONS.get(name) if type(name) is str else None
    if compression is None:
        raise RemoteProtocolError(f"unknown compression {str(name)[:32]!r} of a tensor")
    if dtype != "float32":
        raise RemoteProtocolError(f"only float32 tensors are compressed, got {dtype}")
    return compression
