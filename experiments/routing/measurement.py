"""Both parts of the experiment in one report: the slow node, and what balance costs."""

from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.bench import Experiment, Run
from experiments.results import Bar, Result
from experiments.routing import balance, slow_share
from experiments.routing.balance import (
    LONG,
    balance_figures,
    balance_table,
    draw_cases,
    draw_length,
    measure_balance,
    outcomes,
)
from experiments.routing.settings import RoutingSettings
from experiments.routing.slow_share import draw_slow_node, measure_slow_node, scene_of, slow_figures, slow_shares


def measure(run: Run[RoutingSettings]) -> None:
    """Measure the parts that are asked for; a resumed run does what is missing. Raises as `measure_balance`."""
    if "slow-node" in run.settings.part:
        measure_slow_node(run)
    if "balance" in run.settings.part:
        measure_balance(run)


def summarise(run: Run[RoutingSettings]) -> Result | None:
    """Return the result of both parts; None before either has anything to tell."""
    scene, shares, found = scene_of(run.settings), slow_shares(run), outcomes(run)
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    says: list[str] = []
    if "balanced" in shares:
        figures |= slow_figures(shares, scene)
        bars += slow_share.BARS
        says.append(
            f"Calls to a node that is {scene.slowdown:g} times slower from update {scene.slow_from} to "
            f"{scene.slow_until}, over those of the mean of the other {scene.num_nodes - 1}."
        )
    if found:
        figures |= balance_figures(found)
        bars += balance.BARS
        says.append("What the balanced router costs in perplexity, and how even its load is, case by case.")
    if not figures:
        return None
    return Result(
        title="What balance does, and what it costs",
        summary=" ".join(says),
        figures=figures,
        shown={name: value for name, value in figures.items() if name != "cases"},
        bars=bars,
        tables=[balance_table(found)] if found else [],
    )


def draw(run: Run[RoutingSettings], result: Result) -> Figure:
    """Draw what there is: the slow node's share, the cases, and the long runs."""
    del result
    shares, found = slow_shares(run), outcomes(run)
    rows: list[tuple[float, Callable[..., None], tuple[Any, ...], int]] = []
    if "balanced" in shares:
        rows.append((3.0, draw_slow_node, (shares, scene_of(run.settings)), 1))
    if found:
        rows.append((1.2 + 0.3 * len(found), draw_cases, (found,), 2))
    if LONG in found:
        rows.append((2.6, draw_length, (found[LONG],), 2))
    figure = Figure(figsize=(10, 0.4 + sum(height for height, *_ in rows)), layout="constrained")
    grid = figure.add_gridspec(len(rows), 1, height_ratios=[height for height, *_ in rows])
    for place, (_, draw_row, given, columns) in enumerate(rows):
        cells = grid[place].subgridspec(1, columns)
        axes: list[Axes] = [figure.add_subplot(cells[column]) for column in range(columns)]
        draw_row(*axes, *given)
    return figure


EXPERIMENT = Experiment[RoutingSettings](
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Calls to the slow node over the mean of the others, over the updates; what the balanced router costs "
    "in perplexity and how even its load is, case by case; and both over the words of long runs",
)
