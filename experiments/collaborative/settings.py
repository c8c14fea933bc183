"""Settings of this experiment's command line. Imports no JAX."""

from dataclasses import dataclass
from typing import Literal, get_args

from experiments.bench import Settings

NAME = "collaborative"

Part = Literal["equal", "batches", "shares", "churn", "albert", "real"]

FRACTION = 0.05
"""Greatest permitted distance of a batch from the target, as a share of the target."""


@dataclass(frozen=True, kw_only=True)
class CollaborativeSettings(Settings):
    """Show that many unequal machines, coming and going, make the steps of one machine with a large batch."""

    quick: bool = False
    """Shorter scenes, and no real processes."""
    part: tuple[Part, ...] = ()
    """equal: five peers, one joins and one is killed, beside one machine with the same samples. batches: eight peers
    with speeds of 1 to 10. shares: who reduces how much, against the optimum. churn: 16 peers of which one fails every
    few seconds. albert: a small ALBERT on WikiText-2 beside one machine, all-reduce and a parameter server. real:
    processes over TLS on this machine, with a kill -9 of each kind. Default: all, with --quick all but real."""
    steps: int = 20
    """Global steps of the scene `equal`."""
    minutes: float = 10.0
    """Virtual minutes of `batches` and of `churn`, each."""
    failure_every_s: float = 15.0
    """Mean time between two failures among the peers of `churn`, virtual seconds."""
    albert_steps: int = 16
    """Global steps of `albert`; of 50 peers 10 at most."""
    albert_peers: tuple[int, ...] = (8, 16, 50)
    """Sizes of the swarms of `albert`; with --quick only the smallest."""
    albert_seeds: int = 3
    """Seeds of the smallest swarm of `albert`, --seed and those that follow; with --quick one. Others have one."""
    real_minutes: float = 5.0
    """Minutes that the real processes train."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(12, "steps")
        self.require_at_least(2, "albert_steps")
        self.require_at_least(1, "albert_seeds")
        if not self.albert_peers or min(self.albert_peers) < 2:
            raise ValueError(f"--albert-peers must be one or more numbers of at least 2, got {self.albert_peers}")
        self.require_above(0, "minutes", "failure_every_s", "real_minutes")
        for each in self.part:
            if each not in get_args(Part):
                raise ValueError(f"--part must be of {', '.join(get_args(Part))}; got {each}")

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts that are measured."""
        every: tuple[Part, ...] = get_args(Part)
        return self.part or (every[:-1] if self.quick else every)

    @property
    def albert_sizes(self) -> tuple[int, ...]:
        """Peers of the swarms of `albert`, the smallest first."""
        return tuple(sorted(set(self.albert_peers)))[: 1 if self.quick else None]

    @property
    def albert_seed_range(self) -> range:
        """Seeds of the smallest swarm and of the one machine."""
        return range(self.seed, self.seed + (1 if self.quick else self.albert_seeds))

    @property
    def virtual_s(self) -> float:
        """Virtual seconds of the scenes without an end of their own."""
        return 60 * (min(self.minutes, 4.0) if self.quick else self.minutes)
