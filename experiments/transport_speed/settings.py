"""The command line."""

from dataclasses import dataclass

from experiments.bench import Settings

_QUICK_ROUNDS, _QUICK_SLICE_S = 3, 0.8


@dataclass(frozen=True, kw_only=True)
class SpeedSettings(Settings):
    """Measure our network layer against blocking sockets of the standard library, over loopback in one run."""

    quick: bool = False
    """Three short rounds, under two minutes."""
    rounds: int = 9
    """Rounds that count; one more comes before them to warm up."""
    slice_s: float = 1.5
    """Least duration of each measurement of a round, seconds."""
    callers: int = 64
    """Concurrent callers of small calls on one connection."""
    small_bytes: int = 200
    """Payload of a small call and of its answer."""
    tensor_mib: float = 16.0
    """Size of a tensor."""
    latency_calls: int = 1000
    """Small calls behind the p99 of the idle connection, at least; under load 400 are enough."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_above(0, "rounds", "slice_s", "callers", "small_bytes", "tensor_mib", "latency_calls")

    @property
    def tensor_bytes(self) -> int:
        """Size of a tensor in bytes."""
        return max(1, int(self.tensor_mib * 2**20))

    @property
    def chosen_rounds(self) -> int:
        """The rounds that are meant."""
        return _QUICK_ROUNDS if self.quick else self.rounds

    @property
    def chosen_slice_s(self) -> float:
        """The least duration that is meant, seconds."""
        return _QUICK_SLICE_S if self.quick else self.slice_s
