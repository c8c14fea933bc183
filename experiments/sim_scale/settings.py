"""Settings of this experiment's command line."""

from dataclasses import dataclass

from experiments.bench import Settings

_MAX_DELAY_S = 30.0  # a call is given up after 600 s; no exponential delay of this mean comes near that


@dataclass(frozen=True, kw_only=True)
class ScaleSettings(Settings):
    """Measure what a simulated swarm costs, and whether it does the same thing twice."""

    quick: bool = False
    """One measurement of each instead of three."""
    trainers: int = 64
    """Simulated trainers."""
    calls_in_a_row: int = 8
    """Remote calls on the critical path of a step; even."""
    delay_s: float = 1.0
    """Mean of the exponentially distributed delay of a remote call, seconds."""
    peers: int = 1000
    """Peers that call each other."""
    messages: int = 100_000
    """Messages that they exchange, half of them replies."""
    neighbours: int = 8
    """Peers that each of them calls, drawn at random."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "trainers", "neighbours")
        if self.calls_in_a_row < 2 or self.calls_in_a_row % 2:
            raise ValueError(f"--calls-in-a-row is even and at least 2, for there and back, got {self.calls_in_a_row}")
        if self.neighbours >= self.peers:
            raise ValueError(f"--neighbours must be from 1 to --peers - 1, got {self.neighbours} of {self.peers}")
        if self.messages < 2 * self.peers:
            raise ValueError(f"--messages must be at least 2 for each peer, got {self.messages}")
        if not 0 < self.delay_s <= _MAX_DELAY_S:
            raise ValueError(f"--delay-s must be above 0 and at most {_MAX_DELAY_S:g} s, got {self.delay_s}")
