"""Windows of the all-reduce, which grow on long lines within what reducers grant and the memory budget allows; figures
that they follow from; and the memory of an average, which is used again once nobody has it any more."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio

from dmoe_net.averaging.grouping.group import Role
from dmoe_net.averaging.reduction.all_reduce import AllReduceResult
from dmoe_net.averaging.reduction.partition import MAX_ROOM, MAX_WINDOW, AllReduceConfig, ChunkName
from dmoe_net.averaging.window import BulkWindow
from dmoe_net.identity import PeerId
from dmoe_net.rpc.bulk import GAIN, MIN_BUDGET_BYTES, BulkTraffic, MemoryBudget, Path, bytes_of
from dmoe_net.transport.sim.links import HostOptions
from dmoe_net.wire.frames import EncodedFrame
from dmoe_net.wire.messages import CallReply, encode_message
from tests.net.all_reduce_swarm import METHOD, Swarm, assert_complete, assert_has_its_part, mean, swarm, vectors
from tests.net.sim_hosts import in_simulation

CONFIG = AllReduceConfig(chunk_bytes=256 * 1024, window_bytes=1024 * 1024)
LINE = HostOptions(up_bps=1e9, down_bps=1e9)
SIZE = 4 * 2**20  # 16 MiB, whose line time is 0.20 s; the round trip is 0.1 s


async def timed(peers: Swarm, number: int) -> float:
    """Average once more, and return the seconds that it takes."""
    values, began = vectors(len(peers.callers), SIZE), trio.current_time()
    assert_complete(await peers.again(number, values), mean(values))
    return trio.current_time() - began


@in_simulation
async def test_windows_grow_on_long_lines_and_memory_comes_back() -> None:
    """One chunk of 256 KiB to each of three takes 16 round trips, 1.6 s; the third time all take less than 0.6 s."""
    async with swarm(4, config=CONFIG, hosts=LINE) as peers:
        times = [await timed(peers, number) for number in range(3)]
        assert times[2] < 0.6
        assert times[2] < times[0]
        for caller in peers.callers:
            assert caller.bulk.budget.used_bytes == 0
            assert 0 < caller.bulk.budget.peak_bytes < caller.bulk.budget.max_bytes


@in_simulation
async def test_a_small_budget_costs_time_and_nothing_else() -> None:
    """With 1 MiB for everything never more is used, and everything ends well."""
    async with swarm(4, config=CONFIG, hosts=LINE) as peers:
        for caller in peers.callers:
            caller.bulk.budget.max_bytes = MIN_BUDGET_BYTES
        for number in range(2):
            await timed(peers, number)
        assert all(0 < caller.bulk.budget.peak_bytes <= MIN_BUDGET_BYTES for caller in peers.callers)


@in_simulation
async def test_a_reducer_that_grants_nothing_gets_no_more_than_it_always_had() -> None:
    """Each sender brings at most `MAX_WINDOW` chunks."""
    async with swarm(3, config=CONFIG, hosts=LINE) as peers:
        for caller in peers.callers:
            caller.answered = lambda reply: replace(reply, body={**reply.body, "room": 0})
        for number in range(2):
            await timed(peers, number)
        assert max(caller.most_served for caller in peers.callers) <= 2 * MAX_WINDOW


async def bring(peers: Swarm, chunk: int, *wishes: int) -> list[int]:
    """Bring the last member, an auxiliary, a chunk of each of the others; return the room that each is told."""
    start, rooms = peers.part(3, 10**6)[0] + 1024 * chunk, [0] * 3

    async def bring_one(place: int) -> None:
        body = ChunkName(peers.group.group_id, 10**6, start, wishes[place]).body()
        target, piece = peers.group.members[3].contact, np.zeros(1024, np.float32)
        reply = await peers.callers[place].call(target, METHOD, body, [piece], timeout_s=9.0)
        rooms[place] = reply.body["room"]

    async with trio.open_nursery() as nursery:
        for place in range(3):
            nursery.start_soon(bring_one, place)
    return rooms


@in_simulation
async def test_what_a_greedy_sender_is_granted_is_bounded() -> None:
    """It gets the most that is ever granted, its share of half of the budget, or the rest of that, until the end."""
    config, facts = AllReduceConfig(chunk_bytes=4096), {3: {"role": Role.AUXILIARY}}
    async with swarm(4, config=config, facts=facts) as peers:
        budget, values = peers.callers[3].bulk.budget, [*np.zeros((3, 10**6), np.float32), None]
        reduce = partial(peers.run, values, delays_s=dict.fromkeys(range(3)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reduce)
            assert await bring(peers, 0, 10**9, 0, 0) == [MAX_ROOM, MAX_WINDOW, MAX_WINDOW]
            nursery.cancel_scope.cancel()
        assert budget.used_bytes == 0
        peers.group, budget.max_bytes = replace(peers.group, group_id=bytes(16)), 2 * 2**20
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reduce)
            assert await bring(peers, 0, 0, 0, 0) == [MAX_WINDOW] * 3
            # Half of 2 MiB for three senders is 85 chunks of 4 KiB for each.
            assert await bring(peers, 1, 10**9, 0, 0) == [MAX_WINDOW + 85, MAX_WINDOW, MAX_WINDOW]
            assert await bring(peers, 2, 1, 0, 0) == [MAX_WINDOW + 85, MAX_WINDOW, MAX_WINDOW]  # never fewer
            assert budget.used_bytes == 85 * 4096
            assert budget.reserve(budget.max_bytes - budget.used_bytes)
            assert await bring(peers, 3, 0, 10**9, 0) == [MAX_WINDOW + 85, MAX_WINDOW, MAX_WINDOW]
            nursery.cancel_scope.cancel()
        assert budget.used_bytes == budget.max_bytes - 85 * 4096


COUNT = 20_000
SMALL = AllReduceConfig(chunk_bytes=16_000, window_bytes=64_000)


def places(results: list[AllReduceResult]) -> list[int]:
    return [result.average.ctypes.data for result in results]


@pytest.mark.slow
@in_simulation
async def test_memory_that_nobody_has_is_used_again() -> None:
    async with swarm(3, config=SMALL) as peers:
        values = vectors(3, COUNT)
        results = await peers.again(1, values)
        before = places(results)
        del results
        gc.collect()
        keeper = np.empty(COUNT, np.float32)  # takes the place of one that was freed
        others = [-2 * each for each in values]
        results = await peers.again(2, others)
        assert_complete(results, mean(others))
        assert places(results) == before
        assert not any(result.average.flags.writeable for result in results)
        del keeper


def a_leaving_answer(result: AllReduceResult) -> EncodedFrame:
    return encode_message(CallReply(call_id=1, body={}, tensors=(result.average[:1000],)))


HOLDS: dict[str, Callable[[AllReduceResult], tuple[Any, Any]]] = {
    "the result": lambda result: (result, lambda kept: kept.average.tobytes()),
    "the array": lambda result: (result.average, bytes),
    "a view": lambda result: (result.average[1000:2000], bytes),
    "its bytes": lambda result: (result.average.data, bytes),
    "an answer that is leaving": lambda result: (a_leaving_answer(result), lambda kept: b"".join(kept.body)),
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
@in_simulation
async def test_memory_that_somebody_has_is_left_alone(hold: Callable[[AllReduceResult], tuple[Any, Any]]) -> None:
    """A caller, or the queue of a connection whose other end does not read, keeps what it holds."""
    async with swarm(2, config=SMALL) as peers:
        values = vectors(2, COUNT)
        results = await peers.again(1, values)
        kept, bytes_of = hold(results[0])
        expected = bytes_of(kept)
        assert len(expected) >= 4000
        del results
        for number in (2, 3):
            await peers.again(number, [-each for each in values])
        assert bytes_of(kept) == expected


@pytest.mark.slow
@in_simulation
async def test_an_auxiliary_has_zeros_where_it_gets_nothing_also_in_memory_that_was_used() -> None:
    async with swarm(4, config=SMALL) as peers:
        first, second, _, fourth = values = vectors(4, COUNT)
        await peers.again(1, values)
        gc.collect()
        members = list(peers.group.members)
        members[2] = replace(members[2], role=Role.AUXILIARY)
        peers.group = replace(peers.group, members=tuple(members))
        results = await peers.again(2, [first, second, None, fourth])
        assert_has_its_part(results[2].average, peers.part(2, COUNT), mean([first, second, fourth]))


@in_simulation
async def test_a_vector_of_another_length_gets_memory_of_its_own() -> None:
    async with swarm(2, config=SMALL) as peers:
        await peers.again(1, vectors(2, COUNT))
        values = vectors(2, COUNT + 1)
        assert_complete(await peers.again(2, values), mean(values))


@pytest.mark.slow
@in_simulation
async def test_a_closed_all_reduce_keeps_no_memory() -> None:
    async with swarm(2, config=SMALL) as peers:
        averages = [weakref.ref(result.average) for result in await peers.again(1, vectors(2, COUNT))]
        gc.collect()
        assert all(average() is not None for average in averages)
        for each in peers.all_reduces:
            each.close()
        assert all(average() is None for average in averages)


MIB = 2**20


def test_a_budget_is_taken_and_given_back() -> None:
    budget = MemoryBudget(3 * MIB)
    assert budget.reserve(2 * MIB)
    assert not budget.reserve(2 * MIB)
    assert budget.reserve(MIB)
    budget.release(3 * MIB)
    assert (budget.used_bytes, budget.peak_bytes) == (0, 3 * MIB)


@pytest.mark.parametrize("nbytes", [-1, 0, MIN_BUDGET_BYTES - 1])
def test_a_budget_too_small_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match=rf"at least {MIN_BUDGET_BYTES} bytes \(1 MiB\), got {nbytes}"):
        MemoryBudget(nbytes)


SIZES = {2**20: 2**20, "1048576": 2**20, "256MiB": 256 * MIB, "256 MiB": 256 * MIB, " 1.5GiB": 3 * 2**29}
SIZES |= {"2KB": 2000, "3MB": 3_000_000, "7B": 7, "0.1KiB": 102}


@pytest.mark.parametrize(("size", "nbytes"), SIZES.items())
def test_sizes_as_people_write_them(size: int | str, nbytes: int) -> None:
    assert bytes_of(size) == nbytes


@pytest.mark.parametrize("size", ["", "MiB", "-1MiB", "1e9", "256 mib", "256MiB/s", "1,5GiB", "inf", True, "9" * 40])
def test_what_is_no_size_is_refused(size: int | str) -> None:
    with pytest.raises(ValueError, match=r"a size is .* got "):
        bytes_of(size)


def test_the_rate_of_a_path_that_waits_for_answers() -> None:
    """Four calls of 1000 bytes leave at 0 s and are answered at 0.5 s: 4000 bytes in half a second."""
    path = Path()
    calls = [path.placed(0.0) for _ in range(4)]
    for call in calls:
        path.answered(call, 1000, 0.5)
    path.note_round_trip(0.5, 0.5)
    assert path.rate == 8000.0
    assert path.under_way_bytes == 4000.0


def test_answers_that_were_held_back_do_not_look_like_a_fast_line() -> None:
    """A line carries a call of 1000 bytes a second. Ten leave in as many seconds, are held back by others, and
    come all at once at 10 s. One that was placed just before and answered just after saw 10,000 bytes in a moment; but
    they had been placed over 9 s, so the line may have carried no more than 1111 a second."""
    path = Path()
    calls = [path.placed(float(second)) for second in range(10)]
    last = path.placed(9.9)
    for call in calls:
        path.answered(call, 1000, 10.0)
    path.answered(last, 1000, 10.1)
    assert path.rate <= 10_000 / 9


def test_rates_and_round_trips_are_those_of_late() -> None:
    """The best of one to two periods count, 10 s of rates and 60 s of round trips; idle time ends none."""
    path = Path()
    for now, nbytes in ((0.0, 4000), (11.0, 1000), (12.0, 2000)):
        path.answered(path.placed(now), nbytes, now + 1.0)
    assert path.rate == 4000.0
    path.answered(path.placed(500.0), 1000, 501.0)  # the third period: the first is forgotten
    assert path.rate == 2000.0
    for now, seconds in ((0.0, 0.1), (61.0, 0.3), (130.0, 0.2)):
        path.note_round_trip(seconds, now)
    assert path.round_trip_s == 0.2


def test_failed_calls_leave_nothing_behind() -> None:
    path = Path()
    path.placed(0.0)
    path.failed()
    path.answered(path.placed(100.0), 1000, 101.0)
    assert path.rate == 1000.0


def test_paths_are_by_peer_and_only_noted_where_there_was_bulk() -> None:
    bulk, peer_id = BulkTraffic(), PeerId(bytes(32))
    bulk.note_round_trip(peer_id, 0.1, 0.0)
    assert bulk.path(peer_id).round_trip_s is None
    bulk.note_round_trip(peer_id, 0.1, 0.0)
    assert bulk.path(peer_id).round_trip_s == 0.1


def test_a_window_follows_what_fills_the_line() -> None:
    """It has at least what it starts with; what goes beyond that is the budget's, and comes back."""
    budget, full = MemoryBudget(10 * MIB), 0.0
    window = BulkWindow(budget, start_bytes=2 * MIB, full_bytes=lambda: full, most_bytes=100 * MIB)
    assert [window.try_take(MIB) for _ in range(3)] == [True, True, False]
    assert budget.used_bytes == 0
    full = 3 * MIB
    assert window.wanted_bytes == int(GAIN * full)
    assert [window.try_take(MIB) for _ in range(7)] == [True] * 6 + [False]  # 8.66 MiB
    assert budget.used_bytes == 6 * MIB
    for _ in range(8):
        window.give_back(MIB)
    assert (window.under_way_bytes, budget.used_bytes) == (0, 0)


def test_a_window_keeps_to_what_the_other_end_allows_and_to_the_budget() -> None:
    """It keeps to whichever is less; one call always may leave."""
    budget = MemoryBudget(MIB)
    window = BulkWindow(budget, start_bytes=MIB, full_bytes=lambda: 1e9, most_bytes=4 * MIB)
    assert [window.try_take(MIB) for _ in range(3)] == [True, True, False]
    large = BulkWindow(MemoryBudget(8 * MIB), start_bytes=MIB, full_bytes=lambda: 1e9, most_bytes=4 * MIB)
    assert [large.try_take(MIB) for _ in range(5)] == [True] * 4 + [False]
    huge = BulkWindow(budget, start_bytes=1, full_bytes=lambda: 0.0, most_bytes=1)
    assert huge.try_take(50 * MIB)
    assert not huge.try_take(1)


@in_simulation
async def test_a_call_that_waits_for_room_gets_it_when_something_comes_back() -> None:
    window = BulkWindow(MemoryBudget(), start_bytes=10, full_bytes=lambda: 0.0, most_bytes=10)
    await window.take(10)

    async def give_back_later() -> None:
        await trio.sleep(3.0)
        window.give_back(10)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(give_back_later)
        await window.take(10)
        assert trio.current_time() == 3.0
