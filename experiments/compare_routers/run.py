"""The command."""

import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from dmoe_jax.cli.common import UsageError, fail, one_line, parse_command_line, set_up_jax
from experiments.transformer_xl.names import Place, Size

_PROG = "compare_routers"
_EXIT_INTERRUPTED = 130

_SEEDS = (0, 1, 2)
_QUICK_SEEDS = (0, 1)


@dataclass(frozen=True, kw_only=True)
class CompareRoutersCommand:
    """Train the same mixture with one router after the other, on several seeds each, and put them side by side."""

    routers: tuple[str, ...] = ()
    """Registered names, or your own: my_file.py:my_router. Default: all that are registered; with --quick, three."""
    seeds: tuple[int, ...] = ()
    """Seeds; each router is trained once with each. Default: 0 1 2; with --quick, 0 1."""
    size: Size = "tiny"
    """tiny: minutes on two cores for each run. full: the paper's size, for a large GPU."""
    where: Literal["auto", "local", "simulated"] = "auto"
    """local: at once on this device. simulated: slow trainers in virtual time, whose calls may fail. auto: tiny is
    simulated, full is local."""
    steps: int | None = None
    """Updates of each run. Default: the preset's."""
    batch_size: int | None = None
    """Sequences of an update. Default: the preset's on one device, 1 for each simulated trainer."""
    eval_every: int | None = None
    """Updates between two pauses for evaluation and checkpoint. Default: the preset's."""
    eval_tokens: int = 16_384
    """Validation words of the evaluation in a pause, 0 for all. At the end all are read, and all of the test text."""
    trainers: int = 32
    """Simulated trainers."""
    delay_s: float = 1.0
    """Mean of the exponential delay in a simulated swarm, virtual seconds."""
    failure_rate: float = 0.1
    """Share of the expert calls in a simulated swarm that are never answered."""
    data: Literal["auto", "wikitext-2", "embedded"] = "auto"
    """Corpus: auto (DMOE_DATA, cache, download, else the embedded one), wikitext-2, or embedded."""
    out: Path | None = None
    """Run folder; must be new or empty unless --resume. Default: runs/ and the time."""
    resume: bool = False
    """Go on with the comparison in --out: finished runs stay, one that was interrupted goes on from its last pause."""
    quick: bool = False
    """A comparison of under two minutes on two cores that shows the same things with less training."""
    json: bool = False
    """Print the headline figures as one JSON object on the last line."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "eval_every", "trainers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.eval_tokens < 0:
            raise ValueError(f"--eval-tokens must not be negative, got {self.eval_tokens}")
        if not (self.delay_s >= 0 and 0 <= self.failure_rate < 1):
            raise ValueError("--delay-s must not be negative, --failure-rate from 0 to below 1")
        for name, chosen in (("routers", self.routers), ("seeds", self.seeds)):
            if len(set(chosen)) < len(chosen):
                raise ValueError(f"--{name} names one twice: {' '.join(map(str, chosen))}")
        if any(seed < 0 for seed in self.seeds):
            raise ValueError(f"--seeds must not be negative, got {' '.join(map(str, self.seeds))}")
        if self.resume and self.out is None:
            raise ValueError("--resume needs --out with the folder of the comparison to continue")

    @property
    def chosen_seeds(self) -> tuple[int, ...]:
        """The seeds that are meant."""
        return self.seeds or (_QUICK_SEEDS if self.quick else _SEEDS)

    @property
    def place(self) -> Place:
        """Where the runs train."""
        if self.where == "auto":
            return "simulated" if self.size == "tiny" else "local"
        return self.where


def main(args: list[str] | None = None) -> None:
    """Entry point."""
    command = parse_command_line(CompareRoutersCommand, prog=f"python -m experiments.{_PROG}", args=args)
    # Whoever ends a process from outside wants what Ctrl-C gives: a report, and a comparison that can be resumed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        set_up_jax()
        from experiments.compare_routers.comparing import compare_routers  # JAX: not for --help

        headline = compare_routers(command)
    except UsageError as error:
        fail(one_line(error), prog=_PROG)
    except (KeyboardInterrupt, BaseExceptionGroup) as error:
        _exit_after(error)
    if command.json:
        print(json.dumps(headline))
    if headline["failed"]:
        fail(f"{len(headline['failed'])} runs failed: {', '.join(headline['failed'])}", prog=_PROG)


def _exit_after(error: BaseException) -> NoReturn:
    """One line after Ctrl-C, which a simulation's nurseries may have put into groups."""
    if BaseExceptionGroup("", [error]).subgroup(KeyboardInterrupt) is None:
        raise error
    print(f"{_PROG}: interrupted; --resume goes on", file=sys.stderr)
    sys.exit(_EXIT_INTERRUPTED)
