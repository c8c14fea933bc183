"""The command line."""

from dataclasses import dataclass

from experiments.bench import Settings


@dataclass(frozen=True, kw_only=True)
class SpeedSettings(Settings):
    """Measure our all-reduce against blocking sockets that carry the same bytes, over loopback in one run."""

    quick: bool = False
    """Three rounds, under a minute."""
    peers: int = 4
    """Members, a process each."""
    mib: float = 64.0
    """Length of the vector, MiB of float32."""
    rounds: int = 9
    """Rounds that count; one more comes before them to warm up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.peers <= 64:
            raise ValueError(f"--peers must be 2 to 64, got {self.peers}")
        self.require_above(0, "mib", "rounds")
