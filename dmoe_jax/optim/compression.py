"""Error feedback: send the few largest values of each block in two or four bits, and keep the rest for later.

    e <- decay * e + x        x: a gradient or a pseudo-gradient; e: the residual
    c  = Q(TopK(e))           the largest values of each block, quantised: they are sent
    e <- e - c

(SparseLoCo, arXiv 2508.15706, algorithm 1; without the decay it is the error feedback of Seide et al. 2014 and of Deep
Gradient Compression, arXiv 1712.01887. With the decay the residual stands in for outer momentum, so the outer optimiser
of pseudo-gradients should have none: `sgd(1.0)`.)

Each array is cut into blocks of its own, in C order; the residual is float32 whatever the parameters are. What
`sparse_vector` makes of it decodes elsewhere, bit for bit, to the tree that was taken off the residual here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dmoe_jax.arrays import PyTree
from dmoe_net.wire.sparse import LEAST_LEVEL, BlockGroup, SparseBlocks, SparseCoding, SparseVector

_FITTING_ROUNDS = 4
"""Rounds of choosing levels and scale in turn (Lloyd's algorithm): the fourth changes the error by less than 1 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFeedback:
    """Settings of the compressor."""

    coding: SparseCoding = field(default_factory=SparseCoding)
    """Number of values of a block that are sent, and their bits."""
    decay: float = 0.95
    """Share of the residual that is left from one averaging to the next, 0 to 1. SparseLoCo found 0.95 for
    pseudo-gradients; for gradients of every step 1 is the classic choice."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must be from 0 to 1, got {self.decay}")


class Compressed(NamedTuple):
    """A tree after compression."""

    parts: tuple[SparseBlocks, ...]
    """The values that are sent, as `dmoe_net.wire.sparse.SparseVector` has them."""
    tree: PyTree
    """The same as arrays of the tree's shapes, float32, as receivers decode them."""
    residual: PyTree
    """The rest, which is kept, of the same shapes, float32."""


def zero_residual(params: PyTree) -> PyTree:
    """Nothing kept yet: zeros of the shapes of the parameters, float32."""
    return jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), jnp.float32), params)


def compress(tree: PyTree, residual: PyTree, feedback: ErrorFeedback) -> Compressed:
    """One round of error feedback, to be traced or not; see the equations at the head of this module.

    A block with a value that is not finite is sent with a scale of NaN, so that the fault is seen; its residual is no
    number either, and the caller keeps the old one.

    Args:
      tree: floating-point arrays.
      residual: as `zero_residual` or the last round left it, of the tree's structure.
    """
    leaves: list[Array]
    structure: Any
    leaves, structure = jax.tree.flatten(tree)
    if jax.tree.structure(residual) != structure:
        raise ValueError(f"the residual has another structure than the tree: {jax.tree.structure(residual)!r:.200}")
    totals = [
        (feedback.decay * left + jnp.asarray(leaf, jnp.float32)).reshape(-1)
        for leaf, left in zip(leaves, jax.tree.leaves(residual), strict=True)
    ]
    groups = [(place, group) for place, total in enumerate(totals) for group in feedback.coding.blocks(total.size)]
    blocks = [
        totals[place][group.start : group.start + group.num_blocks * group.length].reshape(-1, group.length)
        for place, group in groups
    ]
    parts, dense = _compress_groups(blocks, [group for _, group in groups], feedback.coding)
    sent, kept = [], []
    for place, (leaf, total) in enumerate(zip(leaves, totals, strict=True)):
        own = [rows.reshape(-1) for (of, _), rows in zip(groups, dense, strict=True) if of == place]
        flat = jnp.concatenate(own) if own else total
        sent.append(flat.reshape(jnp.shape(leaf)))
        kept.append((total - flat).reshape(jnp.shape(leaf)))
    return Compressed(tuple(parts), jax.tree.unflatten(structure, sent), jax.tree.unflatten(structure, kept))


def _compress_groups(
    rows: Sequence[Array], groups: Sequence[BlockGroup], coding: SparseCoding
) -> tuple[list[SparseBlocks], list[Array]]:
    """The values of each group that are sent, sparse and dense."""
    # Blocks of one shape go through together, from whichever array: a model has few shapes, and many arrays of each.
    alike: dict[tuple[int, int], list[int]] = {}
    for number, group in enumerate(groups):
        alike.setdefault((group.length, group.kept), []).append(number)
    parts: dict[int, SparseBlocks] = {}
    dense: dict[int, Array] = {}
    for (_, kept), numbers in alike.items():
        together = jnp.concatenate([rows[number] for number in numbers])
        blocks = _largest_of_blocks(together, kept, coding)
        values = blocks.levels.astype(jnp.float32) * blocks.scales[:, jnp.newaxis]
        values = jnp.put_along_axis(jnp.zeros_like(together), blocks.indices, values, axis=1, inplace=False)
        ends = np.cumsum([groups[number].num_blocks for number in numbers])[:-1].tolist()
        split = [jnp.split(each, ends) for each in (*blocks, values)]
        for number, *part, whole in zip(numbers, *split, strict=True):
            parts[number], dense[number] = SparseBlocks(*part), whole
    order = range(len(groups))
    return [parts[number] for number in order], [dense[number] for number in order]


def _largest_of_blocks(rows: Float[Array, "blocks length"], kept: int, coding: SparseCoding) -> SparseBlocks:
    """The `kept` largest values of each block, without zeros, rounded to scale * level with the least squared error."""
    magnitudes, indices = jax.lax.top_k(jnp.abs(rows), kept)
    is_there = magnitudes > 0
    least, most = LEAST_LEVEL, coding.greatest_level
    # Any start does: with all values at the middle level, the scale is right on the average.
    count = jnp.maximum(is_there.sum(axis=1), 1)
    scales = magnitudes.sum(axis=1) / count * (2 / (least + most))
    for _ in range(_FITTING_ROUNDS):
        levels = _nearest(magnitudes, scales, least, most) * is_there
        squares = jnp.maximum((levels * levels).sum(axis=1), 1)
        scales = (magnitudes * levels).sum(axis=1) / squares
    # A scale below the normal numbers is as good as none, and processors differ in what they make of it; a sum of
    # squares that overflows, or a value that is no number, is a fault, which must be seen.
    scales = jnp.where(scales < jnp.finfo(jnp.float32).tiny, 0, scales)
    is_finite = jnp.all(jnp.isfinite(rows), axis=1) & jnp.isfinite(scales * most)
    levels = _nearest(magnitudes, scales, least, most) * is_there * (scales > 0)[:, jnp.newaxis]
    signs = jnp.where(jnp.take_along_axis(rows, indices, axis=1) < 0, -1, 1)
    return SparseBlocks(indices, (levels * signs).astype(jnp.int8), jnp.where(is_finite, scales, jnp.nan))


def sparse_vector(parts: Sequence[SparseBlocks], like: PyTree, coding: SparseCoding) -> SparseVector:
    """The parts of a tree that was compressed with this coding, as a vector on the host for `dmoe_net.wire.sparse`.

    `like` is a tree of the same shapes, for instance the parameters.
    """
    sizes = tuple(int(np.prod(np.shape(leaf), dtype=np.int64)) for leaf in jax.tree.leaves(like))
    on_host = tuple(SparseBlocks(*(np.asarray(each) for each in part)) for part in parts)
    return SparseVector(coding=coding, sizes=sizes, parts=on_host)


def _nearest(magnitudes: Array, scales: Array, least: int, most: int) -> Array:
    """The levels nearest to the magnitudes, as float32."""
    safe = jnp.where(scales > 0, scales, 1)[:, jnp.newaxis]
    return jnp.clip(jnp.round(magnitudes / safe), least, most)
