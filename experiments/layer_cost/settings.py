"""The command line."""

from dataclasses import dataclass

from experiments.bench import Settings


@dataclass(frozen=True, kw_only=True)
class LayerCostSettings(Settings):
    """Measure one training step with remote experts: as a Flax layer under jit, by autodiff, and without a network."""

    quick: bool = False
    """Few rounds, two widths."""
    batch_size: int = 64
    """Samples of a step."""
    rounds: int = 40
    """Steps of each way, in turns, after three that compile and warm up."""
    loops: int = 8
    """Training loops at once, each a thread of this process, of the last measurement."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "batch_size", "rounds", "loops")

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of an expert's input."""
        return (64, 256) if self.quick else (64, 256, 512)

    @property
    def chosen_rounds(self) -> int:
        """The steps that are meant."""
        return min(self.rounds, 10) if self.quick else self.rounds
