"""Measure costs, then curves in virtual time, then a small grid on real computing beside its virtual twin."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dmoe_jax.machine.xla_threads import set_xla_threads
from dmoe_jax.runs.report import ReportTable
from dmoe_jax.runs.setting_up import set_up_jax
from dmoe_jax.runs.style import GREY, INK, KILLED, VALID, dress
from dmoe_net import NetError
from experiments.bench import Experiment, Run
from experiments.intervals import t_interval
from experiments.results import Bar, Result, finals_of
from experiments.throughput_vs_latency.costs import Costs, measure_costs, under_load
from experiments.throughput_vs_latency.settings import BLOCKS, Block, LatencySettings, Load
from experiments.throughput_vs_latency.stack import measure_real, measure_round_trip, measure_virtual

KEPT = Bar(name="kept", bound=0.9, comparison=">=")
"""Least share of the zero-delay throughput at short delays."""
AGREEMENT = Bar(name="agreement", bound=0.2)
"""Largest difference of virtual and real throughput, as a share of the real one."""

CEILINGS_APART = 2.0
"""Delays count as short, so that throughput must be kept, if the lag ceiling is at least so many times the other."""

_FIGURE_NAMES = {"feedforward": "ratio_ffn", "transformer_xl": "ratio_transformer"}


def measure(run: Run[LatencySettings]) -> None:
    """Measure what `--where` asks for, one kind of block after the other."""
    settings = run.settings
    # The event loop has the other cores to itself: costs of all cores would be those of an idle loop. Before the cache
    # is chosen, which has a folder for each number of threads.
    set_xla_threads(1)
    set_up_jax()
    for block in BLOCKS:
        if settings.where != "real":
            _measure_curves(run, block)
        if settings.where != "virtual" and not (settings.quick and block.kind != "feedforward"):
            _measure_agreement(run, block)


def _measure_curves(run: Run[LatencySettings], block: Block) -> None:
    settings = run.settings
    run.say(f"{block.kind}: the cost of a block on this device")
    costs = measure_costs(block, times=5 if settings.quick else 11)
    run.log("costs", block=block.kind, seconds={f"{name}_{rows}": seconds for (name, rows), seconds in costs.items()})
    for seed in settings.seeds:
        run.say(f"{block.kind}: throughput over delay in virtual time, seed {seed}")
        for cloud, loads in enumerate(settings.loads()):
            found = measure_virtual(loads, block, costs, seed=seed)
            for load, rows_per_s in zip(loads, found, strict=True):
                ceilings = {
                    "lag_ceiling": lag_ceiling(load, block.rows),
                    "compute_ceiling": compute_ceiling(load, costs),
                }
                run.log("point", **_key(block, load), seed=seed, cloud=bool(cloud), rows_per_s=rows_per_s, **ceilings)


def _measure_agreement(run: Run[LatencySettings], block: Block) -> None:
    """Measure the small grid round by round, on real computing and then in virtual time.

    A CPU that computes, and runs the event loop of all nodes and trainers beside it, is slower than alone: the twin's
    costs are those under the load. Other work on the machine spoils one round, seldom two of three.
    """
    settings, loads = run.settings, run.settings.agreement_loads()
    run.say(f"{block.kind}: a small grid on real computing, and the same in virtual time")
    for seed in settings.seeds[:1] if settings.quick else settings.seeds:
        alone = measure_costs(block, times=3)
        round_trips = {
            passes: measure_round_trip(replace(loads[0], passes=passes), block, seed=seed)
            for passes in dict.fromkeys(load.passes for load in loads)
        }
        for load in loads:
            real_per_s, taken = measure_real(load, block, seed=seed)
            costs, trip_s = under_load(alone, taken), round_trips[load.passes]
            (virtual_per_s,) = measure_virtual([load], block, costs, seed=seed, real_trip_s=trip_s)
            both = {"real_per_s": real_per_s, "virtual_over_real": virtual_per_s / real_per_s}
            run.log("agreement", **_key(block, load), seed=seed, **both)


def _key(block: Block, load: Load) -> dict[str, Any]:
    return {"block": block.kind, "passes": load.passes, "method": load.method, "delay_s": load.delay.mean_s}


def lag_ceiling(load: Load, batch_rows: int) -> float | None:
    """Rows per second if nothing but the delays took time: trainers * batch / (calls of a batch * mean delay); None
    without a delay."""
    delay_s = load.delay.mean_s
    return load.trainers * batch_rows / (load.calls_per_batch * delay_s) if delay_s else None


def compute_ceiling(load: Load, costs: Costs) -> float:
    """Rows per second if every server's device were always busy with batches of the cheapest size."""
    names = ("forward",) if load.passes == "forward" else ("forward", "backward")
    row_s = sum(min(seconds / rows for (kind, rows), seconds in costs.items() if kind == name) for name in names)
    return load.servers / (load.layers * row_s)


def grouped(records: Sequence[Mapping[str, Any]], *names: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """The records by their values of these fields, in the order in which they come."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        found.setdefault(tuple(record[name] for name in names), []).append(dict(record))
    return found


def rates(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Their rows per second, in order."""
    return [record["rows_per_s"] for record in records]


def kept(points: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], float]:
    """Least share of the zero-delay throughput that asynchronous trainers have at a short delay, where there is one, by
    kind of block and passes."""
    shares = {}
    swept = [each for each in points if each["method"] == "asynchronous" and not each["cloud"]]
    for curve, own in grouped(swept, "block", "passes").items():
        (_, undelayed), *delayed = grouped(own, "delay_s").items()
        short = [each for _, each in delayed if each[0]["lag_ceiling"] >= CEILINGS_APART * each[0]["compute_ceiling"]]
        if short:
            shares[curve] = min(mean(rates(each)) for each in short) / mean(rates(undelayed))
    return shares


def ratios(points: Sequence[Mapping[str, Any]]) -> list[float]:
    """Asynchronous over model parallel throughput of one stack and delay, seed by seed."""
    by_method = grouped(points, "method")
    pairs = zip(*(rates(by_method.get((each,), [])) for each in ("asynchronous", "model_parallel")), strict=False)
    return [ours / alone for ours, alone in pairs]


def summarise(run: Run[LatencySettings]) -> Result | None:
    """Set the curves beside their ceilings; None before the first point."""
    settings, points = run.settings, run.records("point")
    twins = grouped(run.records("agreement"), "block", "passes", "method", "delay_s")
    if not (points or twins):
        return None
    figures: dict[str, object] = {}
    if settings.where != "real":
        shares = kept(points)
        figures["kept"] = min(shares.values(), default=None)
        figures |= {f"kept_{block}_{passes}": share for (block, passes), share in shares.items()}
        for (block, passes), own in grouped([each for each in points if each["cloud"]], "block", "passes").items():
            name = _FIGURE_NAMES[block] + ("" if passes == "forward" else "_training")
            if seeds := ratios(own):
                figures |= {name: mean(seeds), f"{name}_min": min(seeds), f"{name}_max": max(seeds)}
    if settings.where != "virtual":
        found = [[each["virtual_over_real"] for each in own] for own in twins.values()]
        figures["agreement"] = max((abs(median(each) - 1) for each in found), default=None)
        figures["virtual_over_real_least"] = min(map(min, found), default=None)
        figures["virtual_over_real_most"] = max(map(max, found), default=None)
    return Result(
        title="Throughput over latency",
        figures=figures | {"repeats": len(settings.seeds)},
        bars=[*([KEPT] if settings.where != "real" else []), *([AGREEMENT] if settings.where != "virtual" else [])],
        summary="Rows per second through the stack: vectors of feed-forward blocks, sequences of Transformer blocks.",
        tables=[_table(points)],
        runs=finals_of(points, "block", "passes", "method", "cloud", "delay_s"),
    )


def _table(points: Sequence[Mapping[str, Any]]) -> ReportTable:
    """A row for each stack and delay: both methods, and the ceilings of the asynchronous one."""
    rows = []
    for (block, passes, cloud, delay_s), own in grouped(points, "block", "passes", "cloud", "delay_s").items():
        by_method = grouped(own, "method")
        methods = (by_method.get((method,)) for method in ("asynchronous", "model_parallel"))
        texts = [str(t_interval(rates(each))) if each else "–" for each in methods]
        delay = "three regions" if cloud else f"{1e3 * delay_s:.0f} ms"
        over = mean(found) if (found := ratios(own)) else None
        rows.append((block, passes, delay, *texts, over, own[0]["lag_ceiling"], own[0]["compute_ceiling"]))
    return ReportTable(
        title="Throughput, mean over the seeds (95 % interval)",
        head=("block", "passes", "delay", "asynchronous", "model parallel", "ratio", "lag ceiling", "compute ceiling"),
        rows=rows,
    )


def draw(run: Run[LatencySettings], _: Result) -> Figure | None:
    """Draw the curves with their ceilings; None where nothing was measured in virtual time."""
    if not (points := run.records("point")):
        return None
    figure = Figure(figsize=(12, 8), layout="constrained")
    panels = grouped(points, "block", "passes")
    for axes, ((block, passes), own) in zip(figure.subplots(2, 2).flat, panels.items(), strict=False):
        _draw(axes, own)
        title = "forward" if passes == "forward" else "forward and backward"
        dress(axes, f"{block}, {title} (rows/s)", "mean delay of a layer call (ms)")
    figure.axes[0].legend(fontsize=8, frameon=False, loc="lower left")
    return figure


def _draw(axes: Axes, points: Sequence[Mapping[str, Any]]) -> None:
    """Dashed: what delays alone would allow to each method. Dotted: what the devices allow. Bars: 95 % intervals."""
    axes.set_yscale("log")
    for (method, cloud), own in grouped(points, "method", "cloud").items():
        colour = VALID if method == "asynchronous" else KILLED
        label = f"{method.replace('_', ' ')}{', three regions' if cloud else ''}"
        by_delay = {1e3 * delay_s: t_interval(rates(each)) for (delay_s,), each in grouped(own, "delay_s").items()}
        means = [each.mean for each in by_delay.values()]
        reaches = [0.0 if each.high is None else each.high - each.mean for each in by_delay.values()]
        style: dict[str, Any] = {"fmt": "*", "color": INK} if cloud else {"fmt": "o-", "color": colour, "capsize": 2}
        axes.errorbar(list(by_delay), means, reaches, label=label, **style)
        lag = {1e3 * each["delay_s"]: each["lag_ceiling"] for each in own if each["lag_ceiling"] is not None}
        if not cloud:
            axes.plot(list(lag), list(lag.values()), "--", color=colour, linewidth=1, label="its lag ceiling")
    for ceiling in {each["compute_ceiling"] for each in points if not each["cloud"]}:
        axes.axhline(ceiling, color=GREY, linestyle=":", linewidth=1.2, label="compute ceiling")
    axes.set_ylim(top=3 * max(rates(points)))


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Throughput over the mean delay of a layer call, asynchronous and model parallel, with their ceilings",
    expected=(NetError,),
)
