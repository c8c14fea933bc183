"""Settings of this experiment's command line. Imports no JAX."""

from dataclasses import dataclass

from experiments.bench import ResumableSettings, Settings

PLAIN, BALANCED = "product_key", "balanced"


@dataclass(frozen=True, kw_only=True)
class RoutingSettings(ResumableSettings, Settings):
    """Show what balance does in a swarm one of whose nodes becomes slow."""

    quick: bool = False
    """One seed."""
    seeds: int = 3
    """Number of seeds, from --seed on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "seeds")
