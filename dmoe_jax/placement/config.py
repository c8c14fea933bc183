"""Settings of a node that sees to it that experts have holders."""

import math
from dataclasses import dataclass

MAX_REPLICAS = 8
"""Most holders that an expert may be wanted to have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """Settings of a node that claims experts with too few holders and keeps in step with other holders of its own."""

    max_experts: int = 0
    """Most experts that it claims, beside those that it was told to serve; 0: it claims none."""
    of: tuple[str, ...] = ()
    """Patterns, of those that are handed to `Swarm.serve`, that it claims; it serves the others from the start. None
    named: all of them."""
    replicas: int = 1
    """Living holders that an expert is wanted to have. With 2 or more the holders share states and average; all should
    have the same `average_period_s`."""
    gather_s: float = 3.0
    """Seconds that the node is listed before it first claims, so that nodes that start together count each other."""
    settle_s: float = 2.0
    """Seconds that a claim stands before it is read again. Longer than a store and a read of the DHT usually take."""
    claim_life_s: float = 12.0
    """Seconds that a claim lives unless it is renewed: so long nobody takes the expert if its claimer dies."""
    scan_period_s: float = 5.0
    """Seconds between two looks at all experts of the patterns."""
    probe_period_s: float = 2.0
    """Seconds between two probes of a node, and how long one waits for its answer."""
    max_misses: int = 3
    """Probes in a row without an answer after which a node is taken for dead."""
    max_watched: int = 16
    """Most nodes that are probed, those whose ids are nearest to the own one: all claimers together watch everybody,
    and a node's cost does not grow with the swarm."""
    max_at_once: int = 64
    """Most claims that are held at a time."""
    retry_s: float = 60.0
    """Seconds until an expert that could not be taken up is tried again."""
    average_period_s: float = 30.0
    """Seconds between two averages with the other holders. They begin when the swarm's time is a multiple of it."""
    average_timeout_s: float = 20.0
    """Longest that one all-reduce takes, seconds. A holder that falls silent costs a third."""
    fetch_timeout_s: float = 60.0
    """Longest that a new holder tries to get the state of one expert from the others, seconds."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("max_experts", 0, math.inf),
            ("replicas", 1, MAX_REPLICAS),
            ("max_misses", 1, math.inf),
            ("max_watched", 1, math.inf),
            ("max_at_once", 1, math.inf),
        ):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                at_most = f" and at most {most}" if math.isfinite(most) else ""
                raise ValueError(f"{name} must be an integer of at least {least}{at_most}, got {value!r}")
        for name in self.__dataclass_fields__:
            if name.endswith("_s") and not (0 if name == "gather_s" else 1e-9) <= getattr(self, name) < math.inf:
                wanted = "0 or a number" if name == "gather_s" else "a positive number"
                raise ValueError(f"{name} must be {wanted} of seconds, got {getattr(self, name)}")
        if self.claim_life_s <= 2 * self.settle_s:
            raise ValueError(
                f"claim_life_s must exceed twice settle_s, or claims end before they are confirmed; "
                f"got {self.claim_life_s} and {self.settle_s}"
            )
        if self.average_period_s < (least_s := MEET_TIMEOUT_S + self.average_timeout_s):
            raise ValueError(
                f"average_period_s must be at least {least_s:g} (average_timeout_s and {MEET_TIMEOUT_S:g} s to meet), "
                f"got {self.average_period_s:g}"
            )
        if self.of and not self.claims:
            raise ValueError(f"of={self.of} names patterns to claim, and max_experts is 0")

    @property
    def claims(self) -> bool:
        """True if the node claims experts."""
        return self.max_experts > 0

    @property
    def replicates(self) -> bool:
        """True if several nodes hold an expert on purpose."""
        return self.replicas > 1


MEET_TIMEOUT_S = 3.0
"""A holder that does not say for so long that it takes part in an average is left out of it, seconds."""
