"""Faults on purpose: each does what the vocabulary says, on a real network, and chance repeats itself."""

import collections

import numpy as np
import pytest
import trio

from dmoe_net.errors import CallRefused, ConnectionLost, NetError, PeerTimeout, RemoteProtocolError
from dmoe_net.identity import PeerId
from dmoe_net.rpc.faults import MAX_CALLERS, Fault, FaultInjector, FaultPlan
from tests.net.rpc_peers import LONG_S, echo, peers

TENSOR = np.arange(6, dtype=np.float32).reshape(2, 3)
CALLER = PeerId(b"c" * 32)


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
    """The body is right, every tensor has one dimension more."""
    async with peers(faults=always(Fault.WRONG_SHAPE)) as (server, client, address):
        server.add_handler("echo", echo)
        reply = await client.call(address, "echo", {"x": 1}, [TENSOR], timeout_s=LONG_S)
    assert reply.body == {"x": 1}
    assert reply.tensors[0].shape == (1, 2, 3)


async def test_a_late_answer() -> None:
    """It comes after the delay that was drawn for it."""
    injector = FaultInjector(FaultPlan(rates={Fault.LATE: 1.0}, late_mean_s=0.02))
    async with peers(faults=injector) as (server, client, address):
        server.add_handler("echo", echo)
        fate = injector.of(server.peer_id).draw(client.peer_id, "echo")
        assert fate is not None
        started = trio.current_time()
        await client.call(address, "echo", {}, timeout_s=LONG_S)
        assert trio.current_time() - started >= fate[1]


async def test_a_death_takes_the_other_calls_of_the_connection_along() -> None:
    """As when a process dies; calls after that find the peer again."""
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
            fates.append(injector.draw(CALLER, "echo"))
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
        rows.append([injector.draw(CALLER, "echo") for _ in range(2000)])
    both_hang = sum(first == second == (Fault.HANG, 0.0) for first, second in zip(*rows, strict=True))
    assert both_hang == pytest.approx(20, abs=4 * 20**0.5)
    late = [(a[1], b[1]) for a, b in zip(*rows, strict=True) if a and b and a[0] is b[0] is Fault.LATE]
    assert all(first != second for first, second in late)
    assert abs(np.corrcoef(np.array(late).T)[0, 1]) < 0.1


def test_rates_are_kept() -> None:
    """Within four standard deviations over 4000 calls; the delays have the mean that was asked for."""
    injector = FaultInjector(FaultPlan(rates={Fault.DIE: 0.1, Fault.LATE: 0.25}, late_mean_s=2.0))
    fates = [injector.draw(CALLER, "echo") for _ in range(4000)]
    counts = collections.Counter(None if fate is None else fate[0] for fate in fates)
    assert abs(counts[Fault.DIE] - 400) < 4 * (4000 * 0.1 * 0.9) ** 0.5
    assert abs(counts[Fault.LATE] - 1000) < 4 * (4000 * 0.25 * 0.75) ** 0.5
    assert counts.keys() == {None, Fault.DIE, Fault.LATE}
    delays = [fate[1] for fate in fates if fate is not None and fate[0] is Fault.LATE]
    assert abs(np.mean(delays) - 2.0) < 4 * 2.0 / len(delays) ** 0.5


def test_only_the_methods_of_the_plan() -> None:
    """A name, or a prefix with a dot at its end."""
    injector = FaultInjector(FaultPlan(rates={Fault.DIE: 1.0}, methods=("expert.", "dht.find")))
    hit = [m for m in ("expert.forward", "expert", "dht.find", "dht.find2", "rpc.ping") if injector.draw(CALLER, m)]
    assert hit == ["expert.forward", "dht.find"]


def test_the_count_of_callers_is_bounded() -> None:
    """A flood of callers costs repeatability, not memory."""
    injector = FaultInjector(FaultPlan(rates={Fault.DIE: 0.5}))
    for index in range(MAX_CALLERS + 10):
        injector.draw(PeerId(index.to_bytes(32, "big")), "m")
    assert len(injector._num_calls) <= MAX_CALLERS


def test_plans_from_the_command_line() -> None:
    """FAULT=RATE, and a mean for late ones."""
    plan = FaultPlan.parse(("late=0.1:2.5", "hang=0.05"), seed=3)
    assert plan == FaultPlan(rates={Fault.LATE: 0.1, Fault.HANG: 0.05}, late_mean_s=2.5, seed=3)


@pytest.mark.parametrize(
    "texts", [("slow=0.1",), ("hang",), ("hang=x",), ("hang=0.1:2",), ("hang=0.1", "hang=0.2"), ("hang=0.6", "die=0.6")]
)
def test_wrong_plans(texts: tuple[str, ...]) -> None:
    """The error names what was given."""
    with pytest.raises(ValueError, match=r"hang|slow"):
        FaultPlan.parse(texts)
