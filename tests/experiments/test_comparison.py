"""Runs side by side: the figures of one, their means over seeds, the table, the picture and the report."""

import json
import math
import random
from typing import Any

import numpy as np
import pytest

from experiments.comparison import comparison_headline, comparison_table, draw_comparison
from experiments.run_summary import deviation, perplexity_curve, summarise_run
from tests.dmoe_jax.figure_texts import assert_readable, words_of

Record = dict[str, Any]
NAMES = ("product_key", "flat_top_k", "noisy_top_k", "switch", "expert_choice", "hash", "frozen_random", "peer")


def run_metrics(seed: int, *, gain: float = 1.5, is_mixture: bool = True, is_simulated: bool = True) -> list[Record]:
    """A made-up run of 120 steps; a dense model has neither calls nor load."""
    rng = random.Random(seed)
    metrics: list[Record] = [{"kind": "baseline", "unigram_perplexity": 965.09}]
    for step in range(1, 121):
        loss = 7.4 - gain * (1 - math.exp(-step / 30)) + 0.02 * rng.random()
        metrics.append({"kind": "train", "step": step, "loss": loss, "items": 2048, "time_s": 0.5 * step})
        if step % 30 == 0:
            virtual = {"virtual_s": 3.0 * step} if is_simulated else {}
            metrics.append({"kind": "eval", "step": step, "split": "valid", "perplexity": math.exp(loss), **virtual})
            if is_mixture:
                metrics.append({"kind": "calls", "step": step, "time_s": 0.5 * step, "ok": 9 * step, "failed": step})
                figures = {"cv": rng.random(), "entropy": rng.random(), "dead": 1, "histogram": [0, 3]}
                metrics.append({"kind": "balance", "step": step, "layer": "layer0", **figures})
    return metrics


SMALL: list[Record] = [
    {"kind": "baseline", "unigram_perplexity": 900.0},
    {"kind": "train", "step": 1, "items": 10, "time_s": 1.0, "staleness": 0, "loss": 2.0},
    {"kind": "balance", "step": 1, "layer": "layer0", "cv": 9.0, "entropy": 0.1, "dead": 3, "histogram": [0, 0, 0, 1]},
    {"kind": "eval", "step": 1, "perplexity": 500.0, "virtual_s": 4.0},
    {"kind": "calls", "step": 1, "time_s": 1.0, "ok": 5, "failed": 1},
    {"kind": "train", "step": 2, "items": 30, "time_s": 5.0, "staleness": 3, "loss": None},
    {"kind": "calls", "step": 2, "time_s": 5.0, "ok": 15, "failed": 5},
    {"kind": "balance", "step": 2, "layer": "layer0", "cv": 0.5, "entropy": 0.8, "dead": 1, "histogram": [0, 1, 1, 1]},
    {"kind": "balance", "step": 2, "layer": "layer1", "cv": 0.7, "entropy": None, "dead": 2, "histogram": [0, 0, 1, 1]},
    {"kind": "eval", "step": 2, "perplexity": 410.0, "split": "valid", "virtual_s": 9.0},
    {"kind": "eval", "step": 2, "perplexity": 400.0, "split": "valid", "items_seen": 44, "virtual_s": 9.0},
    {"kind": "eval", "step": 2, "perplexity": 450.0, "split": "test", "virtual_s": None},
    {"kind": "eval", "step": 3, "perplexity": None},
]


def test_summary_by_hand() -> None:
    """Last evaluations, the last window's balance, all calls, means and totals."""
    found = summarise_run(SMALL)
    assert (found.perplexity, found.test_perplexity) == (400.0, 450.0)
    assert found.final_load_cv == pytest.approx(0.6)
    assert found.final_load_entropy == pytest.approx(0.8)  # of the layer that knows it
    assert found.final_dead_experts == 3
    assert found.calls_lost == pytest.approx(5 / 20)
    assert found.staleness == pytest.approx(1.5)
    assert (found.virtual_s, found.wall_s, found.tokens_per_s) == (9.0, 5.0, 8.0)
    assert summarise_run([*SMALL, {"kind": "headline", "tokens_per_s": 21.5}]).tokens_per_s == 21.5


def test_summary_of_nothing() -> None:
    """What was not measured is not known, instead of 0."""
    empty = summarise_run([])
    assert {getattr(empty, name) for name in empty.__slots__} == {None}


def test_curve_by_hand() -> None:
    """Tokens as the evaluation says, else those of the steps until then; the last evaluation of a step counts."""
    assert perplexity_curve(SMALL) == {1.0: (10.0, 500.0), 2.0: (44.0, 400.0)}


def test_deviation_by_hand() -> None:
    """1, 2 and 6 have the mean 3: sqrt((4 + 1 + 9) / 2). A single run has none."""
    assert deviation(np.array([1.0, 2.0, 6.0])) == pytest.approx(math.sqrt(7))
    assert deviation(np.array([1.0])) is None


def test_table_by_hand() -> None:
    """Means and the deviation of perplexities over seeds; columns without any figure are left out."""
    other = [{"kind": "eval", "step": 2, "perplexity": 380.0}, {"kind": "calls", "time_s": 1, "ok": 1, "failed": 1}]
    dense = [{"kind": "eval", "step": 1, "perplexity": 512.3456}]
    table = comparison_table({"dmoe": [SMALL, other], "small": [dense], "none": [[]]})
    assert table.head == (
        "",
        "runs",
        "validation perplexity",
        "test perplexity",
        "final load cv",
        "final load entropy",
        "idle experts",
        "calls lost",
        "staleness",
        "virtual time (s)",
        "wall time (s)",
        "tokens/s",
    )
    # sqrt(2 * 10^2 / 1) = 14.14; calls lost: (1/4 + 1/2) / 2.
    calls_lost, rest = 0.375, [1.5, 9.0, 5.0, 8.0]
    assert list(table.rows[0]) == ["dmoe", 2, "390 ± 14.1", 450.0, pytest.approx(0.6), 0.8, 3.0, calls_lost, *rest]
    assert list(table.rows[1]) == ["small", 1, "512.3", *[None] * 9]
    assert list(table.rows[2]) == ["none", 1, None, *[None] * 9]
    assert comparison_table({"small": [dense]}).head == ("", "runs", "validation perplexity")


def test_headline_is_plain() -> None:
    """Means by label with their deviation, fit for JSON, None where nothing is known."""
    headline = comparison_headline({"dmoe": [SMALL, [{"kind": "eval", "step": 2, "perplexity": 380.0}]], "none": [[]]})
    assert json.loads(json.dumps(headline, allow_nan=False)) == headline
    assert headline["dmoe"]["runs"] == 2
    assert headline["dmoe"]["perplexity"] == 390.0
    assert headline["dmoe"]["perplexity_std"] == pytest.approx(math.sqrt(200))
    assert headline["dmoe"]["test_perplexity"] == 450.0
    assert headline["none"]["perplexity"] is None


def several(names: tuple[str, ...], seeds: int = 3) -> dict[str, list[list[Record]]]:
    return {
        name: [run_metrics(10 * index + seed, gain=1.6 - 0.03 * index) for seed in range(seeds)]
        for index, name in enumerate(names)
    }


CASES: dict[str, dict[str, list[list[Record]]]] = {
    "three routers": several(NAMES[:3]),
    "many routers": several((*NAMES, "uniform_random", "product_key+noise+balancing")),
    "thirty": several(tuple(f"router{number}" for number in range(30)), seeds=1),
    "one": several(NAMES[:1], seeds=1),
    "mixture and dense": {
        "dmoe": [run_metrics(0)],
        "small": [run_metrics(1, gain=1.4, is_mixture=False)],
        "base": [run_metrics(2, is_mixture=False)],
    },
    "dense": {"small": [run_metrics(0, is_mixture=False, is_simulated=False)]},
    "local and simulated": {"a": [run_metrics(0)], "b": [run_metrics(1, is_simulated=False)]},
    "one evaluation": {"a": [SMALL[:4]], "b": [SMALL[:4]]},
    "not below the baseline": {"a": [run_metrics(0, gain=0.1)], "b": [run_metrics(1, gain=0.0)]},
    "one has no evaluation": {"a": [SMALL], "b": [SMALL[:2]]},
}


@pytest.mark.parametrize("runs", CASES.values(), ids=CASES.keys())
def test_figure_is_readable(runs: dict[str, list[list[Record]]]) -> None:
    """However many labels and seeds, and whatever is missing, it is drawn without a warning and can be read."""
    assert_readable(draw_comparison(runs, "A made-up comparison"))


def test_panels_without_data_are_left_out() -> None:
    """Dense models have no balance and no calls; virtual time is compared only where all have it."""

    def titles(name: str) -> list[str]:
        return [axes.get_title(loc="left") for axes in draw_comparison(CASES[name]).axes]

    curves = "Validation perplexity (log scale)"
    strips = ["Perplexity", "Load cv", "Load entropy", "Calls lost"]
    assert titles("three routers") == [curves, *strips, "Virtual time"]
    assert titles("local and simulated") == [curves, *strips, "Time"]
    assert titles("dense") == [curves, "Perplexity", "Time"]
    assert [axes.get_title(loc="left") for axes in draw_comparison({"a": [[]]}).axes] == [curves]


def test_curves_are_means_with_a_band() -> None:
    """At steps that all seeds have: mean of tokens and perplexities, band from the least to the greatest."""
    one = [{"kind": "eval", "step": s, "perplexity": p, "items_seen": 10 * s} for s, p in ((1, 90.0), (2, 60.0))]
    two = [{"kind": "eval", "step": s, "perplexity": p, "items_seen": 12 * s} for s, p in ((1, 70.0), (3, 50.0))]
    figure = draw_comparison({"a": [one, two, []], "b": [one]})
    curves = figure.axes[0].lines
    np.testing.assert_allclose(curves[0].get_xydata(), [[11.0, 80.0]])
    np.testing.assert_allclose(curves[-1].get_xydata(), [[10.0, 90.0], [20.0, 60.0]])
    (band,) = figure.axes[0].collections
    assert (band.get_datalim(figure.axes[0].transData).y0, band.get_datalim(figure.axes[0].transData).y1) == (70, 90)
    assert {"a 80", "b 60"} <= words_of(figure)


@pytest.mark.parametrize("runs", [{}, {"a": [SMALL], "b": []}])
def test_nothing_to_compare(runs: dict[str, list[list[Record]]]) -> None:
    """No label, or a label without a run, is a mistake of the caller."""
    with pytest.raises(ValueError, match=r"with a run or more each, got \{"):
        draw_comparison(runs)
