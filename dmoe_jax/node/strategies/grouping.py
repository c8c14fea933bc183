"""Which batches of a turn are carried out by one program."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

_FEW_ROWS = 16
"""Up to so many, what a batch costs is mostly the optimiser's step."""
_MOST_PADDING, _MOST_PADDING_OF_FEW = 2, 4
"""A batch is filled up to at most so many times its bucket."""


class Piece(NamedTuple):
    """A batch, as far as this concerns it.

    Attributes:
      key: batches of equal keys may share a program; None: this one has its own.
      bucket: rows of the program that it would have by itself.
    """

    key: Hashable
    bucket: int


def grouped(pieces: Sequence[Piece], most_together: Callable[[int, int], int]) -> list[list[int]]:
    """The batches, by their positions, that share a program: those of the most rows first, filled up to their bucket.

    Args:
      pieces: of one turn.
      most_together: (the position of a batch, the bucket) -> how many of its key a program for this bucket takes.

    Returns: each position once; the group of the first batch first.
    """
    groups = [[position] for position, piece in enumerate(pieces) if piece.key is None]
    for key in dict.fromkeys(piece.key for piece in pieces if piece.key is not None):
        own = [position for position, piece in enumerate(pieces) if piece.key == key]
        own.sort(key=lambda position: -pieces[position].bucket)
        while own:
            first = pieces[own[0]].bucket
            most = max(1, most_together(own[0], first))
            least = first // (_MOST_PADDING_OF_FEW if first <= _FEW_ROWS else _MOST_PADDING)
            group = [position for position in own if pieces[position].bucket >= least][:most]
            own = [position for position in own if position not in group]
            groups.append(sorted(group))
    return sorted(groups)
