"""Ours and blocking sockets in turn, round after round: calls per second, bytes per second, small calls under load."""

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from dmoe_jax.cli.common import fail, parse_command_line
from dmoe_jax.runs.report import write_report
from dmoe_jax.runs.run_folder import FIGURE, RunFolder
from experiments.transport_speed import blocking_side
from experiments.transport_speed.figure import speed_figure
from experiments.transport_speed.measurements import Bench, measurements_of
from experiments.transport_speed.ratios import FIGURES, headline_of
from experiments.transport_speed.server_process import ServerFailed, open_server

_EXIT_INTERRUPTED = 130
_TITLE = "The network layer beside blocking sockets"


@dataclass(frozen=True, kw_only=True)
class SpeedSettings:
    """Measure our network layer against blocking sockets of the standard library, over loopback in one run."""

    quick: bool = False
    """Three short rounds, under two minutes."""
    seed: int = 0
    """Seed of what is sent."""
    out: Path | None = None
    """Run folder; default: runs/ and the time."""
    json: bool = False
    """Print the headline figures as one JSON object on the last line."""
    rounds: int = 9
    """Rounds that count; one more comes before them to warm up."""
    slice_s: float = 1.5
    """Least duration of each measurement of a round, seconds."""
    callers: int = 64
    """Concurrent callers of small calls on one connection."""
    small_bytes: int = 200
    """Payload of a small call and of its answer."""
    tensor_mib: float = 16.0
    """Size of a tensor."""
    latency_calls: int = 1000
    """Small calls behind the p99 of the idle connection, at least; under load 400 are enough."""

    def __post_init__(self) -> None:
        for name in ("rounds", "slice_s", "callers", "small_bytes", "tensor_mib", "latency_calls"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {getattr(self, name)}")

    @property
    def tensor_bytes(self) -> int:
        """Size of a tensor in bytes."""
        return max(1, int(self.tensor_mib * 2**20))


_QUICK_ROUNDS, _QUICK_SLICE_S = 3, 0.8


def main() -> None:
    """Entry point."""
    settings = parse_command_line(SpeedSettings, prog="python -m experiments.transport_speed", args=None)
    try:
        folder = RunFolder.create(settings.out, settings, name="transport_speed")
    except (ValueError, OSError) as error:
        fail(str(error), prog="transport_speed")
    console = Console(stderr=True)
    try:
        headline = _measure(settings, folder, console)
    except (KeyboardInterrupt, ServerFailed, BaseExceptionGroup) as error:
        _exit_after(error)
    speed_figure(_slices(folder), folder.path / FIGURE)
    write_report(
        folder, headline, title=_TITLE, figure_text="Each ratio to blocking sockets, round by round, beside its bar"
    )
    console.print(_table(headline))
    console.print(f"run folder: {folder.path}")
    if settings.json:
        print(json.dumps(headline))


def _exit_after(error: BaseException) -> NoReturn:
    """One line after Ctrl-C or the early end of a server, which trio may have put into groups."""
    errors = BaseExceptionGroup("", [error])
    if errors.subgroup(KeyboardInterrupt) is not None:
        print("transport_speed: interrupted", file=sys.stderr)
        sys.exit(_EXIT_INTERRUPTED)
    if errors.subgroup(ServerFailed) is not None:
        fail("a server process ended too early", prog="transport_speed")
    raise error


def _measure(settings: SpeedSettings, folder: RunFolder, console: Console) -> dict[str, Any]:
    rounds = _QUICK_ROUNDS if settings.quick else settings.rounds
    with _open_bench(settings) as bench:
        measurements = measurements_of(bench)
        for number in range(rounds + 1):
            # Every other round backwards: whatever drifts does not always favour the same side.
            for measure in measurements if number % 2 == 0 else reversed(measurements):
                for name, measured in measure().items():
                    folder.log("slice", round=number, name=name, **measured.record())
            progress = " (warm-up)" if number == 0 else _progress(folder, number)
            console.print(f"round {number}/{rounds}{progress}", soft_wrap=True)
        peaks = {
            f"{name}_server_peak_growth_mib": server.peak_growth_mib()
            for name, server in (("rpc", bench.rpc), ("blocking", bench.blocking))
        }
    return {"rounds": rounds, **headline_of(_slices(folder)), **peaks}


@contextmanager
def _open_bench(settings: SpeedSettings) -> Iterator[Bench]:
    """Both servers, for the block."""
    rng = random.Random(settings.seed)
    with tempfile.TemporaryDirectory() as folder:
        certificate = Path(folder) / "certificate.pem"
        blocking_side.write_certificate(certificate)
        start = partial(
            open_server,
            certificate=certificate,
            small_bytes=settings.small_bytes,
            tensor_bytes=settings.tensor_bytes,
            seed=settings.seed,
        )
        with start("rpc") as rpc, start("blocking") as blocking:
            yield Bench(
                rpc=rpc,
                blocking=blocking,
                certificate=certificate,
                message=rng.randbytes(settings.small_bytes),
                tensor=rng.randbytes(settings.tensor_bytes),
                callers=settings.callers,
                slice_s=_QUICK_SLICE_S if settings.quick else settings.slice_s,
                latency_calls=settings.latency_calls,
            )


def _slices(folder: RunFolder) -> list[dict[str, Any]]:
    return [record for record in folder.metrics() if record["kind"] == "slice"]


def _progress(folder: RunFolder, number: int) -> str:
    figures = headline_of([record for record in _slices(folder) if record["round"] == number])
    return ": " + ", ".join(
        f"{figure.name.removesuffix('_ratio').replace('_', ' ')} {figures[figure.name]:.2f}" for figure in FIGURES
    )


def _table(headline: dict[str, Any]) -> Table:
    """The ratios beside their bars, then everything else."""
    table = Table(title=_TITLE, title_justify="left")
    for column in ("figure", "median", "least", "greatest", "bar"):
        table.add_column(column)
    shown = {"missed_bars"}
    for figure in FIGURES:
        names = [figure.name, f"{figure.name}_min", f"{figure.name}_max"]
        shown.update(names)
        bar = f"{'<=' if figure.is_upper_bound else '>='} {figure.bar:g}"
        colour = "green" if figure.is_met_by(headline[figure.name]) else "red"
        table.add_row(
            figure.name.replace("_", " "),
            *(f"{headline[name]:.3g}" for name in names),
            bar,
            style=colour,
        )
    for name, value in headline.items():
        if name not in shown:
            table.add_row(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
    return table
