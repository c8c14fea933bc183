"""An all-reduce on a grid: who reduces what, the same bits for everybody, and members that go in either round."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from net.averaging.grouping.group import Group, Member, Role
from net.averaging.reduction.all_reduce import AllReduceResult
from net.averaging.reduction.grid import ReductionGrid, grid_of
from net.averaging.reduction.partition import AllReduceConfig, ChunkName
from net.averaging.reduction.reducer import Array
from net.averaging.reduction.two_rounds import as_it_came
from net.averaging.speeds import Speeds
from net.errors import CallRefused
from net.identity import Address
from net.wire.compression import Compressed, Compression, compressed_in_place
from net.wire.tensors import as_received
from tests.net.all_reduce_swarm import CONFIG, GROUP, METHOD, Swarm, T, mean, swarm, vectors
from tests.net.sim_hosts import in_simulation, peer

WIDE = AllReduceConfig()


def group_of(count: int, facts: dict[int, dict[str, Any]] | None = None) -> Group:
    """Members host0 to host(count - 1); `facts` are fields that differ."""
    members = []
    for number in range(count):
        each = {"role": Role.NODE, "wanted_slot": number, **(facts or {}).get(number, {})}
        address = None if each["role"] is Role.CLIENT else Address(f"host{number}", 1)
        members.append(Member(peer_id=peer(f"host{number}"), address=address, **each))
    return Group(group_id=GROUP, members=tuple(members), side=count)


def grid(group: Group, size: int, group_size: int, config: AllReduceConfig = CONFIG) -> ReductionGrid:
    found = grid_of(group, size, group_size=group_size, config=config)
    assert found is not None
    return found


async def run(
    peers: Swarm, values: Sequence[Array | None], group_size: int, *, weights: Sequence[float] | None = None
) -> dict[int, AllReduceResult]:
    """All members at once; by member, of those that end."""
    results: dict[int, AllReduceResult] = {}
    size = next(value.size for value in values if value is not None)

    async def one(number: int) -> None:
        weight = None if weights is None else weights[number]
        results[number] = await peers.all_reduces[number].run(
            peers.group, values[number], size=size, weight=weight, group_size=group_size
        )

    async with trio.open_nursery() as nursery:
        for number in range(len(values)):
            nursery.start_soon(one, number)
    return results


def assert_same(results: Sequence[AllReduceResult], expected: Array) -> None:
    """Whole, the same to the last bit, and the mean to rounding."""
    assert all(result.complete for result in results)
    assert len({result.average.tobytes() for result in results}) == 1
    assert len({result.weight for result in results}) == 1
    np.testing.assert_allclose(results[0].average, expected, rtol=1e-5, atol=1e-6)


MEMBERS = st.lists(
    st.tuples(st.sampled_from(Role), st.none() | st.floats(1e3, 1e9), st.none() | st.floats(1e3, 1e9)),
    min_size=2,
    max_size=40,
)


@given(MEMBERS, st.integers(2, 9), st.integers(1, 5000), st.integers(4, 4000))
def test_every_number_is_reduced_by_one_member_of_each_row_and_by_one_of_all(
    members: list[tuple[Role, float | None, float | None]], group_size: int, size: int, chunk_bytes: int
) -> None:
    """Whatever the roles and the lines are."""
    facts = {n: {"role": role, "speeds": Speeds(up=up, down=down)} for n, (role, up, down) in enumerate(members)}
    facts[0]["role"] = Role.NODE
    group = group_of(len(members), facts)
    config = replace(CONFIG, chunk_bytes=chunk_bytes)
    found = grid_of(group, size, group_size=group_size, config=config)
    nodes = [n for n, each in enumerate(group.members) if each.role is Role.NODE]
    num_rows = min(math.ceil(len(members) / group_size), len(nodes))
    if found is None:
        assert num_rows < 2
        return
    assert sorted(place for row in found.rows for place in row) == list(range(len(members)))
    lengths = [len(row) for row in found.rows]
    assert len(lengths) == num_rows
    assert max(lengths) - min(lengths) <= 1
    assert max(lengths) <= group_size or len(nodes) * group_size < len(members)
    assert all(set(row) & set(nodes) for row in found.rows)
    assert found.lanes[0].part.start == 0
    assert found.lanes[-1].part.end == size
    assert all(one.part.end == other.part.start for one, other in pairwise(found.lanes))
    ids = set()
    for number, lane in enumerate(found.lanes):
        assert [found.row_of(owner) for owner in lane.owners] == list(range(num_rows))
        assert all(group.members[owner].address is not None for owner in lane.owners)
        ids |= {found.within(number, row).group_id for row in range(num_rows)} | {found.across(number).group_id}
        in_ranges = [
            (each.chunk(chunk), row) for row, each in enumerate(lane.ranges) for chunk in range(each.num_chunks)
        ]
        whole = [(lane.part.chunk(chunk), lane.row_of_chunk(chunk)) for chunk in range(lane.part.num_chunks)]
        assert sorted(in_ranges, key=lambda each: each[0].start) == whole
        assert max(lane.part.chunk_size * 4, 4) <= max(config.chunk_bytes, 4)
    assert len(ids) == len(found.lanes) * (num_rows + 1)


def test_a_full_grid_has_a_lane_for_each_column() -> None:
    """16 members: four lanes of a quarter each, whose owners are a column; each member has 3 + 3 partners, not 15."""
    found = grid(group_of(16), 1600, 4)
    assert len(found.lanes) == 4
    assert {lane.part.end - lane.part.start for lane in found.lanes} == {400}
    assert sorted(owner for lane in found.lanes for owner in lane.owners) == list(range(16))
    assert {len(found.partners(place)) for place in range(16)} == {6}


def test_rows_of_unequal_length_share_lanes() -> None:
    """Three rows of seven members: 3, 2 and 2. Thirds and halves cut the vector at 2, 3 and 4 sixths."""
    found = grid(group_of(7), 600, 3)
    assert [len(row) for row in found.rows] == [3, 2, 2]
    assert [lane.part.end for lane in found.lanes] == [200, 300, 400, 600]
    owners = [[row.index(owner) for row, owner in zip(found.rows, lane.owners, strict=True)] for lane in found.lanes]
    assert owners == [[0, 0, 0], [1, 0, 0], [1, 1, 1], [2, 1, 1]]


def test_small_groups_and_sizes_that_cannot_be() -> None:
    assert grid_of(group_of(4), 100, group_size=4, config=CONFIG) is None
    clients = {n: {"role": Role.CLIENT} for n in range(1, 6)}
    assert grid_of(group_of(6, clients), 100, group_size=3, config=CONFIG) is None  # one member can be called
    with pytest.raises(ValueError, match="at least 2 members, got group_size 1"):
        grid_of(group_of(4), 100, group_size=1, config=CONFIG)


@pytest.mark.parametrize("count", [3, 4, 5, 7, 9, 16])
@pytest.mark.parametrize("size", [1, 3, 199, 1234])
def test_all_have_the_same_bits(count: int, size: int) -> None:
    """Full grids, uneven ones, more members than numbers."""

    @in_simulation
    async def test() -> None:
        async with swarm(count) as peers:
            values = vectors(count, size)
            group_size = 2 if count < 9 else math.isqrt(count)
            results = await run(peers, values, group_size)
            assert_same(list(results.values()), mean(values))
            assert all(not result.average.flags.writeable for result in results.values())
            assert all(np.array_equal(mine, same) for mine, same in zip(values, vectors(count, size), strict=True))
            assert all(peers.all_reduces[n].knows(GROUP) and not peers.all_reduces[n]._running for n in range(count))

    test()


@in_simulation
async def test_weights_that_are_told_with_the_chunks() -> None:
    """A member without weight, and a row that has none at all: rows of seven members are dealt 0 3 6, 1 4 and 2 5."""
    weights = [1.0, 0.0, 0.5, 4.0, 0.0, 100.0, 7.0]
    async with swarm(7) as peers:
        assert grid(peers.group, 1234, 3).rows == ((0, 3, 6), (1, 4), (2, 5))
        values = vectors(7)
        results = await run(peers, values, 3, weights=weights)
        assert_same(list(results.values()), mean(values, weights))
        assert results[0].weight == 112.5


@in_simulation
async def test_clients_auxiliaries_and_unequal_lines() -> None:
    """Clients get everything and are never called; auxiliary members count for nothing, and have their lanes."""
    facts: dict[int, dict[str, Any]] = {
        **{n: {"role": Role.CLIENT} for n in (1, 8)},
        **{n: {"role": Role.AUXILIARY, "weight": 50.0} for n in (2, 5)},
        **{n: {"speeds": Speeds(up=1e6 * (n + 1), down=2e6)} for n in (0, 3, 4, 6, 7, 9, 10)},
    }
    async with swarm(12, facts=facts) as peers:
        values: list[Array | None] = [None if n in (2, 5) else each for n, each in enumerate(vectors(12))]
        results = await run(peers, values, 4)
        expected = mean([value for value in values if value is not None])
        auxiliaries = [results.pop(2), results.pop(5)]
        assert_same(list(results.values()), expected)
        for number, result in zip((2, 5), auxiliaries, strict=True):
            found = grid(peers.group, 1234, 4)
            own = np.zeros(1234, bool)
            for lane in found.lanes:
                own[lane.part.start : lane.part.end] |= number in lane.owners
            assert own.any()
            assert result.complete
            assert result.weight == results[0].weight
            assert result.received == own.mean()
            assert np.array_equal(result.average[own], results[0].average[own])
            assert not result.average[~own].any()


@pytest.mark.parametrize(
    ("compression", "tolerance"),
    [(Compression.FLOAT16, 2**-11), (Compression.BFLOAT16, 2**-8), (Compression.BLOCKWISE_8BIT, 1 / 254)],
)
@pytest.mark.parametrize("mixed", [False, True])
def test_compressed_the_same_bits_too(compression: Compression, tolerance: float, mixed: bool) -> None:
    """Values lose on their way to the row's owner, the row's mean on its way across, and the mean once. Members may
    compress or not, each as it likes."""

    @in_simulation
    async def test() -> None:
        config = replace(CONFIG, compression=compression, chunk_bytes=32_768, window_bytes=2**20)
        configs = [config if not mixed or n % 2 else replace(config, compression=Compression.NONE) for n in range(9)]
        async with swarm(9, config=configs) as peers:
            values = vectors(9, 20_000)
            results = list((await run(peers, values, 3)).values())
            assert all(result.complete for result in results)
            assert len({result.average.tobytes() for result in results}) == 1
            largest = max(np.abs(vector).max() for vector in values)
            assert np.abs(results[0].average - mean(values)).max() <= 3 * largest * tolerance

    test()


@pytest.mark.parametrize("compression", [Compression.FLOAT16, Compression.BFLOAT16, Compression.BLOCKWISE_8BIT])
def test_what_came_compressed_is_passed_on_so_and_else_as_it_is(compression: Compression) -> None:
    exact = np.random.default_rng(0).standard_normal(9000).astype(np.float32)
    assert as_it_came(exact, compression) is exact
    assert as_it_came(exact, Compression.NONE) is exact
    came = exact.copy()
    compressed_in_place(came, compression)
    passed_on = as_it_came(came, compression)
    assert isinstance(passed_on, Compressed)
    assert np.array_equal(as_received(passed_on), came)


@pytest.mark.parametrize("count", [9, 8])
def test_bytes_are_those_of_one_group(count: int) -> None:
    """2 (1 - 1 / 9) vectors sent by each of nine, not 2 * 2 (1 - 1 / 3); and a third of a vector a lane."""

    @in_simulation
    async def test() -> None:
        sent: dict[int, int] = {}
        async with swarm(count, config=replace(WIDE, chunk_bytes=40_000)) as peers:
            for number, caller in enumerate(peers.callers):
                original = caller.call

                async def call(*args: Any, original: Any = original, number: int = number, **settings: Any) -> Any:
                    reply = await original(*args, **settings)
                    sent[number] = sent.get(number, 0) + args[3][0].nbytes
                    return reply

                caller.call = call  # type: ignore[method-assign]
            values = vectors(count, 180_000)
            results = await run(peers, values, 3)
            assert_same(list(results.values()), mean(values))
        # Of calls alone: as much comes back in the answers.
        total = sum(sent.values()) / values[0].nbytes
        num_rows = 3
        assert total == pytest.approx((count - num_rows) + (num_rows - 1), rel=1e-3)

    test()


@pytest.mark.parametrize("absent", range(9))
def test_who_does_not_come_is_missed_by_all_and_nobody_hangs(absent: int) -> None:
    """Its row waits for it as long as any reducer does, T; those across wait for its row, and its lanes, 2 T."""

    @in_simulation
    async def test() -> None:
        async with swarm(9) as peers:
            values = vectors(9)
            there = [number for number in range(9) if number != absent]
            results: dict[int, AllReduceResult] = {}

            async def one(number: int) -> None:
                results[number] = await peers.all_reduces[number].run(
                    peers.group, values[number], size=1234, group_size=3
                )

            async with trio.open_nursery() as nursery:
                for number in there:
                    nursery.start_soon(one, number)
            assert T < trio.current_time() < 3 * T
            assert not any(result.complete for result in results.values())
            found = grid(peers.group, 1234, 3)
            row = found.row_of(absent)
            (own,) = [lane.part for lane in found.lanes if absent in lane.owners]
            where = slice(own.start, own.end)
            for number, result in results.items():
                if found.row_of(number) == row:  # nobody has taken its lane across for them
                    assert result.lost_reducers == (peer(f"host{absent}"),)
                    assert np.array_equal(result.average[where], values[number][where])

    test()


@pytest.mark.parametrize("round_number", [1, 2])
def test_who_is_lost_in_either_round_is_not_waited_for(round_number: int) -> None:
    """Member 4 is there and says nothing more, in its row or across; the others hear that it is gone."""

    @in_simulation
    async def test() -> None:
        async with swarm(9) as peers:
            found = grid(peers.group, 1234, 3)
            across = {found.across(number).group_id for number in range(len(found.lanes))}
            original = peers.callers[4].call

            async def call(*args: Any, **settings: Any) -> Any:
                if round_number == 1 or args[2]["group"] in across:
                    await trio.sleep_forever()
                return await original(*args, **settings)

            async def never() -> None:
                await trio.sleep_forever()

            peers.callers[4].call = call  # type: ignore[method-assign]
            if round_number == 1:
                peers.callers[4].before_serving = never
            values, results = vectors(9), dict[int, AllReduceResult]()

            async def one(number: int) -> None:
                results[number] = await peers.all_reduces[number].run(
                    peers.group, values[number], size=1234, group_size=3, timeout_s=5.0
                )

            async with trio.open_nursery() as nursery:
                for number in range(9):
                    nursery.start_soon(one, number)
                await trio.sleep(1.0)
                for number in set(range(9)) - {4}:
                    peers.all_reduces[number].lose(GROUP, peer("host4"))
                await trio.sleep(0.5)
                assert sorted(results) == [0, 1, 2, 3, 5, 6, 7, 8]
                assert not any(result.complete for result in results.values())

    test()


@pytest.mark.parametrize(
    ("caller", "across", "changes", "reason"),
    [
        (1, True, {"vectors": 4}, "mean of 3 vectors at most, not of 4"),
        (1, True, {"vectors": 3, "weight": 3.1e12}, "weight must be a float from 0 to 3"),
        (1, True, {"vectors": -1}, "vectors must be"),
        (3, False, {"vectors": 2}, "mean of 1 vectors at most, not of 2"),
        (2, False, {}, "not in this group"),
        (4, True, {}, "not in this group"),
    ],
)
def test_bad_calls_are_refused(caller: int, across: bool, changes: dict[str, Any], reason: str) -> None:
    """Rows are 0 3 6, 1 4 7 and 2 5 8; members 0, 1 and 2 own the first lane. The others go on as if nothing was."""

    @in_simulation
    async def test() -> None:
        async with swarm(9) as peers:
            found = grid(peers.group, 1234, 3)
            lane = found.lanes[0]
            assert lane.owners == (0, 1, 2)
            group_id, start = found.within(0, 0).group_id, lane.part.start
            if across:
                group_id, start = found.across(0).group_id, lane.ranges[0].start

            async def bad_call() -> None:
                body = {**ChunkName(group_id=group_id, size=1234, start=start).body(), **changes}
                part = lane.ranges[0] if across else lane.part
                tensor = np.zeros(part.chunk(0).stop - part.chunk(0).start, np.float32)
                target = peers.group.members[0].contact
                with pytest.raises(CallRefused, match=reason):
                    await peers.callers[caller].call(target, METHOD, body, [tensor], timeout_s=60.0)

            values = vectors(9)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bad_call)
                results = await run(peers, values, 3)
            assert_same(list(results.values()), mean(values))

    test()
