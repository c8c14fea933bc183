"""Peers find out what their lines carry, on a simulated network in virtual time."""

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import trio

from dmoe_net.averaging.averager import AveragingStep
from dmoe_net.averaging.config import AveragerConfig
from dmoe_net.averaging.grouping.group_key import MoshpitGrid
from dmoe_net.averaging.line.monitor import PERIOD_S, LineMonitor
from dmoe_net.averaging.opening import open_averager
from dmoe_net.averaging.plan import AveragingPlan
from dmoe_net.averaging.reduction.partition import AllReduceConfig
from dmoe_net.averaging.speeds import UNKNOWN, Speeds
from dmoe_net.averaging.state.sharing import SharedState, StateSource
from dmoe_net.clock import SwarmClock
from dmoe_net.dht.node import open_dht_node
from dmoe_net.errors import CallRefused
from dmoe_net.identity import Address, Contact
from dmoe_net.rpc.peer import RpcPeer, open_rpc_peer
from dmoe_net.transport.sim import simulate
from dmoe_net.transport.sim.links import Constant, HostOptions
from tests.net.averaging_peers import CONFIG
from tests.net.sim_hosts import in_simulation, peer

SIZE = 500_000
MB = 8e6
"""A megabyte a second, as hosts have it: in bits."""


@asynccontextmanager
async def peers_on(
    lines: Mapping[str, HostOptions], *, latency_s: float = 0.02, clients: tuple[str, ...] = ()
) -> AsyncIterator[list[RpcPeer]]:
    """A peer on each host."""
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(simulate(latency=Constant(latency_s), hosts=lines.__getitem__))
        found = []
        for host in lines:
            opened = open_rpc_peer(
                network.transport(host, peer(host)),
                peer_id=peer(host),
                listen=None if host in clients else Address(host, 7),
            )
            found.append(await stack.enter_async_context(opened))
        yield found


def monitors_of(peers: list[RpcPeer], known: Speeds = UNKNOWN) -> list[LineMonitor]:
    return [LineMonitor(each, prefix="x", known=known, rng=random.Random(index)) for index, each in enumerate(peers)]


def contacts_of(peers: list[RpcPeer]) -> list[Contact]:
    return [Contact(each.peer_id, each.address) for each in peers if each.address is not None]


@pytest.mark.parametrize("latency_s", [0.001, 0.1])
def test_each_finds_its_own_line(latency_s: float) -> None:
    """A fast peer among five whose lines are a fifth as fast down, a sixth up: to 15 %, its own up, and down what
    they can give together; a slow one its own, both ways."""

    @in_simulation
    async def test() -> None:
        lines = {f"slow{index}": HostOptions(up_bps=1 * MB, down_bps=2 * MB) for index in range(5)}
        lines |= {"fast": HostOptions(up_bps=6 * MB, down_bps=10 * MB), "other": HostOptions()}
        async with peers_on(lines, latency_s=latency_s) as peers:
            *slow, fast, other = peers
            fast_one, slow_one, *_ = monitors_of([fast, slow[0], *slow[1:], other])
            await fast_one.measure(contacts_of(slow))
            assert fast_one.speeds().up == pytest.approx(6e6, rel=0.15)
            assert fast_one.speeds().down == pytest.approx(5e6, rel=0.15)
            await slow_one.measure(contacts_of([fast, other]))
            assert slow_one.speeds().up == pytest.approx(1e6, rel=0.15)
            assert slow_one.speeds().down == pytest.approx(2e6, rel=0.15)

    test()


@in_simulation
async def test_who_does_not_answer_costs_its_own_part() -> None:
    """Of four peers one is not there and one averages something else; if most do, nothing is learnt."""
    lines = {name: HostOptions(up_bps=3 * MB) for name in ("me", "b", "c", "stranger")}
    async with peers_on(lines) as peers:
        me, b, c, stranger = peers
        mine, *_ = monitors_of([me, b, c])
        nobody = Contact(peer("nobody"), Address("b", 99))
        await mine.measure([*contacts_of([b, c, stranger]), nobody])
        assert mine.speeds().up == pytest.approx(3e6, rel=0.15)
        alone = LineMonitor(stranger, prefix="y", known=UNKNOWN, rng=random.Random(0))
        await alone.measure([*contacts_of([b, c]), nobody])
        await alone.measure([nobody])
        assert alone.speeds() == UNKNOWN


@in_simulation
async def test_what_is_known_is_not_measured() -> None:
    """With both directions given there is nothing due; else once, and again after a period. One may be given."""
    async with peers_on({"a": HostOptions(down_bps=4 * MB), "b": HostOptions()}) as peers:
        known, half = (
            LineMonitor(each, prefix="x", known=speeds, rng=random.Random(0))
            for each, speeds in zip(peers, (Speeds(up=1e6, down=2e6), Speeds(up=5e5)), strict=True)
        )
        known.carried(up_bytes=1e9, down_bytes=1e9, seconds=1.0)
        assert known.speeds() == Speeds(up=1e6, down=2e6)
        assert [known.is_due(), half.is_due(), half.is_due()] == [False, True, False]
        await trio.sleep(PERIOD_S)
        assert half.is_due()
        half.carried(up_bytes=6e6, down_bytes=6e6, seconds=2.0)
        assert half.speeds() == Speeds(up=5e5, down=3e6)


@in_simulation
async def test_nobody_is_made_to_send_much() -> None:
    """What is asked for is bounded, and garbage is refused."""
    async with peers_on({"a": HostOptions(), "b": HostOptions()}) as (a, b):
        monitors_of([b])
        (contact,) = contacts_of([b])
        for wanted in (2**16 + 1, -1, None, "all"):
            with pytest.raises(CallRefused, match="wanted"):
                await a.call(contact, "averaging.x.line", {"wanted": wanted}, timeout_s=5.0)


async def _average(caller: RpcPeer, cell: int, steps: list[AveragingStep], took_s: list[float]) -> None:
    """Five rounds, one in 60 s; nothing is known of anybody's line."""
    first_peers = () if cell == 0 else (Address("slow0", 7),)
    async with (
        open_dht_node(caller, clock=SwarmClock.virtual(), rng=random.Random(cell), initial_peers=first_peers) as dht,
        open_averager(
            *(caller, dht, AveragingPlan.of(size=SIZE, grid=MoshpitGrid(side=6, dims=1))),
            prefix="x",
            rng=random.Random(cell),
            config=replace(
                CONFIG,
                cell=cell,
                measures_line=True,
                all_reduce=AllReduceConfig(chunk_bytes=2**15, sender_timeout_s=5.0, timeout_s=15.0),
            ),
        ) as averager,
    ):
        for number in range(5):
            await trio.sleep_until(20.0 + 60.0 * number)
            began = trio.current_time()
            steps.append(await averager.step(np.full(SIZE, cell, np.float32)))
            took_s.append(trio.current_time() - began)


@in_simulation
async def test_fast_members_do_not_look_slow_for_ever() -> None:
    """Two fast members among four slow ones reduce a sixth each at first, as all do, and take their time. Once they
    have measured, they reduce it all: equal shares take (1 + 4 / 6) / b, and 1 / b when the slow reduce nothing."""
    lines = {f"slow{index}": HostOptions(up_bps=1 * MB, down_bps=4 * MB) for index in range(4)}
    lines |= {f"fast{index}": HostOptions(up_bps=10 * MB, down_bps=10 * MB) for index in range(2)}
    steps = {host: list[AveragingStep]() for host in lines}
    took_s = {host: list[float]() for host in lines}
    async with peers_on(lines) as peers, trio.open_nursery() as nursery:
        for cell, (host, each) in enumerate(zip(lines, peers, strict=True)):
            nursery.start_soon(_average, each, cell, steps[host], took_s[host])
    assert {len(step.peers) for each in steps.values() for step in each} == {6}
    vector = 4.0 * SIZE
    first, last = ({host: each[number].moved_bytes / vector for host, each in steps.items()} for number in (0, -1))
    assert list(first.values()) == pytest.approx([1 + 4 / 6] * 6, rel=1e-3)
    # The fast ones reduce it all, in parts that depend on what they found: 2 + 4 together.
    assert [last[f"slow{index}"] for index in range(4)] == pytest.approx([1.0] * 4, abs=0.1)
    assert last["fast0"] + last["fast1"] == pytest.approx(6.0, abs=0.4)
    # At 1 MB a second a slow one moves 1 + 4 / 6 vectors at first, and one in the end. To find the group takes a while.
    group_s = 0.5
    for index in range(4):
        began_s, ended_s = took_s[f"slow{index}"][0], took_s[f"slow{index}"][-1]
        assert (1 + 4 / 6) * vector / 1e6 < began_s < (1 + 4 / 6) * vector / 1e6 + group_s
        assert vector / 1e6 < ended_s < vector / 1e6 + group_s
    for each in steps.values():
        np.testing.assert_allclose(each[-1].average, np.mean(range(6)), rtol=1e-6)


@in_simulation
async def test_a_state_that_was_downloaded_tells_of_the_line() -> None:
    """12 MB over a line of 4 MB a second down, from a donor that is faster; the averager that took it knows so much."""
    state = SharedState(version=7, tensors=(np.zeros(3_000_000, np.float32),))

    async def snapshot() -> SharedState:
        return state

    lines = {"donor": HostOptions(), "newcomer": HostOptions(down_bps=4 * MB)}
    async with peers_on(lines) as (donor, newcomer), AsyncExitStack() as stack:
        averagers = []
        for caller, source in ((donor, StateSource(lambda: 7, snapshot)), (newcomer, None)):
            dht = await stack.enter_async_context(
                open_dht_node(
                    caller,
                    clock=SwarmClock.virtual(),
                    rng=random.Random(0),
                    initial_peers=() if caller is donor else (Address("donor", 7),),
                )
            )
            opened = open_averager(
                *(caller, dht, AveragingPlan.of(size=5, grid=MoshpitGrid(side=2))),
                prefix="x",
                rng=random.Random(1),
                state=source,
                config=AveragerConfig(measures_line=True),
            )
            averagers.append(await stack.enter_async_context(opened))
            await trio.sleep(1.0)
        monitor = averagers[1].monitor
        assert monitor is not None
        assert monitor.speeds() == UNKNOWN
        assert await averagers[1].download_state(min_version=1, timeout_s=60.0) is not None
        assert monitor.speeds().up is None
        # Finding the donor, and the round trips of its pieces, take their time, too.
        assert 3e6 < (monitor.speeds().down or 0.0) <= 4e6


@in_simulation
async def test_where_averages_are_small_or_rare_measuring_moves_less() -> None:
    """About a vector each way; and no second time before averages have moved four times as much."""
    lines = {"a": HostOptions(up_bps=20 * MB, down_bps=20 * MB), "b": HostOptions()}
    async with peers_on(lines) as (a, b):
        monitors_of([b])
        mine = LineMonitor(a, prefix="x", known=UNKNOWN, rng=random.Random(0), vector_bytes=2_000_000)
        assert mine.is_due()
        before = a.moved_bytes(b.peer_id)
        assert await mine.measure(contacts_of([b]))
        moved = a.moved_bytes(b.peer_id) - before
        assert 2 * 2_000_000 < moved < 2 * 3_500_000
        await trio.sleep(PERIOD_S)
        mine.averaged(3 * moved / 2)
        assert not mine.is_due()
        mine.averaged(2 * moved / 2)
        assert mine.is_due()
