"""Settings of this experiment's command line."""

from dataclasses import dataclass
from typing import Literal

from experiments.emulation.settings import TrialSettings


@dataclass(frozen=True, kw_only=True)
class StalenessSettings(TrialSettings):
    """Train a mixture with ever more of what asynchrony brings, and with remedies, over several seeds."""

    quick: bool = False
    """Two seeds of MNIST, and only the rows that the bars are about."""
    problem: tuple[Literal["mnist", "transformer-xl"], ...] = ("mnist", "transformer-xl")
    """Problems that are trained."""
    updates: int = 1024
    """Updates of the MNIST model's trunk. The Transformer-XL takes twice as many."""
    only: tuple[str, ...] = ()
    """Only rows of these names, or that have one of these texts in their names, such as 256. Default: all."""
    search: bool = False
    """First train one trainer, plain asynchrony, plain without first moment, and the default with 1/32 to 4 times their
    step sizes, on two seeds that are not reported, and go on with the best of each. Without it: those that
    the README names."""
    swarm: bool = False
    """Also train the simulated swarm itself, without and with the default remedy: MNIST, some minutes a seed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(20, "updates")
        if not self.problem:
            raise ValueError("--problem needs one at least, got none")
