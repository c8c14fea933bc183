"""View of the processes of `dmoe up`: on a terminal, in lines, for scrapers, and in the figures at their end."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import trio
from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from dmoe_jax.live.run_feed import GrowingFile
from dmoe_jax.metrics.families import Family, by_label, labelled
from dmoe_jax.runs.processes import LocalSwarm, SwarmProcess
from dmoe_jax.runs.report import format_value
from dmoe_jax.runs.run_folder import METRICS, read_metrics

_FRAME_PERIOD_S = 0.125
"""Seconds between two pictures on a terminal; the spinner moves with each."""

_LINE_PERIOD_S = 10.0
"""Seconds between two lines about a trainer where the output is no terminal."""


class TrainerWatch:
    """Progress of a trainer process, read from the metrics of its run folder, which may not exist yet. What another
    process has left there counts only when this one has written something."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS
        self._left = _state_of_file(self._path)
        self._file = GrowingFile(self._path, most_bytes=math.inf)
        self._items = self._failed_calls = 0
        self._loss: float | None = None
        self._unit = "items"
        self.step = 0
        """Trunk updates so far."""
        self.time_s = 0.0
        """Seconds of training at that step."""

    def look(self) -> None:
        """Read what was written since the last look."""
        if _state_of_file(self._path) in (None, self._left):
            return
        self._left = None
        lines, is_another = self._file.lines()
        if is_another:  # a run that goes on writes it anew, without what came after its checkpoint
            self._items = self.step = 0
        for record in map(json.loads, lines):
            if record["kind"] == "calls":
                self._failed_calls = record["failed"]
            elif record["kind"] == "task":
                self._unit = record["unit"]
            elif record["kind"] == "train":
                self.step, self.time_s = max(self.step, record["step"]), record["time_s"]
                self._items += record["items"]
                if (loss := record["loss"]) is not None:
                    self._loss = loss if self._loss is None else 0.95 * self._loss + 0.05 * loss

    def figures(self, num_steps: int) -> str:
        """One line: step, a mean of the loss over about 20 steps, items or tokens a second, failed calls."""
        loss = "no number" if self._loss is None else f"{self._loss:.3f}"
        # The clock starts with the first step, which compiles.
        rate = f"{self._items / self.time_s:,.0f} {self._unit}/s  " if self.time_s > 0.1 else ""
        return f"step {self.step}/{num_steps}  loss {loss}  {rate}{self._failed_calls} failed calls"


def _state_of_file(path: Path) -> tuple[int, int] | None:
    """Inode and size of a file, of which each append changes one; None if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size


class LocalView:
    """Shows every process of a swarm: on the console while `run` runs, and to scrapers. `announce` is this machine as
    others reach it, for the addresses of metrics; None: as the processes listen."""

    def __init__(
        self,
        console: Console,
        swarm: LocalSwarm,
        trainers: Mapping[str, TrainerWatch],
        num_steps: int,
        *,
        announce: str | None = None,
    ) -> None:
        self._console = console
        self._swarm = swarm
        self._trainers = trainers
        self._num_steps = num_steps
        self._announce = announce
        self._began_at = trio.current_time()
        self._spinner = Spinner("dots")
        self._last_lines: dict[str, tuple[float, str]] = {}

    async def run(self) -> None:
        """Show the processes until cancelled."""
        # Without a terminal the live table would be printed once, at the end.
        table = Live(self._table(), console=self._console, auto_refresh=False)
        with table if self._console.is_terminal else nullcontext() as live:
            try:
                while True:
                    for watch in self._trainers.values():
                        watch.look()
                    if live is None:
                        self._print_news()
                    else:
                        live.update(self._table(), refresh=True)
                    await trio.sleep(_FRAME_PERIOD_S)
            finally:
                if live is not None:
                    live.update(self._table(), refresh=True)

    def _table(self) -> RenderableType:
        nodes = self._swarm.of_kind("node")
        serving = sum(bool(node.contact) and node.is_running for node in nodes)
        self._spinner.text = f"{serving} of {len(nodes)} nodes serve, {trio.current_time() - self._began_at:.0f} s"
        table = Table.grid(padding=(0, 2))
        for process in self._swarm.processes:
            failed = not process.is_running and process.process.returncode not in (0, 130)
            table.add_row(f"  {process.name}", self._text(process), style="red" if failed else "")
        grid = Table.grid()
        grid.add_row(self._spinner)
        grid.add_row(table)
        return grid

    def _text(self, process: SwarmProcess) -> str:
        if not process.is_running:
            status = process.process.returncode
            return "done" if status == 0 else "stopped" if status == 130 else f"ended with status {status}"
        watch = self._trainers.get(process.name)
        if watch is not None and watch.step:
            aside = f"  ({process.last_line})" if process.last_line.startswith("evaluating") else ""
            return watch.figures(self._num_steps) + aside
        if process.contact and process.kind != "train":
            metrics = f", metrics at {process.metrics}" if process.metrics else ""
            return f"serves at {process.address}{metrics}"
        return process.last_line or "starting"

    def _print_news(self) -> None:
        """Print a line for each process whose text is another one; about trainers that move on, only now and then."""
        now = trio.current_time()
        for process in self._swarm.processes:
            text = self._text(process)
            said_at, said = self._last_lines.get(process.name, (-_LINE_PERIOD_S, ""))
            moves_on = text.startswith("step ") and said.startswith("step ")
            if text != said and not (moves_on and now - said_at < _LINE_PERIOD_S):
                self._last_lines[process.name] = now, text
                self._console.print(f"{now - self._began_at:5.0f} s  {process.name}: {text}", highlight=False)

    def targets(self) -> bytes:
        """Addresses of the metrics of all processes that run, as JSON for Prometheus' `http_sd_configs`."""
        found = []
        for process in self._swarm.processes:
            host, _, port = process.metrics.rpartition(":")
            if process.is_running and port:
                labels = {"process": process.name, "command": process.kind}
                found.append({"targets": [f"{self._announce or host}:{port}"], "labels": labels})
        return json.dumps(found).encode()

    def families(self) -> Iterator[Family]:
        """Counts of processes by command and state, and the trainers' progress."""
        states: Counter[tuple[str, str]] = Counter()
        for process in self._swarm.processes:
            state = "ended" if not process.is_running else "serving" if process.contact else "running"
            states[process.kind, state] += 1
        counts = (({"command": kind, "state": state}, count) for (kind, state), count in sorted(states.items()))
        yield labelled("gauge", "dmoe_up_processes", "Processes of the swarm, by command and state.", counts)
        steps = {name: watch.step for name, watch in self._trainers.items()}
        yield by_label("gauge", "dmoe_up_trainer_step", "Updates of each trainer process.", "process", steps)

    def why_not_ready(self) -> str:
        """Nodes that do not serve; empty if all do that run, and there is one."""
        nodes = [node for node in self._swarm.of_kind("node") if node.is_running]
        starting = [node.name for node in nodes if not node.contact]
        if starting:
            return f"not serving yet: {', '.join(starting)}"
        return "" if nodes else "no node runs"


def show_headline(console: Console, folder: Path, headline: dict[str, Any] | None = None, *, title: str) -> None:
    """Print the figures of a run's end, those of the folder if None, and where its report is; nothing without them."""
    if headline is None:
        metrics = read_metrics(folder / METRICS) if (folder / METRICS).exists() else []
        if not any(record["kind"] == "headline" for record in metrics):
            return
        headline = headline_of(metrics)
    table = Table(title=f"{title} over a local swarm", show_header=False, title_justify="left")
    for name, value in headline.items():
        table.add_row(name.replace("_", " "), format_value(value))
    console.print(table)
    # Without Matplotlib there is no figure.
    files = [name for name in ("figure.png", "report.md", "metrics.jsonl", "config.json") if (folder / name).exists()]
    console.print(f"run folder: {folder} ({', '.join(files)})")


def headline_of(metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a run's end, and of its calls after a node was killed, from its metrics."""
    final = [record for record in metrics if record["kind"] == "headline"][-1]
    headline = {name: value for name, value in final.items() if name != "kind"}
    kills = [record for record in metrics if record["kind"] == "event" and record["name"] == "node_killed"]
    if kills:
        calls = [record for record in metrics if record["kind"] == "calls"]
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
