"""The feed-forward classifier in one jit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax.models import mlp
from dmoe_jax.routing import ROUTERS, gather_logits, product_key

CONFIG = mlp.MLPConfig(input_dim=6, num_classes=3, d_model=8, num_layers=2, grid_size=(2, 3), k_best=2, expansion=2)
ROUTER = product_key(CONFIG.grid_size, init_scale=1.0)


def make_params(config=CONFIG, router=ROUTER):
    return mlp.init_trunk(jax.random.key(0), config, router), mlp.init_experts(jax.random.key(1), config)


def make_batch(n=12):
    """Class = which third of the features is the largest: learnable, and not linear."""
    x = jax.random.normal(jax.random.key(2), (n, 6))
    return mlp.Batch(x, jnp.argmax(x.reshape(n, 3, 2).max(axis=2), axis=1).astype(jnp.int32))


def test_equals_a_loop_over_rows():
    """The loss equals that of rows sent through their own experts one at a time."""
    trunk, experts = make_params()
    batch = make_batch(4)
    parts, expert = mlp.segments(CONFIG, ROUTER), CONFIG.expert()

    @jax.jit
    def loss_of(x, label):
        hidden = parts.embed(trunk["embed"], x)
        for i in range(CONFIG.num_layers):
            scores = parts.gate(trunk["gates"][i], hidden)
            indices, mask = ROUTER.select(scores, 2)
            weights = ROUTER.combine(gather_logits(scores, indices, ROUTER.grid_size), mask)
            outputs = [
                expert.apply(jax.tree.map(lambda leaf, e=3 * u + v: leaf[e], experts[i]), hidden) for u, v in indices[0]
            ]
            hidden = sum(w * out for w, out in zip(weights[0], outputs, strict=True))
        return parts.loss_head(trunk["head"], hidden, label)[0]

    total = sum(loss_of(batch.x[row : row + 1], batch.labels[row : row + 1]) for row in range(4))
    loss, aux = jax.jit(mlp.local_forward, static_argnums=(2, 3))(trunk, experts, CONFIG, ROUTER, batch)
    np.testing.assert_allclose(loss, total / 4, rtol=1e-5)
    assert [int(layer.load.sum()) for layer in aux.layers] == [8, 8]
    assert aux.memory == ()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "product_key" else pytest.mark.slow) for name in sorted(ROUTERS)]
)
def test_float64(name):
    """Parameters and gradients are what they are called, and the loss is that of float32 to its rounding."""
    router, batch = ROUTERS[name](CONFIG.grid_size), make_batch()
    grad = jax.jit(jax.value_and_grad(mlp.local_forward, argnums=(0, 1), has_aux=True), static_argnums=(2, 3))
    trunk, experts = make_params(router=router)
    (loss, _), _ = grad(trunk, experts, CONFIG, router, batch)
    with jax.enable_x64(True):
        config = dataclasses.replace(CONFIG, dtype="float64")
        assert {leaf.dtype for leaf in jax.tree.leaves(make_params(config, router))} == {np.dtype("float64")}
        wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), (trunk, experts))
        (wide_loss, _), grads = grad(*wide, config, router, batch._replace(x=batch.x.astype(np.float64)))
        assert {leaf.dtype for leaf in [wide_loss, *jax.tree.leaves(grads)]} == {np.dtype("float64")}
    if name not in ("hash", "uniform_random"):  # which go by the bits of their input
        assert 0 < abs(float(wide_loss) - float(loss)) < 1e-6


def test_segments_are_stable_objects():
    assert mlp.segments(CONFIG, ROUTER) is mlp.segments(dataclasses.replace(CONFIG), ROUTER)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float16"}, "dtype must be 'float32' or 'float64', got 'float16'"),
        ({"dtype": "float64"}, "dtype 'float64' needs JAX's 64-bit types"),
        ({"num_classes": 0}, "num_classes must be a positive integer, got 0"),
        ({"k_best": 7}, r"k_best is at most .* got 7"),
        ({"grid_size": (6,)}, r"is for grid \(2, 3\), the model's grid is \(6,\)"),
    ],
)
def test_configurations_that_cannot_work_are_refused(changes, message):
    """Mistakes surface when the configuration is made, or meets a router."""
    with pytest.raises(ValueError, match=message):
        mlp.init_trunk(jax.random.key(0), dataclasses.replace(CONFIG, **changes), ROUTER)
