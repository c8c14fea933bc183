"""Peers to leave alone for a while, longer each time they fail again.

Pure bookkeeping with `now` as an argument. Used by the DHT node for peers that do not answer, and by the expert
directory for expert hosts that fail.
"""

from dataclasses import dataclass

from net.identity import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ban:
    failures: int
    until: float


class Blacklist:
    """Back-off by peer: after its n-th failure in a row a peer is left alone for `base_s * 2**(n-1)` seconds.

    Args:
      base_s: the first pause, seconds; 0: nobody is ever left alone.
      cap_s: the longest pause, seconds.
      max_peers: most peers remembered; beyond it the peer whose pause ends first is forgotten.
    """

    def __init__(self, *, base_s: float, cap_s: float, max_peers: int = 1024) -> None:
        if not 0 <= base_s <= cap_s or max_peers < 1:
            raise ValueError(f"expected 0 <= base_s <= cap_s and max_peers >= 1, got {base_s}, {cap_s}, {max_peers}")
        self._base_s = base_s
        self._cap_s = cap_s
        self._max_peers = max_peers
        self._bans: dict[PeerId, _Ban] = {}

    def failed(self, peer_id: PeerId, now: float) -> float:
        """Count a failure. Returns the time until which the peer is left alone."""
        ban = self._bans.get(peer_id)
        if ban is not None and now < ban.until:
            return ban.until  # calls that were under way together fail together: one failure, not several
        failures = 1 if ban is None else ban.failures + 1
        # min first: 2.0 ** failures would overflow for a peer that has been dead for ever.
        pause_s = min(self._cap_s, self._base_s * 2.0 ** min(failures - 1, 64))
        self._bans[peer_id] = _Ban(failures=failures, until=now + pause_s)
        if len(self._bans) > self._max_peers:
            del self._bans[min(self._bans, key=lambda peer: (self._bans[peer].until, peer))]
        return now + pause_s

    def succeeded(self, peer_id: PeerId) -> None:
        """One success clears the peer's record."""
        self._bans.pop(peer_id, None)

    def blocks(self, peer_id: PeerId, now: float) -> bool:
        """Whether the peer is to be left alone at `now`."""
        ban = self._bans.get(peer_id)
        return ban is not None and now < ban.until

    def blocked(self, now: float) -> tuple[PeerId, ...]:
        """Every peer that is left alone at `now`, sorted."""
        return tuple(sorted(peer_id for peer_id, ban in self._bans.items() if now < ban.until))
