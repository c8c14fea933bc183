"""Settings of this experiment's command line."""

from dataclasses import dataclass
from typing import Literal

from experiments.bench import ResumableSettings

Gate = Literal["trained", "frozen", "both"]


@dataclass(frozen=True, kw_only=True)
class MnistSettings(ResumableSettings):
    """Learning@home's figure 5: how mixtures and a dense model learn MNIST under latency and failures."""

    quick: bool = False
    """Only the curves that the bars are about, and the plain mixture without failures: 256 experts and the dense model
    at 1000 ms."""
    seeds: int = 5
    """Each setting is trained with so many."""
    seed: int = 0
    """The first of them."""
    size: Literal["laptop", "paper"] = "laptop"
    """Width: an expert of 64 against a dense model of 128, or the paper's 512 against 1,024, for a GPU."""
    updates: int | None = None
    """Updates of the trunk. Default: 250; in the paper's width 20,480."""
    experts: tuple[Literal[64, 256, 4096], ...] = (64, 256, 4096)
    """Mixtures by their experts in all four layers. Trainings of 4,096 take 11 GB each."""
    gate: Gate = "both"
    """Trained product keys, the frozen random gate of the authors' program with its fresh experts, or both."""
    extras: bool = False
    """Also what is not in the paper: trained keys without stale experts, and our default optimisers, which know of
    staleness; of 256 experts, the dense model, or both."""
    jobs: int = 2
    """Trainings at a time, each in a process on its share of the cores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "seeds", "jobs")
        self.require_at_least(0, "seed")
        self.require_at_least(100, "updates")
        if self.extras and self.quick:
            raise ValueError("--extras has no quick run: leave out --quick")
        if not self.experts:
            raise ValueError("--experts needs one number at least, got none")
