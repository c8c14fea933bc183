"""Settings of this experiment's command line."""

from dataclasses import dataclass
from typing import Literal

from experiments.emulation.settings import TrialSettings


@dataclass(frozen=True, kw_only=True)
class MnistSettings(TrialSettings):
    """Learning@home's figure 5: how mixtures and a dense model learn MNIST under latency and failures."""

    quick: bool = False
    """Only the curves that the bars are about, and the plain mixture without failures: 256 experts and the dense model
    at 1000 ms."""
    updates: int = 250
    """Updates of the trunk."""
    experts: tuple[Literal[64, 256, 4096], ...] = (64, 256, 4096)
    """Mixtures by their experts in all four layers. Trainings of 4,096 take 11 GB each, one at a time."""
    search: bool = False
    """First train the dense model and 256 experts of the authors' program at 1000 ms with 1/32 to 4 times the step
    sizes, on two seeds that are not reported, and go on with the best of each; with --extras also both with our default
    optimisers. Without it: those that the README names."""
    extras: bool = False
    """Also what is not in the paper, of 256 experts and the dense model: trained keys without stale experts, and our
    default optimisers, which know of staleness."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(100, "updates")
        if self.extras and self.quick:
            raise ValueError("--extras has no quick run: leave out --quick")
        if not self.experts:
            raise ValueError("--experts needs one number at least, got none")
