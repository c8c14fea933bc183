"""Experts by programs of their own beside stacked ones, over their number and the rows of a batch; and what a node
chooses, which it does once, before it knows its load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from dmoe_jax.runs.report import ReportTable
from experiments.bench import Run
from experiments.node_speed.cases import STRATEGIES, Strategy
from experiments.node_speed.settings import SpeedSettings
from experiments.processes import HelperProcess, open_helpers
from experiments.results import Bar
from experiments.rounds import Measurement, Ratio, Record, measure_rounds

CHOICE = "choice"
"""Kind of the records that say what a node chooses."""
CHOICE_BAR = Bar(name="strategy_choice", bound=0.8, comparison=">=")
"""Samples a second by the chosen strategy over those by the better one, where that is least."""
EXPERTS, ROWS = (16, 64, 256), (1, 16, 256)


def measure_strategies(run: Run[SpeedSettings]) -> None:
    """Rounds of both strategies for each width, each number of experts and each number of rows."""
    settings = run.settings
    for width in settings.widths:
        for experts in EXPERTS:
            run.say(f"strategies, {experts} experts of width {width}: starting")
            common = {"experts": experts, "d_model": width, "seed": settings.seed}
            with open_helpers("experiments.node_speed.strategy_side", [common]) as (helper,):
                run.log(CHOICE, width=width, experts=experts, **helper.hello)
                for rows in ROWS:
                    cell = Cell(width, experts, rows)
                    measurements: list[Measurement] = [
                        partial(_slice, helper, cell, strategy, settings.chosen_slice_s) for strategy in STRATEGIES
                    ]
                    measure_rounds(run, measurements, [cell.ratio], rounds=settings.chosen_rounds)


@dataclass(frozen=True, slots=True)
class Cell:
    """Experts and batches on which the strategies take turns."""

    width: int
    """Width of the experts."""
    experts: int
    """Number of experts."""
    rows: int
    """Rows of each expert's batch."""

    def slice_of(self, strategy: Strategy) -> str:
        """Name of its slices by a strategy."""
        return f"{self}_{strategy}"

    @property
    def ratio(self) -> Ratio:
        """Stacked over single. No bar: where it is below 1 a node is to choose the other."""
        stacked, single = self.slice_of("stacked"), self.slice_of("single")
        return Ratio(f"stacked_over_single_{self}", "samples_per_s", stacked, single, ">=", 0.0)

    def __str__(self) -> str:
        return f"d{self.width}_{self.experts}_experts_{self.rows}_rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of a cell under both strategies, and the strategy that a node chooses."""

    cell: Cell
    """The cell itself."""
    chosen: Strategy
    """Strategy that a node chooses for these experts, whatever the rows."""
    samples_per_s: Mapping[Strategy, float]
    """Medians of the rounds."""

    @property
    def share(self) -> float:
        """Rate of the chosen strategy, as a share of the better one's."""
        return self.samples_per_s[self.chosen] / max(self.samples_per_s.values())


def _slice(helper: HelperProcess, cell: Cell, strategy: Strategy, slice_s: float) -> Mapping[str, Record]:
    return {cell.slice_of(strategy): helper.ask(strategy=strategy, rows=cell.rows, for_s=slice_s)}


def strategy_rates(slices: Sequence[Record], choices: Sequence[Record]) -> list[Rates]:
    """Return the rates of each cell that was measured by both strategies.

    Args:
      slices: records of the rounds, of which the first warms up.
      choices: records of what a node chooses for so many experts of a width.
    """
    found = []
    for choice in choices:
        for rows in ROWS:
            cell = Cell(choice["width"], choice["experts"], rows)
            rates = {
                strategy: [
                    record["samples_per_s"]
                    for record in slices
                    if record["round"] > 0 and record["name"] == cell.slice_of(strategy)
                ]
                for strategy in STRATEGIES
            }
            if all(rates.values()):
                medians = {strategy: median(each) for strategy, each in rates.items()}
                found.append(Rates(cell=cell, chosen=choice["strategy"], samples_per_s=medians))
    return found


def strategy_figures(rates: Sequence[Rates]) -> dict[str, Any]:
    """The headline: the least share that the chosen strategy makes of the better one, and stacked over single."""
    figures: dict[str, Any] = {CHOICE_BAR.name: min((each.share for each in rates), default=None)}
    for each in rates:
        figures[each.cell.ratio.name] = each.samples_per_s["stacked"] / each.samples_per_s["single"]
    return figures


def strategy_table(rates: Sequence[Rates]) -> ReportTable:
    """All cells."""
    head = ("width", "experts", "rows a batch", "single, samples/s", "stacked, samples/s", "chosen", "of the better")
    rows = [
        (
            *(each.cell.width, each.cell.experts, each.cell.rows),
            *(round(each.samples_per_s[strategy]) for strategy in STRATEGIES),
            *(each.chosen, each.share),
        )
        for each in rates
    ]
    return ReportTable(title="Strategies", head=head, rows=rows)
