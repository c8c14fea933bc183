"""Gradients and updates of the chosen experts alone, against those of all."""

from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax.experts.base import Expert, TensorSpec
from dmoe_jax.mixture import local_update
from dmoe_jax.mixture.local_update import (
    TURN_BYTES,
    chosen_value_and_grad,
    init_opt_states,
    update_chosen,
    update_experts,
)
from dmoe_jax.models.layers import dmoe_layer
from dmoe_jax.routing.product_key import product_key

GRID = (4, 4)
ROUTER = product_key(GRID, init_scale=1.0)
X = TensorSpec(name="x", shape=(3,), dtype="float32", differentiable=True)
EXPERT = Expert("small", lambda key: jax.random.normal(key, (3,)), lambda w, x: x + jnp.tanh(w * x), (X,), X)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1))


def loss(gates: Any, experts: Any, x: Any, alive: Any) -> Any:
    """Two layers: what the second chooses depends on the first."""
    layers = []
    for gate, params, own_alive in zip(gates, experts, alive, strict=True):
        x, aux = dmoe_layer(EXPERT, params, ROUTER, 2, ROUTER.scores(gate, x), own_alive, x)
        layers.append(aux)
    return jnp.sum(jnp.sin(x)), layers


@jax.jit
def start(key: Any) -> Any:
    gates = [ROUTER.init(own, 3) for own in jax.random.split(key)]
    experts = [jax.vmap(EXPERT.init)(jax.random.split(own, 16)) for own in jax.random.split(key)]
    return gates, experts, [init_opt_states(OPTIMIZER, layer) for layer in experts]


@pytest.mark.parametrize("turn_bytes", [0, TURN_BYTES])
def test_updates_of_the_chosen_equal_updates_of_all(turn_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of two samples, which choose at most 4 of 16 experts a layer; in the second one expert lives.

    One chosen expert after the other or all at once.

    Loss, gradients of the trunk, parameters and states agree; whoever was not chosen does not move by a bit.
    """
    monkeypatch.setattr(local_update, "TURN_BYTES", turn_bytes)
    gates, experts, states = start(jax.random.key(0))

    def step(gradient: Any, update: Any) -> Any:
        @jax.jit
        def run(experts: Any, states: Any, *args: Any) -> Any:
            (value, layers), (grads, expert_grads) = gradient(gates, experts, *args)
            used = [layer.load > 0 for layer in layers]
            new = [update(OPTIMIZER, *own) for own in zip(experts, states, expert_grads, used, strict=True)]
            return (value, grads), expert_grads, used, [each[0] for each in new], [each[1] for each in new]

        return run

    of_all = step(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), update_experts)
    of_chosen = step(chosen_value_and_grad(loss, layers_of=lambda layers: layers), update_chosen)
    rng, ours, theirs = np.random.default_rng(0), [experts, states], [experts, states]
    for number in range(3):
        x = jnp.asarray(rng.normal(size=(2, 3)), jnp.float32)
        # Then one slot of each sample has no expert.
        alive = jnp.ones((2, *GRID), bool) if number != 1 else jnp.zeros((2, *GRID), bool).at[:, 1, 1].set(True)
        before = ours
        expected, _, used, *theirs = of_all(*theirs, x, alive)
        found, compact, used, *ours = of_chosen(*ours, x, alive)
        close = (found, [*ours]), (expected, [*theirs])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-5), *close)
        assert {leaf.shape[0] for leaf in jax.tree.leaves(compact)} == {4}
        for layer, is_used in enumerate(used):
            assert 0 < int(is_used.sum()) <= 4
            still = np.flatnonzero(~np.asarray(is_used))
            pairs = (
                jax.tree.leaves((before[0][layer], before[1][layer])),
                jax.tree.leaves((ours[0][layer], ours[1][layer])),
            )
            for old, new in zip(*pairs, strict=True):
                np.testing.assert_array_equal(np.asarray(new)[still], np.asarray(old)[still])


@pytest.mark.parametrize("num_grads", [3, 20])
def test_large_experts_take_their_steps_in_place(num_grads: int) -> None:
    """One after the other, also where there is a gradient for every expert: nothing is copied but one expert's share.

    A compiler that saw through the loop would copy all experts in every turn: the same numbers, in twenty times the
    time.
    """
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.normal(size=(20, 100, 200)), jnp.float32) for name in ("in", "out")}
    assert params["in"].nbytes // 20 * 2 > TURN_BYTES
    states = init_opt_states(OPTIMIZER, params)
    all_grads = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), params)
    used = jnp.zeros(20, bool).at[jnp.array([0, 7, 19])].set(True)
    expected = update_experts(OPTIMIZER, params, states, all_grads, used)
    grads = all_grads if num_grads == 20 else jax.tree.map(lambda leaf: leaf[used], all_grads)
    step = jax.jit(lambda *args: update_chosen(OPTIMIZER, *args), donate_argnums=(0, 1))
    analysis = step.lower(params, states, grads, used).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < params["in"].nbytes
    found = step(params, states, grads, used)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-5), found, expected)


@pytest.mark.parametrize("turn_bytes", [0, TURN_BYTES])
def test_updates_can_be_transformed(turn_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Side by side for several seeds, and differentiated by the gradients, as meta-learning does; bfloat16 stays so."""
    monkeypatch.setattr(local_update, "TURN_BYTES", turn_bytes)
    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.normal(size=(2, 5, 3)), jnp.bfloat16)
    grads = jnp.asarray(rng.normal(size=(2, 2, 3)), jnp.float32)  # wider than the parameters
    used = jnp.asarray([[True, False, False, True, False], [False, True, False, False, False]])
    optimizer = optax.sgd(0.5, momentum=0.9)
    update = partial(update_chosen, optimizer)
    both = jax.vmap(update)(params, jax.vmap(partial(init_opt_states, optimizer))(params), grads, used)
    assert both[0].dtype == jnp.bfloat16
    for seed in range(2):
        one = update(params[seed], init_opt_states(optimizer, params[seed]), grads[seed], used[seed])
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(itemgetter(seed), both), one)
        np.testing.assert_array_equal(np.flatnonzero((one[0] != params[seed]).any(axis=1)), np.flatnonzero(used[seed]))
    noisy = optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(1)), optax.sgd(0.5))
    new, _ = jax.jit(partial(update_chosen, noisy))(params[0], init_opt_states(noisy, params[0]), grads[0], used[0])
    np.testing.assert_array_equal(np.flatnonzero((new != params[0]).any(axis=1)), [0, 3])
    start = jnp.zeros((5, 3))
    sums = jax.grad(lambda own: jnp.sum(update(start, init_opt_states(optimizer, start), own, used[0])[0]))(grads[0])
    np.testing.assert_allclose(sums, np.full((2, 3), -0.5))
