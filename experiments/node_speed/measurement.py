"""The node, bare calls of its programs and hivemind in turn, round after round; then memory, compilations, saving, and
the demonstration."""

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.bench import Experiment, Run
from experiments.node_speed.cases import Case
from experiments.node_speed.demonstration import STEP_RATIOS, TRAINERS, measure_demonstration
from experiments.node_speed.settings import SpeedSettings
from experiments.node_speed.strategies import (
    CHOICE,
    CHOICE_BAR,
    measure_strategies,
    strategy_figures,
    strategy_rates,
    strategy_table,
)
from experiments.node_speed.turns import (
    NodeAndCallers,
    Quantities,
    open_hivemind,
    open_node,
    with_samples_per_cpu_s,
)
from experiments.panels import ratio_figure
from experiments.processes import HelperFailed
from experiments.results import Bar, Result
from experiments.rounds import SLICE, Measurement, Ratio, measure_rounds, round_figures

BESIDE = "_beside_hivemind"
"""Behind the name of a slice of the node in rounds with hivemind: its hundred processes, which take time and memory
also while nobody asks them, do not run in the rounds with bare calls."""
MEMORY, SAVING, START = "memory", "saving", "start"
"""Kinds of records beside the slices. Of a start: seconds from the imports until the node serves, programs that were
compiled or taken from the cache meanwhile, and seconds that these took."""


def _beside_hivemind(case: str, bound: float) -> Ratio:
    ours, theirs = f"{case}{BESIDE}", f"{case}_hivemind"
    return Ratio(f"hivemind_ratio_{case}", "samples_per_s", ours, theirs, ">=", bound)


DEVICE_RATIOS = (
    Ratio("device_ratio_large_requests", "samples_per_s", "large_requests", "large_requests_bare", ">=", 0.85),
    Ratio("device_ratio_many_experts", "samples_per_s", "many_experts", "many_experts_bare", ">=", 0.6),
    Ratio("device_ratio_single_rows", "samples_per_s", "single_rows", "single_rows_bare", ">=", 0.5),
    Ratio("batching_gain", "samples_per_s", "single_rows", "single_rows_unbatched", ">=", 6.0),
)
HIVEMIND_RATIOS = (
    _beside_hivemind("many_experts", 15.0),
    _beside_hivemind("large_requests", 5.0),
    _beside_hivemind("wide_expert", 10.0),
)
PROCESSOR_RATIOS = tuple(
    # Without a bar: callers in other processes take none of it away, as those of other machines do not.
    replace(ratio, name=ratio.name.replace("device", "processor"), quantity="samples_per_cpu_s", bound=0.0)
    for ratio in DEVICE_RATIOS
    if ratio.baseline.endswith("_bare")
)
"""Samples for each second of a processor that the node's process uses, over those of bare calls."""
MEMORY_BAR = Bar(name="memory_ratio", bound=1.0)
"""Memory beyond imports, over 1.3 times the state and 150 MB."""
COMPILATIONS_BAR = Bar(name="compilations_while_serving", bound=0.0)
SAVE_BAR = Bar(name="save_wait_ratio", bound=1.0)
"""Time that a call waits longer while its expert is saved, over the time of a backward."""

_STATE_FACTOR, _OVERHEAD_BYTES = 1.3, 150e6
_DEFAULT_PYTHON = Path(".hv/bin/python")
_SAVES, _MOST_SAVE_SLICES = 2, 60
"""Slices in which checkpoints were written that are waited for, and slices after which that is given up."""
_PANELS = (
    ("16 x d=256", "64 rows"),
    ("64 x d=64", "32 rows"),
    ("16 x d=256", "1 row"),
    ("Batching", "gain"),
    ("hivemind", "64 x d=64"),
    ("hivemind", "16 x d=256"),
    ("hivemind", "d=1024, 1 row"),
)
"""Titles, and texts below the columns, of the ratios in their order."""


class NothingSaved(Exception):
    """The node wrote no checkpoints, or there is nothing that they could be compared with."""


def hivemind_python(settings: SpeedSettings) -> Path | None:
    """The interpreter that has hivemind: the one that is named, or found; None if there is none.

    Raises:
      ValueError: it does not exist or has no hivemind.
    """
    python = settings.hivemind
    if python is None:
        if not _DEFAULT_PYTHON.exists():
            return None
        python = _DEFAULT_PYTHON
    # Not `resolve`: the link's place says which environment is meant.
    if (found := shutil.which(python.expanduser().absolute())) is None:
        raise ValueError(f"--hivemind must be a Python interpreter, got {python}")
    answer = subprocess.run([found, "-c", "import hivemind, torch"], capture_output=True, check=False, text=True)
    if answer.returncode:
        last = (answer.stderr.strip() or f"status {answer.returncode}").rpartition("\n")[2]
        raise ValueError(f"--hivemind must have hivemind and torch, but {python} does not load them: {last}")
    return Path(found)


def measure(run: Run[SpeedSettings]) -> None:
    """Measure the chosen parts."""
    settings = run.settings
    if "calls" in settings.parts:
        _measure_calls(run)
    if "memory" in settings.parts:
        for case in settings.mixed_loads:
            _measure_memory(run, case)
    if "saving" in settings.parts:
        _measure_saving(run, settings.large_expert)
    if "strategies" in settings.parts:
        measure_strategies(run)
    if "demonstration" in settings.parts:
        measure_demonstration(run)


def _measure_calls(run: Run[SpeedSettings]) -> None:
    settings = run.settings
    python = hivemind_python(settings)
    if python is None:
        run.say("no interpreter with hivemind is known (--hivemind): the figures beside it stay empty")
    for case in (settings.large_requests, settings.many_experts):
        _measure_case(run, case, python)
    _measure_single_rows(run, settings.single_rows)
    if python is not None:
        _measure_case(run, settings.wide_expert, python, has_bare=False)


def _measure_case(run: Run[SpeedSettings], case: Case, python: Path | None, *, has_bare: bool = True) -> None:
    """Rounds of one case: the node and bare calls with as many rows as a request; then the node and hivemind."""
    settings, slice_s = run.settings, run.settings.chosen_slice_s
    run.say(f"{case.name}: starting")
    with open_node(case, processes=settings.processes, seed=settings.seed) as node:
        run.log(START, name=case.name, **{key: node.node.hello[key] for key in ("start_s", "programs", "compile_s")})

        def take_rounds(theirs: str, serve: Callable[[], Quantities], ratios: Sequence[Ratio]) -> None:
            own = [ratio for ratio in ratios if ratio.baseline == theirs]
            measurements: list[Measurement] = [
                lambda: {own[0].ours: node.serve(slice_s)},
                lambda: {theirs: serve()},
            ]
            measure_rounds(run, measurements, own, rounds=settings.chosen_rounds)

        if has_bare:
            take_rounds(f"{case.name}_bare", lambda: node.bare(case.rows, slice_s), DEVICE_RATIOS)
        if python is not None:
            with open_hivemind(case, python=python, seed=settings.seed) as serve:
                take_rounds(f"{case.name}_hivemind", lambda: serve(slice_s), HIVEMIND_RATIOS)


def _measure_single_rows(run: Run[SpeedSettings], case: Case) -> None:
    """Rounds with requests of one row: bare calls have the mean batch of the same round; and a node that joins none."""
    settings, slice_s = run.settings, run.settings.chosen_slice_s
    run.say(f"{case.name}: starting")
    opened = partial(open_node, processes=settings.processes, seed=settings.seed)
    with opened(case) as node, opened(replace(case, max_batch_rows=1)) as unbatched:
        measurements: list[Measurement] = [
            partial(_node_around_bare, node, slice_s),
            lambda: {f"{case.name}_unbatched": unbatched.serve(slice_s)},
        ]
        ratios = [ratio for ratio in DEVICE_RATIOS if ratio.ours == case.name]
        measure_rounds(run, measurements, ratios, rounds=settings.chosen_rounds)


def _node_around_bare(node: NodeAndCallers, slice_s: float) -> dict[str, Quantities]:
    """Half a slice of the node, bare calls at the mean batch that it had there, the other half.

    So the mean batch is known before the bare calls, and yet neither side is always first.
    """
    name = node.case.name
    first = node.serve(slice_s / 2)
    bare = node.bare(first.get("mean_batch", 1.0), slice_s)
    second = node.serve(slice_s / 2)
    halves = {key: (first[key] + second[key]) / 2 for key in ("samples_per_s", "cpu_share")}
    whole = with_samples_per_cpu_s({**second, **halves, "mean_batch": first.get("mean_batch")})
    return {name: whole, f"{name}_bare": bare}


def _measure_memory(run: Run[SpeedSettings], case: Case) -> None:
    """Serve a load of mixed batch sizes; log memory and compilations."""
    settings = run.settings
    run.say(f"{case.name}: {settings.chosen_load_s:g} s of mixed batch sizes")
    with open_node(case, processes=settings.processes, seed=settings.seed) as node:
        before = node.node.ask(do="count")
        record = node.serve(settings.chosen_load_s)
        after, hello = node.node.ask(do="count"), node.node.hello
        run.log(
            MEMORY,
            name=case.name,
            state_bytes=hello["state_bytes"],
            import_bytes=hello["import_bytes"],
            **memory_record(hello["import_bytes"], hello["state_bytes"], after["memory_bytes"]),
            **{**record, "compilations": after["compilations"] - before["compilations"]},
        )


def memory_record(import_bytes: int | None, state_bytes: int, memory: tuple[int, int] | None) -> dict[str, float]:
    """Compute a node's memory beyond its imports, and that over what it may be; nothing where the system is silent.

    Args:
      import_bytes: resident after the imports.
      state_bytes: of parameters and optimiser states.
      memory: resident now, and the most ever.
    """
    if import_bytes is None or memory is None:
        return {}
    held, peak = (each - import_bytes for each in memory)
    allowed = _STATE_FACTOR * state_bytes + _OVERHEAD_BYTES
    return {"beyond_bytes": held, "ratio": held / allowed, "peak_bytes": peak, "peak_ratio": peak / allowed}


def _measure_saving(run: Run[SpeedSettings], case: Case) -> None:
    """Call a large expert one call at a time: first while nothing is saved, then through checkpoints.

    Raises:
      NothingSaved: no checkpoint comes.
    """
    settings = run.settings
    run.say(f"{case.name}: {case.parameters:,} parameters, saved while it is served")
    with tempfile.TemporaryDirectory() as folder, open_node(case, processes=1, seed=settings.seed) as node:
        bare = node.bare(case.rows, settings.chosen_slice_s)
        quiet = node.serve(settings.chosen_slice_s)
        if not quiet["layer_calls"]:
            raise NothingSaved(f"no call of {case.name} ended in {settings.chosen_slice_s:g} s; try a longer --slice-s")
        node.node.ask(do="save", folder=folder, period_s=settings.chosen_slice_s)
        during = _through_saves(node, Path(folder), settings.chosen_slice_s)
        run.log(SAVING, parameters=case.parameters, **saving_record(quiet, during, bare["backward_s"]))


def _through_saves(node: NodeAndCallers, folder: Path, slice_s: float) -> list[Quantities]:
    """Slices until checkpoints have been written in some of them. The one before the first counts, too: a save begins
    with a copy of the state, before anything is written."""
    slices: list[Quantities] = []
    written, last = 0, _last_write(folder)
    while written < _SAVES:
        if len(slices) == _MOST_SAVE_SLICES:
            raise NothingSaved(f"checkpoints were written in {written} of {len(slices)} slices, expected {_SAVES}")
        slices.append(node.serve(slice_s))
        now = _last_write(folder)
        written, last = written + (now > last), now
    return slices


def _last_write(folder: Path) -> int:
    """When a file in the folder was last written, nanoseconds; 0 if there is none."""
    times = [0]
    for path in folder.rglob("*"):
        try:
            times.append(path.stat().st_mtime_ns if path.is_file() else 0)
        except FileNotFoundError:  # older checkpoints are deleted meanwhile
            continue
    return max(times)


def saving_record(quiet: Quantities, during: list[Quantities], backward_s: float) -> dict[str, float]:
    """Compute how long saving holds calls.

    Args:
      quiet: a slice without saves. during: slices with some.
      backward_s: seconds of a bare backward.

    Returns:
      `wait_s`, the longest that a call took in `during` beyond the median of its kind in `quiet`, and that over a
      backward; and the same of `quiet` itself, what calls wait where nothing is saved.
    """
    kinds = ("forward_s", "backward_s")

    def wait_of(slices: list[Quantities]) -> float:
        waits = [
            each[f"longest_{kind}"] - quiet[kind] for each in slices for kind in kinds if f"longest_{kind}" in each
        ]
        return max(0.0, *waits)

    return {
        "backward_s": backward_s,
        "wait_s": wait_of(during),
        "ratio": wait_of(during) / backward_s,
        "quiet_ratio": wait_of([quiet]) / backward_s,
        "slices": len(during),
    }


def summarise(run: Run[SpeedSettings]) -> Result | None:
    """Compute the ratios that there are, medians of what they are made of, memory and saving; None without any."""
    parts, slices = run.settings.parts, run.records(SLICE)
    has_hivemind = any(record["name"].endswith("_hivemind") for record in slices)
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    if "calls" in parts:
        ratios = [*DEVICE_RATIOS, *(HIVEMIND_RATIOS if has_hivemind else ())]
        bars += [ratio.bar for ratio in ratios]
        figures |= {ratio.name: None for ratio in (*DEVICE_RATIOS, *HIVEMIND_RATIOS)}
        made_of = ("samples_per_s", "mean_batch", "cpu_share")
        figures |= _ratio_figures(slices, [*ratios, *PROCESSOR_RATIOS], made_of)
    if "memory" in parts:
        bars += [MEMORY_BAR, COMPILATIONS_BAR]
        figures |= _memory_figures(run)
    if "saving" in parts:
        bars.append(SAVE_BAR)
        figures |= _saving_figures(run)
    tables = []
    if "strategies" in parts:
        rates = strategy_rates(slices, run.records(CHOICE))
        bars.append(CHOICE_BAR)
        figures |= strategy_figures(rates)
        tables.append(strategy_table(rates))
    if "demonstration" in parts:
        bars += [ratio.bar for ratio in STEP_RATIOS]
        found = _ratio_figures(slices, STEP_RATIOS, ("steps_per_s",))
        # It has rounds of its own.
        figures |= {("demo_rounds" if name == "rounds" else name): value for name, value in found.items()}
    if not slices and not run.records(MEMORY) and not run.records(SAVING):
        return None
    title = "An expert node beside bare jitted calls" + (" and beside hivemind" if has_hivemind else "")
    return Result(title=title, figures=figures, bars=bars, tables=tables)


def _ratio_figures(slices: list[Any], ratios: Sequence[Ratio], quantities: Sequence[str]) -> dict[str, Any]:
    """Return the figures of `round_figures` for the ratios that have a round; None for the others."""
    measured = [ratio for ratio in ratios if ratio.of_rounds(slices)]
    found = (round_figures(slices, measured, quantities) if measured else None) or {}
    return {ratio.name: None for ratio in ratios} | found


def _memory_figures(run: Run[SpeedSettings]) -> dict[str, Any]:
    """Figures of nodes with a mixed load: worst ratios, what each held, all compilations; None for what is missing."""
    records = run.records(MEMORY)
    figures: dict[str, Any] = {
        "memory_ratio": max((each["ratio"] for each in records if "ratio" in each), default=None),
        "memory_peak_ratio": max((each["peak_ratio"] for each in records if "peak_ratio" in each), default=None),
        "compilations_while_serving": sum(each["compilations"] for each in records) if records else None,
    }
    for each in records:
        if "beyond_bytes" in each:
            figures[f"{each['name']}_mb"] = each["beyond_bytes"] / 1e6
            figures[f"{each['name']}_state_mb"] = each["state_bytes"] / 1e6
    return figures


def _saving_figures(run: Run[SpeedSettings]) -> dict[str, Any]:
    names = {"save_wait_ratio": "ratio", "quiet_wait_ratio": "quiet_ratio", "large_backward_s": "backward_s"}
    last = next(iter(run.records(SAVING)), {})
    return {figure: last.get(name) for figure, name in names.items()}


def draw(run: Run[SpeedSettings], result: Result) -> Figure:
    """Draw each ratio that was measured with its rounds beside its bar; memory and saving behind them."""
    slices = run.records(SLICE)
    panels = [
        (title, {text: ratio.of_rounds(slices)}, ratio.bar)
        for (title, text), ratio in zip(_PANELS, (*DEVICE_RATIOS, *HIVEMIND_RATIOS), strict=True)
    ]
    memory = {
        each["name"].removeprefix("memory_").replace("_", "\n"): [each["ratio"]]
        for each in run.records(MEMORY)
        if "ratio" in each
    }
    panels.append(("Memory", memory, MEMORY_BAR))
    wait = result.figures.get("save_wait_ratio")
    panels.append(("Saving", {"longest wait": [] if wait is None else [wait]}, SAVE_BAR))
    for width in run.settings.widths:
        shares = {
            f"{each.cell.experts}\n{each.cell.rows}": [each.share]
            for each in strategy_rates(slices, run.records(CHOICE))
            if each.cell.width == width
        }
        panels.append((f"Chosen over better, d={width}", shares, CHOICE_BAR))
    for count in TRAINERS:
        of_count = [ratio for ratio in STEP_RATIOS if ratio.ours.endswith(f"_{count}")]
        columns = {ratio.ours.partition("_")[0]: ratio.of_rounds(slices) for ratio in of_count}
        title = f"Steps, {count} trainer{'s' if count > 1 else ''}"
        panels.append((title, {text: rounds for text, rounds in columns.items() if rounds}, of_count[0].bar))
    shown = [panel for panel in panels if panel[1] and all(panel[1].values())]
    return ratio_figure(shown, first_label="node over the other", last_label="")


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Each ratio, round by round, beside its bar; memory and the longest wait during a save beside theirs",
    check=hivemind_python,
    expected=(NothingSaved,),
    causes=(HelperFailed,),
)
