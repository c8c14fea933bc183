"""Updates of stacked experts, each with an optimiser of its own; of all of them, or of the chosen ones alone.

The gradient with respect to stacked parameters [E, ...] is as large as they are, though a step with few samples chooses
few experts. With `chosen_value_and_grad` and `update_chosen`, where at most U = min(E, samples * experts a sample)
experts can be chosen, gradients are [U, ...], and the chosen ones take a step. Both ways give the same numbers.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from dmoe_jax.arrays import PyTree, in_type_of

TURN_BYTES = 64 << 10
"""Bytes of an expert's parameters from which on, on a CPU, the chosen take their steps one after the other, which keeps
each in the cache: in a fifth of the time of all at once with Adam and 512 KB, in four times as long with 8 KB."""


class WithDeltas(NamedTuple):
    """Stacked parameters whose gradient is that of the chosen experts alone; stands in for them in `local_mixture`.

    Attributes:
      params: [E, ...], constants to the gradient.
      deltas: [U, ...], zeros from `zero_deltas`, to be differentiated by; they are added to nothing. The gradient of
        the chosen expert that comes n-th by its number stands at n; where U = E, every expert's stands at its number.
    """

    params: PyTree
    deltas: PyTree


def num_stacked(params: PyTree) -> int:
    """E, the number of experts whose parameters these are."""
    leaves = jax.tree.leaves(params.params if isinstance(params, WithDeltas) else params)
    return int(leaves[0].shape[0])


def zero_deltas(params: PyTree, num_calls: int) -> PyTree:
    """Zeros like the parameters of as many experts as so many calls can choose: min(E, num_calls) of them."""
    num_deltas = min(num_stacked(params), num_calls)
    return jax.tree.map(lambda leaf: jnp.zeros((num_deltas, *leaf.shape[1:]), leaf.dtype), params)


def chosen_value_and_grad(
    loss: Callable[..., tuple[Float[Array, ""], Any]],
    layers_of: Callable[[Any], Iterable[Any]] = lambda aux: aux.layers,
) -> Callable[..., tuple[tuple[Float[Array, ""], Any], tuple[PyTree, tuple[PyTree, ...]]]]:
    """`jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)`, with gradients of the chosen experts alone.

    Args:
      loss: (trunk, experts, ...) -> (loss, aux), such as a model's `local_forward`; nothing but `local_mixture` looks
        into the stacked parameters of each layer in experts.
      layers_of: aux -> for each layer an object with a `mask` [batch, slots], such as `LayerAux`: it says how many
        experts the layer can choose at most.

    Returns: a function of the same arguments -> ((loss, aux), (trunk_grads, expert_grads)), to be traced; expert_grads
      has [U, ...] for each layer, for `update_chosen`.
    """

    def run(trunk: PyTree, experts: Sequence[PyTree], *args: Any) -> Any:
        _, aux = jax.eval_shape(loss, trunk, experts, *args)
        layers = zip(experts, layers_of(aux), strict=True)
        deltas = tuple(zero_deltas(params, layer.mask.size) for params, layer in layers)

        def of_deltas(trunk: PyTree, deltas: Sequence[PyTree]) -> Any:
            return loss(trunk, tuple(map(WithDeltas, experts, deltas)), *args)

        return jax.value_and_grad(of_deltas, argnums=(0, 1), has_aux=True)(trunk, deltas)

    return run


def init_opt_states(optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Stacked optimiser states. Each expert has its own step count, which `optimizer.init(params)` would share."""
    return jax.vmap(optimizer.init)(params)


def update_experts(
    optimizer: optax.GradientTransformation,
    params: PyTree,
    opt_state: PyTree,
    grads: PyTree,
    used: Bool[Array, " num_experts"],
) -> tuple[PyTree, PyTree]:
    """One optimiser step for each expert that took part, as its node would take it.

    The step is vmapped over the experts: clipping by global norm, step counts and trust ratios stay each expert's
    own. Experts that took no part keep their parameters and state to the bit (with momentum or weight decay, a zero
    gradient would still move them).

    Args:
      optimizer: applied to each expert separately.
      params, grads: stacked.
      opt_state: stacked states, from `init_opt_states`.
      used: True for each expert that takes the step.

    Returns: (params, opt_state).
    """

    def step(params: PyTree, opt_state: PyTree, grads: PyTree, used: Bool[Array, ""]) -> tuple[PyTree, PyTree]:
        new = _stepped(optimizer, params, opt_state, grads)
        kept = jax.tree.map(lambda after, before: jnp.where(used, after, before), new, (params, opt_state))
        return cast(tuple[PyTree, PyTree], kept)

    return jax.vmap(step)(params, opt_state, grads, used)


def update_chosen(
    optimizer: optax.GradientTransformation,
    params: PyTree,
    opt_state: PyTree,
    grads: PyTree,
    used: Bool[Array, " num_experts"],
) -> tuple[PyTree, PyTree]:
    """`update_experts` from the gradients of `chosen_value_and_grad`: only what belongs to chosen experts is touched.

    Where parameters and states are donated, they are changed in place.

    Args:
      optimizer, params, opt_state: as of `update_experts`.
      grads: [U, ...], see `WithDeltas`.
      used: True for each expert that was called, at most U: `layer.load > 0`.

    Returns: (params, opt_state).
    """
    in_turns, at_once = (functools.partial(way, optimizer) for way in (_in_turns, _at_once))
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) // num_stacked(params)
    if num_bytes < TURN_BYTES:
        return at_once((params, opt_state), grads, used)
    updated = jax.lax.platform_dependent((params, opt_state), grads, used, cpu=in_turns, default=at_once)
    return cast(tuple[PyTree, PyTree], updated)


def _in_turns(
    optimizer: optax.GradientTransformation,
    before: tuple[PyTree, PyTree],
    grads: PyTree,
    used: Bool[Array, " num_experts"],
) -> tuple[PyTree, PyTree]:
    """The chosen experts' steps one after the other, each in place."""
    num_deltas, count = num_stacked(grads), jnp.sum(used)
    (numbers,) = jnp.nonzero(used, size=num_deltas)

    def step(turn: Int[Array, ""], everyone: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        number = numbers[turn]
        place = number if num_deltas >= used.size else turn
        own = jax.tree.map(lambda leaf: leaf[number], everyone)
        own_grads = jax.tree.map(lambda leaf: leaf[place], grads)

        # Behind the last of the chosen, expert 0 stays as it is. The condition also keeps the compiler from mixing
        # what reads with what writes: it would copy all experts in every turn.
        new = jax.lax.cond(turn < count, functools.partial(_stepped, optimizer), lambda *own: own[:2], *own, own_grads)
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=number, axis=0)
        return cast(tuple[PyTree, PyTree], jax.tree.map(put, everyone, new))

    return jax.lax.fori_loop(0, num_deltas, step, before)


def _at_once(
    optimizer: optax.GradientTransformation,
    before: tuple[PyTree, PyTree],
    grads: PyTree,
    used: Bool[Array, " num_experts"],
) -> tuple[PyTree, PyTree]:
    """The chosen experts' steps side by side, on copies that are written back; without copies if all may be chosen."""
    num_experts, num_deltas = used.size, num_stacked(grads)
    if num_deltas >= num_experts:
        return update_experts(optimizer, *before, grads, used)
    (found,) = jnp.nonzero(used, size=num_deltas)
    place = jnp.arange(num_deltas)
    # Beyond the last expert nothing is written; numbers that grow keep the promises made to the scatter.
    numbers = jnp.where(place < jnp.sum(used), found, num_experts + place)
    params, state = jax.tree.map(lambda leaf: leaf.at[numbers].get(mode="clip", indices_are_sorted=True), before)
    new = jax.vmap(functools.partial(_stepped, optimizer))(params, state, grads)

    def put(leaf: Array, after: Array) -> Array:
        return leaf.at[numbers].set(after, mode="drop", indices_are_sorted=True, unique_indices=True)

    return cast(tuple[PyTree, PyTree], jax.tree.map(put, before, new))


def _stepped(
    optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree, grads: PyTree
) -> tuple[PyTree, PyTree]:
    """One expert's step; what the optimiser makes wider than it was is narrowed again."""
    updates, new_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), jax.tree.map(in_type_of, new_state, opt_state)
