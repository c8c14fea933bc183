"""`dmoe demo`: one DHT peer, four expert nodes and two trainer processes over TLS; one node is killed in the middle."""

import json
import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import trio
import tyro
from rich.console import Console

from dmoe_jax.cli.checks import check_at_least
from dmoe_jax.cli.lifecycle import Stop, run_until_done
from dmoe_jax.cli.local_view import TrainerWatch, headline_of, show_headline
from dmoe_jax.cli.network import MetricsOptions
from dmoe_jax.cli.sources import ConfigFile
from dmoe_jax.cli.train_options import DataOptions, FolderOptions, LanguageModelOptions, RunOptions
from dmoe_jax.cli.up import LEAVE_TIMEOUT_S, LocalNetworkOptions, LocalSwarmOptions, UpCommand
from dmoe_jax.layer_config import Route
from dmoe_jax.machine.environment import SECRET_VARIABLE
from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.flags import named_flags, words_of
from dmoe_jax.runs.processes import LocalSwarm, SwarmProcess
from dmoe_jax.runs.report import write_report
from dmoe_jax.runs.run_folder import METRICS, RunFolder, append_metric, read_metrics
from dmoe_jax.runs.speech import say

_QUICK: dict[str, Any] = {"steps": 100, "max_minutes": 1.0, "eval_tokens": 8192, "final_eval_tokens": 16384}


@named_flags("route", "router")
@dataclass(frozen=True, kw_only=True)
class DemoModelOptions(LanguageModelOptions):
    """The model of the demonstration."""

    route: Route = "token"
    router: str = ""
    """Chooses the experts; as for `dmoe train`, such as balanced, switch or my_file.py:my_router. Default: what costs
    least perplexity, balanced where tokens choose and product_key where sequences do."""


@named_flags("data", "tokenizer", "num_trainers", "seed")
@dataclass(frozen=True, kw_only=True)
class DemoDataOptions(DataOptions):
    """The text of the demonstration, and who reads it."""

    num_trainers: int = 2
    """Asynchronous trainers in each trainer process."""


@named_flags("steps", "max_minutes")
@dataclass(frozen=True, kw_only=True)
class DemoRunOptions(RunOptions):
    """Length of the demonstration."""

    steps: int = 600
    """Trunk updates of each process, all its trainers together."""
    max_minutes: float = 4.0
    """The trainer stops after this many minutes even if steps are left."""


@dataclass(frozen=True, kw_only=True)
class DemoCommand:
    """Train a small DMoE Transformer-XL over a local swarm of real processes and kill a node on the way.

    It takes about five minutes on two cores, and leaves a run folder with figure and report. It is `dmoe up` with other
    defaults.
    """

    quick: bool = False
    """A run of under two minutes that shows the same things with less training."""
    out: Path | None = None
    """Run folder; must be new or empty. Default: runs/demo and the time."""
    config: ConfigFile = None
    json: bool = False
    """Print the headline figures as one JSON object on the last line."""
    num_nodes: int = 4
    """Expert node processes; at least three."""
    num_processes: int = 2
    """Trainer processes, whose trunks are averaged."""
    average_every: int = 10
    """Trunk updates of a process between two averages."""
    language: Annotated[DemoModelOptions, tyro.conf.arg(name="")] = field(default_factory=DemoModelOptions)
    data: Annotated[DemoDataOptions, tyro.conf.arg(name="")] = field(default_factory=DemoDataOptions)
    run_length: Annotated[DemoRunOptions, tyro.conf.arg(name="")] = field(default_factory=DemoRunOptions)
    kill_trainer: bool = False
    """Kill the second trainer process too, with SIGKILL, after half of the training."""
    spare_nodes: bool = False
    """Let every node live, instead of killing one with SIGKILL after half of the training."""
    save_experts: bool = False
    """Have the nodes save their experts, so that dmoe inspect sees more than the first layer."""
    freeze_experts: bool = False
    """Control run: experts answer but do not learn."""
    metrics: Annotated[MetricsOptions, tyro.conf.arg(name="")] = field(default_factory=MetricsOptions)
    insecure_loopback: bool = False
    """Plain TCP without encryption: what does TLS cost?"""

    def run(self) -> int:
        check_at_least(3, self, "num_nodes")
        check_at_least(1, self, "num_processes", "average_every")
        check_at_least(10, self.run_length, "steps")
        if self.kill_trainer and self.num_processes < 2:
            raise UsageError("--kill-trainer needs --num-processes of at least 2: one has to go on")
        # Its swarm is its own, whatever the user's real one needs.
        os.environ.pop(SECRET_VARIABLE, None)
        up = self._up()
        up.check()
        return run_until_done(lambda stop: self._demonstrate(up, stop), leave_timeout_s=LEAVE_TIMEOUT_S)

    def _up(self) -> UpCommand:
        length = replace(self.run_length, **_QUICK) if self.quick else self.run_length
        # Few rows are compiled first, so that training begins soon; larger batches follow beside it.
        rows = 4 if self.language.route == "sequence" else 64
        router = self.language.router or ("balanced" if self.language.route == "token" else "product_key")
        return UpCommand(
            swarm=LocalSwarmOptions(
                nodes=self.num_nodes,
                trainers=self.num_processes,
                save_experts=self.save_experts,
                node_flags=f"--warm-up-rows {rows}" + (" --freeze-experts" if self.freeze_experts else ""),
            ),
            folder=FolderOptions(out=self.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")),
            # As `dmoe up` has them, whose defaults are others.
            language=LanguageModelOptions(**vars(self.language) | {"router": router}),
            data=DataOptions(**vars(self.data)),
            run_length=RunOptions(**vars(length) | {"eval_every": max(20, length.steps // 8)}),
            average_every=self.average_every,
            network=LocalNetworkOptions(insecure_loopback=self.insecure_loopback),
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
                await _kill(swarm.of_kind("node")[-1], first, up.out, console)
            if self.kill_trainer:
                await _kill(swarm.of_kind("train")[1], first, up.out, console)

        if status := await up.train(console, stop, kill_in_the_middle):
            return status
        headline = self._report(up.out)
        show_headline(console, up.out, headline, title="DMoE Transformer-XL")
        if self.json:
            say(json.dumps(headline))
        return 0

    def _report(self, out: Path) -> dict[str, Any]:
        """Write the trainer's report anew, with the kills and the command; the headline."""
        headline = headline_of(read_metrics(out / METRICS))
        flags = words_of(self, without=("--out", "--json", "--config", "--metrics-port", "--metrics-host"))
        write_report(
            RunFolder(out),
            headline,
            title=f"Demonstration: DMoE Transformer-XL on {headline['corpus']}",
            summary=f"One DHT peer, {self.num_nodes} expert nodes, {self.num_processes} trainer processes of "
            f"{self.data.num_trainers} asynchronous trainers each, "
            f"all over {'plain TCP' if self.insecure_loopback else 'TLS 1.3'} on one machine.",
            command=shlex.join(["dmoe", "demo", *flags]),
        )
        return headline


async def _kill(process: SwarmProcess, first: TrainerWatch, out: Path, console: Console) -> None:
    process.process.kill()
    await process.process.wait()
    # A trainer process that averages is called somewhere, too, but the figure marks the experts of a node only.
    name, address = ("node_killed", process.address) if process.kind == "node" else ("trainer_killed", "")
    who = f"{process.name} at {address}" if address else process.name
    place = {"step": first.step, "time_s": first.time_s}
    append_metric(out / METRICS, kind="event", name=name, **place, detail=who, peer=address)
    console.print(f"[bold red]killed {who} with SIGKILL at step {first.step}[/]")
