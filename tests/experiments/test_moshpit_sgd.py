"""Data-parallel training in virtual time: who waits for whom, what averages come to, and the command."""

import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import pytest
import trio
from trio.testing import MockClock

import dmoe_net
from experiments.bench import run_experiment
from experiments.moshpit_sgd import tasks
from experiments.moshpit_sgd.measurement import figures_of
from experiments.moshpit_sgd.settings import MoshpitSgdSettings, TimeModel
from experiments.moshpit_sgd.swarm import Moshpit, PeerLearner, Swarm, make_method
from tests.experiments.small_runs import POINT, quadratic

# A stretch takes 1 s, a vector 1 s from peer to peer.
STEADY = TimeModel(
    local_steps=1,
    step_s=1.0,
    speed_sigma=0.0,
    step_sigma=0.0,
    straggling=0.0,
    vector_bytes=125e6,
    latency_s=0.0,
    mean_uptime_s=math.inf,
)


class Holders:
    """Peers that learn nothing: peer i begins with the number i."""

    def __init__(self, num_peers: int) -> None:
        self.values = np.arange(num_peers, dtype=np.float64)[:, None]
        self.puts = self.adopted = 0

    def begin(self, peer: int) -> None:
        pass

    def results(self, peers: Sequence[int]) -> np.ndarray:
        return self.values[list(peers)]

    def put(self, peers: Sequence[int], vectors: np.ndarray) -> None:
        self.values[list(peers)] = vectors
        self.puts += len(peers)

    def adopt(self, peer: int, donor: int) -> None:
        self.values[peer] = self.values[donor]
        self.adopted += 1

    @property
    def held(self) -> list[float]:
        return self.values[:, 0].round(6).tolist()


@asynccontextmanager
async def open_swarm(
    monkeypatch: pytest.MonkeyPatch,
    method: Any,
    num_peers: int,
    *,
    slow: Mapping[int, float] = MappingProxyType({}),
    absent: Mapping[int, list[tuple[float, float]]] = MappingProxyType({}),
) -> AsyncIterator[Holders]:
    """A swarm whose peers have these speed factors and absences, at the virtual time 0."""
    factors = iter([slow.get(peer, 1.0) for peer in range(num_peers)])
    absences = iter([absent.get(peer, []) for peer in range(num_peers)])
    monkeypatch.setattr(TimeModel, "speed_factor", lambda self, rng: next(factors))
    monkeypatch.setattr(TimeModel, "absences", lambda self, rng: next(absences))
    holders = Holders(num_peers)
    async with trio.open_nursery() as nursery:
        swarm = Swarm(STEADY, holders, nursery, num_peers=num_peers, seed=0)
        if method == "moshpit":
            grid = dmoe_net.MoshpitGrid(side=math.isqrt(num_peers), dims=2)
            swarm.start(Moshpit(swarm, grid, list(range(num_peers))))
        else:
            swarm.start(make_method(method, swarm))
        yield holders
        nursery.cancel_scope.cancel()


async def test_all_reduce_takes_the_slowest(monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock) -> None:
    """The slowest is ready after 4 s, 2 (1 - 1/4) vectors take 1.5 s: all have the mean at 5.5 s and not before."""
    async with open_swarm(monkeypatch, "all_reduce", 4, slow={2: 4.0}) as holders:
        await trio.sleep_until(5.4)
        assert holders.held == [0, 1, 2, 3]
        await trio.sleep_until(5.6)
        assert holders.held == [1.5] * 4
        await trio.sleep_until(11.1)
        assert holders.puts == 2 * 4


async def test_all_reduce_is_repeated_without_the_dead(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Gone at 1.2 s in the first all-reduce, noticed at 6.2 s, repeated among three in 4/3 s; back for the next."""
    async with open_swarm(monkeypatch, "all_reduce", 4, absent={3: [(1.2, 6.4)]}) as holders:
        await trio.sleep_until(7.5)
        assert holders.held == [0, 1, 2, 3]
        await trio.sleep_until(7.6)
        assert holders.held == [1.0] * 4
        assert (holders.puts, holders.adopted) == (3, 1)
        await trio.sleep_until(7.6 + 2.5)
        assert holders.puts == 3 + 4


async def test_moshpit_leaves_out_the_dead(monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock) -> None:
    """Peer 1 dies while its group averages: after the timeout its partner goes on with what is left, others go on."""
    async with open_swarm(monkeypatch, "moshpit", 4, absent={1: [(1.5, 100.0)]}) as holders:
        await trio.sleep_until(6.9)
        assert holders.held[:2] == [0, 1]
        assert holders.held[2:] == [2.5, 2.5]
        await trio.sleep_until(20.0)
        assert holders.held[0] > 0.5  # it has met the others since


async def test_pushsum_keeps_the_sum(monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock) -> None:
    """Unequal speeds, late messages: in the end everybody has the mean of the beginning all the same."""
    async with open_swarm(monkeypatch, "pushsum", 8, slow={0: 3.0, 5: 7.0}) as holders:
        await trio.sleep_until(300.0)
        np.testing.assert_allclose(holders.values[:, 0], 3.5, atol=0.02)


async def test_all_reduce_of_each_step_is_large_batch_sgd(autojump_clock: MockClock) -> None:
    """Real training in the swarm: with one local step the parameters are those of SGD on all peers' samples."""
    task = quadratic()
    learner = PeerLearner(task, num_peers=5, local_steps=1, seed=3)
    async with trio.open_nursery() as nursery:
        swarm = Swarm(STEADY, learner, nursery, num_peers=5, seed=0)
        swarm.start(make_method("all_reduce", swarm))
        await trio.sleep(3 * 2.6 + 0.1)
        nursery.cancel_scope.cancel()
    samples = [task.batches(peer, 5, 3) for peer in range(5)]
    expected = np.asarray(task.init(jax.random.key(3))["w"], np.float64)
    for _ in range(3):
        expected -= 0.1 * (expected - np.mean([next(own) for own in samples], axis=0))
    np.testing.assert_allclose(learner.losses(range(5)), 0.5 * np.mean((expected - POINT) ** 2), rtol=1e-5)


def test_headline_names_what_was_missed() -> None:
    """All-Reduce that never gets there is beaten; Moshpit that is not sooner misses the bar."""

    def result(model: str, method: str, reached_s: float | None) -> dict[str, Any]:
        return {"model": model, "peers": 16, "method": method, "reached_s": reached_s}

    mnist = [result("mnist", *each) for each in (("all_reduce", 300.0), ("pushsum", 240.0), ("moshpit", 200.0))]
    text = [result("transformer_xl", "all_reduce", None), result("transformer_xl", "moshpit", 500.0)]
    figures, missed = figures_of([*mnist, *text])
    assert figures["mnist_16_all_reduce_over_moshpit"] == 1.5
    assert figures["mnist_16_pushsum_over_moshpit"] == 1.2
    assert figures["transformer_xl_16_all_reduce_over_moshpit"] is None
    assert missed == []
    slow = [result("mnist", "all_reduce", 200.0), result("mnist", "moshpit", 200.0)]
    assert figures_of(slow)[1] == ["mnist_16_all_reduce_over_moshpit"]


@pytest.mark.slow
def test_the_command_trains_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every method reaches the target; folder, figure and report are there."""
    monkeypatch.setattr(tasks, "make_task", lambda name: quadratic())
    run_experiment(
        MoshpitSgdSettings, args=["--model", "mnist", "--peers", "4", "--json", "--out", str(tmp_path / "run")]
    )
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    for method in ("all_reduce", "pushsum", "moshpit"):
        assert 10 < headline[f"mnist_4_{method}_s"] < 500
    assert "patience_s" in (tmp_path / "run" / "report.md").read_text()
    assert (tmp_path / "run" / "figure.png").stat().st_size > 10_000
