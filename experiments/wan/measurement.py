"""Shares of the line: all-reduces against bandwidth and round trip, and downloads of a state."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from dmoe_jax.runs.report import ReportTable
from dmoe_jax.runs.style import GREY, KILLED, dress, series_style
from experiments.bench import Experiment, Run
from experiments.results import Bar, Result
from experiments.wan.averaging import WrongAverage, all_reduce_times, ideal_s
from experiments.wan.settings import GIGABIT, TEN_GIGABIT, WanSettings
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
DONORS_GAIN = Bar(name="donors_gain", bound=3.0, comparison=">=")


def measure(run: Run[WanSettings]) -> None:
    """Run the chosen parts, one line or download after the other."""
    if "allreduce" in run.settings.parts:
        _measure_all_reduces(run)
    if "state" in run.settings.parts:
        _measure_downloads(run)


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
    """Compute the shares from what there is; None before the first record."""
    averagings, downloads = run.records("allreduce"), run.records("state")
    if not averagings and not downloads:
        return None
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    for record in averagings:
        shares = shares_of(record)
        warm = shares[NUM_GROWING:]
        name = f"wan_share_{record['line']}"
        figures |= {name: median(warm), f"{name}_min": min(warm), f"{name}_max": max(warm)}
        figures[f"first_share_{record['line']}"] = shares[0]
    if "allreduce" in run.settings.parts:
        bars += [SHARE_10G, SHARE_1G]
    by_donors: dict[bool, dict[str, Any]] = {}
    for record in downloads:
        if record["case"] == "one fast donor":
            figures["state_share"] = record["line_s"] / record["seconds"]
        else:
            by_donors[record["donors"] > 1] = record
    if len(by_donors) == 2:
        figures["donors_gain"] = by_donors[False]["seconds"] / by_donors[True]["seconds"]
    if "state" in run.settings.parts:
        bars += [STATE_SHARE, DONORS_GAIN]
    peaks = [record["peak_bytes"] for record in (*averagings, *downloads)]
    figures["budget_peak_mib"] = max(peaks) / 2**20
    return Result(
        title="Averaging and state downloads over wide-area lines, in virtual time",
        figures=figures,
        bars=bars,
        tables=[table for table in (_averaging_table(averagings), _download_table(downloads)) if table.rows],
    )


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
    """Draw shares over round trips, a line for each bandwidth; dashed the first all-reduce, in which windows grow."""
    records = run.records("allreduce")
    if not records:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
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
    settings = run.settings
    dress(axes, f"{settings.mib} MiB among {settings.peers}; dashed: the first time", "round trip (ms)")
    return figure


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Share of the line that an all-reduce uses, over the round trip, for each bandwidth",
    expected=(WrongAverage, WrongState),
)
