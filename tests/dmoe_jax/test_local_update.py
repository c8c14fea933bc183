"""Gradients and updates of the chosen experts alone, against those of all."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dmoe_jax.mixture.local_update import chosen_value_and_grad, init_opt_states, update_chosen, update_experts
from dmoe_jax.models import mlp
from dmoe_jax.routing.product_key import product_key

CONFIG = mlp.MLPConfig(input_dim=3, num_classes=2, d_model=4, num_layers=2, grid_size=(4, 4), k_best=2, expansion=1)
ROUTER = product_key((4, 4), init_scale=1.0)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1))


def test_updates_of_the_chosen_equal_updates_of_all() -> None:
    """Three steps of two samples, which choose at most 4 of 16 experts a layer, one of them dead in between.

    Loss, gradients of the trunk, parameters and states agree; whoever was not chosen does not move by a bit.
    """
    trunk = mlp.init_trunk(jax.random.key(0), CONFIG, ROUTER)
    experts = mlp.init_experts(jax.random.key(1), CONFIG)
    states = tuple(init_opt_states(OPTIMIZER, layer) for layer in experts)

    def loss(trunk: Any, experts: Any, batch: Any, alive: Any) -> Any:
        return mlp.local_forward(trunk, experts, CONFIG, ROUTER, batch, alive=alive)

    def step(gradient: Any, update: Any) -> Any:
        @jax.jit
        def run(trunk: Any, experts: Any, states: Any, *args: Any) -> Any:
            (value, aux), (grads, expert_grads) = gradient(trunk, experts, *args)
            used = [layer.load > 0 for layer in aux.layers]
            new = [update(OPTIMIZER, *own) for own in zip(experts, states, expert_grads, used, strict=True)]
            return (value, grads), expert_grads, used, tuple(each[0] for each in new), tuple(each[1] for each in new)

        return run

    of_all = step(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), update_experts)
    of_chosen = step(chosen_value_and_grad(loss), update_chosen)
    rng, ours, theirs = np.random.default_rng(0), (experts, states), (experts, states)
    for number in range(3):
        x = jnp.asarray(rng.normal(size=(2, 3)), jnp.float32)
        # In the second step only expert 5 lives: one slot of each sample has no expert.
        alive = jnp.ones((2, 4, 4), bool) if number != 1 else jnp.zeros((2, 4, 4), bool).at[:, 1, 1].set(True)
        batch, before = mlp.Batch(x, jnp.array([0, 1])), ours
        expected, _, used, *theirs = of_all(trunk, *theirs, batch, alive)
        found, compact, used, *ours = of_chosen(trunk, *ours, batch, alive)
        close = (found, *ours), (expected, *theirs)
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
