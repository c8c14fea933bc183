"""The experiments that run in the emulator: what is trained, what is made of it, and a small run of each."""

import math
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
from experiments.bench import Run
from experiments.emulation import measurement as emulation
from experiments.emulation.dense import DenseMLP
from experiments.emulation.settings import EmulationSettings
from experiments.emulation.trials import with_fresh_experts
from experiments.mnist_convergence import measurement as convergence
from experiments.mnist_convergence.__main__ import main as convergence_main
from experiments.mnist_convergence.measurement import AUTHORS, FAILING, FRESH, SLOW, label_of
from experiments.mnist_convergence.settings import MnistSettings
from experiments.staleness import measurement as staleness
from experiments.staleness.__main__ import main as staleness_main
from experiments.staleness.measurement import DEFAULT, MANY, MANY_DEFAULT, MANY_ONE, ONE, ONE_DEFAULT, PLAIN
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


def test_what_a_row_loses(tmp_path: Path) -> None:
    """Over what plain asynchrony loses, seed by seed; a seed that a row lacks does not count."""

    def record(label: str, seed: int, loss: float) -> dict[str, Any]:
        return {
            "problem": "mnist",
            "label": label,
            "seed": seed,
            "points": [{"step": 8, "loss": loss, "accuracy": 0.5}],
        }

    records = [record(ONE, 0, 0.4), record(ONE, 1, 0.5), record(ONE_DEFAULT, 0, 0.4), record(ONE_DEFAULT, 1, 0.5)]
    records += [record(PLAIN, 0, 1.0), record(PLAIN, 1, 1.1), record(DEFAULT, 0, 0.7), record(DEFAULT, 1, 0.68)]
    records += [record(DEFAULT, 2, 9.0), record(MANY_ONE, 0, 0.3)]
    records += [record(MANY, 0, 1.3), record(MANY_DEFAULT, 0, 0.5)]
    run = run_of(StalenessSettings(), tmp_path / "run", records)
    np.testing.assert_allclose(staleness.lost_shares(staleness.last_losses(run)["mnist"], DEFAULT), [0.5, 0.3])
    result = staleness.summarise(run)
    assert result is not None
    assert result.figures["mnist_default_lost_share"] == pytest.approx(0.4)
    assert result.figures["mnist_one_trainer_difference"] == 0
    assert result.figures["mnist_many_lost_share"] == pytest.approx(0.2)
    lost, more = ({row[0]: row[column] for row in result.tables[0].rows} for column in (-1, -2))
    assert (more[ONE], more[DEFAULT], more[MANY]) == ("", "+0.240 (-0.522 to +1.002)", "+1.000")
    assert (lost[DEFAULT], lost[MANY_DEFAULT], lost[MANY]) == ("0.40", "0.20", "1.00")
    assert result.missed_bars == []
    assert len(staleness.draw(run, result).axes) == 1
    assert staleness.summarise(run_of(StalenessSettings(), tmp_path / "empty", [])) is None


def test_rows_are_chosen_by_their_names() -> None:
    """An exact name is that row alone, another text all rows that have it; the seeds of a row stand together."""
    settings = StalenessSettings(problem=("mnist",), only=(ONE, "256"), seeds=2, seed=7)
    trials = staleness.all_trials(settings)
    assert [(trial.label, trial.seed) for trial in trials] == [
        (label, seed) for label in (ONE, MANY, MANY_DEFAULT) for seed in (7, 8)
    ]
    assert {trial.num_updates for trial in trials} == {1024, 2048}
    with pytest.raises(ValueError, match="--only: no row has 'nobody' in its name; there are one trainer; "):
        staleness.all_trials(StalenessSettings(only=("nobody",)))


def mnist_record(label: str, seed: int, curve: list[float]) -> dict[str, Any]:
    points = [{"step": 1024 * (i + 1), "accuracy": accuracy} for i, accuracy in enumerate(curve)]
    return {"problem": "mnist-dense" if "dense" in label else "mnist", "label": label, "seed": seed, "points": points}


def test_margins_and_costs(tmp_path: Path) -> None:
    """The margin is what is left after both standard deviations, at the worst point; the cost is of the last point."""
    slow, failing, dense, fresh = (
        *(label_of(256, SLOW), label_of(256, FAILING)),
        *(label_of(None, SLOW), label_of(256, SLOW, FRESH)),
    )
    found = {
        fresh: [[0.9, 0.9], [0.9, 0.9]],
        slow: [[0.5, 0.9], [0.7, 0.9]],
        dense: [[0.1, 0.8], [0.3, 0.8]],
        failing: [[0.5, 0.86], [0.5, 0.93]],
    }
    records = [mnist_record(label, seed, curve) for label, curves in found.items() for seed, curve in enumerate(curves)]
    result = convergence.summarise(run := run_of(MnistSettings(extras=True), tmp_path / "run", records))
    assert result is not None
    assert result.figures["least_margin"] == pytest.approx(min(0.4 - 2 * 0.1 * 2**0.5, 0.1))
    assert result.figures["least_margin_fresh_experts"] == pytest.approx(0.1)
    assert result.figures["failures_cost"] == pytest.approx(0.9 - 0.895)
    assert result.figures["failures_cost_error"] == pytest.approx(0.035)  # 0.86 and 0.93; without failures always 0.9
    assert result.missed_bars == []
    assert {row[0]: row[2] for row in result.tables[0].rows}[dense] == "0.200 +- 0.141"
    assert len(convergence.draw(run, result).axes) == 3


def test_the_bars_are_of_the_authors_program_where_it_was_run(tmp_path: Path) -> None:
    """Theirs is the figure of the paper. Single seeds have no error."""
    accuracies = {("", SLOW): 0.5, ("", FAILING): 0.4, (AUTHORS, SLOW): 0.7, (AUTHORS, FAILING): 0.695}
    records = [
        mnist_record(label_of(256, network, variant), 0, [value]) for (variant, network), value in accuracies.items()
    ]
    records.append(mnist_record(label_of(None, SLOW), 0, [0.45]))
    result = convergence.summarise(run_of(MnistSettings(), tmp_path / "run", records))
    assert result is not None
    assert [bar.name for bar in result.bars] == [
        "least_margin_frozen_gate_fresh_experts",
        "failures_cost_frozen_gate_fresh_experts",
    ]
    assert result.missed_bars == []
    assert result.figures["failures_cost"] == pytest.approx(0.1)
    assert math.isnan(result.figures["failures_cost_error"])
    plain = [record for record in records if AUTHORS not in record["label"]]
    result = convergence.summarise(run_of(MnistSettings(), tmp_path / "plain", plain))
    assert result is not None
    assert result.missed_bars == ["failures_cost"]


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
@pytest.mark.parametrize(("main", "updates"), [(convergence_main, "100"), (staleness_main, "20")])
def test_a_small_run(main: Any, updates: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To its report, and again: what is finished is not trained twice."""
    monkeypatch.setattr(convergence, "WIDTH", 8)
    flags = ["--quick", "--json", "--out", str(tmp_path / "run"), "--seeds", "1", "--jobs", "1", "--updates", updates]
    first = main(args=flags)
    records = (tmp_path / "run" / "metrics.jsonl").read_text().count('"trial"')
    assert records == 4
    assert main(args=[*flags, "--resume"]) == first
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count('"trial"') == records
    assert (tmp_path / "run" / "figure.png").stat().st_size > 10_000
    assert "| " in (tmp_path / "run" / "report.md").read_text()
