"""Soft MoE: the paper's formulas, its slots through any mixture, and the classifier that has it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.autodiff import value_and_grad
from dmoe_jax.experts import expert_from_functions, feedforward
from dmoe_jax.mixture.local import init_experts
from dmoe_jax.mixture.soft import init_soft_gate, slot_router, soft_segments, soft_weights
from dmoe_jax.models import mlp
from dmoe_jax.models.layers import dmoe_layer
from dmoe_jax.routing import RouterError, check_router, make_router, product_key
from tests.dmoe_jax.small_swarm import close, direct_callers, open_small_swarm
from tests.net.direct_network import DirectNetwork

GRID, PER_EXPERT, D_MODEL, SAMPLES = (2, 2), 2, 6, 5
ROUTER = slot_router(GRID, slots_per_expert=PER_EXPERT)
CONFIG = mlp.MLPConfig(
    input_dim=4, num_classes=3, d_model=8, num_layers=2, grid_size=GRID, k_best=1, expansion=1, slots_per_expert=1
)


PLAIN = expert_from_functions(
    lambda key: {"matrix": jax.random.normal(key, (D_MODEL, 3))},
    lambda params, x: jnp.tanh(x @ params["matrix"]),
    np.zeros((1, D_MODEL), np.float32),
    check=False,
)
RESIDUAL = feedforward(d_model=D_MODEL, expansion=1)


def layer_of(expert: Any, alive: Any = None) -> tuple[Any, Any, Any, Any]:
    """(gate parameters, experts, samples, the layer's output)."""
    gate = init_soft_gate(jax.random.key(0), D_MODEL, 8) | {"scale": jnp.array(5.0)}
    experts = init_experts(jax.random.key(1), expert, "ffn", GRID)
    x = jax.random.normal(jax.random.key(2), (SAMPLES, D_MODEL))
    dispatch, spread = soft_segments(expert, ROUTER)

    @jax.jit
    def layer(x: Any) -> tuple[Any, Any]:
        slots = dispatch(gate, x)
        outputs, aux = dmoe_layer(expert, experts, ROUTER, 1, slots.scores, alive, slots.inputs)
        return spread(x, slots, outputs), aux.load

    output, load = layer(x)
    assert load.tolist() == ([PER_EXPERT] * 4 if alive is None else [2, 0, 2, 2])
    return gate, experts, x, output


def answers_of(expert: Any, experts: Any, slots: np.ndarray) -> np.ndarray:
    """Answer of each slot's expert, asked one by one."""
    ask = jax.jit(lambda number, slot: expert.apply(jax.tree.map(lambda leaf: leaf[number], experts), slot[None])[0])
    return np.stack([np.asarray(ask(s // PER_EXPERT, slot)) for s, slot in enumerate(slots)])


def paper(gate: Any, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Dispatch and combine weights: the softmaxes of section 2.1 over the normalised logits of section 2.3."""
    phi = np.asarray(gate["slots"])
    phi = float(gate["scale"]) * phi / np.linalg.norm(phi, axis=0, keepdims=True)
    powers = np.exp(x / np.linalg.norm(x, axis=1, keepdims=True) @ phi)
    return powers / powers.sum(axis=0, keepdims=True), powers / powers.sum(axis=1, keepdims=True)


GONE = jnp.array([[True, False], [True, True]])


@pytest.mark.parametrize(
    ("expert", "alive"), [(PLAIN, None), (RESIDUAL, None), (RESIDUAL, GONE)], ids=["plain", "residual", "one is gone"]
)
def test_matches_the_paper(expert: Any, alive: Any) -> None:
    """C f(D^T X); of experts s + g(s) the residual block X + C g(D^T X), to which one that is gone adds nothing."""
    gate, experts, x, output = layer_of(expert, alive)
    x = np.asarray(x)
    dispatch, combine = paper(gate, x)
    np.testing.assert_allclose(soft_weights(gate, jnp.asarray(x)), (dispatch, combine), atol=1e-5)
    slots, there = dispatch.T @ x, [*range(8)] if alive is None else [0, 1, 4, 5, 6, 7]
    added = answers_of(expert, experts, slots) - (0 if expert is PLAIN else slots)
    expected = combine[:, there] @ added[there] + (0 if expert is PLAIN else x)
    np.testing.assert_allclose(output, expected, atol=1e-5)


def test_rows_of_slots_go_to_their_experts() -> None:
    """Two each, in order; a row beyond the last expert has none. It is a router like others."""
    check_router(ROUTER, GRID, D_MODEL)
    indices, mask = ROUTER.select(ROUTER.scores({}, jnp.zeros((9, 3))), 1)
    assert (indices[:8, 0] @ jnp.array([2, 1])).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert mask[:, 0].tolist() == [True] * 8 + [False]


async def test_the_classifier_is_alike_over_a_network(autojump_clock: trio.testing.MockClock) -> None:
    """Loss and gradients of the trunk, gates included, are those of one jit."""
    router = CONFIG.soft_router()
    trunk = mlp.init_trunk(jax.random.key(0), CONFIG, router)
    batch = mlp.Batch(jax.random.normal(jax.random.key(2), (6, 4)), jnp.arange(6) % 3)
    run = jax.jit(jax.value_and_grad(mlp.local_forward, has_aux=True), static_argnums=(2, 3))
    layers = ["layer0", "layer1"]
    callers, expert = direct_callers(DirectNetwork(), 2), CONFIG.expert()
    async with open_small_swarm(callers, expert, optax.sgd(1e-2), prefixes=layers, grid_size=GRID) as swarm:
        experts = tuple(swarm.stacked_params(layer, GRID) for layer in layers)
        (expected, aux), grads = run(trunk, experts, CONFIG, router, batch)
        assert [layer.load.tolist() for layer in aux.layers] == [[1, 1, 1, 1]] * 2
        model = mlp.MLP(CONFIG, router, [swarm.mixture(expert, router, layer, k_best=1) for layer in layers])

        async def forward(tape: Any, params: Any) -> Any:
            return (await model.forward(tape, params, batch, (), None)).loss

        loss, found = await value_and_grad(forward)(trunk)
        np.testing.assert_allclose(loss, expected, atol=1e-5)
        close(found, grads)
        assert all(bool(jnp.any(leaf != 0)) for leaf in jax.tree.leaves(found["gates"]))
        moved = swarm.stacked_params("layer1", GRID)
        assert any(bool(jnp.any(a != b)) for a, b in zip(*map(jax.tree.leaves, (moved, experts[1])), strict=True))


def test_what_does_not_fit_is_refused() -> None:
    """A router for slots without slots, slots with another router, more than one expert for a slot; and by name."""
    with pytest.raises(ValueError, match=r"slots_per_expert 1 needs the router .*soft_router\(\), got 'product_key'"):
        mlp.init_trunk(jax.random.key(0), CONFIG, product_key(GRID))
    with pytest.raises(ValueError, match="slots_per_expert 0 needs a router that chooses, got 'slots'"):
        mlp.init_trunk(jax.random.key(0), dataclasses.replace(CONFIG, slots_per_expert=0), CONFIG.soft_router())
    with pytest.raises(ValueError, match="a slot has one expert; got 1 and 2"):
        dataclasses.replace(CONFIG, k_best=2)
    with pytest.raises(RouterError, match=r"soft_moe chooses no experts.*words would see.*MLPConfig.slots_per_expert"):
        make_router("soft_moe", GRID)
