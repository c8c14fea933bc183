"""Facts on which the members of a group agree."""

import random

import pytest

from dmoe_net.averaging.grouping.group import Group, Member, Role
from dmoe_net.averaging.reduction.partition import parts_of
from dmoe_net.averaging.speeds import Speeds
from dmoe_net.identity import Address, PeerId

RNG = random.Random(0)


def member(slot: int = 0, **facts: object) -> Member:
    """A member that can be called."""
    facts = {"peer_id": PeerId.draw(RNG), "address": Address("a", 1), "wanted_slot": slot} | facts
    return Member(**facts)  # type: ignore[arg-type]


def group(*members: Member, side: int = 4) -> Group:
    """A group of these members."""
    return Group(group_id=bytes(16), members=members, side=side)


def parts(group: Group, size: int) -> tuple[tuple[int, int], ...]:
    """(start, end) of what each member reduces."""
    return tuple((part.start, part.end) for part in parts_of(group, size, chunk_size=1))


def test_parts_cover_the_vector_in_the_order_of_slots() -> None:
    """Slots 2, 0, 1 of a vector of 10: the middle thirds fall to their owners; 10 = 4 + 3 + 3 in member order."""
    assert parts(group(member(2), member(0), member(1)), 10) == ((6, 10), (0, 3), (3, 6))


def test_clients_and_collisions() -> None:
    """A client has an empty part; of two that want one slot, the first has it."""
    assembled = group(member(1), member(1), member(3, role=Role.CLIENT, address=None))
    assert assembled.slots == (1, 0, 3)
    assert parts(assembled, 6) == ((3, 6), (0, 3), (6, 6))


def test_a_vector_shorter_than_the_group() -> None:
    """Some parts are empty; together they are the vector."""
    short = parts(group(*(member(slot) for slot in range(4))), 3)
    assert sorted(short) == [(0, 1), (1, 2), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"role": Role.CLIENT}, "a client has no address"),
        ({"address": None}, "others have one"),
        ({"weight": 0.0}, "weight of a vector is from 1e-09"),
        ({"weight": float("nan")}, "got nan"),
        ({"weight": 1.7e308}, "got 1.7e"),
    ],
)
def test_impossible_members_are_refused(facts: dict[str, object], message: str) -> None:
    """Weights that cannot be added up; only clients are without an address."""
    with pytest.raises(ValueError, match=message):
        member(**facts)
    assert member(role=Role.AUXILIARY, weight=0.0).weight == 0.0


def test_impossible_speeds_are_refused() -> None:
    """Numbers that would spoil the shares of the whole group; the message says which, and what is allowed."""
    for name in ("up", "down"):
        with pytest.raises(ValueError, match=f"bandwidth {name} is from 1000 to 1e\\+11 bytes a second, got 1e-300"):
            Speeds(**{name: 1e-300})
    with pytest.raises(ValueError, match=r"reducing is from 1000 to .*, got nan"):
        Speeds(reducing=float("nan"))
    assert Speeds(up=1e6).or_else(Speeds(up=2e6, down=3e6)) == Speeds(up=1e6, down=3e6)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ((), "1 to 1024"),
        ((member(role=Role.CLIENT, address=None),), "clients"),
        ((member(7),), "got 7"),
    ],
)
def test_impossible_groups_are_refused(members: tuple[Member, ...], message: str) -> None:
    """Nobody in it, nobody to reduce, a slot outside the grid."""
    with pytest.raises(ValueError, match=message):
        group(*members)


def test_a_peer_is_in_a_group_once() -> None:
    """A group names its members by peer id."""
    once = member()
    with pytest.raises(ValueError, match="twice"):
        group(once, once)


def test_a_stranger_has_no_place() -> None:
    """Its name is in the message."""
    stranger = member()
    with pytest.raises(ValueError, match=stranger.peer_id.short):
        group(member()).index(stranger.peer_id)
