"""Updates write each array of the optimiser where it was, though parameters stay for those who still read them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax.collaboration.peer_state import PeerState
from dmoe_jax.experts import expert_from_functions
from dmoe_jax.layer_config import Recipe
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.optim.collaborative import collaborative
from dmoe_jax.optim.recipe import make_optimizer
from dmoe_jax.trunk import SharedTrunk

SHAPE = (64, 8)
PARAMS = {"table": np.ones(SHAPE, np.float32), "bias": np.zeros(8, np.float32)}


def places(tree: Any, shape: tuple[int, int] = SHAPE) -> list[int]:
    """Addresses in memory of the arrays of a table's size, in the order of the tree."""
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) if leaf.shape == shape]


@pytest.mark.parametrize(
    "optimizer", [optax.adam(1e-3), make_optimizer(Recipe(warmup_steps=0))], ids=["adam", "recipe"]
)
async def test_a_trunks_moments_stay_where_they_are(optimizer: Any) -> None:
    """Parameters and moments have equal shapes: none of them may take the place of another one."""
    trunk = SharedTrunk(jax.tree.map(jnp.asarray, PARAMS), optimizer, InlineDevice())
    grads = jax.tree.map(jnp.ones_like, trunk.params)
    await trunk.apply(grads)
    read, before = trunk.params, places(trunk.opt_state)
    values = jax.tree.map(np.array, read)
    await trunk.apply(grads)
    assert (len(before), places(trunk.opt_state)) == (2, before)
    assert places(trunk.params) != places(read)
    jax.tree.map(np.testing.assert_array_equal, read, values)
    assert np.all(np.asarray(trunk.params["table"]) < values["table"])


async def test_a_peers_state_stays_where_it_is() -> None:
    """The sum of the gradients and the moments, both when a gradient is gathered and in the step."""
    state = PeerState(collaborative(optax.adam(1e-3)), jax.tree.map(jnp.asarray, PARAMS), InlineDevice())
    grads = jax.tree.map(jnp.ones_like, state.now.params)
    await state.gather(grads, 4)
    before = places(state.now._replace(params=None))
    read, values = state.now.params, jax.tree.map(np.array, state.now.params)
    await state.gather(grads, 4)
    assert places(state.now._replace(params=None)) == before
    await state.step(await state.contribution())
    assert len(before) == 3
    assert places(state.now.inner) == before[:2]  # The sum begins anew: nothing of it is read.
    jax.tree.map(np.testing.assert_array_equal, read, values)
    assert np.all(np.asarray(state.now.params["table"]) < values["table"])


# Above 4 MiB gradients have buffers of their own.
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="another device selects number by number")
@pytest.mark.parametrize("shape", [SHAPE, (1024, 1040)], ids=["temporary gradients", "gradients in own buffers"])
def test_an_experts_state_stays_where_it_is(shape: tuple[int, int]) -> None:
    """It does even where a batch has so many rows that the gradient of the input has the shape of a parameter."""
    expert = expert_from_functions(
        lambda key: {"table": jax.random.normal(key, shape)},
        lambda params, x: x @ params["table"].T,
        np.zeros((1, shape[1]), np.float32),
    )
    backend = ExpertBackend(expert, optax.adam(1e-3), expert.init(jax.random.key(0)))
    batch, grads = np.ones(shape, np.float32), np.ones((shape[0], shape[0]), np.float32)
    backend.warm_up_bucket(shape[0])
    backend.backward([batch], grads)
    before = places(backend.state, shape)
    (input_grads,) = backend.backward([batch], grads)
    assert (input_grads.shape, len(before)) == (shape, 3)
    assert places(backend.state, shape) == before
