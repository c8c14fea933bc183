"""Experts on eight devices compute what they compute on one."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dmoe_jax.experts.base import Expert, TensorSpec
from dmoe_jax.mixture.local import local_mixture
from dmoe_jax.mixture.local_update import WithDeltas
from dmoe_jax.mixture.parallel import shard_experts

SPEC = TensorSpec(name="x", shape=(2,), dtype="float32", differentiable=True)
EXPERT = Expert("scale", lambda key: jnp.ones(2), lambda w, x: w * x, (SPEC,), SPEC)
ROOT = Path(__file__).parents[2]

# A layer's loss and all gradients; then a mixture whose samples all go to one device; then what is refused.
EIGHT_DEVICES = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType
from dmoe_jax.experts.base import Expert, TensorSpec
from dmoe_jax.mixture.local_update import init_opt_states, update_experts
from dmoe_jax.mixture.parallel import parallel_mixture, shard_experts
from dmoe_jax.models.layers import dmoe_layer
from dmoe_jax.routing.product_key import product_key

spec = TensorSpec(name="x", shape=(3,), dtype="float32", differentiable=True)
flag = TensorSpec(name="flag", shape=(), dtype="bool", differentiable=False)
expert = Expert("small", None, lambda w, x, flag: x + jnp.tanh(x @ w) * flag[:, None], (spec, flag), spec)
router = product_key((4, 4), init_scale=1.0)
mesh = jax.make_mesh((8,), ("experts",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
x, flag, params = rng.normal(size=(16, 3)).astype("f4"), np.arange(16) % 3 > 0, rng.normal(size=(16, 3, 3)).astype("f4")
gate = jax.jit(lambda: router.init(jax.random.key(0), 3))()
spread = shard_experts(params, mesh, "experts")
alive = rng.random((4, 4)) > 0.8
alive[2, :2] = True
assert alive.sum() == 4  # and every sample wants 6

def loss(gate, experts, x):
    scores = router.scores(gate, x)
    mixed, aux = dmoe_layer(expert, experts, router, 6, scores, jnp.asarray(alive), x, jnp.asarray(flag))
    return jnp.sum(jnp.sin(mixed)), mixed

gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
expected, (gate_grad, params_grad, x_grad) = gradient(gate, params, x)
compiled = gradient.lower(gate, spread, x).compile()
assert "all-to-all" in compiled.as_text()
found, (found_gate_grad, found_params_grad, found_x_grad) = compiled(gate, spread, x)
assert {s.data.shape[0] for s in found_params_grad.params.addressable_shards} == {2}
ours = found, found_gate_grad, found_params_grad.params, found_x_grad
theirs = expected, gate_grad, params_grad, x_grad
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *jax.device_get((ours, theirs)))
print("agrees")

optimizer, used = optax.adamw(1e-2), np.arange(16) % 5 > 0
update = jax.jit(lambda p, g: update_experts(optimizer, p, init_opt_states(optimizer, p), g, jnp.asarray(used)))
(after, states), (expected, _) = update(spread, found_params_grad), update(params, params_grad)
np.testing.assert_allclose(jax.device_get(after.params), expected, atol=1e-5)
large = [leaf for leaf in jax.tree.leaves((after, states)) if leaf.ndim > 1]  # counts of updates may be everywhere
assert len(large) == 3
assert {s.data.shape[0] for leaf in large for s in leaf.addressable_shards} == {2}
print("learns")

# All samples want the first two experts, both of the first device.
cells, mask, weights = np.tile([[0, 1]], (16, 1)), np.ones((16, 2), bool), np.full((16, 2), 0.5, "f4")
mixed = jax.jit(lambda: parallel_mixture(
    expert, spread, (4, 4), jnp.asarray(cells), jnp.asarray(mask), jnp.asarray(weights), (x, flag), {}))()
np.testing.assert_allclose(
    mixed, x + 0.5 * (np.tanh(x @ params[0]) + np.tanh(x @ params[1])) * flag[:, None], atol=1e-5)
print("drops nothing")
for bad in (lambda: shard_experts(jnp.ones((9, 2)), mesh, "experts"), lambda: parallel_mixture(
        expert, spread, (4, 4), cells[:9], mask[:9], weights[:9], (x[:9], flag[:9]), {})):
    try:
        bad()
    except ValueError as error:
        print(error)
"""


@pytest.mark.slow
def test_eight_devices_agree_with_one() -> None:
    """Loss, output, gradients and an update to 1e-5, the dead left out; also where one device has all the work."""
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
        "learns",
        "drops nothing",
        "9 experts are no multiple of the 8 devices on axis 'experts'",
        "9 samples are no multiple of the 8 devices on axis 'experts'",
    ]


def test_an_axis_that_the_mesh_lacks() -> None:
    """The message names those that it has."""
    mesh = jax.make_mesh((1,), ("experts",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(ValueError, match="the mesh has the axes experts, none is 'model'"):
        shard_experts(jnp.ones((4, 2)), mesh, "model")


def test_spread_experts_have_gradients_of_all() -> None:
    """Those of the chosen alone would be gathered onto every device: refused, before anything is computed."""
    mesh = jax.make_mesh((1,), ("experts",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = shard_experts(jnp.ones((4, 2)), mesh, "experts")
    x, cells = jnp.ones((1, 2)), jnp.zeros((1, 1, 1), jnp.int32)
    with pytest.raises(ValueError, match="spread over devices have gradients of all of them"):
        local_mixture(EXPERT, WithDeltas(spread, jnp.zeros((1, 2))), (4,), cells, cells[..., 0] == 0, x[:, :1], x)
