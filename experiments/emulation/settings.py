"""Settings of this experiment's command line."""

from dataclasses import dataclass

from experiments.bench import Settings


@dataclass(frozen=True, kw_only=True)
class EmulationSettings(Settings):
    """Compare the emulator with the swarm that it emulates: are they equal, and how much faster is it?"""

    quick: bool = False
    """The comparison of the MNIST model alone, and shorter timings."""
    updates: int = 50
    """Updates of the comparison on one event order."""
    seeds: int = 5
    """Orders that are compared, each of other parameters, batches, delays and failures; --quick compares one."""
    trainers: int = 64
    """In the timings of the MNIST model, as in the paper; the comparison has three."""
    timed_updates: int = 192
    """Updates of the simulated swarm in each round of the timings; the emulator makes four times as many."""
    rounds: int = 3
    """Rounds of the timings; the median of their ratios counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "updates", "seeds", "rounds")
        self.require_at_least(2, "trainers")
        self.require_at_least(20, "timed_updates")
