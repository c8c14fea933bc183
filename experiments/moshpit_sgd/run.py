"""The command: train the same model with each method, draw losses over virtual time, report."""

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dmoe_jax.cli.common import fail, parse_command_line, set_up_jax

if TYPE_CHECKING:
    from rich.console import Console

    from dmoe_jax.runs.run_folder import RunFolder
    from experiments.moshpit_sgd.learning import Programs
    from experiments.moshpit_sgd.time_model import TimeModel

_PROG = "moshpit_sgd"
_EXIT_INTERRUPTED = 130
_EVALUATED_PEERS = 8
_IN_A_ROW = 3
"""Evaluations whose mean must reach the target: one of them alone may be lucky."""


@dataclass(frozen=True, kw_only=True)
class MoshpitSgdSettings:
    """Time to a target loss, in virtual time, of peers of unequal speed that come and go."""

    model: Literal["mnist", "transformer_xl"] | None = None
    """What is trained. Default: one after the other; with --quick the MNIST network."""
    peers: int | None = None
    """How many train. Default: 16, then 64; with --quick 16."""
    methods: tuple[Literal["all_reduce", "gossip", "pushsum", "moshpit"], ...] = (
        "all_reduce",
        "gossip",
        "pushsum",
        "moshpit",
    )
    """How they average."""
    local_steps: int = 4
    """Steps of a peer between two averagings."""
    target: float | None = None
    """Validation loss in nats that is to be reached. Default: the model's."""
    max_virtual_s: float = 1500.0
    """After which a method is given up."""
    evaluate_every_s: float = 10.0
    """Virtual seconds between two evaluations."""
    mean_uptime_s: float = 900.0
    """Of a peer, exponentially distributed; inf: nobody leaves."""
    mean_downtime_s: float = 120.0
    """Until a peer that left is back."""
    straggling: float = 0.02
    """Probability that local steps take five times as long."""
    speed_sigma: float = 0.35
    """Of the log-normal distribution of peers' speeds; 0: all are equal."""
    quick: bool = False
    """The MNIST network and 16 peers only."""
    seed: int = 0
    """Seed of parameters, batches, speeds, absences and places on the grid."""
    out: Path | None = None
    """Run folder; must be new or empty. Default: runs/ and the time."""
    json: bool = False
    """Print the headline figures as one JSON object on the last line."""

    def __post_init__(self) -> None:
        if self.peers is not None and self.peers < 2:
            raise ValueError(f"--peers must be at least 2, got {self.peers}")
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ValueError(f"--methods must be different ones, got {' '.join(self.methods) or 'none'}")
        if self.local_steps < 1:
            raise ValueError(f"--local-steps must be at least 1, got {self.local_steps}")
        if self.seed < 0:
            raise ValueError(f"--seed must not be negative, got {self.seed}")
        for name in ("max_virtual_s", "evaluate_every_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0 and finite, got {getattr(self, name)}")

    @property
    def models(self) -> tuple[Literal["mnist", "transformer_xl"], ...]:
        """What is trained, in order."""
        if self.model is not None:
            return (self.model,)
        return ("mnist",) if self.quick else ("mnist", "transformer_xl")

    @property
    def swarms(self) -> tuple[int, ...]:
        """Numbers of peers, in order."""
        if self.peers is not None:
            return (self.peers,)
        return (16,) if self.quick else (16, 64)


def main(args: list[str] | None = None) -> None:
    """Entry point."""
    settings = parse_command_line(MoshpitSgdSettings, prog=f"python -m experiments.{_PROG}", args=args)
    set_up_jax()
    from rich.console import Console

    from dmoe_jax.data.errors import DataError
    from dmoe_jax.runs.run_folder import RunFolder
    from experiments.moshpit_sgd.report import report
    from experiments.moshpit_sgd.time_model import TimeModel

    console = Console(stderr=settings.json)
    try:
        times = TimeModel(
            mean_uptime_s=settings.mean_uptime_s,
            mean_downtime_s=settings.mean_downtime_s,
            straggling=settings.straggling,
            speed_sigma=settings.speed_sigma,
        )
        folder = RunFolder.create(settings.out, settings, name=_PROG)
    except (ValueError, OSError) as error:
        fail(str(error), prog=_PROG)
    is_interrupted = False
    try:
        _run_all(settings, times, folder, console)
    except DataError as error:
        fail(str(error), prog=_PROG)
    except KeyboardInterrupt:
        is_interrupted = True
    headline = report(folder, settings, times, console)
    if is_interrupted:
        print(f"{_PROG}: interrupted; the report is of what was finished", file=sys.stderr)
        sys.exit(_EXIT_INTERRUPTED)
    if settings.json:
        print(json.dumps(headline))


def _run_all(settings: MoshpitSgdSettings, times: "TimeModel", folder: "RunFolder", console: "Console") -> None:
    from experiments.moshpit_sgd.learning import Programs
    from experiments.moshpit_sgd.tasks import make_task

    for model in settings.models:
        programs = Programs(make_task(model), local_steps=settings.local_steps, seed=settings.seed)
        for num_peers in settings.swarms:
            for method in settings.methods:
                _run_one(settings, times, folder, console, programs, model=model, num_peers=num_peers, method=method)


def _run_one(
    settings: MoshpitSgdSettings,
    times: "TimeModel",
    folder: "RunFolder",
    console: "Console",
    programs: "Programs",
    *,
    model: str,
    num_peers: int,
    method: Any,
) -> None:
    """Train until the target is reached or the time is up, and log it."""
    from rich.progress import Progress

    from dmoe_jax.runs.run_folder import plain
    from experiments.moshpit_sgd.learning import PeerLearner
    from experiments.moshpit_sgd.methods import make_method
    from experiments.moshpit_sgd.simulation import Simulation

    what = {"model": model, "peers": num_peers, "method": method}
    target = programs.task.target if settings.target is None else settings.target
    started = time.perf_counter()
    learner = PeerLearner(programs, num_peers=num_peers, seed=settings.seed)
    simulation = Simulation(times, learner, num_peers, settings.local_steps, settings.seed)
    simulation.start(make_method(method, simulation))
    losses: list[float] = []
    reached_s = None
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(f"{model}, {num_peers} peers, {method}", total=settings.max_virtual_s)
        while reached_s is None and simulation.now < settings.max_virtual_s:
            simulation.run_until(min(simulation.now + settings.evaluate_every_s, settings.max_virtual_s))
            progress.update(bar, completed=simulation.now)
            up = simulation.up
            if not up:
                continue
            # The same peers each time, as far as they are there: others would add their differences to the noise.
            own = learner.losses([up[place * len(up) // _EVALUATED_PEERS] for place in range(_EVALUATED_PEERS)])
            losses.append(float(own.mean()))
            folder.log("evaluation", **what, virtual_s=simulation.now, loss=losses[-1], worst=own.max(), up=len(up))
            last = losses[-_IN_A_ROW:]
            if len(last) == _IN_A_ROW and sum(last) / _IN_A_ROW <= target:
                reached_s = simulation.now
    wall_s = time.perf_counter() - started
    result = {"target": target, "reached_s": reached_s, "loss": losses[-1] if losses else None, "wall_s": wall_s}
    folder.log("result", **what, **result, **plain(simulation.counts))
    outcome = "not reached" if reached_s is None else f"reached after {reached_s:.0f} virtual seconds"
    console.print(f"{model}, {num_peers} peers, {method}: {target} {outcome} ({wall_s:.0f} s)", highlight=False)
