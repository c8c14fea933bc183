"""The command line."""

from dataclasses import dataclass

from experiments.bench import Settings


@dataclass(frozen=True, kw_only=True)
class OverheadSettings(Settings):
    """Measure what a mixture of experts on one device costs beside a dense layer of the same FLOPs."""

    quick: bool = False
    """Three rounds of five steps of each model, and not nine of ten."""
    seed: int = 0
    """Seed of parameters and text."""
