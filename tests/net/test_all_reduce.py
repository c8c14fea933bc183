"""Butterfly all-reduce: weights that travel with the chunks, averages that are the same in all members though they
travel compressed, members that are late, break the rules, or fail; in virtual time, and once over TCP."""

import copy
import itertools
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio

from dmoe_net.averaging.grouping.group import Member, Role
from dmoe_net.averaging.reduction.partition import MAX_WEIGHT, AllReduceConfig, ChunkName, Part
from dmoe_net.averaging.reduction.reducer import PartReduction
from dmoe_net.averaging.speeds import Speeds
from dmoe_net.errors import CallRefused, DialFailed, PeerBusy, RemoteProtocolError
from dmoe_net.rpc.base import Reply
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.sim.links import HostOptions
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.types import Array
from dmoe_net.wire.compression import Compressed, Compression, compressed_in_place, encode
from dmoe_net.wire.tensors import plain
from tests.net.all_reduce_swarm import (
    CONFIG,
    GROUP,
    METHOD,
    Swarm,
    T,
    Watched,
    assert_complete,
    assert_has_its_part,
    mean,
    swarm,
    vectors,
)
from tests.net.rpc_peers import ANY_PORT
from tests.net.sim_hosts import in_simulation, peer


@in_simulation
async def test_unequal_weights() -> None:
    """All have the exact weighted mean, to the bit the same, and the sum of the weights; no vector was written to."""
    weights = [1.0, 2.5, 0.5, 4.0, 100.0]
    async with swarm(5, facts={index: {"weight": weight} for index, weight in enumerate(weights)}) as peers:
        values = vectors(5)
        results = await peers.run(values)
        assert_complete(results, mean(values, weights))
        assert all(np.array_equal(mine, same) for mine, same in zip(values, vectors(5), strict=True))
        assert not results[0].average.flags.writeable
        assert {result.weight for result in results} == {108.0}


@in_simulation
async def test_unequal_bandwidths() -> None:
    lines = [(2e6, 9e9), (3e6, 3e6), (9e9, 2.5e6), (2.5e6, None)]
    facts = {index: {"speeds": Speeds(up=up, down=down)} for index, (up, down) in enumerate(lines)}
    async with swarm(4, facts=facts) as peers:
        assert len({end - start for start, end in map(peers.part, range(4))}) > 2
        values = vectors(4)
        assert_complete(await peers.run(values), mean(values))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [1, 3, 100, 199, 1001])
@in_simulation
async def test_all_sizes(count: int, size: int) -> None:
    """All sizes end well: one alone, two, more members than numbers, empty parts, chunks that do not come out even."""
    async with swarm(count) as peers:
        values = vectors(count, size)
        assert_complete(await peers.run(values), mean(values))


@in_simulation
async def test_one_group_after_the_other_and_two_at_once() -> None:
    """Groups of one prefix do not meddle with each other; each runs once."""
    async with swarm(3) as peers:
        first, again = vectors(3), [2 * vector for vector in vectors(3)]
        other = copy.copy(peers)
        other.group = replace(peers.group, group_id=b"h" * 16)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peers.run, first)
            assert_complete(await other.run(again), 2 * mean(first))
        assert peers.group.group_id in peers.all_reduces[0].groups


@pytest.mark.parametrize(
    ("compression", "tolerance"), [(Compression.BFLOAT16, 2**-8), (Compression.BLOCKWISE_8BIT, 1 / 254)]
)
@in_simulation
async def test_compressed(compression: Compression, tolerance: float) -> None:
    """The mean is within what the values lose on their way and the differences on theirs."""
    config = replace(CONFIG, compression=compression, chunk_bytes=32_768, window_bytes=2**20)
    async with swarm(4, config=config) as peers:
        values = vectors(4, 20_000)
        largest = max(np.abs(vector).max() for vector in values)
        for result in await peers.run(values):
            assert result.complete
            assert np.abs(result.average - mean(values)).max() <= (1 + 1 + 2) * largest * tolerance


@in_simulation
async def test_compression_leaves_agreement_alone() -> None:
    """Members with one and the same vector keep it, to float32's rounding, however coarse the compression."""
    config = replace(CONFIG, compression=Compression.BLOCKWISE_8BIT)
    async with swarm(4, config=config) as peers:
        vector = vectors(1)[0]
        for result in await peers.run([vector] * 4):
            assert result.complete
            np.testing.assert_allclose(result.average, vector, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_identical", [False, True])
@in_simulation
async def test_members_may_compress_each_in_its_own_way(is_identical: bool) -> None:
    """An answer says what it is; where all are to have the same, they have."""
    configs = [replace(CONFIG, compression=kind, is_identical=is_identical) for kind in Compression]
    async with swarm(len(configs), config=configs) as peers:
        values = vectors(len(configs))
        results = await peers.run(values)
        for result in results:
            assert result.complete
            np.testing.assert_allclose(result.average, mean(values), atol=0.05)
        assert not is_identical or len({result.average.tobytes() for result in results}) == 1


@in_simulation
async def test_a_reducer_holds_no_more_than_the_window() -> None:
    """It holds two chunks of each of four others, however long one of them takes, and though one has a slow line."""
    slow = HostOptions(up_bps=100_000.0)
    async with swarm(5, hosts=lambda host: slow if host == "host4" else HostOptions()) as peers:
        values = vectors(5, 5000)
        assert_complete(await peers.run(values), mean(values))
        assert max(caller.most_served for caller in peers.callers) <= 2 * 4
        assert max(caller.most_served for caller in peers.callers[:4]) >= 2 * 3


async def test_over_tcp() -> None:
    """Peers that all dial each other at the same moment average on the real network."""
    async with AsyncExitStack() as stack:
        opened = [open_rpc_peer(TcpTransport(), peer_id=peer(f"host{index}"), listen=ANY_PORT) for index in range(4)]
        callers = [await stack.enter_async_context(each) for each in opened]
        members = [
            Member(peer_id=each.peer_id, address=each.address, wanted_slot=slot) for slot, each in enumerate(callers)
        ]
        peers, values = Swarm(callers, members, [AllReduceConfig(chunk_bytes=2**16)] * 4), vectors(4, 300_001)
        with trio.fail_after(60):
            assert_complete(await peers.run(values), mean(values))


def test_configs_that_cannot_be() -> None:
    nan, infinite = float("nan"), float("inf")
    wrong = {"chunk_bytes": (0, 3), "window_bytes": (0,), "sender_timeout_s": (0.0, nan), "timeout_s": (infinite,)}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                AllReduceConfig(**{name: value})


def test_the_window_shares_its_bytes() -> None:
    """8 MiB are four chunks to one other, one to each of three, or of a share in whole blocks; one always passes."""
    config = AllReduceConfig()
    assert [config.chunk_size(members) for members in (2, 4, 8, 71)] == [128 * 4096, 128 * 4096, 64 * 4096, 7 * 4096]
    assert [config.window(members) for members in (2, 4, 8, 71)] == [4, 1, 1, 1]
    assert (CONFIG.chunk_size(5), CONFIG.window(5)) == (100, 2)
    tiny = AllReduceConfig(chunk_bytes=4, window_bytes=400)
    assert [(tiny.chunk_size(members), tiny.window(members)) for members in (1, 2, 1024)] == [(1, 16), (1, 16), (1, 1)]


@in_simulation
async def test_a_stranger_averages_with_nobody() -> None:
    """It leaves nothing behind, so that the group can still run."""
    async with swarm(2) as peers:
        values = vectors(2)
        with pytest.raises(ValueError, match="not in the group"):
            await peers.all_reduces[0].run(replace(peers.group, members=peers.group.members[1:]), values[0], size=1234)
        assert_complete(await peers.run(values), mean(values))


WEIGHTS = [1.0, 2.5, 0.1, 4.0, 100.0]
LOSSY = [Compression.FLOAT16, Compression.BFLOAT16, Compression.BLOCKWISE_8BIT]


@in_simulation
async def test_weights_told_with_the_chunks_stand_in_place_of_those_announced() -> None:
    """The weight of a member that tells none is as announced; all know the sum, to the last bit."""
    announced = {index: {"weight": 7.0} for index in range(5)}
    async with swarm(5, facts=announced) as peers:
        values = vectors(5)
        results = await peers.run(values, [*WEIGHTS[:4], None])
        assert_complete(results, mean(values, [*WEIGHTS[:4], 7.0]))
        assert {result.weight for result in results} == {14.6}  # 1 + 2.5 + 0.1 + 4 + 7, rounded once


@pytest.mark.parametrize("auxiliary", range(4))
@in_simulation
async def test_clients_and_auxiliaries(auxiliary: int) -> None:
    """A client gets all and is never called; an auxiliary counts for nothing and gets its part; all know the sum."""
    roles = [Role.CLIENT, Role.NODE, Role.NODE, Role.NODE]
    roles.insert(auxiliary, Role.AUXILIARY)
    async with swarm(5, facts={index: {"role": role} for index, role in enumerate(roles)}) as peers:
        values: list[Array | None] = vectors(5)
        there, weights = (list(each) for each in (values, WEIGHTS))
        values[auxiliary] = None
        del there[auxiliary], weights[auxiliary]
        results = await peers.run(values, WEIGHTS)
        assert [result.weight for result in results] == pytest.approx([sum(weights)] * 5, rel=1e-15)
        assert len({result.weight for result in results}) == 1
        helper, (start, end) = results.pop(auxiliary), peers.part(auxiliary)
        assert_complete(results, mean(there, weights))
        assert_has_its_part(helper.average, (start, end), mean(there, weights))
        assert helper.complete
        assert helper.received == (end - start) / 1234


@in_simulation
async def test_an_auxiliary_with_an_empty_part_is_told_nothing() -> None:
    """Two nodes reduce the whole of their two vectors; the auxiliary, whose part is empty, learns no sum of weights."""
    async with swarm(3, facts={2: {"role": Role.AUXILIARY}}) as peers:
        results = await peers.run([*vectors(2), None], [1.0, 2.0, 3.0])
        assert [result.weight for result in results] == [3.0, 3.0, None]
        assert all(result.complete for result in results)


@in_simulation
async def test_a_vector_without_weight_adds_nothing_and_counts_as_a_sender() -> None:
    async with swarm(3) as peers:
        values = vectors(3)
        results = await peers.run(values, [1.0, 0.0, 3.0])
        assert_complete(results, mean([values[0], values[2]], [1.0, 3.0]))
        assert results[1].weight == 4.0


@pytest.mark.parametrize("compression", [Compression.NONE, Compression.FLOAT16])
@in_simulation
async def test_without_any_weight_the_mean_is_zero(compression: Compression) -> None:
    async with swarm(3, config=replace(CONFIG, compression=compression, is_identical=True)) as peers:
        for result in await peers.run(vectors(3), [0.0] * 3):
            assert result.complete
            assert result.weight == 0.0
            assert not result.average.any()


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), 2 * MAX_WEIGHT])
@in_simulation
async def test_weights_that_cannot_be(weight: float) -> None:
    """They are refused before anybody waits for them."""
    async with swarm(2) as peers:
        with pytest.raises(ValueError, match=r"weight of a vector is from 0 to 1e\+12"):
            await peers.all_reduces[0].run(peers.group, vectors(1)[0], size=1234, weight=weight)
        assert_complete(await peers.run(vectors(2)), mean(vectors(2)))


@pytest.mark.parametrize(("first", "then"), [(2.0, 3.0), (None, 3.0), (2.0, 0.0)])
def test_a_weight_that_changes_ends_its_sender(first: float | None, then: float) -> None:
    """Its later chunks do not count; the sums tell. Saying the same again, or nothing any more, is no change."""
    values, average = vectors(3, 4), np.zeros(4, np.float32)
    part = Part(start=0, end=4, chunk_size=1)
    reduction = PartReduction(
        part, dict.fromkeys(range(3), 1.0), own=(0, values[0]), average=average, config=CONFIG, now=0.0
    )

    def bring(sender: int, chunk: int, weight: float | None) -> None:
        reduction.receive_untrusted(sender, chunk, [values[sender][part.chunk(chunk)]], 0.0, weight=weight)

    for chunk, weight in enumerate((first, None, first)):
        bring(1, chunk, weight)
        bring(2, chunk, 5.0)
    with pytest.raises(RemoteProtocolError, match=f"weight of a vector does not change, got {then!r}"):
        bring(1, 3, then)
    bring(2, 3, 5.0)
    assert reduction.lost == [1]
    own = 1.0 if first is None else first
    assert reduction.total_weights == [1.0 + own + 5.0] * 3 + [6.0]
    np.testing.assert_allclose(average[0], mean([v[0] for v in values], [1.0, own, 5.0]), rtol=1e-6)
    np.testing.assert_allclose(average[3], mean([values[0][3], values[2][3]], [1.0, 5.0]), rtol=1e-6)


@in_simulation
async def test_a_member_that_tells_each_reducer_another_weight_spoils_the_average_for_all_alike() -> None:
    """The sums differ from part to part: nobody takes it for complete."""
    async with swarm(4) as peers:
        told = iter(range(1, 10**6))
        original = peers.callers[0].call
        weights: dict[Any, float] = {}

        async def call(target: Any, method: str, body: Any, *args: Any, **settings: Any) -> Reply:
            weight = weights.setdefault(target, float(next(told)))
            return await original(target, method, {**body, "weight": weight}, *args, **settings)

        peers.callers[0].call = call  # type: ignore[method-assign]
        results = await peers.run(vectors(4), [1.0] * 4)
        assert len(set(weights.values())) == 3
        assert not any(result.complete for result in results)
        assert all(result.weight is None and result.received == 1.0 for result in results)


@pytest.mark.parametrize("compression", LOSSY)
@in_simulation
async def test_identical_averages_travel_compressed(compression: Compression) -> None:
    """All have the same bits, an auxiliary those of its part, within twice what a number loses on its way."""
    tolerance = {Compression.FLOAT16: 2**-11, Compression.BFLOAT16: 2**-8}.get(compression, 1 / 254)
    facts: dict[int, dict[str, Any]] = {0: {"role": Role.CLIENT}, 2: {"role": Role.AUXILIARY}}
    config = AllReduceConfig(chunk_bytes=32_768, window_bytes=2**20, compression=compression, is_identical=True)
    async with swarm(5, config=config, facts=facts) as peers:
        there = vectors(5, 20_000)
        del there[2]
        results = await peers.run([*there[:2], None, *there[2:]], WEIGHTS)
        assert all(result.complete and result.weight == 107.5 for result in results)
        largest = max(np.abs(vector).max() for vector in there)
        expected = mean(there, [1.0, 2.5, 4.0, 100.0])
        assert 0 < np.abs(results[0].average - expected).max() <= 2.01 * largest * tolerance
        start, end = peers.part(2, 20_000)
        assert np.array_equal(results.pop(2).average[start:end], results[0].average[start:end])
        assert len({result.average.tobytes() for result in results}) == 1


@pytest.mark.parametrize("compression", LOSSY)
def test_compressed_once_for_all(compression: Compression) -> None:
    """The values left in place are those that the payload stands for: compressing them anew makes the same payload."""
    values = np.concatenate([vectors(1, 10_000)[0], np.zeros(5, np.float32), np.float32([1e-30, 7e4])])
    before = values.copy()
    once = compressed_in_place(values, compression)
    assert plain(once) is values
    assert not np.array_equal(values, before)
    assert encode(once) is once.payload
    assert bytes(encode(Compressed(values.copy(), compression))) == bytes(encode(once))


@in_simulation
async def test_calls_wait_for_a_member_that_hears_of_the_group_later() -> None:
    async with swarm(3) as peers:
        values = vectors(3)
        assert_complete(await peers.run(values, delays_s={1: 0.9 * T}), mean(values))


@in_simulation
async def test_who_comes_too_late_is_left_out() -> None:
    """The others have the mean of themselves, but for its part; it keeps its own values, and does not hang."""
    async with swarm(3) as peers:
        values = vectors(3)
        results = await peers.run(values, delays_s={1: 10 * T})
        assert trio.current_time() < 12 * T
        (start, end), size = peers.part(1), 1234
        for index in (0, 2):
            assert results[index].lost_reducers == results[index].lost_senders == (peer("host1"),)
            assert results[index].received == pytest.approx(1 - (end - start) / size)
            assert not results[index].complete
            np.testing.assert_array_equal(results[index].average[start:end], values[index][start:end])
            expected = mean([values[0], values[2]])[:start]
            np.testing.assert_allclose(results[index].average[:start], expected, rtol=1e-5, atol=1e-6)
        assert np.array_equal(results[1].average, values[1])
        assert not results[1].complete


@in_simulation
async def test_calls_for_groups_that_never_come() -> None:
    """They wait for a time, few of each peer, and are refused; those for a group that is over do not wait."""
    async with swarm(2) as peers:
        errors: list[Exception] = []

        async def call(group_id: bytes) -> None:
            body = ChunkName(group_id=group_id, size=1234, start=0, wish=1).body()
            target = peers.group.members[1].contact
            try:
                await peers.callers[0].call(target, METHOD, body, [np.zeros(100, np.float32)], timeout_s=60.0)
            except (CallRefused, PeerBusy) as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(call, bytes([number]) * 16)
            await trio.sleep(0.5)
            assert [type(error) for error in errors] == [PeerBusy] * 4
            await trio.sleep(T)
            assert [type(error) for error in errors[4:]] == [CallRefused] * 16
        await peers.run(vectors(2))
        started = trio.current_time()
        await call(GROUP)
        assert "does not average" in str(errors[-1])
        assert trio.current_time() - started < 0.5


@pytest.mark.parametrize(
    ("caller", "body", "tensor", "reason"),
    [
        (3, {}, np.zeros(100, np.float32), "not in this group"),
        (0, {"size": 1235}, np.zeros(100, np.float32), "averages 1234 numbers"),
        (0, {"start": 1}, np.zeros(100, np.float32), "no chunk begins"),
        (0, {"group": b"short"}, np.zeros(100, np.float32), "group id"),
        (0, {}, np.zeros(99, np.float32), "float32 tensor of 100"),
        (0, {}, np.full(100, np.nan, np.float32), "not finite"),
    ],
)
@in_simulation
async def test_bad_calls_are_refused(caller: int, body: dict[str, Any], tensor: Array, reason: str) -> None:
    """The caller learns why, and the others average on: with the sender unless it has broken the rules."""
    async with swarm(4) as peers:
        peers.group = replace(peers.group, members=peers.group.members[:3], side=3)
        values = vectors(3)
        start, end = peers.part(1)

        async def bad_call() -> None:
            name = ChunkName(group_id=GROUP, size=1234, start=start, wish=1).body()
            target = peers.group.members[1].contact
            with pytest.raises(CallRefused, match=reason):
                await peers.callers[caller].call(target, METHOD, {**name, **body}, [tensor], timeout_s=60.0)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(bad_call)
            results = await peers.run(values, delays_s={0: 0.2})
        if "float32" in reason or "finite" in reason:
            assert results[1].lost_senders == (peer("host0"),)
            assert results[0].lost_reducers == (peer("host1"),)
            others = mean(values[1:])[start:end]
            np.testing.assert_allclose(results[2].average[start:end], others, rtol=1e-5, atol=1e-6)
        else:
            assert_complete(results, mean(values))


@in_simulation
async def test_a_cancelled_member_costs_its_part_and_no_time() -> None:
    """The others learn of it at once; its vector is in some chunks and not in others, so that nobody knows a sum."""
    async with swarm(4) as peers:
        values = vectors(4, 8000)

        async def soon_over() -> None:
            with trio.move_on_after(0.3):  # some chunks are back then, and not all
                await peers.all_reduces[0].run(peers.group, values[0], size=8000, weight=2.0)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(soon_over)
            results = await peers.run(values, delays_s={0: None})
        assert trio.current_time() < 0.5 + T + 2.0
        for result in results:
            assert result.lost_reducers == (peer("host0"),)
            assert 0.75 <= result.received < 1
            assert not result.complete
            assert result.weight is None


@in_simulation
async def test_dials_that_fail_at_first_and_busy_reducers_are_tried_again() -> None:
    """All dial each other when a group begins; a call that never arrived can be placed again."""
    async with swarm(3) as peers:
        errors = iter([DialFailed("one"), PeerBusy("two"), DialFailed("three")])

        async def fail() -> None:
            for error in errors:
                raise error

        peers.callers[1].before_call = fail
        values = vectors(3)
        assert_complete(await peers.run(values), mean(values))


@in_simulation
async def test_the_whole_ends_in_time() -> None:
    """One that sends each chunk just before the others lose patience does not hold them up for ever."""
    config = replace(CONFIG, timeout_s=3 * T)
    async with swarm(3, config=config) as peers:
        peers.callers[0].before_call = partial(trio.sleep, 0.8 * T)
        results = await peers.run(vectors(3, 50_000))
        assert trio.current_time() <= 3 * T + 0.1
        assert all(0 < result.received < 1 for result in results)
        assert not any(result.complete for result in results)


def install(fault: str, caller: Watched) -> None:
    """Make a member slow to send, or silent after five chunks sent or served; the rest is up to whoever runs it."""
    num_calls = itertools.count()

    async def stop_after_five() -> None:
        if next(num_calls) >= 5:
            await trio.sleep_forever()

    match fault:
        case "slow sending":
            caller.before_call = partial(trio.sleep, 1.5 * T)
        case "fail sending":
            caller.before_call = stop_after_five
        case "fail reducing":
            caller.before_serving = stop_after_five


FAULTS = ("fail before", "slow sending", "fail sending", "fail reducing", "cancel")


@pytest.mark.parametrize("faults", [*itertools.combinations_with_replacement(FAULTS, 2)], ids=", ".join)
@in_simulation
async def test_every_pair_of_faults(faults: tuple[str, str]) -> None:
    """Three healthy members of five end in time, and mostly have the mean of themselves, and of the faulty who came."""
    async with swarm(5) as peers, trio.open_nursery() as nursery:
        values = vectors(5, 5000)

        async def run(index: int, fault: str) -> None:
            install(fault, peers.callers[index])
            with trio.move_on_after(0.3 if fault == "cancel" else 1000.0):
                if fault != "fail before":
                    await peers.all_reduces[index].run(peers.group, values[index], size=5000)

        for index, fault in enumerate(faults):
            nursery.start_soon(run, index, fault)
        results = await peers.run(values, delays_s={0: None, 1: None})
        # Two senders may fail one after the other, and then a reducer that had answered until then.
        assert trio.current_time() <= 4 * T + 1.0
        nursery.cancel_scope.cancel()
    wanted = [mean([*values[2:], *some]) for count in range(3) for some in itertools.combinations(values[:2], count)]
    for result in results:
        is_good = np.any([np.isclose(result.average, each, rtol=1e-4, atol=1e-6) for each in wanted], axis=0)
        assert is_good.mean() > 0.5
        assert result.received > 0.5
        assert not result.complete
        assert set(result.lost_reducers + result.lost_senders) <= {peer("host0"), peer("host1")}
