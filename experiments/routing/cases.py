"""Cases in which balance is tried: one mixture, of which one thing at a time is changed. Imports no JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.transformer_xl.settings import TransformerXLSettings
from experiments.transformer_xl.trainings import Training

PLAIN, BALANCED = "product_key", "balanced"

LOSSES = ("product_key+balance=0.01", "product_key+balance=0.1", "product_key+balance=1")
"""Product keys with a balancing loss, of Switch's weight and of larger ones."""

SEQ_LEN = 128
"""Words of a sequence of the tiny size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Circumstances under which routers are compared.

    Attributes:
      text: what the circumstances are.
      routers: how those that are compared are asked for.
      changes: settings that differ from `BASE`.
      words: of training, times those of the command line.
      seeds: of each router, at most; None: as many as the command line says.
    """

    text: str
    routers: Sequence[str] = (PLAIN, BALANCED)
    changes: Mapping[str, Any] = field(default_factory=dict)
    words: float = 1.0
    seeds: int | None = None


BASE: Mapping[str, Any] = {
    "where": "local",
    "batch_size": 8,
    "grid_size": (4, 4),
    "k_best": 4,
    "final_eval_tokens": 65_536,
}
"""Settings of `experiments.transformer_xl`, tiny: one device, nothing stale, nothing lost."""

FIRST = "token"
"""The case for which a balanced router is recommended, where the balancing losses are compared, too."""

CASES: Mapping[str, Case] = {
    "16": Case(text="16 experts, 4 for a sequence"),
    "64": Case(text="64 experts", changes={"grid_size": (8, 8)}),
    "256": Case(text="256 experts", changes={"grid_size": (16, 16)}),
    "k1": Case(text="one expert for a sequence", changes={"k_best": 1}),
    "k2": Case(text="two for a sequence", changes={"k_best": 2}),
    FIRST: Case(text="four for each token", routers=(PLAIN, BALANCED, *LOSSES), changes={"route": "token"}),
    "token64": Case(
        text="64 experts, two for each token", changes={"route": "token", "grid_size": (8, 8), "k_best": 2}
    ),
    "swarm": Case(
        text="32 stale trainers, 10 % of the calls lost",
        changes={"where": "emulated", "batch_size": None},
        words=0.5,
    ),
    "long": Case(text="twenty times the words", words=20.0, seeds=1),
}
"""Name on the command line -> case."""


def case_trainings(
    name: str, out: Path, *, words: int, seeds: Sequence[int], data: str, resume: bool
) -> list[Training]:
    """The runs of a case: all routers with one seed before the next seed, each in a folder of its own.

    Args:
      out: folder of all cases.
      words: of training of each run, before the case's factor.
      data: the corpus, as `--data` asks for it.
      resume: whether runs that were begun go on.
    """
    case = CASES[name]
    shared: dict[str, Any] = {"model": ("dmoe",), "seeds": 1, "data": data, "resume": resume, **BASE, **case.changes}
    steps = max(1, round(case.words * words / (SEQ_LEN * (shared["batch_size"] or 1))))
    return [
        Training(
            label=f"{name} {router}",
            settings=TransformerXLSettings(
                **shared, steps=steps, seed=seed, router=router, out=folder_of(out, name, router, seed)
            ),
        )
        for seed in seeds[: case.seeds]
        for router in case.routers
    ]


def folder_of(out: Path, case: str, router: str, seed: int) -> Path:
    """Run folder of one run of a case."""
    return out / "balance" / case / f"{router}-seed{seed}"
