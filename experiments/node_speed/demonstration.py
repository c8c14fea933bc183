"""Steps a second of the demonstration's trainers, beside those of the same model in one jitted program.

The swarm is that of `dmoe up`: a DHT peer, four nodes and one trainer process, over TLS. It has the machine to itself
while it trains, as the jitted program has before and after it.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dmoe_jax.layer_config import Route
from dmoe_jax.runs.flags import as_flags
from dmoe_jax.runs.run_folder import read_metrics
from experiments.bench import Run
from experiments.node_speed.cases import ROUTERS
from experiments.node_speed.settings import SpeedSettings
from experiments.processes import HelperFailed, HelperProcess, open_helpers
from experiments.rounds import Measurement, Ratio, Record, measure_rounds

NODES = 4
TRAINERS = (1, 4)
"""Asynchronous trainers in the trainer process."""
ROUTES: tuple[Route, ...] = ("token", "sequence")
"""The demonstration's, and what it was when the bars were set."""
_BARS = {1: 0.75, 4: 0.9}
_MAX_ROWS = 256
_FEW_TOKENS = 512
"""Tokens of an evaluation, which is not what is measured."""

STEP_RATIOS = tuple(
    Ratio(
        f"step_ratio_{route}_{count}", "steps_per_s", f"{route}_swarm_{count}", f"{route}_one_jit", ">=", _BARS[count]
    )
    for route in ROUTES
    for count in TRAINERS
)
"""Steps a second of a swarm with one trainer, and with four, over those of one jitted program in the same round."""


def measure_demonstration(run: Run[SpeedSettings]) -> None:
    """Rounds of the jitted program, and of swarms with one trainer and with four.

    Raises:
      HelperFailed: a process has ended.
    """
    settings = run.settings
    for route in ROUTES:
        run.say(f"demonstration, where each {route} chooses: starting")
        common = {"route": route, "router": ROUTERS[route], "data": "auto", "seed": settings.seed}
        with open_helpers("experiments.node_speed.one_jit", [common]) as (helper,):

            def one_jit(route: Route = route, helper: HelperProcess = helper) -> Mapping[str, Record]:
                return {f"{route}_one_jit": helper.ask(steps=settings.chosen_demo_steps)}

            def swarm(count: int, route: Route = route) -> Mapping[str, Record]:
                steps, seed = settings.chosen_demo_steps, settings.seed
                return {f"{route}_swarm_{count}": swarm_slice(route, count, steps=steps, seed=seed)}

            measurements: list[Measurement] = [one_jit, *(partial(swarm, count) for count in TRAINERS)]
            ratios = [ratio for ratio in STEP_RATIOS if ratio.ours.startswith(route)]
            measure_rounds(run, measurements, ratios, rounds=settings.demo_rounds)


def swarm_slice(route: Route, trainers: int, *, steps: int, seed: int) -> dict[str, float]:
    """Train with a swarm of `dmoe up`, and return steps a second of the second half of its steps, and what failed.

    Raises:
      HelperFailed: it did not train to the end.
    """
    train = {"num_trainers": trainers, "eval_every": 10 * steps}
    train |= {"eval_tokens": _FEW_TOKENS, "final_eval_tokens": _FEW_TOKENS}
    with tempfile.TemporaryDirectory(prefix="demo") as folder:
        out = Path(folder) / "run"
        flags: dict[str, Any] = {"nodes": NODES, "route": route, "router": ROUTERS[route], "steps": steps}
        flags |= {"out": out, "seed": seed, "exit_on_stdin_eof": True}
        further = {"node": {"warm_up_rows": _MAX_ROWS}, "train": train}
        # As one word each, for their values begin like flags.
        words = [f"--{kind}-flags={' '.join(as_flags(values))}" for kind, values in further.items()]
        command = [sys.executable, "-m", "dmoe_jax.cli", "up", *as_flags(flags), *words]
        # Its input is ours to close: it ends if we are killed.
        done = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert done.stdout is not None
            last = [line for line in done.stdout if line.strip()][-1:]
            if status := done.wait():
                raise HelperFailed(f"dmoe up ended with status {status}: {''.join(last).strip()}")
        finally:
            done.kill()
            done.communicate()
        return slice_of_metrics(read_metrics(out / "metrics.jsonl"))


def slice_of_metrics(metrics: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Steps a second of the second half of a run's steps, and expert calls that failed in all of it."""
    metrics = list(metrics)
    times = sorted(record["time_s"] for record in metrics if record["kind"] == "train")
    half = times[len(times) // 2 :]
    calls = [record for record in metrics if record["kind"] == "calls"]
    failed = calls[-1]["failed"] if calls else 0
    return {"steps_per_s": (len(half) - 1) / (half[-1] - half[0]), "failed": failed}
