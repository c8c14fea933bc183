"""Progress of a swarm with the batch that it gathers together, and when that will be full. Without I/O.

Between two reports of a peer its samples are taken to grow at the rate that it told. So anybody can tell the time T at
which all peers together reach the target (DeDLOC: Diskin et al., NeurIPS 2021, section 3.1):

    sum over peers of  samples_i + rate_i (T - at_i)  =  target

Steps have a *chain*, a digest of the groups by which they were made. Peers of one step and one chain have the same
parameters; peers of one step and several chains are a swarm that fell apart, and only one of the chains can go on.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dmoe_net.averaging.grouping.group import MAX_GROUP_SIZE, Role
from dmoe_net.dht.entries import Found, Value
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import Address, PeerId
from dmoe_net.wire.fields import HOST, PORT, Field, choice, integer, octets, optional, real, row_untrusted

CHAIN_BYTES = 8
NO_CHAIN = bytes(CHAIN_BYTES)
"""The chain before the first step."""

MAX_STEP, MAX_SAMPLES, MAX_RATE = 2**62, 1e12, 1e9
"""Steps, samples, and samples a second that a report may claim. A peer that claims more is not believed at all."""
MAX_PEERS = 1024
"""Reports that are taken into account, those that are furthest first."""
MAX_SKEW_S = 30.0
"""Seconds by which a report may be later than now: clocks differ."""
_SMOOTHING = 0.2
"""Weight of a new measurement of `Pace` against all before it (hivemind's is 0.1)."""
_ACCIDENT = 4.0
"""Times as fast as before that a measurement must be for those before it to be forgotten."""
_MAX_AGE_S = 3600.0
"""A sample count is extrapolated over no longer time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A peer's part in the current step, as it tells."""

    peer_id: PeerId
    address: Address | None
    """The place where it can be called; None for a client."""
    role: Role
    """Its part in the averaging."""
    step: int = 0
    """Steps that the swarm had made with it: the one that it gathers for, counted from 0."""
    chain: bytes = NO_CHAIN
    """`CHAIN_BYTES` that name these steps."""
    samples: float = 0.0
    """Gathered for this step by then."""
    rate: float = 0.0
    """Samples a second while it gathers."""
    at: float
    """Swarm time of the report."""
    trained: float = 0.0
    """Samples in all steps of its chain: of two chains, the one with more goes on."""

    def samples_at(self, now: float) -> float:
        """Number that it has gathered by then, if it goes on as it said."""
        return self.samples + self.rate * min(max(0.0, now - self.at), _MAX_AGE_S)

    @property
    def gathers(self) -> bool:
        """True if it has gradients of its own."""
        return self.role is not Role.AUXILIARY

    @property
    def where(self) -> tuple[int, bytes]:
        """Step and chain: peers with the same have the same parameters."""
        return self.step, self.chain

    @property
    def standing(self) -> tuple[int, float, bytes]:
        """The order of chains: more steps, then more samples, then the larger digest."""
        return self.step, self.trained, self.chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The state of the swarm, as one peer sees it."""

    peers: tuple[Report, ...]
    """Everybody at this step, this peer first. Without those that are behind or in another chain."""
    helpers: tuple[Report, ...]
    """Auxiliary peers that are behind: they have nothing to catch up with, and go on where they are needed."""
    samples: float
    """Gathered by now by all of them together."""
    rate: float
    """Samples a second of all of them."""
    batch_s: float
    """Seconds that a whole batch takes at that rate; infinite if nobody gathers."""
    ends_at: float
    """Swarm time at which the batch is full; in the past if it is, infinite if nobody gathers."""
    ahead: tuple[Report, ...]
    """Peers that are further, or in a chain that goes on where this peer's does not; the furthest first."""
    num_behind: int
    """Number of peers with gradients that are behind, and take what they lack from others."""

    @property
    def leader(self) -> Report | None:
        return self.ahead[0] if self.ahead else None

    @property
    def others(self) -> tuple[Report, ...]:
        return self.peers[1:]

    @property
    def quorum(self) -> int:
        """Fewest of those that gather that may make a step: more than half, so that no two groups make the same one."""
        return sum(peer.gathers for peer in self.peers) // 2 + 1

    @property
    def fewest(self) -> int:
        """Fewest members with gradients that make the step at hand, for a group that this peer is to begin.

        Nobody makes it any more once others have: those who are left may be most of those that are at this step still,
        but not most of the swarm, and would go on in a chain that comes to nothing.
        """
        is_made = self.ahead and self.peers[0].gathers  # an auxiliary peer goes wherever it is asked to
        return MAX_GROUP_SIZE + 1 if is_made else self.quorum

    def count(self, role: Role) -> int:
        return sum(peer.role is role for peer in self.peers)


def forecast(own: Report, others: Sequence[Report], *, target: float, now: float) -> Forecast:
    """Add up this peer's report of `now`, and one of each other peer, for a batch of `target` samples."""
    same = [each for each in others if each.where == own.where]
    # With delayed updates somebody further may still be of our chain: its last step is under way.
    rest = [each for each in others if each.where != own.where]
    peers = (own, *sorted(same, key=lambda each: each.peer_id))
    gathering = [each for each in peers if each.gathers]
    samples = math.fsum(each.samples_at(now) for each in gathering)
    rate = math.fsum(each.rate for each in gathering)
    ahead = [each for each in rest if each.standing > own.standing]
    ahead.sort(key=lambda each: each.standing, reverse=True)
    return Forecast(
        peers=peers,
        helpers=tuple(each for each in rest if each.role is Role.AUXILIARY),
        samples=samples,
        rate=rate,
        batch_s=target / rate if rate > 0 else math.inf,
        ends_at=now + (target - samples) / rate if rate > 0 else (math.inf if samples < target else now),
        ahead=tuple(ahead),
        num_behind=sum(each.gathers and each.step < own.step for each in rest),
    )


def next_chain(chain: bytes, group_id: bytes) -> bytes:
    """The chain after a step that this group made together."""
    return hashlib.blake2b(chain + group_id, digest_size=CHAIN_BYTES).digest()


_ROW: dict[str, Field[Any]] = {
    "host": optional(HOST),
    "port": optional(PORT),
    "role": choice(Role),
    "step": integer(0, MAX_STEP),
    "chain": octets(CHAIN_BYTES, CHAIN_BYTES),
    "samples": real(0.0, MAX_SAMPLES),
    "rate": real(0.0, MAX_RATE),
    "at": real(),
    "trained": real(0.0),
}


def progress_key(prefix: str) -> str:
    """The DHT key under which the peers of a collaboration report."""
    return f"{prefix}.progress"


def report_to_wire(report: Report) -> Value:
    """The DHT value that `reports_in_untrusted` reads."""
    host, port = (None, None) if report.address is None else (report.address.host, report.address.port)
    numbers = (float(report.samples), float(report.rate), float(report.at), float(report.trained))
    return [host, port, report.role.value, report.step, report.chain, *numbers]


def reports_in_untrusted(record: Iterable[Found], *, now: float) -> list[Report]:
    """Reports under a key, the furthest first. Entries that cannot be read, or are of the future, are passed over."""
    found: list[Report] = []
    for entry in record:
        with contextlib.suppress(RemoteProtocolError, ValueError):
            if (report := parse_report_untrusted(entry.value, entry.owner)).at <= now + MAX_SKEW_S:
                found.append(report)
    return sorted(found, key=lambda each: each.standing, reverse=True)[:MAX_PEERS]


def parse_report_untrusted(value: object, peer_id: PeerId) -> Report:
    """Read what `report_to_wire` made of a report of this peer. Raises `RemoteProtocolError` if it did not."""
    host, port, role, *rest = row_untrusted(value, "a report", **_ROW)
    if (host is None) != (port is None):
        raise RemoteProtocolError(f"a peer has both host and port or neither, got {host!r:.80} and {port}")
    if (host is None) != (role is Role.CLIENT):
        raise RemoteProtocolError(f"a client has no address and others have one, got {role} at {host!r:.80}")
    address = None if host is None else Address(host, port)
    return Report(peer_id=peer_id, address=address, role=role, **dict(zip(list(_ROW)[3:], rest, strict=True)))


class Pace:
    """Speed at which this peer gathers: samples a second of the time in which it computes."""

    def __init__(self) -> None:
        self._samples = self._seconds = 0.0

    @property
    def rate(self) -> float:
        """Samples a second; 0 before the first measurement."""
        return self._samples / self._seconds if self._seconds > 0 else 0.0

    def measured(self, samples: int, seconds: float) -> None:
        """So many samples took so many seconds of computing."""
        if not (samples >= 0 and seconds >= 0):
            raise ValueError(f"samples and seconds must not be negative, got {samples} and {seconds}")
        # What was much slower had an accident, such as compiling, that says nothing of the next.
        keep = 1 - _SMOOTHING if self._seconds and self.seconds_for(samples) <= _ACCIDENT * seconds else 0.0
        # Sums, not a mean of rates: two micro-batches of other sizes count by the time that they took.
        self._samples = keep * self._samples + (1 - keep) * samples
        self._seconds = keep * self._seconds + (1 - keep) * max(seconds, 1e-9)

    def seconds_for(self, samples: int) -> float:
        """Seconds that so many samples will take; 0 before the first measurement."""
        return samples / self.rate if self.rate > 0 else 0.0
