"""Settings of this experiment's command line."""

from dataclasses import dataclass
from typing import Literal

from experiments.bench import ResumableSettings


@dataclass(frozen=True, kw_only=True)
class StalenessSettings(ResumableSettings):
    """Train a mixture with ever more of what asynchrony brings, and with remedies, over several seeds."""

    quick: bool = False
    """Two seeds, and only the rows that the bars are about: of MNIST, or of a Transformer-XL with 256 updates."""
    seeds: int = 5
    """Each row is trained with so many."""
    seed: int = 0
    """The first of them."""
    problem: Literal["mnist", "transformer-xl", "both"] = "both"
    """Problem that is trained."""
    trainers: int = 64
    """Trainers of the asynchronous rows."""
    updates: int = 1024
    """Updates of the MNIST model's trunk. The Transformer-XL takes twice as many."""
    many_trainers: int = 256
    """Trainers of two further rows, with twice the updates; 0: none."""
    only: tuple[str, ...] = ()
    """Only rows of these names, or that have one of these texts in their names, such as 256. Default: all."""
    swarm: bool = False
    """Also train the simulated swarm itself, without and with the default remedy: MNIST, some minutes a seed."""
    jobs: int = 2
    """Trainings at a time, each in a process on its share of the cores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "seeds", "jobs")
        self.require_at_least(2, "trainers")
        self.require_at_least(20, "updates")
        self.require_at_least(0, "seed", "many_trainers")
