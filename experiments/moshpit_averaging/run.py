"""The command: simulate, compare with the paper, draw, report."""

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dmoe_jax.cli.common import fail, parse_command_line, set_up_jax
from experiments.moshpit_averaging.paper import SQUARE, TABLE, Setting
from net.averaging.grouping.group_key import MoshpitGrid

_PROG = "moshpit_averaging"
_EXIT_INTERRUPTED = 130
_QUICK_PEERS = (512, 1024)


@dataclass(frozen=True, kw_only=True)
class AveragingCommand:
    """Count the rounds that averaging takes among peers that may be absent, with Moshpit and what it is compared with.

    Without --peers, --grid and --failure: the paper's whole table.
    """

    peers: int | None = None
    """How many. Default: a full grid."""
    grid: str | None = None
    """Moshpit's grid as side,axes; its side is the size of random groups, too. Default: 32,2, or a larger square."""
    failure: float | None = None
    """Probability that a peer is absent from a round. Default: 0."""
    failure_rule: Literal["exclude", "group-skips"] | None = None
    """What groups do without an absent peer: average without it, or skip the round. Default: exclude; in the whole
    table, some rows under each."""
    restarts: int = 100
    """Independent repetitions, the mean over which is reported. The paper has 10."""
    rounds: int = 50
    """Rounds after which a repetition is given up; it counts as that many."""
    seed: int = 0
    """Seed of numbers, absences, cells and groups."""
    quick: bool = False
    """Of the whole table, only the rows of 512 and 1024 peers under "exclude"; 10 restarts."""
    out: Path | None = None
    """Run folder; must be new or empty. Default: runs/ and the time."""
    json: bool = False
    """Print the headline figures as one JSON object on the last line."""

    def __post_init__(self) -> None:
        for name in ("restarts", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"--seed must not be negative, got {self.seed}")
        self.settings()

    @property
    def is_whole_table(self) -> bool:
        """Whether no setting was asked for in particular."""
        return self.peers is None and self.grid is None and self.failure is None

    def settings(self) -> tuple[Setting, ...]:
        """What is to be simulated.

        Raises:
          ValueError: naming the flag whose value cannot be.
        """
        if self.is_whole_table:
            wanted = {None: ("exclude", "group_skips"), "exclude": ("exclude",), "group-skips": ("group_skips",)}
            rows = tuple(row for row in TABLE if row.failure_rule in wanted[self.failure_rule])
            if not self.quick:
                return rows
            quick = (row for row in rows if row.num_peers in _QUICK_PEERS and row.grid == SQUARE)
            return tuple(row for row in quick if self.failure_rule or row.failure_rule == "exclude")
        if self.peers is not None and self.peers < 2:
            raise ValueError(f"--peers must be at least 2, got {self.peers}")
        grid = _default_grid(self.peers) if self.grid is None else _grid(self.grid)
        return (
            Setting(
                num_peers=grid.num_cells if self.peers is None else self.peers,
                grid=grid,
                failure=self.failure or 0.0,
                failure_rule="group_skips" if self.failure_rule == "group-skips" else "exclude",
            ),
        )


def _grid(text: str) -> MoshpitGrid:
    try:
        side, dims = (int(word) for word in text.split(","))
    except ValueError as error:
        raise ValueError(f"--grid is side,axes such as 32,2, got {text!r}") from error
    # Before the power is taken: it could have millions of digits.
    if not (1 <= side <= 2**31 and 1 <= dims <= 31):
        raise ValueError(f"--grid has sides from 1 and from 1 to 31 axes, got {text}")
    return MoshpitGrid(side=side, dims=dims)


def _default_grid(num_peers: int | None) -> MoshpitGrid:
    """The paper's, or for more peers the smallest square that seats them."""
    if num_peers is None or num_peers <= SQUARE.num_cells:
        return SQUARE
    return MoshpitGrid(side=math.isqrt(num_peers - 1) + 1, dims=2)


def main(args: Sequence[str] | None = None) -> None:
    """Entry point."""
    command = parse_command_line(AveragingCommand, prog=f"python -m experiments.{_PROG}", args=args)
    set_up_jax()
    try:
        headline = _run(command)
    except KeyboardInterrupt:
        print(f"{_PROG}: interrupted", file=sys.stderr)
        sys.exit(_EXIT_INTERRUPTED)
    if command.json:
        print(json.dumps(headline))


def _run(command: AveragingCommand) -> dict[str, Any]:
    """Everything after the command line. Returns the headline figures."""
    from rich.console import Console
    from rich.progress import Progress

    from dmoe_jax.runs.run_folder import RunFolder
    from experiments.moshpit_averaging import reporting
    from experiments.moshpit_averaging.simulation import simulate

    try:
        folder = RunFolder.create(command.out, command, name=_PROG)
    except (ValueError, OSError) as error:
        fail(str(error), prog=_PROG)
    console = Console(stderr=command.json)
    restarts = min(command.restarts, 10) if command.quick else command.restarts
    settings = command.settings()
    results: list[reporting.Result] = []
    start_s = time.perf_counter()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("averaging", total=len(settings))
        for setting in settings:
            progress.update(task, description=str(setting))
            variances = simulate(
                setting,
                restarts=restarts,
                rounds=command.rounds,
                seed=command.seed,
                on_progress=lambda share: progress.advance(task, share),
            )
            results.append(reporting.result_of(setting, variances))
            folder.log("setting", **results[-1].record())
        progress.update(task, description="random groups and the formula")
        mixing = reporting.mixing_of(settings[-1], seed=command.seed)
    wall_s = time.perf_counter() - start_s
    if mixing is not None:
        folder.log("mixing", **mixing._asdict())
    headline = reporting.headline_of(results, mixing, wall_s=wall_s, restarts=restarts, rounds=command.rounds)
    reporting.write(folder, results, mixing, headline)
    console.print(reporting.console_table(results))
    if mixing is not None:
        console.print(
            f"A round of random groups left {mixing.factor_ratio:.3f} times the variance that the formula has."
        )
    for missed in headline["missed_bars"]:
        console.print(f"missed: {missed}")
    console.print(f"run folder: {folder.path}", highlight=False, soft_wrap=True)
    return headline
