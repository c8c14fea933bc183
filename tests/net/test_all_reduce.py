"""Butterfly all-reduce without trouble: on the simulated network, in virtual time, and once over TCP."""

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import trio

from dmoe_net.averaging.grouping.group import Member, Role
from dmoe_net.averaging.reduction.partition import AllReduceConfig
from dmoe_net.averaging.speeds import Speeds
from dmoe_net.identity import Address, PeerId
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.sim.links import HostOptions
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.wire.compression import Compression
from tests.net.all_reduce_swarm import CONFIG, Swarm, Watched, assert_complete, mean, swarm, vectors
from tests.net.sim_hosts import in_simulation


@in_simulation
async def test_unequal_weights() -> None:
    """The exact weighted mean, the same bits everywhere, and no vector was written to."""
    weights = [1.0, 2.5, 0.5, 4.0, 100.0]
    async with swarm(5, facts={index: {"weight": weight} for index, weight in enumerate(weights)}) as peers:
        values = vectors(5)
        results = await peers.run(values)
        assert_complete(results, mean(values, weights))
        assert all(np.array_equal(mine, same) for mine, same in zip(values, vectors(5), strict=True))
        assert not results[0].average.flags.writeable


@in_simulation
async def test_unequal_bandwidths() -> None:
    """Parts of unequal length; everybody has the mean."""
    lines = [(2e6, 9e9), (3e6, 3e6), (9e9, 2.5e6), (2.5e6, None)]
    facts = {index: {"speeds": Speeds(up=up, down=down)} for index, (up, down) in enumerate(lines)}
    async with swarm(4, facts=facts) as peers:
        assert len({end - start for start, end in map(peers.part, range(4))}) > 2
        values = vectors(4)
        assert_complete(await peers.run(values), mean(values))


@in_simulation
async def test_clients_and_auxiliaries() -> None:
    """A client gets everything and is never called; an auxiliary peer counts for nothing, and gets its part."""
    facts: dict[int, dict[str, Any]] = {0: {"role": Role.CLIENT}, 2: {"role": Role.AUXILIARY, "weight": 50.0}}
    async with swarm(4, facts=facts) as peers:
        values = vectors(4)
        results = await peers.run([values[0], values[1], None, values[3]])
        expected = mean([values[0], values[1], values[3]])
        auxiliary = results.pop(2)
        assert_complete(results, expected)
        start, end = peers.part(2)
        assert end > start
        np.testing.assert_allclose(auxiliary.average[start:end], expected[start:end], rtol=1e-5, atol=1e-6)
        assert not auxiliary.average[:start].any()
        assert not auxiliary.average[end:].any()
        assert auxiliary.received == (end - start) / 1234
        assert auxiliary.complete


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [1, 3, 100, 199, 1001])
def test_all_sizes(count: int, size: int) -> None:
    """One alone, two, more members than numbers, empty parts, chunks that do not come out even."""

    @in_simulation
    async def test() -> None:
        async with swarm(count) as peers:
            values = vectors(count, size)
            assert_complete(await peers.run(values), mean(values))

    test()


@in_simulation
async def test_one_group_after_the_other_and_two_at_once() -> None:
    """Groups of one prefix do not meddle with each other; each runs once."""
    async with swarm(3) as peers:
        first, again = vectors(3), [2 * vector for vector in vectors(3)]
        other = Swarm.__new__(Swarm)
        other.all_reduces, other.group = peers.all_reduces, replace(peers.group, group_id=b"h" * 16)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peers.run, first)
            assert_complete(await other.run(again), 2 * mean(first))
        assert peers.group.group_id in peers.all_reduces[0].groups


@pytest.mark.parametrize(
    ("compression", "tolerance"), [(Compression.BFLOAT16, 2**-8), (Compression.BLOCKWISE_8BIT, 1 / 254)]
)
def test_compressed(compression: Compression, tolerance: float) -> None:
    """Within what the values lose on their way and the differences on theirs; less is sent."""

    @in_simulation
    async def test() -> None:
        config = replace(CONFIG, compression=compression, chunk_bytes=32_768, window_bytes=2**20)
        async with swarm(4, config=config) as peers:
            values = vectors(4, 20_000)
            results = await peers.run(values)
            largest = max(np.abs(vector).max() for vector in values)
            for result in results:
                assert result.complete
                assert np.abs(result.average - mean(values)).max() <= (1 + 1 + 2) * largest * tolerance

    test()


@in_simulation
async def test_compression_leaves_agreement_alone() -> None:
    """Members with one and the same vector keep it, to float32's rounding, however coarse the compression."""
    config = replace(CONFIG, compression=Compression.BLOCKWISE_8BIT)
    async with swarm(4, config=config) as peers:
        vector = vectors(1)[0]
        for result in await peers.run([vector] * 4):
            assert result.complete
            np.testing.assert_allclose(result.average, vector, rtol=1e-6, atol=1e-6)


@in_simulation
async def test_members_may_compress_each_in_its_own_way() -> None:
    """An answer says what it is."""
    configs = [CONFIG, replace(CONFIG, compression=Compression.BFLOAT16), CONFIG]
    async with swarm(3, config=configs) as peers:
        values = vectors(3)
        for result in await peers.run(values):
            assert result.complete
            np.testing.assert_allclose(result.average, mean(values), atol=0.05)


@in_simulation
async def test_a_reducer_holds_no_more_than_the_window() -> None:
    """Two chunks of each of four others, however long one of them takes; also of one with a slow line."""
    slow = HostOptions(up_bps=100_000.0)
    async with swarm(5, hosts=lambda host: slow if host == "host4" else HostOptions()) as peers:
        values = vectors(5, 5000)
        assert_complete(await peers.run(values), mean(values))
        assert max(caller.most_served for caller in peers.callers) <= 2 * 4
        assert max(caller.most_served for caller in peers.callers[:4]) >= 2 * 3


def test_over_tcp() -> None:
    """Peers that all dial each other at the same moment, on the real network."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            callers = [
                await stack.enter_async_context(
                    open_rpc_peer(TcpTransport(), peer_id=PeerId(bytes([index]) * 32), listen=Address("127.0.0.1", 0))
                )
                for index in range(4)
            ]
            members = [
                Member(peer_id=caller.peer_id, address=caller.address, wanted_slot=index)
                for index, caller in enumerate(callers)
            ]
            peers = Swarm([Watched(caller) for caller in callers], members, [AllReduceConfig(chunk_bytes=2**16)] * 4)
            values = vectors(4, 300_001)
            with trio.fail_after(60):
                assert_complete(await peers.run(values), mean(values))

    trio.run(main)


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_bytes": 0},
        {"chunk_bytes": 3},
        {"window_bytes": 0},
        {"sender_timeout_s": 0.0},
        {"timeout_s": float("inf")},
        {"sender_timeout_s": float("nan")},
    ],
)
def test_configs_that_cannot_be(changes: dict[str, Any]) -> None:
    """The message names the field."""
    with pytest.raises(ValueError, match=next(iter(changes))):
        AllReduceConfig(**changes)


def test_the_window_shares_its_bytes() -> None:
    """8 MiB in chunks of at most 2 MiB: four to a single other, one to each of three, one of a share in whole blocks
    to each of seven or seventy; a window too small for a number each still lets one pass."""
    config = AllReduceConfig()
    assert [config.chunk_size(members) for members in (2, 4, 8, 71)] == [128 * 4096, 128 * 4096, 64 * 4096, 7 * 4096]
    assert [config.window(members) for members in (2, 4, 8, 71)] == [4, 1, 1, 1]
    assert (CONFIG.chunk_size(5), CONFIG.window(5)) == (100, 2)
    tiny = AllReduceConfig(chunk_bytes=4, window_bytes=400)
    assert [(tiny.chunk_size(members), tiny.window(members)) for members in (1, 2, 1024)] == [(1, 16), (1, 16), (1, 1)]


@in_simulation
async def test_a_stranger_averages_with_nobody() -> None:
    """Nothing is left behind, so that the group can still run."""
    async with swarm(2) as peers:
        values = vectors(2)
        with pytest.raises(ValueError, match="not in the group"):
            await peers.all_reduces[0].run(replace(peers.group, members=peers.group.members[1:]), values[0], size=1234)
        assert_complete(await peers.run(values), mean(values))
