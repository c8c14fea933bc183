"""The experiments that run in the emulator: what is trained, what is made of it, and a small run of each."""

import csv
import os
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from dmoe_jax.emulator import draw_order, exponential_delays
from dmoe_jax.emulator.order import BACKWARD, FORWARD, STAGE, EventOrder
from dmoe_jax.emulator.stages import ModelStages
from dmoe_jax.models import mlp
from dmoe_jax.runs.run_folder import RunFolder
from experiments.bench import Run, run_experiment
from experiments.emulation import measurement as emulation
from experiments.emulation.problems import DenseMLP
from experiments.emulation.settings import EmulationSettings, TrialSettings
from experiments.emulation.trials import with_fresh_experts
from experiments.mnist_convergence import measurement as convergence
from experiments.mnist_convergence.settings import MnistSettings
from experiments.staleness.settings import StalenessSettings

needs_mnist = pytest.mark.skipif(not os.environ.get("DMOE_DATA"), reason="MNIST is not at hand: DMOE_DATA is not set")


def run_of(settings: Any, path: Path, records: list[dict[str, Any]]) -> Run[Any]:
    folder = RunFolder.create(path, settings, name="test")
    for record in records:
        folder.log("trial", **record)
    return Run(settings=settings, folder=folder, console=Console(quiet=True))


def test_fresh_experts_are_those_of_the_end_of_a_step() -> None:
    """Each step reads where it read; all the rest of it happens at its end, in the order in which it was."""
    order = draw_order(
        num_updates=40, num_trainers=5, num_layers=2, num_pairs=3, delay=exponential_delays(1.0), failure_rate=0.1
    )
    fresh = with_fresh_experts(order)
    last = STAGE + 4
    for trainer in range(5):
        kinds, own = order.kind[order.trainer == trainer], fresh.kind[fresh.trainer == trainer]
        assert own.tolist() == kinds[: len(own)].tolist()
    reads = [updates_before(each, STAGE) for each in (order, fresh)]
    assert reads[1] == reads[0][: len(reads[1])]
    assert len(fresh.updates) == 40
    for end in fresh.updates:
        # Between the read and the end of a step lie other steps; the 15 events before its end are its own.
        assert set(fresh.trainer[end - 15 : end + 1].tolist()) == {int(fresh.trainer[end])}
        assert set(fresh.kind[end - 15 : end].tolist()) == {FORWARD, BACKWARD, *range(STAGE + 1, last)}


def updates_before(order: EventOrder, kind: int) -> list[tuple[int, int]]:
    """(trainer, updates of the trunk before it) of each event of a kind that belongs to a finished step."""
    done = np.cumsum(order.kind == STAGE + 4)
    return [(int(order.trainer[place]), int(done[place])) for place in np.flatnonzero(order.kind == kind)]


@pytest.mark.slow
def test_a_dense_model_waits_and_computes_no_more() -> None:
    """Its loss is that of its blocks; the expert that delays it returns what it is given."""
    stages = ModelStages(partial(DenseMLP, d_model=4))
    params = stages.model.init(jax.random.key(0))
    batch = mlp.Batch(np.random.default_rng(0).normal(size=(5, 784)).astype(np.float32), np.arange(5))
    outcome, _ = stages.routed(params, (jnp.zeros(1),), batch, ())
    logits = stages.model.blocks.apply(params["blocks"], batch.x)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()
    assert float(outcome.loss) == pytest.approx(float(expected))


def test_emulation_takes_the_greatest_difference(tmp_path: Path) -> None:
    run = run_of(EmulationSettings(quick=True), tmp_path / "run", [])
    assert emulation.summarise(run) is None
    for problem, dtype, losses, trunk, last_bit in (
        ("MNIST", "float64", 1e-7, 2e-12, 1e-12),
        ("MNIST", "float64", 2e-7, 1e-12, 1e-12),
        ("MNIST", "float32", 1e-7, 3e-5, 4e-5),
        ("Transformer-XL", "float32", 1e-6, 2e-6, 2e-6),
    ):
        own = {"losses": losses, "trunk": trunk, "experts": 3e-13, "last_bit": last_bit}
        run.log("difference", problem=problem, dtype=dtype, **own)
        interrupted = emulation.summarise(run)
        assert interrupted is not None
        assert interrupted.figures["float64_parameter_difference"] == 2e-12
    for number, rate in enumerate((99.0, 14.0, 16.0, 30.0)):  # the first warms up
        run.log("slice", round=number, name="mnist", updates_per_s=10 * rate)
        run.log("slice", round=number, name="mnist_swarm", updates_per_s=10.0)
    result = emulation.summarise(run)
    assert result is not None
    assert result.figures["emulator_max_difference"] == result.figures["max_difference_mnist"] == 3e-5
    assert result.figures["last_bit_difference_mnist"] == 4e-5
    assert result.figures["max_difference_transformer_xl"] == 2e-6
    assert result.figures["emulator_speedup"] == 16
    assert result.missed_bars == ["emulator_max_difference"]


@needs_mnist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "updates", "trainings"), [(MnistSettings, "100", 6), (StalenessSettings, "20", 7)]
)
def test_a_small_run(
    settings: type[TrialSettings], updates: str, trainings: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To its report, and again: what is finished is not trained twice."""
    monkeypatch.setattr(convergence, "WIDTH", 8)
    flags = ["--quick", "--json", "--out", str(tmp_path / "run"), "--seeds", "1", "--jobs", "1", "--updates", updates]
    first = run_experiment(settings, args=flags)
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count('"trial"') == trainings
    assert run_experiment(settings, args=[*flags, "--resume"]) == first
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count('"trial"') == trainings
    assert (tmp_path / "run" / "figure.png").stat().st_size > 10_000
    assert "| " in (tmp_path / "run" / "report.md").read_text()
    with (tmp_path / "run" / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len({(row["label"], row["seed"]) for row in rows}) == len(rows) == trainings
    assert all(float(row["loss"]) > 0 and row["setting"] in row["label"] for row in rows)
