"""Settings of this experiment's command line, and of those whose trainings are emulated."""

from dataclasses import dataclass

from experiments.bench import Settings, SweepSettings

FIRST_SEARCH_SEED = 1000
"""First of the seeds with which step sizes are searched; reported trainings have those below."""


@dataclass(frozen=True, kw_only=True)
class EmulationSettings(Settings):
    """Compare the emulator with the swarm that it emulates: are they equal, and how much faster is it?"""

    quick: bool = False
    """The comparison of the MNIST model alone, with one seed instead of five, and one round of its timing instead of
    three."""


@dataclass(frozen=True, kw_only=True)
class TrialSettings(SweepSettings, Settings):
    """The flags of an experiment whose trainings are `trials.Trial`s."""

    seeds: int = 5
    """Each setting is trained with so many, from --seed on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "seeds")
        if self.seed + self.seeds > FIRST_SEARCH_SEED:
            last = self.seed + self.seeds - 1
            raise ValueError(f"seeds must be below {FIRST_SEARCH_SEED}, where those of searches begin, got {last}")
