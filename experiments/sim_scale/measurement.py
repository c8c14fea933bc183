"""The simulation's price and its promise: time beside computing, messages a second, and the same run twice."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from experiments.bench import Experiment, Run
from experiments.results import Bar, Result
from experiments.sim_scale.messages import measure_messages
from experiments.sim_scale.settings import ScaleSettings
from experiments.sim_scale.trainers import measure_trainers

EXAMPLE = Path(__file__).parents[2] / "examples" / "simulated_swarm.py"
"""A swarm of which half the nodes die; it prints times and losses, these to the last bit."""
TRAINERS_BAR = Bar(name="trainers_ratio", bound=3.0)
"""A step in the simulated swarm may take this multiple of its computing."""
MESSAGES_BAR = Bar(name="messages_per_s", bound=5000.0, comparison=">=")
"""Messages a second of real time."""
REPRODUCIBLE = Bar(name="reproducible", bound=1, comparison=">=")
"""All processes printed the same."""


def measure(run: Run[ScaleSettings]) -> None:
    """Run the example in several processes, then exchange messages, then let trainers step."""
    settings, times = run.settings, 1 if run.settings.quick else 3
    run.say("the example of a simulated swarm, in processes with different hash seeds")
    run.log("example", digests=example_digests(range(1, 3 if settings.quick else 5)))
    for number in range(times):
        run.say(f"{settings.messages} messages between {settings.peers} peers ({number + 1}/{times})")
        run.log("messages", **measure_messages(peers=settings.peers, messages=settings.messages, seed=settings.seed))
    for number in range(times):
        run.say(f"a step of {settings.trainers} trainers, then the same XLA calls alone ({number + 1}/{times})")
        run.log("step", **measure_trainers(trainers=settings.trainers, seed=settings.seed + number))


def summarise(run: Run[ScaleSettings]) -> Result | None:
    """Take medians; None where the run ended before there was one of each measurement."""
    examples, exchanges, steps = (run.records(kind) for kind in ("example", "messages", "step"))
    if not (examples and exchanges and steps):
        return None
    digests = examples[0]["digests"]
    figures: dict[str, Any] = {}
    for name, records in (("trainers_ratio", steps), ("messages_per_s", exchanges)):
        values = [record[name] for record in records]
        figures |= {name: median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    figures |= {f"trainers_{name}": steps[-1][name] for name in ("wall_s", "compute_s", "virtual_s", "calls")}
    figures |= {"messages": exchanges[-1]["messages"], "dials": exchanges[-1]["dials"], "peers": run.settings.peers}
    figures |= {"reproducible": len(set(digests)) == 1, "example_sha256": digests[0]}
    bars = (TRAINERS_BAR, MESSAGES_BAR, REPRODUCIBLE)
    return Result(title="What a simulated swarm costs", figures=figures, bars=bars)


def example_digests(hash_seeds: Sequence[int]) -> list[str]:
    """Run the example in a process for each hash seed, side by side; SHA-256 of what each prints.

    Raises:
      RuntimeError: a process failed.
    """
    with ExitStack() as stack:
        processes = []
        for hash_seed in hash_seeds:
            variables = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
            # Its standard error has a line for each failure that it is meant to have.
            pipes: dict[str, int] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            process = subprocess.Popen([sys.executable, EXAMPLE], env=variables, **pipes)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        printed = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            raise RuntimeError(f"the example failed; try python {EXAMPLE}")
    return [hashlib.sha256(each).hexdigest() for each in printed]


EXPERIMENT = Experiment(measure=measure, summarise=summarise, expected=(RuntimeError,))
