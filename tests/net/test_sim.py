"""The simulated network: what takes how long, how links behave where the real ones cannot be watched, and its models of
latency, lines, loss and reach."""

import math
import statistics
from collections.abc import Callable

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from dmoe_net.errors import ConnectionLost, DialFailed
from dmoe_net.identity import Address
from dmoe_net.transport.sim import simulate
from dmoe_net.transport.sim.endpoints import BACKLOG, SimLink
from dmoe_net.transport.sim.events import Partition, Reachability
from dmoe_net.transport.sim.flow import RECEIVE_BUFFER_BYTES, SEND_BUFFER_BYTES
from dmoe_net.transport.sim.links import (
    Constant,
    Exponential,
    HostOptions,
    LatencyModel,
    Line,
    LogNormal,
    Loss,
    model_between,
    stream_key,
)
from tests.net.link_frames import exchange, numbered, parts_of
from tests.net.sim_hosts import (
    arrival_s,
    connect,
    expect_duration,
    expect_lost,
    in_simulation,
    listen,
    open_link,
    part,
    peer,
)


@in_simulation
async def test_latency() -> None:
    """A dial takes a round trip, a frame one way, however large it is while bandwidth is not limited."""
    async with simulate(latency=Constant(0.05)) as network:
        async with expect_duration(0.1):
            dialled, accepted = await connect(network, "a", "b")
        for size in (0, 3_000_000):
            async with expect_duration(0.05):
                await exchange(dialled, accepted, numbered(1, size))


@in_simulation
async def test_latency_by_direction_and_host() -> None:
    """A function of the hosts is asked for each direction; a host's extra latency counts both ways."""

    def latency(source: str, destination: str) -> Constant:
        return Constant({"ab": 0.1, "ba": 0.2}[source + destination])

    options = {"a": HostOptions(), "b": HostOptions(extra_latency_s=0.03)}
    async with simulate(latency=latency, hosts=options.__getitem__) as network:
        async with expect_duration(0.36):
            dialled, accepted = await connect(network, "a", "b")
        async with expect_duration(0.13):
            await exchange(dialled, accepted, numbered(1))
        async with expect_duration(0.23):
            await exchange(accepted, dialled, numbered(1))


@in_simulation
async def test_within_a_host() -> None:
    """Links from a host to itself do not use its line, and yet time passes."""
    async with simulate(hosts=HostOptions(up_bps=8.0, down_bps=8.0), tick_s=0.0) as network:
        listener = await listen(network, "a")
        async with expect_duration(2e-4):
            dialled = await network.transport("a", peer("other")).dial(listener.address)
        accepted = await listener.accept()
        async with expect_duration(1e-4):
            await exchange(dialled, accepted, numbered(1, 100_000))


@in_simulation
async def test_upload_bandwidth() -> None:
    """A part of 1000 bytes takes a second to leave at 8000 bits/s; links share the line first come first served."""
    hosts = {"a": HostOptions(up_bps=8000.0), "b": HostOptions()}
    async with simulate(latency=Constant(0.5), hosts=hosts.__getitem__) as network:
        first, second = [await connect(network, "a", "b") for _ in range(2)]
        start = trio.current_time()
        await first[0].send(part(1000), part(2000))
        await second[0].send(part(1000))
        times = [await arrival_s(link[1]) - start for link in (first, first, second)]
    assert times == pytest.approx([1.5, 3.5, 4.5])


@in_simulation
async def test_large_frames_share_an_uplink() -> None:
    """The chunks of two large frames alternate: both arrive at the end of their common time."""
    bps, size = 8e6, 3 * 2**20
    async with simulate(hosts=HostOptions(up_bps=bps)) as network:
        links = [await connect(network, "a", "b") for _ in range(2)]
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            for link in links:
                nursery.start_soon(link[0].send, *parts_of(numbered(1, size)))
            times = [await arrival_s(link[1]) - start for link in links]
    both_s, chunk_s = 2 * 8 * size / bps, 8 * 512 * 1024 / bps
    assert max(times) == pytest.approx(both_s + 0.05, abs=0.01)
    assert min(times) >= max(times) - 1.1 * chunk_s


@in_simulation
async def test_download_bandwidth() -> None:
    """Two senders share the receiver's line in the order in which their parts arrive there, not in that of sending."""
    latencies = {"far": 1.0, "near": 0.1, "b": 0.0}
    hosts = {"far": HostOptions(), "near": HostOptions(), "b": HostOptions(down_bps=8000.0)}
    async with simulate(latency=lambda source, _: Constant(latencies[source]), hosts=hosts.__getitem__) as network:
        far, near = await connect(network, "far", "b"), await connect(network, "near", "b")
        start = trio.current_time()
        await far[0].send(part(1000))
        await near[0].send(part(500), part(1000))
        times = [await arrival_s(link) - start for link in (near[1], near[1], far[1])]
    # near: 0.1 + 0.5, then + 1.0; far: there at 1.0, waits until 1.6, + 1.0.
    assert times == pytest.approx([0.6, 1.6, 2.6])


@in_simulation
async def test_a_send_waits_for_the_uplink() -> None:
    """`send` returns while less than the send buffer is left to do, and waits until so much has left."""
    nbytes = SEND_BUFFER_BYTES // 2
    async with open_link(hosts=HostOptions(up_bps=8 * 8.0 * nbytes)) as (_, dialled, accepted):
        async with expect_duration(0.0):
            await dialled.send(part(nbytes), part(nbytes))
        async with expect_duration(1 / 8):  # one of the two has left
            await dialled.send(part(nbytes))
        for _ in range(3):
            assert await accepted.receive() is not None


@in_simulation
async def test_a_slow_line_has_a_short_queue() -> None:
    """A small part sent after large ones waits for one of them, and not for all that the buffers would hold."""
    nbytes = 128 * 1024
    async with simulate(hosts=HostOptions(up_bps=8.0 * nbytes)) as network:
        bulk, control = await connect(network, "a", "b"), await connect(network, "a", "b")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bulk[0].send, *(part(nbytes) for _ in range(16)))
            await trio.sleep(4.5)
            start = trio.current_time()
            await control[0].send(part(100))
            assert await arrival_s(control[1]) - start <= 1.1  # 2 s with the socket's whole buffer in between
            nursery.cancel_scope.cancel()


@in_simulation
async def test_a_receiver_that_does_not_read_bounds_the_link() -> None:
    """Unread data are bounded by the receive buffer, the rest by the send buffer and a part; reading goes on."""
    size = 100_000
    async with open_link() as (network, dialled, accepted):
        sent = 0

        async def send() -> None:
            nonlocal sent
            for index in range(200):
                await dialled.send(part(size, index))
                sent += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await trio.sleep(100.0)
            unread = network.statistics("b").nbytes
            assert RECEIVE_BUFFER_BYTES - size < unread <= RECEIVE_BUFFER_BYTES
            assert SEND_BUFFER_BYTES <= sent * size - unread < SEND_BUFFER_BYTES + size
            for index in range(200):
                await trio.sleep(1.0)
                assert network.statistics("b").nbytes - index * size <= RECEIVE_BUFFER_BYTES
                assert (await accepted.receive()).header["n"] == index


@in_simulation
async def test_links_keep_the_order_whatever_the_latency() -> None:
    """Latencies that differ wildly, and losses: frames arrive in the order of sending, over a stretch of time."""
    for options in ({"latency": LogNormal(0.1, 0.3)}, {"latency": Exponential(0.1), "loss": 0.02}):
        async with open_link(**options) as (_, dialled, accepted):
            start = trio.current_time()
            async with trio.open_nursery() as nursery:

                async def send(dialled: SimLink = dialled) -> None:
                    for index in range(300):
                        await dialled.send(part(100, index))
                        await trio.sleep(0.01)

                nursery.start_soon(send)
                times = []
                for index in range(300):
                    assert (await accepted.receive()).header["n"] == index
                    times.append(trio.current_time() - start)
            assert len(set(times)) > 10
            assert all(time >= 0.01 * index for index, time in enumerate(times))


@in_simulation
async def test_ticks() -> None:
    """Deliveries come at multiples of the tick, rounded up; without one, at their exact times."""
    for tick_s, expected in ((0.01, 0.07), (0.0, 0.0617)):
        latency = Constant(0.0617)
        async with open_link(tick_s=tick_s, latency=latency) as (_, dialled, accepted), expect_duration(expected):
            await exchange(dialled, accepted, numbered(1))


@in_simulation
async def test_the_queue_of_a_listener_is_bounded() -> None:
    """Those who do not fit in ask again and again, get in when there is room, and fail after long enough."""
    async with simulate(loss=Loss(retransmit_s=0.2, max_retransmits=3)) as network:
        listener = await listen(network, "b")
        outcomes: list[str] = []

        async def dial() -> None:
            try:
                await network.transport("a", peer("a")).dial(listener.address)
                outcomes.append("connected")
            except DialFailed as exc:
                outcomes.append(str(exc))

        async with trio.open_nursery() as nursery:
            for _ in range(BACKLOG + 2):
                nursery.start_soon(dial)
            await trio.sleep(0.5)
            assert outcomes == ["connected"] * BACKLOG
            await listener.accept()
        assert outcomes[BACKLOG] == "connected"
        assert "timed out" in outcomes[BACKLOG + 1]
        await listener.aclose()
        await trio.sleep(1.0)
        assert network.statistics().links == 1  # the accepted one; the others were reset


@in_simulation
async def test_data_for_a_closed_link_reset_the_sender() -> None:
    """An end that sends after the other has closed is told after a round trip; data sent to it still arrive."""
    async with open_link() as (network, dialled, accepted):
        await dialled.send(part(1000))
        await dialled.aclose()
        await accepted.send(part(100))
        await trio.sleep(1.0)
        with pytest.raises(ConnectionLost, match="closed by the other end"):
            await accepted.send(part(100))
        assert await accepted.receive() is not None
        assert await accepted.receive() is None
        accepted.abort()
        assert network.statistics().links == 0


@in_simulation
async def test_a_closed_link_delivers_even_what_the_window_held_back() -> None:
    async with open_link() as (_, dialled, accepted):
        for index in range(44):
            await dialled.send(part(100_000, index))
        await dialled.aclose()
        dialled.abort()
        for _ in range(60):  # nobody reads them, and nobody minds as long as there is something to deliver
            await accepted.send(part(100_000))
        await trio.sleep(100.0)
        for _ in range(44):
            assert await accepted.receive() is not None
        assert await accepted.receive() is None


@in_simulation
async def test_an_aborted_link_drops_what_has_not_left() -> None:
    """Parts that the window held back are lost; those that had left arrive before the reset."""
    async with open_link() as (_, dialled, accepted):
        for index in range(44):
            await dialled.send(part(100_000, index))
        dialled.abort()
        await trio.sleep(1.0)
        for _ in range(RECEIVE_BUFFER_BYTES // 100_000):
            assert await accepted.receive() is not None
        await expect_lost(accepted, "reset by the other end")


@in_simulation
async def test_a_peer_does_not_dial_itself() -> None:
    async with simulate() as network:
        listener = await listen(network, "a")
        with pytest.raises(DialFailed, match="that is this peer itself"):
            await network.transport("b", peer("a")).dial(listener.address)


@in_simulation
async def test_ports_are_the_simulations_own() -> None:
    """Chosen in a fixed order for each host, passing over those that are taken."""
    async with simulate() as network:
        first = [(await listen(network, host)).address for host in ("a", "a", "b")]
        taken = first[1].port + 1
        await network.transport("a", peer("a")).listen(Address("a", taken))
        assert first == [Address("a", taken - 2), Address("a", taken - 1), Address("b", taken - 2)]
        assert (await listen(network, "a")).address.port == taken + 1


@in_simulation
async def test_statistics() -> None:
    """Parts, bytes and frames delivered, dials and open links; for a host, what came to it and was dialled by it."""
    async with open_link() as (network, dialled, accepted):
        await exchange(dialled, accepted, numbered(1, 1_400_000))
        await accepted.send(part(100))
        await trio.sleep(1.0)
        total, to_a, to_b = (network.statistics(host) for host in (None, "a", "b"))
        assert (to_a.parts, to_a.nbytes, to_a.frames, to_a.dials, to_a.links) == (1, 100, 1, 1, 1)
        assert (to_b.parts, to_b.frames, to_b.dials, to_b.links) == (4, 1, 0, 1)  # OPEN and three chunks
        assert 1_400_000 < to_b.nbytes < 1_400_200
        assert (total.parts, total.nbytes, total.frames) == (5, to_b.nbytes + 100, 2)
        dialled.abort()
        await trio.sleep(1.0)
        assert network.statistics().links == 0


@in_simulation
async def test_two_tasks_cannot_receive_or_accept_at_once() -> None:
    """The second is told, as with a socket."""
    async with simulate() as network:
        dialled, _ = await connect(network, "a", "b")
        listener = await listen(network, "b")
        for wait in (dialled.receive, listener.accept):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await trio.sleep(1.0)
                with pytest.raises(trio.BusyResourceError):
                    await wait()
                nursery.cancel_scope.cancel()


MODELS: list[tuple[LatencyModel, float]] = [
    (Constant(0.05), 0.05),
    (Constant(0.0), 0.0),
    (Exponential(0.1), 0.0),
    (Exponential(0.1, 0.02), 0.02),
    (LogNormal(0.08, 0.5), 0.0),
    (LogNormal(0.08, 1.0, floor_s=0.03), 0.03),
    (LogNormal(0.08, 0.0), 0.0),
]
draws = st.floats(0.0, 1.0, exclude_max=True)


@given(model=st.sampled_from(MODELS), one=draws, other=draws)
def test_latencies_are_finite_above_the_floor_and_grow_with_the_draw(
    model: tuple[LatencyModel, float], one: float, other: float
) -> None:
    """Every draw from [0, 1), its ends included, gives a latency; a larger draw no smaller one."""
    low, high = (model[0].sample_s(u) for u in sorted((one, other)))
    assert model[1] <= low <= high < math.inf


def test_moments_of_the_models() -> None:
    grid = [(index + 0.5) / 100_000 for index in range(100_000)]
    assert statistics.fmean(map(Exponential(0.1, 0.02).sample_s, grid)) == pytest.approx(0.1, rel=1e-3)
    assert Exponential(0.1).sample_s(0.5) == pytest.approx(0.1 * math.log(2))
    assert LogNormal(0.08, 0.7, floor_s=0.03).sample_s(0.5) == pytest.approx(0.08)
    # One standard deviation above the median: exp(sigma) times as much lies above the floor.
    one_sigma = statistics.NormalDist().cdf(1.0)
    assert LogNormal(0.08, 0.7, floor_s=0.03).sample_s(one_sigma) == pytest.approx(0.03 + 0.05 * math.exp(0.7))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(-1.0), "seconds.*-1.0"),
        (lambda: Constant(math.nan), "seconds.*nan"),
        (lambda: Exponential(0.1, floor_s=0.2), "mean_s.*floor_s = 0.2.*0.1"),
        (lambda: LogNormal(math.inf, 1.0), "median_s.*inf"),
        (lambda: LogNormal(0.1, -1.0), "sigma.*-1.0"),
        (lambda: HostOptions(up_bps=0.0), "up_bps.*0.0"),
        (lambda: HostOptions(down_bps=math.nan), "down_bps.*nan"),
        (lambda: HostOptions(extra_latency_s=-0.1), "extra_latency_s.*-0.1"),
        (lambda: Loss(probability=1.0), "probability.*1.0"),
        (lambda: Loss(retransmit_s=0.0), "retransmit_s.*0.0"),
        (lambda: Loss(max_retransmits=0), "max_retransmits.*0"),
        (lambda: Partition((frozenset("ab"), frozenset("bc"))), "two groups.*b"),
        (lambda: Partition(("ab",)), "set of host names.*'ab'"),
    ],
)
def test_wrong_values_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_latency_is_one_model_or_one_for_each_direction() -> None:
    near, far = Constant(0.01), Constant(0.1)
    assert model_between(near, "a", "b") is near
    by_direction = {("a", "b"): near, ("b", "a"): far}
    assert model_between(lambda source, destination: by_direction[source, destination], "b", "a") is far


def test_streams_of_random_numbers_differ() -> None:
    """Every seed, pair, link and direction has a key of its own, whatever the names look like."""
    keys = {
        stream_key(seed, dialler, listener, number, is_answer=is_answer)
        for seed in (0, 1)
        for dialler, listener in (("a", "b"), ("b", "a"), ("a', 'b", "c"), ("a", "b', 'c"))
        for number in (1, 2)
        for is_answer in (False, True)
    }
    assert len(keys) == 32


def test_losses() -> None:
    """The share of parts lost k times falls with p^k, is bounded, and each loss doubles the wait."""
    loss = Loss(probability=0.3, retransmit_s=0.2, max_retransmits=3)
    counts = [0] * 6
    for sequence in range(20_000):
        counts[loss.num_losses(b"key", sequence)] += 1
    assert counts[5] == 0
    # Four attempts at most are lost: the last class holds all that is left.
    for count, share in zip(counts, (0.7, 0.21, 0.063, 0.0189, 0.0081), strict=False):
        assert count / 20_000 == pytest.approx(share, abs=4 * math.sqrt(share / 20_000))
    assert [loss.delay_s(0.05, lost) for lost in range(4)] == pytest.approx([0.0, 0.2, 0.6, 1.4])
    assert loss.delay_s(0.5, 2) == pytest.approx(3.0)  # a round trip of 1 s is longer than 0.2 s
    assert Loss().num_losses(b"key", 0) == 0


def test_a_line_passes_one_part_after_the_other() -> None:
    """1000 bytes at 8000 bits/s take a second; a part waits for those before it, and not for a pause."""
    line = Line(8000.0)
    for now, nbytes, done in ((10.0, 1000, 11.0), (10.5, 500, 11.5), (10.5, 0, 11.5), (20.0, 1000, 21.0)):
        assert line.take(now, nbytes) == done
    line.bandwidth_bps = math.inf
    assert line.take(20.5, 10**9) == 21.0  # behind what is on the line already
    assert line.take(22.0, 10**9) == 22.0


def test_who_reaches_whom() -> None:
    reachability = Reachability()
    assert reachability.is_whole
    reachability.set_groups((frozenset("ab"), frozenset("c")))
    assert not reachability.is_whole
    together = {pair for pair in ("ab", "ac", "ad", "cd", "de") if reachability.between(*pair)}
    assert together == {"ab", "de"}
    reachability.set_plugged("e", False)
    assert not any(reachability.between(*pair) for pair in ("de", "ed"))
    reachability.set_groups(())
    assert not reachability.is_whole
    assert reachability.between("a", "c")
    reachability.set_plugged("e", True)
    assert reachability.is_whole
