"""The memory budget at the front door: `open_swarm(memory_budget=...)` and --memory-budget."""

import re
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
import trio

from dmoe_jax.cli.network import BudgetOptions, NetworkOptions, join_swarm
from dmoe_jax.cli.up import UpCommand
from dmoe_jax.peers.peer import Seams
from dmoe_jax.peers.security import Plain
from dmoe_jax.runs.endings import UsageError
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.swarm.swarm import Swarm
from dmoe_net.averaging.grouping.group import GROUP_ID_BYTES, Group, Member
from dmoe_net.averaging.reduction.all_reduce import AllReduce
from dmoe_net.averaging.reduction.partition import AllReduceConfig
from dmoe_net.rpc.bulk import DEFAULT_BUDGET_BYTES, MemoryBudget
from dmoe_net.transport.sim import Constant, HostOptions, run, simulate
from tests.dmoe_jax.training_rig import outcome, parsed

MIB = 2**20
PEER = "ab" * 32 + "@127.0.0.1:1"


def average(budget: int | str | None) -> tuple[float, int]:
    """(seconds, most bytes in use) of the third average of three swarms at 2 Gb/s and 100 ms; windows have grown."""

    async def main() -> tuple[float, int]:
        line = HostOptions(up_bps=2e9, down_bps=2e9)
        async with simulate(latency=Constant(0.05), hosts=line) as network, AsyncExitStack() as stack:
            swarms: list[Swarm] = []
            for index in range(3):
                place = {"network": network, "host": f"host{index}", "seed": index}
                opened = open_swarm([each.contact for each in swarms[:1]], memory_budget=budget, **place)
                swarms.append(await stack.enter_async_context(opened))
            reductions = [AllReduce(each.rpc, prefix="run", config=AllReduceConfig()) for each in swarms]
            members = tuple(
                Member(peer_id=each.peer_id, address=each.rpc.address, wanted_slot=slot)
                for slot, each in enumerate(swarms)
            )
            vector = np.arange(32 * MIB // 4, dtype=np.float32) % 4096
            for number in range(3):
                group = Group(group_id=bytes([number]) * GROUP_ID_BYTES, members=members, side=3)
                started = trio.current_time()
                async with trio.open_nursery() as nursery:
                    for reduction in reductions:
                        nursery.start_soon(check_one, reduction, group, vector)
                seconds = trio.current_time() - started
            return seconds, max(each.rpc.bulk.budget.peak_bytes for each in swarms)

    return run(main)


async def check_one(reduction: AllReduce, group: Group, vector: np.ndarray) -> None:
    with trio.fail_after(60):
        result = await reduction.run(group, vector, size=vector.size)
    assert result.complete
    assert np.array_equal(result.average, vector)


def test_the_budget_is_kept_and_less_of_it_is_slower() -> None:
    """One MiB is less than a chunk of this vector with its neighbours: the average comes all the same."""
    wanted_s, most = average(None)
    assert most > 8 * MIB  # what the line asks for
    some_s, some = average("8MiB")
    assert MIB < some <= 8 * MIB
    least_s, least = average(MIB)
    assert least <= MIB
    assert wanted_s < min(some_s, least_s)
    assert max(some_s, least_s) < 10 * wanted_s


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (1000, r"at least 1048576 bytes \(1 MiB\), got 1000"),
        ("1023KiB", "at least 1048576 bytes"),
        ("much", "a size is written as .* got 'much'"),
    ],
)
async def test_a_budget_that_cannot_be(budget: int | str, message: str) -> None:
    with pytest.raises(ValueError, match=f"memory_budget: .*{message}"):
        async with open_swarm(memory_budget=budget, security=Plain()):
            pass


async def test_swarms_of_a_process_may_share_one() -> None:
    budget = MemoryBudget("2MiB")
    async with (
        open_swarm(security=Plain(), memory_budget=budget) as one,
        open_swarm(one.contact, security=Plain(), memory_budget=budget) as other,
        open_swarm(one.contact, security=Plain()) as third,
    ):
        assert one.rpc.bulk.budget is other.rpc.bulk.budget is budget
        assert third.rpc.bulk.budget.max_bytes == DEFAULT_BUDGET_BYTES
        with pytest.raises(ValueError, match="memory_budget would have no effect"):
            async with open_swarm(memory_budget="2MiB", testing=Seams(caller=one.rpc)):
                pass


async def test_the_flag_reaches_the_process() -> None:
    network = NetworkOptions(insecure_loopback=True)
    async with join_swarm(network, join=[], budget=BudgetOptions(memory_budget="3MiB")) as peer:
        assert peer.rpc.bulk.budget.max_bytes == 3 * MIB
    assert MemoryBudget(BudgetOptions().memory_budget).max_bytes == DEFAULT_BUDGET_BYTES


def test_flags_that_cannot_be_meant_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By every command that has the flag, before anything is started; `dmoe up` hands it on."""
    for command in (["train", "--join", PEER], ["assist", "--join", PEER], ["up"]):
        _, error = outcome([*command, "--memory-budget", "64kb"], capsys)
        assert re.search(r"--memory-budget: a size is written as .* got .64kb.", error)
    with pytest.raises(UsageError, match="--memory-budget would have no effect beside --trainers 1"):
        parsed(UpCommand, out=tmp_path / "run", memory_budget="64MiB").check()
    up = parsed(UpCommand, out=tmp_path / "run", trainers=2, memory_budget="64MiB")
    up.check()
    words = up.flags_of_trainer(1)
    assert words[words.index("--memory-budget") + 1] == "64MiB"
