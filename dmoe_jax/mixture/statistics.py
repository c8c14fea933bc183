"""Totals of one process's expert calls, reasons of those that failed, and the share of samples that find experts: a
layer without any would silently be the identity, so it says so."""

import logging
import math
from collections import deque
from dataclasses import dataclass, field

import trio

from dmoe_net.errors import (
    CallFailed,
    ConnectionLost,
    LocalProtocolError,
    NetError,
    PeerBusy,
    PeerTimeout,
    PeerUnavailable,
    RemoteProtocolError,
)
from dmoe_net.identity import Contact

logger = logging.getLogger(__name__)

WINDOW_CALLS = 32
"""Calls over which the share of samples without an expert is taken. After so many without a gap the next one is worth a
warning again."""

HOLD_S = 10.0
"""Seconds for which that share has to be too large, on end. A node that was late once is left alone for a second, and
quick steps make many calls in it."""

OK = "ok"
"""The outcome of a call that was answered as it should be."""
LATE = "late"
"""The outcome of a call that was given up in the grace time: slow, perhaps not dead."""


class BadAnswer(RemoteProtocolError):
    """An answer that is none to what was asked, such as tensors of another number, shape or type."""


class NotFinite(NetError):
    """An answer that holds NaN or infinity."""


class TooFewExperts(RuntimeError):
    """More samples of a layer went without any expert than its user allows. No `NetError`, which a trainer would pass
    over: it would train a model without this layer."""


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


@dataclass(frozen=True, slots=True)
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


def check_coverage(statistics: CallStatistics, max_skipped: float) -> None:
    """Raise TooFewExperts if no expert answered for a larger share of a run's samples than `max_skipped`."""
    skipped, samples = statistics.skipped_samples, statistics.samples
    if skipped > max_skipped * samples:
        raise TooFewExperts(
            f"no expert answered for {skipped:,} of {samples:,} samples of the run, and max_skipped allows "
            f"{max_skipped:.0%}: what was trained is little more than the model without its experts"
        )


class Coverage:
    """Watches the samples of one layer that no expert answered for.

    Args:
      prefix: of the layer's experts, for messages.
      max_skipped: the largest share of samples without an expert, over the last `WINDOW_CALLS` calls; it may be larger
        for less than `HOLD_S`, unless none at all are allowed.
      instead: what such a sample gets, for the warning.
    """

    def __init__(self, prefix: str, *, max_skipped: float, instead: str) -> None:
        self._prefix = prefix
        self._max_skipped = max_skipped
        self._instead = instead
        self._shares: deque[float] = deque(maxlen=WINDOW_CALLS)
        self._warned = False
        self._too_large_since = math.inf

    def note(self, skipped: int, samples: int, *, found: int, answered: int) -> None:
        """Record one call of the layer: of `samples` `skipped` had no expert, of `found` living ones some `answered`.
        Raises TooFewExperts if the share of samples without an expert has exceeded `max_skipped` for `HOLD_S`; with 0,
        if it exceeds it. Calls that were not made yet count as complete."""
        self._shares.append(skipped / samples if samples else 0.0)
        state = f"{found} experts were found alive and asked, {answered} of them answered"
        if skipped and not self._warned:
            self._warned = True
            logger.warning(
                "layer %r: no expert for %d of %d samples (%s); %s, until experts come back",
                *(self._prefix, skipped, samples, state, self._instead),
            )
        elif self._warned and len(self._shares) == WINDOW_CALLS and not any(self._shares):
            self._warned = False
            logger.info("layer %r: every sample of the last %d calls had an expert", self._prefix, WINDOW_CALLS)
        share = sum(self._shares) / WINDOW_CALLS
        if share <= self._max_skipped:
            self._too_large_since = math.inf
            return
        if self._max_skipped:
            now = trio.current_time()
            self._too_large_since = min(self._too_large_since, now)
            if now - self._too_large_since < HOLD_S:
                return
        raise TooFewExperts(
            f"layer {self._prefix!r}: no expert for {share:.0%} of the samples of the last {WINDOW_CALLS} calls; "
            f"max_skipped allows {self._max_skipped:.0%}; in the last call {state}"
        )
