"""What a run does beside its training, and how often."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run does beside training."""

    steps: int
    """Updates of the whole run."""
    eval_every: int
    """Updates between two evaluations; in a run that pauses, between two pauses."""
    eval_items: int = 16_384
    """Tokens or samples of the evaluations on the way and of the one after the last update; 0 for all. They are the
    same ones each time: a run's curve is over one text."""
    final_eval_items: int = 0
    """Tokens or samples of the final evaluations, 0 for all. They are figures of their own and no part of the curve."""
    pause: bool = False
    """Whether training pauses to be evaluated and saved, and can then be resumed bit for bit; or goes on meanwhile."""
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
