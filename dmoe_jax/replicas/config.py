"""How replicas of an expert keep in step."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """Settings of a node that serves experts that others serve too. All should have the same `average_period_s`."""

    average_period_s: float = 30.0
    """Seconds between two averages with the other replicas. They begin when the swarm's time is a multiple of it."""
    average_timeout_s: float = 20.0
    """Longest that one all-reduce takes, seconds; at most the period. A replica that falls silent costs a third."""
    meet_timeout_s: float = 3.0
    """A replica that does not say for so long that it takes part in an average is left out of it, seconds."""
    settle_s: float = 1.0
    """How long after it has taken a slot a node looks whether it has it, seconds: longer than a store in the DHT."""
    fetch_timeout_s: float = 60.0
    """Longest that a new replica tries to get the state of one expert from the others, seconds."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a positive number of seconds, got {getattr(self, name)}")
        if self.average_period_s < (least_s := self.meet_timeout_s + self.average_timeout_s):
            raise ValueError(
                f"average_period_s must be at least {least_s:g} (meet_timeout_s and average_timeout_s together), "
                f"got {self.average_period_s:g}"
            )
