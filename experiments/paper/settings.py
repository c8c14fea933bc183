"""Settings of this experiment's command line, and the experiments that it runs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from experiments.bench import ResumableSettings, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperExperiment:
    """One experiment of the report."""

    figure: str
    """Figure of a paper that it re-creates, or what it shows beside the papers."""
    claim: str
    """Claim or question that it is about, in a sentence."""
    quick_minutes: float
    """Minutes that its quick run may take on two idle cores."""
    flags: tuple[str, ...] = ()
    """Flags of its own, at either scale."""
    full_flags: tuple[str, ...] = ()
    """Flags of its run that is not quick."""
    timed: str | None = None
    """Pattern of the keys that are timings and differ from run to run, beside those that are so everywhere."""

    def is_timing(self, key: str) -> bool:
        """Return True if the figure `key` of its headline is a timing."""
        return any(re.search(pattern, key) for pattern in (_TIMED, self.timed) if pattern)


_TIMED = r"(^|\.)(wall|training|compile)_s$|_per_s($|_)|speedup|overhead"

EXPERIMENTS: Mapping[str, PaperExperiment] = {
    "mnist_convergence": PaperExperiment(
        figure="Learning@home, figure 5",
        claim="Under 1000 ms of delay, and with a tenth of the calls lost, mixtures of experts learn MNIST in fewer"
        " updates than a dense network that computes as much.",
        quick_minutes=3.0,
        full_flags=("--extras",),
    ),
    "throughput_vs_latency": PaperExperiment(
        figure="Learning@home, figure 4",
        claim="With one batch in flight throughput falls as 1/delay; asynchronous trainers keep at least 90 % of "
        "theirs until the ceiling that the delays set comes near what the devices can compute.",
        quick_minutes=1.5,
        timed="^(kept|agreement|ratio_)",  # all of them rest on the measured cost of a block
    ),
    "transformer_xl": PaperExperiment(
        figure="Learning@home, figure 6",
        claim="Does a Transformer-XL whose layers are mixtures of small experts, far away and unreliable, end below"
        " the dense model of the small size at an equal number of tokens?",
        quick_minutes=2.0,
    ),
    "staleness": PaperExperiment(
        figure="what asynchrony costs, and what wins it back",
        claim="Nearly all that asynchrony costs is staleness of the experts, and the default remedies win at least "
        "half of it back.",
        quick_minutes=2.5,
    ),
    "emulation": PaperExperiment(
        figure="the emulator beside the swarm",
        claim="On the order of events that a simulated swarm took, the emulator's losses and parameters are the "
        "swarm's to rounding over 50 updates, at many times its updates per second.",
        quick_minutes=3.5,
        timed="over_one_jit",
    ),
    "moshpit_averaging": PaperExperiment(
        figure="Moshpit SGD, the averaging table",
        claim="Groups on a grid bring all peers to the mean in a few rounds, exactly in d rounds on a full grid of "
        "M^d, and a peer that is absent costs little.",
        quick_minutes=0.5,
    ),
    "moshpit_sgd": PaperExperiment(
        figure="Moshpit SGD, time to a target",
        claim="Under stragglers and failures Moshpit reaches a target loss ahead of All-Reduce, which waits for the"
        " slowest.",
        quick_minutes=1.5,
    ),
}
"""By name, in the order of the report: `python -m experiments.NAME`."""

QUICK_MINUTES = 15.0
"""Minutes that the quick report may take on two idle cores."""


@dataclass(frozen=True, kw_only=True)
class PaperSettings(ResumableSettings, Settings):
    """Run the experiments behind the papers' figures, and set our figures beside the papers' in one report.

    They are mnist_convergence, throughput_vs_latency, transformer_xl, staleness, emulation, moshpit_averaging and
    moshpit_sgd.
    """

    quick: bool = False
    """The quick run of each experiment."""
    only: tuple[str, ...] = field(default=())
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

    def flags(self, name: str) -> list[str]:
        """The flags of an experiment that decide its figures."""
        seed = ["--seed", str(self.seed)] if self.seed else []
        own = EXPERIMENTS[name]
        return [*own.flags, *(["--quick"] if self.quick else own.full_flags), *seed]
