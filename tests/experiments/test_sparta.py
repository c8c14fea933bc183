"""SPARTA over a vmapped axis of peers, against a plain loop in NumPy."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.less_traffic.sparta import sparta, sparta_masks

RNG = np.random.default_rng(0)
PEERS, RATE = 4, 0.1


def pmean(tree: Any, _: Any) -> Any:
    return jax.lax.pmean(tree, "peers")


def test_sparta_against_plain_loops() -> None:
    """theta <- theta - rate g; those of the mask then are their mean over peers, the others stay."""
    steps, share = 5, 0.4
    start = {name: np.tile(RNG.normal(size=2), (PEERS, 1)).astype(np.float32) for name in "abc"}
    grads = {name: RNG.normal(size=(steps, PEERS, 2)).astype(np.float32) for name in start}
    optimizer = sparta(optax.sgd(RATE), average=pmean, share=share, seed=5)
    params, state = start, jax.vmap(optimizer.init)(start)

    @jax.jit
    @partial(jax.vmap, axis_name="peers")
    def update(params: Any, state: Any, grad: Any) -> Any:
        updates, state = optimizer.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    theta, taken = {name: value.astype(np.float64) for name, value in start.items()}, 0
    for step in range(steps):
        params, state = update(params, state, {name: value[step] for name, value in grads.items()})
        masks = sparta_masks({name: np.zeros(2) for name in start}, step, share=share, seed=5)
        for name in start:
            theta[name] = theta[name] - RATE * grads[name][step]
            theta[name] = np.where(masks[name], theta[name].mean(axis=0), theta[name])
            taken += int(masks[name].sum())
    assert 0 < taken < 6 * steps
    for name in start:
        np.testing.assert_allclose(params[name], theta[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_sparta_takes_its_share() -> None:
    """A step takes 0.5 % of 100,000 parameters +- four standard deviations (22 each); the next step takes others; after
    400 steps 1 - 0.995^400 = 86.5 % have been taken once."""
    masks = [np.asarray(sparta_masks(jnp.zeros(100_000), step, share=0.005, seed=0)) for step in range(400)]
    assert all(abs(int(mask.sum()) - 500) < 4 * 22.4 + 1 for mask in masks[:10])
    assert (masks[0] & masks[1]).sum() < 15
    assert np.any(masks, axis=0).mean() == pytest.approx(1 - 0.995**400, abs=0.005)
