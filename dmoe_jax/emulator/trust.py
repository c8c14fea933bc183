"""Trust, in place of a look at every number that an emulator writes.

A swarm does not make an update that is not finite. To know that of an update, all that is new must be computed, and
looked at, before any of it is written, which takes as long as everything else that an expert does. So a piece of an
order is first run trusting that all is finite. What has become infinite, or no number, stays so, and one look at the
end of the piece finds it; then the piece is run again from its beginning, carefully.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from dmoe_jax.emulator.state import SwarmState
from dmoe_jax.experts.base import Expert
from dmoe_jax.types import PyTree


def keeps_what_is_infinite(expert: Expert, optimizer: optax.GradientTransformation | None) -> bool:
    """True if an update leaves no finite number where its optimiser's state had none. Parameters do: steps are added.

    Tried with infinities and with NaN, in one array of the state at a time.
    """
    if optimizer is None:
        return True
    update = optax.with_extra_args_support(optimizer).update
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), jax.eval_shape(expert.init, jax.random.key(0)))
    leaves, treedef = jax.tree.flatten(optimizer.init(params))

    @jax.jit
    def stay(leaves: list[Any]) -> list[Any]:
        _, state = update(params, jax.tree.unflatten(treedef, leaves), params, staleness=jnp.float32(1))
        return [~jnp.isfinite(leaf).any() for leaf in jax.tree.leaves(state)]

    for place, leaf in enumerate(leaves):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            for value in (jnp.inf, jnp.nan):
                if not stay([*leaves[:place], jnp.full_like(leaf, value), *leaves[place + 1 :]])[place]:
                    return False
    return True


def doubts(state: SwarmState) -> Any:
    """int32: how many numbers of the experts are infinite or none, and how many updates were. In the compiled program.

    A piece of a trusting run is what a careful run would have made of it if this is the same after it as before.
    """
    kept: PyTree = [(layer.params, layer.opt_state) for layer in state.experts]
    numbers = [leaf for leaf in jax.tree.leaves(kept) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return sum((jnp.sum(~jnp.isfinite(leaf), dtype=jnp.int32) for leaf in numbers), state.rejected)
