"""Faults on purpose: each does what the vocabulary says, on a real network, and chance repeats itself; and a peer that
breaks the format in every way, and another one whose calls are served meanwhile."""

import collections
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio

from dmoe_net.errors import CallRefused, ConnectionLost, NetError, PeerTimeout, PeerUnavailable, RemoteProtocolError
from dmoe_net.identity import Address, PeerId
from dmoe_net.rpc.faults import MAX_CALLERS, Fault, FaultInjector, FaultPlan
from dmoe_net.rpc.peer import RpcPeer, open_rpc_peer
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.wire.codec import encode
from dmoe_net.wire.frames import MAX_BODY_BYTES
from dmoe_net.wire.messages import CallCancel, CallReply, CallStart, Credit, Goodbye
from tests.net.rpc_peers import CLIENT, LONG_S, Stuck, echo, hello, part, peers, tcp_listener
from tests.net.wire_parts import CHUNK, MIB, OPEN, RESET, WHOLE, chunk, opening, part_bytes, preamble

TENSOR = np.arange(6, dtype=np.float32).reshape(2, 3)


def always(fault: Fault) -> FaultInjector:
    return FaultInjector(FaultPlan(rates={fault: 1.0}, methods=("echo",)))


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault.REFUSE, CallRefused),
        (Fault.HANG, PeerTimeout),
        (Fault.DIE, ConnectionLost),
        (Fault.GARBAGE, RemoteProtocolError),
    ],
)
async def test_faults_that_fail_the_call(fault: Fault, error: type[NetError]) -> None:
    """The caller gets the error of the table; methods outside the plan are served as ever, on a new connection too."""
    async with peers(faults=always(fault)) as (server, client, address):
        server.add_handler("echo", echo)
        for _ in range(2):
            with pytest.raises(error):
                await client.call(address, "echo", {}, [TENSOR], timeout_s=0.1 if fault is Fault.HANG else LONG_S)
            await client.call(address, "rpc.ping", {}, timeout_s=LONG_S)


async def test_an_answer_of_another_shape() -> None:
    async with peers(faults=always(Fault.WRONG_SHAPE)) as (server, client, address):
        server.add_handler("echo", echo)
        reply = await client.call(address, "echo", {"x": 1}, [TENSOR], timeout_s=LONG_S)
    assert reply.body == {"x": 1}
    assert reply.tensors[0].shape == (1, 2, 3)


async def test_a_late_answer() -> None:
    injector = FaultInjector(FaultPlan(rates={Fault.LATE: 1.0}, late_mean_s=0.02))
    async with peers(faults=injector) as (server, client, address):
        server.add_handler("echo", echo)
        _, late_s = injector.of(server.peer_id).draw(client.peer_id, "echo")
        started = trio.current_time()
        await client.call(address, "echo", {}, timeout_s=LONG_S)
        assert trio.current_time() - started >= late_s


async def test_a_death_takes_the_other_calls_of_the_connection_along() -> None:
    """They fail as when a process dies; calls after that find the peer again."""
    async with peers(faults=always(Fault.DIE)) as (server, client, address), trio.open_nursery() as nursery:
        server.add_handler("echo", echo)
        started = trio.Event()

        async def stay(_: object) -> None:
            started.set()
            await trio.sleep_forever()

        server.add_handler("stay", stay)

        async def call() -> None:
            with pytest.raises(ConnectionLost):
                await client.call(address, "stay", {}, timeout_s=LONG_S)

        nursery.start_soon(call)
        await started.wait()
        with pytest.raises(ConnectionLost):
            await client.call(address, "echo", {}, timeout_s=LONG_S)


def test_chance_repeats_itself() -> None:
    """The n-th call of a caller meets the same fate, whoever else calls in between; another seed gives another row."""
    rates = {Fault.REFUSE: 0.2, Fault.LATE: 0.3}

    def row(injector: FaultInjector, *, with_others: bool) -> list[object]:
        fates = []
        for index in range(50):
            if with_others:
                injector.draw(PeerId(index.to_bytes(32, "big")), "echo")
            fates.append(injector.draw(CLIENT, "echo"))
        return fates

    first = row(FaultInjector(FaultPlan(rates=rates)), with_others=False)
    assert first == row(FaultInjector(FaultPlan(rates=rates)), with_others=True)
    assert first != row(FaultInjector(FaultPlan(rates=rates, seed=1)), with_others=False)


def test_peers_under_one_plan_have_fates_of_their_own() -> None:
    """Requests to several peers at once fail together as often as chance has it, and no more."""
    plan = FaultPlan(rates={Fault.HANG: 0.1, Fault.LATE: 0.9})
    rows = []
    for number in (1, 2):
        injector = FaultInjector(plan).of(PeerId(number.to_bytes(32, "big")))
        rows.append([injector.draw(CLIENT, "echo") for _ in range(2000)])
    both_hang = sum(first == second == (Fault.HANG, 0.0) for first, second in zip(*rows, strict=True))
    assert both_hang == pytest.approx(20, abs=4 * 20**0.5)
    late = [(a[1], b[1]) for a, b in zip(*rows, strict=True) if a and b and a[0] is b[0] is Fault.LATE]
    assert all(first != second for first, second in late)
    assert abs(np.corrcoef(np.array(late).T)[0, 1]) < 0.1


def test_rates_are_kept() -> None:
    injector = FaultInjector(FaultPlan(rates={Fault.DIE: 0.1, Fault.LATE: 0.25}, late_mean_s=2.0))
    fates = [injector.draw(CLIENT, "echo") for _ in range(4000)]
    counts = collections.Counter(None if fate is None else fate[0] for fate in fates)
    assert abs(counts[Fault.DIE] - 400) < 4 * (4000 * 0.1 * 0.9) ** 0.5
    assert abs(counts[Fault.LATE] - 1000) < 4 * (4000 * 0.25 * 0.75) ** 0.5
    assert counts.keys() == {None, Fault.DIE, Fault.LATE}
    delays = [fate[1] for fate in fates if fate is not None and fate[0] is Fault.LATE]
    assert abs(np.mean(delays) - 2.0) < 4 * 2.0 / len(delays) ** 0.5


def test_only_the_methods_of_the_plan() -> None:
    injector = FaultInjector(FaultPlan(rates={Fault.DIE: 1.0}, methods=("expert.", "dht.find")))
    hit = [m for m in ("expert.forward", "expert", "dht.find", "dht.find2", "rpc.ping") if injector.draw(CLIENT, m)]
    assert hit == ["expert.forward", "dht.find"]


def test_the_count_of_callers_is_bounded() -> None:
    """A flood of callers costs repeatability, not memory."""
    injector = FaultInjector(FaultPlan(rates={Fault.DIE: 0.5}))
    first = [injector.draw(CLIENT, "m") for _ in range(20)]
    assert [injector.draw(CLIENT, "m") for _ in range(20)] != first
    for index in range(MAX_CALLERS + 10):
        injector.draw(PeerId(index.to_bytes(32, "big")), "m")
    assert [injector.draw(CLIENT, "m") for _ in range(20)] == first, "the counting has started afresh"


def test_plans_from_the_command_line() -> None:
    plan = FaultPlan.parse(("late=0.1:2.5", "hang=0.05"), seed=3)
    assert plan == FaultPlan(rates={Fault.LATE: 0.1, Fault.HANG: 0.05}, late_mean_s=2.5, seed=3)


@pytest.mark.parametrize(
    "texts", [("slow=0.1",), ("hang",), ("hang=x",), ("hang=0.1:2",), ("hang=0.1", "hang=0.2"), ("hang=0.6", "die=0.6")]
)
def test_wrong_plans(texts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"hang|slow"):
        FaultPlan.parse(texts)


HELLO = part_bytes(hello(PeerId(b"h" * 32)))
CALL, OTHER_CALL, STUCK = (
    part_bytes(part(CallStart(call_id=call_id, method=method, timeout_s=LONG_S, body={})))
    for call_id, method in ((1, "echo"), (2, "echo"), (1, "stuck"))
)
REPLY = part_bytes(part(CallReply(call_id=1, body={})))
GOODBYE, CREDIT, CANCEL = (part_bytes(part(each)) for each in (Goodbye(), Credit(nbytes=1), CallCancel(call_id=77)))
LARGE = 70 * MIB


def frame(header: bytes, body: bytes = b"") -> bytes:
    return preamble(WHOLE, len(header), len(body)) + header + body


ATTACKS = {
    "noise": random.Random(0).randbytes(5000),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "older version": preamble(WHOLE, 1, 0, version=1),
    "body too large": HELLO + preamble(OPEN, 100, MAX_BODY_BYTES + 1),
    "header too large": HELLO + preamble(WHOLE, 2**32 - 1, 0),
    "chunk of nothing": HELLO + chunk(0, b"x"),
    "chunk beyond the body": HELLO + opening(300_000) + preamble(CHUNK, 0, 300_001),
    "reset with a length": HELLO + opening(300_000) + preamble(RESET, 0, 1),
    "window": HELLO + 3 * opening(LARGE),
    "no map": HELLO + frame(encode([1, 2])),
    "no CBOR": HELLO + frame(b"\xff" * 100),
    "deep": HELLO + frame(b"\x81" * 60_000),
    "table": HELLO + frame(encode({"type": "ping", "tensors": [["float32", [2]]]}), b"1234"),
    "a shape beyond all bounds": HELLO + frame(encode({"type": "ping", "tensors": [["int8", [2**40, 2**40, 0]]]})),
    "no such message": HELLO + frame(encode({"type": "shutdown"})),
    "call before hello": CALL,
    "second hello": HELLO + HELLO,
    "an id in use": HELLO + STUCK + STUCK,
    "answer to nothing": HELLO + REPLY,
    "credit for nothing": HELLO + CREDIT,
    "call after goodbye": HELLO + STUCK + GOODBYE + OTHER_CALL,
}


async def is_dropped(stream: trio.SocketStream) -> bool:
    """Return True if the other end goes away within `LONG_S` / 6; anything that it says before is read."""
    with trio.move_on_after(LONG_S / 6):
        try:
            while await stream.receive_some(MIB):
                pass
        except trio.BrokenResourceError:
            pass
        return True
    return False


class Calls:
    """An innocent peer that calls all the time."""

    def __init__(self, client: RpcPeer, address: Address) -> None:
        self.client = client
        self.address = address
        self._served = trio.Event()

    async def run(self) -> None:
        """Call for ever; every call must go well."""
        tensor = np.arange(100_000, dtype=np.float32)
        while True:
            reply = await self.client.call(self.address, "echo", {"a": 1}, (tensor,), timeout_s=LONG_S)
            assert reply.body == {"a": 1}
            assert np.array_equal(reply.tensors[0], tensor)
            self._served.set()
            self._served = trio.Event()

    async def go_on(self) -> None:
        """Wait until the third call from now is done: the second one began later than now."""
        with trio.fail_after(LONG_S):
            for _ in range(3):
                await self._served.wait()


@asynccontextmanager
async def served() -> AsyncIterator[Calls]:
    """A server with two methods that an innocent peer calls."""
    async with peers() as (server, client, address), trio.open_nursery() as nursery:
        server.add_handler("echo", echo)
        server.add_handler("stuck", Stuck())
        calls = Calls(client, address)
        nursery.start_soon(calls.run)
        yield calls
        nursery.cancel_scope.cancel()


async def connect(address: Address) -> trio.SocketStream:
    return await trio.open_tcp_stream(address.host, address.port)


async def test_a_peer_that_breaks_the_format_is_dropped_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Each violation ends the connection on which it came, within one line of the log; the other peer is served."""
    async with served() as calls:
        for name, attack in ATTACKS.items():
            caplog.clear()
            async with await connect(calls.address) as stream:
                await stream.send_all(attack)
                assert await is_dropped(stream), name
            await calls.go_on()
            assert [record.levelno for record in caplog.records] == [logging.WARNING], name
            assert "dropping the connection" in caplog.text, name


async def test_the_start_of_the_attacks_is_legal() -> None:
    """Without their last fault these peers would not have been dropped: they are answered."""
    legal = [HELLO, 2 * opening(LARGE), preamble(RESET, 0, 0), opening(LARGE), chunk(1, b"x"), CALL, CANCEL]
    async with served() as calls, await connect(calls.address) as stream:
        for data in legal:
            await stream.send_all(data)
        received = b""
        with trio.fail_after(LONG_S):
            while b"reply" not in received:
                received += await stream.receive_some(MIB)
        assert REPLY in received


async def test_an_end_inside_a_frame() -> None:
    async with served() as calls:
        for cut in range(1, len(HELLO + CALL), 20):
            stream = await connect(calls.address)
            await stream.send_all((HELLO + CALL)[:cut])
            await stream.aclose()
        await calls.go_on()


@pytest.mark.parametrize("answer", [b"\x00" * 16, HELLO + preamble(OPEN, 5, 2**40), HELLO + HELLO])
async def test_a_hostile_server_fails_only_its_own_callers(answer: bytes) -> None:
    """Whoever calls a peer that answers with garbage gets an error; the caller's other connections live on."""
    async with served() as calls:

        async def answer_with_garbage(stream: trio.SocketStream) -> None:
            await stream.send_all(answer)
            await is_dropped(stream)

        async with tcp_listener(answer_with_garbage) as address:
            with pytest.raises((RemoteProtocolError, PeerUnavailable)) as raised:
                await calls.client.call(address, "echo", {}, timeout_s=LONG_S)
            assert len(str(raised.value)) < 300
            await calls.go_on()


async def test_a_client_that_is_dropped_can_come_again() -> None:
    async with peers() as (server, _, address):
        server.add_handler("echo", echo)
        for _ in range(3):
            async with await connect(address) as stream:
                await stream.send_all(HELLO + HELLO)
                assert await is_dropped(stream)
        async with open_rpc_peer(TcpTransport(), peer_id=PeerId(b"h" * 32)) as client:
            reply = await client.call(address, "echo", {"a": 1}, timeout_s=LONG_S)
            assert reply.body == {"a": 1}
