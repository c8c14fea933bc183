"""Settings of this experiment's command line."""

from dataclasses import dataclass
from typing import Literal, get_args

from experiments.bench import UnseededSettings
from experiments.moshpit_sgd.settings import ModelName

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

RATES: dict[MethodName, tuple[float, float]] = {
    "every_step": (3e-3, 1.0),
    "diloco": (3e-3, 1.0),
    "streaming_diloco": (3e-3, 1.0),
    "noloco": (3e-3, 0.7),
    "sparta": (3e-3, 1.0),
    "sparse_gradients": (3e-3, 1.0),
    "sparse_diloco": (1e-2, 1.0),
    "sparser_diloco": (1e-2, 1.0),
}
"""Step sizes of Adam and of the outer step, where a method has one. Adam's are those that `--search` found best on seed
0; the outer steps' are explained in the README."""

INNER_RATES = (1e-3, 3e-3, 1e-2)
"""Step sizes of Adam that a search tries, the same for all methods."""


@dataclass(frozen=True, kw_only=True)
class LessTrafficSettings(UnseededSettings):
    """Final loss and bytes sent of eight peers, method by method."""

    quick: bool = False
    """One seed, 300 steps, and three of the methods."""
    model: ModelName = "mnist"
    """Model that is trained. The step sizes of `RATES` were found for `mnist`; for the other, search."""
    methods: tuple[MethodName, ...] | None = None
    """Methods that are compared. Default: all; with --quick every_step, diloco and sparse_diloco."""
    peers: int = 8
    """Number of peers that train."""
    steps: int | None = None
    """Steps of each peer, the same for all methods. Default: 2,000; with --quick 300."""
    every: int = 50
    """Steps between two outer steps (H in the papers)."""
    seeds: int | None = None
    """Runs of each method, with seeds from 0. Default: 3; with --quick 1."""
    search: bool = False
    """Try several step sizes on seed 0 instead, and say which are best."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(2, "peers")
        self.require_at_least(1, "seeds", "every")
        self.require_at_least(self.every, "steps")
        if len(set(self.names)) < len(self.names) or not self.names:
            raise ValueError(f"--methods must be different ones, got {' '.join(self.names) or 'none'}")
        if self.num_steps % self.every:
            raise ValueError(f"--steps must be a multiple of --every {self.every}, got {self.num_steps}")

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
