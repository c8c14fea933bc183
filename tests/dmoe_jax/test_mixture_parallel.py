"""Experts on eight devices compute what they compute on one, and drop only what they were told to."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dmoe_jax.mixture.parallel import shard_experts

ROOT = Path(__file__).parents[2]

# A model of two layers, its loss and all gradients; then one mixture with room for a single sample.
EIGHT_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType
from dmoe_jax.mixture.local import local_mixture
from dmoe_jax.mixture.parallel import parallel_mixture, shard_experts
from dmoe_jax.models import mlp
from dmoe_jax.routing.product_key import product_key

config = mlp.MLPConfig(input_dim=3, num_classes=2, d_model=4, num_layers=2, grid_size=(4, 4), k_best=3, expansion=1)
router = product_key((4, 4), init_scale=1.0)
mesh = jax.make_mesh((8,), ("experts",), axis_types=(AxisType.Auto,))
trunk, experts = mlp.init_trunk(jax.random.key(0), config, router), mlp.init_experts(jax.random.key(1), config)
spread = tuple(shard_experts(layer, mesh, "experts") for layer in experts)
x = jax.random.normal(jax.random.key(2), (16, 3))
batch = mlp.Batch(x, jnp.arange(16) % 2)
alive = jnp.ones((2, 4, 4), bool).at[0, 1].set(False).at[1].set(False).at[1, 2, :2].set(True)  # 2 experts for k = 3

def loss(trunk, experts):
    return mlp.local_forward(trunk, experts, config, router, batch, alive=alive)[0]

gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
text = gradient.lower(trunk, spread).compile().as_text()
assert "all-to-all" in text
value, (grads, expert_grads) = gradient(trunk, experts)
found, (found_grads, found_experts) = gradient(trunk, spread)
assert {s.data.shape[0] for s in jax.tree.leaves(found_experts[0].params)[0].addressable_shards} == {2}
found_experts = tuple(layer.params for layer in found_experts)
pairs = jax.device_get(((value, grads, expert_grads), (found, found_grads, found_experts)))
jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, atol=1e-5), *pairs)
print("agrees")

# All samples want the first two experts, both of the first device: of the two samples of each device one goes.
cells = jnp.tile(jnp.array([[0, 1]]), (16, 1))
mask, weights = jnp.ones((16, 2), bool), jnp.full((16, 2), 0.5)
h = jax.random.normal(jax.random.key(3), (16, 4))
mixed, dropped = jax.jit(lambda: parallel_mixture(
    config.expert(), spread[0], (4, 4), cells, mask, weights, (h,), {}, capacity=1))()
kept = np.arange(16) % 2 == 0
whole = local_mixture(config.expert(), experts[0], (4, 4), jnp.stack([cells // 4, cells % 4], -1), mask, weights, h)
np.testing.assert_allclose(mixed, np.where(kept[:, None], whole, h), atol=1e-5)
assert int(dropped) == 16, dropped
print("drops 16")
for bad in (lambda: shard_experts(jnp.ones((9, 2)), mesh, "experts"), lambda: parallel_mixture(
        config.expert(), spread[0], (4, 4), cells[:9], mask[:9], weights[:9], (h[:9],), {})):
    try:
        bad()
    except ValueError as error:
        print(error)
"""


def test_eight_devices_agree_with_one() -> None:
    """Loss and gradients to 1e-5 through `local_forward`; what has no room passes through and is counted."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EIGHT_DEVICES],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "agrees",
        "drops 16",
        "9 experts are no multiple of the 8 devices on axis 'experts'",
        "9 samples are no multiple of the 8 devices on axis 'experts'",
    ]


def test_an_axis_that_the_mesh_lacks() -> None:
    """The message names those that it has."""
    mesh = jax.make_mesh((1,), ("experts",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(ValueError, match="the mesh has the axes experts, none is 'model'"):
        shard_experts(jnp.ones((4, 2)), mesh, "model")
