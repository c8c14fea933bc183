"""Settings of this experiment's command line."""

from dataclasses import dataclass

from experiments.bench import Settings


@dataclass(frozen=True, kw_only=True)
class ScaleSettings(Settings):
    """Measure what a simulated swarm costs, and whether it does the same thing twice."""

    quick: bool = False
    """One measurement of each instead of three."""
    trainers: int = 64
    """Simulated trainers."""
    peers: int = 1000
    """Peers that call each other."""
    messages: int = 100_000
    """Messages that they exchange, half of them replies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "trainers")
        self.require_at_least(9, "peers")  # each calls eight others
        self.require_at_least(2 * self.peers, "messages")
