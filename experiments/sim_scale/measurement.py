"""The simulation's price and its promise: time beside computing, messages a second, and the same run twice."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
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
        run.log("messages", **exchange)
    for number in range(times):
        run.say(f"a step of {settings.trainers} trainers, then the same XLA calls alone ({number + 1}/{times})")
        step = measure_trainers(
            trainers=settings.trainers,
            calls_in_a_row=settings.calls_in_a_row,
            delay_s=settings.delay_s,
            seed=settings.seed + number,
        )
        run.log("step", **step)


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
    """Run the scenario in a process for each hash seed, side by side; SHA-256 of the metrics that each writes.

    Raises:
      RuntimeError: a process failed; its last words.
    """
    command = [sys.executable, "-m", "experiments.sim_scale.scenario", "--seed", str(seed), "--out"]
    files = [folder / f"scenario-{hash_seed}.jsonl" for hash_seed in hash_seeds]
    with ExitStack() as stack:
        processes = []
        for hash_seed, file in zip(hash_seeds, files, strict=True):
            process = subprocess.Popen(
                [*command, str(file)],
                env=os.environ | {"PYTHONHASHSEED": str(hash_seed)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in processes:
            _, errors = process.communicate()
            if process.returncode:
                last_words = errors.strip().splitlines() or [f"status {process.returncode}"]
                raise RuntimeError(f"the scenario failed: {last_words[-1]}")
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=lambda run, _: scale_figure(run, ratio_bar=TRAINERS_BAR.bound, rate_bar=MESSAGES_BAR.bound),
    figure_text="Time of a step beside its XLA calls, messages a second, and the steps of the scenario over virtual "
    "time",
    expected=(RuntimeError,),
)
