"""Settings of this experiment's command line, and the clock of the simulated swarm with all its constants."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from experiments.bench import Settings

ModelName = Literal["mnist", "transformer_xl"]
MethodName = Literal["all_reduce", "pushsum", "moshpit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """A swarm like that of the paper's ResNet-50 experiment: unequal GPUs behind 1 Gb/s.

    The model that is trained here is small; the clock is that of a ResNet-50. Random numbers of a peer come from its
    own generator, so that its speeds and absences are the same whatever method is simulated.
    """

    local_steps: int = 4
    """Steps of a peer between two averagings, a stretch."""
    step_s: float = 0.7
    """Median seconds of a step of the median peer: 256 images in float32 on a V100."""
    speed_sigma: float = 0.35
    """Sigma of the log-normal factor of a peer, for good. The paper's swarm has V100, 1080Ti and P40: about 1 to 2."""
    step_sigma: float = 0.2
    """Sigma of the log-normal factor of each stretch."""
    straggling: float = 0.02
    """Probability that a stretch is a straggler's."""
    straggler_factor: float = 5.0
    """By which it is longer then."""
    vector_bytes: float = 102e6
    """Bytes of the vector that is averaged: 25.6 million parameters in float32."""
    bandwidth_bps: float = 1e9
    """Bits a second of each peer, up and down."""
    latency_s: float = 0.05
    """One way between any two peers."""
    mean_uptime_s: float = 900.0
    """Exponentially distributed; with rounds of 5 s a peer vanishes in one of 180. Infinite: nobody leaves."""
    mean_downtime_s: float = 120.0
    """Exponentially distributed."""
    timeout_s: float = 5.0
    """After which silence counts as death. Then nobody waits for the peer any more until it is back."""
    patience_s: float = 3.0
    """Seconds that a Moshpit group stays open for its members, and that PushSum waits for messages."""

    def __post_init__(self) -> None:
        if self.local_steps < 1:
            raise ValueError(f"local_steps must be at least 1, got {self.local_steps}")
        for name in ("step_s", "straggler_factor", "vector_bytes", "bandwidth_bps", "mean_uptime_s", "mean_downtime_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("speed_sigma", "step_sigma", "latency_s", "timeout_s", "patience_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number from 0, got {getattr(self, name)}")
        if not 0 <= self.straggling <= 1:
            raise ValueError(f"straggling is a probability, got {self.straggling}")

    @property
    def vector_s(self) -> float:
        """Seconds to send a vector."""
        return 8 * self.vector_bytes / self.bandwidth_bps

    def speed_factor(self, rng: random.Random) -> float:
        """Draw the time of a peer's steps, as a multiple of the median peer's."""
        return rng.lognormvariate(0.0, self.speed_sigma)

    def stretch_s(self, rng: random.Random, speed_factor: float) -> float:
        """Draw the seconds of a stretch."""
        straggles = rng.random() < self.straggling
        factor = rng.lognormvariate(0.0, self.step_sigma) * (self.straggler_factor if straggles else 1.0)
        return self.local_steps * self.step_s * speed_factor * factor

    def absences(self, rng: random.Random) -> Iterator[tuple[float, float]]:
        """(when it goes, when it is back) of a peer, without end."""
        now = 0.0
        while self.mean_uptime_s < math.inf:
            down = now + rng.expovariate(1 / self.mean_uptime_s)
            now = down + rng.expovariate(1 / self.mean_downtime_s)
            yield down, now

    def all_reduce_s(self, peers: int) -> float:
        """One all-reduce among all: two vectors less a share each way, and a tree of messages there and back."""
        return 2 * (1 - 1 / peers) * self.vector_s + 2 * math.ceil(math.log2(peers)) * self.latency_s

    def group_s(self, members: int, peers: int) -> float:
        """Matchmaking once a group is complete, a look into a DHT of so many peers and a call to the leader; then its
        butterfly all-reduce: everybody sends parts to everybody at once, and the means back."""
        matchmaking_s = (math.ceil(math.log2(peers)) + 2) * self.latency_s
        return matchmaking_s + (2 * (1 - 1 / members) * self.vector_s + 2 * self.latency_s)

    def send_s(self, receivers: int) -> float:
        """The whole vector to some others, through one line."""
        return receivers * self.vector_s + self.latency_s

    def download_s(self) -> float:
        """A newcomer's state, from one peer."""
        return self.vector_s + 2 * self.latency_s


@dataclass(frozen=True, kw_only=True)
class MoshpitSgdSettings(Settings):
    """Time to a target loss, in virtual time, of peers of unequal speed that come and go."""

    quick: bool = False
    """The MNIST network and 16 peers only."""
    model: ModelName | None = None
    """Model that is trained. Default: one after the other; with --quick the MNIST network."""
    peers: int | None = None
    """Number of peers that train. Default: 16, then 64; with --quick 16."""
    clock: Annotated[TimeModel, tyro.conf.OmitArgPrefixes] = field(default_factory=TimeModel)
    """Durations in the simulated swarm."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(2, "peers")

    @property
    def models(self) -> tuple[ModelName, ...]:
        """Models that are trained, in order."""
        if self.model is not None:
            return (self.model,)
        return ("mnist",) if self.quick else ("mnist", "transformer_xl")

    @property
    def swarms(self) -> tuple[int, ...]:
        """Numbers of peers, in order."""
        if self.peers is not None:
            return (self.peers,)
        return (16,) if self.quick else (16, 64)
