"""The flags of the comparison and the constants that they stand for. Imports no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from experiments.bench import ResumableSettings
from experiments.transformer_xl.names import Place, Size

NAME = "compare_routers"

QUICK_ROUTERS = ("product_key", "switch", "uniform_random")
"""One that learns and is additive, one that learns and balances its load, and the bar: one that knows nothing."""

QUICK_STEPS: Mapping[Place, int] = {"local": 20, "simulated": 32}
"""Updates of each run of a quick comparison."""

QUICK_PAUSES = 4
"""Pauses of each of them: a pause ends the work of a swarm, and takes as long as several updates."""

QUICK_EVAL_TOKENS = 4096
"""Words of each of its evaluations, the last ones too."""


@dataclass(frozen=True, kw_only=True)
class CompareRoutersSettings(ResumableSettings):
    """Train the same mixture with one router after the other, on several seeds each, and put them side by side."""

    routers: tuple[str, ...] = ()
    """Registered names, or your own: my_file.py:my_router. Default: all that are registered; with --quick, three."""
    seeds: tuple[int, ...] = ()
    """Seeds; each router is trained once with each. Default: 0 1 2; with --quick, 0 1."""
    size: Size = "tiny"
    """tiny: minutes on two cores for each run. full: the paper's size, for a large GPU."""
    where: Literal["auto", "local", "simulated"] = "auto"
    """local: at once on this device. simulated: slow trainers in virtual time, whose calls may fail. auto: tiny is
    simulated, full is local."""
    steps: int | None = None
    """Updates of each run. Default: the preset's."""
    batch_size: int | None = None
    """Sequences of an update. Default: the preset's on one device, 1 for each simulated trainer."""
    eval_every: int | None = None
    """Updates between two pauses for evaluation and checkpoint. Default: the preset's."""
    eval_tokens: int = 16_384
    """Validation words of the evaluation in a pause, 0 for all. At the end all are read, and all of the test text."""
    trainers: int = 32
    """Simulated trainers."""
    delay_s: float = 1.0
    """Mean of the exponential delay in a simulated swarm, virtual seconds."""
    failure_rate: float = 0.1
    """Share of the expert calls in a simulated swarm that are never answered."""
    data: str = "auto"
    """Corpus: auto (DMOE_DATA, cache, download, else the embedded one), wikitext-2, embedded, or a text of your own: a
    file, or a folder with train.txt, valid.txt and test.txt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "steps", "batch_size", "eval_every", "trainers")
        self.require_at_least(0, "eval_tokens", "delay_s")
        if not 0 <= self.failure_rate < 1:
            raise ValueError(f"--failure-rate must be from 0 to below 1, got {self.failure_rate}")
        for name, chosen in (("routers", self.routers), ("seeds", self.seeds)):
            if len(set(chosen)) < len(chosen):
                raise ValueError(f"--{name} names one twice: {' '.join(map(str, chosen))}")
        if any(seed < 0 for seed in self.seeds):
            raise ValueError(f"--seeds must not be negative, got {' '.join(map(str, self.seeds))}")

    @property
    def chosen_seeds(self) -> tuple[int, ...]:
        """The seeds that are meant."""
        return self.seeds or ((0, 1) if self.quick else (0, 1, 2))

    @property
    def place(self) -> Place:
        """Where the runs train."""
        if self.where == "auto":
            return "simulated" if self.size == "tiny" else "local"
        return self.where
