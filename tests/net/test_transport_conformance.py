"""Links, transports and listeners keep the promises of `dmoe_net.transport.base`: one suite for plain TCP, TLS and the
simulated network."""

import functools
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import ml_dtypes
import numpy as np
import pytest
import trio
import trio.testing

from dmoe_net.errors import ConnectionLost, DialFailed, ListenFailed, PeerUnavailable
from dmoe_net.identity import Address, PeerId
from dmoe_net.transport.base import Link, Listener
from dmoe_net.wire.compression import Compressed, Compression
from dmoe_net.wire.frames import CHUNK_BYTES, EncodedFrame, OutgoingStream, encode_frame, whole_part
from dmoe_net.wire.tensors import as_received
from tests.net.each_network import NETWORKS, Ends, Network, drop, on_every_link, on_every_network
from tests.net.link_frames import assert_same, begin_and_cancel, exchange, numbered, parts_of

NUM_CONNECTS = 1000
LARGE = 40 * 2**20  # bytes, beyond what the buffers of any of these networks hold (Linux: 4 MiB + 32 MiB at most)


@functools.cache
def large_frame() -> EncodedFrame:
    """More than any of these networks' buffers hold."""
    return numbered(1, LARGE)


async def send_for_ever(link: Link) -> None:
    while True:
        await link.send(whole_part(numbered(1)))


@on_every_link
async def test_frames_of_all_sizes_arrive_in_order(ends: Ends, dialled: Link, accepted: Link) -> None:
    """Small, mixed and large frames, sent together and one by one, both ways; then the end, seen as None."""
    sizes = [(), (1,), (100, 0, 3), (65_536,), (CHUNK_BYTES,), (CHUNK_BYTES + 1,), (70_000, 5), (3_000_000,), ()]
    frames = [numbered(index, *each) for index, each in enumerate(sizes)]
    for source, target in ((dialled, accepted), (accepted, dialled)):
        await exchange(source, target, *frames)
        num_opened = 2
        for frame in frames:
            await exchange(source, target, frame, num_opened=num_opened)
            num_opened += frame.is_large
    await dialled.aclose()
    assert await accepted.receive() is None


@on_every_link
async def test_links_count_what_comes_and_goes(ends: Ends, dialled: Link, accepted: Link) -> None:
    """One end counts as received what the other counts as sent: the tensors' bytes, headers and encryption."""
    sent_before, received_before = dialled.num_sent, accepted.num_received
    await exchange(dialled, accepted, numbered(0, 100_000), numbered(1, 50_000))
    sent, received = dialled.num_sent - sent_before, accepted.num_received - received_before
    assert dialled.num_sent == accepted.num_received
    assert sent == received
    assert 150_000 <= sent < 153_000


@on_every_link
async def test_streams_interleave_and_arrive_when_complete(ends: Ends, dialled: Link, accepted: Link) -> None:
    """Two large frames in turns, a small one between, and one that is given up: order of completion, no trace of it."""
    frames = [numbered(0, 1_400_000), numbered(1, 1_000_000), numbered(2, 1_800_000), numbered(3, 10)]
    slow, quick, lost = (OutgoingStream(frame, index) for index, frame in enumerate(frames[:3]))
    parts = [stream.next_part() for _ in range(2) for stream in (slow, quick, lost)]
    parts += [whole_part(frames[3]), lost.reset_part()]
    parts += [stream.next_part() for stream in (slow, quick, slow)]
    assert (slow.is_done, quick.is_done) == (True, True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dialled.send, *parts)
        for expected in (frames[3], frames[1], frames[0]):
            assert_same(await accepted.receive(), expected)
    await dialled.aclose()
    assert await accepted.receive() is None


@on_every_link
async def test_tensors_of_every_kind_arrive_as_they_were(ends: Ends, dialled: Link, accepted: Link) -> None:
    """Equal dtype, shape and content, read-only; compressed ones as their decoder gives them."""
    values = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    sent = [values, values.astype(ml_dtypes.bfloat16), values > 0, values[:, :3], values.astype(">f4")]
    sent += [np.array(3.5, np.float32), np.zeros((0, 4), np.int64)]
    sent += [Compressed(values, kind) for kind in (Compression.BFLOAT16, Compression.BLOCKWISE_8BIT)]
    expected = [as_received(tensor) for tensor in sent]
    await dialled.send(whole_part(encode_frame({"n": 1}, sent)))
    got = await accepted.receive()
    assert len(got.tensors) == len(expected)
    for found, wanted in zip(got.tensors, expected, strict=True):
        assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())
        assert not found.flags.writeable
        assert found.size == 0 or found.ctypes.data % 64 == 0


@on_every_link
async def test_headers_arrive_as_cbor_returns_them(ends: Ends, dialled: Link, accepted: Link) -> None:
    """Tuples become lists, keys come in canonical order, and nothing is shared with the sender."""
    header = {"zz": (1, [2.5, {"b": b"x", "a": None}]), "y": {"long key": True, "k": -(2**63)}, "t": "ü"}
    await dialled.send(whole_part(encode_frame(header)))
    got = await accepted.receive()
    assert got.header == {"t": "ü", "y": {"k": -(2**63), "long key": True}, "zz": [1, [2.5, {"a": None, "b": b"x"}]]}
    assert [list(got.header), list(got.header["y"])] == [["t", "y", "zz"], ["k", "long key"]]
    got.header["zz"][1].clear()
    assert header["zz"][1] != []


@on_every_link
async def test_a_sent_tensor_may_be_written_to(ends: Ends, dialled: Link, accepted: Link) -> None:
    """Once `send` has returned the array is the sender's again, whenever the frame arrives."""
    tensor = np.arange(1000)
    await dialled.send(whole_part(encode_frame({}, [tensor])))
    tensor[:] = -1
    got = await accepted.receive()
    assert np.array_equal(got.tensors[0], np.arange(1000))


@on_every_link
async def test_a_send_waits_for_a_receiver_that_does_not_read(ends: Ends, dialled: Link, accepted: Link) -> None:
    """Back-pressure: more than the buffers leaves only once the other end reads."""
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


@on_every_link
async def test_many_unread_small_frames_wait_too(ends: Ends, dialled: Link, accepted: Link) -> None:
    """The bound holds for frames of every size, and none of them is lost."""
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


@on_every_link
async def test_a_closed_link_delivers_what_was_sent(ends: Ends, dialled: Link, accepted: Link) -> None:
    """`aclose` right after `send`: everything arrives, then None, again and again."""
    frames = [numbered(index, 3000) for index in range(50)]
    await dialled.send(*parts_of(*frames))
    await dialled.aclose()
    await ends.settle()
    for frame in frames:
        assert_same(await accepted.receive(), frame)
    assert [await accepted.receive(), await accepted.receive()] == [None, None]


@on_every_link
async def test_closing_succeeds_even_if_cancelled(ends: Ends, dialled: Link, accepted: Link) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await dialled.aclose()
    with pytest.raises(ConnectionLost):
        await dialled.receive()
    with suppress(ConnectionLost):  # a farewell may have been cut short
        assert await accepted.receive() is None


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


@on_every_link
async def test_the_end_inside_a_frame_is_no_clean_end(ends: Ends, dialled: Link, accepted: Link) -> None:
    """A link closed between the chunks of a frame is ConnectionLost, not None; what was complete arrives before."""
    stream = OutgoingStream(numbered(1, 700_000), 0)
    await dialled.send(stream.next_part(), whole_part(numbered(2)), stream.next_part())
    await dialled.aclose()
    assert_same(await accepted.receive(), numbered(2))
    with pytest.raises(ConnectionLost):
        await accepted.receive()


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


@on_every_link
async def test_a_cancelled_receive_loses_nothing(ends: Ends, dialled: Link, accepted: Link) -> None:
    frame = numbered(1, 900_000)
    for part in parts_of(frame):
        await begin_and_cancel(accepted.receive, settle=ends.settle)
        await dialled.send(part)
    assert_same(await accepted.receive(), frame)


@on_every_link
async def test_nothing_can_be_sent_after_a_cancelled_send(ends: Ends, dialled: Link, accepted: Link) -> None:
    """A part may have left incompletely, so no other may follow."""
    await begin_and_cancel(dialled.send, *parts_of(large_frame()), settle=ends.settle)
    with pytest.raises((trio.BusyResourceError, ConnectionLost)):
        await dialled.send(whole_part(numbered(2)))


@on_every_link
async def test_two_tasks_cannot_send_at_once(ends: Ends, dialled: Link, accepted: Link) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dialled.send, *parts_of(large_frame()))
        await ends.settle()
        with pytest.raises(trio.BusyResourceError):
            await dialled.send(whole_part(numbered(2)))
        assert_same(await accepted.receive(), large_frame())


@asynccontextmanager
async def dialling(ends: Ends, listener: Listener) -> AsyncIterator[list[Link]]:
    """Dial beside the block, which accepts; the link is there after it."""
    links: list[Link] = []

    async def dial() -> None:
        links.append(await ends.client.dial(listener.address))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dial)
        yield links


@on_every_network
async def test_a_cancelled_accept_loses_no_link(ends: Ends) -> None:
    """Cancelled while it waits, and cancelled in the moment in which a link is there."""
    listener = await ends.server.listen(ends.any_port)
    for is_early in (True, False):
        if is_early:
            await begin_and_cancel(listener.accept, settle=ends.settle)
        async with dialling(ends, listener) as links:
            await ends.settle()
            if not is_early:
                with trio.CancelScope() as scope:
                    scope.cancel()
                    await listener.accept()
                assert scope.cancelled_caught
            accepted = await listener.accept()
            await accepted.handshake()
        await exchange(links[0], accepted, numbered(1, 100))
        drop(links[0], accepted)
    await listener.aclose()


@on_every_network
async def test_nobody_listens(ends: Ends) -> None:
    """A dial to a closed port is DialFailed with the address on one line; so is one to a host that does not exist."""
    listener = await ends.server.listen(ends.any_port)
    await listener.aclose()
    with pytest.raises(DialFailed, match=re.escape(str(listener.address))) as caught:
        await ends.client.dial(listener.address)
    assert "\n" not in str(caught.value)
    with pytest.raises(DialFailed):
        await ends.client.dial(Address("a" * 100, 1))


@on_every_network
async def test_an_address_is_listened_on_once(ends: Ends) -> None:
    listener = await ends.server.listen(ends.any_port)
    assert listener.address.port != 0
    with pytest.raises(ListenFailed, match=re.escape(str(listener.address))):
        await ends.server.listen(listener.address)
    await listener.aclose()
    again = await ends.server.listen(listener.address)
    assert again.address == listener.address
    await again.aclose()


@on_every_network
async def test_addresses_of_others_cannot_be_listened_on(ends: Ends) -> None:
    with pytest.raises(ListenFailed, match=r"203\.0\.113\.1:7"):
        await ends.server.listen(Address("203.0.113.1", 7))


@on_every_network
async def test_a_closed_listener_accepts_nothing_and_its_links_live_on(ends: Ends) -> None:
    """`accept` raises ListenFailed, also one that waits already; links accepted before do not notice."""
    listener = await ends.server.listen(ends.any_port)

    async def accept() -> None:
        with pytest.raises(ListenFailed, match=re.escape(str(listener.address))):
            await listener.accept()

    async with dialling(ends, listener) as links:
        accepted = await listener.accept()
        await accepted.handshake()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        await ends.settle()
        await listener.aclose()
    await listener.aclose()
    await accept()
    await exchange(links[0], accepted, numbered(1, 10))
    await exchange(accepted, links[0], numbered(2, 10))
    drop(links[0], accepted)


@on_every_network
async def test_both_ends_know_each_other(ends: Ends) -> None:
    """The dialled end has the address dialled, the accepted one the host it comes from; ids as the network proves."""
    listener = await ends.server.listen(ends.any_port)
    async with dialling(ends, listener) as links:
        accepted = await listener.accept()
        assert accepted.remote_peer_id is None
        await accepted.handshake()
    await links[0].handshake()
    assert links[0].remote_address == listener.address
    assert accepted.remote_address.host == ends.client_host
    assert accepted.remote_address.port != listener.address.port
    assert links[0].remote_peer_id == ends.server.peer_id
    assert accepted.remote_peer_id == ends.client.peer_id
    drop(links[0], accepted)
    await listener.aclose()


@on_every_network
async def test_somebody_else_answers(ends: Ends) -> None:
    """On a network that proves identities, a dial for another peer fails and names both."""
    if ends.server.peer_id is None:
        return
    wanted = PeerId(b"w" * 32)
    listener = await ends.server.listen(ends.any_port)
    async with trio.open_nursery() as nursery:

        async def serve() -> None:
            link = await listener.accept()
            try:
                await link.handshake()
                assert await link.receive() is None
            except PeerUnavailable:
                pass  # it found out that it was not meant, one way or the other
            link.abort()

        nursery.start_soon(serve)
        with pytest.raises(DialFailed) as caught:
            await ends.client.dial(listener.address, peer_id=wanted)
    assert str(wanted) in str(caught.value)
    assert str(ends.server.peer_id) in str(caught.value)
    await listener.aclose()


@on_every_network
async def test_a_cancelled_dial_is_no_link(ends: Ends) -> None:
    listener = await ends.server.listen(ends.any_port)
    with trio.CancelScope() as scope:
        scope.cancel()
        await ends.client.dial(listener.address)
    assert scope.cancelled_caught
    await listener.aclose()


@pytest.mark.parametrize(
    "network", [pytest.param(each, id=each.name, marks=[pytest.mark.slow] * (each.name == "tls")) for each in NETWORKS]
)
def test_connecting_and_dropping_leaves_nothing_open(network: Network) -> None:
    """Closed or aborted, by the one end or by the other: no descriptor and no task stays behind."""

    async def main() -> None:
        async with network.open() as ends:
            listener = await ends.server.listen(ends.any_port)
            await connect_and_drop(ends, listener, 4)  # whatever is made once, is made now
            before = resources()
            await connect_and_drop(ends, listener, NUM_CONNECTS)
            await ends.settle()
            assert resources() == before
            await listener.aclose()

    network.run(main)


async def connect_and_drop(ends: Ends, listener: Listener, count: int) -> None:
    for index in range(count):
        async with dialling(ends, listener) as links:
            accepted = await listener.accept()
            await accepted.handshake()
        ways = [links[0], accepted]
        if index & 1:
            ways.reverse()
        if index & 2:
            ways[0].abort()
        else:
            await ways[0].aclose()
        ways[1].abort()


def resources() -> tuple[int, int]:
    """Open file descriptors and trio tasks."""
    return len(os.listdir("/proc/self/fd")), trio.lowlevel.current_statistics().tasks_living
