"""Settings of this experiment's command line. Imports no JAX."""

from dataclasses import dataclass
from typing import Literal

from dmoe_jax.machine.cores import usable_cores
from experiments.bench import ResumableSettings
from experiments.routing.cases import CASES, FIRST

NAME = "routing"

Part = Literal["slow-node", "balance"]
"""A swarm one of whose nodes becomes slow; or what balance costs, under one case after the other."""

QUICK_SEEDS = 3
"""Seeds of the quick run's one case: fewer have no spread."""


@dataclass(frozen=True, kw_only=True)
class RoutingSettings(ResumableSettings):
    """Show what balance does in a swarm one of whose nodes becomes slow, and what it costs in perplexity."""

    quick: bool = False
    """The slow node with one seed, and the first case of what balance costs with three and 131,072 words."""
    part: tuple[Part, ...] = ("slow-node", "balance")
    """slow-node: one node becomes slow for a while. balance: what balance costs in perplexity, and what it does to the
    load."""
    seed: int = 0
    """The first seed."""
    seeds: int = 3
    """Number of seeds."""
    speed: float = 0.1
    """Speed at which biases move where a node is slow; see `dmoe_jax.routing.balanced`."""
    slowdown: float = 10.0
    """Factor by which the slow node takes longer."""
    trainers: int = 8
    """Trainers beside the slow node, each a process of its own but for the trunk."""
    case: tuple[str, ...] = ()
    """Cases of `balance`: 16, 64, 256 (experts), k1, k2 (experts for a sequence), token, token64 (experts for each
    token), swarm (32 stale trainers, a tenth of the calls lost), long (twenty times the words, one seed). Default: all,
    with --quick the first."""
    words: int = 524_288
    """Words of training in each run; the swarm has half as many and the long case twenty times as many."""
    data: str = "auto"
    """Corpus of what balance costs; see experiments.transformer_xl."""
    jobs: int | None = None
    """Runs trained at once, each in a process with its share of the cores. Default: two where there are two cores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "seed")
        self.require_at_least(1, "seeds", "trainers", "slowdown", "words", "jobs")
        self.require_above(0, "speed")
        for name, known in (("part", ("slow-node", "balance")), ("case", tuple(CASES))):
            chosen = getattr(self, name)
            if len(set(chosen)) < len(chosen):
                raise ValueError(f"--{name} names one twice: {' '.join(chosen)}")
            if unknown := [each for each in chosen if each not in known]:
                raise ValueError(f"--{name} must be of {', '.join(known)}; got {unknown[0]}")

    @property
    def slow_node_seeds(self) -> tuple[int, ...]:
        """Seeds of part `slow-node`."""
        return tuple(range(self.seed, self.seed + (1 if self.quick else self.seeds)))

    @property
    def balance_seeds(self) -> tuple[int, ...]:
        """Seeds of part `balance`."""
        return tuple(range(self.seed, self.seed + (QUICK_SEEDS if self.quick else self.seeds)))

    @property
    def chosen_cases(self) -> tuple[str, ...]:
        """In the order in which they are trained."""
        return self.case or ((FIRST,) if self.quick else tuple(CASES))

    @property
    def chosen_words(self) -> int:
        """Words of training in each run, before a case's own factor."""
        return min(self.words, 131_072) if self.quick else self.words

    @property
    def num_jobs(self) -> int:
        """Number of runs that are trained at once."""
        return self.jobs or min(2, usable_cores())
