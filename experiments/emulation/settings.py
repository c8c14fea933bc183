"""Settings of this experiment's command line, and of those whose trainings are emulated."""

from dataclasses import dataclass

from experiments.bench import ResumableSettings, Settings


@dataclass(frozen=True, kw_only=True)
class EmulationSettings(Settings):
    """Compare the emulator with the swarm that it emulates: are they equal, and how much faster is it?"""

    quick: bool = False
    """The comparison of the MNIST model alone, with one seed, and one round of its timing."""
    updates: int = 50
    """Updates of the comparison on one event order."""
    seeds: int = 5
    """Orders that are compared, each of other parameters, batches, delays and failures."""
    rounds: int = 3
    """Rounds of the timings; the median of their ratios counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "updates", "seeds", "rounds")


@dataclass(frozen=True, kw_only=True)
class TrialSettings(ResumableSettings, Settings):
    """The flags of an experiment whose trainings are `trials.Trial`s."""

    seeds: int = 5
    """Each setting is trained with so many, from --seed on."""
    jobs: int = 2
    """Trainings at a time, each in a process on its share of the cores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "seeds", "jobs")
