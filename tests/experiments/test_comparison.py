"""Runs side by side: the figures of one, their means over seeds, the table, the picture and the report."""

import math
from typing import Any

import numpy as np
import pytest

from experiments.comparison import comparison_table
from experiments.run_summary import balance_lines, deviation, perplexity_curve, summarise_run

Record = dict[str, Any]


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


def test_balance_lines_by_hand() -> None:
    """In the order of layers and steps, the last record of a step counts, and what is not known is NaN."""
    metrics: list[Record] = [
        {"kind": "balance", "step": 20, "layer": "layer10", "cv": 1.0, "entropy": 0.5, "dead": 1, "histogram": [0, 2]},
        {"kind": "balance", "step": 10, "layer": "layer9", "cv": None, "entropy": None, "dead": 2, "histogram": [0, 0]},
        {"kind": "balance", "step": 20, "layer": "layer9", "cv": 0.7, "entropy": 0.6, "dead": 2, "histogram": [0, 1]},
        {"kind": "balance", "step": 20, "layer": "layer9", "cv": 0.8, "entropy": 0.9, "dead": 0, "histogram": [1, 3]},
    ]
    lines = balance_lines(metrics)
    assert lines.layers == ("layer9", "layer10")
    np.testing.assert_array_equal(lines.steps, [10, 20])
    np.testing.assert_array_equal(lines.cv, [[np.nan, 0.8], [np.nan, 1.0]])
    np.testing.assert_array_equal(lines.entropy, [[np.nan, 0.9], [np.nan, 0.5]])
    assert (lines.dead, lines.experts) == (1, 4)
    assert balance_lines([]).layers == ()
