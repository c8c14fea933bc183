"""The Transformer-XL in one jit: what may influence what, memory and dropout; and where it routes tokens."""

import functools
from functools import partial
from typing import Any
from unittest.mock import AsyncMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax.data.batches import Batch
from dmoe_jax.experts.transformer_xl import TransformerXLFeedforward, TransformerXLLayer, layer_expert
from dmoe_jax.layer_config import LayerConfig
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.layers import dmoe_layer
from dmoe_jax.models.trunk import LayerMemory, embed, empty_memory, step_keys, token_nll
from dmoe_jax.routing import ROUTERS, RouterError, product_key
from dmoe_jax.routing.base import Router, Scores, top_k_router
from dmoe_jax.routing.check import check_router
from experiments.transformer_xl import dense
from tests.dmoe_jax import numpy_transformer_xl as reference
from tests.dmoe_jax.small_swarm import close

CONFIG = TransformerXLConfig(
    vocab_size=20,
    num_layers=2,
    grid_size=(2, 2),
    k_best=2,
    layer=LayerConfig(d_model=8, num_heads=2, d_ff=12, seq_len=4, mem_len=3),
)
ROUTER = product_key(CONFIG.grid_size, init_scale=1.0)
DROPPING = CONFIG.replace(dropout=0.2, attention_dropout=0.2, position_dropout=0.3).replace(
    embedding_dropout=0.2, input_dropout=0.3, output_dropout=0.3
)

local_forward = jax.jit(txl.local_forward, static_argnums=(2, 3))


def grown(tree, seed):
    """Parameters moved far from their small initial values, so that every influence shows."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: leaf + jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32), tree)


@functools.cache
def make_params():
    trunk = txl.init_trunk(jax.random.key(0), CONFIG, ROUTER)
    return grown(trunk, 0), grown(txl.init_experts(jax.random.key(1), CONFIG), 1)


def make_batch(seq_len=CONFIG.seq_len, batch=2):
    """A batch all of whose targets count and that continues the one before."""
    text = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (batch, seq_len + 1)).astype(np.int32)
    return Batch(text[:, :-1], text[:, 1:], np.ones((batch, seq_len), bool), np.zeros(batch, bool))


def with_other_words(batch, start):
    """The batch with other words from this place on."""
    tokens = batch.tokens.copy()
    tokens[:, start:] = (tokens[:, start:] + 7) % CONFIG.vocab_size
    return batch._replace(tokens=tokens)


def keys_of(step=0, *, num_layers=2, batch=2):
    return step_keys(num_layers=num_layers, batch=batch, seed=0, trainer=0, step=step)


def filled_memory():
    """Memory of random states whose oldest slot is not filled."""
    states = jax.random.normal(jax.random.key(5), (CONFIG.num_layers, 2, CONFIG.mem_len, CONFIG.d_model))
    mask = jnp.ones((2, CONFIG.mem_len), bool).at[:, 0].set(False)
    return tuple(LayerMemory(layer, mask) for layer in states)


def forward_from_hidden(hidden, trunk, experts, memory, targets):
    """nll [batch, seq] from the embedded tokens: the model without `embed`, so that they can be differentiated."""
    gate = txl.segments(CONFIG, ROUTER).gate
    for i in range(CONFIG.num_layers):
        scores = gate(trunk["gates"][i], hidden, memory[i])
        hidden, _ = dmoe_layer(CONFIG.expert(), experts[i], ROUTER, CONFIG.k_best, scores, None, hidden, *memory[i])
    return token_nll(trunk["embed"], trunk["head"], hidden, targets, CONFIG)


@jax.jit
def jacobian_of_losses(*args):
    """d loss[t] / d embedding[s], [t, batch, s, d_model]; samples are independent: summing over them loses nothing."""
    return jax.jacrev(lambda hidden: forward_from_hidden(hidden, *args[1:]).sum(axis=0))(args[0])


@pytest.mark.parametrize("memory", [empty_memory(CONFIG, 2), filled_memory()], ids=["empty", "filled"])
def test_later_words_do_not_reach_earlier_losses(memory):
    """d loss[t] / d embedding[s] is exactly zero for s > t through attention AND routing, and not zero for s = t."""
    (trunk, experts), batch = make_params(), make_batch()
    hidden = embed(trunk["embed"], jnp.asarray(batch.tokens), CONFIG)
    jacobian = jacobian_of_losses(hidden, trunk, experts, memory, batch.targets)
    for t in range(CONFIG.seq_len):
        np.testing.assert_array_equal(jacobian[t, :, t + 1 :], 0)
        assert bool(jnp.all(jnp.any(jacobian[t, :, : t + 1] != 0, axis=-1)))


def test_later_words_do_not_change_the_choice_of_experts():
    """Replacing every word after the first changes no choice and no weight of a layer."""
    before, after = (
        local_forward(*make_params(), CONFIG, ROUTER, each, filled_memory())[1]
        for each in (make_batch(), with_other_words(make_batch(), 1))
    )
    for one, other in zip(before.layers, after.layers, strict=True):
        np.testing.assert_array_equal(one.indices, other.indices)
        np.testing.assert_allclose(one.weights, other.weights, atol=1e-6)


def test_routing_features_worked_out_by_hand():
    """Mean of the filled slots and the first position: (2 + 4 + 9) / 3 = 5, and the first position alone."""
    memory = jnp.array([[[100.0], [2.0], [4.0]], [[1.0], [1.0], [1.0]]])
    mask = jnp.array([[False, True, True], [False, False, False]])
    hidden = jnp.array([[[9.0], [50.0]], [[3.0], [50.0]]])
    np.testing.assert_allclose(txl.routing_features(hidden, memory, mask), [[5.0], [3.0]])


def test_segments_joined_by_memory_equal_one_long_segment():
    """Two segments lose what one twice as long does, if memory covers the first; one expert, so routing is the same."""
    short = CONFIG.replace(grid_size=(1,), k_best=1, seq_len=4, mem_len=4)
    long, router, batch = short.replace(seq_len=8), product_key((1,)), make_batch(seq_len=8)
    trunk = grown(txl.init_trunk(jax.random.key(0), long, router), 0)
    experts = grown(txl.init_experts(jax.random.key(1), long), 1)
    whole, _ = local_forward(trunk, experts, long, router, batch, empty_memory(long, 2))
    memory, parts = empty_memory(short, 2), []
    for cut in (slice(0, 4), slice(4, 8)):
        piece = jax.tree.map(lambda part, cut=cut: part[:, cut] if part.ndim > 1 else part, batch)
        loss, aux = local_forward(trunk, experts, short, router, piece, memory)
        memory = aux.memory
        parts.append(float(loss))
    assert float(whole) == pytest.approx(sum(parts) / 2, abs=1e-5)


def test_segments_are_stable_objects():
    """Equal arguments give the same functions, so step two compiles nothing."""
    again = TransformerXLConfig(**{name: getattr(CONFIG, name) for name in CONFIG.__slots__})
    assert txl.segments(CONFIG, ROUTER) is txl.segments(again, ROUTER)
    assert txl.segments(CONFIG, ROUTER).gate is not txl.segments(CONFIG, product_key(CONFIG.grid_size)).gate


def test_without_keys_nothing_is_dropped():
    """Evaluation does not depend on the rates; training does, on the keys alone."""
    (trunk, experts), batch, memory = make_params(), make_batch(), filled_memory()

    def loss(config, **more):
        return float(local_forward(trunk, experts, config, ROUTER, batch, memory, **more)[0])

    plain, (one, other) = loss(CONFIG), map(keys_of, (0, 1))
    np.testing.assert_allclose(loss(DROPPING), plain, rtol=1e-5)
    first = loss(DROPPING, keys=one)
    assert first == loss(DROPPING, keys=keys_of(0))
    assert abs(first - loss(DROPPING, keys=other)) > 1e-3
    assert abs(first - plain) > 1e-3
    # Every layer and either end has a key of its own.
    changed = np.array([one.experts[0], other.experts[1]]), np.array([other.experts[0], one.experts[1]])
    for moved in ({"embed": other.embed}, {"head": other.head}, *({"experts": mixed} for mixed in changed)):
        assert abs(loss(DROPPING, keys=one._replace(**moved)) - first) > 1e-4


def test_the_router_sees_first_words_and_a_key():
    """`ids` are the words at the first positions; the key is a PRNG key in training and None in evaluation."""
    had_key = []

    def scores(params, x, *, key=None, ids=None):
        had_key.append(key is not None)
        shift = 0 if key is None else jax.random.key_data(key)[0] % 4
        return jax.nn.one_hot((ids + shift) % 4, 4)

    router = top_k_router("curious", (4,), lambda key, d_model: {}, scores)
    config = CONFIG.replace(grid_size=(4,), num_layers=1)
    trunk, experts = txl.init_trunk(jax.random.key(0), config, router), txl.init_experts(jax.random.key(1), config)
    batch, memory, keys = make_batch(batch=5), empty_memory(config, 5), keys_of(num_layers=1, batch=5)
    had_key.clear()
    jax.eval_shape(lambda: txl.local_forward(trunk, experts, config, router, batch, memory))
    _, aux = local_forward(trunk, experts, config, router, batch, memory, keys=keys)
    expected = (batch.tokens[:, 0] + int(keys.gates[0, 0] % 4)) % 4
    np.testing.assert_array_equal(aux.layers[0].indices[:, 0, 0], expected)
    assert had_key == [False, True]


def test_a_layer_equals_the_equations():
    """One DMoE layer: x + sum_k w_k (f_k(x) - x), each f_k written with explicit loops, w_k a softmax of the k best."""
    trunk, experts = make_params()
    hidden = jax.random.normal(jax.random.key(3), (2, CONFIG.seq_len, CONFIG.d_model))
    memory = filled_memory()[0]

    @jax.jit
    def layer(gate, params, hidden, memory):
        scores = txl.segments(CONFIG, ROUTER).gate(gate, hidden, memory)
        inputs = txl.expert_inputs(CONFIG, hidden, memory)
        return dmoe_layer(CONFIG.expert(), params, ROUTER, CONFIG.k_best, scores, None, *inputs)[0], scores

    output, scores = layer(trunk["gates"][0], experts[0], hidden, memory)
    rows, columns = (np.asarray(part, np.float64) for part in scores.logits)
    for b in range(2):
        logits = (rows[b][:, None] + columns[b][None, :]).ravel()
        best = np.argsort(-logits)[: CONFIG.k_best]
        weights = np.exp(logits[best]) / np.exp(logits[best]).sum()
        x = np.asarray(hidden[b], np.float64)
        past = list(np.asarray(memory.states[b])[np.asarray(memory.mask[b])])
        expected = x.copy()
        for weight, cell in zip(weights, best, strict=True):
            params = jax.tree.map(lambda leaf, cell=cell: np.asarray(leaf[cell], np.float64), experts[0])
            biases = (params["content_bias"], params["position_bias"])
            expected += weight * (reference.layer(params, biases, list(x), past, mem_len=CONFIG.mem_len) - x)
        np.testing.assert_allclose(output[b], expected, atol=1e-5)


def test_parameters_serve_other_lengths():
    """Trained with segments of 4, evaluated with 2, a longer memory, clamped: the same parameters fit."""
    trunk, experts = make_params()
    other = CONFIG.replace(seq_len=2, mem_len=6, clamp_len=5, same_length=True)
    shapes = jax.tree.map(jnp.shape, jax.eval_shape(lambda: txl.init_experts(jax.random.key(0), other)))
    assert shapes == jax.tree.map(jnp.shape, experts)
    loss, aux = local_forward(trunk, experts, other, ROUTER, make_batch(seq_len=2), empty_memory(other, 2))
    assert np.isfinite(loss)
    assert aux.memory[0].states.shape == (2, 6, CONFIG.d_model)


def test_dead_experts_are_not_used():
    """alive is per layer: the dead get no load and no gradient, and all dead makes a layer the identity."""
    alive = jnp.ones((2, 2, 2), bool).at[0, 0].set(False).at[1].set(False)
    run = partial(txl.local_forward, config=CONFIG, router=ROUTER, batch=make_batch(), memory=filled_memory())
    step = jax.jit(jax.value_and_grad(lambda t, e: run(t, e, alive=alive), argnums=(0, 1), has_aux=True))
    (loss, aux), (of_trunk, (first, second)) = step(*make_params())
    assert [layer.load.tolist() for layer in aux.layers] == [[0, 0, 2, 2], [0, 0, 0, 0]]
    assert not aux.layers[1].mask.any()
    for leaf in jax.tree.leaves((jax.tree.map(lambda leaf: leaf[:2], first), second, of_trunk["gates"][1])):
        np.testing.assert_array_equal(leaf, 0)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((loss, of_trunk, first)))


def test_a_router_for_another_grid_is_refused():
    """Both grids are named."""
    with pytest.raises(ValueError, match=r"is for grid \(3,\), the model's grid is \(2, 2\)"):
        txl.TransformerXL(CONFIG, product_key((3,)), [AsyncMock(), AsyncMock()])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be a positive integer, got 0"),
        ({"k_best": 5}, r"k_best is at most the number of cells of grid \(2, 2\), got 5"),
        ({"cutoffs": (12, 6)}, "must ascend strictly between 0 and 20"),
        ({"d_model": 9}, "multiple of num_heads"),
        ({"input_dropout": 1.0}, "input_dropout must be a probability of at least 0 and below 1, got 1.0"),
        ({"grid_size": ()}, "k_best is at most the number of cells of grid"),
        ({"route": "token", "grid_size": (), "k_best": 0}, "route='token' needs a grid of experts, got a dense model"),
    ],
)
def test_configurations_that_cannot_work_are_refused(changes, message):
    """Mistakes surface when the configuration is made, and name the field."""
    with pytest.raises(ValueError, match=message):
        CONFIG.replace(**changes)


TOKEN = CONFIG.replace(route="token")
"""Tokens are routed, not sequences."""
DENSE = CONFIG.replace(grid_size=(), k_best=0)
GRID = CONFIG.grid_size
FUTURE = "depends on the samples behind it"


@pytest.mark.slow
def test_one_expert_makes_the_dense_model() -> None:
    """Losses, memory and gradients are those of the dense layers, cut into attention and one expert for all tokens."""
    config, router = TOKEN.replace(grid_size=(1,), k_best=1), product_key((1,))
    whole = grown(dense.init(jax.random.key(0), DENSE), 0)
    batch, memory, trunk = make_batch(), filled_memory(), txl.init_trunk(jax.random.key(1), config, router)

    def cut(whole: Any) -> tuple[Any, Any]:
        layers = [
            {**layer, "content_bias": whole["biases"]["content"], "position_bias": whole["biases"]["position"]}
            for layer in reference.layers_of(whole)
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


@pytest.mark.slow
def test_an_expert_drops_what_a_layer_drops() -> None:
    """One mask for all tokens of a sequence, as in the whole layer, and zeros are no key."""
    config, sequences = TOKEN.replace(dropout=0.5), np.array([[1, 2], [3, 4], [0, 0]], np.uint32)
    layer, expert = TransformerXLFeedforward(config.layer), layer_expert(config.layer, "token")
    params = expert.init(jax.random.key(0))
    x, keys = txl.expert_inputs(config, jnp.ones((6, 8)), filled_memory()[0], sequences)
    output, plain = (np.asarray(layer.apply({"params": params}, x, *more)) for more in ((keys,), ()))
    np.testing.assert_array_equal(output[0], output[1])
    np.testing.assert_array_equal(output[4:], plain[4:])
    assert np.abs(output[0] - output[2]).max() > 1e-3 < np.abs(output[0] - output[4]).max()
    shapes, one = jax.tree.map(jnp.shape, params), jnp.zeros((1, 1, 8))
    whole = TransformerXLLayer(config.layer).init(jax.random.key(0), one, one, jnp.ones((1, 1), bool))["params"]
    assert shapes == {name: jax.tree.map(jnp.shape, whole[name]) for name in shapes}
    assert [(spec.name, spec.shape) for spec in expert.inputs] == [("hidden", (8,)), ("dropout_key", (2,))]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_no_router_sees_the_future(name: str) -> None:
    """Another third word changes no loss of the two before it. Routers that would let it through are refused."""
    router = ROUTERS[name](GRID)
    if name == "expert_choice":
        with pytest.raises(RouterError, match=FUTURE):
            txl.init_trunk(jax.random.key(0), TOKEN, router)
        check_router(router, GRID, TOKEN.d_model)
        return
    trunk = grown(txl.init_trunk(jax.random.key(0), TOKEN, router), 0)
    experts = grown(txl.init_experts(jax.random.key(1), TOKEN), 1)
    before, after = (
        local_forward(trunk, experts, TOKEN, router, each, filled_memory())[1]
        for each in (make_batch(), with_other_words(make_batch(), 2))
    )
    np.testing.assert_allclose(after.token_nll[:, :2], before.token_nll[:, :2], atol=1e-6)
    assert (np.abs(after.token_nll[:, 2] - before.token_nll[:, 2]) > 1e-4).all()
    # Every token is a sample of the mixture.
    assert before.layers[0].indices.shape == (2 * TOKEN.seq_len, 2, len(GRID))
    assert int(before.layers[0].load.sum()) == 2 * TOKEN.seq_len * TOKEN.k_best


def select_alone(scores: Scores, k: int, alive: Any = None, *, router: Router) -> Any:
    """The expert that the last sample of a batch likes best takes no other sample."""
    indices, mask = router.select(scores, k, alive)
    is_taken = jnp.all(indices == indices[-1:, :1], axis=-1)
    return indices, mask & ~is_taken.at[-1].set(False)


def test_a_router_of_ones_own_that_sees_the_future_is_refused() -> None:
    """It is told by its selection and by its scores; neither is a fault where sequences are routed."""
    router = product_key(GRID)

    def centred(params: Any, x: Any, **options: Any) -> Any:
        return router.scores(params, x - jnp.mean(x, axis=0), **options)

    for own in (router._replace(scores=centred), router._replace(select=partial(select_alone, router=router))):
        check_router(own, GRID, TOKEN.d_model)
        with pytest.raises(RouterError, match=FUTURE):
            check_router(own, GRID, TOKEN.d_model, in_order=True)
