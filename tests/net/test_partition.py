"""Parts, chunks, and how calls name them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmoe_net.averaging.grouping.group import Group, Member, Role
from dmoe_net.averaging.reduction.partition import MAX_WEIGHT, ChunkName, Part, parse_name_untrusted, parts_of
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import Address, PeerId
from dmoe_net.wire.codec import decode_untrusted, encode

NAME = ChunkName(group_id=b"g" * 16, size=100, start=8, wish=3, weight=2.5)


def test_chunks_of_a_part() -> None:
    """Numbers 10 to 19 in fours: two whole chunks and one of two."""
    part = Part(start=10, end=20, chunk_size=4)
    assert [part.chunk(index) for index in range(part.num_chunks)] == [slice(10, 14), slice(14, 18), slice(18, 20)]
    assert [part.index_untrusted(start) for start in (10, 14, 18)] == [0, 1, 2]


@pytest.mark.parametrize("start", [0, 6, 9, 11, 19, 20, 22, 10**30])
def test_a_chunk_begins_where_chunks_begin(start: int) -> None:
    """Anything else is refused: before, between and behind them."""
    with pytest.raises(RemoteProtocolError, match="no chunk begins"):
        Part(start=10, end=20, chunk_size=4).index_untrusted(start)


def test_an_empty_part_has_no_chunks() -> None:
    """Not even one at its start."""
    part = Part(start=10, end=10, chunk_size=4)
    assert part.num_chunks == 0
    with pytest.raises(RemoteProtocolError):
        part.index_untrusted(10)


@given(size=st.integers(0, 200), count=st.integers(1, 9), chunk_size=st.integers(1, 30))
def test_chunks_of_all_parts_cover_the_vector_once(size: int, count: int, chunk_size: int) -> None:
    """Whatever the sizes, and with a client among the members."""
    rng = random.Random(0)
    members = [Member(peer_id=PeerId.draw(rng), address=Address("a", 1), wanted_slot=slot) for slot in range(count)]
    members.append(Member(peer_id=PeerId.draw(rng), address=None, role=Role.CLIENT))
    group = Group(group_id=bytes(16), members=tuple(members), side=count)
    covered = [
        number
        for part in parts_of(group, size, chunk_size=chunk_size)
        for index in range(part.num_chunks)
        for number in range(*part.chunk(index).indices(size))
    ]
    assert sorted(covered) == list(range(size))


def test_names_survive_the_wire() -> None:
    """A name is read as it was written."""
    assert parse_name_untrusted(decode_untrusted(encode(dict(NAME.body())))) == NAME


@pytest.mark.parametrize(
    "changes",
    [
        *({"group": b"short"}, {"group": "g" * 16}, {"group": None}, {"size": -1}, {"size": True}, {"start": 1.0}),
        *({"wish": None}, {"wish": -1}, {"weight": -1.0}, {"weight": float("inf")}, {"weight": 2 * MAX_WEIGHT}),
        *({"weight": 1}, {"weight": True}, {"weight": "1"}, {"weight": [1.0]}),
    ],
)
def test_names_that_are_none(changes: dict[str, object]) -> None:
    """A name is refused if a field has another length, another type or a value out of bounds."""
    with pytest.raises(RemoteProtocolError):
        parse_name_untrusted({**NAME.body(), **changes})
