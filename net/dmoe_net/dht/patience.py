"""Seconds to wait for a peer's answer before others are asked in its stead.

As TCP's retransmission timer (RFC 6298, section 2): the smoothed time of its calls and four times their deviation. A
peer that was not called of late has first to be dialled; for it stands what first calls of others took.
"""

from dataclasses import dataclass

from dmoe_net.identity import PeerId

_SHORTEST_S, _LONGEST_S = 0.1, 1.0
_MAX_PEERS = 1024
_FRESH_S = 30.0  # after that a connection may have been closed for want of calls


@dataclass(slots=True)
class _Timer:
    smoothed_s: float = 0.0
    deviation_s: float = 0.0
    last: float = 0.0
    is_new: bool = True

    def note(self, seconds: float, now: float) -> None:
        if self.is_new:
            self.smoothed_s, self.deviation_s, self.is_new = seconds, seconds / 2, False
        else:
            self.deviation_s += (abs(seconds - self.smoothed_s) - self.deviation_s) / 4
            self.smoothed_s += (seconds - self.smoothed_s) / 8
        self.last = now

    @property
    def patience_s(self) -> float:
        if self.is_new:
            return _LONGEST_S
        return min(max(self.smoothed_s + 4 * self.deviation_s, _SHORTEST_S), _LONGEST_S)


class Patience:
    """Times of calls by peer, of at most `_MAX_PEERS`. `now` is in seconds on any one clock."""

    def __init__(self) -> None:
        self._peers: dict[PeerId, _Timer] = {}  # from longest to most recently called
        self._first = _Timer()

    def note(self, peer_id: PeerId, seconds: float, now: float) -> None:
        """Note that a call of a peer took so many seconds, and ends now."""
        known = self._fresh(peer_id, now - seconds)
        if known is None:
            self._first.note(seconds, now)
            # What a dial adds is not known apart: the next call tells what calls take.
            known = _Timer(last=now)
        else:
            known.note(seconds, now)
        self._peers.pop(peer_id, None)
        self._peers[peer_id] = known
        if len(self._peers) > _MAX_PEERS:
            del self._peers[next(iter(self._peers))]

    def sweep(self, now: float) -> None:
        """Forget the peers whose times say nothing any more, not even about a call that is still under way."""
        self._peers = {peer_id: each for peer_id, each in self._peers.items() if each.last >= now - 2 * _FRESH_S}

    def of(self, peer_id: PeerId, now: float) -> float:
        """Seconds to wait for an answer of this peer, from 0.1 to 1."""
        known = self._fresh(peer_id, now)
        return self._first.patience_s if known is None or known.is_new else known.patience_s

    def _fresh(self, peer_id: PeerId, now: float) -> _Timer | None:
        known = self._peers.get(peer_id)
        return known if known is not None and known.last >= now - _FRESH_S else None
