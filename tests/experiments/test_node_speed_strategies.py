"""The part of `experiments.node_speed` that compares strategies: its arithmetic, its turns, and a tiny run of it."""

from pathlib import Path

import pytest

from experiments.node_speed.cases import STRATEGIES
from experiments.node_speed.strategies import Cell, strategy_figures, strategy_rates, strategy_table
from tests.experiments.test_helper_processes import headline_of_run
from tests.experiments.test_node_speed import TINY


def test_strategies_are_compared_cell_by_cell() -> None:
    """Only rounds after the first count: 16 experts with one row make 10 and 40 samples a second, with 16 rows 30 and
    20. Stacked was chosen, which is right for one row, and has two thirds of the better rate for 16 rows."""
    cells = {1: ([1, 10, 10], [1, 40, 40]), 16: ([30, 30, 30], [20, 20, 20])}
    slices = [
        {"name": Cell(64, 16, rows).slice_of(strategy), "round": number, "samples_per_s": value}
        for rows, both in cells.items()
        for strategy, values in zip(STRATEGIES, both, strict=True)
        for number, value in enumerate(values)
    ]
    rates = strategy_rates(slices, [{"width": 64, "experts": 16, "strategy": "stacked"}])
    assert strategy_figures(rates) == {
        "strategy_choice": pytest.approx(2 / 3),
        "stacked_over_single_d64_16_experts_1_rows": 4,
        "stacked_over_single_d64_16_experts_16_rows": pytest.approx(2 / 3),
    }
    assert strategy_table(rates).rows[0] == (64, 16, 1, 10, 40, "stacked", 1)
    assert strategy_figures([]) == {"strategy_choice": None}


@pytest.mark.slow
def test_tiny_run_of_strategies(tmp_path: Path) -> None:
    """Each cell has the strategy that a node would choose, and the rates of both."""
    flags = ("--parts", "strategies", "--widths", "8", "--rounds", "1")
    headline = headline_of_run(tmp_path / "run", *TINY, *flags, limit_s=280)
    assert 0 < headline["strategy_choice"] <= 1
    assert sum(name.startswith("stacked_over_single_d8") for name in headline) == 9
