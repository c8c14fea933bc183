"""The command line."""

from dataclasses import dataclass

from experiments.bench import Settings


@dataclass(frozen=True, kw_only=True)
class SpeedSettings(Settings):
    """Measure our network layer against blocking sockets of the standard library, over loopback in one run."""

    quick: bool = False
    """Three short rounds, of 0.8 s for each measurement: under two minutes."""
    rounds: int = 9
    """Rounds that count; one more comes before them to warm up."""
    slice_s: float = 1.5
    """Least duration of each measurement of a round, seconds."""
    tensor_mib: float = 16.0
    """Size of a tensor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_above(0, "rounds", "slice_s", "tensor_mib")
