"""Delays on a simulated network: latency models, lines of limited bandwidth, loss, and their randomness.

Each direction of each link draws for its n-th part with `dmoe_net.chance.uniform(key, n)`, its key being 16 bytes (a
`random.Random` takes 2.5 KB). What one link draws does not depend on what else happens in the simulation.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from statistics import NormalDist
from typing import Protocol

from dmoe_net.chance import uniform

_LISTEN_PORTS = range(10_000, 49_152)
_DIAL_PORTS = range(49_152, 65_536)  # those that the registry of ports leaves to such use
NUM_LISTEN_PORTS = len(_LISTEN_PORTS)
"""That a host gives out by itself, one after the other, round and round."""

_SMALLEST_U = 2.0**-54  # stands for 0, of which the normal distribution has no quantile
_STANDARD_NORMAL = NormalDist()


class LatencyModel(Protocol):
    """A distribution of one-way latencies."""

    def sample_s(self, u: float) -> float:
        """The latency, seconds, that the uniform draw `u` from [0, 1) stands for."""
        ...


Latency = LatencyModel | Callable[[str, str], LatencyModel]
"""One model for all links, or a function from (source host, destination host) to the model of that direction."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Always the same latency."""

    seconds: float

    def __post_init__(self) -> None:
        _check_seconds("seconds", self.seconds)

    def sample_s(self, u: float) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class Exponential:
    """Exponentially distributed latencies above a floor.

    Attributes:
      mean_s: their mean, the floor included.
      floor_s: the least possible latency: the way itself, at the speed of light.
    """

    mean_s: float
    floor_s: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds("floor_s", self.floor_s)
        _check_above_floor("mean_s", self.mean_s, self.floor_s)

    def sample_s(self, u: float) -> float:
        return self.floor_s - (self.mean_s - self.floor_s) * math.log1p(-u)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normally distributed latencies above a floor: most near the median, few far beyond.

    Attributes:
      median_s: half of them are shorter, the floor included.
      sigma: standard deviation of the logarithm of what lies above the floor; 0.5 is a moderate tail, 1 a heavy one.
      floor_s: the least possible latency.
    """

    median_s: float
    sigma: float
    floor_s: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds("floor_s", self.floor_s)
        _check_above_floor("median_s", self.median_s, self.floor_s)
        if not 0 <= self.sigma < math.inf:
            raise ValueError(f"sigma must be a finite number of at least 0, got {self.sigma!r}")

    def sample_s(self, u: float) -> float:
        z = _STANDARD_NORMAL.inv_cdf(max(u, _SMALLEST_U))
        return self.floor_s + (self.median_s - self.floor_s) * math.exp(self.sigma * z)


def model_between(latency: Latency, source: str, destination: str) -> LatencyModel:
    """The model of one direction."""
    return latency(source, destination) if callable(latency) else latency


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """A host's connection to the network.

    Attributes:
      up_bps: upload bandwidth, bits per second, shared by all links of the host, first come first served.
      down_bps: download bandwidth, likewise.
      extra_latency_s: added to every part that the host sends or receives: a slow last mile, or a busy machine.
    """

    up_bps: float = math.inf
    down_bps: float = math.inf
    extra_latency_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("up_bps", self.up_bps), ("down_bps", self.down_bps)):
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value!r}")
        _check_seconds("extra_latency_s", self.extra_latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Lost parts. Links are reliable, so a loss is a retransmission, and all that follows on the link waits for it.

    The k-th loss of one part in a row costs `2**(k - 1)` times the longer of `retransmit_s` and a round trip. After
    `max_retransmits` of them the link breaks, as TCP gives up.

    Attributes:
      probability: of losing a part, each time that it is sent.
      retransmit_s: the shortest time after which a part is sent again; 0.2 s is Linux's own.
      max_retransmits: how often one part is sent again.
    """

    probability: float = 0.0
    retransmit_s: float = 0.2
    max_retransmits: int = 8

    def __post_init__(self) -> None:
        if not 0 <= self.probability < 1:
            raise ValueError(f"probability must be in [0, 1), got {self.probability!r}")
        if not 0 < self.retransmit_s < math.inf:
            raise ValueError(f"retransmit_s must be a positive number, got {self.retransmit_s!r}")
        if self.max_retransmits < 1:
            raise ValueError(f"max_retransmits must be at least 1, got {self.max_retransmits!r}")

    def num_losses(self, key: bytes, sequence: int) -> int:
        """Number of times in a row that the part is lost; at `max_retransmits + 1` the last attempt was lost too."""
        attempt = 1
        while attempt <= self.max_retransmits + 1 and uniform(key, sequence, attempt) < self.probability:
            attempt += 1
        return attempt - 1

    def delay_s(self, latency_s: float, num_losses: int) -> float:
        """Seconds that so many losses add to a latency."""
        return max(self.retransmit_s, 2 * latency_s) * (2.0**num_losses - 1)


def stream_key(seed: int, dialler: str, listener: str, link_number: int, *, is_answer: bool) -> bytes:
    """The key of the random numbers of one direction of one link; the number is of those from the one to the other."""
    # repr keeps the fields apart, whatever characters the names hold.
    return blake2b(repr((seed, dialler, listener, link_number, is_answer)).encode(), digest_size=16).digest()


class Line:
    """One direction of a host's connection: parts pass one after the other, in the order in which they come.

    Args:
      bandwidth_bps: bits per second; may be changed at any time, for parts that come later.
    """

    __slots__ = ("bandwidth_bps", "free_s")

    def __init__(self, bandwidth_bps: float) -> None:
        self.bandwidth_bps = bandwidth_bps
        self.free_s = -math.inf
        """When the last of them will have passed."""

    def take(self, now: float, nbytes: int) -> float:
        """When a part of `nbytes` that comes now will have passed."""
        self.free_s = max(now, self.free_s) + 8 * nbytes / self.bandwidth_bps
        return self.free_s


class SimHost:
    """A host of the simulation; its name is the `host` of its addresses."""

    def __init__(self, name: str, options: HostOptions) -> None:
        self.name = name
        self.up = Line(options.up_bps)
        self.down = Line(options.down_bps)
        self.extra_latency_s = options.extra_latency_s
        self.is_down = False
        self.num_links_to: dict[str, int] = {}  # dialled so far, by host: no more entries than there are hosts
        self.num_dials = self.num_parts = self.num_bytes = self.num_frames = 0  # dialled here; delivered here
        self.listen_ports = itertools.cycle(_LISTEN_PORTS)
        self.dial_ports = itertools.cycle(_DIAL_PORTS)  # nobody dials them, so two links may share one

    def set_options(self, options: HostOptions) -> None:
        """Change the connection, for parts that come from now on."""
        self.up.bandwidth_bps, self.down.bandwidth_bps = options.up_bps, options.down_bps
        self.extra_latency_s = options.extra_latency_s


def _check_seconds(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")


def _check_above_floor(name: str, value: float, floor_s: float) -> None:
    if not floor_s <= value < math.inf:
        raise ValueError(f"{name} must be finite and at least floor_s = {floor_s!r}, got {value!r}")
