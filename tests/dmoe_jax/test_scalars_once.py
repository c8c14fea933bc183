"""What is computed again from its scalars: the same result, without the reductions."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax.node.scalars_once import scalars_once

REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_or", "reduce_and")
OPTIMIZERS = {
    "clipped adam": optax.chain(optax.clip_by_global_norm(0.25), optax.adam(1e-2)),
    "lamb": optax.lamb(1e-2),
    "no scalars": optax.sgd(1e-2),
    "random": optax.chain(optax.add_noise(0.1, 0.5, 3), optax.sgd(1e-2)),
}


def step_of(optimizer: optax.GradientTransformation) -> Any:
    def step(state: Any, grads: Any) -> Any:
        params, opt_state = state
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_again_is_the_same(name: str) -> None:
    """To rounding, for optimisers with and without numbers that they take from whole arrays."""
    optimizer, rng = OPTIMIZERS[name], np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(3, 4)), "bias": rng.normal(size=4)}
    params = jax.tree.map(jnp.float32, params)
    state, grads = (params, optimizer.init(params)), jax.tree.map(lambda leaf: 3 * leaf, params)
    result, scalars, again = scalars_once(step_of(optimizer), state, grads)
    expected = step_of(optimizer)(state, grads)
    for found in (result, again(scalars, state, grads)):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), _as_data(found), _as_data(expected))


def test_again_reduces_nothing() -> None:
    """The norm of the gradients is among the scalars, and no array is summed up a second time."""
    optimizer, params = OPTIMIZERS["clipped adam"], {"kernel": jnp.ones((3, 4))}
    state = params, optimizer.init(params)
    _, scalars, again = scalars_once(step_of(optimizer), state, params)
    assert any(np.allclose(scalar, np.sqrt(12)) for scalar in scalars)
    once, twice = (str(jax.make_jaxpr(each)(*given)) for each, given in _programs(optimizer, again, scalars, state))
    assert any(name in once for name in REDUCTIONS)
    assert not any(name in twice for name in REDUCTIONS)


def test_scalars_are_what_it_is_given() -> None:
    """Not what it would compute: another norm makes another result."""
    result, (total,), again = scalars_once(lambda x: x / x.sum(), jnp.arange(1.0, 4.0))
    assert float(total) == 6
    np.testing.assert_allclose(result, [1 / 6, 2 / 6, 3 / 6])
    np.testing.assert_allclose(again([jnp.float32(2)], jnp.arange(1.0, 4.0)), [0.5, 1.0, 1.5])


def _programs(optimizer: Any, again: Any, scalars: Any, state: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    return [(step_of(optimizer), (state, state[0])), (again, (scalars, state, state[0]))]


def _as_data(tree: Any) -> Any:
    def data(leaf: Any) -> Any:
        return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    return jax.tree.map(data, tree)
