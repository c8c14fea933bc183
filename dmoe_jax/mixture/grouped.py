"""Experts of one machine called on their samples: pairs of a sample and an expert, grouped by expert.

The pairs are sorted by expert and cut into *blocks* of a few pairs of one expert, the last block of each expert padded.
A block gathers its expert's parameters once and is one call of `apply`: right for any expert, whatever is inside.

There are two ways to call the blocks. **All at once**, vmapped: memory holds a copy of the parameters for each block,
and for the backward pass what the experts compute on the way. **In turns**, a few blocks at a time: memory holds the
few copies alone, and the backward pass computes the forward pass again. It takes turns where the copies would be large,
and larger than the experts' inputs and outputs.

Axes: P pairs, numbered sample by sample.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dmoe_jax.arrays import PyTree
from dmoe_jax.experts.base import Expert
from dmoe_jax.mixture.local_update import WithDeltas, num_stacked

BLOCK_ROWS = 4
"""Pairs that share a copy of their expert's parameters, where experts have that many and rows are small. All at once, a
block has up to a quarter of an even share: more pad more. In turns it has up to half a share, for copies do not stay,
and blocks without pairs cost nothing."""
MOST_ROWS_IN_TURNS = 128
"""Most pairs of a block that has its turn: what the experts compute on the way does not grow with the rows."""
LARGE_COPIES = 32 << 20
"""Bytes of copies up to which all blocks are called at once."""
COPIES_OVER_ROWS = 8
"""Bytes that a row takes inside an expert over those of its inputs and outputs, about. All blocks are called at once,
too, if the copies are the smaller part; and where a row takes more than the parameters, as a sequence does, blocks have
few rows, since a row that only pads costs more than a copy."""
TURN_BYTES = 8 << 20
"""Bytes of copies in one turn, unless a single one has more."""

Keyed = dict[str, Array]
"""Arguments by name, batch first."""


class _Blocks(NamedTuple):
    """The pairs of each block. Blocks without pairs stand behind all others.

    Attributes:
      expert: the expert of the block.
      place: where the gradient of its parameters is added.
      pairs: the numbers of its pairs; P where it is padded.
      row_of: where each pair went, block * rows + row; beyond all rows for a pair without an expert.
    """

    expert: Int[Array, " blocks"]
    place: Int[Array, " blocks"]
    pairs: Int[Array, "blocks rows"]
    row_of: Int[Array, " pairs"]


def call_experts(
    expert: Expert,
    params: PyTree,
    chosen: Int[Array, "batch k"],
    inputs: tuple[Array, ...],
    keyed: Keyed,
) -> Float[Array, "batch k ..."]:
    """The chosen experts' outputs for each sample; zeros where none is chosen.

    It can be differentiated backwards, in turns not forwards.

    Args:
      params: stacked parameters, [E, ...], or `WithDeltas`.
      chosen: numbers of experts, E for none.
      inputs, keyed: the expert's inputs and dropout keys, batch first.

    Raises:
      ValueError: there are fewer deltas than experts that can be chosen.
    """
    num_experts = num_stacked(params)
    flat = chosen.reshape(-1)
    rows, turn = _plan(expert, params, flat.size, (*inputs, *keyed.values()))
    place = jnp.arange(num_experts)
    target, fixed = params, params
    if isinstance(params, WithDeltas):
        target, fixed = params.deltas, params.params
        num_deltas = num_stacked(target)
        if num_deltas < min(num_experts, flat.size):
            raise ValueError(f"{flat.size} calls of {num_experts} experts need as many deltas, got {num_deltas}")
        if num_deltas < num_experts:
            used = jnp.zeros(num_experts, bool).at[flat].set(True, mode="drop")
            place = jnp.maximum(jnp.cumsum(used) - 1, 0)
    blocks = _cut(flat, place, rows, turn)
    if turn:
        outputs = _in_turns(expert, turn, target, fixed, blocks, inputs, keyed)
    else:
        own = _gather(target, fixed, blocks) if isinstance(params, WithDeltas) else _of_experts(fixed, blocks)
        outputs = _of_pairs(_apply(expert, own, *_rows_of((inputs, keyed), blocks.pairs, flat.size)), blocks)
    return outputs.reshape(*chosen.shape, *outputs.shape[1:])


def _plan(expert: Expert, params: PyTree, num_pairs: int, samples: Sequence[Array]) -> tuple[int, int]:
    """(rows of a block, number of blocks that have their turn together; 0 for all at once)."""
    stacked = params.params if isinstance(params, WithDeltas) else params
    num_experts = num_stacked(stacked)
    own_bytes = max(1, sum(leaf.nbytes for leaf in jax.tree.leaves(stacked)) // num_experts)
    going_in = sum(math.prod(part.shape[1:]) * part.dtype.itemsize for part in samples)
    coming_out = math.prod(expert.output.shape) * jnp.dtype(expert.output.dtype).itemsize
    row_bytes = COPIES_OVER_ROWS * (going_in + coming_out)

    num_blocks = functools.partial(_num_blocks, num_pairs, num_experts)

    def cheapest(most: int) -> int:
        powers = (1 << power for power in range(most.bit_length()))
        return min(powers, key=lambda rows: num_blocks(rows) * (own_bytes + rows * row_bytes))

    # With few pairs for each expert, padding would cost more than gathering.
    rows = cheapest(_power_below(num_pairs // (4 * num_experts), least=BLOCK_ROWS))
    if own_bytes * num_blocks(rows) <= max(LARGE_COPIES, row_bytes * num_pairs):
        return rows, 0
    rows = cheapest(min(_power_below(num_pairs // (2 * num_experts), least=BLOCK_ROWS), MOST_ROWS_IN_TURNS))
    return rows, max(1, min(TURN_BYTES // own_bytes, num_blocks(rows)))


def _power_below(share: int, *, least: int) -> int:
    """A power of two up to the share, but at least `least`; 1 where there is no share."""
    return max(least, 1 << (share.bit_length() - 1)) if share else 1


def _num_blocks(num_pairs: int, num_experts: int, rows: int) -> int:
    """The most blocks that there can be, whatever was chosen."""
    return (num_pairs + min(num_experts, num_pairs) * (rows - 1)) // rows


def _cut(chosen: Int[Array, " pairs"], place: Int[Array, " num_experts"], rows: int, turn: int) -> _Blocks:
    num_pairs, num_experts = chosen.size, place.size
    num_blocks = _num_blocks(num_pairs, num_experts, rows)
    if turn:
        num_blocks = turn * -(-num_blocks // turn)
    order = jnp.argsort(chosen, stable=True)
    expert_of_pair = chosen[order]
    counts = jnp.zeros(num_experts, jnp.int32).at[chosen].add(1, mode="drop")
    blocks = -(-counts // rows)
    first_pair = (jnp.cumsum(counts) - counts).at[expert_of_pair].get(mode="clip")
    first_block = (jnp.cumsum(blocks) - blocks).at[expert_of_pair].get(mode="clip")
    row = first_block * rows + jnp.arange(num_pairs) - first_pair
    row = jnp.where(expert_of_pair < num_experts, row, num_blocks * rows)
    # A block without pairs is of an expert that has some, too: the others may hold anything.
    whose = jnp.full(num_blocks, jnp.minimum(expert_of_pair[0], num_experts - 1))
    whose = whose.at[row // rows].set(expert_of_pair, mode="drop")
    pairs = jnp.full(num_blocks * rows, num_pairs).at[row].set(order, mode="drop").reshape(num_blocks, rows)
    row_of = jnp.zeros(num_pairs, row.dtype).at[order].set(row)
    return _Blocks(whose, place[whose], pairs, row_of)


def _of_pairs(rows: Float[Array, "blocks rows ..."], blocks: _Blocks) -> Float[Array, "pairs ..."]:
    """Each pair's row; zeros for a pair without an expert."""
    return rows.reshape(-1, *rows.shape[2:]).at[blocks.row_of].get(mode="fill", fill_value=0)


def _rows_of(parts: PyTree, pairs: Int[Array, "blocks rows"], num_pairs: int) -> PyTree:
    """The samples of these pairs. What pads is a sample that exists: nobody looks at its output."""
    number = jnp.minimum(pairs, num_pairs - 1)
    return jax.tree.map(lambda part: part[number // (num_pairs // part.shape[0])], parts)


def _of_experts(params: PyTree, blocks: _Blocks) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[blocks.expert], params)


@jax.custom_vjp
def _gather(target: PyTree, params: PyTree, blocks: _Blocks) -> PyTree:
    """`_of_experts`, whose gradient goes to `target`, at the places of the blocks."""
    del target
    return _of_experts(params, blocks)


def _gather_forward(target: PyTree, params: PyTree, blocks: _Blocks) -> tuple[PyTree, Any]:
    return _of_experts(params, blocks), (target, blocks)


def _gather_backward(residual: Any, own_grads: PyTree) -> tuple[PyTree, None, None]:
    target, blocks = residual
    return _add(jax.tree.map(jnp.zeros_like, target), blocks, own_grads), None, None


_gather.defvjp(_gather_forward, _gather_backward)


def _add(grads: PyTree, blocks: _Blocks, own_grads: PyTree) -> PyTree:
    return jax.tree.map(lambda total, own: total.at[blocks.place].add(own), grads, own_grads)


def _apply(expert: Expert, own: PyTree, inputs: tuple[Array, ...], keyed: Keyed) -> Float[Array, "blocks rows ..."]:
    """One call for each block, with parameters of its own; all are [blocks, ...]."""
    outputs = jax.vmap(lambda own, inputs, keyed: expert.apply(own, *inputs, **keyed))(own, inputs, keyed)
    return cast(Array, outputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_turns(
    expert: Expert,
    turn: int,
    target: PyTree,
    params: PyTree,
    blocks: _Blocks,
    inputs: tuple[Array, ...],
    keyed: Keyed,
) -> Float[Array, "pairs ..."]:
    """The blocks' outputs for their pairs, `turn` blocks at a time; turns without pairs are skipped. Parameters have
    their gradient in `target`, at the places of the blocks."""
    del target
    num_pairs = blocks.row_of.size

    def one(_: None, these: _Blocks) -> tuple[None, Array]:
        def call() -> Array:
            own = _of_experts(params, these)
            return _apply(expert, own, *_rows_of((inputs, keyed), these.pairs, num_pairs))

        return None, _unless_empty(these, num_pairs, call)

    _, outputs = jax.lax.scan(one, None, _split(blocks, turn))
    return _of_pairs(outputs.reshape(-1, *outputs.shape[2:]), blocks)


def _in_turns_forward(expert: Expert, turn: int, *args: Any) -> tuple[Array, Any]:
    return _in_turns(expert, turn, *args), args


def _in_turns_backward(expert: Expert, turn: int, residual: Any, output_grads: Array) -> tuple[PyTree, ...]:
    """Compute each turn's forward pass again, and add gradients of parameters up where they belong, in place."""
    target, params, blocks, inputs, keyed = residual
    num_pairs = blocks.row_of.size
    moving = [jnp.issubdtype(part.dtype, jnp.inexact) for part in inputs]

    def one(grads: PyTree, these: _Blocks) -> tuple[PyTree, list[Array]]:
        def pull() -> tuple[PyTree, list[Array]]:
            own = _of_experts(params, these)
            there, keys = _rows_of((inputs, keyed), these.pairs, num_pairs)

            def call(own: PyTree, given: list[Array]) -> Array:
                rest = iter(given)
                merged = tuple(next(rest) if moves else part for moves, part in zip(moving, there, strict=True))
                return _apply(expert, own, merged, keys)

            _, pull_back = jax.vjp(call, own, [part for moves, part in zip(moving, there, strict=True) if moves])
            own_output_grads = output_grads.at[these.pairs].get(mode="fill", fill_value=0)
            return cast(tuple[PyTree, list[Array]], pull_back(own_output_grads))

        own_grads, input_grads = _unless_empty(these, num_pairs, pull)
        return _add(grads, these, own_grads), input_grads

    grads, row_grads = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, target), _split(blocks, turn))
    found: Iterator[Array] = iter(row_grads)

    def of_input(part: Array) -> Array:
        rows = next(found)
        of_pairs = _of_pairs(rows.reshape(-1, *rows.shape[2:]), blocks)
        return of_pairs.reshape(part.shape[0], -1, *part.shape[1:]).sum(axis=1)

    of_inputs = tuple(of_input(part) if moves else None for moves, part in zip(moving, inputs, strict=True))
    return grads, None, None, of_inputs, None


_in_turns.defvjp(_in_turns_forward, _in_turns_backward)


def _split(blocks: _Blocks, turn: int) -> _Blocks:
    """[turns, turn, ...] for a scan. `row_of` is no part of a turn."""
    expert, place, pairs = (part.reshape(-1, turn, *part.shape[1:]) for part in blocks[:3])
    return _Blocks(expert, place, pairs, jnp.zeros((expert.shape[0], 0), jnp.int32))


def _unless_empty(these: _Blocks, num_pairs: int, call: Any) -> Any:
    """The result of the call, or zeros where the turn has no pairs."""
    shapes = jax.eval_shape(call)
    is_empty = these.pairs[0, 0] >= num_pairs
    return jax.lax.cond(is_empty, lambda: jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), shapes), call)
