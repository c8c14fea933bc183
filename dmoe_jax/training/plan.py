"""Length of a run, and all that it does beside training."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Length of a run, and all that it does beside training."""

    steps: int
    """Updates of the whole run."""
    eval_every: int
    """Updates between two evaluations; in a run that pauses, between two pauses."""
    eval_items: int = 16_384
    """Tokens or samples of the evaluations on the way and after the last update, the same each time; 0 for all."""
    final_eval_items: int = 0
    """Tokens or samples of the final evaluations, which are no part of the curve; 0 for all."""
    pause: bool = False
    """True if training pauses to be evaluated and saved, and can then be resumed bit for bit; else it goes on."""
    checkpoint_every: int = 0
    """Updates between two checkpoints of a run that does not pause; 0 for one at the end only."""
    max_s: float = math.inf
    """Seconds after which a run that does not pause ends, even if there are steps left."""

    def __post_init__(self) -> None:
        for name in ("steps", "eval_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("eval_items", "final_eval_items", "checkpoint_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.pause and self.max_s < math.inf:
            raise ValueError(f"a run that pauses has no time limit, got max_s {self.max_s}")
