"""Expert names and their places on a grid: `ffn.3.17` is row 3, column 17 of the grid `ffn`.

A uid is a prefix without dots and one coordinate a grid dimension.
"""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_PREFIX_LENGTH = 64
MAX_GRID_DIMS = 16
"""Papers use 1 to 4 dimensions; the bound keeps a uid, which strangers may write, short."""
MAX_COORDINATE = 99_999
MAX_EXPANDED_UIDS = 1_000_000
"""Most uids of one pattern: a slip such as [0:4096].[0:4096] should fail, not fill the memory."""

Coordinates = tuple[int, ...]
"""Place on a grid: one index for each dimension, or for the first few."""

_PREFIX = re.compile(r"[A-Za-z0-9_-]+")
_COORDINATE = re.compile(r"0|[1-9][0-9]{0,4}")
_RANGE = re.compile(r"\[([0-9]{1,6}):([0-9]{1,6})\]")


@dataclass(frozen=True, slots=True, order=True)
class ExpertUid:
    """The name of an expert, printed as `prefix.u0.u1...`; sorted by prefix, then by coordinates."""

    prefix: str
    """Letters, digits, `_` and `-`; at most 64."""
    coordinates: Coordinates
    """One index for each grid dimension, each from 0 to 99999."""

    def __post_init__(self) -> None:
        check_prefix(self.prefix)
        if not 1 <= len(self.coordinates) <= MAX_GRID_DIMS:
            raise ValueError(f"an expert uid has 1 to {MAX_GRID_DIMS} coordinates, got {self.coordinates}")
        if not all(0 <= coordinate <= MAX_COORDINATE for coordinate in self.coordinates):
            raise ValueError(f"coordinates go from 0 to {MAX_COORDINATE}, got {self.coordinates}")

    def __str__(self) -> str:
        return key_prefix(self.prefix, self.coordinates)[:-1]


def check_prefix(prefix: str) -> str:
    """The prefix itself, or ValueError if it is empty, too long, or holds anything but letters, digits, `_` and `-`."""
    if not _PREFIX.fullmatch(prefix) or len(prefix) > MAX_PREFIX_LENGTH:
        raise ValueError(f"an expert prefix is 1 to {MAX_PREFIX_LENGTH} letters, digits, '_' or '-', got {prefix!r}")
    return prefix


def parse_coordinate(text: str) -> int:
    """A coordinate from its only spelling, without sign and leading zeros, or ValueError."""
    if not _COORDINATE.fullmatch(text):
        raise ValueError(f"a coordinate is an integer from 0 to {MAX_COORDINATE} without leading zeros, got {text!r}")
    return int(text)


def parse_uid(text: str) -> ExpertUid:
    """Read `prefix.u0.u1...`, or raise ValueError."""
    prefix, *coordinates = text.split(".")
    if not coordinates:
        raise ValueError(f"an expert uid is PREFIX.INDEX or PREFIX.INDEX.INDEX..., got {text!r}")
    try:
        return ExpertUid(prefix, tuple(parse_coordinate(part) for part in coordinates))
    except ValueError as error:
        raise ValueError(f"bad expert uid {text!r}: {error}") from error


def key_prefix(prefix: str, coordinates: Sequence[int]) -> str:
    """The name of a partial path: `ffn.` for no coordinates, `ffn.3.` for (3,). It always ends with a dot."""
    return ".".join((prefix, *map(str, coordinates), ""))


def expand_grid_pattern(pattern: str) -> tuple[ExpertUid, ...]:
    """Every uid that a pattern stands for, in the order of coordinates.

    A coordinate of the pattern is a number or a half-open range: `ffn.[0:2].[4:6]` -> ffn.0.4, ffn.0.5,
    ffn.1.4, ffn.1.5.

    Raises:
      ValueError: it is malformed, a range is empty, or it stands for over a million uids.
    """
    prefix, *parts = pattern.split(".")
    if (layers := re.fullmatch(r"([\w-]*)\[(\d+):\d+\]", prefix)) is not None:
        name, rest = layers[1] or "layer", pattern.partition(".")[2]
        each = " ".join(f"{name}{int(layers[2]) + step}.{rest}" for step in range(2))
        raise ValueError(f"bad grid pattern {pattern!r}: give one pattern for each layer, {each} ...")
    try:
        check_prefix(prefix)
        ranges = [_expand_part(part) for part in parts]
    except ValueError as error:
        raise ValueError(f"bad grid pattern {pattern!r}: {error}") from error
    if not ranges:
        raise ValueError(f"expected a grid pattern such as ffn.[0:4].[0:8], got {pattern!r}")
    if (count := math.prod(map(len, ranges))) > MAX_EXPANDED_UIDS:
        raise ValueError(f"grid pattern {pattern!r} stands for {count} uids, at most {MAX_EXPANDED_UIDS} are allowed")
    return tuple(ExpertUid(prefix, coordinates) for coordinates in itertools.product(*ranges))


def patterns_by_uid(patterns: Iterable[str]) -> dict[ExpertUid, str]:
    """Every uid that these patterns stand for, each with its pattern.

    Raises:
      ValueError: as `expand_grid_pattern`, or two patterns name the same uid.
    """
    found: dict[ExpertUid, str] = {}
    for pattern in patterns:
        for uid in expand_grid_pattern(pattern):
            if uid in found:
                raise ValueError(f"expert {uid} is named twice, by {found[uid]!r} and by {pattern!r}")
            found[uid] = pattern
    return found


def all_uids(prefix: str, grid_size: Sequence[int]) -> tuple[ExpertUid, ...]:
    """Every uid of a grid, in the order of coordinates, or ValueError if the prefix or a dimension is not allowed."""
    if not grid_size or any(size < 1 for size in grid_size):
        raise ValueError(f"grid_size must be one or more positive dimensions, got {tuple(grid_size)}")
    return expand_grid_pattern(".".join((prefix, *(f"[0:{size}]" for size in grid_size))))


def layer_prefix(layer: int) -> str:
    """Prefix of the experts of a model's layer: "layer0" for the first."""
    return f"layer{layer}"


def _expand_part(part: str) -> range:
    match = _RANGE.fullmatch(part)
    if match is None:
        coordinate = parse_coordinate(part)
        return range(coordinate, coordinate + 1)
    start, stop = int(match[1]), int(match[2])
    if not start < stop <= MAX_COORDINATE + 1:
        raise ValueError(f"expected [START:STOP] with START < STOP <= {MAX_COORDINATE + 1}, got {part}")
    return range(start, stop)
