"""What a peer knows of its line from what has passed it."""

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import trio
from hypothesis import given
from hypothesis import strategies as st

from dmoe_net.averaging.averager import Averager
from dmoe_net.averaging.config import AveragerConfig
from dmoe_net.averaging.grouping.group_key import MoshpitGrid
from dmoe_net.averaging.line_meter import BestOfRecent, LineMeter
from dmoe_net.averaging.opening import open_averager
from dmoe_net.averaging.plan import AveragingPlan
from dmoe_net.averaging.speeds import UNKNOWN, Speeds
from dmoe_net.averaging.state.sharing import SharedState, StateSource
from dmoe_net.clock import SwarmClock
from dmoe_net.dht.node import open_dht_node
from dmoe_net.identity import Address
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.sim import simulate
from dmoe_net.transport.sim.links import Constant, HostOptions
from tests.net.sim_hosts import in_simulation, peer

SIZE = 500_000
MB = 8e6
"""A megabyte a second, as hosts have it: in bits."""


@asynccontextmanager
async def averagers_on(
    lines: Mapping[str, HostOptions], *, known: Speeds = UNKNOWN, source: StateSource | None = None
) -> AsyncIterator[list[Averager]]:
    """An averager on each host; the first one shares a state."""
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(simulate(latency=Constant(0.02), hosts=lines.__getitem__))
        found, first_peers = list[Averager](), list[Address]()
        for number, host in enumerate(lines):
            transport, rng = network.transport(host, peer(host)), random.Random(number)
            caller = await stack.enter_async_context(
                open_rpc_peer(transport, peer_id=peer(host), listen=Address(host, 7))
            )
            dht = await stack.enter_async_context(
                open_dht_node(caller, clock=SwarmClock.virtual(), rng=rng, initial_peers=tuple(first_peers))
            )
            averager = open_averager(
                *(caller, dht, AveragingPlan.of(size=SIZE, grid=MoshpitGrid(side=2, dims=1))),
                prefix="x",
                rng=rng,
                state=None if found else source,
                config=AveragerConfig(cell=number, speeds=known),
            )
            found.append(await stack.enter_async_context(averager))
            first_peers.append(Address(host, 7))
        await trio.sleep(1.0)
        yield found


@in_simulation
async def test_an_average_tells_of_the_line() -> None:
    """Two peers send 2 MB each way at 1 MB a second, the slower line's rate, and find their group in the same time."""
    lines = {"slow": HostOptions(up_bps=MB, down_bps=MB), "fast": HostOptions()}
    async with averagers_on(lines) as averagers:
        assert [each.known_speeds() for each in averagers] == [UNKNOWN, UNKNOWN]
        async with trio.open_nursery() as nursery:
            for each in averagers:
                nursery.start_soon(each.step, np.zeros(SIZE, np.float32))
        for each in averagers:
            speeds = each.known_speeds()
            assert speeds.up == speeds.down
            assert 0.5e6 < (speeds.up or 0.0) <= 1e6


@in_simulation
async def test_a_state_that_was_downloaded_tells_of_the_line() -> None:
    """12 MB over a line of 4 MB a second down, from a donor that is faster; what the user says of the line stands."""
    state = SharedState(version=7, tensors=(np.zeros(3_000_000, np.float32),))

    async def snapshot() -> SharedState:
        return state

    lines = {"donor": HostOptions(), "newcomer": HostOptions(down_bps=4 * MB)}
    source = StateSource(lambda: 7, snapshot)
    async with averagers_on(lines, source=source, known=Speeds(up=5e5)) as (_, newcomer):
        assert newcomer.known_speeds() == Speeds(up=5e5)
        assert await newcomer.download_state(min_version=1, timeout_s=60.0) is not None
        # Finding the donor, and the round trips of its pieces, take their time, too.
        assert newcomer.known_speeds().up == 5e5
        assert 3e6 < (newcomer.known_speeds().down or 0.0) <= 4e6


def test_the_best_of_late_stands_and_is_forgotten() -> None:
    """A line that was slow since, for whatever reason, is not slow for that; after 80 s (and an eighth) it is."""
    kept = BestOfRecent(memory_s=80.0)
    assert kept.best(0.0) is None
    kept.add(5.0, 0.0)
    for now in range(1, 80):
        kept.add(1.0, float(now))
        assert kept.best(float(now)) == 5.0
    assert kept.best(89.9) == 5.0
    assert kept.best(90.0) == 1.0
    assert kept.best(1000.0) is None


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(1, 1e6)), max_size=60))
def test_the_best_is_one_of_the_values_of_its_time(added: list[tuple[float, float]]) -> None:
    """Against all values in a list: what is 80 s old still counts, what is 90 s old does not."""
    kept, values, now = BestOfRecent(memory_s=80.0), list[tuple[float, float]](), 0.0
    for step, value in added:
        now += step
        kept.add(value, now)
        values.append((now, value))
    best = kept.best(now)
    for time, value in values:
        assert time <= now - 80.0 or best is not None
        if time > now - 80.0:
            assert best is not None
            assert value <= best
    assert best is None or best in [value for time, value in values if time > now - 90.0]


def test_what_is_known_is_within_what_may_be_claimed() -> None:
    """A direction of which nothing is known stays unknown; no rate is too large or small to be announced."""
    meter = LineMeter()
    assert meter.speeds(0.0) == Speeds()
    meter.carried(up=1e15, now=1.0)
    assert meter.speeds(1.0) == Speeds(up=1e11)
    meter.carried(up=0.0, down=3.0, now=2.0)
    assert meter.speeds(2.0) == Speeds(up=1e11, down=1e3)
