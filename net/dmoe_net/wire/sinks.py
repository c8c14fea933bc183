"""Memory of a caller's own, into which the tensor of an answer is received instead of a fresh buffer.

Theory of operation. Whoever has placed a call may offer an array for its answer. When the header of an answer has come,
and with it the length of its body, the parser of the incoming bytes (`dmoe_net.wire.frame_reader`) asks for the array.
It gets it once, if the header is that of a reply to this very call, with every field that a reply has and no other, and
announces one tensor of the array's dtype and shape, not compressed. Then the body, whose length the parser has checked
against the table, is the array, to the last byte: nothing can be written beyond it. All other answers come into buffers
of their own, as if nothing had been offered.

Whatever becomes of the call, its end withdraws the offer. A frame that is still coming in then (an answer to a call
that was given up, or that was answered twice) goes on in a buffer of its own: nothing is written to the array after
`Sinks.withdraw`. Until then it holds whatever the other end sent, also of a call that fails.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dmoe_net.wire.tensors import DTYPES, MAX_RANK, Outgoing, Tensor, name_of, plain

_REPLY_KEYS = frozenset({"type", "id", "body"})
"""Keys in the header of a reply, without the table of its tensors (`dmoe_net.wire.messages`)."""


class Sink:
    """An array that was offered."""

    __slots__ = ("is_taken", "is_withdrawn", "memory", "row")

    def __init__(self, into: Tensor) -> None:
        check_sink(into)
        self.memory = into.reshape(-1).view(np.uint8).data
        """Its bytes, writable."""
        self.row = [name_of(into.dtype), list(into.shape)]
        """The row of a frame's table of tensors that describes it."""
        self.is_withdrawn = False
        """Nothing may be written there any more."""
        self.is_taken = False
        """A frame has it already."""


class Sinks:
    """Arrays that are offered on one connection, by the ids of the calls. As bounded as the calls under way are."""

    __slots__ = ("_offered",)

    def __init__(self) -> None:
        self._offered: dict[int, Sink] = {}

    def offer(self, call_id: int, into: Tensor) -> None:
        """The answer to this call of ours may be received into an array.

        Raises:
          ValueError: not into this one, see `check_sink`.
        """
        self._offered[call_id] = Sink(into)

    def withdraw(self, call_id: int) -> None:
        """From now on nothing is written there. Nothing happens if nothing was offered."""
        sink = self._offered.pop(call_id, None)
        if sink is not None:
            sink.is_withdrawn = True

    def take_untrusted(self, header: Mapping[str, Any], table: Sequence[Any]) -> Sink | None:
        """Take the sink for the body of a frame; None: the body goes into a buffer of its own. Never raises.

        Args:
          header: without the table. table: of the frame's tensors, which agrees with the length of the body.
        """
        if not self._offered or len(table) != 1 or header.keys() != _REPLY_KEYS or header["type"] != "reply":
            return None
        call_id = header["id"]
        sink = self._offered.get(call_id) if type(call_id) is int else None
        if sink is None or sink.is_taken or not sink.memory.nbytes:
            return None
        if type(header["body"]) is not dict or table[0] != sink.row:
            return None
        sink.is_taken = True
        return sink


def check_sink(into: Tensor) -> None:
    """Check that a tensor can be received into this array.

    Raises:
      ValueError: it is not an array of a dtype that travels, little-endian, C-contiguous and writable.
    """
    if not isinstance(into, np.ndarray):
        raise ValueError(f"an answer is received into a NumPy array, got {type(into).__name__}")
    flags = into.flags
    if DTYPES.get(name_of(into.dtype) or "") != into.dtype or into.ndim > MAX_RANK:
        raise ValueError(f"no tensor of dtype {into.dtype} and rank {into.ndim} can be received")
    if not (flags.writeable and flags.c_contiguous):
        raise ValueError("an array into which an answer is received must be writable and C-contiguous")


def put_into(into: Tensor, tensors: Sequence[Outgoing]) -> tuple[Outgoing, ...]:
    """The tensors of an answer, in the array where they were to come: copied unless they were received there.

    Returns: one read-only view of `into`, if it is one tensor of its dtype and shape; else the tensors as they are, and
      `into` is not written to.
    """
    answer = plain(tensors[0]) if len(tensors) == 1 else None
    if answer is None or answer.dtype != into.dtype or answer.shape != into.shape:
        return tuple(tensors)
    if answer.ctypes.data != into.ctypes.data:
        np.copyto(into, answer)
    view = into.view()
    view.flags.writeable = False
    return (view,)
