"""The command line."""

from dataclasses import dataclass

from experiments.bench import Settings


@dataclass(frozen=True, kw_only=True)
class LayerCostSettings(Settings):
    """Measure one training step with remote experts: as a Flax layer under jit, by autodiff, and without a network."""

    quick: bool = False
    """Widths 64 and 256 and not 512, ten steps of each way and not forty."""
