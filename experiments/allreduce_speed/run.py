"""All-reduce and blocking sockets in turn, round after round, with a process for each member."""

import json
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from dmoe_jax.cli.common import fail, parse_command_line
from dmoe_jax.runs.report import write_report
from dmoe_jax.runs.run_folder import FIGURE, RunFolder
from experiments.allreduce_speed.figure import speed_figure
from experiments.allreduce_speed.member_process import MemberFailed, MemberProcesses, open_members
from experiments.allreduce_speed.ratios import FIGURES, NETWORKS, SIDES, headline_of, record_of
from experiments.allreduce_speed.vectors import expected_digest
from experiments.transport_speed.blocking_side import write_certificate
from net.averaging.reduction.all_reduce import AllReduceConfig

_EXIT_INTERRUPTED = 130
_TITLE = "Butterfly all-reduce beside blocking sockets"
_DEFAULT = AllReduceConfig()


@dataclass(frozen=True, kw_only=True)
class SpeedSettings:
    """Measure our all-reduce against blocking sockets that carry the same bytes, over loopback in one run."""

    quick: bool = False
    """Three rounds, under a minute."""
    seed: int = 0
    """Seed of the vectors."""
    out: Path | None = None
    """Run folder; default: runs/ and the time."""
    json: bool = False
    """Print the headline figures as one JSON object on the last line."""
    peers: int = 4
    """Members, a process each."""
    mib: float = 64.0
    """Length of the vector, MiB of float32."""
    rounds: int = 9
    """Rounds that count; one more comes before them to warm up."""
    chunk_kib: int = _DEFAULT.chunk_bytes // 1024
    """As in `AllReduceConfig`."""
    window_kib: int = _DEFAULT.window_bytes // 1024
    """As in `AllReduceConfig`."""

    def __post_init__(self) -> None:
        if not 2 <= self.peers <= 64:
            raise ValueError(f"--peers must be 2 to 64, got {self.peers}")
        for name in ("mib", "rounds", "chunk_kib", "window_kib"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {getattr(self, name)}")

    @property
    def size(self) -> int:
        """Numbers in the vector."""
        return max(1, int(self.mib * 2**20) // 4)


_QUICK_ROUNDS = 3

Members = Mapping[tuple[str, str], MemberProcesses]
"""By side and network."""


def main() -> None:
    """Entry point."""
    settings = parse_command_line(SpeedSettings, prog="python -m experiments.allreduce_speed", args=None)
    try:
        folder = RunFolder.create(settings.out, settings, name="allreduce_speed")
    except (ValueError, OSError) as error:
        fail(str(error), prog="allreduce_speed")
    console = Console(stderr=True)
    try:
        headline = _measure(settings, folder, console)
    except (KeyboardInterrupt, MemberFailed) as error:
        _exit_after(error)
    speed_figure(_slices(folder), folder.path / FIGURE, memory_ratio=headline["memory_ratio"])
    write_report(folder, headline, title=_TITLE, figure_text="Each ratio, round by round, beside its bar")
    console.print(_table(headline))
    console.print(f"run folder: {folder.path}")
    if settings.json:
        print(json.dumps(headline))


def _exit_after(error: KeyboardInterrupt | MemberFailed) -> NoReturn:
    if isinstance(error, KeyboardInterrupt):
        print("allreduce_speed: interrupted", file=sys.stderr)
        sys.exit(_EXIT_INTERRUPTED)
    fail(str(error), prog="allreduce_speed")


def _measure(settings: SpeedSettings, folder: RunFolder, console: Console) -> dict[str, Any]:
    rounds = _QUICK_ROUNDS if settings.quick else settings.rounds
    with _open_all(settings) as members:
        expected = expected_digest(settings.peers, settings.size, settings.seed)
        for number in range(rounds + 1):
            # Every other round backwards: whatever drifts does not always favour the same side.
            for side, network in list(members)[:: 1 if number % 2 == 0 else -1]:
                answers = members[side, network].exchange(secrets.token_hex(16))
                if any(answer.get("digest", expected) != expected for answer in answers):
                    raise MemberFailed("a member's average is not the mean of all vectors")
                folder.log("slice", round=number, name=f"{side}_{network}", **record_of(answers))
            console.print(f"round {number}/{rounds}{_progress(settings, folder, number)}", soft_wrap=True)
    headline = headline_of(_slices(folder), vector_bytes=4 * settings.size)
    return {"peers": settings.peers, "mib": settings.mib, "rounds": rounds, **headline}


@contextmanager
def _open_all(settings: SpeedSettings) -> Iterator[Members]:
    """The members of both sides on both networks; those of a ratio beside each other."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        certificate = Path(folder) / "certificate.pem"
        write_certificate(certificate)
        options = [
            *("--size", str(settings.size), "--seed", str(settings.seed), "--certificate", str(certificate)),
            *("--chunk-bytes", str(1024 * settings.chunk_kib), "--window-bytes", str(1024 * settings.window_kib)),
        ]
        yield {
            (side, network): stack.enter_context(open_members(side, network, peers=settings.peers, options=options))
            for network in NETWORKS
            for side in SIDES
        }


def _slices(folder: RunFolder) -> list[dict[str, Any]]:
    return [record for record in folder.metrics() if record["kind"] == "slice"]


def _progress(settings: SpeedSettings, folder: RunFolder, number: int) -> str:
    if number == 0:
        return " (warm-up)"
    figures = headline_of(
        [record for record in _slices(folder) if record["round"] == number], vector_bytes=4 * settings.size
    )
    return ": " + ", ".join(f"{figure.name} {figures[figure.name]:.2f}" for figure in FIGURES)


def _table(headline: dict[str, Any]) -> Table:
    table = Table(title=_TITLE, title_justify="left")
    for column in ("figure", "value"):
        table.add_column(column)
    for name, value in headline.items():
        shown = f"{value:.3g}" if isinstance(value, float) else str(value)
        colour = "red" if name in headline["missed_bars"] else None
        table.add_row(name.replace("_", " "), shown, style=colour)
    return table
