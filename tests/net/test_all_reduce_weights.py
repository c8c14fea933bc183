"""Weights that travel with the chunks, and averages that are the same in all members though they travel compressed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import trio

from dmoe_net.averaging.grouping.group import Role
from dmoe_net.averaging.reduction.all_reduce import AllReduceResult
from dmoe_net.averaging.reduction.partition import MAX_WEIGHT, AllReduceConfig, Part
from dmoe_net.averaging.reduction.reducer import PartReduction
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.rpc.base import Reply
from dmoe_net.types import Array
from dmoe_net.wire.compression import Compressed, Compression, compressed_in_place, encode
from dmoe_net.wire.tensors import plain
from tests.net.all_reduce_swarm import CONFIG, Swarm, assert_complete, mean, swarm, vectors
from tests.net.sim_hosts import in_simulation

WEIGHTS = [1.0, 2.5, 0.1, 4.0, 100.0]
LOSSY = [Compression.FLOAT16, Compression.BFLOAT16, Compression.BLOCKWISE_8BIT]


async def weighted(
    peers: Swarm, values: list[Array | None], weights: list[float | None], size: int = 1234
) -> list[AllReduceResult]:
    """All of them at once, with the weights that they turn out to have."""
    results: dict[int, AllReduceResult] = {}

    async def one(index: int) -> None:
        results[index] = await peers.all_reduces[index].run(
            peers.group, values[index], size=size, weight=weights[index]
        )

    async with trio.open_nursery() as nursery:
        for index in range(len(values)):
            nursery.start_soon(one, index)
    return [results[index] for index in sorted(results)]


@in_simulation
async def test_weights_told_with_the_chunks_stand_in_place_of_those_announced() -> None:
    """Those of one member who tells none are as announced; all know the sum, to the last bit."""
    announced = {index: {"weight": 7.0} for index in range(5)}
    async with swarm(5, facts=announced) as peers:
        values = vectors(5)
        results = await weighted(peers, [*values], [*WEIGHTS[:4], None])
        assert_complete(results, mean(values, [*WEIGHTS[:4], 7.0]))
        assert {result.weight for result in results} == {14.6}  # 1 + 2.5 + 0.1 + 4 + 7, rounded once


@in_simulation
async def test_announced_weights_are_summed_as_well() -> None:
    async with swarm(3, facts={index: {"weight": weight} for index, weight in enumerate(WEIGHTS)}) as peers:
        assert {result.weight for result in await peers.run(vectors(3))} == {3.6}


@pytest.mark.parametrize("auxiliary", range(4))
def test_clients_and_auxiliaries_know_the_sum(auxiliary: int) -> None:
    """Wherever their part lies."""
    roles = [Role.CLIENT, Role.NODE, Role.NODE, Role.NODE]
    roles.insert(auxiliary, Role.AUXILIARY)

    @in_simulation
    async def test() -> None:
        async with swarm(5, facts={index: {"role": role} for index, role in enumerate(roles)}) as peers:
            values: list[Array | None] = [*vectors(5)]
            values[auxiliary] = None
            results = await weighted(peers, values, [*WEIGHTS])
            expected = sum(weight for index, weight in enumerate(WEIGHTS) if index != auxiliary)
            assert [result.weight for result in results] == pytest.approx([expected] * 5, rel=1e-15)
            assert len({result.weight for result in results}) == 1

    test()


@in_simulation
async def test_an_auxiliary_with_an_empty_part_is_told_nothing() -> None:
    """Two nodes reduce the whole of their two vectors; the auxiliary, whose part is empty, learns no sum of weights."""
    async with swarm(3, facts={2: {"role": Role.AUXILIARY}}) as peers:
        results = await weighted(peers, [*vectors(2), None], [1.0, 2.0, 3.0])
        assert [result.weight for result in results] == [3.0, 3.0, None]
        assert all(result.complete for result in results)


@in_simulation
async def test_a_vector_without_weight_adds_nothing_and_counts_as_a_sender() -> None:
    async with swarm(3) as peers:
        values = vectors(3)
        results = await weighted(peers, [*values], [1.0, 0.0, 3.0])
        assert_complete(results, mean([values[0], values[2]], [1.0, 3.0]))
        assert results[1].weight == 4.0


@pytest.mark.parametrize("compression", [Compression.NONE, Compression.FLOAT16])
def test_without_any_weight_the_mean_is_zero(compression: Compression) -> None:
    @in_simulation
    async def test() -> None:
        async with swarm(3, config=replace(CONFIG, compression=compression, is_identical=True)) as peers:
            for result in await weighted(peers, [*vectors(3)], [0.0] * 3):
                assert result.complete
                assert result.weight == 0.0
                assert not result.average.any()

    test()


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), 2 * MAX_WEIGHT])
def test_weights_that_cannot_be(weight: float) -> None:
    """One's own is refused before anybody waits for it."""

    @in_simulation
    async def test() -> None:
        async with swarm(2) as peers:
            with pytest.raises(ValueError, match=r"weight of a vector is from 0 to 1e\+12"):
                await peers.all_reduces[0].run(peers.group, vectors(1)[0], size=1234, weight=weight)
            assert_complete(await peers.run(vectors(2)), mean(vectors(2)))

    test()


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
async def test_who_tells_each_reducer_another_weight_spoils_the_average_for_all_alike() -> None:
    """The sums differ from part to part: nobody takes it for complete."""
    async with swarm(4) as peers:
        told = iter(range(1, 10**6))
        original = peers.callers[0].call
        weights: dict[Any, float] = {}

        async def call(target: Any, method: str, body: Any, *args: Any, **settings: Any) -> Reply:
            weight = weights.setdefault(target, float(next(told)))
            return await original(target, method, {**body, "weight": weight}, *args, **settings)

        peers.callers[0].call = call  # type: ignore[method-assign]
        results = await weighted(peers, [*vectors(4)], [1.0] * 4)
        assert len(set(weights.values())) == 3
        assert not any(result.complete for result in results)
        assert all(result.weight is None and result.received == 1.0 for result in results)


@in_simulation
async def test_who_is_lost_is_missing_in_the_sums() -> None:
    """Killed when some chunks are averaged with it: complete for none, and no sum."""
    async with swarm(4) as peers:
        async with trio.open_nursery() as nursery:
            results: list[AllReduceResult] = []

            async def short() -> None:
                with trio.move_on_after(0.3):
                    await peers.all_reduces[0].run(peers.group, vectors(1, 8000)[0], size=8000, weight=2.0)

            nursery.start_soon(short)
            results = await peers.run(vectors(4, 8000), delays_s={0: None})
        assert not any(result.complete for result in results)
        assert {result.weight for result in results} == {None}


@pytest.mark.parametrize("compression", LOSSY)
def test_identical_averages_travel_compressed(compression: Compression) -> None:
    """Every member has the same bits, clients and the reducers of each part included; an auxiliary has them of its
    part. Within twice what a number loses on its way."""
    tolerance = {Compression.FLOAT16: 2**-11, Compression.BFLOAT16: 2**-8}.get(compression, 1 / 254)
    facts: dict[int, dict[str, Any]] = {0: {"role": Role.CLIENT}, 2: {"role": Role.AUXILIARY}}

    @in_simulation
    async def test() -> None:
        config = AllReduceConfig(chunk_bytes=32_768, window_bytes=2**20, compression=compression, is_identical=True)
        async with swarm(5, config=config, facts=facts) as peers:
            values: list[Array | None] = [*vectors(5, 20_000)]
            values[2] = None
            results = await weighted(peers, values, [*WEIGHTS], size=20_000)
            assert all(result.complete and result.weight == 107.5 for result in results)
            there = [vector for vector in values if vector is not None]
            largest = max(np.abs(vector).max() for vector in there)
            expected = mean(there, [1.0, 2.5, 4.0, 100.0])
            assert 0 < np.abs(results[0].average - expected).max() <= 2.01 * largest * tolerance
            start, end = peers.part(2, 20_000)
            assert np.array_equal(results.pop(2).average[start:end], results[0].average[start:end])
            assert len({result.average.tobytes() for result in results}) == 1

    test()


@in_simulation
async def test_members_may_compress_each_in_its_own_way_and_have_the_same() -> None:
    kinds = [Compression.NONE, *LOSSY]
    async with swarm(4, config=[replace(CONFIG, compression=kind, is_identical=True) for kind in kinds]) as peers:
        results = await weighted(peers, [*vectors(4)], [1.0] * 4)
        assert all(result.complete for result in results)
        assert len({result.average.tobytes() for result in results}) == 1
        np.testing.assert_allclose(results[0].average, mean(vectors(4)), atol=0.05)


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
