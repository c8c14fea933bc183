"""`dmoe demo`: one DHT peer, four expert nodes and two trainer processes over TLS; one node is killed in the middle."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import trio
from rich.console import Console
from rich.table import Table

from dmoe_jax.cli.common import UsageError
from dmoe_jax.cli.lifecycle import EXIT_INTERRUPTED, Stop, run_until_done
from dmoe_jax.cli.local_training import (
    LEAVE_TIMEOUT_S,
    LocalPlan,
    LocalTraining,
    check_out,
    network_flags,
    open_local_training,
)
from dmoe_jax.cli.local_view import TrainerWatch
from dmoe_jax.processes import SwarmProcess, averaging_flags, deal_experts

NUM_LAYERS = 2
GRID = (4, 4)

_QUICK_STEPS, _QUICK_MINUTES = 100, 1.0


@dataclass(frozen=True, kw_only=True)
class DemoCommand:
    """Train a small DMoE Transformer-XL over a local swarm of real processes and kill a node on the way.

    It takes about four minutes on two cores, and leaves a run folder with figure and report.
    """

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

    def run(self) -> int:
        """Run the demonstration; the exit status."""
        self._check()
        plan = self._plan(check_out(self.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")))
        return run_until_done(lambda stop: self._demonstrate(plan, stop), leave_timeout_s=LEAVE_TIMEOUT_S)

    def _check(self) -> None:
        if self.num_nodes < 3:
            raise UsageError(f"--num-nodes must be at least 3, got {self.num_nodes}")
        for name, least in (("num_trainers", 1), ("num_processes", 1), ("average_every", 1), ("steps", 10)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")
        if self.kill_trainer and self.num_processes < 2:
            raise UsageError("--kill-trainer needs --num-processes of at least 2: one has to go on")

    async def _demonstrate(self, plan: LocalPlan, stop: Stop) -> int:
        console = Console(stderr=self.json, soft_wrap=True, highlight=False)
        console.print(f"{self.num_nodes} nodes for {NUM_LAYERS} layers of {GRID[0]}x{GRID[1]} experts; {plan.logs}")
        async with open_local_training(plan, console) as local:
            with stop.body() as body:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._kill_in_the_middle, local, plan, console)
                    await local.trained()
                    nursery.cancel_scope.cancel()
            if body.cancelled_caught:
                console.print("ending all processes in order; Ctrl-C again ends them at once")
        if body.cancelled_caught:
            return EXIT_INTERRUPTED
        # In a thread: importing Matplotlib takes its time.
        headline = await trio.to_thread.run_sync(self._report, plan.out)
        console.print(headline_table(headline))
        console.print(f"run folder: {plan.out} (figure.png, report.md, metrics.jsonl, config.json); logs: {plan.logs}")
        if self.json:
            print(json.dumps(headline))
        return 0

    def _plan(self, out: Path) -> LocalPlan:
        steps, max_minutes = (_QUICK_STEPS, _QUICK_MINUTES) if self.quick else (self.steps, self.max_minutes)

        def trainer_flags(index: int) -> list[str]:
            flags: dict[str, object] = {
                "--data": self.data,
                "--num-trainers": self.num_trainers,
                "--steps": steps,
                "--max-minutes": max_minutes,
                "--num-layers": NUM_LAYERS,
                "--eval-every": max(20, steps // 8),
                # Only the first one's evaluations are read.
                "--eval-tokens": 1024 if index else 8192 if self.quick else 16384,
                # Only the first one's text at the end is read.
                "--final-eval-tokens": 16384 if self.quick or index else 0,
            }
            averaging = averaging_flags(
                num_processes=self.num_processes, every=self.average_every, seed=self.seed, index=index
            )
            words = [str(word) for flag in flags.items() for word in flag]
            return ["--grid-size", *map(str, GRID), *words, *averaging]

        learning = ["--seed", str(self.seed), *(["--freeze-experts"] if self.freeze_experts else [])]
        return LocalPlan(
            hands=deal_experts(self.num_nodes, num_layers=NUM_LAYERS, grid_size=GRID),
            # Few rows are compiled first, so that training begins soon; larger batches follow beside it.
            node_flags=[*learning, "--announce-period-s", "5", "--warm-up-rows", "4"],
            trainer_flags=trainer_flags,
            num_trainers=self.num_processes,
            num_steps=steps,
            out=out,
            network_flags=network_flags(secret_file=None, insecure_loopback=self.insecure_loopback),
        )

    async def _kill_in_the_middle(self, local: LocalTraining, plan: LocalPlan, console: Console) -> None:
        """SIGKILL what is to die once the first trainer process is half way, and note it in the run's metrics."""
        first = local.watches[0]
        while True:
            await trio.sleep(0.25)
            if first.step >= plan.num_steps // 2:
                break
        if not self.spare_nodes:
            await _kill(local.nodes[-1], first, plan.out, console)
        if self.kill_trainer:
            await _kill(local.trainers[1], first, plan.out, console)

    def _report(self, out: Path) -> dict[str, Any]:
        """Write the run's report anew: the trainer told what it saw; this adds what was done to it, and the command."""
        from dmoe_jax.runs.report import write_report
        from dmoe_jax.runs.run_folder import RunFolder, read_metrics

        headline = headline_of(read_metrics(out / "metrics.jsonl"))
        write_report(
            RunFolder(out),
            headline,
            title=f"Demonstration: DMoE Transformer-XL on {headline['corpus']}",
            summary=f"One DHT peer, {self.num_nodes} expert nodes, {self.num_processes} trainer processes of "
            f"{self.num_trainers} asynchronous trainers each, "
            f"all over {'plain TCP' if self.insecure_loopback else 'TLS 1.3'} on one machine.",
            command=self._command_line(),
        )
        return headline

    def _command_line(self) -> str:
        """The command line of this demonstration, with what differs from the defaults."""
        words = ["dmoe demo"]
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default and field.name not in ("out", "json"):
                flag = "--" + field.name.replace("_", "-")
                words.append(flag if value is True else f"{flag} {value}")
        return " ".join(words)


async def _kill(process: SwarmProcess, first: TrainerWatch, out: Path, console: Console) -> None:
    from dmoe_jax.runs.run_folder import append_metric

    process.process.kill()
    await process.process.wait()
    # A trainer process that averages is called somewhere, too, but the figure marks the experts of a node only.
    address = process.address if process.kind == "node" else ""
    kind = "node" if process.kind == "node" else "trainer"
    who = f"{process.name} at {address}" if address else process.name
    append_metric(
        out / "metrics.jsonl",
        kind="event",
        name=f"{kind}_killed",
        step=first.step,
        time_s=first.time_s,
        detail=who,
        peer=address,
    )
    console.print(f"[bold red]killed {who} with SIGKILL at step {first.step}[/]")


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
        if isinstance(value, dict):
            value = ", ".join(f"{reason} {count}" for reason, count in value.items()) or "none"
        table.add_row(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
    return table
