"""Which numbers travel together: every member's part of the vector, cut into chunks, and how a call names one.

Part and chunks follow from the group, the size of the vector and the size of a chunk, which all members must have
alike. A call says what it takes the size of the vector to be and where in it its chunk begins, so that a disagreement
is refused and not averaged.

    call    {"group": 16 bytes, "size": numbers in the vector, "start": of the chunk}   one float32 tensor: the values
    answer  {"senders": vectors in the mean, "difference": bool}                        one float32 tensor: their mean,
                                                                           or the mean minus the values as received
"""

from dataclasses import dataclass

from net.averaging.grouping.group import GROUP_ID_BYTES, MAX_GROUP_SIZE, Group
from net.errors import RemoteProtocolError
from net.rpc.base import Body
from net.wire.fields import FLAG, integer, octets

_GROUP, _NATURAL, _SENDERS = octets(GROUP_ID_BYTES, GROUP_ID_BYTES), integer(0, 2**63 - 1), integer(1, MAX_GROUP_SIZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one member reduces. The last chunk may be shorter than the others."""

    start: int
    """Of the part in the vector."""
    end: int
    """Just past it; an empty part ends where it starts."""
    chunk_size: int
    """Numbers in a chunk."""

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end or self.chunk_size < 1:
            raise ValueError(f"a part goes upwards from 0 in chunks of at least 1 number, got {self}")

    @property
    def size(self) -> int:
        """Numbers in the part."""
        return self.end - self.start

    @property
    def num_chunks(self) -> int:
        """None, if the part is empty."""
        return -(-self.size // self.chunk_size)

    def chunk(self, index: int) -> slice:
        """Where the chunk lies in the vector."""
        start = self.start + index * self.chunk_size
        return slice(start, min(start + self.chunk_size, self.end))

    def chunk_len(self, index: int) -> int:
        """Numbers in this chunk."""
        where = self.chunk(index)
        return int(where.stop - where.start)

    def index_untrusted(self, start: int) -> int:
        """The chunk that begins at `start`.

        Raises:
          RemoteProtocolError: none does.
        """
        index, rest = divmod(start - self.start, self.chunk_size)
        if rest or not 0 <= index < self.num_chunks:
            raise RemoteProtocolError(
                f"no chunk begins at {start}: the part goes from {self.start} to {self.end} in steps of "
                f"{self.chunk_size}"
            )
        return index


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkName:
    """Which chunk a call brings."""

    group_id: bytes
    """Of which all-reduce."""
    size: int
    """Numbers in the whole vector."""
    start: int
    """Of the chunk in the vector."""

    def body(self) -> Body:
        """The body of the call."""
        return {"group": self.group_id, "size": self.size, "start": self.start}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkAnswer:
    """What came of a chunk, beside the values."""

    num_senders: int
    """Vectors in the mean."""
    is_difference: bool
    """Whether the values are to be added to what was sent; else they are the mean itself."""

    def body(self) -> Body:
        """The body of the answer."""
        return {"senders": self.num_senders, "difference": self.is_difference}


def parts_of(group: Group, size: int, *, chunk_size: int) -> tuple[Part, ...]:
    """The part of every member, in member order."""
    return tuple(Part(start=start, end=end, chunk_size=chunk_size) for start, end in group.parts(size))


def parse_name_untrusted(body: Body) -> ChunkName:
    """Read what `ChunkName.body` made.

    Raises:
      RemoteProtocolError: it did not make this.
    """
    return ChunkName(
        group_id=_GROUP.read_untrusted(body.get("group"), "the group id"),
        size=_NATURAL.of_untrusted(body, "size"),
        start=_NATURAL.of_untrusted(body, "start"),
    )


def parse_answer_untrusted(body: Body) -> ChunkAnswer:
    """Read what `ChunkAnswer.body` made.

    Raises:
      RemoteProtocolError: it did not make this.
    """
    return ChunkAnswer(
        num_senders=_SENDERS.of_untrusted(body, "senders"), is_difference=FLAG.of_untrusted(body, "difference")
    )
