"""The pieces of a state: those that have come, those on their way and from whom, and the next one. No I/O."""

from collections.abc import Iterable
from dataclasses import dataclass

from net.identity import PeerId

OVERDUE_S = 2.0
"""When nothing is left to be asked for, pieces that have been on their way for longer are asked of a second donor, too:
one that has fallen silent would hold the whole up (as the last blocks of a file in BitTorrent: Cohen, "Incentives Build
Robustness in BitTorrent", 2003, section 2.4)."""


@dataclass(slots=True)
class _UnderWay:
    since: float
    donors: list[PeerId]


class Pieces:
    """The pieces of one state. `now` is in seconds of any one clock.

    Args:
      nbytes: of the state.
      chunk_bytes: of a piece; the last one may be shorter.
    """

    def __init__(self, nbytes: int, chunk_bytes: int) -> None:
        self._nbytes, self._chunk_bytes = nbytes, chunk_bytes
        num_pieces = -(-nbytes // chunk_bytes)
        self._waiting = list(reversed(range(num_pieces)))  # the next one at the end
        self._under_way: dict[int, _UnderWay] = {}
        self.num_missing = num_pieces

    def where(self, index: int) -> slice:
        """Bytes of the state that are piece `index`."""
        start = index * self._chunk_bytes
        return slice(start, min(start + self._chunk_bytes, self._nbytes))

    def next_for(self, donor: PeerId, now: float) -> int | None:
        """The piece to ask this donor for now, and from now on it is on its way from there; None: there is none."""
        if self._waiting:
            index = self._waiting.pop()
            self._under_way[index] = _UnderWay(now, [donor])
            return index
        for index, piece in self._under_way.items():  # the oldest first
            if now - piece.since >= OVERDUE_S and len(piece.donors) == 1 and donor not in piece.donors:
                piece.donors.append(donor)
                return index
        return None

    def came(self, index: int) -> bool:
        """The piece is there; False if it was already."""
        if self._under_way.pop(index, None) is None:
            return False
        self.num_missing -= 1
        return True

    def lost(self, donor: PeerId, indices: Iterable[int]) -> None:
        """Ask others again for pieces that do not come from this donor."""
        for index in sorted(indices, reverse=True):
            piece = self._under_way.get(index)
            if piece is not None and donor in piece.donors:
                piece.donors.remove(donor)
                if not piece.donors:
                    del self._under_way[index]
                    self._waiting.append(index)
