"""Beam search: exhaustive search on full grids, and holes that cost a look-up but never an expert."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmoe_jax.directory.grid import Coordinates
from dmoe_jax.routing.beam_search import Children, search_beams


def children_of(experts: set[Coordinates], grid_dims: int) -> dict[Coordinates, list[int]]:
    """The true children of every partial path that leads to one of these experts."""
    found: dict[Coordinates, set[int]] = {(): set()}
    for expert in experts:
        for length in range(grid_dims):
            found.setdefault(expert[:length], set()).add(expert[length])
    return {path: sorted(followers) for path, followers in found.items()}


def run_search(scores: list[np.ndarray], grid: Children, *, k: int) -> tuple[np.ndarray, list[tuple[Coordinates, ...]]]:
    """Drive the search to its end, with what each round asked; unlisted paths have no children."""
    known: dict[Coordinates, list[int]] = {}
    rounds = []
    while True:
        result, missing = search_beams(scores, known, k=k)
        if not missing:
            return result, rounds
        assert (result == -1).all(), "nobody is chosen before all is known"
        assert not known.keys() & set(missing), "asked twice"
        rounds.append(missing)
        known |= {path: list(grid.get(path, [])) for path in missing}


def chosen(result: np.ndarray, sample: int) -> list[Coordinates]:
    """The experts of one sample, best first."""
    return [tuple(row) for row in result[sample].tolist() if row[0] >= 0]


def exhaustive(scores: list[np.ndarray], experts: set[Coordinates], sample: int, k: int) -> list[Coordinates]:
    """The oracle: every expert, sorted by score, the lower coordinates first among equals."""
    total = {e: sum(m[sample, i] for m, i in zip(scores, e, strict=True)) for e in experts}
    return sorted(experts, key=lambda e: (-total[e], e))[:k]


def draw(rng: np.random.Generator, batch: int, grid_size: tuple[int, ...]) -> list[np.ndarray]:
    return [rng.normal(size=(batch, size)) for size in grid_size]


def full(grid_size: tuple[int, ...]) -> set[Coordinates]:
    return set(itertools.product(*map(range, grid_size)))


@given(st.integers(0, 2**32 - 1), st.sampled_from([(5,), (4, 4), (3, 4, 3), (2, 2, 2, 2)]), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_equals_exhaustive_search_whatever_the_grid_and_the_ties(seed: int, grid_size: tuple[int, ...], k: int) -> None:
    """Also with integer scores, whose ties go to lower coordinates, and with more experts wanted than there are."""
    rng = np.random.default_rng(seed)
    scores = [rng.integers(0, 3, size=(3, size)).astype(np.float32) for size in grid_size]
    experts = full(grid_size)
    result, rounds = run_search(scores, children_of(experts, len(grid_size)), k=k)
    for sample in range(3):
        assert chosen(result, sample) == exhaustive(scores, experts, sample, k)
    assert len(rounds) == len(grid_size), "one look-up for each dimension serves the whole batch"


@given(st.integers(0, 2**32 - 1), st.floats(0.0, 1.0), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_holes_never_cost_an_expert(seed: int, density: float, k: int) -> None:
    """Each sample gets min(k, living) distinct living experts, even when announced paths are dead."""
    rng = np.random.default_rng(seed)
    grid_size = (4, 4, 4)
    experts = {e for e in sorted(full(grid_size)) if rng.random() < density}
    grid = children_of(experts, 3)
    grid |= {path: [0, 1, 2, 3] for path in [(), (0,), (1,)]}  # rows that outlived their experts
    scores = draw(rng, 5, grid_size)
    result, _ = run_search(scores, grid, k=k)
    for sample in range(5):
        found = chosen(result, sample)
        assert len(found) == len(set(found)) == min(k, len(experts))
        assert set(found) <= experts
        assert found == exhaustive(scores, set(found), sample, k)


def test_with_as_many_beams_as_rows_holes_cost_no_score_either() -> None:
    """Then nothing is cut off, and the best are found exactly."""
    rng = np.random.default_rng(3)
    experts = {e for e in sorted(full((6, 6))) if rng.random() < 0.3}
    scores = draw(rng, 20, (6, 6))
    result, _ = run_search(scores, children_of(experts, 2), k=6)
    for sample in range(20):
        assert chosen(result, sample) == exhaustive(scores, experts, sample, 6)


def test_a_dead_row_is_replaced_by_the_next_best() -> None:
    """The best row is announced but empty: the search asks for the second best and takes its expert."""
    scores = [np.array([[3.0, 2.0, 1.0]]), np.array([[0.0, 1.0]])]
    result, rounds = run_search(scores, {(): [0, 1, 2], (0,): [], (1,): [0], (2,): [1]}, k=1)
    assert rounds == [((),), ((0,),), ((1,),)]
    assert chosen(result, 0) == [(1, 0)]


def test_one_round_asks_for_the_union_of_the_batch() -> None:
    """Two samples with different favourites share a look-up, sorted and without repetition."""
    scores = [np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]), np.zeros((3, 1))]
    _, rounds = run_search(scores, {(): [0, 1, 2], (0,): [0], (2,): [0]}, k=1)
    assert rounds == [((),), ((0,), (2,))]


def test_minus_infinity_forbids_a_coordinate() -> None:
    """A row scored -inf is never chosen and never looked up, even if fewer than k experts remain."""
    scores = [np.array([[-np.inf, 1.0]]), np.array([[0.0, 1.0]])]
    result, rounds = run_search(scores, children_of(full((2, 2)), 2), k=3)
    assert chosen(result, 0) == [(1, 1), (1, 0)]
    assert rounds == [((),), ((1,),)]
    assert result[0, 2].tolist() == [-1, -1]


@pytest.mark.parametrize("grid", [{}, {(): [3, 99, -1]}, {(): [0], (0,): [7]}])
def test_an_empty_grid_gives_nobody(grid: dict[Coordinates, list[int]]) -> None:
    """No living expert, or only ones outside the grid, or no sample: empty places, no error."""
    assert (run_search([np.zeros((2, 3)), np.zeros((2, 3))], grid, k=2)[0] == -1).all()
    result, rounds = run_search([np.zeros((0, 3)), np.zeros((0, 2))], grid, k=2)
    assert (result.shape, rounds) == ((0, 2, 2), [])


ROW = np.zeros((1, 3))


@pytest.mark.parametrize(
    ("scores", "k"),
    [([], 1), ([ROW[0]], 1), ([np.zeros((2, 3)), ROW], 1), ([ROW * np.nan], 1), ([ROW + np.inf], 1), ([ROW], 0)],
)
def test_wrong_arguments_are_refused(scores: list[np.ndarray], k: int) -> None:
    """Shapes that do not fit, NaN, and impossible sizes raise ValueError."""
    with pytest.raises(ValueError, match=r"expected|finite"):
        search_beams(scores, {}, k=k)
