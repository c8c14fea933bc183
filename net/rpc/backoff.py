"""How long an address that could not be reached, or a contact that was not there, is left alone."""

from collections import OrderedDict
from dataclasses import dataclass

from net.identity import Address, Contact

FIRST_S = 0.2
LONGEST_S = 30.0
"""Doubling from the second failure in a row. The first costs nothing: a process that was just restarted, or one that
gave a connection up the moment we used it, answers the next call."""

MAX_ADDRESSES = 1024
"""Those that failed longest ago are forgotten beyond it: then they are simply dialled."""


@dataclass(slots=True)
class _Failures:
    in_a_row: int
    retry_at: float
    reason: str


class Backoff:
    """Failures in a row by address or contact."""

    def __init__(self) -> None:
        self._failures: OrderedDict[Contact | Address, _Failures] = OrderedDict()

    def failed(self, target: Contact | Address, reason: str, now: float) -> None:
        """An attempt has failed."""
        in_a_row = 1 + (self._failures.pop(target).in_a_row if target in self._failures else 0)
        pause_s = 0.0 if in_a_row == 1 else min(FIRST_S * 2.0 ** min(in_a_row - 2, 30), LONGEST_S)
        self._failures[target] = _Failures(in_a_row, now + pause_s, reason)
        if len(self._failures) > MAX_ADDRESSES:
            self._failures.popitem(last=False)

    def succeeded(self, target: Contact | Address) -> None:
        """Somebody answers there."""
        self._failures.pop(target, None)

    def why_not(self, target: Contact | Address, now: float) -> str | None:
        """Why it should not be dialled yet; None if it may be."""
        failures = self._failures.get(target)
        if failures is None or now >= failures.retry_at:
            return None
        return f"{failures.reason} ({failures.in_a_row} times in a row; not tried for {failures.retry_at - now:.1f} s)"
