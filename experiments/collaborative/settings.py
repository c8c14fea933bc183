"""What the command line of this experiment can ask for. Imports no JAX."""

from dataclasses import dataclass
from typing import Literal, get_args

from experiments.bench import Settings

NAME = "collaborative"

Part = Literal["equal", "batches", "shares", "churn", "real"]

FRACTION = 0.05
"""How far from the target a batch may be."""


@dataclass(frozen=True, kw_only=True)
class CollaborativeSettings(Settings):
    """Show that many unequal machines, coming and going, make the steps of one machine with a large batch."""

    quick: bool = False
    """Shorter scenes, and no real processes."""
    part: tuple[Part, ...] = ()
    """equal: five peers, one joins and one is killed, beside one machine with the same samples. batches: eight peers
    with speeds of 1 to 10. shares: who reduces how much, against the optimum. churn: 16 peers of which one fails every
    few seconds. real: processes over TLS on this machine, with a kill -9 of each kind. Default: all, with --quick all
    but real."""
    steps: int = 20
    """Global steps of the scene `equal`."""
    minutes: float = 10.0
    """Virtual minutes of `batches` and of `churn`, each."""
    failure_every_s: float = 15.0
    """Mean time between two failures among the peers of `churn`, virtual seconds."""
    real_minutes: float = 5.0
    """How long the real processes train."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(12, "steps")
        self.require_above(0, "minutes", "failure_every_s", "real_minutes")
        for each in self.part:
            if each not in get_args(Part):
                raise ValueError(f"--part must be of {', '.join(get_args(Part))}; got {each}")

    @property
    def parts(self) -> tuple[Part, ...]:
        """What is measured."""
        every: tuple[Part, ...] = get_args(Part)
        return self.part or (every[:-1] if self.quick else every)

    @property
    def virtual_s(self) -> float:
        """Of the scenes without an end of their own."""
        return 60 * (min(self.minutes, 4.0) if self.quick else self.minutes)
