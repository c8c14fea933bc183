"""Settings of this experiment's command line."""

from dataclasses import dataclass
from typing import Literal

from experiments.bench import Settings

PartName = Literal["allreduce", "state", "churn", "kill", "tokens", "loop"]

IN_VIRTUAL_TIME: tuple[PartName, ...] = ("allreduce", "state", "churn", "kill", "tokens")
"""Parts that are measured unless others are named: `loop` measures this machine, which must have nothing else to do."""


@dataclass(frozen=True, kw_only=True)
class WanSettings(Settings):
    """Measure what averaging and state downloads use of a wide-area line, and what failures and traffic cost there."""

    quick: bool = False
    """Only the lines that have a bar; churn with one seed and for four minutes; fewer kills; two sizes of models; two
    turns of loop, and no average every 30 s."""
    parts: tuple[PartName, ...] = IN_VIRTUAL_TIME
    """Parts to measure. allreduce, state: shares of the line. churn: samples that are in a step, against failures a
    minute. kill: from a kill in the middle of an averaging to the next step. tokens: bytes for each token. All these in
    virtual time. loop: what averaging in the background costs a trainer on this machine."""
    mib: int = 256
    """Length of the vector of `allreduce`, MiB of float32; the state of `state` is four times as long."""
    budget_mib: int = 512
    """Memory budget of each peer in `allreduce` and `state`, MiB."""
    seeds: int = 3
    """Seeds of `churn`, from --seed on; with --quick one."""
    loop_s: float = 30.0
    """Seconds of each turn of `loop`, at least."""
    loop_turns: int = 8
    """Turns of `loop`, with and without averaging each, at every period; with --quick at most two."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "mib", "budget_mib", "seeds", "loop_turns")
        self.require_above(0, "loop_s")
        if not self.parts:
            raise ValueError("--parts needs one at least")
