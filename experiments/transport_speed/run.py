"""Ours and blocking sockets in turn, round after round: calls per second, bytes per second, small calls under load."""

import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import trio
from rich.console import Console
from rich.table import Table

from dmoe_jax.cli.common import fail, parse_command_line
from dmoe_jax.runs.report import write_report
from dmoe_jax.runs.run_folder import FIGURE, RunFolder
from experiments.transport_speed import blocking_side, rpc_side
from experiments.transport_speed.figure import speed_figure
from experiments.transport_speed.ratios import FIGURES, Slice, headline_of
from experiments.transport_speed.server_process import ServerFailed, ServerProcess, open_server
from experiments.transport_speed.stopwatch import Pace, Stopwatch

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
    """Least number of small calls behind a 99th percentile of the idle connection; 400 if less do under load."""

    def __post_init__(self) -> None:
        for name in ("rounds", "slice_s", "callers", "small_bytes", "tensor_mib", "latency_calls"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {getattr(self, name)}")

    @property
    def tensor_bytes(self) -> int:
        """Size of a tensor in bytes."""
        return max(1, int(self.tensor_mib * 2**20))


_QUICK_ROUNDS, _QUICK_SLICE_S = 3, 0.8
_LOADED_CALLS = 400
"""Small calls under load, at least: one takes milliseconds there."""

_WARM_UP_CALLS, _WARM_UP_TRANSFERS = 100, 3
"""On each fresh connection, before the clock starts: buffers have grown and memory has been touched by then."""

Measurement = Callable[[], dict[str, Slice]]


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
    except ServerFailed as error:
        fail(str(error), prog="transport_speed")
    except KeyboardInterrupt:
        print("transport_speed: interrupted", file=sys.stderr)
        sys.exit(_EXIT_INTERRUPTED)
    speed_figure(_slices(folder), folder.path / FIGURE)
    write_report(folder, headline, title=_TITLE)
    console.print(_table(headline))
    console.print(f"run folder: {folder.path}")
    if settings.json:
        print(json.dumps(headline))


def _measure(settings: SpeedSettings, folder: RunFolder, console: Console) -> dict[str, Any]:
    rounds = _QUICK_ROUNDS if settings.quick else settings.rounds
    with _open_servers(settings) as (rpc, blocking, certificate):
        measurements = _measurements(settings, rpc, blocking, certificate)
        for number in range(rounds + 1):
            # Every other round backwards: whatever drifts does not always favour the same side.
            for measure in measurements if number % 2 == 0 else reversed(measurements):
                for name, measured in measure().items():
                    folder.log("slice", round=number, name=name, **measured.record())
            console.print(f"round {number}/{rounds}" + (" (warm-up)" if number == 0 else _progress(folder, number)))
        peaks = {
            f"{name}_server_peak_growth_mib": server.peak_growth_mib()
            for name, server in (("rpc", rpc), ("blocking", blocking))
        }
    return {"rounds": rounds, **headline_of(_slices(folder)), **peaks}


@contextmanager
def _open_servers(settings: SpeedSettings) -> Iterator[tuple[ServerProcess, ServerProcess, Path]]:
    """Ours, the baseline's, and the certificate by which its clients know it."""
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
            yield rpc, blocking, certificate


def _measurements(
    settings: SpeedSettings, rpc: ServerProcess, blocking: ServerProcess, certificate: Path
) -> list[Measurement]:
    """What a round consists of; the two sides of a ratio stand beside each other."""
    slice_s = _QUICK_SLICE_S if settings.quick else settings.slice_s
    calls = Pace(slice_s=slice_s, warm_up_calls=_WARM_UP_CALLS)
    idle = Pace(slice_s=slice_s, warm_up_calls=_WARM_UP_CALLS, min_calls=settings.latency_calls)
    loaded = Pace(slice_s=slice_s, warm_up_calls=1, min_calls=min(settings.latency_calls, _LOADED_CALLS))
    transfers = Pace(slice_s=slice_s, warm_up_calls=_WARM_UP_TRANSFERS)
    rng = random.Random(settings.seed)
    message, tensor = rng.randbytes(settings.small_bytes), rng.randbytes(settings.tensor_bytes)
    array = np.frombuffer(tensor, np.uint8)

    def blocking_calls() -> dict[str, Slice]:
        watch = Stopwatch(blocking.cpu_s)
        return {
            "blocking_calls": blocking_side.measure_calls(blocking.plain, message=message, pace=calls, stopwatch=watch)
        }

    def rpc_calls(*, encrypted: bool, callers: int, name: str) -> dict[str, Slice]:
        measure = partial(
            rpc_side.measure_calls,
            rpc.encrypted if encrypted else rpc.plain,
            encrypted=encrypted,
            callers=callers,
            message=message,
            pace=calls,
            stopwatch=Stopwatch(rpc.cpu_s),
        )
        return {name: trio.run(measure)}

    def blocking_transfer(*, encrypted: bool, kind: bytes, name: str) -> dict[str, Slice]:
        measured = blocking_side.measure_transfer(
            blocking.encrypted if encrypted else blocking.plain,
            kind,
            tensor=tensor,
            certificate=certificate if encrypted else None,
            pace=transfers,
            stopwatch=Stopwatch(blocking.cpu_s),
        )
        return {name: measured}

    def rpc_transfer(*, encrypted: bool, method: str, name: str) -> dict[str, Slice]:
        measure = partial(
            rpc_side.measure_transfer,
            rpc.encrypted if encrypted else rpc.plain,
            method,
            encrypted=encrypted,
            tensor=array,
            pace=transfers,
            stopwatch=Stopwatch(rpc.cpu_s),
        )
        return {name: trio.run(measure)}

    def head_of_line() -> dict[str, Slice]:
        measure = partial(
            rpc_side.measure_head_of_line,
            rpc.encrypted,
            message=message,
            tensor=array,
            idle=idle,
            loaded=loaded,
            stopwatch=Stopwatch(rpc.cpu_s),
        )
        names = ("rpc_tls_one_caller", "rpc_tls_calls_while_sending", "rpc_tls_calls_while_receiving")
        return dict(zip(names, trio.run(measure), strict=True))

    measurements: list[Measurement] = [
        partial(rpc_calls, encrypted=False, callers=settings.callers, name="rpc_plain_calls"),
        blocking_calls,
        partial(rpc_calls, encrypted=True, callers=settings.callers, name="rpc_tls_calls"),
        partial(rpc_calls, encrypted=False, callers=1, name="rpc_plain_one_caller"),
        head_of_line,
    ]
    for encrypted, network in ((True, "tls"), (False, "plain")):
        for kind, method, direction in (
            (blocking_side.TAKE, rpc_side.TAKE, "send"),
            (blocking_side.GIVE, rpc_side.GIVE, "receive"),
        ):
            measurements += [
                partial(blocking_transfer, encrypted=encrypted, kind=kind, name=f"blocking_{network}_{direction}"),
                partial(rpc_transfer, encrypted=encrypted, method=method, name=f"rpc_{network}_{direction}"),
            ]
    return measurements


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
