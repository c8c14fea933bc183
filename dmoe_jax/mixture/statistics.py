"""Totals of one process's expert calls, and reasons of those that failed."""

import logging
from dataclasses import dataclass, field

from net.errors import (
    CallFailed,
    ConnectionLost,
    LocalProtocolError,
    NetError,
    PeerBusy,
    PeerTimeout,
    PeerUnavailable,
    RemoteProtocolError,
)
from net.identity import Contact

logger = logging.getLogger(__name__)

OK = "ok"
"""The outcome of a call that was answered as it should be."""
LATE = "late"
"""The outcome of a call that was given up in the grace time: slow, perhaps not dead."""


class BadAnswer(RemoteProtocolError):
    """An answer that is none to what was asked, such as tensors of another number, shape or type."""


class NotFinite(NetError):
    """An answer that holds NaN or infinity."""


_REASONS: tuple[tuple[type[NetError], str], ...] = (
    (PeerTimeout, "timeout"),
    (ConnectionLost, "connection lost"),
    (PeerUnavailable, "unreachable"),
    (PeerBusy, "busy"),
    (CallFailed, "refused"),
    (RemoteProtocolError, "bad answer"),
    (LocalProtocolError, "not sent"),
    (NotFinite, "not finite"),
)

REASONS = (*(reason for _, reason in _REASONS), LATE)
"""Every reason for which a call may fail, as reports and figures show them."""

_LOG_EVERY = 100


def reason_of(error: NetError) -> str:
    """The reason that an error stands for, one of `REASONS`."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "unreachable")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One expert call that has ended.

    Attributes:
      method: such as "expert.forward".
      uid: the expert. contact: the node that it was asked of.
      rows: samples of the call.
      outcome: `OK`, or the reason why it brought nothing; see `REASONS`.
      began, ended: trio's clock, seconds.
    """

    method: str
    uid: str
    contact: Contact
    rows: int
    outcome: str
    began: float
    ended: float


@dataclass(slots=True)
class CallStatistics:
    """Running totals of one process's expert calls."""

    ok: int = 0
    """Calls that were answered in time."""
    failures: dict[str, int] = field(default_factory=dict)
    """Calls that brought nothing, by reason; see `REASONS`."""
    asked_again: int = 0
    """Calls that were made again because a busy node had asked for it."""
    moved: int = 0
    """Calls that went to another node that serves the same expert, because the first one failed, or had."""
    samples: int = 0
    """Samples that went through a layer, in training or in evaluation; once for each layer."""
    skipped_samples: int = 0
    """Samples in `samples` for which no expert answered."""
    staleness_total: int = 0
    """Updates that experts took between a forward and its backward, by other trainers, summed over backward calls."""
    staleness_calls: int = 0
    """Backward calls in `staleness_total`."""
    load: dict[str, int] = field(default_factory=dict)
    """Samples sent through each expert in training, by uid."""
    asked: dict[str, int] = field(default_factory=dict, repr=False)
    """Samples for which an expert was asked in forward calls, answered or not; by uid."""
    host: dict[str, Contact] = field(default_factory=dict, repr=False)
    """The node that last answered for each expert. Bounded by the grid, like `load`."""

    @property
    def failed(self) -> int:
        """Calls that were refused, lost or timed out, or that brought a bad answer."""
        return sum(self.failures.values()) - self.late

    @property
    def late(self) -> int:
        """Calls that were given up in the grace time."""
        return self.failures.get(LATE, 0)

    def note_failure(self, reason: str, text: str) -> None:
        """Count a failure; log the first one of its reason, and every hundredth, as a warning."""
        count = self.failures[reason] = self.failures.get(reason, 0) + 1
        level = logging.WARNING if count == 1 or count % _LOG_EVERY == 0 else logging.DEBUG
        logger.log(level, "expert call failed (%s, number %d): %s", reason, count, text)
