"""What the command line of this experiment can ask for."""

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

RATES: dict[MethodName, tuple[float, float]] = {
    "every_step": (1e-2, 1.0),
    "diloco": (1e-2, 0.7),
    "streaming_diloco": (1e-2, 0.4),
    "noloco": (1e-2, 0.7),
    "sparta": (1e-2, 1.0),
    "sparse_gradients": (1e-2, 1.0),
    "sparse_diloco": (1e-2, 1.0),
    "sparser_diloco": (1e-2, 1.0),
}
"""Step sizes of Adam and of the outer step, where a method has one: those that `--search` found on seed 0."""

INNER_RATES = (3e-3, 1e-2, 3e-2)
OUTER_RATES: dict[MethodName, tuple[float, ...]] = {
    "diloco": (0.4, 0.7, 1.0),
    "streaming_diloco": (0.4, 0.7, 1.0),
    "noloco": (0.4, 0.7, 1.0),
    "sparse_diloco": (0.7, 1.0, 1.4),
    "sparser_diloco": (0.7, 1.0, 1.4),
}
"""What a search tries; methods without an outer step have one."""


@dataclass(frozen=True, kw_only=True)
class LessTrafficSettings(UnseededSettings):
    """Final loss and bytes sent of eight peers, method by method."""

    quick: bool = False
    """One seed and 300 steps."""
    methods: tuple[MethodName, ...] = get_args(MethodName)
    """What is compared."""
    peers: int = 8
    """How many train."""
    steps: int | None = None
    """Steps of each peer, the same for all methods. Default: 1,500; with --quick 300."""
    every: int = 50
    """Steps between two outer steps (H in the papers)."""
    seeds: int | None = None
    """Runs of each method, with seeds from 0. Default: 3; with --quick 1."""
    search: bool = False
    """Try all step sizes on seed 0 instead, and say which are best."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(2, "peers")
        self.require_at_least(1, "seeds", "every")
        self.require_at_least(self.every, "steps")
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ValueError(f"--methods must be different ones, got {' '.join(self.methods) or 'none'}")
        if self.num_steps % self.every:
            raise ValueError(f"--steps must be a multiple of --every {self.every}, got {self.num_steps}")

    @property
    def num_steps(self) -> int:
        """Steps of each peer."""
        return self.steps or (300 if self.quick else 1500)

    @property
    def num_seeds(self) -> int:
        """Runs of each method."""
        return self.seeds or (1 if self.quick else 3)
