"""Handlers that begin a call and return: answered later, given up, and failing; for others and for a peer itself."""

import gc
import logging
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import trio

from net.errors import CallFailed, CallRefused, ConnectionLost, PeerBusy, PeerTimeout, RemoteFailure
from net.identity import Address
from net.rpc.base import Reply, Request
from net.rpc.connection import CHECK_PERIOD_S
from net.rpc.faults import Fault, FaultInjector, FaultPlan
from net.rpc.peer import open_rpc_peer
from net.rpc.taskless import Answer, GiveUp, TasklessHandler
from net.transport.sim import run, simulate
from net.transport.sim.events import Partition
from net.transport.sim.links import Constant
from tests.net.rpc_peers import CLIENT, LONG_S, SERVER, peers


class Desk:
    """Takes calls in and answers them when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Request, Answer]] = []
        self.came = trio.Event()
        self.given_up = trio.Event()
        self.num_given_up = 0
        self.handler = TasklessHandler(self.begin)

    def begin(self, request: Request, answer: Answer) -> GiveUp:
        if "raise" in request.body:
            raise {"refuse": CallRefused("not for you"), "fail": KeyError("broken")}[request.body["raise"]]
        if "at once" in request.body:
            answer(Reply(body={"at": "once"}))
        else:
            self.waiting.append((request, answer))
            self.came.set()
            self.came = trio.Event()

        def give_up() -> None:
            self.num_given_up += 1
            self.given_up.set()

        return give_up

    async def until(self, count: int) -> None:
        while len(self.waiting) < count:
            await self.came.wait()


both = pytest.mark.parametrize("is_own", [False, True], ids=["another", "itself"])


@both
async def test_calls_are_answered_in_any_order(is_own: bool) -> None:
    """Several wait at once; each gets its own answer, and what comes ahead of it."""
    async with peers() as (server, client, address):
        caller, desk = (server if is_own else client), Desk()
        server.add_handler("desk", desk.handler)
        got: dict[int, Any] = {}
        ahead: list[Any] = []

        async def ask(number: int) -> None:
            reply = await caller.call(
                address, "desk", {"n": number}, (np.full(3, number),), timeout_s=LONG_S, on_partial=ahead.append
            )
            got[number] = (reply.body, [tensor.tolist() for tensor in reply.tensors])

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(ask, number)
            await desk.until(3)
            for request, answer in sorted(desk.waiting, key=lambda each: -int(each[0].body["n"])):
                assert request.send_partial is not None
                assert request.send_partial(Reply(body={"ahead": request.body["n"]}))
                answer(Reply(body={"n": request.body["n"]}, tensors=request.tensors))
                answer(Reply(body={"n": "a second answer"}))  # changes nothing
        assert got == {number: ({"n": number}, [[number] * 3]) for number in range(3)}
        assert sorted(part.body["ahead"] for part in ahead) == [0, 1, 2]
        assert (await caller.call(address, "desk", {"at once": True}, timeout_s=LONG_S)).body == {"at": "once"}
        assert desk.num_given_up == 0


@both
async def test_what_goes_wrong_reaches_the_caller(is_own: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Its own words, or that it failed; and no call keeps its place."""
    async with peers() as (server, client, address):
        caller, desk = (server if is_own else client), Desk()
        server.add_handler("desk", desk.handler, max_concurrent=1)
        with pytest.raises(CallRefused, match="not for you"):
            await caller.call(address, "desk", {"raise": "refuse"}, timeout_s=LONG_S)
        caplog.set_level(logging.CRITICAL)
        with pytest.raises(RemoteFailure, match="log of the peer"):
            await caller.call(address, "desk", {"raise": "fail"}, timeout_s=LONG_S)
        for outcome, expected in (
            (CallRefused("after all"), CallRefused),
            ({"no": "reply"}, RemoteFailure),
            (Reply(body={"cannot be sent": object()}), CallFailed if not is_own else Exception),
        ):

            async def settle(outcome: Any = outcome) -> None:
                await desk.until(1)
                desk.waiting.pop()[1](outcome)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(settle)
                with pytest.raises(expected):
                    await caller.call(address, "desk", {}, timeout_s=LONG_S)


async def test_a_call_holds_its_place_until_it_is_answered() -> None:
    """One more is turned away at once."""
    async with peers() as (server, client, address), trio.open_nursery() as nursery:
        desk = Desk()
        server.add_handler("desk", desk.handler, max_concurrent=1)

        async def ask() -> None:
            await client.call(address, "desk", {}, timeout_s=LONG_S)

        nursery.start_soon(ask)
        await desk.until(1)
        with pytest.raises(PeerBusy):
            await ask()
        desk.waiting.pop()[1](Reply())
        with trio.fail_after(LONG_S):
            await client.call(address, "desk", {"at once": True}, timeout_s=LONG_S)


@both
async def test_a_caller_who_gives_up_is_told_of(is_own: bool) -> None:
    """Its answer changes nothing afterwards, and its place is free."""
    async with peers() as (server, client, address):
        caller, desk = (server if is_own else client), Desk()
        server.add_handler("desk", desk.handler, max_concurrent=1)
        with pytest.raises(PeerTimeout):
            await caller.call(address, "desk", {}, timeout_s=0.05)
        with trio.fail_after(LONG_S):
            await desk.given_up.wait()
        desk.waiting.pop()[1](Reply())
        assert (await caller.call(address, "desk", {"at once": True}, timeout_s=LONG_S)).body == {"at": "once"}
        assert desk.num_given_up == 1


async def test_the_end_of_the_connection_gives_all_calls_up() -> None:
    """An answer afterwards changes nothing."""
    desk, num_lost = Desk(), 0
    async with peers() as (server, client, address):
        server.add_handler("desk", desk.handler)

        async def ask() -> None:
            nonlocal num_lost
            with pytest.raises(ConnectionLost):
                await client.call(address, "desk", {}, timeout_s=LONG_S)
            num_lost += 1

        with trio.fail_after(LONG_S):
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(ask)
                await desk.until(2)
                connections = list(client._connections)
                for connection in connections:
                    connection.end(ConnectionLost("cut"))
            assert num_lost == 2
            while desk.num_given_up < 2:
                desk.given_up = trio.Event()
                await desk.given_up.wait()
        for _, answer in desk.waiting:
            answer(Reply())


async def test_an_answered_call_is_not_left_to_the_garbage_collector() -> None:
    """What a call holds may be large: it is gone with the answer."""

    class Work:
        """What a handler puts somewhere: it knows how to answer, and how it is given up leads to it."""

        def __init__(self, answer: Answer) -> None:
            self.answer = answer

        def give_up(self) -> None: ...

    works: list[weakref.ref[Work]] = []
    waiting: list[Work] = []

    def begin(request: Request, answer: Answer) -> GiveUp:
        work = Work(answer)
        works.append(weakref.ref(work))
        waiting.append(work)
        if request.body["at once"]:
            waiting.pop().answer(Reply())
        return work.give_up

    async with peers() as (server, client, address):
        server.add_handler("work", TasklessHandler(begin))
        gc.disable()
        try:
            await client.call(address, "work", {"at once": True}, timeout_s=LONG_S)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: client.call(address, "work", {"at once": False}, timeout_s=LONG_S))
                while not waiting:  # noqa: ASYNC110
                    await trio.sleep(0.01)
                waiting.pop().answer(Reply())
            assert [work() for work in works] == [None, None]
        finally:
            gc.enable()


async def test_faults_strike_such_calls_too() -> None:
    """Where answers are to go wrong a call has a task again."""
    faults = FaultInjector(FaultPlan(rates={Fault.REFUSE: 1.0}, methods=("desk",)))
    async with peers(faults=faults) as (server, client, address):
        server.add_handler("desk", Desk().handler)
        with pytest.raises(CallRefused, match="on purpose"):
            await client.call(address, "desk", {"at once": True}, timeout_s=LONG_S)


def test_what_a_dead_caller_wanted_is_given_up_after_its_deadline() -> None:
    """In virtual time: its line is cut, so that nobody says so; long before the connection is found to be dead."""

    async def main() -> float:
        desk = Desk()
        async with (
            simulate(latency=Constant(0.05)) as network,
            open_rpc_peer(network.transport("s", SERVER), peer_id=SERVER, listen=Address("s", 7)) as server,
            open_rpc_peer(network.transport("c", CLIENT), peer_id=CLIENT) as client,
            trio.open_nursery() as nursery,
        ):
            server.add_handler("desk", desk.handler)

            async def place() -> None:
                with suppress(PeerTimeout):
                    await client.call(Address("s", 7), "desk", {}, timeout_s=12.0)

            nursery.start_soon(place)
            await desk.until(1)
            network.apply(Partition(groups=(frozenset("s"), frozenset("c"))))
            await desk.given_up.wait()
            took_s = trio.current_time()
            nursery.cancel_scope.cancel()
        return took_s

    assert 12 <= run(main) <= 12 + 2 * CHECK_PERIOD_S
