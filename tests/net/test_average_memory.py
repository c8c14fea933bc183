"""The memory of an average, which is used again once nobody has it any more."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dmoe_net.averaging.grouping.group import Role
from dmoe_net.averaging.reduction.all_reduce import AllReduceResult
from dmoe_net.averaging.reduction.partition import AllReduceConfig
from dmoe_net.types import Array
from dmoe_net.wire.frames import EncodedFrame
from dmoe_net.wire.messages import CallReply, encode_message
from tests.net.all_reduce_swarm import Swarm, assert_complete, mean, swarm, vectors
from tests.net.sim_hosts import in_simulation

SIZE = 20_000
"""Numbers."""

CONFIG = AllReduceConfig(chunk_bytes=16_000, window_bytes=64_000)


async def averaged(peers: Swarm, number: int, values: list[Array | None]) -> list[AllReduceResult]:
    """The outcome of a further all-reduce of the same members."""
    peers.group = replace(peers.group, group_id=number.to_bytes(16))
    return await peers.run(values)


def where(results: list[AllReduceResult]) -> list[int]:
    return [result.average.ctypes.data for result in results]


@in_simulation
async def test_memory_that_nobody_has_is_used_again() -> None:
    """The same addresses, and another average in them."""
    async with swarm(3, config=CONFIG) as peers:
        values = vectors(3, SIZE)
        results = await averaged(peers, 1, [*values])
        before = where(results)
        del results
        gc.collect()
        keeper = np.empty(SIZE, np.float32)  # takes the place of one that was freed
        others = [-2 * each for each in values]
        results = await averaged(peers, 2, [*others])
        assert_complete(results, mean(others))
        assert where(results) == before
        assert not any(result.average.flags.writeable for result in results)
        del keeper


def a_leaving_answer(result: AllReduceResult) -> EncodedFrame:
    return encode_message(CallReply(call_id=1, body={}, tensors=(result.average[:1000],)))


@pytest.mark.parametrize(
    "hold",
    [
        lambda result: (result, lambda kept: kept.average.tobytes()),
        lambda result: (result.average, bytes),
        lambda result: (result.average[1000:2000], bytes),
        lambda result: (result.average.data, bytes),
        lambda result: (a_leaving_answer(result), lambda kept: b"".join(kept.body)),
    ],
    ids=["the result", "the array", "a view", "its bytes", "an answer that is leaving"],
)
def test_memory_that_somebody_has_is_left_alone(hold: Callable[[AllReduceResult], tuple[Any, Any]]) -> None:
    """A caller, or the queue of a connection whose other end does not read: what it holds stays as it is."""

    async def body() -> None:
        async with swarm(2, config=CONFIG) as peers:
            values = vectors(2, SIZE)
            results = await averaged(peers, 1, [*values])
            kept, bytes_of = hold(results[0])
            expected = bytes_of(kept)
            assert len(expected) >= 4000
            del results
            for number in (2, 3):
                await averaged(peers, number, [-each for each in values])
            assert bytes_of(kept) == expected

    in_simulation(body)()


@in_simulation
async def test_an_auxiliary_has_zeros_where_it_gets_nothing_also_in_memory_that_was_used() -> None:
    async with swarm(4, config=CONFIG) as peers:
        values = vectors(4, SIZE)
        await averaged(peers, 1, [*values])
        gc.collect()
        members = list(peers.group.members)
        members[2] = replace(members[2], role=Role.AUXILIARY)
        peers.group = replace(peers.group, members=tuple(members))
        results = await averaged(peers, 2, [values[0], values[1], None, values[3]])
        start, end = peers.part(2, SIZE)
        average = results[2].average
        assert end > start
        np.testing.assert_allclose(
            average[start:end], mean([values[0], values[1], values[3]])[start:end], rtol=1e-5, atol=1e-6
        )
        assert not average[:start].any()
        assert not average[end:].any()


@in_simulation
async def test_a_vector_of_another_length_gets_memory_of_its_own() -> None:
    async with swarm(2, config=CONFIG) as peers:
        await averaged(peers, 1, [*vectors(2, SIZE)])
        values = vectors(2, SIZE + 1)
        assert_complete(await averaged(peers, 2, [*values]), mean(values))


@in_simulation
async def test_a_closed_all_reduce_keeps_no_memory() -> None:
    async with swarm(2, config=CONFIG) as peers:
        results = await averaged(peers, 1, [*vectors(2, SIZE)])
        averages = [weakref.ref(result.average) for result in results]
        del results
        gc.collect()
        assert all(average() is not None for average in averages)
        for each in peers.all_reduces:
            each.close()
        assert all(average() is None for average in averages)
