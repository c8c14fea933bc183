"""Streaming DiLoCo (Douillard et al., arXiv 2501.18512): fragments of a model are averaged at different times, and the
average arrives while training goes on.

The bytes are those of DiLoCo. But a line needs to carry only a fragment at a time, and nobody waits for it: with P
fragments the peak is P times lower, and with an overlap of tau steps an average may take as long as these.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

from dmoe_jax.optim.moshpit import Average
from dmoe_jax.optim.moshpit_state import typed_like
from dmoe_jax.optim.peer_axis import wide
from dmoe_jax.types import PyTree

OUTER_RATE, OUTER_MOMENTUM = 0.4, 0.9
"""Of the Nesterov momentum that the paper found best."""


class StreamingDiLoCoState(NamedTuple):
    """State of `streaming_diloco`.

    Attributes:
      inner: of the optimiser inside.
      steps: updates so far.
      rounds: averagings so far, each of one fragment; the number of the next.
      anchor: the parameters after each fragment's last outer step: the same at all peers.
      under_way: the averages that are to arrive, float32, zero where there is none.
      outer: of the outer optimiser, one for each fragment.
    """

    inner: PyTree
    steps: Int[Array, ""]
    rounds: Int[Array, ""]
    anchor: PyTree
    under_way: PyTree
    outer: tuple[PyTree, ...]


def streaming_diloco(
    inner: optax.GradientTransformation,
    *,
    average: Average,
    every: int,
    fragments: int | PyTree,
    overlap: int = 0,
    mixing: float = 0.5,
    outer: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An optimiser that averages pseudo-gradients a fragment at a time (algorithm 2 of the paper).

    With H = `every`, fragment p of P and its offset t_p = floor(p H / P), at step t:

        (t - t_p) mod H = 0:        D_p = mean over peers of (anchor_p - theta_p)             leaves
        (t - t_p - tau) mod H = 0:  anchor_p <- OuterOpt(anchor_p, D_p)                       has arrived
                                    theta_p  <- alpha theta_p + (1 - alpha) anchor_p

    One fragment, no overlap and no mixing (alpha = 0) are DiLoCo: `moshpit_average(what="pseudo_gradients")`.
    Here the average is computed when it leaves, and kept for tau steps: the oracle for a network that takes so long.
    An average that is not finite is lost: the fragment goes on to its next one.

    Args:
      inner: any optimiser.
      average: (list of arrays, round_number) -> list, over an axis of `vmap` or `shard_map`; as of `moshpit_average`.
      every: updates between two averagings of the same fragment.
      fragments: how many; array i of the model is then in fragment i mod P, which spreads the layers of each over the
        depth of the model (the paper's "strided"). Or a tree with the number of each array's fragment, from 0.
      overlap: tau, updates from the averaging to its use; below `every`.
      mixing: alpha, how much of their own parameters peers keep then. The paper uses 0.5.
      outer: default: SGD with Nesterov momentum, rate 0.4 and 0.9.

    Raises:
      ValueError: one of the numbers is out of its range.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}")
    if not 0 <= overlap < every:
        raise ValueError(f"overlap must be from 0 to every - 1 = {every - 1}, got {overlap}")
    if not 0 <= mixing <= 1:
        raise ValueError(f"mixing must be from 0 to 1, got {mixing}")
    if isinstance(fragments, int) and not 1 <= fragments <= every:
        raise ValueError(f"fragments must be from 1 to every = {every}, got {fragments}")
    if outer is None:
        outer = optax.sgd(OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    streaming = _Streaming(
        optax.with_extra_args_support(inner), outer, average, every, fragments, overlap, float(mixing)
    )
    return optax.GradientTransformationExtraArgs(streaming.init, streaming.update)


@dataclass(frozen=True, slots=True, eq=False)
class _Streaming:
    """Arguments of `streaming_diloco`, and what they make of an update."""

    inner: optax.GradientTransformationExtraArgs
    outer: optax.GradientTransformation
    average: Average
    every: int
    fragments: int | PyTree
    overlap: int
    mixing: float

    def init(self, params: PyTree) -> StreamingDiLoCoState:
        leaves = jax.tree.leaves(params)
        return StreamingDiLoCoState(
            inner=self.inner.init(params),
            steps=jnp.zeros((), jnp.int32),
            rounds=jnp.zeros((), jnp.int32),
            anchor=jax.tree.map(jnp.array, params),
            under_way=jax.tree.map(lambda leaf: jnp.zeros_like(wide(leaf)), params),
            outer=tuple(self.outer.init(_pick(leaves, members)) for members in self.members(params)),
        )

    def members(self, params: PyTree) -> list[list[int]]:
        """The places among the leaves of each fragment's arrays."""
        count = len(jax.tree.leaves(params))
        fragments = self.fragments
        if isinstance(fragments, int):
            numbers = [place % fragments for place in range(count)]
            total = min(fragments, count)
        else:
            numbers = jax.tree.leaves(fragments)
            total = max(numbers, default=-1) + 1
        if len(numbers) != count or set(numbers) != set(range(total)) or total > self.every:
            raise ValueError(
                f"expected a fragment from 0 to at most {self.every - 1} for {count} arrays, got {numbers}"
            )
        return [[place for place in range(count) if numbers[place] == fragment] for fragment in range(total)]

    def update(
        self, updates: PyTree, state: StreamingDiLoCoState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, StreamingDiLoCoState]:
        """One update."""
        if params is None:
            raise ValueError("streaming_diloco wants the parameters: update(grads, state, params)")
        updates, inner = self.inner.update(updates, state.inner, params, **extra)
        steps, rounds = state.steps + 1, state.rounds
        before, structure = jax.tree.flatten(params)
        moved = [wide(own) + change for own, change in zip(before, jax.tree.leaves(updates), strict=True)]
        anchor, under_way = jax.tree.leaves(state.anchor), jax.tree.leaves(state.under_way)
        outer = list(state.outer)
        members = self.members(params)
        for number, places in enumerate(members):
            offset = number * self.every // len(members)
            leaves_now = (steps - offset) % self.every == 0
            # The first time is at the offset, or where this is 0 after a whole period: before, nothing has left.
            has_left = steps - self.overlap >= (offset or self.every)
            arrives_now = ((steps - offset - self.overlap) % self.every == 0) & has_left
            ways = [wide(anchor[place]) - moved[place] for place in places]
            flying = jax.lax.cond(
                leaves_now, self._averaged, lambda _, kept, __: kept, ways, _pick(under_way, places), rounds
            )
            rounds = rounds + leaves_now
            mine, fixed = _pick(moved, places), _pick(anchor, places)
            mine, fixed, outer[number] = jax.lax.cond(
                arrives_now & _all_finite(flying), self._outer_step, lambda _, *kept: kept, flying, mine, fixed,
                outer[number],
            )  # fmt: skip
            for place, way, own, new in zip(places, flying, mine, fixed, strict=True):
                under_way[place], moved[place], anchor[place] = way, own, new
        change = [(new - own).astype(own.dtype) for new, own in zip(moved, before, strict=True)]
        fixed_tree, flying_tree = (jax.tree.unflatten(structure, each) for each in (anchor, under_way))
        return jax.tree.unflatten(structure, change), StreamingDiLoCoState(
            inner, steps, rounds, fixed_tree, flying_tree, tuple(outer)
        )

    def _averaged(self, ways: list[Array], _: list[Array], rounds: Array) -> list[Array]:
        return [wide(leaf) for leaf in self.average(ways, rounds)]

    def _outer_step(
        self, arrived: list[Array], mine: list[Array], anchor: list[Array], outer: PyTree
    ) -> tuple[list[Array], list[Array], PyTree]:
        """(parameters, anchor, outer state) of a fragment whose average is there."""
        updates, outer = self.outer.update(typed_like(arrived, anchor), outer, anchor)
        anchor = optax.apply_updates(anchor, updates)
        kept, taken = self.mixing, 1 - self.mixing
        return [kept * own + taken * wide(new) for own, new in zip(mine, anchor, strict=True)], anchor, outer


def _pick(leaves: Sequence[Array], places: Sequence[int]) -> list[Array]:
    return [leaves[place] for place in places]


def _all_finite(leaves: Sequence[Array]) -> Bool[Array, ""]:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))
