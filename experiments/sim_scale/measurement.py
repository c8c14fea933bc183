"""The simulation's price and its promise: time beside computing, messages a second, and the same run twice."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median_low

from matplotlib.figure import Figure

from experiments.bench import Experiment, Run
from experiments.panels import ratio_figure
from experiments.results import Bar, Result
from experiments.sim_scale.messages import measure_messages
from experiments.sim_scale.settings import ScaleSettings
from experiments.sim_scale.trainers import measure_trainers

TRAINERS_BAR = Bar(name="trainers_ratio", bound=3.0)
"""A step in the simulated swarm may take this multiple of its computing."""
MESSAGES_BAR = Bar(name="messages_per_s", bound=5000.0, comparison=">=")
"""Messages a second of real time."""
REPRODUCIBLE = Bar(name="reproducible", bound=1, comparison=">=")
"""All processes printed the same."""


def measure(run: Run[ScaleSettings]) -> None:
    """Run the example in several processes, then exchange messages, then let trainers step."""
    settings, times = run.settings, 1 if run.settings.quick else 3
    run.say("a swarm to which everything happens, in processes with different hash seeds")
    hash_seeds = range(1, 3 if settings.quick else 5)
    run.log("scenario", digests=example_digests(settings.seed, run.folder.path, hash_seeds=hash_seeds))
    for number in range(times):
        run.say(f"{settings.messages} messages between {settings.peers} peers ({number + 1}/{times})")
        run.log("messages", **measure_messages(peers=settings.peers, messages=settings.messages, seed=settings.seed))
    for number in range(times):
        run.say(f"a step of {settings.trainers} trainers, then the same XLA calls alone ({number + 1}/{times})")
        run.log("step", **measure_trainers(trainers=settings.trainers, seed=settings.seed + number))


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


def example_digests(seed: int, folder: Path, *, hash_seeds: Sequence[int]) -> list[str]:
    """Run the example in a process for each hash seed, side by side; SHA-256 of what each prints into the folder.

    Raises:
      RuntimeError: a process failed.
    """
    command = ["-m", "experiments.sim_scale.example", str(seed)]
    files = {hash_seed: folder / f"scenario-{hash_seed}.jsonl" for hash_seed in hash_seeds}
    with ExitStack() as stack:
        processes = []
        for hash_seed, file in files.items():
            variables = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
            output = stack.enter_context(file.open("wb"))
            # Its standard error has a line for each failure that it is meant to have.
            process = subprocess.Popen(
                [sys.executable, *command], env=variables, stdout=output, stderr=subprocess.DEVNULL
            )
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        if any(process.wait() for process in processes):
            raise RuntimeError(f"the example failed; try python {' '.join(command)}")
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files.values()]


def draw(run: Run[ScaleSettings], result: Result) -> Figure:
    """Draw each measurement beside its bar."""
    steps = [record["trainers_ratio"] for record in run.records("step")]
    rates = [record["messages_per_s"] for record in run.records("messages")]
    trainers, peers = f"{run.settings.trainers} trainers", f"{run.settings.peers:,} peers"
    panels = [("A step", {trainers: steps}, TRAINERS_BAR), ("Messages", {peers: rates}, MESSAGES_BAR)]
    return ratio_figure(panels, first_label="over its computing", last_label="a second")


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Time of a step over that of its XLA calls, and messages a second, each beside its bar",
    expected=(RuntimeError,),
)
