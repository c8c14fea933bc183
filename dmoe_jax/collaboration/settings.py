"""Settings of a peer that takes part in one large batch, and records of its steps."""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from dmoe_jax.averaging.settings import CompressionName, RoleName
from dmoe_net.averaging.collaboration.rounds import RoundConfig
from dmoe_net.averaging.grouping.group import Role
from dmoe_net.averaging.reduction.partition import AllReduceConfig
from dmoe_net.averaging.speeds import UNKNOWN, Speeds
from dmoe_net.meaning import check_meaning
from dmoe_net.wire.compression import Compression


@dataclass(frozen=True, slots=True, kw_only=True)
class CollaborationConfig:
    """Settings of a peer that takes part. Target and side are the same for all peers."""

    target_batch_size: int = 4096
    """Samples of all peers together that make a step (DeDLOC's and hivemind's default)."""
    side: int = 256
    """Most peers with gradients."""
    lead_s: float = 3.0
    """Seconds before a full batch at which groups form: as long as peers need to find each other, over the slowest
    line; less where a batch takes less than twice as long. A longer lead does no harm; one that is too short costs
    attempts until it has grown, to eight times its length at most."""
    timeout_s: float = 60.0
    """Longest that an all-reduce takes, seconds."""
    silence_s: float = 2.0
    """A peer is gone if its group waits and nothing at all has moved between it and us for so long, seconds; after
    steps that did not settle up to eight times as long. Set it longer than messages wait behind others, where lines are
    slow: then no step is lost to finding that out."""
    late_s: float = 15.0
    """A peer that lives and brings nothing for so long after its group began is left out, seconds."""
    role: RoleName = "auto"
    """A "client" is never called by others and reduces nothing. "auto": a client where nobody can call, else a node."""
    speeds: Speeds = UNKNOWN
    """Capacity of this machine's line, for the share that it reduces."""
    compression: CompressionName = "none"
    """Form of the numbers that this peer sends: its gradients, and the means that it reduces. Each may choose its own,
    and all make the same step, to the last bit. Numbers below 3e-8 vanish in float16, not in bfloat16; in blockwise8
    those that are small beside others of their 4096."""
    all_reduce: AllReduceConfig = field(default_factory=AllReduceConfig)
    """Chunks and windows of vectors. Its times and its compression are those above."""
    delayed: bool = False
    """True: averaging overlaps with the next batch; each step is then made with gradients of the parameters before
    the last one (delayed parameter updates, Ren et al. 2021). A newcomer's first gradients are of fresher ones."""
    meaning: str = ""
    """Meaning of the model's numbers beyond their names and shapes, as `Model.meaning`: peers of another one are not
    met, their state is not taken, and both are told."""

    def __post_init__(self) -> None:
        if self.target_batch_size < 1:
            raise ValueError(f"target_batch_size must be at least 1, got {self.target_batch_size}")
        for name in ("timeout_s", "late_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a positive number of seconds, got {getattr(self, name)}")
        if self.compression not in get_args(CompressionName):
            raise ValueError(f"compression is one of {', '.join(get_args(CompressionName))}, got {self.compression!r}")
        check_meaning(self.meaning)
        self.rounds()  # which refuses what its parts refuse

    def rounds(self) -> RoundConfig:
        """Settings of the averaging."""
        return RoundConfig(
            role=None if self.role == "auto" else Role(self.role),
            speeds=self.speeds,
            lead_s=self.lead_s,
            silence_s=self.silence_s,
            all_reduce=replace(
                self.all_reduce,
                sender_timeout_s=self.late_s,
                timeout_s=self.timeout_s,
                compression=Compression(self.compression),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalStep:
    """One step of the whole swarm, as this peer saw it."""

    number: int
    """Steps of the swarm, this one included."""
    peers: int
    """Members of the group, this peer included."""
    samples: float
    """Samples of all of them together."""
    own_samples: float
    """Samples of this peer."""
    gathered_s: float
    """Seconds since the step before."""
    averaged_s: float
    """Seconds from this peer's last micro-batch until the step was made."""
    attempts: int
    """All-reduces that it took; 0 for a step alone."""


@dataclass(slots=True, kw_only=True)
class CollaborationTotals:
    """Counts of what has become of this peer's work."""

    steps: int = 0
    """Global steps that it made with the others, or alone."""
    alone: int = 0
    """Number of these with nobody else there."""
    samples: float = 0.0
    """Its samples that are in a step."""
    samples_lost: float = 0.0
    """Its samples that are in none."""
    whole: float = 0.0
    """Samples of everybody in its steps."""
    states_taken: int = 0
    steps_followed: int = 0
    """Steps that others made without it, and that it made after them."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of attempts that came to nothing, by reason."""

    def headline(self) -> dict[str, Any]:
        """The totals by the names that reports give them."""
        return {
            "global_steps": self.steps,
            "steps_alone": self.alone,
            "samples_used": self.samples,
            "samples_lost": self.samples_lost,
            "mean_batch": self.whole / self.steps if self.steps else None,
            "states_taken": self.states_taken,
            "steps_followed": self.steps_followed,
            **{f"failed: {reason}": count for reason, count in self.reasons.items()},
        }
