"""Runs that are made, the search's use of its own, and the conclusions that several seeds allow."""

import math
from pathlib import Path
from typing import Any

import pytest

from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.run_folder import RunFolder
from experiments.transformer_xl.search import best_factors, has_ended, search_results, step_size_table, tried
from experiments.transformer_xl.settings import TransformerXLSettings
from experiments.transformer_xl.trainings import compared_trainings, search_trainings
from experiments.transformer_xl.verdict import difference_table, final_table, merged_headline, verdicts

OUT = Path("out")


def test_how_many_seeds() -> None:
    """Three for several models over a whole simulated run; one where the run is short or long; or as asked."""
    assert TransformerXLSettings().num_seeds == 3
    for one in ({"quick": True}, {"steps": 100}, {"model": ("dmoe",)}, {"size": "full"}, {"where": "local"}):
        assert TransformerXLSettings(**one).num_seeds == 1  # type: ignore[arg-type]
    assert TransformerXLSettings(quick=True, seeds=5).num_seeds == 5


def test_every_model_has_every_seed() -> None:
    """All labels with the first seed before the second; each alone in its folder, with step sizes of its own."""
    settings = TransformerXLSettings(model=("dmoe", "small"), seed=7, seeds=2, ingredients=True, search=True)
    found = compared_trainings(settings, OUT, {"dmoe": 2.0, "small": 0.5, "dmoe-stale": 4.0})
    labels = ["dmoe", "small", "dmoe-synchronous", "dmoe-stale", "dmoe-failing"]
    assert [str(each.settings.out) for each in found] == [f"out/{label}/seed{n}" for n in (7, 8) for label in labels]
    assert [each.settings.seed for each in found] == [7] * 5 + [8] * 5
    assert [each.settings.step_size for each in found[:5]] == [2.0, 0.5, 1.0, 4.0, 1.0]
    assert [each.settings.model for each in found[:3]] == [("dmoe",), ("small",), ("dmoe",)]
    assert not any(each.settings.search or each.settings.ingredients or each.may_fail for each in found)
    asynchronous = [(each.settings.concurrency, each.settings.failure_rate) for each in found[:5]]
    assert asynchronous == [(None, 0.1), (None, 0.1), (1, 0.0), (None, 0.0), (1, 0.1)]


def test_the_search_has_a_seed_of_its_own() -> None:
    """As many step sizes for each model, none on a seed that is reported; its length may be another."""
    settings = TransformerXLSettings(model=("dmoe", "base"), seed=2, seeds=1000, search=True, search_steps=50)
    found = search_trainings(settings, OUT)
    assert list(found) == [(model, factor) for factor in (0.5, 1.0, 2.0) for model in ("dmoe", "base")]
    assert {(each.settings.seed, each.settings.steps, each.may_fail) for each in found.values()} == {(1002, 50, True)}
    assert found["base", 0.5].settings.out == OUT / "search" / "base" / "x0.5"
    both = TransformerXLSettings(model=("dmoe",), search=True, ingredients=True)
    alone = search_trainings(both, OUT)["dmoe-synchronous", 2.0].settings
    assert (alone.step_size, alone.concurrency, alone.failure_rate) == (2.0, 1, 0.0)
    assert 1002 not in {each.settings.seed for each in compared_trainings(settings, OUT)}


def test_the_best_of_the_search(tmp_path: Path) -> None:
    """The least perplexity wins, a run that failed loses to any, and nothing is chosen before all have ended."""
    settings = TransformerXLSettings(model=("small",), search=True)
    folders = [RunFolder.create(each.settings.out, {}) for each in search_trainings(settings, tmp_path).values()]
    folders[0].log("headline", validation_perplexity=310.0, complete=True)
    folders[1].log("event", name="failed", detail="NaN")
    folders[1].log("headline", validation_perplexity=1.0, complete=False)
    folders[2].log("headline", validation_perplexity=1.0, complete=False)
    assert search_results(settings, tmp_path) == {"small": {0.5: 310.0, 1.0: math.inf, 2.0: None}}
    assert best_factors(search_results(settings, tmp_path)) is None
    folders[2].log("headline", validation_perplexity=320.0, complete=True)
    # The least is the best: a smaller one is tried, and so on, six values at most.
    for factor, perplexity in ((0.25, 300.0), (0.125, 290.0), (0.0625, 280.0)):
        assert search_results(settings, tmp_path)["small"][factor] is None
        folder = RunFolder.create(tmp_path / "search" / "small" / f"x{factor:g}", {})
        folder.log("headline", validation_perplexity=perplexity, complete=True)
    searched = search_results(settings, tmp_path)
    assert tried(searched) == [0.5, 1.0, 2.0, 0.25, 0.125, 0.0625]
    assert best_factors(searched) == {"small": 0.0625}
    table = step_size_table(settings, searched)
    assert table.rows[0][:2] == ["small", pytest.approx(0.0625 * 4 * 8e-4)]
    assert table.rows[0][3] == (
        "x0.0625: 280, x0.125: 290, x0.25: 300, x0.5: 310, x1: failed, x2: 320 "
        "(the best is at the edge of what was tried)"
    )
    with pytest.raises(UsageError, match="small: every run of the search failed"):
        best_factors({"small": {0.5: math.inf, 1.0: math.inf}})


def test_one_model_at_the_edge_is_enough(tmp_path: Path) -> None:
    """All models try the further value; then, where no best is at the edge, the search has ended."""
    settings = TransformerXLSettings(model=("small", "base"), search=True)
    values = {0.5: (3.0, 3.0), 1.0: (1.0, 2.0), 2.0: (2.0, 1.0), 4.0: (9.0, 4.0)}
    for factor, perplexities in values.items():
        assert not has_ended(searched := search_results(settings, tmp_path))
        assert tried(searched) == [0.5, 1.0, 2.0] + [4.0] * (factor == 4)
        for model, perplexity in zip(settings.models, perplexities, strict=True):
            folder = RunFolder.create(tmp_path / "search" / model / f"x{factor:g}", {})
            folder.log("headline", validation_perplexity=perplexity, complete=True)
    searched = search_results(settings, tmp_path)
    assert has_ended(searched)
    assert best_factors(searched) == {"small": 1.0, "base": 2.0}


def finished(**labels: list[float]) -> dict[str, dict[int, dict[str, Any]]]:
    return {
        label: {seed: {"validation_perplexity": value, "test_perplexity": value - 10} for seed, value in enumerate(own)}
        for label, own in labels.items()
    }


def test_what_the_seeds_show() -> None:
    """Differences -10, -11, -12 have the mean -11 and the interval -11 +- 4.303 / sqrt(3) = 2.484; those of base hold
    0. Seeds that only one model has do not count."""
    found = verdicts(finished(dmoe=[290.0, 300.0, 280.0, 1.0], small=[300.0, 311.0, 292.0], base=[291.0, 280.0, 290.0]))
    assert found["dmoe_minus_small"] == pytest.approx(-11)
    assert found["dmoe_minus_small_interval"] == pytest.approx((-13.484, -8.516), abs=1e-3)
    assert (found["dmoe_beats_small"], found["dmoe_beats_base"]) == (True, False)
    assert found["dmoe_against_small"] == ("dmoe ends below small: -11.0, 95 % interval -13.5 to -8.5 over 3 seeds")
    assert found["dmoe_against_base"].startswith("it does not show that dmoe ends below base, nor above: +3.0, 95 %")
    assert verdicts(finished(dmoe=[3.0, 4.1], small=[1.0, 2.0]))["dmoe_against_small"].startswith("dmoe ends above")


def test_one_seed_shows_nothing() -> None:
    """However far apart the models are; and without dmoe there is nothing to compare."""
    found = verdicts(finished(dmoe=[1.0], small=[300.0]))
    assert (found["dmoe_beats_small"], found["dmoe_minus_small_interval"]) == (False, None)
    assert found["dmoe_against_small"] == "dmoe - small: -299.0 with one seed, which shows nothing"
    assert difference_table(finished(small=[1.0, 2.0])) is None


def test_the_runs_of_a_label_in_one() -> None:
    """Means with their interval, sums of failures, complete if all are; 4 +- 12.706 * sqrt(2) / sqrt(2)."""
    runs = [
        {"validation_perplexity": 3.0, "failures": {"late": 2}, "complete": True, "steps": 8, "virtual_s": None},
        {"validation_perplexity": 5.0, "failures": {"late": 1, "timeout": 4}, "complete": False, "steps": 8},
    ]
    names = ("validation_perplexity", "failures", "complete", "steps", "virtual_s")
    assert merged_headline(runs, names) == {
        "seeds": 2,
        "validation_perplexity": 4.0,
        "failures": {"late": 3, "timeout": 4},
        "complete": False,
        "steps": 8,
        "virtual_s": None,
        "validation_perplexity_interval": pytest.approx((4 - 12.706, 4 + 12.706)),
    }
    (row,) = final_table(finished(small=[3.0, 5.0])).rows
    assert row == ["small", 2, "4 (-8.706 to 16.71)", "0: 3, 1: 5", "-6 (-18.71 to 6.706)"]
