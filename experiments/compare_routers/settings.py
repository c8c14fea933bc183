"""The flags of the comparison and the constants that they stand for. Imports no JAX."""

from dataclasses import dataclass
from typing import ClassVar

from experiments.transformer_xl.settings import TrainingSettings

QUICK_ROUTERS = ("product_key", "balanced", "switch", "uniform_random")
"""One that learns and is additive, the same with a balancing bias, one with a balancing loss, and the bar: one that
knows nothing."""
QUICK_STEPS, QUICK_EVAL_TOKENS = 32, 4096

SEARCH_STEPS = 300
"""Most updates of a run of the search for step sizes."""

WITH_LOSS = "product_key+balance"
"""Router that is compared beside the registered ones: product keys with a balancing loss, as `balanced` has a bias."""


@dataclass(frozen=True, kw_only=True)
class CompareRoutersSettings(TrainingSettings):
    """Train the same mixture with one router after the other, on several seeds each, and put them side by side."""

    may_differ: ClassVar = ("routers", "seeds", "on", "jobs")

    routers: tuple[str, ...] = ()
    """Registered names, any of them with +balanced or +balance behind it, or your own: my_file.py:my_router. Default:
    all that are registered, with --route token without those that cannot, and product_key+balance; with --quick,
    four."""
    seeds: tuple[int, ...] = ()
    """Seeds; each router is trained once with each. Default: 0 1 2; with --quick, 0 1."""
    search: bool = False
    """First train each router with 1/32, 1/16, ... 4 times the preset's step sizes for 300 updates or --steps, on a
    seed that is not reported, and go on with the best of each by validation perplexity."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quick:  # what is recorded is what is done
            words = min(self.eval_tokens or QUICK_EVAL_TOKENS, QUICK_EVAL_TOKENS)
            quick = {"steps": min(self.steps or QUICK_STEPS, QUICK_STEPS), "eval_tokens": words}
            for name, value in {**quick, "final_eval_tokens": words}.items():
                object.__setattr__(self, name, value)
        if self.place == "swarm":
            raise ValueError("--where must be auto, local, simulated or emulated, got swarm")
        for name in ("routers", "seeds"):
            chosen = getattr(self, name)
            if len(set(chosen)) < len(chosen):
                raise ValueError(f"--{name} names one twice: {' '.join(map(str, chosen))}")
        if any(seed < 0 for seed in self.seeds):
            raise ValueError(f"--seeds must not be negative, got {' '.join(map(str, self.seeds))}")

    @property
    def chosen_seeds(self) -> tuple[int, ...]:
        """The seeds that are meant."""
        return self.seeds or ((0, 1) if self.quick else (0, 1, 2))
