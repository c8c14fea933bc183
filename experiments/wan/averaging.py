"""All-reduces of one group, one after the other, on a line of given bandwidth and round trip."""

import random
from contextlib import AsyncExitStack
from dataclasses import dataclass

import numpy as np
import trio

from dmoe_net.averaging.grouping.group import GROUP_ID_BYTES, Group, Member
from dmoe_net.averaging.reduction.all_reduce import AllReduce, AllReduceResult
from dmoe_net.averaging.reduction.partition import AllReduceConfig
from dmoe_net.identity import Address, PeerId
from dmoe_net.rpc.bulk import MemoryBudget
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.sim import Constant, HostOptions, run, simulate
from dmoe_net.types import Array
from experiments.wan.settings import Line

TICK_S = 0.0002
"""Deliveries are rounded up to multiples of it: a fraction of what a part of half a MiB takes on the fastest line."""

_PAUSE_S = 1.0
"""Between two all-reduces, virtual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceTimes:
    """Times, memory and connections of the all-reduces on one line."""

    seconds: tuple[float, ...]
    """From the first member's start to the last one's end, virtual, one after the other."""
    peak_bytes: int
    """The most that any member took out of its memory budget."""
    num_connections: int
    """That a member has in the end, on average over the members and the others, rounded up."""


def ideal_s(line: Line, *, peers: int, nbytes: int) -> float:
    """Return the least seconds of an all-reduce: each member's line carries 2 (n - 1) / n vectors each way, and there
    is a round trip from the first value to its mean."""
    return 2 * (peers - 1) / peers * 8 * nbytes / (1e9 * line.gbps) + line.round_trip_ms / 1000


class WrongAverage(Exception):
    """A member's average is not the mean of all vectors, or not all of it came."""


def all_reduce_times(
    line: Line, *, peers: int, nbytes: int, rounds: int, budget_bytes: int, seed: int
) -> AllReduceTimes:
    """Average `rounds` times among `peers` members, each on a host with that line, and see how long it takes.

    Raises:
      WrongAverage: it did not come out as it must.
    """
    return run(_average, line, peers, nbytes, rounds, budget_bytes, seed, seed=seed)


async def _average(line: Line, peers: int, nbytes: int, rounds: int, budget_bytes: int, seed: int) -> AllReduceTimes:
    rng, size = random.Random(seed), nbytes // 4
    host = HostOptions(up_bps=1e9 * line.gbps, down_bps=1e9 * line.gbps)
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(
            simulate(seed=seed, latency=Constant(line.round_trip_ms / 2000), hosts=host, tick_s=TICK_S)
        )
        callers = []
        for index in range(peers):
            name, peer_id = f"peer{index}", PeerId.draw(rng)
            opened = open_rpc_peer(
                network.transport(name, peer_id),
                peer_id=peer_id,
                listen=Address(name, 1),
                memory_budget=MemoryBudget(budget_bytes),
            )
            callers.append(await stack.enter_async_context(opened))
        all_reduces = [AllReduce(caller, prefix="wan", config=AllReduceConfig()) for caller in callers]
        members = tuple(
            Member(peer_id=caller.peer_id, address=caller.address, wanted_slot=slot)
            for slot, caller in enumerate(callers)
        )
        # Whole numbers, whose mean is exact in float32, and different everywhere, so that nothing can be mixed up.
        vectors = [np.arange(size, dtype=np.float32) % 4096 + index for index in range(peers)]
        seconds = []
        for _ in range(rounds):
            group = Group(group_id=rng.randbytes(GROUP_ID_BYTES), members=members, side=peers)
            seconds.append(await _one(all_reduces, group, vectors))
            await trio.sleep(_PAUSE_S)
        links = sum(each.cause is None for each in network._ends()) / (peers * (peers - 1))
        return AllReduceTimes(
            seconds=tuple(seconds),
            peak_bytes=max(caller.bulk.budget.peak_bytes for caller in callers),
            num_connections=-int(-links // 1),
        )


async def _one(all_reduces: list[AllReduce], group: Group, vectors: list[Array]) -> float:
    started, ended = trio.current_time(), []
    size, spread = vectors[0].size, np.float32((len(vectors) - 1) / 2)

    async def member(all_reduce: AllReduce, vector: Array) -> None:
        result: AllReduceResult = await all_reduce.run(group, vector, size=size)
        ended.append(trio.current_time())
        if not result.complete or not np.array_equal(result.average, vectors[0] + spread):
            raise WrongAverage(f"{result.received:.3f} of the vector is an average, or it is another than the mean")

    async with trio.open_nursery() as nursery:
        for all_reduce, vector in zip(all_reduces, vectors, strict=True):
            nursery.start_soon(member, all_reduce, vector)
    return max(ended) - started
