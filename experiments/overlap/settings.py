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
    num_layers: int = 2
    """DMoE layers; a step waits once forward and once backward for each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "trainers", "steps", "num_layers")
        self.require_above(0, "delay_s")

    @property
    def chosen_steps(self) -> int:
        """The rounds that are meant."""
        return 3 if self.quick else self.steps

    @property
    def critical_path_s(self) -> float:
        """Seconds that one trainer alone would wait in a step: each layer there and back."""
        return 2 * self.num_layers * self.delay_s
