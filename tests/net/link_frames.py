"""Frames to send over links, for the tests of the transports."""

import functools
from collections.abc import Awaitable, Callable

import numpy as np
import trio
import trio.testing

from dmoe_net.transport.base import Link
from dmoe_net.wire.frames import EncodedFrame, Frame, OutgoingStream, Part, encode_frame, whole_part


def numbered(index: int, *sizes: int) -> EncodedFrame:
    """A frame that knows its number, with tensors of `sizes` bytes that differ from those of other frames."""
    tensors = [np.resize(np.roll(np.arange(256, dtype=np.uint8), -index), size) for size in sizes]
    return encode_frame({"n": index}, tensors)


def parts_of(*frames: EncodedFrame, num_opened: int = 0) -> list[Part]:
    """All parts of the frames, one frame after the other, on a link that has opened `num_opened` streams before."""
    parts = []
    for encoded in frames:
        if not encoded.is_large:
            parts.append(whole_part(encoded))
            continue
        stream = OutgoingStream(encoded, num_opened)
        num_opened += 1
        while not stream.is_done:
            parts.append(stream.next_part())
    return parts


def bytes_of(*frames: EncodedFrame) -> bytes:
    """Bytes in plain text that a link writes to send the frames."""
    return b"".join(piece for part in parts_of(*frames) for piece in part.pieces)


def assert_same(got: Frame | None, sent: EncodedFrame) -> None:
    """Make sure that the frame received is the one sent, in buffers that JAX can take over as they are."""
    assert got is not None
    assert got.header == {"n": sent.frame.header["n"]}
    assert [tensor.tobytes() for tensor in got.tensors] == [np.asarray(t).tobytes() for t in sent.frame.tensors]
    assert all(tensor.size == 0 or tensor.ctypes.data % 64 == 0 for tensor in got.tensors)


_quiet = functools.partial(trio.testing.wait_all_tasks_blocked, 0.01)


async def begin_and_cancel(
    operation: Callable[..., Awaitable[object]], *args: object, settle: Callable[[], Awaitable[None]] = _quiet
) -> None:
    """Begin an operation, and cancel it when nothing happens any more."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(operation, *args)
        await settle()
        nursery.cancel_scope.cancel()


async def exchange(source: Link, target: Link, *frames: EncodedFrame, num_opened: int = 0) -> None:
    """Send the frames and check that they arrive, in order."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(source.send, *parts_of(*frames, num_opened=num_opened))
        for frame in frames:
            assert_same(await target.receive(), frame)
