"""Links keep the promises of `dmoe_net.transport.base`: one suite for plain TCP, TLS and the simulated network."""

import functools
from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest
import trio
import trio.testing

from dmoe_net.errors import ConnectionLost
from dmoe_net.transport.base import Link
from dmoe_net.wire.compression import Compressed, Compression
from dmoe_net.wire.frames import CHUNK_BYTES, EncodedFrame, OutgoingStream, encode_frame, whole_part
from dmoe_net.wire.tensors import as_received
from tests.net.each_network import Ends, drop, on_every_network
from tests.net.link_frames import assert_same, exchange, numbered, parts_of

LARGE = 40 * 2**20  # bytes, beyond what the buffers of any of these networks hold (Linux: 4 MiB + 32 MiB at most)


@functools.cache
def large_frame() -> EncodedFrame:
    """More than any of these networks' buffers hold."""
    return numbered(1, LARGE)


async def send_for_ever(link: Link) -> None:
    while True:
        await link.send(whole_part(numbered(1)))


@on_every_network
async def test_frames_of_all_sizes_arrive_in_order(ends: Ends) -> None:
    """Small, mixed and large frames, sent together and one by one, both ways; then the end, seen as None."""
    sizes = [(), (1,), (100, 0, 3), (65_536,), (CHUNK_BYTES,), (CHUNK_BYTES + 1,), (70_000, 5), (3_000_000,), ()]
    frames = [numbered(index, *each) for index, each in enumerate(sizes)]
    dialled, accepted = await ends.pair()
    for source, target in ((dialled, accepted), (accepted, dialled)):
        await exchange(source, target, *frames)
        num_opened = 2
        for frame in frames:
            await exchange(source, target, frame, num_opened=num_opened)
            num_opened += frame.is_large
    await dialled.aclose()
    assert await accepted.receive() is None
    await accepted.aclose()


@on_every_network
async def test_links_count_what_comes_and_goes(ends: Ends) -> None:
    """One end counts as received what the other counts as sent: the tensors' bytes, headers and encryption."""
    dialled, accepted = await ends.pair()
    sent_before, received_before = dialled.num_sent, accepted.num_received
    await exchange(dialled, accepted, numbered(0, 100_000), numbered(1, 50_000))
    sent, received = dialled.num_sent - sent_before, accepted.num_received - received_before
    assert dialled.num_sent == accepted.num_received
    assert sent == received
    assert 150_000 <= sent < 153_000
    drop(dialled, accepted)


@on_every_network
async def test_streams_interleave_and_arrive_when_complete(ends: Ends) -> None:
    """Two large frames in turns, a small one between, and one that is given up: order of completion, no trace of it."""
    dialled, accepted = await ends.pair()
    frames = [numbered(0, 1_400_000), numbered(1, 1_000_000), numbered(2, 1_800_000), numbered(3, 10)]
    slow, quick, lost = (OutgoingStream(frame, index) for index, frame in enumerate(frames[:3]))
    parts = [stream.next_part() for _ in range(2) for stream in (slow, quick, lost)]
    parts += [whole_part(frames[3]), lost.reset_part()]
    parts += [stream.next_part() for stream in (slow, quick, slow)]
    assert slow.is_done
    assert quick.is_done
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dialled.send, *parts)
        for expected in (frames[3], frames[1], frames[0]):
            assert_same(await accepted.receive(), expected)
    await dialled.aclose()
    assert await accepted.receive() is None
    drop(accepted)


@on_every_network
async def test_tensors_of_every_kind_arrive_as_they_were(ends: Ends) -> None:
    """Equal dtype, shape and content, read-only; compressed ones as their decoder gives them."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((5, 7)).astype(np.float32)
    sent = [
        values,
        values.astype(ml_dtypes.bfloat16),
        values > 0,
        values[:, :3],
        values.astype(">f4"),
        np.array(3.5, np.float32),
        np.zeros((0, 4), np.int64),
        Compressed(values, Compression.BFLOAT16),
        Compressed(values, Compression.BLOCKWISE_8BIT),
    ]
    expected = [as_received(tensor) for tensor in sent]
    dialled, accepted = await ends.pair()
    await dialled.send(whole_part(encode_frame({"n": 1}, sent)))
    got = await accepted.receive()
    assert got is not None
    assert len(got.tensors) == len(expected)
    for found, wanted in zip(got.tensors, expected, strict=True):
        assert found.dtype == wanted.dtype
        assert found.shape == wanted.shape
        assert found.tobytes() == wanted.tobytes()
        assert not found.flags.writeable
        assert found.size == 0 or found.ctypes.data % 64 == 0
    drop(dialled, accepted)


@on_every_network
async def test_headers_arrive_as_cbor_returns_them(ends: Ends) -> None:
    """Tuples become lists, keys come in canonical order, and nothing is shared with the sender."""
    header = {"zz": (1, [2.5, {"b": b"x", "a": None}]), "y": {"long key": True, "k": -(2**63)}, "t": "ü"}
    dialled, accepted = await ends.pair()
    await dialled.send(whole_part(encode_frame(header)))
    got = await accepted.receive()
    assert got is not None
    assert got.header == {"t": "ü", "y": {"k": -(2**63), "long key": True}, "zz": [1, [2.5, {"a": None, "b": b"x"}]]}
    assert list(got.header) == ["t", "y", "zz"]
    assert list(got.header["y"]) == ["k", "long key"]
    got.header["zz"][1].clear()
    assert header["zz"][1] != []
    drop(dialled, accepted)


@on_every_network
async def test_a_sent_tensor_may_be_written_to(ends: Ends) -> None:
    """Once `send` has returned the array is the sender's again, whenever the frame arrives."""
    tensor = np.arange(1000)
    dialled, accepted = await ends.pair()
    await dialled.send(whole_part(encode_frame({}, [tensor])))
    tensor[:] = -1
    got = await accepted.receive()
    assert got is not None
    assert np.array_equal(got.tensors[0], np.arange(1000))
    drop(dialled, accepted)


@on_every_network
async def test_a_send_waits_for_a_receiver_that_does_not_read(ends: Ends) -> None:
    """Back-pressure: more than the buffers leaves only once the other end reads."""
    dialled, accepted = await ends.pair()
    sent = trio.Event()

    async def send() -> None:
        await dialled.send(*parts_of(large_frame()))
        sent.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await ends.settle()
        assert not sent.is_set()
        assert_same(await accepted.receive(), large_frame())
        await sent.wait()
    drop(dialled, accepted)


@on_every_network
async def test_many_unread_small_frames_wait_too(ends: Ends) -> None:
    """The bound holds for frames of every size, and none of them is lost."""
    dialled, accepted = await ends.pair()
    num_sent = 0

    async def send() -> None:
        nonlocal num_sent
        for index in range(LARGE // 100_000):
            await dialled.send(whole_part(numbered(index, 100_000)))
            num_sent += 1
        await dialled.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await ends.settle()
        assert 0 < num_sent < LARGE // 100_000
        num_got = 0
        while (frame := await accepted.receive()) is not None:
            assert frame.header["n"] == num_got
            num_got += 1
    assert num_got == num_sent == LARGE // 100_000
    drop(accepted)


@on_every_network
async def test_a_closed_link_delivers_what_was_sent(ends: Ends) -> None:
    """`aclose` right after `send`: everything arrives, then None, again and again."""
    dialled, accepted = await ends.pair()
    frames = [numbered(index, 3000) for index in range(50)]
    await dialled.send(*parts_of(*frames))
    await dialled.aclose()
    await ends.settle()
    for frame in frames:
        assert_same(await accepted.receive(), frame)
    assert await accepted.receive() is None
    assert await accepted.receive() is None
    drop(accepted)


@on_every_network
async def test_closing_succeeds_even_if_cancelled(ends: Ends) -> None:
    """A cancelled `aclose` has closed."""
    dialled, accepted = await ends.pair()
    with trio.CancelScope() as scope:
        scope.cancel()
        await dialled.aclose()
    with pytest.raises(ConnectionLost):
        await dialled.receive()
    with suppress(ConnectionLost):  # a farewell may have been cut short
        assert await accepted.receive() is None
    drop(accepted)


@on_every_network
async def test_an_aborted_link_is_lost(ends: Ends) -> None:
    """The other end's waiting `receive` raises, and so does its `send`, sooner or later."""
    for aborts, is_told in ((0, 1), (1, 0)):
        links = await ends.pair()
        # With TLS the dialling end takes an end before the first frame for a refusal: HandshakeFailed.
        await exchange(links[1], links[0], numbered(1))
        async with trio.open_nursery() as nursery:

            async def receive(link: Link = links[is_told]) -> None:
                with pytest.raises(ConnectionLost):
                    await link.receive()

            nursery.start_soon(receive)
            await ends.settle()
            links[aborts].abort()
        with pytest.raises(ConnectionLost):
            await send_for_ever(links[is_told])
        drop(*links)


@on_every_network
async def test_the_end_inside_a_frame_is_no_clean_end(ends: Ends) -> None:
    """A link closed between the chunks of a frame is ConnectionLost, not None; what was complete arrives before."""
    dialled, accepted = await ends.pair()
    stream = OutgoingStream(numbered(1, 700_000), 0)
    await dialled.send(stream.next_part(), whole_part(numbered(2)), stream.next_part())
    await dialled.aclose()
    assert_same(await accepted.receive(), numbered(2))
    with pytest.raises(ConnectionLost):
        await accepted.receive()
    drop(accepted)


@on_every_network
async def test_a_link_of_ones_own_closing_is_lost(ends: Ends) -> None:
    """After `aclose` or `abort` everything raises ConnectionLost, also what waits already; both are idempotent."""
    for is_abrupt in (False, True):
        dialled, accepted = await ends.pair()
        async with trio.open_nursery() as nursery:

            async def receive(link: Link = dialled) -> None:
                with pytest.raises(ConnectionLost):
                    await link.receive()

            nursery.start_soon(receive)
            await ends.settle()
            if is_abrupt:
                dialled.abort()
            else:
                await dialled.aclose()
        with pytest.raises(ConnectionLost):
            await dialled.receive()
        with pytest.raises(ConnectionLost):
            await dialled.send(whole_part(numbered(1)))
        for _ in range(2):
            await dialled.aclose()
            dialled.abort()
        drop(accepted)


@on_every_network
async def test_a_cancelled_receive_loses_nothing(ends: Ends) -> None:
    """Cancelled between the chunks of a frame, again and again: the frame arrives whole."""
    dialled, accepted = await ends.pair()
    frame = numbered(1, 900_000)
    for part in parts_of(frame):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(accepted.receive)
                await ends.settle()
                scope.cancel()
        await dialled.send(part)
    assert_same(await accepted.receive(), frame)
    drop(dialled, accepted)


@on_every_network
async def test_nothing_can_be_sent_after_a_cancelled_send(ends: Ends) -> None:
    """A part may have left incompletely, so no other may follow."""
    dialled, accepted = await ends.pair()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dialled.send, *parts_of(large_frame()))
            await ends.settle()
            scope.cancel()
    with pytest.raises((trio.BusyResourceError, ConnectionLost)):
        await dialled.send(whole_part(numbered(2)))
    drop(dialled, accepted)


@on_every_network
async def test_two_tasks_cannot_send_at_once(ends: Ends) -> None:
    """The second one is told, before it can tear a frame of the first."""
    dialled, accepted = await ends.pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dialled.send, *parts_of(large_frame()))
        await ends.settle()
        with pytest.raises(trio.BusyResourceError):
            await dialled.send(whole_part(numbered(2)))
        assert_same(await accepted.receive(), large_frame())
    drop(dialled, accepted)
