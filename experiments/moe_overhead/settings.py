"""The command line."""

from dataclasses import dataclass

from experiments.bench import Settings
from experiments.transformer_xl.settings import Size


@dataclass(frozen=True, kw_only=True)
class OverheadSettings(Settings):
    """Measure what a mixture of experts on one device costs beside a dense layer of the same FLOPs."""

    quick: bool = False
    """Three rounds of five steps of each model and not of ten."""
    seed: int = 0
    """Seed of parameters and text."""
    size: Size = "tiny"
    """Preset of experiments.transformer_xl: tiny, or full for a large GPU."""
    router: str = "product_key"
    """A registered name, or my_file.py:my_router."""
    batch_size: int | None = None
    """Sequences of a step. Default: the preset's."""
    bf16: bool = False
    """Multiply matrices of the layers in bfloat16."""
    rounds: int = 9
    """Each has a ratio; the median counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "rounds", "batch_size")
