"""Settings of this experiment's command line, and the cases in which balance is tried. Imports no JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from experiments.bench import ResumableSettings, Settings

Part = Literal["slow-node", "balance"]
"""A swarm one of whose nodes becomes slow; or what balance costs, under one case after the other."""

PLAIN, BALANCED = "product_key", "balanced"

LOSSES = ("product_key+balance=0.01", "product_key+balance=0.1", "product_key+balance=1")
"""Product keys with a balancing loss, of Switch's weight and of larger ones."""


class Case(NamedTuple):
    """Circumstances under which routers are compared: one mixture, of which one thing at a time is changed.

    Attributes:
      text: what the circumstances are.
      changes: settings that differ from `BASE`.
      routers: how those that are compared are asked for.
      words: of training, times those of the command line.
      seeds: of each router, at most; None: as many as the command line says.
    """

    text: str
    changes: Mapping[str, Any] = {}
    routers: Sequence[str] = (PLAIN, BALANCED)
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
    "16": Case("16 experts, 4 for a sequence"),
    "64": Case("64 experts", {"grid_size": (8, 8)}),
    "256": Case("256 experts", {"grid_size": (16, 16)}),
    "k1": Case("one expert for a sequence", {"k_best": 1}),
    "k2": Case("two for a sequence", {"k_best": 2}),
    FIRST: Case("four for each token", {"route": "token"}, (PLAIN, BALANCED, *LOSSES)),
    "token64": Case("64 experts, two for each token", {"route": "token", "grid_size": (8, 8), "k_best": 2}),
    "swarm": Case("32 stale trainers, 10 % of the calls lost", {"where": "emulated", "batch_size": None}, words=0.5),
    "long": Case("twenty times the words", words=20.0, seeds=1),
}
"""Name on the command line -> case."""


@dataclass(frozen=True, kw_only=True)
class RoutingSettings(ResumableSettings, Settings):
    """Show what balance does in a swarm one of whose nodes becomes slow, and what it costs in perplexity."""

    quick: bool = False
    """The slow node with one seed, and the first case of what balance costs with three and 131,072 words."""
    part: tuple[Part, ...] = ("slow-node", "balance")
    """slow-node: one node becomes slow for a while. balance: what balance costs in perplexity, and what it does to the
    load."""
    seeds: int = 3
    """Number of seeds, from --seed on."""
    case: tuple[str, ...] = ()
    """Cases of `balance`: 16, 64, 256 (experts), k1, k2 (experts for a sequence), token, token64 (experts for each
    token), swarm (32 stale trainers, a tenth of the calls lost), long (twenty times the words, one seed). Default: all,
    with --quick the first."""
    words: int = 524_288
    """Words of training in each run; the swarm has half as many and the long case twenty times as many."""
    data: str = "auto"
    """Corpus of what balance costs; see experiments.transformer_xl."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "seeds", "words")
        if unknown := [case for case in self.case if case not in CASES]:
            raise ValueError(f"--case must be of {', '.join(CASES)}; got {unknown[0]}")

    @property
    def chosen_cases(self) -> tuple[str, ...]:
        """In the order in which they are trained."""
        return self.case or ((FIRST,) if self.quick else tuple(CASES))

    @property
    def chosen_words(self) -> int:
        """Words of training in each run, before a case's own factor."""
        return min(self.words, 131_072) if self.quick else self.words
