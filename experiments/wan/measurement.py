"""All parts: shares of the line here, and what `churn`, `kill`, `tokens` and `loop` measure in files of their own."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dmoe_jax.runs.report import ReportTable
from dmoe_jax.runs.style import GREY, KILLED, dress
from experiments.bench import Experiment, Run
from experiments.panels import series_style
from experiments.processes import HelperFailed
from experiments.results import Bar, Result
from experiments.wan import churn, kill, loop, tokens
from experiments.wan.averaging import WrongAverage, all_reduce_times, ideal_s
from experiments.wan.settings import GIGABIT, TEN_GIGABIT, Part, WanSettings
from experiments.wan.states import WrongState, download_times

NUM_GROWING = 2
"""All-reduces on each line in which windows and connections grow; they do not count."""

DONORS_STATE_MIB = 512
"""Length of the state that several donors give: each of them holds a copy, all in one process."""

STATE_ROUND_TRIP_MS = 100.0
STATE_GBPS = 1.0
"""The newcomer's line. Donors' lines are ten times as fast where one is enough, and `STATE_GBPS` together otherwise."""

SHARE_10G = Bar(name=f"wan_share_{TEN_GIGABIT.name}", bound=0.8, comparison=">=")
SHARE_1G = Bar(name=f"wan_share_{GIGABIT.name}", bound=0.9, comparison=">=")
STATE_SHARE = Bar(name="state_share", bound=0.8, comparison=">=")
PARTS: Mapping[Part, Any] = {"churn": churn, "kill": kill, "tokens": tokens, "loop": loop}
"""Parts with a module of their own, which measures, logs records of the part's name, sums them up and draws them."""

DONORS_GAIN = Bar(name="donors_gain", bound=3.0, comparison=">=")


def measure(run: Run[WanSettings]) -> None:
    """Run the chosen parts, one line or download after the other."""
    if "allreduce" in run.settings.parts:
        _measure_all_reduces(run)
    if "state" in run.settings.parts:
        _measure_downloads(run)
    for name, part in PARTS.items():
        if name in run.settings.parts:
            part.measure(run)


def _measure_all_reduces(run: Run[WanSettings]) -> None:
    settings = run.settings
    for line in settings.chosen_lines:
        run.say(f"{settings.mib} MiB among {settings.peers} peers at {line.gbps:g} Gb/s and {line.round_trip_ms:g} ms")
        nbytes = settings.mib * 2**20
        times = all_reduce_times(
            line,
            peers=settings.peers,
            nbytes=nbytes,
            rounds=NUM_GROWING + settings.rounds,
            budget_bytes=settings.budget_mib * 2**20,
            seed=settings.seed,
        )
        run.log(
            "allreduce",
            line=line.name,
            gbps=line.gbps,
            round_trip_ms=line.round_trip_ms,
            ideal_s=ideal_s(line, peers=settings.peers, nbytes=nbytes),
            seconds=times.seconds,
            peak_bytes=times.peak_bytes,
            connections=times.num_connections,
        )


def _measure_downloads(run: Run[WanSettings]) -> None:
    settings = run.settings
    few_mib = min(DONORS_STATE_MIB, settings.state_mib)
    cases = (
        ("one fast donor", 1, settings.state_mib, 10 * STATE_GBPS, STATE_GBPS),
        ("one slow donor", 1, few_mib, STATE_GBPS / settings.donors, 10 * STATE_GBPS),
        (f"{settings.donors} slow donors", settings.donors, few_mib, STATE_GBPS / settings.donors, 10 * STATE_GBPS),
    )
    for case, donors, mib, up_gbps, down_gbps in cases:
        run.say(f"a state of {mib} MiB from {case}, {STATE_ROUND_TRIP_MS:g} ms away")
        download = download_times(
            donors=donors,
            nbytes=mib * 2**20,
            up_gbps=up_gbps,
            down_gbps=down_gbps,
            round_trip_ms=STATE_ROUND_TRIP_MS,
            budget_bytes=settings.budget_mib * 2**20,
            seed=settings.seed,
        )
        line_s = 8 * mib * 2**20 / (1e9 * min(down_gbps, donors * up_gbps))
        run.log(
            "state",
            case=case,
            donors=donors,
            mib=mib,
            up_gbps=up_gbps,
            down_gbps=down_gbps,
            line_s=line_s,
            seconds=download.seconds,
            peak_bytes=download.peak_bytes,
        )


def shares_of(record: dict[str, Any]) -> list[float]:
    """The ideal time over the time of each all-reduce of a record, the first one first."""
    return [record["ideal_s"] / seconds for seconds in record["seconds"]]


def summarise(run: Run[WanSettings]) -> Result | None:
    """Compute the figures from what there is; None before the first record."""
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    tables: list[ReportTable] = []
    averagings, downloads = run.records("allreduce"), run.records("state")
    if "allreduce" in run.settings.parts:
        bars += [SHARE_10G, SHARE_1G]
    if "state" in run.settings.parts:
        bars += [STATE_SHARE, DONORS_GAIN]
    if averagings or downloads:
        figures |= _share_figures(averagings, downloads)
        tables += [table for table in (_averaging_table(averagings), _download_table(downloads)) if table.rows]
    for name, part in PARTS.items():
        if name in run.settings.parts:
            bars += part.BARS
        if records := run.records(name):
            figures |= part.figures(records)
            tables.append(part.table(records))
    if not figures:
        return None
    return Result(
        title="Training over wide-area lines",
        figures=figures,
        bars=bars,
        tables=tables,
    )


def _share_figures(averagings: Sequence[dict[str, Any]], downloads: Sequence[dict[str, Any]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for record in averagings:
        shares = shares_of(record)
        warm = shares[NUM_GROWING:]
        name = f"wan_share_{record['line']}"
        figures |= {name: median(warm), f"{name}_min": min(warm), f"{name}_max": max(warm)}
        figures[f"first_share_{record['line']}"] = shares[0]
    by_donors: dict[bool, dict[str, Any]] = {}
    for record in downloads:
        if record["case"] == "one fast donor":
            figures["state_share"] = record["line_s"] / record["seconds"]
        else:
            by_donors[record["donors"] > 1] = record
    if len(by_donors) == 2:
        figures["donors_gain"] = by_donors[False]["seconds"] / by_donors[True]["seconds"]
    peaks = [record["peak_bytes"] for record in (*averagings, *downloads)]
    return figures | {"budget_peak_mib": max(peaks) / 2**20}


def _averaging_table(records: Sequence[dict[str, Any]]) -> ReportTable:
    return ReportTable(
        title="All-reduces",
        head=("Gb/s", "round trip, ms", "ideal, s", "first, s", "later, s", "share", "connections", "budget, MiB"),
        rows=[
            (
                record["gbps"],
                record["round_trip_ms"],
                record["ideal_s"],
                record["seconds"][0],
                median(record["seconds"][NUM_GROWING:]),
                median(shares_of(record)[NUM_GROWING:]),
                record["connections"],
                record["peak_bytes"] / 2**20,
            )
            for record in records
        ],
        note="Ideal: 2 (n - 1) / n vectors over the line, and one round trip. Later: the median of those that count. "
        "Connections: of each pair of peers in the end. Budget: the most that a peer took.",
    )


def _download_table(records: Sequence[dict[str, Any]]) -> ReportTable:
    return ReportTable(
        title="Downloads of a state",
        head=("from", "MiB", "each up, Gb/s", "down, Gb/s", "line alone, s", "download, s", "share", "budget, MiB"),
        rows=[
            (
                record["case"],
                record["mib"],
                record["up_gbps"],
                record["down_gbps"],
                record["line_s"],
                record["seconds"],
                record["line_s"] / record["seconds"],
                record["peak_bytes"] / 2**20,
            )
            for record in records
        ],
        note="From the newcomer's asking the DHT for donors to the checked state.",
    )


def draw(run: Run[WanSettings], result: Result) -> Figure | None:
    """Draw a panel for each part that was measured."""
    del result
    panels: list[tuple[Callable[..., None], list[dict[str, Any]]]] = []
    if records := run.records("allreduce"):
        panels.append((partial(_draw_shares, run.settings), records))
    panels += [(part.draw, records) for name, part in PARTS.items() if (records := run.records(name))]
    if not panels:
        return None
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.5 * columns if columns > 1 else 7, 4 * rows), layout="constrained")
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, (draw_panel, records) in zip(places, panels, strict=False):
        draw_panel(axes, records)
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    return figure


def _draw_shares(settings: WanSettings, axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    """Shares over round trips, a line for each bandwidth; dashed the first all-reduce, in which windows grow."""
    for index, gbps in enumerate(sorted({record["gbps"] for record in records})):
        own = sorted((each for each in records if each["gbps"] == gbps), key=lambda each: each["round_trip_ms"])
        trips = [record["round_trip_ms"] for record in own]
        color, _ = series_style(index)
        later = [median(shares_of(record)[NUM_GROWING:]) for record in own]
        axes.plot(trips, later, "o-", color=color, label=f"{gbps:g} Gb/s")
        axes.plot(trips, [shares_of(record)[0] for record in own], "o--", color=color, alpha=0.5, markersize=3)
    for bar in (SHARE_10G, SHARE_1G):
        axes.axhline(bar.bound, color=KILLED, linestyle=":", linewidth=1)
    axes.set_ylim(0, 1.1)
    axes.set_ylabel("share of the line", fontsize=9, color=GREY)
    axes.legend(fontsize=8, frameon=False, loc="lower left")
    dress(axes, f"All-reduce of {settings.mib} MiB among {settings.peers}; dashed: the first", "round trip (ms)")


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="A panel for each part: shares of the line, goodput under churn, times after a kill, bytes a token",
    expected=(WrongAverage, WrongState),
    causes=(HelperFailed,),
)
