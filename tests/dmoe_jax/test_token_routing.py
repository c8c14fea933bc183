"""Transformer-XL that routes tokens: equal to the dense model and to one jit, blind to the future."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.data.batches import Batch
from dmoe_jax.experts.transformer_xl import TransformerXLFeedforward, TransformerXLLayer, layer_expert
from dmoe_jax.layer_config import LayerConfig
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.trunk import LayerMemory, empty_memory, step_keys
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.routing.base import Router, RouterError, Scores
from dmoe_jax.routing.check import check_router
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.routing.registry import ROUTERS
from dmoe_jax.trainer import loss_and_grads
from experiments.transformer_xl import dense
from tests.dmoe_jax.small_swarm import close, direct_callers, open_small_swarm
from tests.net.direct_network import DirectNetwork

GRID = (2, 2)
CONFIG = TransformerXLConfig(
    vocab_size=20,
    num_layers=2,
    grid_size=GRID,
    k_best=2,
    route="token",
    layer=LayerConfig(d_model=8, num_heads=2, d_ff=12, seq_len=4, mem_len=3),
)
DENSE = CONFIG.replace(grid_size=(), k_best=0, route="sequence")
FUTURE = "depends on the samples behind it"

local_forward = jax.jit(txl.local_forward, static_argnums=(2, 3))


def grown(tree: Any, seed: int) -> Any:
    """Parameters moved far from their small initial values, so that every influence shows."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: np.asarray(leaf) + 0.3 * rng.normal(size=leaf.shape).astype(np.float32), tree)


def make_batch(seed: int = 0) -> Batch:
    text = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (2, CONFIG.seq_len + 1)).astype(np.int32)
    return Batch(text[:, :-1], text[:, 1:], np.ones((2, CONFIG.seq_len), bool), np.zeros(2, bool))


def filled_memory() -> Any:
    """Memory of random states whose oldest slot is not filled."""
    states = jax.random.normal(jax.random.key(5), (CONFIG.num_layers, 2, CONFIG.mem_len, CONFIG.d_model))
    mask = jnp.ones((2, CONFIG.mem_len), bool).at[:, 0].set(False)
    return tuple(LayerMemory(layer, mask) for layer in states)


def test_one_expert_makes_the_dense_model() -> None:
    """Attention in the trunk and one feed-forward expert for all tokens: losses, memory and gradients are those of the
    dense layers that they were cut from."""
    config, router = CONFIG.replace(grid_size=(1,), k_best=1), product_key((1,))
    whole = grown(dense.init(jax.random.key(0), DENSE), 0)
    batch, memory, trunk = make_batch(), filled_memory(), txl.init_trunk(jax.random.key(1), config, router)

    def cut(whole: Any) -> tuple[Any, Any]:
        layers = [
            {**layer, "content_bias": whole["biases"]["content"], "position_bias": whole["biases"]["position"]}
            for layer in dense.layers_of(whole)
        ]
        of_expert = {"ff_in", "ff_out", "ff_norm"}
        attention = [{name: layer[name] for name in layer if name not in of_expert} for layer in layers]
        assert jax.tree.map(jnp.shape, trunk["attention"]) == jax.tree.map(jnp.shape, attention)
        experts = [jax.tree.map(lambda leaf: leaf[None], {name: layer[name] for name in of_expert}) for layer in layers]
        return trunk | {"embed": whole["embed"], "head": whole["head"], "attention": attention}, experts

    def of_dense(whole: Any) -> Any:
        nll, after = dense.forward(whole, DENSE, batch, memory)
        return jnp.mean(nll), (nll, after)

    def of_tokens(whole: Any) -> Any:
        loss, aux = txl.local_forward(*cut(whole), config, router, batch, memory)
        return loss, (aux.token_nll, aux.memory)

    expected, found = (jax.jit(jax.value_and_grad(run, has_aux=True))(whole) for run in (of_dense, of_tokens))
    close(found, expected)


def test_an_expert_drops_what_a_layer_drops() -> None:
    """One mask for all tokens of a sequence, as in the whole layer, and zeros are no key."""
    config = CONFIG.replace(dropout=0.5).layer
    layer, x = TransformerXLFeedforward(config), jnp.ones((6, config.d_model))
    params = layer_expert(config, "token").init(jax.random.key(0))
    keys = np.array([[1, 2]] * 2 + [[3, 4]] * 2 + [[0, 0]] * 2, np.uint32)
    output = np.asarray(layer.apply({"params": params}, x, keys))
    plain = layer.apply({"params": params}, x)
    np.testing.assert_array_equal(output[0], output[1])
    np.testing.assert_array_equal(output[4:], plain[4:])
    assert np.abs(output[0] - output[2]).max() > 1e-3 < np.abs(output[0] - output[4]).max()
    shapes = jax.tree.map(jnp.shape, params)
    sequence = jnp.zeros((1, 1, config.d_model))
    whole = TransformerXLLayer(config).init(jax.random.key(0), sequence, sequence, jnp.ones((1, 1), bool))["params"]
    assert shapes == {name: jax.tree.map(jnp.shape, whole[name]) for name in shapes}
    inputs = layer_expert(config, "token").inputs
    assert [(spec.name, spec.shape) for spec in inputs] == [("hidden", (8,)), ("dropout_key", (2,))]


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_no_router_sees_the_future(name: str) -> None:
    """Another third word changes no loss of the first two of its sequence, and the third one's. Routers that would let
    it through are refused."""
    router = ROUTERS[name](GRID)
    if name == "expert_choice":
        with pytest.raises(RouterError, match=FUTURE):
            txl.init_trunk(jax.random.key(0), CONFIG, router)
        check_router(router, GRID, CONFIG.d_model)
        return
    trunk = grown(txl.init_trunk(jax.random.key(0), CONFIG, router), 0)
    experts = grown(txl.init_experts(jax.random.key(1), CONFIG), 1)
    batch, memory = make_batch(), filled_memory()
    tokens = batch.tokens.copy()
    tokens[:, 2:] = (tokens[:, 2:] + 7) % CONFIG.vocab_size
    before, after = (
        local_forward(trunk, experts, CONFIG, router, each, memory)[1]
        for each in (batch, batch._replace(tokens=tokens))
    )
    np.testing.assert_allclose(after.token_nll[:, :2], before.token_nll[:, :2], atol=1e-6)
    assert (np.abs(after.token_nll[:, 2] - before.token_nll[:, 2]) > 1e-4).all()
    # Every token is a sample of the mixture.
    assert before.layers[0].indices.shape == (2 * CONFIG.seq_len, 2, len(GRID))
    assert int(before.layers[0].load.sum()) == 2 * CONFIG.seq_len * CONFIG.k_best


def select_alone(scores: Scores, k: int, alive: Any = None, *, router: Router) -> Any:
    """The expert that the last sample of a batch likes best takes no other sample."""
    indices, mask = router.select(scores, k, alive)
    is_taken = jnp.all(indices == indices[-1:, :1], axis=-1)
    return indices, mask & ~is_taken.at[-1].set(False)


def test_a_router_of_ones_own_that_sees_the_future_is_refused() -> None:
    """By what it selects, and by what it scores; neither is a fault where sequences are routed."""
    router = product_key(GRID)

    def centred(params: Any, x: Any, **options: Any) -> Any:
        return router.scores(params, x - jnp.mean(x, axis=0), **options)

    for own in (
        router._replace(scores=centred),
        router._replace(select=functools.partial(select_alone, router=router)),
    ):
        check_router(own, GRID, CONFIG.d_model)
        with pytest.raises(RouterError, match=FUTURE):
            check_router(own, GRID, CONFIG.d_model, in_order=True)


@functools.partial(jax.jit, static_argnums=(0, 1))
def local_step(config: Any, router: Any, trunk: Any, experts: Any, batch: Any, memory: Any, keys: Any) -> Any:
    def loss(trunk: Any, experts: Any) -> Any:
        return txl.local_forward(trunk, experts, config, router, batch, memory, keys=keys)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(trunk, experts)


@pytest.mark.parametrize(
    ("config", "max_rows", "learning_rate"),
    [
        pytest.param(
            CONFIG.replace(dropout=0.2, position_dropout=0.2, input_dropout=0.2),
            8,
            0.5,
            id="learning",
            marks=pytest.mark.slow,
        ),
        # Several calls of an expert are several updates of it: equal are loss and gradients.
        pytest.param(CONFIG.replace(num_layers=1), 3, 0.0, id="split"),
    ],
)
async def test_remote_equals_one_jit(
    config: TransformerXLConfig, max_rows: int, learning_rate: float, autojump_clock: trio.testing.MockClock
) -> None:
    """Loss, trunk gradients, memory and experts after a step with dropout are those of one jit, to 1e-5.

    Nodes refuse more than `max_rows` rows.
    """
    router, layers = product_key(GRID, init_scale=1.0), [f"layer{index}" for index in range(config.num_layers)]
    node_config = NodeConfig(announce_period_s=100.0, record_lifetime_s=300.0, max_batch_rows=max_rows)
    callers, optimizer = direct_callers(DirectNetwork(), 3), optax.sgd(learning_rate)
    opened = open_small_swarm(
        callers, config.expert(), optimizer, prefixes=layers, grid_size=GRID, node_config=node_config
    )
    async with opened as swarm:
        model = txl.TransformerXL.on(swarm.swarm, config, router, max_rows=max_rows)
        trunk = grown(model.init(jax.random.key(1)), 0)
        experts = tuple(swarm.stacked_params(layer, GRID) for layer in layers)
        batch, memory = make_batch(), empty_memory(config, 2)
        keys = model.keys(batch, seed=3, trainer=0, step=0) if config.layer.drops else None
        (total, aux), (expected, expert_grads) = local_step(config, router, trunk, experts, batch, memory, keys)
        (found, outcome), grads = await loss_and_grads(model)(trunk, batch, memory, keys)
        np.testing.assert_allclose([found, outcome.reported], [total, aux.nll], atol=1e-5)
        close(grads, expected)
        close(outcome.state, aux.memory)
        learnt = jax.tree.map(lambda leaf, grad: leaf - learning_rate * grad, experts, tuple(expert_grads))
        close(tuple(swarm.stacked_params(layer, GRID) for layer in layers), learnt)
        loads = [np.asarray(layer.load) for layer in aux.layers]
        # Forward and backward.
        assert swarm.statistics.ok == 2 * sum(int(-(-load // max_rows)) for layer in loads for load in layer)
        assert max(map(np.max, loads)) > 3
        assert swarm.statistics.failed == swarm.statistics.late == 0
        evaluation = await model.evaluate(trunk, [batch._replace(mask=batch.mask & (batch.targets > 9))])
        assert evaluation.items == int((batch.targets > 9).sum())


def test_a_sequences_key_is_that_of_its_tokens() -> None:
    """Without dropout there is none."""
    rows, memory = jnp.ones((8, 8)), empty_memory(CONFIG, 2)[0]
    assert len(txl.expert_inputs(CONFIG, rows, memory, np.ones((2, 2), np.uint32))) == 1
    config, keys = CONFIG.replace(dropout=0.1), step_keys(num_layers=2, batch=2, seed=0, trainer=0, step=0)
    _, of_rows = txl.expert_inputs(config, rows, memory, keys.experts[0])
    np.testing.assert_array_equal(of_rows, np.repeat(keys.experts[0], 4, axis=0))
    _, of_rows = txl.expert_inputs(config, rows, memory)
    np.testing.assert_array_equal(of_rows, np.zeros((8, 2)))


def test_a_dense_model_routes_no_tokens() -> None:
    with pytest.raises(ValueError, match="route='token' needs a grid of experts, got a dense model"):
        CONFIG.replace(grid_size=(), k_best=0)
