"""The rule of Moshpit All-Reduce: who meets whom, and where they go; and the facts on which a group agrees."""

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmoe_net.averaging.grouping.group import Group, Member, Role
from dmoe_net.averaging.grouping.group_key import MoshpitGrid, assign_slots, group_key
from dmoe_net.averaging.reduction.partition import parts_of
from dmoe_net.averaging.speeds import Speeds
from dmoe_net.identity import Address, PeerId

GRIDS = [MoshpitGrid(side=3, dims=2), MoshpitGrid(side=4, dims=3), MoshpitGrid(side=5, dims=1)]


def groups_of(grid: MoshpitGrid, cells: dict[int, int], round_number: int) -> dict[str, list[int]]:
    """Peers by the key of their group."""
    groups: dict[str, list[int]] = {}
    for peer, cell in cells.items():
        groups.setdefault(group_key("x", grid, cell, round_number), []).append(peer)
    return groups


@pytest.mark.parametrize("grid", GRIDS)
def test_a_full_grid_is_exact_after_one_round_for_each_axis(grid: MoshpitGrid) -> None:
    """Every group has `side` members in every round, and after `dims` rounds all hold the mean."""
    values = np.random.default_rng(0).normal(size=grid.num_cells)
    mean = values.mean()
    cells = {peer: peer for peer in range(grid.num_cells)}
    for round_number in range(3 * grid.dims):
        groups = groups_of(grid, cells, round_number)
        assert sorted(map(len, groups.values())) == [grid.side] * grid.num_groups
        for members in groups.values():
            values[members] = values[members].mean()
        if round_number + 1 >= grid.dims:
            np.testing.assert_allclose(values, mean, atol=1e-12)
        elif grid.dims > 1:
            assert np.abs(values - mean).max() > 1e-3


@pytest.mark.parametrize("grid", GRIDS)
def test_those_who_met_do_not_meet_again_for_dims_rounds(grid: MoshpitGrid) -> None:
    """Members of one group are in different ones in the next dims - 1 rounds, also when all changed their slots."""
    cells = {peer: peer for peer in range(grid.num_cells)}
    for first in range(grid.dims + 1):
        met = [set(itertools.combinations(m, 2)) for m in groups_of(grid, cells, first).values()]
        pairs = set().union(*met)
        for members in groups_of(grid, cells, first).values():
            for peer, slot in zip(members, reversed(range(grid.side)), strict=True):
                cells[peer] = grid.move(cells[peer], first, slot)
        for later in range(first + 1, first + grid.dims):
            for members in groups_of(grid, cells, later).values():
                assert not pairs & set(itertools.combinations(members, 2))


@pytest.mark.parametrize("grid", GRIDS)
def test_key_and_group_number_say_the_same(grid: MoshpitGrid) -> None:
    """Two peers share a key exactly if they share a group number, and slots tell the members of a group apart."""
    for round_number in range(2 * grid.dims):
        keys: dict[str, set[int]] = {}
        for cell in range(grid.num_cells):
            keys.setdefault(group_key("x", grid, cell, round_number), set()).add(grid.group(cell, round_number))
        assert sorted(number for numbers in keys.values() for number in numbers) == list(range(grid.num_groups))
        slots = {(grid.group(cell, round_number), grid.slot(cell, round_number)) for cell in range(grid.num_cells)}
        assert len(slots) == grid.num_cells


def test_a_key_has_one_coordinate_less_than_the_grid_has_axes() -> None:
    """Cell 7 of 3 x 3 has the digits 1 and 2; round 0 goes along the first, so the key is the second."""
    grid = MoshpitGrid(side=3, dims=2)
    assert group_key("trunk", grid, 7, 0) == "trunk.moshpit.2"
    assert group_key("trunk", grid, 7, 1) == "trunk.moshpit.1"
    assert group_key("trunk", MoshpitGrid(side=3, dims=1), 2, 5) == "trunk.moshpit"
    cube = MoshpitGrid(side=10, dims=3)
    assert [cube.coordinates(321, t) for t in range(4)] == [(2, 3), (3, 1), (1, 2), (2, 3)]


@given(st.data())
def test_moving_changes_the_digit_of_the_axis_alone(data: Any) -> None:
    """Afterwards the slot is the chunk (modulo the side), and the group of that round is the same."""
    grid = data.draw(st.builds(MoshpitGrid, side=st.integers(1, 9), dims=st.integers(1, 4)))
    cell = data.draw(st.integers(0, grid.num_cells - 1))
    round_number, chunk = data.draw(st.integers(0, 99)), data.draw(st.integers(0, 30))
    moved = grid.move(cell, round_number, chunk)
    assert 0 <= moved < grid.num_cells
    assert grid.slot(moved, round_number) == chunk % grid.side
    assert grid.group(moved, round_number) == grid.group(cell, round_number)


@given(st.integers(1, 9).flatmap(lambda side: st.tuples(st.just(side), st.lists(st.integers(0, side - 1)))))
def test_slots_are_distinct_and_kept_where_free(case: tuple[int, list[int]]) -> None:
    """The first to want a slot has it, nobody shares one, and they go past the side only if there are more members."""
    side, wanted = case
    slots = assign_slots(wanted, side)
    assert len(set(slots)) == len(wanted)
    assert all(0 <= slot < max(side, len(wanted)) for slot in slots)
    for member, slot in enumerate(wanted):
        if slot not in wanted[:member]:
            assert slots[member] == slot


def test_arrays_of_cells_are_arrays_of_places() -> None:
    grid = MoshpitGrid(side=4, dims=3)
    cells = np.arange(grid.num_cells, dtype=np.int32)
    for round_number in range(5):
        traced = np.asarray(round_number, np.int32)
        np.testing.assert_array_equal(grid.group(cells, traced), [grid.group(int(c), round_number) for c in cells])
        moved = grid.move(cells, traced, np.full_like(cells, 6))
        np.testing.assert_array_equal(moved, [grid.move(int(c), round_number, 6) for c in cells])


@pytest.mark.parametrize(("side", "dims"), [(0, 2), (3, 0), (2**16, 2)])
def test_an_impossible_grid_is_refused(side: int, dims: int) -> None:
    with pytest.raises(ValueError, match=str(side)):
        MoshpitGrid(side=side, dims=dims)


def test_a_slot_beyond_the_side_is_refused() -> None:
    with pytest.raises(ValueError, match="got 3"):
        assign_slots([0, 3], 3)


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
    """Slots 2, 0, 1 of a vector of 10: the middle thirds fall to their owners; 10 = 4 + 3 + 3 in member order. A client
    has an empty part; of two that want one slot, the first has it."""
    assert parts(group(member(2), member(0), member(1)), 10) == ((6, 10), (0, 3), (3, 6))
    assembled = group(member(1), member(1), member(3, role=Role.CLIENT, address=None))
    assert assembled.slots == (1, 0, 3)
    assert parts(assembled, 6) == ((3, 6), (0, 3), (6, 6))


def test_impossible_members_are_refused() -> None:
    wrong = [({"role": Role.CLIENT}, "a client has no address"), ({"address": None}, "others have one")]
    wrong += [({"weight": weight}, why) for weight, why in ((0.0, "from 1e-09"), (math.nan, "nan"), (1.7e308, "1.7e"))]
    for facts, message in wrong:
        with pytest.raises(ValueError, match=message):
            member(**facts)
    assert member(role=Role.AUXILIARY, weight=0.0).weight == 0.0


def test_impossible_speeds_are_refused() -> None:
    """They would spoil the shares of the whole group; the message says which, and what is allowed."""
    for name in ("up", "down"):
        with pytest.raises(ValueError, match=f"bandwidth {name} is from 1000 to 1e\\+11 bytes a second, got 1e-300"):
            Speeds(**{name: 1e-300})
    with pytest.raises(ValueError, match=r"reducing is from 1000 to .*, got nan"):
        Speeds(reducing=float("nan"))
    assert Speeds(up=1e6).or_else(Speeds(up=2e6, down=3e6)) == Speeds(up=1e6, down=3e6)


def test_impossible_groups_are_refused() -> None:
    once, client, outside = member(), member(role=Role.CLIENT, address=None), member(7)
    for members, message in {(): "1 to 1024", (client,): "clients", (outside,): "got 7", (once, once): "twice"}.items():
        with pytest.raises(ValueError, match=message):
            group(*members)


def test_a_stranger_has_no_place() -> None:
    stranger = member()
    with pytest.raises(ValueError, match=stranger.peer_id.short):
        group(member()).index(stranger.peer_id)
