"""One DHT peer, four expert nodes and two trainer processes over TLS; one node is killed in the middle."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import trio
from rich.console import Console
from rich.table import Table

from dmoe_jax.cli.common import parse_command_line
from dmoe_jax.runs.report import write_report
from dmoe_jax.runs.run_folder import RunFolder, append_metric, read_metrics
from experiments.local_swarm import (
    LocalSwarm,
    ProcessFailed,
    SwarmProcess,
    averaging_flags,
    deal_experts,
    open_local_swarm,
    start_nodes,
    start_trainers,
    trainer_folders,
    wait_for_others,
)
from experiments.supervision import run_supervised


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Train a small DMoE Transformer-XL over a local swarm of real processes and kill a node on the way."""

    quick: bool = False
    """A run of under two minutes that shows the same things with less training."""
    seed: int = 0
    """Seed of the parameters and of each trainer's place in the text."""
    out: Path | None = None
    """Run folder; must be new or empty. Default: runs/demo and the time."""
    json: bool = False
    """Print the headline figures as one JSON object on the last line."""
    data: str = "auto"
    """Corpus: auto, wikitext-2 or embedded."""
    num_nodes: int = 4
    """Expert node processes; at least three."""
    num_processes: int = 2
    """Trainer processes, whose trunks are averaged."""
    num_trainers: int = 2
    """Asynchronous trainers in each trainer process."""
    average_every: int = 10
    """Trunk updates of a process between two averages."""
    steps: int = 600
    """Trunk updates of each process, all its trainers together."""
    max_minutes: float = 3.0
    """The trainer stops after this many minutes even if steps are left."""
    kill_trainer: bool = False
    """Kill the second trainer process too, with SIGKILL, after half of the training."""
    spare_nodes: bool = False
    """Let every node live, instead of killing one with SIGKILL after half of the training."""
    freeze_experts: bool = False
    """Control run: experts answer but do not learn."""
    insecure_loopback: bool = False
    """Plain TCP without encryption: what does TLS cost?"""

    def __post_init__(self) -> None:
        if self.num_nodes < 3:
            raise ValueError(f"--num-nodes must be at least 3, got {self.num_nodes}")
        if min(self.num_trainers, self.num_processes, self.average_every) < 1 or self.steps < 10:
            raise ValueError(
                "--num-trainers, --num-processes and --average-every must be at least 1 and --steps at least 10"
            )
        if self.kill_trainer and self.num_processes < 2:
            raise ValueError("--kill-trainer needs --num-processes of at least 2: one has to go on")


NUM_LAYERS = 2
GRID = (4, 4)


def main() -> None:
    """Entry point."""
    settings = parse_command_line(DemoSettings, prog="python -m experiments.demo", args=None)
    sys.exit(run_supervised(lambda: run_demo(settings), prog="demo"))


async def run_demo(settings: DemoSettings) -> int:
    """Start the swarm, train, kill a node, report. Returns the exit status; leaves no process behind."""
    console = Console(stderr=settings.json)
    out = settings.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out must be a new or empty folder, {out} is not empty")
    logs = out.parent / f"{out.name}.logs"
    logs.mkdir(parents=True, exist_ok=True)
    steps, max_minutes = (100, 1.0) if settings.quick else (settings.steps, settings.max_minutes)
    flags = ["--insecure-loopback"] if settings.insecure_loopback else []
    environment = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    async with open_local_swarm(logs, environment, network_flags=flags) as swarm:
        nodes = await _start_nodes(swarm, settings, console)
        commands = [
            _trainer_command(settings, nodes, folder, index, steps=steps, max_minutes=max_minutes)
            for index, folder in enumerate(trainer_folders(out, settings.num_processes))
        ]
        trainers = await start_trainers(swarm, commands)
        async with trio.open_nursery() as nursery:
            if not settings.spare_nodes:
                nursery.start_soon(_kill_in_the_middle, nodes[-1], out, steps // 2, console)
            if settings.kill_trainer:
                nursery.start_soon(_kill_in_the_middle, trainers[1], out, steps // 2, console)
            status = await trainers[0].process.wait()
            nursery.cancel_scope.cancel()
        if status != 0:
            raise ProcessFailed(f"the trainer ended with status {status}")
        await wait_for_others(trainers[1:])
    headline = headline_of(read_metrics(out / "metrics.jsonl"))
    # The trainer wrote a report of what it saw; this one adds what was done to it, and the command that does it again.
    write_report(
        RunFolder(out),
        headline,
        title=f"Demonstration: DMoE Transformer-XL on {headline['corpus']}",
        summary=f"One DHT peer, {settings.num_nodes} expert nodes, {settings.num_processes} trainer processes of "
        f"{settings.num_trainers} asynchronous trainers each, "
        f"all over {'plain TCP' if settings.insecure_loopback else 'TLS 1.3'} on one machine.",
        command=_own_command(settings),
    )
    console.print(headline_table(headline))
    console.print(f"run folder: {out} (figure.png, report.md, metrics.jsonl, config.json); logs: {logs}")
    if settings.json:
        print(json.dumps(headline))
    return 0


def _own_command(settings: DemoSettings) -> str:
    """The command line of this demonstration, with what differs from the defaults."""
    words = ["python -m experiments.demo"]
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value != field.default and field.name not in ("out", "json"):
            flag = "--" + field.name.replace("_", "-")
            words.append(flag if value is True else f"{flag} {value}")
    return " ".join(words)


async def _start_nodes(swarm: LocalSwarm, settings: DemoSettings, console: Console) -> list[SwarmProcess]:
    console.print(f"starting one DHT peer and {settings.num_nodes} expert nodes; they compile before they announce")
    learning = ["--seed", str(settings.seed), *(["--freeze-experts"] if settings.freeze_experts else [])]
    hands = deal_experts(settings.num_nodes, num_layers=NUM_LAYERS, grid_size=GRID)
    nodes = await start_nodes(swarm, hands, lambda _: [*learning, "--announce-period-s", "5"])
    console.print(f"{len(nodes)} nodes serve {sum(map(len, hands))} experts in {NUM_LAYERS} layers")
    return nodes


def _trainer_command(
    settings: DemoSettings, nodes: list[SwarmProcess], out: Path, index: int, *, steps: int, max_minutes: float
) -> list[str]:
    flags: dict[str, object] = {
        "--out": out,
        "--data": settings.data,
        "--num-trainers": settings.num_trainers,
        "--steps": steps,
        "--max-minutes": max_minutes,
        "--num-layers": NUM_LAYERS,
        "--eval-every": max(20, steps // 8),
        # Only the first one's text at the end is read.
        "--final-eval-tokens": 16384 if settings.quick or index else 0,
    }
    averaging = averaging_flags(
        num_processes=settings.num_processes, every=settings.average_every, seed=settings.seed, index=index
    )
    return [
        *("train", "--join", *[node.contact for node in nodes[:2]]),
        *("--grid-size", *map(str, GRID)),
        *(str(word) for flag in flags.items() for word in flag),
        *averaging,
    ]


async def _kill_in_the_middle(node: SwarmProcess, out: Path, kill_step: int, console: Console) -> None:
    """SIGKILL a process once training has reached `kill_step`, and note it in the run's metrics."""
    # A trainer process listens nowhere.
    kind, who = ("node", f"{node.name} at {node.address}") if node.contact else ("trainer", node.name)
    while True:
        await trio.sleep(0.25)
        latest = _latest_step(out / "metrics.jsonl")
        if latest is not None and latest["step"] >= kill_step:
            break
    node.process.kill()
    await node.process.wait()
    append_metric(
        out / "metrics.jsonl",
        kind="event",
        name=f"{kind}_killed",
        step=latest["step"],
        time_s=latest["time_s"],
        detail=who,
        peer=node.address,
    )
    # The trainer's live bar may hold the cursor in the middle of a line.
    console.print(f"\n[bold red]killed {who} with SIGKILL at step {latest['step']}[/]")


def _latest_step(metrics: Path) -> dict[str, Any] | None:
    if not metrics.exists():
        return None
    steps = [record for record in read_metrics(metrics) if record["kind"] == "train"]
    return steps[-1] if steps else None


def headline_of(metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures that the demonstration is about, from a run's metrics."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for record in metrics:
        by_kind.setdefault(record["kind"], []).append(record)
    final = by_kind["headline"][-1]
    headline = {name: value for name, value in final.items() if name != "kind"}
    kills = [event for event in by_kind.get("event", []) if event["name"] == "node_killed"]
    if kills:
        calls = by_kind["calls"]
        before = [record for record in calls if record["step"] <= kills[0]["step"]]
        at_kill = before[-1] if before else {"ok": 0, "failed": 0}
        ok, failed = calls[-1]["ok"] - at_kill["ok"], calls[-1]["failed"] - at_kill["failed"]
        headline |= {
            "killed_at_step": kills[0]["step"],
            "calls_after_kill": ok + failed,
            "failed_calls_after_kill": failed,
            "failed_share_after_kill": failed / max(1, ok + failed),
        }
    return headline


def headline_table(headline: dict[str, Any]) -> Table:
    """The headline figures for the terminal."""
    table = Table(title="DMoE Transformer-XL over a local swarm", show_header=False, title_justify="left")
    for name, value in headline.items():
        table.add_row(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
    return table
