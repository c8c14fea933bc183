"""The library's all-reduces among machines of a simulated network, and the virtual seconds that they take."""

import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import trio

from dmoe_jax.peers.peer import SIM_PORT
from dmoe_net import Address, AllReduceConfig, PeerId, Role, Speeds, open_rpc_peer, run, simulate
from dmoe_net.averaging.grouping.group import GROUP_ID_BYTES, Group, Member
from dmoe_net.averaging.reduction.all_reduce import AllReduce
from dmoe_net.rpc.bulk import DEFAULT_BUDGET_BYTES, MemoryBudget
from experiments.collaborative.world import PeerSpec, lines_of


class WrongResult(Exception):
    """Error of a received vector that is not the whole mean, or of a state that is not the donors'."""


def all_reduce_times(
    specs: Sequence[PeerSpec],
    size: int,
    *,
    rounds: int = 1,
    by_speed: bool = False,
    config: AllReduceConfig = AllReduceConfig(),  # noqa: B008 (frozen)
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    seed: int = 0,
    **network: Any,
) -> tuple[list[float], int]:
    """Average again and again, a second after the last time.

    Args:
      specs: the members; those that are clients reduce nothing.
      size: numbers of a vector.
      by_speed: True to reduce by the speeds of lines, False to reduce all alike.
      network: arguments of `simulate`, such as the latency.

    Returns: the virtual seconds of each all-reduce, from the first member's start to the last one's end; the most bytes
      that any member took out of its memory budget.

    Raises:
      WrongResult: an average is not the mean. It may be in a group.
    """
    rng, budgets = random.Random(seed), [MemoryBudget(budget_bytes) for _ in specs]
    # Whole numbers, whose mean is exact in float32, and different everywhere, so that nothing can be mixed up.
    vectors = [np.arange(size, dtype=np.float32) % 4096 + index for index in range(len(specs))]
    mean = vectors[0] + np.float32((len(specs) - 1) / 2)

    async def take_part(all_reduce: AllReduce, group: Group, vector: np.ndarray) -> None:
        result = await all_reduce.run(group, vector, size=size)
        if not result.complete or not np.array_equal(result.average, mean):
            raise WrongResult(f"{result.received:.3f} of the vector is an average, or it is another than the mean")

    async def main() -> list[float]:
        async with AsyncExitStack() as stack:
            simulated = await stack.enter_async_context(simulate(seed=seed, hosts=lines_of(specs), **network))
            all_reduces, members = [], []
            for index, (spec, budget) in enumerate(zip(specs, budgets, strict=True)):
                here, peer_id = None if spec.client else Address(spec.name, SIM_PORT), PeerId.draw(rng)
                transport = simulated.transport(spec.name, peer_id)
                opened = open_rpc_peer(transport, peer_id=peer_id, listen=here, memory_budget=budget)
                caller = await stack.enter_async_context(opened)
                all_reduces.append(AllReduce(caller, prefix="averaging", config=config))
                role, speeds = Role.CLIENT if spec.client else Role.NODE, spec.speeds if by_speed else Speeds()
                members.append(Member(peer_id=peer_id, address=here, role=role, wanted_slot=index, speeds=speeds))
            seconds = []
            for _ in range(rounds):
                group = Group(group_id=rng.randbytes(GROUP_ID_BYTES), members=tuple(members), side=len(members))
                started = trio.current_time()
                async with trio.open_nursery() as nursery:
                    for all_reduce, vector in zip(all_reduces, vectors, strict=True):
                        nursery.start_soon(take_part, all_reduce, group, vector)
                seconds.append(trio.current_time() - started)
                await trio.sleep(1.0)
            return seconds

    return run(main, seed=seed), max(budget.peak_bytes for budget in budgets)
