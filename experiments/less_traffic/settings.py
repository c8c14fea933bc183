"""Settings of this experiment's command line."""

from dataclasses import dataclass
from typing import Literal, get_args

from experiments.bench import UnseededSettings

MethodName = Literal[
    "every_step",
    "diloco",
    "streaming_diloco",
    "noloco",
    "sparta",
    "sparse_gradients",
    "sparse_diloco",
    "sparser_diloco",
]

EVERY = 50
"""Steps between two outer steps (H in the papers)."""


@dataclass(frozen=True, kw_only=True)
class LessTrafficSettings(UnseededSettings):
    """Final loss and bytes sent of eight peers, method by method."""

    quick: bool = False
    """One seed, 300 steps, and three of the methods."""
    methods: tuple[MethodName, ...] | None = None
    """Methods that are compared. Default: all; with --quick every_step, diloco and sparse_diloco."""
    steps: int | None = None
    """Steps of each peer, the same for all methods. Default: 2,000; with --quick 300."""
    seeds: int | None = None
    """Runs of each method, with seeds from 0. Default: 3; with --quick 1."""
    search: bool = False
    """Train with 1/32 to 4 times each method's step size, on a seed that is not reported, and print the best."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "seeds", "steps")
        if len(set(self.names)) < len(self.names) or not self.names:
            raise ValueError(f"--methods must be different ones, got {' '.join(self.names) or 'none'}")
        if self.num_steps % EVERY:
            raise ValueError(f"--steps must be a multiple of {EVERY}, got {self.num_steps}")

    @property
    def names(self) -> tuple[MethodName, ...]:
        """The methods, in order."""
        if self.methods is not None:
            return self.methods
        return ("every_step", "diloco", "sparse_diloco") if self.quick else get_args(MethodName)

    @property
    def num_steps(self) -> int:
        """Steps of each peer."""
        return self.steps or (300 if self.quick else 2000)

    @property
    def num_seeds(self) -> int:
        """Runs of each method."""
        return self.seeds or (1 if self.quick else 3)
