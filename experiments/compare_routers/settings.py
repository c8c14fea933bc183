"""The flags of the comparison and the constants that they stand for. Imports no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from experiments.transformer_xl.settings import Place, TrainingSettings

NAME = "compare_routers"

QUICK_ROUTERS = ("product_key", "switch", "uniform_random")
"""One that learns and is additive, one that learns and balances its load, and the bar: one that knows nothing."""


@dataclass(frozen=True, kw_only=True)
class CompareRoutersSettings(TrainingSettings):
    """Train the same mixture with one router after the other, on several seeds each, and put them side by side."""

    quick_steps: ClassVar[Mapping[Place, int]] = {"local": 20, "simulated": 32}
    quick_eval_tokens: ClassVar[int] = 4096
    may_differ: ClassVar[tuple[str, ...]] = ("routers", "seeds")

    routers: tuple[str, ...] = ()
    """Registered names, or your own: my_file.py:my_router. Default: all that are registered, with
    --route token without those that cannot; with --quick, three."""
    seeds: tuple[int, ...] = ()
    """Seeds; each router is trained once with each. Default: 0 1 2; with --quick, 0 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, chosen in (("routers", self.routers), ("seeds", self.seeds)):
            if len(set(chosen)) < len(chosen):
                raise ValueError(f"--{name} names one twice: {' '.join(map(str, chosen))}")
        if any(seed < 0 for seed in self.seeds):
            raise ValueError(f"--seeds must not be negative, got {' '.join(map(str, self.seeds))}")

    @property
    def chosen_seeds(self) -> tuple[int, ...]:
        """The seeds that are meant."""
        return self.seeds or ((0, 1) if self.quick else (0, 1, 2))
