"""Peers that call each other over real TCP, also with parts of an answer ahead of the reply; events end all waits."""

import math
import random
import re
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import trio
import trio.testing

from dmoe_net.errors import (
    CallRefused,
    ConnectionLost,
    DialFailed,
    PeerBusy,
    PeerTimeout,
    RemoteFailure,
    RemoteProtocolError,
)
from dmoe_net.identity import Address, PeerId
from dmoe_net.rpc.base import Caller, Reply, Request, handlers
from dmoe_net.rpc.faults import Fault, FaultInjector, FaultPlan
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.wire.messages import CallStart
from tests.net.rpc_peers import ANY_PORT, CLIENT, LONG_S, SERVER, Clumsy, Stuck, echo, hello, part, peers


async def test_a_call_carries_body_and_tensors_both_ways() -> None:
    """The body and tensors that the handler echoes come back bit for bit, aligned and read-only; bfloat16 included."""
    half = np.array([1.5, -2], ml_dtypes.bfloat16)
    tensors = [np.arange(12.0).reshape(3, 4), half, np.zeros((0, 2), np.int8)]
    async with peers() as (server, client, address):
        server.add_handler("echo", echo)
        body = {"uid": "ffn.3.17", "ids": [1, 2.5, None, True, b"\x00"]}
        reply = await client.call(address, "echo", body, tensors, timeout_s=LONG_S)
    assert reply.body == body
    for sent, got in zip(tensors, reply.tensors, strict=True):
        assert (got.dtype, got.shape, got.tobytes()) == (sent.dtype, sent.shape, sent.tobytes())
        assert not got.flags.writeable
        assert got.size == 0 or got.ctypes.data % 64 == 0


async def test_the_handler_knows_its_caller() -> None:
    """It knows its id and where it listens: None; the host that it calls from, with the port that it says; or the host
    that it says as well, since behind a router or in a container it knows better."""
    seen: list[tuple[PeerId, Address | None]] = []

    async def remember(request: Request) -> Reply:
        seen.append((request.peer_id, request.peer_address))
        return Reply()

    ids = [PeerId(bytes([letter]) * 32) for letter in b"xy"]
    async with (
        peers() as (server, client, address),
        open_rpc_peer(TcpTransport(), peer_id=ids[0], listen=ANY_PORT) as other,
        open_rpc_peer(TcpTransport(), peer_id=ids[1], listen=ANY_PORT, announce="localhost") as announced,
    ):
        server.add_handler("remember", remember)
        for peer in (client, other, announced):
            await peer.call(address, "remember", {}, timeout_s=LONG_S)
        assert seen == [(CLIENT, None), (ids[0], other.address), (ids[1], announced.address)]
        assert client.address is None
        assert isinstance(client, Caller)
        assert announced.address.host == "localhost"


@pytest.mark.parametrize("announce", ["[::1]", "host:4000", "0.0.0.0", "::", "", "a b", "x@y"])
async def test_nobody_is_told_to_call_what_is_no_host(announce: str) -> None:
    """Others would keep the address and try it again and again."""
    why = f"announce must be a host name or an address, .*got {re.escape(repr(announce))}"
    with pytest.raises(ValueError, match=why):
        async with open_rpc_peer(TcpTransport(), peer_id=CLIENT, listen=ANY_PORT, announce=announce):
            pass


async def test_every_peer_answers_ping_and_can_call_itself() -> None:
    async with peers() as (server, client, address):
        for caller in (client, server):
            assert await caller.call(address, "rpc.ping", {}, timeout_s=LONG_S) == Reply(body={}, tensors=())


async def test_64_concurrent_callers_share_one_connection() -> None:
    async with peers() as (server, client, address):
        server.add_handler("echo", echo, max_concurrent=64)

        async def caller(index: int) -> None:
            for turn in range(10):
                tensor = np.full(index + 1, turn, np.int32)
                reply = await client.call(address, "echo", {"i": index}, [tensor], timeout_s=LONG_S)
                assert reply.body == {"i": index}
                assert np.array_equal(reply.tensors[0], tensor)

        async with trio.open_nursery() as nursery:
            for index in range(64):
                nursery.start_soon(caller, index)
        assert (client.statistics().outgoing, server.statistics().incoming) == (1, 1)


async def test_large_tensors_both_ways_at_once() -> None:
    tensor = np.random.default_rng(0).integers(0, 255, 24 * 2**20, np.uint8)
    async with peers() as (server, client, address):
        server.add_handler("echo", echo)

        async def caller() -> None:
            reply = await client.call(address, "echo", {}, [tensor], timeout_s=LONG_S)
            assert np.array_equal(reply.tensors[0], tensor)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(caller)
            nursery.start_soon(caller)


async def test_the_deadline_ends_the_call_and_the_handler() -> None:
    async with peers() as (server, client, address):
        server.add_handler("stuck", stuck := Stuck())
        with pytest.raises(PeerTimeout, match=r"'stuck' within 0\.05 s"):
            await client.call(address, "stuck", {}, timeout_s=0.05)
        await stuck.cancelled.wait()
        await client.call(address, "rpc.ping", {}, timeout_s=LONG_S)


@pytest.mark.parametrize("is_lost", [False, True], ids=["deadline", "lost"])
async def test_a_handler_ends_when_nobody_waits_any_more(is_lost: bool) -> None:
    """It is cancelled at its caller's deadline even if no cancellation is ever sent, and when its caller is gone."""
    async with peers() as (server, _, address):
        server.add_handler("stuck", stuck := Stuck())
        link = await TcpTransport().dial(address)
        start = CallStart(call_id=1, method="stuck", timeout_s=LONG_S if is_lost else 0.02, body={})
        await link.send(hello(), part(start))
        await stuck.started.wait()
        if is_lost:
            link.abort()
        await stuck.cancelled.wait()
        await link.aclose()


async def test_a_deadline_that_has_passed() -> None:
    async with peers() as (server, client, address):
        server.add_handler("stuck", stuck := Stuck())
        for timeout_s in (0.0, -1.0):
            with pytest.raises(PeerTimeout, match="no time left"):
                await client.call(address, "stuck", {}, timeout_s=timeout_s)
            await client.call(address, "rpc.ping", {}, timeout_s=LONG_S)
        assert stuck.num_started == 0


async def test_a_call_needs_a_deadline() -> None:
    async with open_rpc_peer(TcpTransport(), peer_id=CLIENT) as client:
        for timeout_s in (math.nan, math.inf, 1e9):
            with pytest.raises(ValueError, match="timeout_s"):
                await client.call(Address("127.0.0.1", 1), "m", {}, timeout_s=timeout_s)


async def test_cancelling_the_caller_cancels_the_handler() -> None:
    """Giving up reaches the server; other calls on the connection do not notice."""
    async with peers() as (server, client, address), trio.open_nursery() as nursery:
        server.add_handler("stuck", stuck := Stuck())
        server.add_handler("other", other := Stuck())
        nursery.start_soon(partial(client.call, address, "other", {}, timeout_s=LONG_S))
        async with trio.open_nursery() as inner:
            inner.start_soon(partial(client.call, address, "stuck", {}, timeout_s=LONG_S))
            await stuck.started.wait()
            inner.cancel_scope.cancel()
        await stuck.cancelled.wait()
        assert not other.cancelled.is_set()
        other.let_go.set()


async def test_callers_that_give_up_at_random_do_not_harm_the_stream() -> None:
    """300 calls with tensors, a third cancelled at some point: the others all get their own answer."""
    rng = random.Random(0)
    async with peers() as (server, client, address):
        server.add_handler("echo", echo, max_concurrent=256)
        num_answered = 0

        async def caller(index: int, num_checkpoints: int | None) -> None:
            nonlocal num_answered
            async with trio.open_nursery() as nursery:
                if num_checkpoints is not None:
                    nursery.start_soon(cancel_after, num_checkpoints, nursery.cancel_scope)
                tensor = np.full(5000, index, np.int32)
                reply = await client.call(address, "echo", {"i": index}, [tensor], timeout_s=LONG_S)
                assert reply.body == {"i": index}
                assert np.array_equal(reply.tensors[0], tensor)
                num_answered += 1

        async def cancel_after(num_checkpoints: int, scope: trio.CancelScope) -> None:
            for _ in range(num_checkpoints):
                await trio.lowlevel.checkpoint()
            scope.cancel()

        for _ in range(3):
            async with trio.open_nursery() as nursery:
                for index in range(100):
                    nursery.start_soon(caller, index, rng.randrange(40) if index % 3 == 0 else None)
        assert num_answered >= 198  # 66 of each hundred were never cancelled
        await client.call(address, "rpc.ping", {}, timeout_s=LONG_S)


async def test_a_method_has_a_bounded_number_of_places() -> None:
    """Calls beyond max_concurrent are PeerBusy at once, and counted; places come free again."""
    async with peers() as (server, client, address), trio.open_nursery() as nursery:
        server.add_handler("stuck", stuck := Stuck(), max_concurrent=1)

        async def call() -> None:
            await client.call(address, "stuck", {}, timeout_s=LONG_S)

        nursery.start_soon(call)
        await stuck.started.wait()
        with pytest.raises(PeerBusy, match="'stuck'"):
            await call()
        with pytest.raises(CallRefused, match="unknown method"):
            await client.call(address, "sticky", {}, timeout_s=LONG_S)
        assert server.statistics().turned_away == {"busy": 1, "unknown method": 1}
        stuck.let_go.set()
        with trio.fail_after(LONG_S):
            while True:  # the place is free once the first answer is out; each turn is a whole round trip
                try:
                    await call()
                    break
                except PeerBusy:
                    continue
    assert stuck.num_started == 2


async def test_refusals_carry_the_handlers_message() -> None:
    """CallRefused and PeerBusy of a handler arrive as they were raised; unknown methods are refused by name."""
    errors = {"refuse": CallRefused("expected float32, got int8"), "busy": PeerBusy("the queue holds 128 requests")}

    async def fail(request: Request) -> Reply:
        raise errors[request.method]

    async with peers() as (server, client, address):
        for method, error in errors.items():
            server.add_handler(method, fail)
            with pytest.raises(type(error), match=f"^{error}$"):
                await client.call(address, method, {}, timeout_s=LONG_S)
        with pytest.raises(CallRefused, match="unknown method 'nothing'"):
            await client.call(address, "nothing", {}, timeout_s=LONG_S)


async def test_a_removed_method_is_unknown_and_its_calls_go_on() -> None:
    """The call that runs is answered by the old handler, the next one refused, the one after a new handler's; the new
    one has all its places. What is not served, and the ping, cannot be removed."""
    began, end = trio.Event(), trio.Event()

    async def old(_: Request) -> Reply:
        began.set()
        await end.wait()
        return Reply(body={"by": "old"})

    async def new(_: Request) -> Reply:
        return Reply(body={"by": "new"})

    async with peers() as (server, client, address):
        answers = []

        async def call() -> None:
            answers.append((await client.call(address, "work", {}, timeout_s=LONG_S)).body)

        server.add_handler("work", old, max_concurrent=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await began.wait()
            server.remove_handler("work")
            with pytest.raises(CallRefused, match="unknown method 'work'"):
                await call()
            server.add_handler("work", new, max_concurrent=1)
            await call()
            end.set()
        await call()
        assert answers == [{"by": "new"}, {"by": "old"}, {"by": "new"}]
        for method in ("nothing", "rpc.ping"):
            with pytest.raises(ValueError, match="no handler to remove"):
                server.remove_handler(method)


async def test_handlers_are_served_as_long_as_their_block() -> None:
    """All or none of them: if one name is taken, the others are free; after the block all are."""
    async with peers() as (server, client, address):
        call = partial(client.call, address, body={}, timeout_s=LONG_S)
        with handlers(server, {"a": echo, "b": echo}, max_concurrent=2):
            for method in "ab":
                await call(method)
            with pytest.raises(ValueError, match="'b' has a handler"), handlers(server, {"c": echo, "b": echo}):
                raise AssertionError("unreachable")
            with pytest.raises(CallRefused, match="unknown method 'c'"):
                await call("c")
        for method in "ab":
            with pytest.raises(CallRefused, match="unknown method"):
                await call(method)


async def test_a_handler_that_crashes_is_logged_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    """The caller learns that it failed, not why; the log keeps the traceback; the connection lives on."""

    async def crash(request: Request) -> Reply:
        raise KeyError("secret detail")

    async def crash_in_a_group(request: Request) -> Reply:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(crash, request)
        return Reply()

    async def forget_the_reply(request: Request) -> Reply:
        return None  # type: ignore[return-value]

    async def answer_nonsense(request: Request) -> Reply:
        return Reply(body={"x": object()})

    handlers = [crash, crash_in_a_group, forget_the_reply, answer_nonsense]
    async with peers() as (server, client, address):
        for handler in handlers:
            server.add_handler(handler.__name__, handler)
            with pytest.raises(RemoteFailure) as caught:
                await client.call(address, handler.__name__, {}, timeout_s=LONG_S)
            assert "secret" not in str(caught.value)
    assert "secret detail" in caplog.text
    assert sum(record.exc_info is not None for record in caplog.records) == len(handlers)


async def test_a_handler_that_fails_while_it_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    """Its error is logged and goes no further: the connection serves the next call."""
    clumsy = Clumsy(OSError)
    async with peers() as (server, client, address):
        server.add_handler("clumsy", clumsy)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(client.call, address, "clumsy", {}, timeout_s=LONG_S))
            await clumsy.started.wait()
            nursery.cancel_scope.cancel()
        await client.call(address, "rpc.ping", {}, timeout_s=LONG_S)
    assert "while cleaning up" in caplog.text


async def test_a_server_that_dies_fails_its_calls_and_can_come_back() -> None:
    """Calls under way are ConnectionLost, the next dial fails, and after a restart calls work again."""
    num_lost = 0

    async def call() -> None:
        nonlocal num_lost
        with pytest.raises(ConnectionLost):
            await client.call(address, "stuck", {}, timeout_s=LONG_S)
        num_lost += 1

    async with open_rpc_peer(TcpTransport(), peer_id=CLIENT) as client:
        opened = open_rpc_peer(TcpTransport(), peer_id=SERVER, listen=ANY_PORT)
        async with trio.open_nursery() as nursery, opened as server:
            address = server.address
            server.add_handler("stuck", stuck := Stuck())
            for _ in range(3):
                nursery.start_soon(call)
            await stuck.started.wait()
        assert num_lost == 3
        assert stuck.cancelled.is_set()
        with pytest.raises(DialFailed, match="Connection refused"):
            await client.call(address, "rpc.ping", {}, timeout_s=LONG_S)
        async with open_rpc_peer(TcpTransport(), peer_id=SERVER, listen=address):
            await client.call(address, "rpc.ping", {}, timeout_s=LONG_S)


async def test_statistics_count_bytes_connections_and_calls() -> None:
    """Each end receives the bytes that the other sends; calls count while they run, bytes also after the connection."""
    async with peers() as (server, client, address):
        server.add_handler("stuck", stuck := Stuck())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(client.call, address, "stuck", {}, [np.zeros(10_000)], timeout_s=LONG_S))
            await stuck.started.wait()
            placed, served = client.statistics(), server.statistics()
            assert (placed.outgoing, placed.incoming, placed.calls_placed, placed.calls_served) == (1, 0, 1, 0)
            assert (served.outgoing, served.incoming, served.calls_placed, served.calls_served) == (0, 1, 0, 1)
            assert placed.sent_bytes == served.received_bytes
            assert 80_000 < placed.sent_bytes < 81_000
            stuck.let_go.set()
        before = client.statistics()
        assert before.received_bytes == server.statistics().sent_bytes
        assert before.calls_placed == 0
    assert client.statistics().sent_bytes >= before.sent_bytes
    assert (client.statistics().outgoing, client.statistics().received_bytes) == (0, before.received_bytes)


# Parts of an answer ahead of the reply.


class Counting:
    """A handler that answers three numbers, each when it is told to, and says in the reply how many went ahead."""

    def __init__(self) -> None:
        self.may_send = [trio.Event() for _ in range(3)]

    def may_go(self, count: int) -> "Counting":
        """Tell it to answer the first so many at once."""
        for event in self.may_send[:count]:
            event.set()
        return self

    async def __call__(self, request: Request) -> Reply:
        waiting: list[int] = []
        num_ahead = 0
        for number, may_send in enumerate(self.may_send):
            await may_send.wait()
            waiting.append(number)
            reply = Reply(body={"ahead": num_ahead}, tensors=(np.array(waiting),))
            if number < 2 and request.send_partial is not None and request.send_partial(reply):
                num_ahead += len(waiting)
                waiting = []
        if request.body.get("refuse"):
            raise CallRefused("no more")
        return reply


async def numbers_of(caller: Caller, address: Any, counting: Counting, body: dict[str, Any]) -> list[list[int]]:
    """Numbers in each partial reply, which must come before the next number may be sent, and at last in the reply."""
    got: list[list[int]] = []

    def take(reply: Reply) -> None:
        got.append(reply.tensors[0].tolist())
        counting.may_send[len(got)].set()

    counting.may_send[0].set()
    try:
        reply = await caller.call(address, "count", body, timeout_s=LONG_S, on_partial=take)
    except CallRefused:
        return got
    return [*got, reply.tensors[0].tolist()]


@pytest.mark.parametrize("is_own", [False, True], ids=["another", "itself"])
async def test_parts_come_as_they_are_ready(is_own: bool) -> None:
    """Each before the next is ready; those of a call that fails count too."""
    async with peers() as (server, client, address):
        caller = server if is_own else client
        for body, expected in (({}, [[0], [1], [2]]), ({"refuse": True}, [[0], [1]])):
            server.add_handler("count", counting := Counting())
            assert await numbers_of(caller, address, counting, body) == expected
            server.remove_handler("count")


async def test_a_caller_who_takes_no_parts_gets_none() -> None:
    async with peers() as (server, client, address):
        server.add_handler("count", Counting().may_go(3))
        reply = await client.call(address, "count", {}, timeout_s=LONG_S)
        assert reply.tensors[0].tolist() == [0, 1, 2]


async def test_what_came_ahead_stays_when_the_rest_never_comes() -> None:
    """The time is up, or the peer is gone: the caller has had the first part, and the error."""
    got: list[Reply] = []
    async with peers() as (server, client, address):
        server.add_handler("count", Counting().may_go(1))
        with pytest.raises(PeerTimeout):
            await client.call(address, "count", {}, timeout_s=0.2, on_partial=got.append)
    assert [reply.tensors[0].tolist() for reply in got] == [[0]]
    got.clear()
    async with open_rpc_peer(TcpTransport(), peer_id=CLIENT) as client, trio.open_nursery() as nursery:
        closed = trio.Event()

        async def serve(task_status: trio.TaskStatus[Address]) -> None:
            async with open_rpc_peer(TcpTransport(), peer_id=SERVER, listen=ANY_PORT) as server:
                server.add_handler("count", Counting().may_go(1))
                task_status.started(server.address)
                await closed.wait()

        def take(reply: Reply) -> None:
            got.append(reply)
            closed.set()

        address = await nursery.start(serve)
        with pytest.raises(ConnectionLost):
            await client.call(address, "count", {}, timeout_s=LONG_S, on_partial=take)
    assert [reply.tensors[0].tolist() for reply in got] == [[0]]


async def test_what_the_callers_function_raises_is_the_callers() -> None:
    """It comes out of the call, which is called off; the connection and other calls go on."""
    async with peers() as (server, client, address):
        server.add_handler("count", Counting().may_go(1))

        def fail(reply: Reply) -> None:
            raise ZeroDivisionError(reply.body)

        with pytest.raises(ZeroDivisionError):
            await client.call(address, "count", {}, timeout_s=LONG_S, on_partial=fail)
        await client.call(address, "rpc.ping", {}, timeout_s=LONG_S)


@pytest.mark.parametrize("fault", [Fault.WRONG_SHAPE, Fault.GARBAGE, Fault.DIE])
async def test_a_fault_strikes_the_whole_answer(fault: Fault) -> None:
    faults = FaultInjector(FaultPlan(rates={fault: 1.0}, methods=("count",)))
    got: list[Reply] = []
    async with peers(faults=faults) as (server, client, address):
        server.add_handler("count", Counting().may_go(3))
        try:
            reply = await client.call(address, "count", {}, timeout_s=LONG_S, on_partial=got.append)
            assert reply.tensors[0].tolist() == [[0, 1, 2]]
        except (ConnectionLost, RemoteProtocolError):
            assert fault is not Fault.WRONG_SHAPE
    assert got == []
