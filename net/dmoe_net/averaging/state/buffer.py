"""A state (many arrays) as one buffer with a table, a digest, and pieces that are fetched one by one. No I/O.

The table is that of a message (`dmoe_net.wire.tensors.describe`), without its bound on the number of arrays: each array
lies in C order, little-endian, at the next multiple of 64 bytes.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import PeerId
from dmoe_net.wire.fields import Field, integer, row_untrusted, rows, several
from dmoe_net.wire.tensors import ALIGNMENT, DTYPES, MAX_RANK, Tensor, aligned_buffer

MAX_ARRAYS = 1024
"""Arrays of a state: parameters and optimiser state of some thirty layers. Its table fits into one message's body."""

_DTYPE: Field[str] = Field("the name of a dtype", lambda value: type(value) is str and value in DTYPES)
_SHAPE, _TABLE = several(integer(0, 2**40), MAX_RANK), rows(MAX_ARRAYS)

MAX_PIECES = 2**16
"""Pieces of a state: 64 GiB in pieces of 1 MiB, 2 MiB of hashes."""

HASH_BYTES = 32

OVERDUE_S = 2.0
"""When nothing is left to be asked for, pieces that have been on their way for longer are asked of a second donor, too:
one that has fallen silent would hold the whole up (as the last blocks of a file in BitTorrent: Cohen, "Incentives Build
Robustness in BitTorrent", 2003, section 2.4)."""

Table = list[list[Any]]
"""For each array `[dtype name, [dim, ...]]`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateBuffer:
    """A packed state, which nobody writes to any more."""

    table: Table
    buffer: memoryview
    digest: bytes
    """SHA-256 of table and bytes: two states with one digest are one state."""

    def chunk(self, index: int, chunk_bytes: int) -> np.ndarray:
        """Piece number `index` as bytes, a view; the last one may be shorter."""
        return np.frombuffer(self.buffer[index * chunk_bytes : (index + 1) * chunk_bytes], np.uint8)


def piece_hash(piece: np.ndarray) -> bytes:
    return hashlib.sha256(piece.data).digest()


def pack(tensors: Sequence[Tensor]) -> StateBuffer:
    """Copy the arrays into one buffer.

    Raises:
      ValueError: too many arrays, too many dimensions, or a dtype that cannot travel.
    """
    if len(tensors) > MAX_ARRAYS:
        raise ValueError(f"a state has at most {MAX_ARRAYS} arrays, got {len(tensors)}")
    table: Table = []
    for tensor in tensors:
        if tensor.dtype.name not in DTYPES or tensor.ndim > MAX_RANK:
            raise ValueError(f"an array of {tensor.dtype} and {tensor.ndim} dimensions cannot be shared")
        table.append([tensor.dtype.name, list(tensor.shape)])
    buffer = aligned_buffer(_nbytes(table))
    end = 0
    for where in _slices(table):
        # What lies between the arrays travels, too: fresh memory would tell what was in it, and make two states of one.
        buffer[end : where.start] = bytes(where.start - end)
        end = where.stop
    for tensor, view in zip(tensors, _views(table, buffer), strict=True):
        np.copyto(view, tensor)
    return StateBuffer(table=table, buffer=buffer, digest=_digest(table, buffer))


def receive_untrusted(table: Table, buffer: memoryview, digest: bytes) -> tuple[Tensor, ...]:
    """Return the arrays of a checked table, read-only views of the buffer, if they have the promised digest."""
    if _digest(table, buffer) != digest:
        raise RemoteProtocolError("the state that was downloaded does not have the digest that was announced")
    views = _views(table, buffer.toreadonly())
    for view in views:
        if view.dtype == bool and view.size and view.view(np.uint8).max() > 1:
            raise RemoteProtocolError("a truth value is 0 or 1")  # NumPy would count another byte as true, or as two
    return tuple(views)


def check_table_untrusted(table: Any, *, max_bytes: int) -> int:
    """Return the bytes of the state that the table describes, at most `max_bytes`. Allocates nothing."""
    for row in _TABLE.read_untrusted(table, "the table of a state"):
        row_untrusted(row, "a row of a state's table", dtype=_DTYPE, shape=_SHAPE)
    nbytes = _nbytes(table)
    if nbytes > max_bytes:
        raise RemoteProtocolError(f"a state of {nbytes} bytes, at most {max_bytes} are accepted")
    return nbytes


class Pieces:
    """The pieces of one state: those that have come, those on their way and from whom, and the next one."""

    def __init__(self, nbytes: int, chunk_bytes: int) -> None:
        self._nbytes, self._chunk_bytes = nbytes, chunk_bytes
        num_pieces = -(-nbytes // chunk_bytes)
        self._waiting = list(reversed(range(num_pieces)))  # the next one at the end
        self._under_way: dict[int, tuple[float, list[PeerId]]] = {}  # since when, and from whom
        self.num_missing = num_pieces

    def where(self, index: int) -> slice:
        start = index * self._chunk_bytes
        return slice(start, min(start + self._chunk_bytes, self._nbytes))

    def next_for(self, donor: PeerId, now: float) -> int | None:
        """The piece to ask this donor for now, seconds of any one clock; from now on it is on its way from there."""
        if self._waiting:
            index = self._waiting.pop()
            self._under_way[index] = now, [donor]
            return index
        for index, (since, donors) in self._under_way.items():  # the oldest first
            if now - since >= OVERDUE_S and len(donors) == 1 and donor not in donors:
                donors.append(donor)
                return index
        return None

    def came(self, index: int) -> bool:
        """Note that a piece is there; False if it was already."""
        if self._under_way.pop(index, None) is None:
            return False
        self.num_missing -= 1
        return True

    def lost(self, donor: PeerId, indices: Iterable[int]) -> None:
        """Ask others again for pieces that do not come from this donor."""
        for index in sorted(indices, reverse=True):
            _, donors = self._under_way.get(index, (0.0, []))
            if donor in donors:
                donors.remove(donor)
                if not donors:
                    del self._under_way[index]
                    self._waiting.append(index)


def _slices(table: Table) -> Iterator[slice]:
    """Place of each array in the buffer."""
    end = 0
    for name, shape in table:
        start = end + -end % ALIGNMENT
        end = start + math.prod(shape) * DTYPES[name].itemsize
        yield slice(start, end)


def _nbytes(table: Table) -> int:
    return max((where.stop for where in _slices(table)), default=0)


def _views(table: Table, buffer: memoryview) -> list[Tensor]:
    return [
        np.frombuffer(buffer[where], DTYPES[name]).reshape(shape)
        for (name, shape), where in zip(table, _slices(table), strict=True)
    ]


def _digest(table: Table, buffer: memoryview) -> bytes:
    rows = "\n".join(f"{name} {shape}" for name, shape in table)
    hashed = hashlib.sha256(f"{len(table)}\n{rows}\n".encode())
    hashed.update(buffer)
    return hashed.digest()
