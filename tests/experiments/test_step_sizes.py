"""Comparisons of trainings that have each their best step sizes: the search, and what is made of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from dmoe_jax.runs.run_folder import RunFolder
from experiments.bench import FACTORS, Run
from experiments.mnist_convergence import measurement as convergence
from experiments.mnist_convergence.measurement import AUTHORS, FAILING, REMEDIED, SLOW, label_of
from experiments.mnist_convergence.settings import MnistSettings
from experiments.staleness import measurement as staleness
from experiments.staleness.measurement import DEFAULT, MANY, MANY_DEFAULT, MANY_ONE, NO_MOMENT, ONE, ONE_DEFAULT, PLAIN
from experiments.staleness.settings import StalenessSettings
from experiments.step_sizes import SEARCH_SEEDS, best_factors, scaled, scaled_label, search_table, searched


def run_of(settings: Any, path: Path, records: list[dict[str, Any]]) -> Run[Any]:
    folder = RunFolder.create(path, settings, name="test")
    for record in records:
        folder.log("trial", **record)
    return Run(settings=settings, folder=folder, console=Console(quiet=True))


def mnist_record(label: str, seed: int, **figures: float) -> dict[str, Any]:
    problem = "mnist-dense" if "dense" in label else "mnist"
    return {"problem": problem, "label": label, "seed": seed, "points": [{"step": 8, **figures}]}


def test_best_of_the_search(tmp_path: Path) -> None:
    """The best mean over the search's seeds wins; before every factor is done, the known one stands."""
    (side,) = [row for row in staleness.rows_of("mnist", StalenessSettings()) if row.label == PLAIN]
    records = [
        mnist_record(scaled_label(PLAIN, factor), seed, loss=loss)
        for factor in FACTORS
        for seed, loss in zip(SEARCH_SEEDS, (1.0, 0.6 if factor == 0.25 else 1.5 - factor / 10), strict=True)
    ]
    known = {("mnist", PLAIN): 0.125}
    half = run_of(StalenessSettings(), tmp_path / "half", records[:-1])
    assert best_factors(half, [side], known, figure="loss", least=True) == known
    run = run_of(StalenessSettings(), tmp_path / "run", records)
    assert best_factors(run, [side], known, figure="loss", least=True) == {("mnist", PLAIN): 0.25}
    assert best_factors(run, [side], {}, figure="loss", least=False) == {("mnist", PLAIN): 1 / 32}
    assert searched(run, side, "loss")[0.25] == pytest.approx(0.8)
    table = search_table(run, [side], "loss")
    assert table is not None
    assert table.head == ("", "x1/32", "x1/16", "x1/8", "x1/4", "x1/2", "x1", "x2", "x4")
    assert table.rows[0][0] == PLAIN
    assert search_table(run_of(StalenessSettings(), tmp_path / "none", []), [side], "loss") is None
    # The search is no row of the results.
    assert staleness.summarise(run) is None


def test_a_scaled_training_says_so() -> None:
    """Once is the training itself; else the label has the factor, and the step size is multiplied."""
    (side,) = [row for row in staleness.rows_of("mnist", StalenessSettings()) if row.label == DEFAULT]
    assert scaled(side, 1.0) is side
    eighth = scaled(scaled(side, 0.5), 0.25)
    assert eighth.remedy.step_size == 0.125
    assert scaled(side, 0.125).label == f"{DEFAULT}, step sizes times 1/8"
    assert scaled(side, 4.0).label == f"{DEFAULT}, step sizes times 4"


@pytest.mark.parametrize("settings", [StalenessSettings, MnistSettings])
def test_seeds_of_the_search_are_not_reported(settings: Any) -> None:
    settings(seed=995, seeds=5)
    with pytest.raises(ValueError, match="seeds must be below 1000, where those of searches begin, got 1000"):
        settings(seed=996, seeds=5)


def test_what_a_row_loses(tmp_path: Path) -> None:
    """Over what plain asynchrony loses, seed by seed, each with its best step sizes; the bar is of that."""
    tuned = {row: scaled_label(row, staleness.BEST.get(("mnist", row), 1.0)) for row in staleness.SEARCHED}
    losses = {
        ONE: [0.4, 0.5],
        ONE_DEFAULT: [0.4, 0.5],
        PLAIN: [1.4, 1.5],
        DEFAULT: [0.7, 0.68],
        tuned[PLAIN]: [1.0, 1.1],
        tuned[NO_MOMENT]: [0.8, 0.9],
        MANY_ONE: [0.3],
        MANY: [1.3],
        MANY_DEFAULT: [0.5],
    }
    assert tuned[PLAIN] != PLAIN
    records = [
        mnist_record(label, seed, loss=loss, accuracy=0.5)
        for label, own in losses.items()
        for seed, loss in enumerate(own)
    ]
    records.append(mnist_record(DEFAULT, 2, loss=9.0, accuracy=0.1))  # a seed that the others lack does not count
    run = run_of(StalenessSettings(), tmp_path / "run", records)
    shares = staleness.lost_shares(staleness.last_losses(run)["mnist"], DEFAULT, tuned[PLAIN])
    np.testing.assert_allclose(shares, [0.5, 0.3])
    result = staleness.summarise(run)
    assert result is not None
    figures = result.figures
    assert figures["mnist_default_lost_share"] == pytest.approx(0.4)
    assert figures["mnist_no_moment_lost_share"] == pytest.approx((0.4 / 0.6 + 0.4 / 0.6) / 2)
    assert figures["mnist_untuned_default_lost_share"] == pytest.approx((0.3 + 0.18) / 2)
    assert figures["mnist_default_minus_plain"] == pytest.approx(-0.36)
    assert figures["mnist_one_trainer_difference"] == 0
    assert figures["mnist_many_lost_share"] == pytest.approx(0.2)
    lost, more = ({row[0]: row[column] for row in result.tables[0].rows} for column in (-1, -2))
    assert (more[ONE], more[MANY]) == ("", "+1.000")
    assert lost[MANY_DEFAULT] == "0.20"
    # 0.3 and 0.5 are two values with a wide interval, which holds the bar.
    assert (result.missed_bars, result.headline["bars_not_decided"]) == ([], ["mnist_default_lost_share"])
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


def test_leads_and_costs(tmp_path: Path) -> None:
    """The lead is of models that have each their best step sizes; the cost of failures is of the authors' program."""
    dense, authors = label_of(None, SLOW), label_of(256, SLOW, AUTHORS)
    tuned = {label: scaled_label(label, convergence.SEARCHED[label]) for label in (dense, authors)}
    found = {
        dense: [0.2, 0.2],
        tuned[dense]: [0.6, 0.61],
        authors: [0.7, 0.74],
        tuned[authors]: [0.72, 0.75],
        label_of(256, FAILING, AUTHORS): [0.69, 0.72],
        label_of(256, SLOW, REMEDIED): [0.5, 0.5],
    }
    records = [
        mnist_record(label, seed, accuracy=value) for label, own in found.items() for seed, value in enumerate(own)
    ]
    result = convergence.summarise(run := run_of(MnistSettings(extras=True), tmp_path / "run", records))
    assert result is not None
    figures = result.figures
    assert figures["lead"] == pytest.approx(0.13)
    assert figures["lead_interval"] == pytest.approx((0.13 - 12.706 * 0.01, 0.13 + 12.706 * 0.01), abs=1e-4)
    assert figures["lead_untuned"] == pytest.approx(0.52)
    assert figures["failures_cost"] == pytest.approx(0.015)
    assert figures["lead_remedies"] == pytest.approx(-0.105)
    assert (result.missed_bars, result.headline["bars_not_decided"]) == ([], ["failures_cost"])
    assert {row[0]: row[2] for row in result.tables[0].rows}[tuned[dense]] == "0.605 +- 0.007"
    assert len(convergence.draw(run, result).axes) == 3
    # A mixture of other sizes has no such bars.
    other = MnistSettings(experts=(64,))
    records = [mnist_record(label_of(64, SLOW), 0, accuracy=0.5)]
    alone = convergence.summarise(run_of(other, tmp_path / "other", records))
    assert alone is not None
    assert alone.bars == ()
