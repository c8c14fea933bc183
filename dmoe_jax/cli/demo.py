"""`dmoe demo`: one DHT peer, four expert nodes and two trainer processes over TLS; one node is killed in the middle."""

import json
import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import trio
import tyro
from rich.console import Console

from dmoe_jax.cli.checks import changed, check_at_least, check_seed
from dmoe_jax.cli.lifecycle import Stop, run_until_done
from dmoe_jax.cli.local_view import TrainerWatch, headline_of, show_headline
from dmoe_jax.cli.monitoring import MetricsOptions
from dmoe_jax.cli.train_options import DataOptions, LanguageModelOptions, RunOptions
from dmoe_jax.cli.up import LEAVE_TIMEOUT_S, UpCommand
from dmoe_jax.environment import SECRET_VARIABLE
from dmoe_jax.layer_config import Route
from dmoe_jax.processes import LocalSwarm, SwarmProcess
from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.flags import as_flags
from dmoe_jax.runs.speech import say

_QUICK_STEPS, _QUICK_MINUTES = 100, 1.0
_QUICK_EVALUATIONS = {"eval_tokens": 8192, "final_eval_tokens": 16384}


@dataclass(frozen=True, kw_only=True)
class DemoCommand:
    """Train a small DMoE Transformer-XL over a local swarm of real processes and kill a node on the way.

    It takes about five minutes on two cores, and leaves a run folder with figure and report.
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
    route: Route = "token"
    """What has experts of its own; as for `dmoe train`, sequence or token."""
    router: str | None = None
    """Chooses the experts; as for `dmoe train`, such as balanced, switch or my_file.py:my_router. Default: what costs
    least perplexity, balanced where tokens choose and product_key where sequences do."""
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
    max_minutes: float = 4.0
    """The trainer stops after this many minutes even if steps are left."""
    kill_trainer: bool = False
    """Kill the second trainer process too, with SIGKILL, after half of the training."""
    spare_nodes: bool = False
    """Let every node live, instead of killing one with SIGKILL after half of the training."""
    save_experts: bool = False
    """Have the nodes save their experts, so that dmoe inspect sees more than the first layer."""
    freeze_experts: bool = False
    """Control run: experts answer but do not learn."""
    metrics: Annotated[MetricsOptions, tyro.conf.arg(name="")] = field(default_factory=MetricsOptions)
    """Where this process shows how the others are, as for `dmoe up`."""
    insecure_loopback: bool = False
    """Plain TCP without encryption: what does TLS cost?"""

    def run(self) -> int:
        """Run the demonstration; the exit status."""
        check_at_least(3, self, "num_nodes")
        check_at_least(1, self, "num_trainers", "num_processes", "average_every")
        check_at_least(10, self, "steps")
        check_seed(self, "seed", more=self.num_processes)
        if self.kill_trainer and self.num_processes < 2:
            raise UsageError("--kill-trainer needs --num-processes of at least 2: one has to go on")
        # Its swarm is its own, whatever the user's real one needs.
        os.environ.pop(SECRET_VARIABLE, None)
        up = self._up()
        up.check()
        return run_until_done(lambda stop: self._demonstrate(up, stop), leave_timeout_s=LEAVE_TIMEOUT_S)

    def _up(self) -> UpCommand:
        steps, max_minutes = (_QUICK_STEPS, _QUICK_MINUTES) if self.quick else (self.steps, self.max_minutes)
        # Few rows are compiled first, so that training begins soon; larger batches follow beside it.
        node = {"warm_up_rows": 4 if self.route == "sequence" else 64} | (
            {"freeze_experts": True} if self.freeze_experts else {}
        )
        evaluations = _QUICK_EVALUATIONS if self.quick else {}
        return UpCommand(
            nodes=self.num_nodes,
            trainers=self.num_processes,
            out=self.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S"),
            data=DataOptions(data=self.data, num_trainers=self.num_trainers, seed=self.seed),
            language=LanguageModelOptions(
                route=self.route, router=self.router or ("balanced" if self.route == "token" else "product_key")
            ),
            run_length=RunOptions(steps=steps, max_minutes=max_minutes, eval_every=max(20, steps // 8), **evaluations),
            average_every=self.average_every,
            save_experts=self.save_experts,
            node_flags=shlex.join(as_flags(node)),
            insecure_loopback=self.insecure_loopback,
            metrics=self.metrics,
        )

    async def _demonstrate(self, up: UpCommand, stop: Stop) -> int:
        console = Console(stderr=self.json, soft_wrap=True, highlight=False)

        async def kill_in_the_middle(swarm: LocalSwarm, watches: Mapping[str, TrainerWatch]) -> None:
            first = watches["trainer0"]
            while True:
                await trio.sleep(0.25)
                if first.step >= up.run_length.steps // 2:
                    break
            if not self.spare_nodes:
                await _kill(swarm.of_kind("node")[-1], first, up.folder, console)
            if self.kill_trainer:
                await _kill(swarm.of_kind("train")[1], first, up.folder, console)

        if status := await up.train(console, stop, kill_in_the_middle):
            return status
        # In a thread: importing Matplotlib takes its time.
        headline = await trio.to_thread.run_sync(self._report, up.folder)
        show_headline(console, up.folder, headline, title="DMoE Transformer-XL")
        if self.json:
            say(json.dumps(headline))
        return 0

    def _report(self, out: Path) -> dict[str, Any]:
        """Write the run's report anew: the trainer told what it saw; this adds what was done to it, and the command."""
        from dmoe_jax.runs.report import write_report
        from dmoe_jax.runs.run_folder import RunFolder, read_metrics

        headline = headline_of(read_metrics(out / "metrics.jsonl"))
        flags = {name: value for name, value in changed(self).items() if name not in ("out", "json", "metrics")}
        write_report(
            RunFolder(out),
            headline,
            title=f"Demonstration: DMoE Transformer-XL on {headline['corpus']}",
            summary=f"One DHT peer, {self.num_nodes} expert nodes, {self.num_processes} trainer processes of "
            f"{self.num_trainers} asynchronous trainers each, "
            f"all over {'plain TCP' if self.insecure_loopback else 'TLS 1.3'} on one machine.",
            command=shlex.join(["dmoe", "demo", *as_flags(flags)]),
        )
        return headline


async def _kill(process: SwarmProcess, first: TrainerWatch, out: Path, console: Console) -> None:
    from dmoe_jax.runs.run_folder import append_metric

    process.process.kill()
    await process.process.wait()
    # A trainer process that averages is called somewhere, too, but the figure marks the experts of a node only.
    name, address = ("node_killed", process.address) if process.kind == "node" else ("trainer_killed", "")
    who = f"{process.name} at {address}" if address else process.name
    place = {"step": first.step, "time_s": first.time_s}
    append_metric(out / "metrics.jsonl", kind="event", name=name, **place, detail=who, peer=address)
    console.print(f"[bold red]killed {who} with SIGKILL at step {first.step}[/]")
