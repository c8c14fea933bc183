"""Failures in a row: one record for everybody in a process who asks.

RPC feeds it with the end of every call; the DHT, the expert directory and the mixtures ask it before they call, each
with a `Pause` of its own. A *target* is an `Address` or a `Contact` that was dialled, one expert, or a peer's service
`(peer_id, name)`: a peer whose experts hang may still be a good member of the DHT. `now` is in seconds on any one
clock.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

MAX_TARGETS = 4096
"""Most targets; beyond it the one whose last failure is oldest is forgotten."""

LATE_LIMIT = 3
"""Late answers in a row that count as one failure: a hung process refuses no connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Seconds for which a target is left alone: `first_s * 2**(n-1)` after the n-th failure in a row that counts."""

    first_s: float
    """The first pause, seconds; 0: nothing is ever left alone."""
    longest_s: float
    """The longest pause, seconds."""
    forgiven: int = 0
    """Failures in a row that cost nothing: a process that was just restarted answers the next call."""

    def __post_init__(self) -> None:
        if not 0 <= self.first_s <= self.longest_s or self.forgiven < 0:
            raise ValueError(f"expected 0 <= first_s <= longest_s and forgiven >= 0, got {self}")

    def after(self, failures: int) -> float:
        """Seconds to wait after this number of failures in a row."""
        counted = failures - self.forgiven
        # min first: 2.0 ** counted would overflow for a target that has been dead for ever.
        return min(self.longest_s, self.first_s * 2.0 ** min(counted - 1, 64)) if counted > 0 else 0.0


@dataclass(slots=True)
class _Record:
    failures: int = 0
    late: int = 0
    failed_at: float = 0.0
    troubled_at: float = 0.0
    reason: str = ""


class PeerHealth:
    """Failures in a row by target."""

    def __init__(self) -> None:
        self._records: OrderedDict[Hashable, _Record] = OrderedDict()

    def failed(self, target: Hashable, now: float, reason: str = "", *, together_s: float = 0.0) -> None:
        """Note that an attempt failed. Failures within `together_s` seconds of the last are one with it: calls that
        were under way together fail together."""
        record = self._touch(target)
        if record.failures and now < record.failed_at + together_s:
            return
        record.failures += 1
        record.late = 0
        record.failed_at, record.reason = now, reason
        record.troubled_at = now

    def late(self, target: Hashable, now: float) -> None:
        """Note that an answer was no longer waited for. `LATE_LIMIT` in a row count as a failure."""
        record = self._touch(target)
        record.late += 1
        record.troubled_at = now
        if record.late >= LATE_LIMIT:
            self.failed(target, now, f"late {LATE_LIMIT} times in a row")

    def succeeded(self, target: Hashable) -> None:
        """Forget the failures of a target that has answered."""
        if self._records:  # mostly there are none, and to hash a target takes longer
            self._records.pop(target, None)

    def troubled_at(self, target: Hashable) -> float | None:
        """Time of its last failure or late answer; None if it has answered since, or never did either."""
        record = self._records.get(target)
        return None if record is None else record.troubled_at

    def has_failed(self, target: Hashable) -> bool:
        """True if it has failed, and not only been late, and not answered since."""
        record = self._records.get(target)
        return record is not None and record.failures > 0

    def why_not(self, target: Hashable, now: float, pause: Pause) -> str | None:
        """Reason to leave it alone at `now`; None if it may be tried."""
        if not self.blocks(target, now, pause):
            return None
        record = self._records[target]
        until = record.failed_at + pause.after(record.failures)
        return f"{record.reason} ({record.failures} times in a row; not tried for {until - now:.1f} s)"

    def blocks(self, target: Hashable, now: float, pause: Pause) -> bool:
        """True if it is to be left alone at `now`."""
        record = self._records.get(target) if self._records else None  # see `succeeded`
        return record is not None and now < record.failed_at + pause.after(record.failures)

    def blocked(self, now: float, pause: Pause) -> tuple[Hashable, ...]:
        """Every target that is left alone at `now`, the one that failed first first."""
        return tuple(target for target in self._records if self.blocks(target, now, pause))

    def _touch(self, target: Hashable) -> _Record:
        record = self._records.pop(target, None) or _Record()
        self._records[target] = record
        if len(self._records) > MAX_TARGETS:
            self._records.popitem(last=False)
        return record
