"""Windows of the all-reduce on long lines: they grow, within what reducers grant and the memory budget allows."""

from dataclasses import replace

import numpy as np
import trio

from dmoe_net.averaging.reduction.all_reduce import Exchange
from dmoe_net.averaging.reduction.partition import MAX_ROOM, MAX_WINDOW, AllReduceConfig
from dmoe_net.rpc.bulk import MIN_BUDGET_BYTES
from dmoe_net.transport.sim.links import HostOptions
from tests.net.all_reduce_swarm import Swarm, assert_complete, mean, swarm, vectors
from tests.net.sim_hosts import in_simulation

CONFIG = AllReduceConfig(chunk_bytes=256 * 1024, window_bytes=1024 * 1024)
LINE = HostOptions(up_bps=1e9, down_bps=1e9)
SIZE = 4 * 2**20  # 16 MiB, whose line time is 0.20 s; the round trip is 0.1 s


async def again(peers: Swarm, number: int) -> float:
    """One more all-reduce of the group; how long it takes."""
    peers.group = replace(peers.group, group_id=bytes([number]) * 16)
    values, began = vectors(4, SIZE), trio.current_time()
    assert_complete(await peers.run(values), mean(values))
    return trio.current_time() - began


@in_simulation
async def test_windows_grow_on_long_lines_and_memory_comes_back() -> None:
    """One chunk of 256 KiB under way to each of three others would take 16 round trips, 1.6 s; the third time it is
    below 0.6 s."""
    async with swarm(4, config=CONFIG, hosts=LINE) as peers:
        times = [await again(peers, number) for number in range(3)]
        assert times[2] < 0.6
        assert times[2] < times[0]
        for caller in peers.callers:
            assert caller.bulk.budget.used_bytes == 0
            assert 0 < caller.bulk.budget.peak_bytes < caller.bulk.budget.max_bytes


@in_simulation
async def test_a_small_budget_costs_time_and_nothing_else() -> None:
    """1 MiB for everything: never more, and everything ends well."""
    async with swarm(4, config=CONFIG, hosts=LINE) as peers:
        for caller in peers.callers:
            caller.bulk.budget.max_bytes = MIN_BUDGET_BYTES
        for number in range(2):
            await again(peers, number)
        assert all(0 < caller.bulk.budget.peak_bytes <= MIN_BUDGET_BYTES for caller in peers.callers)


@in_simulation
async def test_a_reducer_that_grants_nothing_gets_no_more_than_it_always_had() -> None:
    """`MAX_WINDOW` chunks of each sender at most."""
    async with swarm(3, config=CONFIG, hosts=LINE) as peers:
        for caller in peers.callers:
            caller.answered = lambda reply: replace(reply, body={**reply.body, "room": 0})
        values = vectors(3, SIZE)
        for number in range(2):
            peers.group = replace(peers.group, group_id=bytes([number]) * 16)
            assert_complete(await peers.run(values), mean(values))
        assert max(caller.most_served for caller in peers.callers) <= 2 * MAX_WINDOW


@in_simulation
async def test_what_a_greedy_sender_is_granted_is_bounded() -> None:
    """Whatever it wishes for: by the most that is ever granted, by its share of half of the budget, and by what is
    left of that; nothing to who wishes for nothing. All of it comes back when the reducer is closed."""
    async with swarm(3, config=AllReduceConfig(chunk_bytes=4096)) as peers:
        budget, vector, average = peers.callers[0].bulk.budget, *np.zeros((2, 10**6), np.float32)
        budget.max_bytes = 2 * 2**20
        reducer = Exchange(peers.all_reduces[0], peers.group, 0, vector, average, None).reducer
        assert reducer._room(1, 0) == MAX_WINDOW
        # Half of 2 MiB for three senders is 85 chunks of 4 KiB for each.
        assert reducer._room(1, 10**9) == MAX_WINDOW + 85
        assert reducer._room(1, 1) == MAX_WINDOW + 85  # never fewer than it was told
        assert budget.used_bytes == 85 * 4096
        assert budget.reserve(budget.max_bytes - budget.used_bytes)
        assert reducer._room(2, 10**9) == MAX_WINDOW
        reducer.close()
        assert budget.used_bytes == budget.max_bytes - 85 * 4096
        large = Exchange(peers.all_reduces[1], peers.group, 1, None, average, None).reducer
        assert large._room(0, 10**9) == MAX_ROOM
