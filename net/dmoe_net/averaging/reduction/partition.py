"""The cutting of a vector for a group: every member's part, the chunks of a part, and how a call names one.

    call    {"group": 16 bytes, "size": numbers in the vector, "start": of the chunk,   one float32 tensor: the values
             "wish": chunks that the sender would like to have under way,
             "weight": of the sender's vector, a float; not there: as announced}
    answer  {"senders": vectors in the mean, "difference": bool,                        one float32 tensor: their mean,
             "room": chunks that it may have under way,                    or the mean minus the values as received
             "weight": sum of the weights in the mean, a float}

A weight takes the place of the one that the member announced when the group formed, and is the same in all of its calls
to a reducer. Sums of weights are exact and rounded once: all answers of all reducers say the same sum, to the last bit,
if nobody is missing in any of them, and all were told the same weights.
"""

from dataclasses import dataclass
from typing import NamedTuple

from dmoe_net.averaging.grouping.group import GROUP_ID, MAX_GROUP_SIZE, WEIGHTS, Group
from dmoe_net.averaging.reduction.load_balance import peer_fractions, split_by_shares
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.rpc.base import Body
from dmoe_net.wire.compression import BLOCK_SIZE, Compression
from dmoe_net.wire.fields import integer, optional, real
from dmoe_net.wire.messages import MAX_TIMEOUT_S

MAX_WINDOW = 16
"""Chunks that a sender may have brought and not been answered, unless the reducer has granted more: what it can make a
reducer hold."""

MAX_ROOM = 192
"""The most that is ever granted. One connection serves 256 calls at once, whatever their size."""

_FLOAT_BYTES = 4
ROOM = integer(0, 2**31)
"""A wish, or the room for it."""

MAX_WEIGHT = WEIGHTS[1]
"""The most that a vector may count."""

TOTAL_WEIGHT = real(0.0, MAX_GROUP_SIZE * MAX_WEIGHT)
"""The sum of the weights in a mean."""

_NATURAL, _WEIGHT = integer(0, 2**63 - 1), real(0.0, MAX_WEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceConfig:
    """Settings of an all-reduce. Members of a group must agree on `chunk_bytes` and `window_bytes`."""

    chunk_bytes: int = 2 * 2**20
    """Most bytes of the vector's float32 numbers in one call. Smaller chunks cost calls, larger ones memory: with 1280
    KiB, four members on one machine took a tenth more processor time, and at 1 Gb/s and 100 ms used 0.92 of the line
    and not 0.96."""
    window_bytes: int = 8 * 2**20
    """Bytes of chunks that wait for their means, at all reducers together, to begin with; one chunk or more at each. A
    member holds as much for others, and once more of answers that come in. With half of it, four on one machine took a
    fifth longer. On longer lines windows grow as far as these carry, the memory budget allows (`dmoe_net.rpc.bulk`),
    and reducers grant."""
    sender_timeout_s: float = 30.0
    """A member that has not brought a chunk so long after all earlier ones were averaged is left out of the rest. A
    reducer that has not answered for twice as long is given up: it may have to wait for others that long itself."""
    timeout_s: float = 300.0
    """Longest that the whole all-reduce takes, seconds; what is not averaged by then keeps its own values."""
    compression: Compression = Compression.NONE
    """Form of the numbers that this member sends, as sender and as reducer."""
    is_identical: bool = False
    """True if all members get the very same numbers, though these travel compressed."""

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "window_bytes"):
            if getattr(self, name) < _FLOAT_BYTES:
                raise ValueError(f"{name} must be at least {_FLOAT_BYTES}, got {getattr(self, name)}")
        for name in ("sender_timeout_s", "timeout_s"):
            if not 0 < getattr(self, name) <= MAX_TIMEOUT_S:
                raise ValueError(f"{name} must be above 0 and at most {MAX_TIMEOUT_S:g} s, got {getattr(self, name)}")

    def chunk_size(self, group_size: int) -> int:
        """Numbers in a chunk: as many for each member as `window_bytes` allows, in whole blocks of 8-bit compression
        where it comes to as many."""
        numbers = min(self.chunk_bytes, self.window_bytes // group_size) // _FLOAT_BYTES
        return max(1, numbers - numbers % BLOCK_SIZE if numbers > BLOCK_SIZE else numbers)

    def window(self, group_size: int) -> int:
        """Chunks under way to each of the others, to begin with."""
        in_all = self.window_bytes // (_FLOAT_BYTES * self.chunk_size(group_size))
        return max(1, min(MAX_WINDOW, in_all // max(1, group_size - 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The numbers from `start` to just before `end`, which one member reduces in chunks of `chunk_size`."""

    start: int
    end: int
    chunk_size: int

    @property
    def num_chunks(self) -> int:
        """Number of chunks, of which the last may be shorter than the others."""
        return -(-(self.end - self.start) // self.chunk_size)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the float32 numbers in a whole chunk."""
        return _FLOAT_BYTES * self.chunk_size

    def chunk(self, index: int) -> slice:
        start = self.start + index * self.chunk_size
        return slice(start, min(start + self.chunk_size, self.end))

    def index_untrusted(self, start: int) -> int:
        index, rest = divmod(start - self.start, self.chunk_size)
        if rest or not 0 <= index < self.num_chunks:
            raise RemoteProtocolError(
                f"no chunk begins at {start}: the part goes from {self.start} to {self.end} in steps of "
                f"{self.chunk_size}"
            )
        return index


def parts_of(group: Group, size: int, *, chunk_size: int) -> tuple[Part, ...]:
    """The part of a vector of `size` numbers that each member reduces: parts lie in it in the order of slots."""
    members = group.members
    shares = peer_fractions([member.role for member in members], [member.speeds for member in members])
    lengths = split_by_shares(size, shares)
    parts, start = {}, 0
    for index in sorted(range(len(lengths)), key=group.slots.__getitem__):
        parts[index] = Part(start=start, end=start + lengths[index], chunk_size=chunk_size)
        start += lengths[index]
    return tuple(parts[index] for index in range(len(lengths)))


class ChunkName(NamedTuple):
    """The chunk that a call brings, and its sender's wishes; as in the table above."""

    group_id: bytes
    size: int
    start: int
    wish: int
    weight: float | None = None

    def body(self) -> Body:
        body = {"group": self.group_id, "size": self.size, "start": self.start, "wish": self.wish}
        return body if self.weight is None else {**body, "weight": self.weight}


def parse_name_untrusted(body: Body) -> ChunkName:
    """Read what `ChunkName.body` made."""
    group_id = GROUP_ID.read_untrusted(body.get("group"), "the group id")
    size, start = _NATURAL.of_untrusted(body, "size"), _NATURAL.of_untrusted(body, "start")
    wish, weight = ROOM.of_untrusted(body, "wish"), optional(_WEIGHT).of_untrusted(body, "weight")
    return ChunkName(group_id, size, start, wish, weight)
