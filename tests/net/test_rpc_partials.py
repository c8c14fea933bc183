"""Parts of an answer ahead of the reply, between peers over real TCP and of a peer to itself."""

from typing import Any

import numpy as np
import pytest
import trio

from dmoe_net.errors import CallRefused, ConnectionLost, PeerTimeout, RemoteProtocolError
from dmoe_net.identity import Address
from dmoe_net.rpc.base import Caller, Reply, Request
from dmoe_net.rpc.faults import Fault, FaultInjector, FaultPlan
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.tcp import TcpTransport
from tests.net.rpc_peers import ANY_PORT, CLIENT, LONG_S, SERVER, peers


class Counting:
    """A handler that answers three numbers, each when it is told to, and says in the reply how many went ahead."""

    def __init__(self) -> None:
        self.may_send = [trio.Event() for _ in range(3)]

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
    """All is in the reply."""
    async with peers() as (server, client, address):
        server.add_handler("count", counting := Counting())
        for event in counting.may_send:
            event.set()
        reply = await client.call(address, "count", {}, timeout_s=LONG_S)
        assert reply.tensors[0].tolist() == [0, 1, 2]


async def test_what_came_ahead_stays_when_the_rest_never_comes() -> None:
    """The time is up, or the peer is gone: the caller has had the first part, and the error."""
    got: list[Reply] = []
    async with peers() as (server, client, address):
        server.add_handler("count", counting := Counting())
        counting.may_send[0].set()
        with pytest.raises(PeerTimeout):
            await client.call(address, "count", {}, timeout_s=0.2, on_partial=got.append)
    assert [reply.tensors[0].tolist() for reply in got] == [[0]]
    got.clear()
    async with open_rpc_peer(TcpTransport(), peer_id=CLIENT) as client, trio.open_nursery() as nursery:
        closed, listening = trio.Event(), trio.Event()
        addresses: list[Address] = []

        async def serve() -> None:
            async with open_rpc_peer(TcpTransport(), peer_id=SERVER, listen=ANY_PORT) as server:
                server.add_handler("count", counting := Counting())
                counting.may_send[0].set()
                assert server.address is not None
                addresses.append(server.address)
                listening.set()
                await closed.wait()

        def take(reply: Reply) -> None:
            got.append(reply)
            closed.set()

        nursery.start_soon(serve)
        await listening.wait()
        with pytest.raises(ConnectionLost):
            await client.call(addresses[0], "count", {}, timeout_s=LONG_S, on_partial=take)
    assert [reply.tensors[0].tolist() for reply in got] == [[0]]


async def test_what_the_callers_function_raises_is_the_callers() -> None:
    """It comes out of the call, which is called off; the connection and other calls go on."""
    async with peers() as (server, client, address):
        server.add_handler("count", counting := Counting())
        counting.may_send[0].set()

        def fail(reply: Reply) -> None:
            raise ZeroDivisionError(reply.body)

        with pytest.raises(ZeroDivisionError):
            await client.call(address, "count", {}, timeout_s=LONG_S, on_partial=fail)
        await client.call(address, "rpc.ping", {}, timeout_s=LONG_S)


@pytest.mark.parametrize("fault", [Fault.WRONG_SHAPE, Fault.GARBAGE, Fault.DIE])
async def test_a_fault_strikes_the_whole_answer(fault: Fault) -> None:
    """Nothing of it goes ahead of the harm."""
    faults = FaultInjector(FaultPlan(rates={fault: 1.0}, methods=("count",)))
    got: list[Reply] = []
    async with peers(faults=faults) as (server, client, address):
        server.add_handler("count", counting := Counting())
        for event in counting.may_send:
            event.set()
        try:
            reply = await client.call(address, "count", {}, timeout_s=LONG_S, on_partial=got.append)
            assert reply.tensors[0].tolist() == [[0, 1, 2]]
        except (ConnectionLost, RemoteProtocolError):
            assert fault is not Fault.WRONG_SHAPE
    assert got == []
