"""Replicas of two processes with four devices each, whose model lies on all eight: they make one machine's steps, no
process holds the others' pieces, and a replica that loses a process leaves as one and comes back."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from tests.dmoe_jax.replica_children import Process, check_pieces
from tests.dmoe_jax.replica_model import batch_of, loss_of, params_of


@contextlib.contextmanager
def replicas(tmp_path: Path, *modes: str, count: int = 2, **more: Any) -> Iterator[Any]:
    """A function that starts replica number n, and those that were started: lists of processes."""
    started: list[Process] = []
    base = 20000 + 20 * (os.getpid() % 500)
    join: list[str] = []

    def start(number: int, **changes: Any) -> list[Process]:
        own = []
        for index in range(2):
            settings = {
                "processes": 2,
                "index": index,
                "coordinator": f"127.0.0.1:{base + len(started) // 2}",
                "join": join[0] if join else "",
                "modes": modes,
                "replica": number,
                "first_batch": 0,
                "pause_s": 0.0,
                "company": True,
                "steps": 50,
                "log": str(tmp_path / f"{len(started)}-{index}.log"),
            }
            own.append(Process("replica_process", **settings | more | changes))
        started.extend(own)
        contact = own[0].next("contact")["contact"]
        join.append(contact)
        return own

    try:
        yield start
    finally:
        for process in started:
            process.close()


class OneMachine:
    """The same training in one process."""

    def __init__(self) -> None:
        self.optimizer = optax.adam(1e-2)
        self.params: Any = jax.tree.map(jax.numpy.asarray, params_of(64))
        self.state: Any = self.optimizer.init(self.params)
        self.grads = jax.jit(jax.value_and_grad(loss_of))

    def step(self, batches: list[tuple[int, int]]) -> list[float]:
        """Step with the mean gradient of these batches, (number, replica); the loss of each."""
        found = [self.grads(self.params, *batch_of(*each)) for each in batches]
        mean = jax.tree.map(lambda *each: sum(each) / len(each), *(grads for _, grads in found))
        updates, self.state = self.optimizer.update(mean, self.state, self.params)
        self.params = optax.apply_updates(self.params, updates)
        return [float(loss) for loss, _ in found]

    @property
    def numbers(self) -> dict[str, Any]:
        return {"params": self.params, "mu": self.state[0].mu, "nu": self.state[0].nu}


@pytest.mark.slow
def test_two_replicas_make_one_machines_steps(tmp_path: Path) -> None:
    """Loss, parameters and moments after 50 steps, by averages and by one large batch."""
    with replicas(tmp_path, "average", "collaborate", pause_s=0.05) as start:
        processes = [*start(0), *start(1)]
        told = [process.next("mode", "average") for process in processes]
        alone = OneMachine()
        for number in range(50):
            losses = alone.step([(number, 0), (number, 1)])
            for place, each in enumerate(told):
                assert abs(each["losses"][number] - losses[place // 2]) < 1e-5
        for each in told:
            assert (each["done"], each["missed"]) == (50, 0)
            check_pieces(each, alone.numbers)
        told = [process.next("mode", "collaborate") for process in processes]
        assert told[0]["made"] == told[1]["made"]
        for each in told:
            check_pieces(each, replayed(told, until=each["at"]).numbers)
        assert max(each["alone"] for each in told) <= 2  # the last ones, when the other replica has left


def replayed(told: list[dict[str, Any]], *, until: int) -> OneMachine:
    """One machine that makes the collaboration's steps with the batches that its replicas brought to each."""
    alone = OneMachine()
    for step in range(until):
        made = [
            (number, replica, loss)
            for replica in (0, 1)
            for at, number, loss in told[2 * replica]["made"]
            if at == step
        ]
        if made:
            losses = alone.step([(number, replica) for number, replica, _ in made])
            np.testing.assert_allclose(losses, [loss for *_, loss in made], atol=1e-5)
    return alone


@pytest.mark.slow
def test_averages_run_beside_training_and_hold_no_more_than_pieces(tmp_path: Path) -> None:
    """Steps are made while a round is under way; a process's vector is its share of the model, and the host's memory
    that vector, its average and chunks."""
    with replicas(tmp_path, "overlap") as start:
        processes = [*start(0), *start(1)]
        told = [process.next("mode", "overlap") for process in processes]
    chunks = 16 * 2**20
    for each in told:
        assert each["beside"] > 0
        assert each["peak"] < 3 * each["piece"] + chunks
    for own in (told[:2], told[2:]):
        assert sum(each["piece"] for each in own) == own[0]["whole"]
        assert max(each["piece"] for each in own) < 0.8 * own[0]["whole"]


@pytest.mark.slow
def test_a_replica_that_loses_a_process_leaves_as_one_and_comes_back(tmp_path: Path) -> None:
    """The other goes on at once; the first takes its state when it is started again, and both make steps together."""
    with replicas(tmp_path, "collaborate", pause_s=0.3, steps=10**6) as start:
        first, second = start(0), start(1)
        while second[0].next("step")["step"] < 5:
            pass
        second[1].process.kill()
        killed_at = time.monotonic()
        before = first[0].next("step")["step"]
        while first[0].next("step")["step"] < before + 3:
            pass
        assert time.monotonic() - killed_at < 30.0
        assert second[0].process.wait(60) != 0
        again = start(1, first_batch=1000, company=False)
        assert all(process.next("mode", "opened")["step"] > 5 for process in again)
        # Both make steps together again, and have the same numbers after each.
        joint = [next_joint_steps(process) for process in again]
        assert joint[0].keys() == joint[1].keys()
        for ours, theirs in zip(first, joint, strict=True):
            told = {}
            while not told or max(told) < max(theirs):
                said = ours.next("digest")
                told[said["step"]] = said["digest"]
            assert {step: told[step] for step in theirs} == theirs


def next_joint_steps(process: Process) -> dict[int, str]:
    """Step -> digest of the parameters after it, of the next three steps that both replicas made."""
    found: dict[int, str] = {}
    while len(found) < 3:
        said = process.next("digest")
        if said["peers"] == 2:
            found[said["step"]] = said["digest"]
    return found
