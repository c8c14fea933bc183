"""Runs side by side: the figures of one, their means over seeds, the table."""

import io
from typing import Any

import pytest
from rich.console import Console

from experiments.comparison import comparison_headline, comparison_table, draw_comparison, terminal_table
from experiments.run_summary import last_balances, perplexity_curve, summarise_run

Record = dict[str, Any]


SMALL: list[Record] = [
    {"kind": "baseline", "unigram_perplexity": 900.0},
    {"kind": "train", "step": 1, "items": 10, "time_s": 1.0, "loss": 2.0},
    {"kind": "balance", "step": 1, "layer": "layer0", "entropy": 0.1, "dead": 3},
    {"kind": "eval", "step": 1, "perplexity": 500.0, "virtual_s": 4.0},
    {"kind": "calls", "step": 1, "time_s": 1.0, "ok": 5, "failed": 1},
    {"kind": "train", "step": 2, "items": 30, "time_s": 5.0, "loss": None},
    {"kind": "calls", "step": 2, "time_s": 5.0, "ok": 15, "failed": 5},
    {"kind": "balance", "step": 2, "layer": "layer0", "entropy": 0.8, "dead": 1},
    {"kind": "balance", "step": 2, "layer": "layer1", "entropy": None, "dead": 2},
    {"kind": "eval", "step": 2, "perplexity": 410.0, "split": "valid", "virtual_s": 9.0},
    {"kind": "eval", "step": 2, "perplexity": 400.0, "split": "valid", "items_seen": 44, "virtual_s": 9.0},
    {"kind": "eval", "step": 2, "perplexity": 450.0, "split": "test", "virtual_s": None},
    {"kind": "eval", "step": 3, "perplexity": None},
]
OTHER: list[Record] = [
    {"kind": "eval", "step": 2, "perplexity": 380.0},
    {"kind": "calls", "time_s": 1, "ok": 1, "failed": 1},
]


def test_summary_by_hand() -> None:
    """Last evaluations, the last window's balance, all calls."""
    found = summarise_run(SMALL)
    assert (found.perplexity, found.test_perplexity) == (400.0, 450.0)
    assert found.final_load_entropy == pytest.approx(0.8)  # of the layer that knows it
    assert found.final_dead_experts == 3
    assert found.calls_lost == pytest.approx(5 / 20)
    assert (found.virtual_s, found.wall_s) == (9.0, 5.0)


def test_curve_by_hand() -> None:
    """Tokens as the evaluation says, else those of the steps until then; the last evaluation of a step counts."""
    assert perplexity_curve(SMALL) == {1.0: (10.0, 500.0), 2.0: (44.0, 400.0)}


def test_table_by_hand() -> None:
    """Means and the deviation of perplexities over seeds; columns without any figure are left out."""
    dense = [{"kind": "eval", "step": 1, "perplexity": 512.3456}]
    runs = {"dmoe": [SMALL, OTHER], "small": [dense], "none": [[]]}
    table = comparison_table(runs)
    head = ("", "runs", "validation perplexity", "test perplexity", "final load entropy", "idle experts", "calls lost")
    assert table.head == (*head, "virtual time (s)", "wall time (s)")
    # sqrt(2 * 10^2 / 1) = 14.14; calls lost: (1/4 + 1/2) / 2.
    assert list(table.rows[0]) == ["dmoe", 2, "390 ± 14.1", 450.0, 0.8, 3.0, 0.375, 9.0, 5.0]
    assert list(table.rows[1]) == ["small", 1, "512.3", *[None] * 6]
    assert list(table.rows[2]) == ["none", 1, None, *[None] * 6]
    assert comparison_table({"small": [dense]}).head == ("", "runs", "validation perplexity")
    ours = comparison_headline(runs)["dmoe"]
    assert (ours["runs"], ours["perplexity"], ours["perplexity_std"]) == (2, 390.0, pytest.approx(14.142, abs=1e-3))


def test_picture_shows_curves_and_final_figures() -> None:
    """A line for each label with an evaluation and one for the unigrams; a ring for each seed and a dot at the mean."""
    curves, finals = draw_comparison({"dmoe": [SMALL, OTHER], "none": [[]]}, "Title").axes
    assert [list(line.get_ydata()) for line in curves.lines[:1]] == [[390.0]]  # both have step 2 alone
    assert len(curves.lines) == 2
    assert [list(line.get_xdata()) for line in finals.lines] == [[400.0, 380.0], [390.0], []]


def test_the_words_that_perplexities_are_over_are_told() -> None:
    """Those of the end in the note and under the picture; those of the curve's points where they are others."""
    task: Record = {"kind": "task", "unit": "tokens", "meaning": "vocabulary: 9 words, ab"}
    point: Record = {"kind": "eval", "step": 1, "perplexity": 500.0, "split": "valid", "items": 1024}
    final: Record = {**point, "kind": "final_eval", "items": 5120}
    note = comparison_table({"a": [[task, point, final]]}).note
    assert "are over 5,120 words of the validation text, each point of the curves over 1,024 words." in note
    assert "are over 1,024 words of the validation text." in comparison_table({"a": [[task, point]]}).note
    _, finals = draw_comparison({"a": [[task, point, final]]}).axes
    assert finals.get_xlabel() == "over 5,120 words"


def test_a_terminal_of_80_columns_shows_whole_words() -> None:
    """With the longest name of a registered router; columns that it has no room for are in the report."""
    runs = {"product_key+balance": [[*SMALL], [{**SMALL[-2], "perplexity": 460.0}, {**OTHER[0], "perplexity": 3e3}]]}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal_table(comparison_table(runs)))
    shown = console.export_text()
    assert "…" not in shown
    assert {"product_key+balance", "validation", "perplexity", "entropy", "experts"} <= set(shown.split())


def test_last_balances_by_hand() -> None:
    """The last window of each layer, and of two records for it the last one."""
    metrics: list[Record] = [
        {"kind": "balance", "step": 20, "layer": "layer10", "entropy": 0.5, "dead": 1},
        {"kind": "balance", "step": 10, "layer": "layer9", "entropy": None, "dead": 2},
        {"kind": "balance", "step": 20, "layer": "layer9", "entropy": 0.6, "dead": 2},
        {"kind": "balance", "step": 20, "layer": "layer9", "entropy": 0.9, "dead": 0},
    ]
    assert last_balances(metrics) == [metrics[0], metrics[3]]
    assert last_balances([metrics[3], metrics[1]]) == [metrics[3]]
    assert last_balances([]) == []
