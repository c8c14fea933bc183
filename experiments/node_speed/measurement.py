"""The node, bare calls of its programs and hivemind in turn, round after round; memory and compilations under load; and
steps a second of the demonstration's trainers, beside those of the same model in one jitted program.

The demonstration's swarm is that of `dmoe up`: a DHT peer, four nodes and one trainer process, over TLS. It has the
machine to itself while it trains, as the jitted program has before and after it.
"""

import math
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dmoe_jax.runs.flags import as_flags
from dmoe_jax.runs.run_folder import read_metrics
from experiments.bench import Experiment, Run
from experiments.node_speed.settings import CASES, MIXED_LOADS, SINGLE_ROWS, Case, SpeedSettings
from experiments.processes import HelperFailed, HelperProcess, open_helpers, run_child
from experiments.results import Bar, Result
from experiments.rounds import SLICE, Measurement, Ratio, Record, measure_rounds, round_figures

BESIDE = "_beside_hivemind"
"""Behind the name of a slice of the node in rounds with hivemind: its hundred processes, which take time and memory
also while nobody asks them, do not run in the rounds with bare calls."""
MEMORY = "memory"
"""Kind of the records beside the slices."""
DEVICE_RATIOS = {
    name: Ratio(f"device_ratio_{name}", "samples_per_s", name, f"{name}_bare", ">=", bound)
    for name, bound in (("large_requests", 0.85), ("many_experts", 0.6), ("single_rows", 0.5))
}
BATCHING_GAIN = Ratio("batching_gain", "samples_per_s", "single_rows", "single_rows_unbatched", ">=", 6.0)
HIVEMIND_RATIOS = {
    name: Ratio(f"hivemind_ratio_{name}", "samples_per_s", f"{name}{BESIDE}", f"{name}_hivemind", ">=", bound)
    for name, bound in (("many_experts", 15.0), ("large_requests", 5.0), ("wide_expert", 10.0))
}
"""By the name of the case."""
MEMORY_BAR = Bar(name="memory_ratio", bound=1.0)
"""Memory beyond imports, over 1.3 times the state and 150 MB."""
COMPILATIONS_BAR = Bar(name="compilations_while_serving", bound=0.0)
ROUTERS = {"token": "balanced", "sequence": "product_key"}
"""Routers of the demonstration, where tokens have experts of their own, and where sequences do, as was so when the bars
were set."""
_STEP_BARS = {1: 0.75, 4: 0.9}
"""By the asynchronous trainers in the trainer process."""
STEP_RATIOS = tuple(
    Ratio(f"step_ratio_{route}_{count}", "steps_per_s", f"{route}_swarm_{count}", f"{route}_one_jit", ">=", bound)
    for route in ROUTERS
    for count, bound in _STEP_BARS.items()
)
"""Steps a second of a swarm with one trainer, and with four, over those of one jitted program in the same round."""

_PROCESSES = 2
"""Processes that a node's callers share evenly."""
_LEAD_S = 0.3
"""Before a slice begins: its callers are at work by then, and the queue is as long as it will be."""
_HIVEMIND_SLICES = 2
"""Its calls are few and come in bursts: it gets this many times as long."""

Quantities = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAndCallers:
    """A node and those who ask it, each a process."""

    case: Case
    node: HelperProcess
    callers: Sequence[HelperProcess]

    def serve(self, slice_s: float) -> Quantities:
        """Have all callers call for a slice; `samples_per_s`, and the node's `mean_batch` rows if it had a batch."""
        counts: list[dict[str, Any]] = []
        found = take_slice(self.callers, slice_s, at_ends=lambda: counts.append(self.node.ask(do="count")))
        rows, batches = (counts[1][name] - counts[0][name] for name in ("rows", "batches"))
        return found | ({"mean_batch": rows / batches} if batches else {})

    def bare(self, rows: float, for_s: float) -> Quantities:
        """Time bare calls of the node's programs, while nobody calls it.

        Args:
          rows: of each call; between two whole numbers both are timed, and the time between them is taken to be linear.
          for_s: seconds to go on.
        """
        sizes = sorted({math.floor(rows), math.ceil(rows)})
        answers = [self.node.ask(do="bare", rows=size, for_s=for_s / len(sizes)) for size in sizes]
        seconds = np.interp(rows, sizes, [answer["call_s"] for answer in answers])
        return {"rows": rows, "samples_per_s": float(rows / seconds)}


def take_slice(
    helpers: Sequence[HelperProcess], slice_s: float, *, at_ends: Callable[[], object] = lambda: None
) -> Quantities:
    """Order a slice, wait for it, and return `samples_per_s`, of those that ended in it.

    Args:
      helpers: processes that take the order {"begin", "end"} and say how many "samples" they had.
      slice_s: its duration, seconds.
      at_ends: called when it begins, and when it ends.
    """
    begin = time.perf_counter() + _LEAD_S
    end = begin + slice_s
    for helper in helpers:
        helper.tell(begin=begin, end=end)
    for moment in (begin, end):
        time.sleep(max(0.0, moment - time.perf_counter()))
        at_ends()
    return {"samples_per_s": sum(helper.hear()["samples"] for helper in helpers) / slice_s}


@contextmanager
def open_node(case: Case, seed: int) -> Iterator[NodeAndCallers]:
    """Start a node that serves a case, and then its callers; `seed` is of all that is drawn. Raises HelperFailed."""
    own = {"case": asdict(case), "seed": seed}
    with open_helpers("experiments.node_speed.node", [own]) as (node,):
        own |= {"contact": node.hello["contact"], "callers": case.callers // _PROCESSES}
        each = [own | {"seed": seed * 10**6 + number * 10**3} for number in range(_PROCESSES)]
        with open_helpers("experiments.node_speed.caller", each) as callers:
            yield NodeAndCallers(case=case, node=node, callers=callers)


@contextmanager
def open_hivemind(case: Case, seed: int, *, python: str) -> Iterator[HelperProcess]:
    """Start hivemind's server and callers, by an interpreter that has it; for `take_slice`. Raises HelperFailed."""
    with tempfile.TemporaryDirectory(prefix="hv") as sockets:  # a short name: those of sockets may have 107 characters
        settings = {"case": asdict(case), "seed": seed, "sockets": sockets}
        with open_helpers("experiments.node_speed.hivemind_side", [settings], python=python) as (side,):
            yield side


def hivemind_python(settings: SpeedSettings) -> str | None:
    """The interpreter that has hivemind: the one that is named, or .hv/bin/python; None if that is not there. Raises
    ValueError if the one that is named does not exist, or has no hivemind."""
    python = settings.hivemind or Path(".hv/bin/python")
    # Not `resolve`: the link's place says which environment is meant.
    found = shutil.which(python.expanduser().absolute())
    if settings.hivemind is not None and (found is None or not _has_hivemind(found)):
        raise ValueError(f"--hivemind must be a Python interpreter with hivemind and torch, got {python}")
    return found


def _has_hivemind(python: str) -> bool:
    """True if this program is an interpreter that finds both packages; nothing is imported, which takes long."""
    look = "import importlib.util as u, sys; sys.exit(not (u.find_spec('hivemind') and u.find_spec('torch')))"
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run([python, "-c", look], capture_output=True, timeout=30, check=False).returncode == 0
    return False


def measure(run: Run[SpeedSettings]) -> None:
    """Measure the chosen parts."""
    settings = run.settings
    if "calls" in settings.parts:
        python = hivemind_python(settings)
        if python is None:
            run.say("no interpreter with hivemind is known (--hivemind): the figures beside it stay empty")
        for case in CASES:
            if case.name in DEVICE_RATIOS or python is not None:
                _measure_case(run, case, python)
    if "memory" in settings.parts:
        load_s = 10.0 if settings.quick else 600.0
        for case in MIXED_LOADS:
            run.say(f"{case.name}: {load_s:g} s of mixed batch sizes")
            with open_node(case, settings.seed) as node:
                compiled = node.node.ask(do="count")["compilations"]
                node.serve(load_s)
                after = node.node.ask(do="count")
            compilations = after["compilations"] - compiled
            run.log(MEMORY, name=case.name, ratio=after["memory_ratio"], compilations=compilations)
    if "demonstration" in settings.parts:
        for route in ROUTERS:
            measure_route(run, route)


def _measure_case(run: Run[SpeedSettings], case: Case, python: str | None) -> None:
    """Rounds of the node and bare calls, if there is such a ratio, with single rows also of a node that joins no
    requests; then of the node and hivemind, if it is at hand."""
    settings, seed = run.settings, run.settings.seed
    slice_s = 1.0 if settings.quick else 3.0
    take_turns = partial(measure_rounds, run, rounds=settings.rounds or (3 if settings.quick else 9))
    device, beside = DEVICE_RATIOS.get(case.name), HIVEMIND_RATIOS.get(case.name)
    run.say(f"{case.name}: starting")
    with ExitStack() as stack:
        node = stack.enter_context(open_node(case, seed))
        if case is SINGLE_ROWS:
            unbatched = stack.enter_context(open_node(replace(case, max_batch_rows=1), seed))
            sides: list[Measurement] = [partial(node_around_bare, node, slice_s)]
            sides.append(lambda: {BATCHING_GAIN.baseline: unbatched.serve(slice_s)})
            take_turns(sides, [DEVICE_RATIOS[case.name], BATCHING_GAIN])
        elif device is not None:
            bare = partial(node.bare, case.rows, slice_s)
            take_turns([lambda: {device.ours: node.serve(slice_s)}, lambda: {device.baseline: bare()}], [device])
        if beside is not None and python is not None:
            hivemind = stack.enter_context(open_hivemind(case, seed, python=python))
            asked = partial(take_slice, [hivemind], _HIVEMIND_SLICES * slice_s)
            take_turns([lambda: {beside.ours: node.serve(slice_s)}, lambda: {beside.baseline: asked()}], [beside])


def node_around_bare(node: NodeAndCallers, slice_s: float) -> dict[str, Quantities]:
    """Half a slice of the node, bare calls at the mean batch that it had there, the other half.

    So the mean batch is known before the bare calls, and yet neither side is always first.
    """
    name = node.case.name
    first = node.serve(slice_s / 2)
    bare = node.bare(first.get("mean_batch", 1.0), slice_s)
    second = node.serve(slice_s / 2)
    whole = {"mean_batch": bare["rows"], "samples_per_s": (first["samples_per_s"] + second["samples_per_s"]) / 2}
    return {name: whole, f"{name}_bare": bare}


def measure_route(run: Run[SpeedSettings], route: str) -> None:
    """Rounds of the jitted program, and of swarms with one trainer and with four. Raises HelperFailed."""
    steps, seed = 120 if run.settings.quick else 400, run.settings.seed
    run.say(f"demonstration, where each {route} chooses: starting")
    common = {"route": route, "router": ROUTERS[route], "seed": seed}
    with open_helpers("experiments.node_speed.one_jit", [common]) as (helper,):
        sides: list[Measurement] = [lambda: {f"{route}_one_jit": helper.ask(steps=steps)}]
        sides += [partial(swarm_slice, route, count, steps=steps, seed=seed) for count in _STEP_BARS]
        ratios = [ratio for ratio in STEP_RATIOS if ratio.ours.startswith(route)]
        measure_rounds(run, sides, ratios, rounds=run.settings.rounds or 3)


def swarm_slice(route: str, trainers: int, *, steps: int, seed: int) -> Mapping[str, Record]:
    """Train with a swarm of `dmoe up`: steps a second of the second half of its steps.

    Raises:
      HelperFailed: it did not train to the end.
    """
    # Evaluation is not what is measured.
    train = {"num_trainers": trainers, "eval_every": 10 * steps, "eval_tokens": 512, "final_eval_tokens": 512}
    further = {"node": {"warm_up_rows": 256}, "train": train}
    # As one word each, for their values begin like flags.
    words = [f"--{kind}-flags={' '.join(as_flags(values))}" for kind, values in further.items()]
    with tempfile.TemporaryDirectory(prefix="demo") as folder:
        out = Path(folder) / "run"
        flags = {"nodes": 4, "route": route, "router": ROUTERS[route], "steps": steps, "seed": seed, "out": out}
        status, _, failure = run_child(["dmoe_jax.cli", "up", *as_flags(flags), *words])
        if status:
            raise HelperFailed(f"dmoe up did not train to its end: {failure}")
        times = sorted(record["time_s"] for record in read_metrics(out / "metrics.jsonl") if record["kind"] == "train")
    half = times[len(times) // 2 :]
    return {f"{route}_swarm_{trainers}": {"steps_per_s": (len(half) - 1) / (half[-1] - half[0])}}


def summarise(run: Run[SpeedSettings]) -> Result | None:
    """Compute the ratios that there are, medians of what they are made of, and memory; None without any."""
    parts, slices, memory = run.settings.parts, run.records(SLICE), run.records(MEMORY)
    if not slices and not memory:
        return None
    has_hivemind = any(record["name"].endswith("_hivemind") for record in slices)
    ratios: list[Ratio] = []
    if "calls" in parts:
        ratios += [*DEVICE_RATIOS.values(), BATCHING_GAIN, *HIVEMIND_RATIOS.values()]
    if "demonstration" in parts:
        ratios += STEP_RATIOS
    figures: dict[str, Any] = {}
    for ratio in ratios:
        figures[ratio.name] = None
        figures |= round_figures(slices, [ratio], ("samples_per_s", "mean_batch", "steps_per_s")) or {}
    figures.pop("rounds", None)  # the demonstration has others
    bars = [ratio.bar for ratio in ratios if has_hivemind or ratio not in HIVEMIND_RATIOS.values()]
    if "memory" in parts:
        bars += [MEMORY_BAR, COMPILATIONS_BAR]
        known = [each["ratio"] for each in memory if each["ratio"] is not None]
        figures[MEMORY_BAR.name] = max(known, default=None)
        figures[COMPILATIONS_BAR.name] = sum(each["compilations"] for each in memory) if memory else None
    title = "An expert node beside bare jitted calls" + (" and beside hivemind" if has_hivemind else "")
    return Result(title=title, figures=figures, bars=bars)


EXPERIMENT = Experiment(measure=measure, summarise=summarise, check=hivemind_python, causes=(HelperFailed,))
