"""Simulations as a whole: how they end, that they repeat themselves, and what they cost."""

import gc
import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from dmoe_net.errors import ConnectionLost, DialFailed, ListenFailed
from dmoe_net.identity import Address
from dmoe_net.transport import sim
from dmoe_net.transport.sim import run, simulate
from dmoe_net.transport.sim.events import Heal, Partition
from dmoe_net.transport.sim.links import Constant
from tests.net.link_frames import exchange, numbered, parts_of
from tests.net.sim_hosts import connect, in_simulation, listen, peer
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
    """Not in a group: the nursery is not the caller's."""
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
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    """Before anything is started."""

    async def main() -> None:
        async with simulate(**options):
            pass

    with pytest.raises(ValueError, match=message):
        run(main)


async def test_under_pytest_trios_clock(autojump_clock: trio.testing.MockClock) -> None:
    """Inside an ordinary test with virtual time it works alike."""
    async with simulate(latency=Constant(10.0)) as network:
        await exchange(*await connect(network, "a", "b"), numbered(1))
        assert trio.current_time() == pytest.approx(30.0)


async def test_on_the_real_clock() -> None:
    """There it delays for real."""
    start = trio.current_time()
    async with simulate(latency=Constant(0.01)) as network:
        await exchange(*await connect(network, "a", "b"), numbered(1))
    assert 0.03 <= trio.current_time() - start < 5.0


def test_a_stuck_simulation_says_so() -> None:
    """When every task waits and nothing is due, `run` raises instead of spinning."""
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
    outputs = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        outputs.append(done.stdout.splitlines())
    assert outputs[0] == outputs[1]
    assert outputs[0] == links_trace(3) + calls_trace(3)


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
    assert sim.__doc__ is not None
    code = "\n".join(line[4:] for line in sim.__doc__.splitlines() if line.startswith("    "))
    names: dict[str, Any] = {"ALICE": peer("alice"), "BOB": peer("bob")}
    exec(code, names)
    assert 0.1 < names["seconds"] < 5.0
