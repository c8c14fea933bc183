"""What the command line of this experiment can ask for. Imports no JAX."""

from dataclasses import dataclass

from experiments.bench import ResumableSettings

NAME = "routing"


@dataclass(frozen=True, kw_only=True)
class RoutingSettings(ResumableSettings):
    """Show what balance does in a swarm one of whose nodes becomes slow for a while, and recovers."""

    quick: bool = False
    """One seed."""
    seed: int = 0
    """The first seed."""
    seeds: int = 3
    """How many."""
    speed: float = 0.1
    """How fast biases move; see `dmoe_jax.routing.balanced`."""
    slowdown: float = 10.0
    """How many times as long the slow node takes."""
    trainers: int = 8
    """Trainers, each a process of its own but for the trunk."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "seed")
        self.require_at_least(1, "seeds", "trainers", "slowdown")
        self.require_above(0, "speed")

    @property
    def chosen_seeds(self) -> tuple[int, ...]:
        """The seeds that are meant."""
        return tuple(range(self.seed, self.seed + (1 if self.quick else self.seeds)))
