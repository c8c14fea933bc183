"""The command line."""

from dataclasses import dataclass

from experiments.bench import Settings


@dataclass(frozen=True, kw_only=True)
class OverlapSettings(Settings):
    """Measure how well asynchronous trainers hide the latency of remote experts, over real TCP on loopback."""

    quick: bool = False
    """Three steps instead of ten."""
    trainers: int = 64
    """Asynchronous trainers in this process."""
    delay_s: float = 1.0
    """Delay that a node adds to every forward and backward call, seconds."""
    steps: int = 10
    """Rounds; in each every trainer takes one step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "trainers", "steps")
        self.require_above(0, "delay_s")
