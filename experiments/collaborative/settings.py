"""Settings of this experiment's command line. Imports no JAX."""

from dataclasses import dataclass
from typing import Literal, get_args

from experiments.bench import Settings

Part = Literal["equal", "batches", "churn", "albert", "real"]


@dataclass(frozen=True, kw_only=True)
class CollaborativeSettings(Settings):
    """Show that many unequal machines, coming and going, make the steps of one machine with a large batch."""

    quick: bool = False
    """Only 8 of the 8, 16 and 50 peers of `albert`, with one seed instead of three, and no real processes."""
    part: tuple[Part, ...] = ()
    """equal: five peers, one joins and one is killed, beside one machine with the same samples. batches: eight peers
    with speeds of 1 to 10. churn: 16 peers of which one fails every few seconds. albert: a small ALBERT on WikiText-2
    beside one machine, all-reduce and a parameter server. real: processes over TLS on this machine, with a kill -9 of
    each kind. Default: all, with --quick all but real."""
    real_minutes: float = 5.0
    """Minutes that the real processes train."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_above(0, "real_minutes")
        for each in self.part:
            if each not in get_args(Part):
                raise ValueError(f"--part must be of {', '.join(get_args(Part))}; got {each}")

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts that are measured."""
        every: tuple[Part, ...] = get_args(Part)
        return self.part or (every[:-1] if self.quick else every)

    @property
    def albert_swarms(self) -> list[tuple[int, int]]:
        """(peers, seed) of the swarms of `albert`, the smallest first."""
        seed = self.seed
        return [(8, seed)] if self.quick else [(8, seed), (8, seed + 1), (8, seed + 2), (16, seed), (50, seed)]
