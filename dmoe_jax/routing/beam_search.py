"""Beam search over a grid of experts of which only the living are worth finding (Learning@home, section 3.2).

Scores are additive over the grid's dimensions, so the best experts are found dimension by dimension: keep the best
prefixes, ask which coordinates may follow, extend. On a grid without holes the result is that of exhaustive search.

`search_beams` is pure and works with what is known of the grid so far. Either it returns the choice, or it names the
prefixes whose children it has to know; the caller asks for them (once for the whole batch) and calls again. A prefix
that turns out to lead to no living expert drops out, and the next best one takes its place. Since every prefix that
stays leads to at least one expert and the beam is k wide, each sample gets min(k, living experts) experts:
holes and dead rows cost a look-up, never an expert. (Which k of a grid with holes they are remains a heuristic: an
expert whose prefix fell out of the beam is not seen, though it may beat those of better prefixes.)

A bias for each cell (`Scores.bias`) makes scores that are not additive. A prefix is then ranked by the best cell behind
it, as if all were alive: at most k prefixes hold the k best cells, and no other prefix has a better rank. So without
holes the result is exact here, too, and only the prefixes that it needs are looked up.
"""

import itertools
import math
import operator
from collections.abc import Mapping, Sequence

import numpy as np

Children = Mapping[tuple[int, ...], Sequence[int]]
"""Partial path -> the coordinates that may follow. Empty: the path leads nowhere. Absent: not known."""


def search_beams(
    scores: Sequence[np.ndarray], children: Children, *, k: int, bias: np.ndarray | None = None
) -> tuple[np.ndarray, tuple[tuple[int, ...], ...]]:
    """The best k living experts for each sample: score(u) = sum_i scores[i][u_i] + bias[u].

    Equal scores are ordered by coordinates, the lower first. A score of -inf means: never choose this coordinate.

    Args:
      scores: for each grid dimension [batch, grid_i], float.
      children: what is known of the grid. Coordinates outside the grid are ignored.
      k: experts wanted for each sample, and prefixes kept on the way.
      bias: of every cell, row-major over the grid; None for none.

    Returns:
      int64 [batch, k, dims], the chosen experts, best first, -1 in the places that stay empty; and the partial paths
      whose children must be known before the search can go on, sorted. While there are any, nobody is chosen.

    Raises:
      ValueError: if the scores are not matrices of one batch, contain NaN or +inf, k is not positive, or the bias has
        another size than the grid.
    """
    matrices = _check(scores, k)
    ranks = None if bias is None else _ranks(matrices, np.asarray(bias, np.float64))
    batch = len(matrices[0])
    chosen = np.full((batch, k, len(matrices)), -1, np.int64)
    sizes = [matrix.shape[1] for matrix in matrices]
    living = _prune(children, sizes)
    paths = np.zeros((1, 0), np.int64)  # [paths, dims so far], in lexicographic order
    beams = np.zeros((batch, 1), np.int64)  # [batch, beam]: rows of `paths`, best first; -1: none
    totals = np.zeros((batch, 1))
    for dim, matrix in enumerate(matrices):
        used = np.unique(beams[beams >= 0]).tolist()
        missing = [path for row in used if (path := tuple(paths[row].tolist())) not in living]
        if missing or not used:
            return chosen, tuple(missing)
        table = _child_table(paths, used, living)
        candidates = np.where(beams[..., None] >= 0, table[beams], -1).reshape(batch, -1)
        if ranks is None:
            gains = np.take_along_axis(matrix, np.maximum(candidates, 0), axis=1)
            sums = np.repeat(totals, table.shape[1], axis=1) + gains
        else:
            cells = np.zeros(1, np.int64)
            if dim:
                cells = np.atleast_1d(np.ravel_multi_index(tuple(paths.T), sizes[:dim]))
            numbers = np.repeat(cells[beams], table.shape[1], axis=1) * sizes[dim] + candidates
            sums = np.take_along_axis(ranks[dim], np.maximum(numbers, 0), axis=1)
        sums = np.where(candidates >= 0, sums, -np.inf)
        paths, beams, totals = _extend(paths, beams, candidates, sums, sizes[dim], keep=k)
    chosen[:, : beams.shape[1]][beams >= 0] = paths[beams[beams >= 0]]
    return chosen, ()


def _check(scores: Sequence[np.ndarray], k: int) -> list[np.ndarray]:
    if k < 1:
        raise ValueError(f"expected k of at least 1, got {k}")
    matrices = [np.asarray(matrix, np.float64) for matrix in scores]
    shapes = [matrix.shape for matrix in matrices]
    if not shapes or any(len(shape) != 2 or shape[0] != shapes[0][0] or shape[1] < 1 for shape in shapes):
        raise ValueError(f"expected scores of shapes [batch, grid_i] with one batch, got {shapes}")
    if any(np.isnan(matrix).any() or np.isposinf(matrix).any() for matrix in matrices):
        raise ValueError("scores must be finite or -inf, got NaN or +inf")
    return matrices


def _prune(children: Children, grid_size: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    """Leave out the children that lie outside the grid or are known to lead nowhere, from the leaves up."""
    living: dict[tuple[int, ...], list[int]] = {}
    for path in sorted(children, key=len, reverse=True):
        if len(path) >= len(grid_size):
            continue
        inside = sorted({child for child in children[path] if 0 <= child < grid_size[len(path)]})
        living[path] = [child for child in inside if living.get((*path, child), True)]
    return living


def _child_table(paths: np.ndarray, used: list[int], living: Mapping[tuple[int, ...], list[int]]) -> np.ndarray:
    """[paths, most children], int64: the children of each used path, ascending, padded with -1."""
    followers = {row: living[tuple(paths[row].tolist())] for row in used}
    table = np.full((len(paths), max(map(len, followers.values()))), -1, np.int64)
    for row, found in followers.items():
        table[row, : len(found)] = found
    return table


def _ranks(matrices: Sequence[np.ndarray], bias: np.ndarray) -> list[np.ndarray]:
    """For each dimension [batch, prefixes up to it]: the best score of the cells behind a prefix."""
    batch, sizes = len(matrices[0]), [matrix.shape[1] for matrix in matrices]
    if bias.shape != (math.prod(sizes),) or not np.isfinite(bias).all():
        raise ValueError(f"expected a finite bias for each of the {math.prod(sizes)} cells, got shape {bias.shape}")
    total = np.zeros((batch, 1))
    for matrix in matrices:
        total = (total[:, :, None] + matrix[:, None, :]).reshape(batch, -1)
    total = total + bias
    counts = itertools.accumulate(sizes, operator.mul)
    return [total.reshape(batch, count, -1).max(axis=2) for count in counts]


def _extend(
    paths: np.ndarray, beams: np.ndarray, candidates: np.ndarray, sums: np.ndarray, grid_size: int, *, keep: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One dimension further: of all children of its beams each sample keeps the best, best first.

    Args:
      paths: what the beams point to. beams: of each sample.
      candidates: [batch, beam x children], the children of each beam, -1 for none. sums: their scores.
      grid_size: extent of the new dimension. keep: how many.

    Returns: the paths that the beams now point to, the beams, and their totals.
    """
    width = candidates.shape[1] // beams.shape[1]
    # Since `paths` are in lexicographic order, these numbers order the new ones so.
    names = np.repeat(beams, width, axis=1) * grid_size + candidates
    order = np.lexsort((names, -sums))[:, :keep]
    names, sums = np.take_along_axis(names, order, axis=1), np.take_along_axis(sums, order, axis=1)
    is_filled = ~np.isneginf(sums)
    unique = np.unique(names[is_filled])
    new_paths = np.concatenate([paths[unique // grid_size], (unique % grid_size)[:, None]], axis=1)
    return new_paths, np.where(is_filled, np.searchsorted(unique, names), -1), sums
