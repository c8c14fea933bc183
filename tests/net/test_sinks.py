"""Answers that are received straight into memory of the caller's, and whatever must not be written there."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import trio

from dmoe_net.averaging.grouping.group import Group, Member, Role
from dmoe_net.averaging.reduction.all_reduce import AllReduce
from dmoe_net.averaging.reduction.partition import AllReduceConfig
from dmoe_net.errors import PeerUnavailable, RemoteProtocolError
from dmoe_net.identity import PeerId
from dmoe_net.rpc.base import Reply, Request
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.rpc.service import LANES
from dmoe_net.transport.base import Link, Listener
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.transport.tls import TlsTransport
from dmoe_net.wire.codec import encode
from dmoe_net.wire.compression import Compressed, Compression
from dmoe_net.wire.frame_reader import FrameReader
from dmoe_net.wire.frames import Part, encode_frame
from dmoe_net.wire.messages import CallPartial, CallReply, CallStart, encode_message, parse_untrusted
from dmoe_net.wire.sinks import Sinks, check_sink, put_into
from dmoe_net.wire.tensors import Outgoing, Tensor
from tests.net.each_network import NETWORKS, Ends, Network, on_every_network
from tests.net.link_frames import parts_of as link_parts
from tests.net.rpc_peers import CLIENT, SERVER, hello, part
from tests.net.wire_parts import OPEN, WHOLE, chunk, parts_of, preamble, read

HOUR_S = 3600.0
SMALL, LARGE = 1000, 400_000
"""Numbers: 4 kB travel in one part, 1.6 MB in four chunks."""

NOBODYS = np.float32(7.0)
"""Value that fills the caller's memory before anything comes."""


def values(size: int) -> Tensor:
    return np.arange(size, dtype=np.float32)


def memory(size: int) -> Tensor:
    """The caller's, with some more to either side of what it offers."""
    return np.full(size + 200, NOBODYS)


def edges(whole: Tensor) -> Tensor:
    """The parts of the caller's memory that it does not offer."""
    return np.concatenate([whole[:100], whole[-100:]])


def offered(whole: Tensor, call_id: int = 1) -> tuple[Sinks, FrameReader, Tensor]:
    """A reader, and the inner part of `whole` offered for the answer to a call."""
    sinks, into = Sinks(), whole[100:-100]
    sinks.offer(call_id, into)
    return sinks, FrameReader(sinks=sinks), into


def reply(tensors: Sequence[Outgoing], *, call_id: int = 1, number: int = 0) -> list[bytes]:
    """The parts of an answer."""
    return parts_of(encode_message(CallReply(call_id=call_id, body={}, tensors=tuple(tensors))), number)


def is_untouched(whole: Tensor) -> bool:
    return bool((whole == NOBODYS).all())


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("sizes", [(2**20,), (1, 16, 4096, 77_777)])
def test_an_answer_is_received_into_the_memory_that_is_offered(size: int, sizes: tuple[int, ...]) -> None:
    """However the bytes come: all of it, nothing beside it, and the frame's tensor is a view that cannot be written."""
    whole = memory(size)
    _, reader, into = offered(whole)
    [frame] = read(b"".join(reply([values(size)])), sizes=sizes, reader=reader)
    [tensor] = frame.tensors
    assert tensor.ctypes.data == into.ctypes.data
    assert (tensor.flags.writeable, into.flags.writeable) == (False, True)
    assert np.array_equal(into, values(size))
    assert is_untouched(edges(whole))
    assert put_into(into, frame.tensors)[0].base is not None
    assert np.array_equal(into, values(size))


def test_memory_of_any_dtype_and_shape_is_taken() -> None:
    sinks = Sinks()
    arrays = [np.zeros(shape, dtype) for shape in ((), (3, 4), (2, 1, 5)) for dtype in (np.int8, ml_dtypes.bfloat16)]
    reader = FrameReader(sinks=sinks)
    for call_id, array in enumerate(arrays, 1):
        sinks.offer(call_id, array)
        [frame] = read(b"".join(reply([np.ones_like(array)], call_id=call_id)), reader=reader)
        assert (array == 1).all()
        assert frame.tensors[0].shape == array.shape


UNFIT: dict[str, Any] = {
    "one number more": reply([values(SMALL + 1)]),
    "one number less": reply([values(SMALL - 1)]),
    "a huge one": reply([values(LARGE)]),
    "another dtype": reply([np.arange(SMALL, dtype=np.int32)]),
    "as many bytes of another dtype": reply([np.arange(SMALL // 2, dtype=np.float64)]),
    "another shape": reply([values(SMALL).reshape(10, -1)]),
    "two tensors": reply([values(SMALL), values(SMALL)]),
    "none": reply([]),
    "compressed": reply([Compressed(values(SMALL), Compression.FLOAT16)]),
    "to another call": reply([values(SMALL)], call_id=2),
    "a partial": parts_of(encode_message(CallPartial(call_id=1, body={}, tensors=(values(SMALL),)))),
    "a call": parts_of(
        encode_message(CallStart(call_id=1, method="m", timeout_s=1.0, body={}, tensors=(values(SMALL),)))
    ),
    "an additional field": parts_of(encode_frame({"type": "reply", "id": 1, "body": {}, "x": 1}, [values(SMALL)])),
    "a missing field": parts_of(encode_frame({"type": "reply", "id": 1}, [values(SMALL)])),
    "an id that is a truth value": parts_of(encode_frame({"type": "reply", "id": True, "body": {}}, [values(SMALL)])),
    "an id that is a list": parts_of(encode_frame({"type": "reply", "id": [1], "body": {}}, [values(SMALL)])),
    "a body that is no map": parts_of(encode_frame({"type": "reply", "id": 1, "body": 0}, [values(SMALL)])),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_is_no_answer_of_the_very_form_is_received_elsewhere(name: str) -> None:
    whole = memory(SMALL)
    _, reader, into = offered(whole)
    [frame] = read(b"".join(UNFIT[name]), reader=reader)
    assert is_untouched(whole)
    assert not any(np.may_share_memory(tensor, into) for tensor in frame.tensors if isinstance(tensor, np.ndarray))
    read(b"".join(reply([values(SMALL)])), reader=reader)  # the offer still stands
    assert np.array_equal(into, values(SMALL))


@pytest.mark.parametrize("kind", [WHOLE, OPEN])
def test_nothing_is_written_for_a_header_that_disagrees_with_the_length(kind: int) -> None:
    """A frame of 4000 bytes that announces 4004, or a large one as much more than its table."""
    size = SMALL if kind == WHOLE else LARGE
    whole = memory(size)
    _, reader, _ = offered(whole)
    head = encode({"type": "reply", "id": 1, "body": {}, "tensors": [["float32", [size]]]})
    data = preamble(kind, len(head), 4 * size + 4) + head + b"\xff" * 4096
    with pytest.raises(RemoteProtocolError, match="disagree"):
        read(data, reader=reader)
    assert is_untouched(whole)


def test_a_chunk_that_goes_beyond_the_answer_is_not_written() -> None:
    whole = memory(LARGE)
    _, reader, into = offered(whole)
    *most, last = reply([values(LARGE)])
    come = sum(len(each) - 16 for each in most[1:]) // 4  # numbers; each part begins with 16 bytes of its own
    with pytest.raises(RemoteProtocolError, match="no more than the"):
        read(b"".join(most) + chunk(0, last[16:] + bytes(1)), reader=reader)
    assert np.array_equal(into[:come], values(come))
    assert is_untouched(whole[100 + come :])


@pytest.mark.parametrize("num_before", [1, 2, 4])
@pytest.mark.parametrize("is_within_a_chunk", [False, True])
def test_an_answer_that_is_under_way_when_its_call_ends_goes_elsewhere(
    num_before: int, is_within_a_chunk: bool
) -> None:
    """The memory belongs to somebody else by then; the frame itself is parsed to its end, and the next one too."""
    whole = memory(LARGE)
    sinks, reader, into = offered(whole)
    parts = reply([values(LARGE)])
    assert len(parts) == 5
    data, come = b"".join(parts), sum(len(each) for each in parts[:num_before]) + 100 * is_within_a_chunk
    assert read(data[:come], reader=reader) == []
    sinks.withdraw(1)
    whole[:] = NOBODYS
    [frame] = read(data[come:], reader=reader)
    assert is_untouched(whole)
    assert frame.tensors[0].shape == (LARGE,)
    assert not np.may_share_memory(frame.tensors[0], into)
    [after] = read(b"".join(reply([values(SMALL)], call_id=2)), reader=reader)
    assert np.array_equal(after.tensors[0], values(SMALL))


def test_an_answer_that_comes_twice_is_received_elsewhere_the_second_time() -> None:
    """Also while the first one is still coming in: two frames never share memory."""
    whole = memory(LARGE)
    _, reader, into = offered(whole)
    first, second = reply([values(LARGE)]), reply([-values(LARGE)], number=1)
    data = first[0] + second[0] + b"".join(a + b for a, b in zip(second[1:], first[1:], strict=True))
    frames = read(data, reader=reader)
    assert [float(frame.tensors[0][-1]) for frame in frames] == [-(LARGE - 1.0), LARGE - 1.0]  # type: ignore[index]
    assert np.array_equal(into, values(LARGE))


def test_an_answer_that_is_given_up_and_comes_again_is_received_elsewhere() -> None:
    whole = memory(LARGE)
    _, reader, into = offered(whole)
    opening, first, *_ = reply([values(LARGE)])
    [frame] = read(opening + first + preamble(3, 0, 0) + b"".join(reply([-values(LARGE)], number=1)), reader=reader)
    assert np.array_equal(np.asarray(frame.tensors[0]), -values(LARGE))
    put_into(into, frame.tensors)
    assert np.array_equal(into, -values(LARGE))


def frozen(array: Tensor) -> Tensor:
    array.flags.writeable = False
    return array


def test_memory_that_cannot_be_received_into_is_refused() -> None:
    wrong = [frozen(np.zeros(3)), np.zeros((4, 4))[:, 1], np.zeros(3, ">f4"), np.zeros(3, np.complex64)]
    for into in (*wrong, np.zeros((1,) * 9), [0.0]):
        with pytest.raises(ValueError, match="received"):
            check_sink(into)


def server_id(ends: Ends) -> PeerId:
    return ends.server.peer_id or SERVER


def client_id(ends: Ends) -> PeerId:
    return ends.client.peer_id or CLIENT


async def accepted(listener: Listener, ends: Ends) -> Link:
    """The next connection, made by hand: greeted, and not served."""
    link = await listener.accept()
    await link.handshake()
    await link.send(hello(server_id(ends)))
    return link


async def next_call(link: Link) -> CallStart:
    """The next call of the other end, which is told that it need not dial lanes."""
    while (frame := await link.receive()) is not None:
        message = parse_untrusted(frame)
        if isinstance(message, CallStart) and message.method == LANES:
            await link.send(part(CallReply(call_id=message.call_id, body={"most": 0})))
        elif isinstance(message, CallStart):
            return message
    raise AssertionError("the other end has gone")


def in_two(whole: Part) -> list[Part]:
    """A part that leaves in two writes."""
    data = b"".join(whole.pieces)
    cut = len(data) // 2
    return [Part(pieces=(each,), nbytes=len(each), frame=None) for each in (data[:cut], data[cut:])]


@on_every_network
async def test_a_call_has_its_answer_where_it_asked_for_it(ends: Ends) -> None:
    """Small and large, also of a peer that calls itself; what does not fit comes as it is."""

    async def answer(request: Request) -> Reply:
        return Reply(tensors=tuple(values(size) for size in request.body["sizes"]))

    async with (
        open_rpc_peer(ends.server, peer_id=server_id(ends), listen=ends.any_port) as server,
        open_rpc_peer(ends.client, peer_id=client_id(ends)) as client,
    ):
        server.add_handler("answer", answer)
        for caller in (client, server):
            for size in (SMALL, LARGE):
                whole = memory(size)
                into = whole[100:-100]
                call = functools.partial(caller.call, server.address, "answer", timeout_s=HOUR_S, into=into)
                got = await call({"sizes": [size]})
                assert [tensor.ctypes.data for tensor in got.tensors] == [into.ctypes.data]
                assert not got.tensors[0].flags.writeable
                assert np.array_equal(into, values(size))
                whole[:] = NOBODYS
                for sizes in ([size - 1], [size, size], []):
                    got = await call({"sizes": sizes})
                    assert [tensor.size for tensor in got.tensors] == sizes
                    assert is_untouched(whole)
        with pytest.raises(ValueError, match="writable"):
            await client.call(server.address, "answer", {}, timeout_s=HOUR_S, into=frozen(values(3)))


@on_every_network
async def test_what_comes_after_a_call_was_given_up_is_not_written(ends: Ends) -> None:
    """The reader waits within the answer, for more of it, when its caller is cancelled and uses the memory again."""
    whole = memory(LARGE)
    async with open_rpc_peer(ends.client, peer_id=client_id(ends)) as client, trio.open_nursery() as nursery:
        listener = await ends.server.listen(ends.any_port)
        scope = trio.CancelScope()

        async def call() -> None:
            with scope:
                await client.call(listener.address, "m", {}, timeout_s=HOUR_S, into=whole[100:-100])

        nursery.start_soon(call)
        link = await accepted(listener, ends)
        start = await next_call(link)
        parts = link_parts(encode_message(CallReply(call_id=start.call_id, body={}, tensors=(values(LARGE),))))
        if isinstance(ends.client, TcpTransport | TlsTransport):  # simulated networks carry whole parts
            parts[1:2] = in_two(parts[1])
        await link.send(*parts[:2])
        await ends.settle()
        scope.cancel()
        await ends.settle()
        whole[:] = NOBODYS
        await link.send(*parts[2:])

        async def answer() -> None:
            again = await next_call(link)
            await link.send(part(CallReply(call_id=again.call_id, body={})))

        nursery.start_soon(answer)
        await client.call(listener.address, "after", {}, timeout_s=HOUR_S)  # it has read all of the late answer
        assert is_untouched(whole)
        link.abort()
        await listener.aclose()


@on_every_network
async def test_a_call_whose_connection_breaks_within_the_answer_leaves_its_memory_alone(ends: Ends) -> None:
    whole = memory(LARGE)
    async with open_rpc_peer(ends.client, peer_id=client_id(ends)) as client, trio.open_nursery() as nursery:
        listener = await ends.server.listen(ends.any_port)

        async def break_off() -> None:
            link = await accepted(listener, ends)
            start = await next_call(link)
            answer = CallReply(call_id=start.call_id, body={}, tensors=(values(LARGE),))
            await link.send(*link_parts(encode_message(answer))[:2])
            await ends.settle()
            link.abort()
            await listener.aclose()

        nursery.start_soon(break_off)
        with pytest.raises(PeerUnavailable):
            await client.call(listener.address, "m", {}, timeout_s=HOUR_S, into=whole[100:-100])
        assert is_untouched(edges(whole))


def faulty(fault: str, size: int) -> CallReply:
    """A reducer's answer that does not count."""
    tensor: Tensor = np.full(size + {"one more": 1, "one less": -1}.get(fault, 0), NOBODYS)
    if fault == "not finite":
        tensor[-1] = np.nan
    if fault == "int32":
        tensor = tensor.astype(np.int32)
    weight = -1.0 if fault == "a weight below 0" else 2.0
    return CallReply(call_id=0, body={"senders": 2, "difference": False, "weight": weight}, tensors=(tensor,))


@pytest.mark.parametrize("fault", ["half of it", "not finite", "one more", "one less", "int32", "a weight below 0"])
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_an_average_holds_nothing_of_an_answer_that_does_not_count(network: Network, fault: str) -> None:
    """A reducer that dies within its answer, or sends what no mean can be: own values, and no other trace of it."""
    size = 250_000

    async def answer(listener: Listener, ends: Ends) -> None:
        link = await accepted(listener, ends)
        start = await next_call(link)
        parts = link_parts(encode_message(replace(faulty(fault, size), call_id=start.call_id)))
        await link.send(*(parts[:2] if fault == "half of it" else parts))
        await ends.settle()
        link.abort()

    async def body(ends: Ends) -> None:
        async with open_rpc_peer(ends.client, peer_id=client_id(ends)) as client, trio.open_nursery() as nursery:
            listener = await ends.server.listen(ends.any_port)
            nursery.start_soon(answer, listener, ends)
            members = (
                Member(peer_id=client_id(ends), address=None, role=Role.CLIENT),  # it reduces nothing
                Member(peer_id=server_id(ends), address=listener.address),
            )
            all_reduce = AllReduce(client, prefix="test", config=AllReduceConfig(chunk_bytes=4 * size))
            group = Group(group_id=b"g" * 16, members=members, side=2)
            result = await all_reduce.run(group, values(size), size=size)
            assert (result.received, result.complete) == (0.0, False)
            assert result.lost_reducers == (server_id(ends),)
            assert np.array_equal(result.average, values(size))
            await listener.aclose()

    on_every_network(body)(network)
