"""Trainers whose trunk lies on the devices of two processes: they make one process's steps, with experts that learn
once from each row, and what fails in one of them fails in both."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import trio

from dmoe_jax.peers.security import Plain
from dmoe_jax.routing.registry import make_router
from dmoe_jax.swarm.opening import open_swarm
from tests.dmoe_jax.replica_children import Process, check_pieces
from tests.dmoe_jax.replica_trainer import EXPERT_OPTIMIZER, GRID, ROWS, experts, train


@contextlib.contextmanager
def replica(tmp_path: Path, join: str, *modes: str, number: int = 0, **more: Any) -> Iterator[list[Process]]:
    """The two processes of a replica."""
    own = []
    for index in range(2):
        settings = {
            "index": index,
            "coordinator": f"127.0.0.1:{30000 + 20 * (os.getpid() % 500) + number}",
            "join": join,
            "modes": modes,
            "log": str(tmp_path / f"{number}-{index}.log"),
        }
        own.append(Process("replica_trainer_process", **settings | more))
    try:
        yield own
    finally:
        for process in own:
            process.close()


async def said(processes: list[Process], key: str, value: Any = None) -> list[dict[str, Any]]:
    """The next thing that each of them says with this key."""
    return [await trio.to_thread.run_sync(process.next, key, value) for process in processes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "router", "rows"),
    [
        ("data=4,model=2", "product_key", ROWS),
        ("data=2,model=4", "product_key+balanced", ROWS),  # which heeds the experts' capacity
        ("data=1,model=8", "expert_choice", ROWS),  # both processes hold all rows, and a row's experts depend on others
        ("data=4,model=2", "product_key", 9),  # which data does not divide
    ],
)
async def test_two_processes_make_one_processs_steps(mesh: str, router: str, rows: int, tmp_path: Path) -> None:
    """Losses, parameters, moments and the experts' gradients of 20 steps, to 1e-5; each row taught an expert once."""
    learnt: list[Any] = []
    async with open_swarm(listen="127.0.0.1:0", security=Plain()) as swarm:
        served = await swarm.serve(experts(), optimizer=EXPERT_OPTIMIZER, warm_up_rows=rows, seed=0)
        with replica(tmp_path, swarm.contact, "exact", mesh=mesh, router=router, rows=rows) as processes:
            told = await said(processes, "mode", "exact")
        learnt.append({uid: jax.device_get(backend.state) for uid, backend in served.backends.items()})
    async with open_swarm(listen="127.0.0.1:0", security=Plain()) as swarm:
        served = await swarm.serve(experts(), optimizer=EXPERT_OPTIMIZER, warm_up_rows=rows, seed=0)
        trainers, alone = await train(swarm, make_router(router, GRID), None, rows)
        learnt.append({uid: jax.device_get(backend.state) for uid, backend in served.backends.items()})
        statistics = swarm.statistics
    for each in told:
        np.testing.assert_allclose(each["losses"], alone["losses"], atol=1e-5)
        np.testing.assert_allclose(each["evaluated"], alone["evaluated"], atol=1e-5)
        check_pieces(each, trainers.state())
        assert each["failed"] == 0
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-5), *learnt)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(learnt[0]["layer0.0.0"]["opt_state"])) > 0.1
    assert sum(each["samples"] for each in told) == statistics.samples
    assert min(each["samples"] for each in told) > 0.4 * statistics.samples
    load = {uid: sum(each["load"].get(uid, 0) for each in told) for uid in served.uids}
    assert load == {uid: statistics.load.get(uid, 0) for uid in served.uids}


@pytest.mark.slow
async def test_a_failure_of_one_process_is_a_failure_of_both(tmp_path: Path) -> None:
    """A step without a quorum is lost in both; both end with the data of one, with its cancellation, and when it is
    killed."""
    async with open_swarm(listen="127.0.0.1:0", security=Plain()) as swarm:
        await swarm.serve(experts(), optimizer=EXPERT_OPTIMIZER, warm_up_rows=ROWS, seed=0)
        modes = ("failing", "refused", "stopped", "killed")
        with replica(tmp_path, swarm.contact, *modes, mesh="data=4,model=2") as processes:
            for each in await said(processes, "mode", "failing"):
                assert [line.partition(":")[0] for line in each["lost"]] == ["NoQuorum"]
                assert "samples got fewer than k_min=1 answers" in each["lost"][0]
                assert each["step"] == 5  # of six batches
            for each in await said(processes, "mode", "refused"):
                assert "has one trainer, the same in each of them, got batches for 2" in each["said"][0]
                assert "have read different batches" in each["said"][1]
            first, second = await said(processes, "mode", "stopped")
            assert second == {"mode": "stopped", "step": 5, "error": "", "cancelled": True}
            lost = "ReplicaLost: process 1 of this replica: it was stopped"
            assert first == {"mode": "stopped", "step": 5, "error": lost, "cancelled": False}
            await said(processes, "step", 3)
            processes[1].process.kill()
            (left,) = await said(processes[:1], "mode", "killed")
            assert left["error"].startswith("ReplicaLost: a process of this replica is gone")


@pytest.mark.slow
async def test_replicas_average_their_trunks(tmp_path: Path) -> None:
    """Both meet; the processes of each stay in step to the last bit, and a late one takes the other's state."""
    async with open_swarm(listen="127.0.0.1:0", security=Plain()) as swarm:
        await swarm.serve(experts(), optimizer=EXPERT_OPTIMIZER, warm_up_rows=ROWS, seed=0)
        more = {"mesh": "data=4,model=2", "averages": 6}
        with contextlib.ExitStack() as stack:
            opened = replica(tmp_path, swarm.contact, "averaging", number=0, replica=0, **more)
            first = stack.enter_context(opened)
            await said(first, "rounds", 2)
            opened = replica(tmp_path, swarm.contact, "averaging", number=1, replica=1, **more)
            second = stack.enter_context(opened)
            for own in (first, second):
                one, other = await said(own, "mode", "averaging")
                assert one == other
                assert one["met"] >= 6
            assert one["taken"] == 1


@pytest.mark.slow
async def test_replicas_make_steps_from_one_batch(tmp_path: Path) -> None:
    """All four processes have the same trunk at the end."""
    async with open_swarm(listen="127.0.0.1:0", security=Plain()) as swarm:
        await swarm.serve(experts(), optimizer=EXPERT_OPTIMIZER, warm_up_rows=ROWS, seed=0)
        with contextlib.ExitStack() as stack:
            processes = []
            for number in range(2):
                more: dict[str, Any] = {"mesh": "data=4,model=2", "steps": 8, "replica": number, "number": number}
                processes += stack.enter_context(replica(tmp_path, swarm.contact, "collaborating", **more))
            told = await said(processes, "mode", "collaborating")
    assert {each["step"] for each in told} == {8}
    assert len({each["chain"] for each in told}) == 1
    for each in told:
        assert each["pieces"] == told[0]["pieces"]
