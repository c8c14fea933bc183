"""Settings of this experiment's command line."""

from dataclasses import dataclass
from typing import Literal, get_args

from experiments.bench import Settings

PartName = Literal["allreduce", "state", "churn", "kill", "tokens"]


@dataclass(frozen=True, kw_only=True)
class WanSettings(Settings):
    """Measure what averaging and state downloads use of a wide-area line, and what failures and traffic cost there."""

    quick: bool = False
    """Only the lines that have a bar; churn with one seed and for four minutes; fewer kills; two sizes of models."""
    parts: tuple[PartName, ...] = get_args(PartName)
    """Parts to measure. allreduce, state: shares of the line. churn: samples that are in a step, against failures a
    minute. kill: from a kill in the middle of an averaging to the next step. tokens: bytes for each token."""
    mib: int = 256
    """Length of the vector of `allreduce`, MiB of float32; the state of `state` is four times as long."""
    budget_mib: int = 512
    """Memory budget of each peer in `allreduce` and `state`, MiB."""
    seeds: int = 3
    """Seeds of `churn`, from --seed on; with --quick one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "mib", "budget_mib", "seeds")
        if not self.parts:
            raise ValueError("--parts needs one at least")
