"""Measure costs, then curves in virtual time, then a small grid on real computing beside its virtual twin."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median

from dmoe_jax.runs.report import ReportTable
from dmoe_net.errors import NetError
from experiments.bench import Experiment, Run
from experiments.results import Bar, Result
from experiments.throughput_vs_latency.analysis import (
    CEILINGS_APART,
    Curve,
    agreement,
    agreement_ratios,
    cloud_ratios,
    compute_ceiling,
    cost_tables,
    curves,
    kept,
    lag_ceiling,
)
from experiments.throughput_vs_latency.costs import (
    CostTable,
    TimedDevice,
    measure_costs,
    start_device,
)
from experiments.throughput_vs_latency.figure import latency_figure
from experiments.throughput_vs_latency.settings import (
    BLOCK_NAMES,
    SIZES,
    Block,
    BlockName,
    LatencySettings,
    Load,
    Method,
)
from experiments.throughput_vs_latency.stack import Throughput, measure_real, measure_round_trips, measure_virtual

KEPT = Bar(name="kept", bound=0.9, comparison=">=")
"""Least share of the zero-delay throughput at short delays."""
AGREEMENT = Bar(name="agreement", bound=0.2)
"""Largest difference of virtual and real throughput, as a share of the real one."""

PAPER_RATIOS = {"feedforward": 41, "transformer": 68}
"""Ratios of the paper's cloud run; from memory, seen in no source."""

_FIGURE_NAMES = {"feedforward": "ratio_ffn", "transformer": "ratio_transformer"}


def measure(run: Run[LatencySettings]) -> None:
    """Measure what `--where` asks for, one kind of block after the other."""
    settings = run.settings
    start_device()
    for name in BLOCK_NAMES:
        block = SIZES[settings.size].blocks[name]
        if settings.where != "real":
            _measure_curves(run, block)
        if settings.where != "virtual" and not (settings.quick and name != "feedforward"):
            _measure_agreement(run, SIZES["laptop"].blocks[name])


def _measure_curves(run: Run[LatencySettings], block: Block) -> None:
    settings = run.settings
    run.say(f"{block.name}: the cost of a block on this device")
    costs = measure_costs(block, joined=settings.joined, times=5 if settings.quick else 11)
    run.log("costs", block=block.name, seconds=costs.seconds)
    for repeat in range(settings.chosen_repeats):
        run.say(f"{block.name}: throughput over delay in virtual time ({repeat + 1}/{settings.chosen_repeats})")
        note = partial(_log_point, run, block, repeat)
        measure_virtual(block, settings.grid(), costs, note, seed=settings.seed + repeat)


def _log_point(
    run: Run[LatencySettings], block: Block, repeat: int, method: Method, load: Load, found: Throughput
) -> None:
    run.log(
        "point",
        block=block.name,
        passes=load.passes,
        method=method,
        delay_s=load.delay.mean_s,
        cloud=load.delay.std_s is not None,
        repeat=repeat,
        samples_per_s=found.samples_per_s,
        requests_per_batch=found.requests_per_batch,
    )


def _measure_agreement(run: Run[LatencySettings], block: Block) -> None:
    """Measure the small grid round by round, on real computing and then in virtual time."""
    settings, grid = run.settings, run.settings.agreement_grid()
    run.say(f"{block.name}: a small grid on real computing, and the same in virtual time")
    for number in range(settings.agreement_rounds):
        seed = settings.seed + number
        round_trips = measure_round_trips(block, grid, seed=seed)
        modelled = [replace(load, place=load.place._replace(round_trip_s=round_trips[load.passes])) for _, load in grid]
        real, costs = _measure_real_round(block, grid, settings, seed=seed)
        for (method, _), load, cost, real_per_s in zip(grid, modelled, costs, real, strict=True):
            _measure_twin(run, block, method, load, cost, real_per_s, seed=seed)


def _measure_real_round(
    block: Block, grid: Sequence[tuple[Method, Load]], settings: LatencySettings, *, seed: int
) -> tuple[list[float], list[CostTable]]:
    """Rows per second of each load on real computing, and what batches cost meanwhile.

    A CPU that computes, and runs the event loop of all nodes and trainers beside it, is slower than alone. Of sizes
    that did not occur, the cost is that of before and after the load, times as much.
    """
    real: list[float] = []
    alone, taken = [_costs_now(block, settings)], []
    device = TimedDevice()

    def note(method: Method, load: Load, found: Throughput) -> None:
        real.append(found.samples_per_s)
        taken.append(device.taken())
        alone.append(_costs_now(block, settings))  # nothing else is under way: the loop may wait

    measure_real(block, grid, device, note, seed=seed)
    return real, [
        before.mean(after).under_load(each) for (before, after), each in zip(pairwise(alone), taken, strict=True)
    ]


def _measure_twin(
    run: Run[LatencySettings],
    block: Block,
    method: Method,
    load: Load,
    costs: CostTable,
    real_per_s: float,
    *,
    seed: int,
) -> None:
    """Measure in virtual time what was measured on real computing, and log both."""

    def note(method: Method, load: Load, found: Throughput) -> None:
        run.log(
            "agreement",
            block=block.name,
            passes=load.passes,
            method=method,
            delay_s=load.delay.mean_s,
            seed=seed,
            round_trip_s=load.place.round_trip_s,
            virtual_per_s=found.samples_per_s,
            real_per_s=real_per_s,
        )

    measure_virtual(block, [(method, load)], costs, note, seed=seed)


def _costs_now(block: Block, settings: LatencySettings) -> CostTable:
    return measure_costs(block, joined=settings.joined, times=3)


def summarise(run: Run[LatencySettings]) -> Result | None:
    """Set the curves beside their ceilings and the three regions beside the paper; None before the first point."""
    settings, points, twins = run.settings, run.records("point"), run.records("agreement")
    if not (points or twins):
        return None
    tables = cost_tables(run.records("costs"))
    shares = kept(settings, points, tables)
    figures: dict[str, object] = {}
    if settings.where != "real":
        figures["kept"] = min(shares.values(), default=None)
        for (block, passes), ratios in cloud_ratios(points).items():
            name = _FIGURE_NAMES[block] + ("" if passes == "forward" else "_training")
            figures |= {name: sum(ratios) / len(ratios), f"{name}_min": min(ratios), f"{name}_max": max(ratios)}
    if settings.where != "virtual":
        figures["agreement"] = agreement(twins)
    figures |= {"layers": settings.chosen_layers, "servers": settings.servers, "trainers": settings.trainers}
    return Result(
        title="Throughput over latency",
        figures=figures | {"repeats": settings.chosen_repeats},
        bars=[*([KEPT] if settings.where != "real" else []), *([AGREEMENT] if settings.where != "virtual" else [])],
        summary="Rows per second through the whole stack: vectors of feed-forward blocks, sequences of Transformer "
        "blocks; mean and standard deviation over the repeats.",
        tables=[*_curve_tables(run, tables, shares), _cloud_table(run), _agreement_table(run)],
    )


def _curve_tables(
    run: Run[LatencySettings], tables: Mapping[BlockName, CostTable], shares: Mapping[Curve, float]
) -> list[ReportTable]:
    """One table for each kind of block and passes: both methods and their ceilings over the delay."""
    settings, found, reports = run.settings, curves(run.records("point"), cloud=False), []
    for curve, points in found.items():
        alone = found.get(curve._replace(method="model_parallel"), [])
        if curve.method != "asynchronous" or len(alone) != len(points):
            continue
        rows = []
        for ours, other in zip(points, alone, strict=True):
            ceilings = _ceilings(settings, curve, ours.delay_s, tables[curve.block])
            rows.append((f"{1e3 * ours.delay_s:.0f} ms", str(ours), str(other), *ceilings))
        note = "No delay is short enough for the bar."
        if curve in shares:
            note = (
                f"Where the lag ceiling is at least {CEILINGS_APART:g} times the compute ceiling, asynchronous "
                f"trainers keep at least {shares[curve]:.3f} of their throughput without delay."
            )
        head = ("delay", "asynchronous", "model parallel", "lag ceiling", "compute ceiling")
        title = f"{curve.block}, {'forward' if curve.passes == 'forward' else 'forward and backward'}"
        reports.append(ReportTable(title=title, head=head, rows=rows, note=note))
    return reports


def _ceilings(settings: LatencySettings, curve: Curve, delay_s: float, costs: CostTable) -> tuple[float, float]:
    """Lag and compute ceilings of a point of the sweep."""
    load = load_at(settings, curve, delay_s)
    return lag_ceiling(load, SIZES[settings.size].blocks[curve.block].batch_rows), compute_ceiling(load, costs)


def load_at(settings: LatencySettings, curve: Curve, delay_s: float) -> Load:
    """The load behind a point of the sweep."""
    return next(
        load
        for method, load in settings.grid()
        if (method, load.passes, load.delay) == (curve.method, curve.passes, (delay_s, None))
    )


def _cloud_table(run: Run[LatencySettings]) -> ReportTable:
    points = run.records("point")
    found, rows = curves(points, cloud=True), []
    for (block, passes), ratios in cloud_ratios(points).items():
        ours, alone = (found[Curve(block, passes, method)][0] for method in ("asynchronous", "model_parallel"))
        paper = f"{PAPER_RATIOS[block]} [M~]" if passes == "forward" else "–"
        rows.append((block, passes, str(ours), str(alone), sum(ratios) / len(ratios), paper))
    return ReportTable(
        title="Three regions, 92.5 ± 32.4 ms",
        head=("block", "passes", "asynchronous", "model parallel", "ratio", "the paper's ratio"),
        rows=rows,
        note="[M~]: from memory, with medium confidence, seen in no source; no threshold.",
    )


def _agreement_table(run: Run[LatencySettings]) -> ReportTable:
    twins = run.records("agreement")
    real: dict[tuple[Curve, float], list[float]] = {}
    for twin in twins:
        curve = Curve(twin["block"], twin["passes"], twin["method"])
        real.setdefault((curve, twin["delay_s"]), []).append(twin["real_per_s"])
    rows = [
        (
            curve.block,
            curve.passes,
            curve.method.replace("_", " "),
            f"{1e3 * delay_s:.0f} ms",
            median(real[curve, delay_s]),
            f"{median(ratios):.3f}",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
        )
        for (curve, delay_s), ratios in agreement_ratios(twins).items()
    ]
    head = ("block", "passes", "method", "delay", "real", "virtual / real", "rounds")
    note = "Medians over the rounds, and the range of the ratios."
    return ReportTable(title="Virtual time beside real computing", head=head, rows=rows, note=note)


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=lambda run, _: latency_figure(run),
    figure_text="Throughput over the mean delay of a layer call, asynchronous and model parallel, with their ceilings",
    expected=(NetError,),
)
