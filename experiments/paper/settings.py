"""Settings of this experiment's command line, and the experiments that it runs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from experiments.bench import ResumableSettings, Settings


class PaperExperiment(NamedTuple):
    """One experiment of the report: the figure of a paper that it re-creates, or what it shows beside the papers."""

    figure: str
    claim: str  # or a question, in a sentence
    quick_minutes: float  # that its quick run may take on two idle cores
    resumes: bool = False  # True if it knows --resume
    full_flags: tuple[str, ...] = ()  # of its run that is not quick


EXPERIMENTS: Mapping[str, PaperExperiment] = {
    "mnist_convergence": PaperExperiment(
        "Learning@home, figure 5",
        "Under 1000 ms of delay mixtures of experts learn MNIST in fewer updates than a dense network that computes as"
        " much, each with its best step sizes; a tenth of the calls lost costs them next to nothing.",
        quick_minutes=3.5,
        resumes=True,
        full_flags=("--extras",),
    ),
    "throughput_vs_latency": PaperExperiment(
        "Learning@home, figure 4",
        "With one batch in flight throughput falls as 1/delay; asynchronous trainers keep at least 90 % of "
        "theirs until the ceiling that the delays set comes near what the devices can compute.",
        quick_minutes=1.5,
    ),
    "transformer_xl": PaperExperiment(
        "Learning@home, figure 6",
        "Does a Transformer-XL whose layers are mixtures of small experts, far away and unreliable, end below"
        " the dense model of the small size at an equal number of tokens?",
        quick_minutes=1.5,
        resumes=True,
    ),
    "staleness": PaperExperiment(
        "what asynchrony costs, and what wins it back",
        "Nearly all that asynchrony costs is staleness, and the default remedies win part of it back, each side with "
        "its best step sizes; with the step sizes of one trainer they win back more.",
        quick_minutes=3.5,
        resumes=True,
    ),
    "emulation": PaperExperiment(
        "the emulator beside the swarm",
        "On the order of events that a simulated swarm took, the emulator's losses and parameters are the "
        "swarm's to rounding over 50 updates, at many times its updates per second.",
        quick_minutes=3.0,
    ),
    "moshpit_averaging": PaperExperiment(
        "Moshpit SGD, the averaging table",
        "Groups on a grid bring all peers to the mean in a few rounds, exactly in d rounds on a full grid of "
        "M^d, and a peer that is absent costs little.",
        quick_minutes=0.5,
    ),
    "moshpit_sgd": PaperExperiment(
        "Moshpit SGD, time to a target",
        "Under stragglers and failures Moshpit reaches a target loss ahead of All-Reduce, which waits for the slowest.",
        quick_minutes=1.0,
    ),
}
"""By name, in the order of the report: `python -m experiments.NAME`."""

QUICK_MINUTES = 15.0
"""Minutes that the quick report may take on two idle cores."""

# The last four, of throughput_vs_latency and emulation, rest on the measured cost of a block.
_TIMED = re.compile(
    r"(^|\.)(wall|training|compile)_s$|_per_s($|_)|speedup|overhead|^kept|^agreement|^ratio_|over_one_jit"
)


def is_timing(key: str) -> bool:
    """True if a figure of a headline is a timing, which differs from run to run."""
    return _TIMED.search(key) is not None


@dataclass(frozen=True, kw_only=True)
class PaperSettings(ResumableSettings, Settings):
    """Run the experiments behind the papers' figures, and set our figures beside the papers' in one report.

    They are mnist_convergence, throughput_vs_latency, transformer_xl, staleness, emulation, moshpit_averaging and
    moshpit_sgd.
    """

    may_differ: ClassVar = ("only", "copy_to")

    quick: bool = False
    """The quick run of each experiment."""
    only: tuple[str, ...] = ()
    """Names of experiments to run, in the order of the report. Default: all."""
    copy_to: Path | None = None
    """Also copy report.md, timing.md and the pictures into this folder, for instance experiments/report."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.only:
            if name not in EXPERIMENTS:
                raise ValueError(f"--only has names out of {', '.join(EXPERIMENTS)}, got {name}")

    @property
    def names(self) -> tuple[str, ...]:
        """The experiments to run, in order."""
        return tuple(name for name in EXPERIMENTS if not self.only or name in self.only)

    def command(self, name: str) -> list[str]:
        """The words after `python -m` that give an experiment's figures."""
        flags = ["--quick"] if self.quick else EXPERIMENTS[name].full_flags
        return [f"experiments.{name}", *flags, *(["--seed", str(self.seed)] if self.seed else [])]
