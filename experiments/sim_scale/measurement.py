"""The simulation's price and its promise: time beside computing, messages a second, and the same run twice."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median_low

from experiments.bench import Experiment, Run
from experiments.results import Bar, Result
from experiments.sim_scale.figure import scale_figure
from experiments.sim_scale.messages import measure_messages
from experiments.sim_scale.settings import ScaleSettings
from experiments.sim_scale.trainers import measure_trainers

TRAINERS_BAR = Bar(name="trainers_ratio", bound=3.0)
"""A step in the simulated swarm may take this multiple of its computing."""
MESSAGES_BAR = Bar(name="messages_per_s", bound=5000.0, comparison=">=")
"""Messages a second of real time."""
REPRODUCIBLE = Bar(name="reproducible", bound=1, comparison=">=")
"""All processes wrote the same metrics."""


def measure(run: Run[ScaleSettings]) -> None:
    """Run the scenario in several processes, then exchange messages, then let trainers step."""
    settings, times = run.settings, 1 if run.settings.quick else 3
    run.say("a swarm to which everything happens, in processes with different hash seeds")
    hash_seeds = range(1, 3 if settings.quick else 5)
    run.log("scenario", digests=scenario_digests(settings.seed, run.folder.path, hash_seeds=hash_seeds))
    for number in range(times):
        run.say(f"{settings.messages} messages between {settings.peers} peers ({number + 1}/{times})")
        exchange = measure_messages(
            peers=settings.peers, messages=settings.messages, neighbours=settings.neighbours, seed=settings.seed
        )
        run.log("messages", **asdict(exchange), messages_per_s=exchange.messages / exchange.wall_s)
    for number in range(times):
        run.say(f"a step of {settings.trainers} trainers, then the same XLA calls alone ({number + 1}/{times})")
        step = measure_trainers(
            trainers=settings.trainers,
            calls_in_a_row=settings.calls_in_a_row,
            delay_s=settings.delay_s,
            seed=settings.seed + number,
        )
        run.log("step", **asdict(step), trainers_ratio=step.ratio)


def summarise(run: Run[ScaleSettings]) -> Result | None:
    """Take medians; None where the run ended before there was one of each measurement."""
    scenarios, exchanges, steps = (run.records(kind) for kind in ("scenario", "messages", "step"))
    if not (scenarios and exchanges and steps):
        return None
    digests = scenarios[0]["digests"]
    return Result(
        title="What a simulated swarm costs",
        figures={
            "trainers_ratio": median_low(step["trainers_ratio"] for step in steps),
            **{f"trainers_{name}": steps[-1][name] for name in ("wall_s", "compute_s", "virtual_s", "calls")},
            "messages_per_s": median_low(exchange["messages_per_s"] for exchange in exchanges),
            "messages": exchanges[-1]["messages"],
            "peers": run.settings.peers,
            "dials": exchanges[-1]["dials"],
            "reproducible": len(set(digests)) == 1,
            "scenario_sha256": digests[0],
        },
        bars=(TRAINERS_BAR, MESSAGES_BAR, REPRODUCIBLE),
    )


def scenario_digests(seed: int, folder: Path, *, hash_seeds: Sequence[int]) -> list[str]:
    """SHA-256 of the metrics that the scenario writes in one process for each hash seed, two at a time.

    Raises:
      RuntimeError: a process failed; its last words.
    """
    digests = []
    for first in range(0, len(hash_seeds), 2):
        with ExitStack() as stack:
            running = [_start_scenario(stack, seed, folder, each) for each in hash_seeds[first : first + 2]]
            for process, metrics in running:
                _, errors = process.communicate()
                if process.returncode:
                    last_words = errors.strip().splitlines() or [f"status {process.returncode}"]
                    raise RuntimeError(f"the scenario failed: {last_words[-1]}")
                digests.append(hashlib.sha256(metrics.read_bytes()).hexdigest())
    return digests


def _start_scenario(stack: ExitStack, seed: int, folder: Path, hash_seed: int) -> tuple["subprocess.Popen[str]", Path]:
    """A process that simulates the scenario, killed when the stack unwinds, and the file that it writes."""
    metrics = folder / f"scenario-{hash_seed}.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.sim_scale.scenario", "--out", str(metrics), "--seed", str(seed)],
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    stack.enter_context(process)
    stack.callback(process.kill)
    return process, metrics


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=lambda run, _: scale_figure(run, ratio_bar=TRAINERS_BAR.bound, rate_bar=MESSAGES_BAR.bound),
    figure_text="Time of a step beside its XLA calls, messages a second, and the steps of the scenario over virtual "
    "time",
    expected=(RuntimeError,),
)
