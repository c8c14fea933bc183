"""Simulations as a whole: their end, their cost, that they repeat themselves, and faults: partitions, crashes, losses,
and programs that go down with their hosts."""

import gc
import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from dmoe_net.errors import ConnectionLost, DialFailed, ListenFailed
from dmoe_net.identity import Address
from dmoe_net.transport import sim
from dmoe_net.transport.sim import run, simulate
from dmoe_net.transport.sim.endpoints import SimLink
from dmoe_net.transport.sim.events import Heal, HostDown, HostUp, Partition, SetHost, SetLatency
from dmoe_net.transport.sim.links import Constant, HostOptions, Loss
from dmoe_net.transport.sim.network import SimNetwork
from tests.net.link_frames import assert_same, exchange, numbered, parts_of
from tests.net.sim_hosts import CUT, connect, expect_duration, expect_lost, in_simulation, listen, open_link, part, peer
from tests.net.sim_scenario import calls_trace, links_trace

ROOT = Path(__file__).parents[2]


@in_simulation
async def test_at_the_end_nobody_waits_for_ever() -> None:
    """Tasks from outside that use the network get its errors, programs are cancelled, and nothing stays behind."""
    before = trio.lowlevel.current_statistics().tasks_living
    async with trio.open_nursery() as nursery:
        async with simulate() as network:
            dialled, _ = await connect(network, "a", "b")
            listener = await listen(network, "b")
            transport = network.transport("a", peer("a"))
            network.apply(Partition((frozenset({"c"}),)))
            await listen(network, "c")

            async def fails(error: type[Exception], function: Callable[..., Awaitable[Any]], *args: Any) -> None:
                with pytest.raises(error, match=r"the simulation is over|no longer listening"):
                    await function(*args)

            nursery.start_soon(fails, ConnectionLost, dialled.receive)
            unread, _ = await connect(network, "a", "b")
            nursery.start_soon(fails, ConnectionLost, unread.send, *parts_of(numbered(1, 2**23)))
            nursery.start_soon(fails, ListenFailed, listener.accept)
            nursery.start_soon(fails, DialFailed, transport.dial, Address("c", 10_000))
            network.start("a", trio.sleep_forever)
            await trio.sleep(5.0)
        await fails(DialFailed, transport.dial, listener.address)
        await fails(ListenFailed, transport.listen, Address("a", 0))
    assert network.statistics().links == 0
    assert trio.lowlevel.current_statistics().tasks_living == before


@in_simulation
async def test_what_the_block_raises_comes_out_as_it_is() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with simulate():
            raise KeyError("mine")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tick_s": -1.0}, "tick_s.*-1.0"),
        ({"give_up_s": 0.0}, "give_up_s.*0.0"),
        ({"loss": 1.0}, "probability.*1.0"),
        ({"schedule": [(-1.0, Heal())]}, "scheduled time.*-1.0"),
    ],
)
@in_simulation
async def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        async with simulate(**options):
            pass


async def test_under_pytest_trios_clock(autojump_clock: trio.testing.MockClock) -> None:
    async with simulate(latency=Constant(10.0)) as network:
        await exchange(*await connect(network, "a", "b"), numbered(1))
        assert trio.current_time() == pytest.approx(30.0)


async def test_on_the_real_clock() -> None:
    start = trio.current_time()
    async with simulate(latency=Constant(0.01)) as network:
        await exchange(*await connect(network, "a", "b"), numbered(1))
    assert 0.03 <= trio.current_time() - start < 5.0


def test_a_stuck_simulation_says_so() -> None:
    with pytest.raises(RuntimeError, match="stuck"):
        run(trio.sleep_forever)


def test_run_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trio's switch and generator and the collector's thresholds are restored; a trio without them is refused."""
    scheduler = trio._core._run
    before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r.getstate(), gc.get_threshold()

    async def look() -> bool:
        await trio.sleep(1.0)
        return scheduler._ALLOW_DETERMINISTIC_SCHEDULING and gc.get_threshold() > before[2]

    assert run(look, seed=5)
    assert (scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r.getstate(), gc.get_threshold()) == before
    monkeypatch.delattr(scheduler, "_r")
    with pytest.raises(RuntimeError, match=re.escape(trio.__version__)):
        run(trio.sleep, 1.0)


@pytest.mark.parametrize("trace", [links_trace, calls_trace])
def test_the_same_seed_gives_the_same_run(trace: Callable[[int], list[str]]) -> None:
    """Every time, frame and error of a busy network with faults, again; another seed gives another run."""
    first = trace(1)
    assert len(first) > 100
    assert trace(1) == first
    assert trace(2) != first


def test_the_hash_seed_does_not_matter() -> None:
    """Two processes in which sets and dictionaries of strings order differently have the same run."""
    script = "from tests.net.sim_scenario import *; print(*links_trace(3), *calls_trace(3), sep='\\n')"
    expected = links_trace(3) + calls_trace(3)
    for hash_seed in ("1", "2"):
        environment, command = {**os.environ, "PYTHONHASHSEED": hash_seed}, [sys.executable, "-c", script]
        output = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True).stdout
        assert output.decode().splitlines() == expected


@in_simulation
async def test_an_idle_link_is_small() -> None:
    """At most 2.5 KB for both its ends, so that 40,000 of them stay below 100 MB."""
    async with simulate() as network:
        listener, transport = await listen(network, "b"), network.transport("a", peer("a"))
        links = []
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for index in range(1000):
            dialled = await transport.dial(listener.address)
            accepted = await listener.accept()
            await exchange(dialled, accepted, numbered(index))
            links.append((dialled, accepted))
        nbytes = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert nbytes / len(links) < 2500


def test_the_example_of_the_module() -> None:
    """The docstring's code runs, and a call between two peers takes what it should."""
    code = "\n".join(line[4:] for line in sim.__doc__.splitlines() if line.startswith("    "))
    names: dict[str, Any] = {"ALICE": peer("alice"), "BOB": peer("bob")}
    exec(code, names)
    assert 0.1 < names["seconds"] < 5.0


@in_simulation
async def test_a_partition_holds_parts_until_it_heals() -> None:
    """Parts on their way or sent meanwhile arrive after the heal, in order; other links do not notice."""
    async with simulate(give_up_s=1000.0) as network:
        cut, whole = await connect(network, "a", "b"), await connect(network, "c", "b")
        await cut[0].send(part(100, 0))
        network.apply(CUT)
        await trio.sleep(10.0)
        async with expect_duration(0.05):
            await exchange(*whole, numbered(7))
        await cut[0].send(part(100, 1))
        await trio.sleep(0.02)
        network.apply(Heal())  # the second part arrives before the first one gets through
        await trio.sleep(0.01)
        await cut[0].send(part(100, 2))
        for index in range(3):
            assert (await cut[1].receive()).header["n"] == index
        await exchange(cut[1], cut[0], numbered(3))


@in_simulation
async def test_a_partition_that_comes_back_holds_on() -> None:
    """A heal too short for a part to get through changes nothing."""
    async with open_link(latency=Constant(1.0), give_up_s=1000.0) as (network, dialled, accepted):
        network.apply(CUT)
        await dialled.send(part(100))
        for _ in range(3):
            await trio.sleep(10.0)
            network.apply(Heal())
            await trio.sleep(0.5)
            network.apply(CUT)
        with trio.move_on_after(100.0) as scope:
            await accepted.receive()
        assert scope.cancelled_caught
        network.apply(Heal())
        async with expect_duration(1.0):
            assert await accepted.receive() is not None


@in_simulation
async def test_a_link_that_is_cut_for_long_breaks() -> None:
    """At both ends, `give_up_s` after it was cut and not before; a heal in time starts the count anew."""
    async with open_link(give_up_s=20.0) as (network, dialled, accepted):
        network.apply(CUT)
        await trio.sleep(15.0)
        network.apply(Heal())
        await trio.sleep(1.0)
        network.apply(CUT)
        async with expect_duration(20.0), trio.open_nursery() as nursery:
            for link in (dialled, accepted):
                nursery.start_soon(expect_lost, link, "no way there for 20 s")
        assert network.statistics().links == 0


@in_simulation
async def test_dials_across_a_partition_hang() -> None:
    """Until it heals, or the caller gives up; then nothing of them is kept, however often he tries."""
    async with simulate() as network:
        listener, transport = await listen(network, "b"), network.transport("a", peer("a"))
        network.apply(CUT)
        for _ in range(3):
            with trio.move_on_after(5.0) as scope:
                await transport.dial(listener.address)
            assert scope.cancelled_caught
        assert network.statistics().links == 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(transport.dial, listener.address)
            await trio.sleep(500.0)
            network.apply(Heal())
            async with expect_duration(0.05):
                await listener.accept()
        assert network.statistics().links == 1


@in_simulation
async def test_a_crashed_host_resets_its_links() -> None:
    """The others learn of it after one latency, dials are refused, and its own ends are dead."""
    async with open_link() as (network, dialled, accepted):
        waiting, listener = await connect(network, "a", "b"), await listen(network, "b")
        network.apply(HostDown("b"))
        network.apply(HostDown("b"))
        async with expect_duration(0.05):
            await expect_lost(dialled, "b went down")
        await expect_lost(waiting[1], "b went down")
        with pytest.raises(ConnectionLost):
            await accepted.send(part(100))
        with pytest.raises(ListenFailed):
            await listener.accept()
        with pytest.raises(ListenFailed, match="b is down"):
            await listen(network, "b")
        with pytest.raises(DialFailed, match="b is down"):
            await network.transport("b", peer("b")).dial(listener.address)
        async with expect_duration(0.1):
            with pytest.raises(DialFailed, match="refused"):
                await network.transport("a", peer("a")).dial(listener.address)
        network.apply(HostUp("b"))
        await exchange(*await connect(network, "a", "b"), numbered(1))


@in_simulation
async def test_an_unplugged_host_tells_nobody() -> None:
    """Links to it stay and dials hang; when it is back it knows the links no more, and says so to who sends."""
    async with simulate(give_up_s=60.0) as network:
        idle, busy = await connect(network, "a", "b"), await connect(network, "a", "b")
        await idle[1].send(part(100))  # under way when its sender's machine loses power: nobody sends it again
        network.apply(HostDown("b", silent=True))
        with trio.move_on_after(50.0) as scope:
            await busy[0].send(part(100))
            await busy[0].receive()
        assert scope.cancelled_caught
        network.apply(HostUp("b"))
        await trio.sleep(0.2)
        assert busy[0].cause == "closed by the other end"
        assert idle[0].cause is None
        await idle[0].send(part(100))
        async with expect_duration(0.1):
            with pytest.raises(ConnectionLost, match="closed by the other end"):
                await idle[0].receive()
        assert network.statistics().links == 0


@in_simulation
async def test_links_to_an_unplugged_host_break_in_the_end() -> None:
    """After `give_up_s`, as with any cut; a dial that began before the cut fails then, too."""
    async with simulate(give_up_s=60.0, latency=Constant(1.0)) as network:
        dialled, _ = await connect(network, "a", "b")
        listener = await listen(network, "b")

        async def dial() -> None:
            with pytest.raises(DialFailed, match="no way there for 60 s"):
                await network.transport("a", peer("a")).dial(listener.address)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(dial)
            await trio.sleep(0.5)
            network.apply(HostDown("b", silent=True))
            async with expect_duration(60.0):
                await expect_lost(dialled, "no way there for 60 s")


@in_simulation
async def test_events_by_schedule() -> None:
    """They happen at their times; new latencies and bandwidths hold for what is sent from then on."""
    schedule = [
        (10.0, SetLatency(Constant(0.3))),
        (20.0, SetHost("a", HostOptions(up_bps=8000.0))),
        (30.0, SetHost("a", HostOptions(extra_latency_s=1.0))),
    ]
    async with open_link(schedule=schedule) as (_, dialled, accepted):
        for at_s, expected in ((5.0, 0.05), (15.0, 0.3), (25.0, 1.3), (35.0, 1.3)):
            await trio.sleep_until(at_s)
            await dialled.send(part(1000))
            async with expect_duration(expected):
                await accepted.receive()


@in_simulation
async def test_programs_restart_with_their_host() -> None:
    """Down: cancelled, whatever it waits for. Up: from the beginning. One that has returned is not started again."""
    log: list[str] = []

    async def program(name: str, seconds: float) -> None:
        log.append(f"{name} starts at {trio.current_time():g}")
        try:
            await trio.sleep(seconds)
            log.append(f"{name} returns at {trio.current_time():g}")
        except trio.Cancelled:
            log.append(f"{name} is cancelled at {trio.current_time():g}")
            raise

    schedule = [(10.0, HostDown("a")), (20.0, HostUp("a")), (25.0, HostDown("a")), (25.0, HostUp("a"))]
    async with simulate(schedule=schedule) as network:
        network.start("a", program, "short", 5.0)
        network.start("a", program, "long", 100.0)
        await trio.sleep(15.0)
        network.start("a", program, "late", 1.0)
        await trio.sleep(15.0)
    assert sorted(log) == sorted([
        "short starts at 0", "short returns at 5",
        "long starts at 0", "long is cancelled at 10", "long starts at 20", "long is cancelled at 25",
        "long starts at 25", "long is cancelled at 30",
        "late starts at 20", "late returns at 21",
    ])  # fmt: skip


@in_simulation
async def test_what_programs_raise() -> None:
    """Their exceptions end the simulation, as they are; network errors of a program that is going down do not."""

    async def fail() -> None:
        await trio.sleep(1.0)
        raise KeyError("why")

    async def stubborn(link: SimLink, error: type[Exception] | None) -> None:
        try:
            await link.receive()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(1.0)
                if error is not None:
                    raise error("unhappy end")
                await link.send(part(100))

    async def simulate_crash(error: type[Exception] | None) -> None:
        async with simulate() as network:
            link, _ = await connect(network, "a", "b")
            network.start("a", stubborn, link, error)
            await trio.sleep(1.0)
            network.apply(HostDown("a"))
            await trio.sleep(2.0)

    async def simulate_failure() -> None:
        async with simulate() as network:
            network.start("a", fail)
            await trio.sleep(10.0)

    with pytest.raises(KeyError, match="why"):
        await simulate_failure()
    await simulate_crash(None)
    with pytest.raises(ValueError, match="unhappy end"):
        await simulate_crash(ValueError)


@in_simulation
async def test_a_received_frame_is_what_was_sent() -> None:
    async with open_link(hosts=HostOptions(up_bps=1e7, down_bps=5e6), give_up_s=1000.0) as (network, dialled, accepted):
        frame = numbered(1, 3_000_000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dialled.send, *parts_of(frame))
            await trio.sleep(1.0)
            network.apply(CUT)
            await trio.sleep(100.0)
            network.apply(Heal())
            assert_same(await accepted.receive(), frame)


@in_simulation
async def test_losses_delay_and_finally_break_a_link() -> None:
    """A lost part comes a retransmission later; one that is always lost ends the link at both ends."""
    loss = Loss(probability=0.5, retransmit_s=1.0, max_retransmits=30)
    async with open_link(loss=loss, seed=1) as (_, dialled, accepted):
        delays = set()
        for _ in range(40):
            start = trio.current_time()
            await exchange(dialled, accepted, numbered(1))
            delays.add(round(trio.current_time() - start, 6))
    assert {0.05, 1.05, 3.05} <= delays <= {round(0.05 + 2**k - 1, 6) for k in range(31)}
    async with simulate(loss=Loss(probability=0.5, max_retransmits=1), seed=1) as network:
        with pytest.raises(DialFailed, match="lost 2 times in a row"):
            await connect_often(network, 20)
        accepted = None
        while accepted is None:
            with suppress(DialFailed):
                dialled, accepted = await connect(network, "a", "b")
        async with trio.open_nursery() as nursery:
            for link in (dialled, accepted):
                nursery.start_soon(expect_lost, link, "lost 2 times in a row")
            for _ in range(50):
                if dialled.cause is None:
                    await dialled.send(part(100))
                    await trio.sleep(1.0)


async def connect_often(network: SimNetwork, count: int) -> None:
    for _ in range(count):
        await connect(network, "a", "b")


@in_simulation
async def test_a_program_that_waits_for_its_host_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """It starts when the host comes up; until then nothing else would say why nothing happens."""
    started: list[float] = []

    async def program() -> None:
        started.append(trio.current_time())

    async with simulate() as network:
        network.apply(HostDown("a"))
        network.start("a", program)
        await trio.sleep(5)
        network.apply(HostUp("a"))
        await trio.sleep(1)
    assert len(started) == 1
    assert caplog.messages == ["host 'a' is down at 0.0 s: its program waits for a HostUp"]
