"""What the first of several processes that hold an expert together has the others do.

Programs over a mesh that spans processes run only if all of them start the same ones in the same order. Process 0 gets
the requests; before it begins a piece of work it sends an *order*, which names the piece and carries what goes in. The
bytes are a length, canonical CBOR, and the arrays as they lie in memory.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from net.errors import RemoteProtocolError
from net.types import Array
from net.wire import codec
from net.wire.fields import integer, several, text

KINDS = ("make", "forward", "backward", "compile", "gather", "load", "meet", "leave")
LENGTH_BYTES = 4
MAX_ARRAYS = 4096
MAX_ORDER_BYTES = 2**40

_COUNT = integer(0, 2**62)
_TEXT = text(0, 256)
_SHAPE = several(integer(0, 2**40), 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One piece of work.

    Attributes:
      kind: "make" the expert; "forward" or "backward" of a batch; "compile" for batches of `number` rows; "gather" the
        state; "load" a state; "meet", to say that what was ordered before is done; "leave", for good.
      uid: the expert.
      number: see there.
      inputs, output_grads, keys: as of `dmoe_jax.node.programs.Batch`.
      staleness: float32, for the optimiser.
      state: the leaves of parameters and optimiser state.
    """

    kind: str
    uid: str = ""
    number: int = 0
    inputs: tuple[Array, ...] = ()
    output_grads: Array | None = None
    keys: Array | None = None
    staleness: Array | None = None
    state: tuple[Array, ...] = ()


Tell = Callable[[Order], None]
"""Sends an order on its way, without waiting for anything but a "meet"."""

_ARRAYS = ("inputs", "output_grads", "keys", "staleness", "state")


def encode_order(order: Order) -> list[bytes | memoryview]:
    """The bytes of an order, in parts that follow one another; arrays are not copied.

    Raises:
      LocalProtocolError: it has so many arrays that the list of them is too long.
    """
    rows: list[list[Any]] = []
    parts: list[bytes | memoryview] = []
    for name in _ARRAYS:
        value = getattr(order, name)
        for array in value if isinstance(value, tuple) else () if value is None else (value,):
            array = np.ascontiguousarray(array).reshape(np.shape(array))
            rows.append([name, array.dtype.name, list(array.shape)])
            parts.append(array.reshape(-1).view(np.uint8).data)
    header = codec.encode({"kind": order.kind, "uid": order.uid, "number": order.number, "arrays": rows})
    return [len(header).to_bytes(LENGTH_BYTES, "big"), header, *parts]


@dataclass(frozen=True, slots=True)
class Header:
    """What precedes the arrays of an order.

    Attributes:
      kind, uid, number: as of `Order`.
      arrays: (the order's field, type, shape) of each array.
    """

    kind: str
    uid: str
    number: int
    arrays: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in self.arrays)


def parse_header_untrusted(data: bytes) -> Header:
    """Read the CBOR of an order.

    Raises:
      RemoteProtocolError: it is none.
    """
    body = codec.decode_untrusted(data)
    if not isinstance(body, dict) or set(body) != {"kind", "uid", "number", "arrays"} or body["kind"] not in KINDS:
        raise RemoteProtocolError(f"expected an order of one of the kinds {', '.join(KINDS)}, got {body!r:.80}")
    rows = body["arrays"]
    if not isinstance(rows, list) or len(rows) > MAX_ARRAYS:
        raise RemoteProtocolError(f"expected at most {MAX_ARRAYS} arrays in an order, got {rows!r:.80}")
    uid, number = _TEXT.of_untrusted(body, "uid"), _COUNT.of_untrusted(body, "number")
    header = Header(body["kind"], uid, number, tuple(map(_array_untrusted, rows)))
    if header.nbytes > MAX_ORDER_BYTES:
        raise RemoteProtocolError(f"an order of {header.nbytes} bytes, at most {MAX_ORDER_BYTES} are allowed")
    return header


def _array_untrusted(row: Any) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
    if not isinstance(row, list) or len(row) != 3 or row[0] not in _ARRAYS or not isinstance(row[1], str):
        raise RemoteProtocolError(f"expected field, type and shape of an array in an order, got {row!r:.80}")
    try:
        dtype = jnp.dtype(row[1])
    except TypeError as error:
        raise RemoteProtocolError(f"unknown type {row[1]!r:.40} of an array in an order") from error
    if dtype.hasobject:
        raise RemoteProtocolError(f"an order carries numbers, not {row[1]!r:.40}")
    return row[0], dtype, _SHAPE.of_untrusted({"shape": row[2]}, "shape")


def order_of(header: Header, body: bytearray) -> Order:
    """The order with this header, whose arrays are views of `body`, of `header.nbytes` bytes."""
    found: dict[str, list[Array]] = {name: [] for name in _ARRAYS}
    start = 0
    for name, dtype, shape in header.arrays:
        count = math.prod(shape)
        found[name].append(np.frombuffer(body, dtype, count, start).reshape(shape))
        start += count * dtype.itemsize
    return Order(
        kind=header.kind,
        uid=header.uid,
        number=header.number,
        inputs=tuple(found["inputs"]),
        output_grads=next(iter(found["output_grads"]), None),
        keys=next(iter(found["keys"]), None),
        staleness=next(iter(found["staleness"]), None),
        state=tuple(found["state"]),
    )
