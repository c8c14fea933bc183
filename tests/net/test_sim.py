"""The simulated network: what takes how long, and how links behave where the real ones cannot be watched."""

import pytest
import trio
import trio.testing

from dmoe_net.errors import ConnectionLost, DialFailed
from dmoe_net.identity import Address
from dmoe_net.transport.sim import simulate
from dmoe_net.transport.sim.endpoints import SimLink
from dmoe_net.transport.sim.flow import RECEIVE_BUFFER_BYTES, SEND_BUFFER_BYTES
from dmoe_net.transport.sim.links import Constant, Exponential, HostOptions, LogNormal, Loss
from dmoe_net.transport.sim.transport import BACKLOG
from tests.net.link_frames import exchange, numbered, parts_of
from tests.net.sim_hosts import arrival_s, connect, expect_duration, expect_lost, in_simulation, listen, part, peer


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
    both_s = 2 * 8 * size / bps
    chunk_s = 8 * 512 * 1024 / bps
    assert max(times) == pytest.approx(both_s + 0.05, abs=0.01)
    assert min(times) >= max(times) - 1.1 * chunk_s


@in_simulation
async def test_download_bandwidth() -> None:
    """Two senders share the receiver's line in the order in which their parts arrive there, not in that of sending."""
    latencies = {"far": 1.0, "near": 0.1, "b": 0.0}
    async with simulate(
        latency=lambda source, _: Constant(latencies[source]),
        hosts=lambda name: HostOptions(down_bps=8000.0) if name == "b" else HostOptions(),
    ) as network:
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
    async with simulate(hosts=HostOptions(up_bps=8 * 8.0 * nbytes)) as network:
        dialled, accepted = await connect(network, "a", "b")
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
    async with simulate() as network:
        dialled, accepted = await connect(network, "a", "b")
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
                frame = await accepted.receive()
                assert frame is not None
                assert frame.header["n"] == index


@in_simulation
async def test_links_keep_the_order_whatever_the_latency() -> None:
    """Latencies that differ wildly, and losses: frames arrive in the order of sending, over a stretch of time."""
    for options in ({"latency": LogNormal(0.1, 0.3)}, {"latency": Exponential(0.1), "loss": 0.02}):
        async with simulate(**options) as network:
            dialled, accepted = await connect(network, "a", "b")
            start = trio.current_time()
            async with trio.open_nursery() as nursery:

                async def send(dialled: SimLink = dialled) -> None:
                    for index in range(300):
                        await dialled.send(part(100, index))
                        await trio.sleep(0.01)

                nursery.start_soon(send)
                times = []
                for index in range(300):
                    frame = await accepted.receive()
                    assert frame is not None
                    assert frame.header["n"] == index
                    times.append(trio.current_time() - start)
            assert len(set(times)) > 10
            assert all(time >= 0.01 * index for index, time in enumerate(times))


@in_simulation
async def test_ticks() -> None:
    """Deliveries come at multiples of the tick, rounded up; without one, at their exact times."""
    for tick_s, expected in ((0.01, 0.07), (0.0, 0.0617)):
        async with simulate(tick_s=tick_s, latency=Constant(0.0617)) as network:
            dialled, accepted = await connect(network, "a", "b")
            async with expect_duration(expected):
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
    async with simulate() as network:
        dialled, accepted = await connect(network, "a", "b")
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
    """`aclose` with a full window, and `abort` after it: the reader gets everything, later."""
    async with simulate() as network:
        dialled, accepted = await connect(network, "a", "b")
        num_frames = 44
        for index in range(num_frames):
            await dialled.send(part(100_000, index))
        await dialled.aclose()
        dialled.abort()
        for _ in range(60):  # nobody reads them, and nobody minds as long as there is something to deliver
            await accepted.send(part(100_000))
        await trio.sleep(100.0)
        for _ in range(num_frames):
            assert await accepted.receive() is not None
        assert await accepted.receive() is None


@in_simulation
async def test_an_aborted_link_drops_what_has_not_left() -> None:
    """Parts that the window held back are lost; those that had left arrive before the reset."""
    async with simulate() as network:
        dialled, accepted = await connect(network, "a", "b")
        for index in range(44):
            await dialled.send(part(100_000, index))
        dialled.abort()
        await trio.sleep(1.0)
        for _ in range(RECEIVE_BUFFER_BYTES // 100_000):
            assert await accepted.receive() is not None
        await expect_lost(accepted, "reset by the other end")


@in_simulation
async def test_a_peer_does_not_dial_itself() -> None:
    """As on the encrypted network: the same identity at the other end is no peer."""
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
    async with simulate() as network:
        dialled, accepted = await connect(network, "a", "b")
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
