"""The simulation's price and its promise: time beside computing, messages a second, and the same run twice."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from dmoe_jax.cli.common import fail, parse_command_line
from dmoe_jax.runs.report import write_report
from dmoe_jax.runs.run_folder import FIGURE, RunFolder
from experiments.sim_scale.figure import scale_figure

_EXIT_INTERRUPTED = 130
_TITLE = "What a simulated swarm costs"
_FIGURE_TEXT = "Time of a step beside its XLA calls, messages a second, and the steps of the scenario over virtual time"
_MAX_DELAY_S = 30.0  # a call is given up after 600 s; no exponential delay of this mean comes near that

TRAINERS_BAR = 3.0
"""A step in the simulated swarm may take this multiple of its computing."""

MESSAGES_BAR = 5000.0
"""Messages a second of real time."""


@dataclass(frozen=True, kw_only=True)
class ScaleSettings:
    """Measure what a simulated swarm costs, and whether it does the same thing twice."""

    quick: bool = False
    """One measurement of each instead of three."""
    seed: int = 0
    """Seed of parameters, text, latencies, faults and scheduling."""
    out: Path | None = None
    """Run folder; default: runs/ and the time."""
    json: bool = False
    """Print the headline figures as one JSON object on the last line."""
    trainers: int = 64
    """Simulated trainers."""
    calls_in_a_row: int = 8
    """Remote calls on the critical path of a step; even."""
    delay_s: float = 1.0
    """Mean of the exponentially distributed delay of a remote call, seconds."""
    peers: int = 1000
    """Peers that call each other."""
    messages: int = 100_000
    """Messages that they exchange, half of them replies."""
    neighbours: int = 8
    """Peers that each of them calls, drawn at random."""

    def __post_init__(self) -> None:
        if self.calls_in_a_row < 2 or self.calls_in_a_row % 2:
            raise ValueError(f"calls_in_a_row is even and at least 2, for there and back, got {self.calls_in_a_row}")
        if not 1 <= self.neighbours < self.peers:
            raise ValueError(f"neighbours must be from 1 to peers - 1, got {self.neighbours}")
        if self.messages < 2 * self.peers:
            raise ValueError(f"messages must be at least 2 for each peer, got {self.messages}")
        if self.trainers < 1:
            raise ValueError(f"trainers must be at least 1, got {self.trainers}")
        if not 0 < self.delay_s <= _MAX_DELAY_S:
            raise ValueError(f"delay_s must be above 0 and at most {_MAX_DELAY_S:g} s, got {self.delay_s}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")


def main() -> None:
    """Entry point."""
    settings = parse_command_line(ScaleSettings, prog="python -m experiments.sim_scale", args=None)
    try:
        folder = RunFolder.create(settings.out, settings, name="sim_scale")
    except (ValueError, OSError) as error:
        fail(str(error), prog="sim_scale")
    console = Console(stderr=settings.json)
    try:
        headline = _measure(settings, folder, console)
        scale_figure(
            headline,
            folder.metrics(),
            folder.path / FIGURE,
            trainers=settings.trainers,
            bars=(TRAINERS_BAR, MESSAGES_BAR),
        )
        write_report(folder, headline, title=_TITLE, figure_text=_FIGURE_TEXT)
    except (KeyboardInterrupt, RuntimeError, BaseExceptionGroup) as error:
        _exit_after(error)
    table = Table(title=_TITLE, show_header=False, title_justify="left")
    for name, value in headline.items():
        table.add_row(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    console.print(f"run folder: {folder.path}", soft_wrap=True)
    if settings.json:
        print(json.dumps(headline))


def _exit_after(error: BaseException) -> NoReturn:
    """One line after Ctrl-C, which the simulation's nurseries may have put into groups, or after a failed check."""
    if BaseExceptionGroup("", [error]).subgroup(KeyboardInterrupt) is not None:
        print("sim_scale: interrupted", file=sys.stderr)
        sys.exit(_EXIT_INTERRUPTED)
    if isinstance(error, RuntimeError):
        fail(str(error), prog="sim_scale")
    raise error


def _measure(settings: ScaleSettings, folder: RunFolder, console: Console) -> dict[str, Any]:
    times = 1 if settings.quick else 3
    console.print("a swarm to which everything happens, in two processes with different hash seeds")
    digests = _scenario_digests(settings, folder.path, hash_seeds=range(1, 3 if settings.quick else 5))
    folder.log("scenario", digests=digests)
    from experiments.sim_scale.messages import measure_messages
    from experiments.sim_scale.trainers import measure_trainers  # JAX: not beside the processes above, nor for --help

    exchanges = []
    for number in range(times):
        console.print(f"{settings.messages} messages between {settings.peers} peers ({number + 1}/{times})")
        exchange = measure_messages(
            peers=settings.peers, messages=settings.messages, neighbours=settings.neighbours, seed=settings.seed
        )
        exchanges.append(exchange.messages / exchange.wall_s)
        folder.log("messages", **asdict(exchange), messages_per_s=exchanges[-1])
    steps = []
    for number in range(times):
        console.print(f"a step of {settings.trainers} trainers, then the same XLA calls alone ({number + 1}/{times})")
        step = measure_trainers(
            trainers=settings.trainers,
            calls_in_a_row=settings.calls_in_a_row,
            delay_s=settings.delay_s,
            seed=settings.seed + number,
        )
        steps.append(step)
        folder.log("step", **asdict(step), trainers_ratio=step.ratio)
    ratio, rate = sorted(step.ratio for step in steps)[times // 2], sorted(exchanges)[times // 2]
    is_reproducible = len(set(digests)) == 1
    return {
        "trainers_ratio": ratio,
        "trainers_wall_s": steps[-1].wall_s,
        "trainers_compute_s": steps[-1].compute_s,
        "trainers_virtual_s": steps[-1].virtual_s,
        "trainers_calls": steps[-1].calls,
        "messages_per_s": rate,
        "messages": exchange.messages,
        "peers": settings.peers,
        "dials": exchange.dials,
        "reproducible": is_reproducible,
        "scenario_sha256": digests[0],
        "missed_bars": [
            name
            for name, is_met in (
                ("trainers_ratio", ratio <= TRAINERS_BAR),
                ("messages_per_s", rate >= MESSAGES_BAR),
                ("reproducible", is_reproducible),
            )
            if not is_met
        ],
    }


def _scenario_digests(settings: ScaleSettings, folder: Path, *, hash_seeds: Sequence[int]) -> list[str]:
    """SHA-256 of the metrics that the scenario writes in one process for each hash seed, two at a time.

    Raises:
      RuntimeError: a process failed; its last words.
    """
    digests = []
    for first in range(0, len(hash_seeds), 2):
        with ExitStack() as stack:
            running = [_start_scenario(stack, settings, folder, seed) for seed in hash_seeds[first : first + 2]]
            for process, metrics in running:
                _, errors = process.communicate()
                if process.returncode:
                    last_words = errors.strip().splitlines() or [f"status {process.returncode}"]
                    raise RuntimeError(f"the scenario failed: {last_words[-1]}")
                digests.append(hashlib.sha256(metrics.read_bytes()).hexdigest())
    return digests


def _start_scenario(
    stack: ExitStack, settings: ScaleSettings, folder: Path, hash_seed: int
) -> tuple["subprocess.Popen[str]", Path]:
    """A process that simulates the scenario, killed when the stack unwinds, and the file that it writes."""
    metrics = folder / f"scenario-{hash_seed}.jsonl"
    command = [sys.executable, "-m", "experiments.sim_scale.scenario", "--out", str(metrics)]
    process = subprocess.Popen(
        [*command, "--seed", str(settings.seed)],
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    stack.enter_context(process)
    stack.callback(process.kill)
    return process, metrics
