"""Runs that are made, the search's use of its own, and the conclusions that several seeds allow."""

import math
from pathlib import Path
from typing import Any

import pytest

from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.run_folder import RunFolder
from experiments.bench import FACTORS
from experiments.transformer_xl.measurement import mean_headline, models_table, verdicts
from experiments.transformer_xl.settings import TransformerXLSettings
from experiments.transformer_xl.trainings import (
    best_factors,
    compared_trainings,
    search_results,
    search_trainings,
)

OUT = Path("out")


def test_how_many_seeds() -> None:
    """Three for several models over a whole simulated run; one where the run is short or long; or as asked."""
    assert TransformerXLSettings().num_seeds == 3
    for one in ({"quick": True}, {"steps": 100}, {"model": ("dmoe",)}, {"size": "full"}, {"where": "local"}):
        assert TransformerXLSettings(**one).num_seeds == 1  # type: ignore[arg-type]
    assert TransformerXLSettings(quick=True, seeds=5).num_seeds == 5


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"where": "swarm", "model": ("dmoe", "small")}, "--where swarm is for --model dmoe alone, got dmoe small"),
        ({"where": "emulated", "concurrency": 1}, "--concurrency is for --model dmoe alone"),
        ({"ingredients": True}, "--ingredients needs dmoe and --where emulated, got dmoe small base, simulated"),
        ({"model": ("dmoe", "dmoe")}, "--model names a model twice"),
    ],
)
def test_flags_that_do_not_fit_each_other(wrong: dict[str, Any], line: str) -> None:
    """Told before anything is trained, with the flag."""
    with pytest.raises(ValueError, match=line):
        TransformerXLSettings(**wrong)


def test_every_model_has_every_seed() -> None:
    """All labels with the first seed before the second; each alone in its folder, with step sizes of its own."""
    models: Any = {"model": ("dmoe", "small"), "where": "emulated", "ingredients": True}
    settings = TransformerXLSettings(**models, seed=7, seeds=2, search=True)
    found = compared_trainings(settings, OUT, {"dmoe": 2.0, "small": 0.5, "dmoe-stale": 4.0})
    labels = ["dmoe", "small", "dmoe-synchronous", "dmoe-stale", "dmoe-failing"]
    assert [str(each.settings.out) for each in found] == [f"out/{label}/seed{n}" for n in (7, 8) for label in labels]
    assert [each.settings.seed for each in found] == [7] * 5 + [8] * 5
    assert [each.settings.step_size for each in found[:5]] == [2.0, 0.5, 1.0, 4.0, 1.0]
    assert [each.settings.model for each in found[:3]] == [("dmoe",), ("small",), ("dmoe",)]
    assert not any(each.settings.search or each.settings.ingredients or each.may_fail for each in found)
    asynchronous = [(each.settings.concurrency, each.settings.failure_rate) for each in found[:5]]
    assert asynchronous == [(None, 0.1), (None, 0.1), (1, 0.0), (None, 0.0), (1, 0.1)]


def test_the_search_has_one_grid_and_a_seed_of_its_own() -> None:
    """The same step sizes for each model, none on a seed that is reported, no longer than what is reported."""
    settings = TransformerXLSettings(model=("dmoe", "base"), seed=2, seeds=1000, search=True)
    found = search_trainings(settings, OUT)
    assert list(found) == [(model, 2.0**power) for power in range(-5, 3) for model in ("dmoe", "base")]
    assert {(each.settings.seed, each.settings.steps, each.may_fail) for each in found.values()} == {(1002, 2000, True)}
    assert found["base", 0.5].settings.out == OUT / "search" / "base" / "x0.5"
    assert found["base", 0.5].settings.step_size == 0.5
    assert 1002 not in {each.settings.seed for each in compared_trainings(settings, OUT)}
    short = search_trainings(TransformerXLSettings(search=True, steps=50), OUT)
    assert {each.settings.steps for each in short.values()} == {50}


def test_the_best_of_the_search(tmp_path: Path) -> None:
    """The least perplexity wins, a run that failed loses to any, and nothing is chosen before all have ended."""
    settings = TransformerXLSettings(model=("small",), search=True)
    trainings = search_trainings(settings, tmp_path)
    folders = [RunFolder.create(each.settings.out, {}) for each in trainings.values()]
    values = (390.0, 370.0, 350.0, 310.0, 290.0, 300.0, None, math.inf)
    for folder, perplexity in zip(folders, values[:6], strict=False):
        folder.log("headline", validation_perplexity=perplexity, complete=True)
    folders[6].log("headline", validation_perplexity=1.0, complete=False)
    folders[7].log("event", name="failed", detail="NaN")
    folders[7].log("headline", validation_perplexity=1.0, complete=False)
    searched = search_results(trainings)
    assert searched == {"small": dict(zip(FACTORS, values, strict=True))}
    assert best_factors(searched) is None
    folders[6].log("headline", validation_perplexity=320.0, complete=True)
    searched = search_results(trainings)
    assert best_factors(searched) == {"small": 0.5}
    ((*_, rates),) = models_table(settings, {}, {"small": []}, {"small": 1.0}, searched).rows
    # Half of 8e-4, and of four times that where trainers are stale.
    assert rates.startswith("0.0016; x0.03125: 390, ")
    assert rates.endswith("x0.25: 310, x0.5: 290, x1: 300, x2: 320, x4: failed")
    with pytest.raises(UsageError, match="small: every run of the search failed"):
        best_factors({"small": {0.5: math.inf, 1.0: math.inf}})


def finished(**labels: list[float]) -> dict[str, dict[int, dict[str, Any]]]:
    return {
        label: {seed: {"validation_perplexity": value, "test_perplexity": value - 10} for seed, value in enumerate(own)}
        for label, own in labels.items()
    }


def test_what_the_seeds_show() -> None:
    """Differences -10, -11, -12 have the mean -11 and the interval -11 +- 4.303 / sqrt(3) = 2.484; those of base hold
    0. Seeds that only one model has do not count, and one seed decides nothing, however far apart the models are."""
    found = verdicts(finished(dmoe=[290.0, 300.0, 280.0, 1.0], small=[300.0, 311.0, 292.0], base=[291.0, 280.0, 290.0]))
    assert found["dmoe_minus_small"] == pytest.approx(-11)
    assert found["dmoe_minus_small_interval"] == pytest.approx((-13.484, -8.516), abs=1e-3)
    assert (found["dmoe_below_small"], found["dmoe_below_base"]) == ("met", "not decided")
    assert verdicts(finished(dmoe=[3.0, 4.1], small=[1.0, 2.0]))["dmoe_below_small"] == "missed"
    assert verdicts(finished(dmoe=[1.0], small=[300.0])) == {
        "dmoe_minus_small": -299.0,
        "dmoe_minus_small_interval": None,
        "dmoe_below_small": "not decided",
    }
    assert verdicts(finished(small=[1.0, 2.0])) == {}


def test_the_runs_of_a_label_in_one() -> None:
    """Means of the numbers, with intervals of the perplexities; 4 +- 12.706 * sqrt(2) / sqrt(2)."""
    runs = [
        {"seed": 0, "validation_perplexity": 3.0, "failures": {"late": 2}, "complete": True, "steps": 8, "load": 0.5},
        {"seed": 1, "validation_perplexity": 5.0, "failures": {}, "complete": True, "steps": 8, "load": None},
    ]
    interval = pytest.approx((4 - 12.706, 4 + 12.706), abs=1e-3)
    means = {"validation_perplexity": 4.0, "validation_perplexity_interval": interval, "steps": 8.0, "load": 0.5}
    assert mean_headline(runs) == {"seeds": 2, **means}
    (row,) = models_table(TransformerXLSettings(), finished(small=[3.0, 5.0]), {"small": []}, {"small": 2e6}, {}).rows
    assert row == ["small", "4 (-8.706 to 16.71)", "0: 3, 1: 5", "-6 (-18.71 to 6.706)", 2.0, None, "0.0032"]
