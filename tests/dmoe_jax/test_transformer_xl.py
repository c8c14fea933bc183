"""The Transformer-XL language model in one jit: what may influence what, memory, and that it learns."""

import functools
from unittest.mock import AsyncMock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax.autodiff import value_and_grad
from dmoe_jax.data.batches import Batch
from dmoe_jax.layer_config import LayerConfig
from dmoe_jax.mixture.local_update import init_opt_states, update_experts
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.layers import dmoe_layer
from dmoe_jax.models.trunk import LayerMemory, embed, empty_memory, step_keys, token_nll
from dmoe_jax.routing import Router, product_key
from dmoe_jax.routing.base import top_k_router
from tests.dmoe_jax import numpy_transformer_xl as reference

CONFIG = TransformerXLConfig(
    vocab_size=20,
    num_layers=2,
    grid_size=(2, 2),
    k_best=2,
    layer=LayerConfig(d_model=8, num_heads=2, d_ff=12, seq_len=4, mem_len=3),
)
ROUTER = product_key(CONFIG.grid_size, init_scale=1.0)
DROPPING = CONFIG.replace(
    dropout=0.2,
    attention_dropout=0.2,
    position_dropout=0.3,
    embedding_dropout=0.2,
    input_dropout=0.3,
    output_dropout=0.3,
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


def as_batch(tokens, targets):
    """A batch all of whose targets count and that continues the one before."""
    return Batch(tokens, targets, np.ones(tokens.shape, bool), np.zeros(len(tokens), bool))


def make_batch(seed=0, seq_len=CONFIG.seq_len, batch=2):
    text = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (batch, seq_len + 1))
    return as_batch(jnp.asarray(text[:, :-1], jnp.int32), jnp.asarray(text[:, 1:], jnp.int32))


def filled_memory(batch=2):
    """Memory of random states whose oldest slot is not filled."""
    states = jax.random.normal(jax.random.key(5), (CONFIG.num_layers, batch, CONFIG.mem_len, CONFIG.d_model))
    mask = jnp.ones((batch, CONFIG.mem_len), bool).at[:, 0].set(False)
    return tuple(LayerMemory(layer, mask) for layer in states)


def forward_from_hidden(hidden, trunk, experts, memory, targets, alive=None):
    """nll [batch, seq] from the embedded tokens: the model without `embed`, so that they can be differentiated."""
    parts = txl.segments(CONFIG, ROUTER)
    for i in range(CONFIG.num_layers):
        scores = parts.gate(trunk["gates"][i], hidden, memory[i])
        hidden, _ = dmoe_layer(CONFIG.expert(), experts[i], ROUTER, CONFIG.k_best, scores, alive, hidden, *memory[i])
    return token_nll(trunk["embed"], trunk["head"], hidden, targets, CONFIG)


@jax.jit
def jacobian_of_losses(*args):
    """d loss[t] / d embedding[s], [t, batch, s, d_model]; samples are independent, so summing over them loses
    nothing."""
    return jax.jacrev(lambda hidden: forward_from_hidden(hidden, *args[1:]).sum(axis=0))(args[0])


@pytest.mark.parametrize("memory", [empty_memory(CONFIG, 2), filled_memory()], ids=["empty", "filled"])
def test_later_words_do_not_reach_earlier_losses(memory):
    """d loss[t] / d embedding[s] is exactly zero for s > t through attention AND routing, and not zero for s = t."""
    trunk, experts = make_params()
    batch = make_batch()
    hidden = embed(trunk["embed"], batch.tokens, CONFIG)
    jacobian = jacobian_of_losses(hidden, trunk, experts, memory, batch.targets)
    for t in range(CONFIG.seq_len):
        np.testing.assert_array_equal(jacobian[t, :, t + 1 :], 0)
        assert bool(jnp.all(jnp.any(jacobian[t, :, : t + 1] != 0, axis=-1)))


def test_later_words_do_not_change_the_choice_of_experts():
    """Replacing every word after the first changes no choice and no weight of the first layer, and no earlier
    loss."""
    trunk, experts = make_params()
    batch = make_batch()
    other = batch._replace(tokens=batch.tokens.at[:, 1:].set((batch.tokens[:, 1:] + 7) % CONFIG.vocab_size))
    memory = filled_memory()
    _, before_aux = local_forward(trunk, experts, CONFIG, ROUTER, batch, memory)
    _, after_aux = local_forward(trunk, experts, CONFIG, ROUTER, other, memory)
    for before, after in zip(before_aux.layers, after_aux.layers, strict=True):
        np.testing.assert_array_equal(before.indices, after.indices)
        np.testing.assert_allclose(before.weights, after.weights, atol=1e-6)


def test_routing_features_worked_out_by_hand():
    """Mean of the filled slots and the first position: (2 + 4 + 9) / 3 = 5, and the first position alone."""
    memory = jnp.array([[[100.0], [2.0], [4.0]], [[1.0], [1.0], [1.0]]])
    mask = jnp.array([[False, True, True], [False, False, False]])
    hidden = jnp.array([[[9.0], [50.0]], [[3.0], [50.0]]])
    np.testing.assert_allclose(txl.routing_features(hidden, memory, mask), [[5.0], [3.0]])


def test_segments_joined_by_memory_equal_one_long_segment():
    """Two segments with memory give the losses of one segment twice as long, when memory covers the first.

    One expert in each grid, so that routing (which sees more in the second segment) makes no difference.
    """
    short = CONFIG.replace(grid_size=(1,), k_best=1, seq_len=4, mem_len=4)
    long = short.replace(seq_len=8)
    router = product_key((1,))
    trunk = grown(txl.init_trunk(jax.random.key(0), long, router), 0)
    experts = grown(txl.init_experts(jax.random.key(1), long), 1)
    batch = make_batch(seq_len=8)
    whole, _ = local_forward(trunk, experts, long, router, batch, empty_memory(long, 2))
    memory, parts = empty_memory(short, 2), []
    for cut in (slice(0, 4), slice(4, 8)):
        piece = as_batch(batch.tokens[:, cut], batch.targets[:, cut])
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
    trunk, experts = make_params()
    batch, memory = make_batch(), filled_memory()
    plain, _ = local_forward(trunk, experts, CONFIG, ROUTER, batch, memory)
    args = (trunk, experts, DROPPING, ROUTER, batch, memory)
    np.testing.assert_allclose(local_forward(*args)[0], plain, rtol=1e-5)
    keys = [step_keys(num_layers=2, batch=2, seed=0, trainer=0, step=step) for step in (0, 0, 1)]
    first, again, other = (local_forward(*args, keys=k)[0] for k in keys)
    assert float(first) == float(again)
    assert abs(float(first) - float(other)) > 1e-3
    assert abs(float(first) - float(plain)) > 1e-3
    # Every layer and either end has a key of its own.
    changed = np.array([keys[0].experts[0], keys[2].experts[1]]), np.array([keys[2].experts[0], keys[0].experts[1]])
    for moved in ({"embed": keys[2].embed}, {"head": keys[2].head}, *({"experts": mixed} for mixed in changed)):
        assert abs(float(local_forward(*args, keys=keys[0]._replace(**moved))[0]) - float(first)) > 1e-4


def test_expert_inputs_are_those_of_the_expert():
    """A key is among them only if the experts drop; in evaluation it is zero."""
    hidden, memory = jnp.ones((2, 4, 8)), filled_memory()[0]
    assert len(txl.expert_inputs(CONFIG, hidden, memory, np.ones((2, 2), np.uint32))) == 3
    *_, key = txl.expert_inputs(DROPPING, hidden, memory)
    np.testing.assert_array_equal(key, np.zeros((2, 2), np.uint32))
    for inputs in (txl.expert_inputs(DROPPING, hidden, memory), txl.expert_inputs(CONFIG, hidden, memory)):
        expert = (DROPPING if len(inputs) == 4 else CONFIG).expert()
        assert [(part.shape[1:], part.dtype) for part in inputs] == [(s.shape, s.dtype) for s in expert.inputs]


async def test_gradients_with_keys_are_those_of_the_recomputation():
    """Segments recomputed one by one in the backward pass, with the same keys, give the gradient of the whole."""
    config = DROPPING.replace(num_layers=1)
    trunk, experts = make_params()
    trunk, experts = trunk | {"gates": trunk["gates"][:1]}, experts[:1]
    batch, memory = make_batch(), filled_memory()[:1]
    keys = step_keys(num_layers=1, batch=2, seed=0, trainer=0, step=0)
    parts = txl.segments(config, ROUTER)

    def layer(params, scores, *inputs):
        return dmoe_layer(config.expert(), params, ROUTER, config.k_best, scores, None, *inputs)[0]

    async def forward(run, params):
        trunk, experts = params
        hidden = run(parts.embed, trunk["embed"], batch.tokens, keys.embed)
        scores = run(parts.gate, trunk["gates"][0], hidden, memory[0], batch.tokens[:, 0], keys.gates[0])
        hidden = run(layer, experts[0], scores, *txl.expert_inputs(config, hidden, memory[0], keys.experts[0]))
        return run(parts.loss_head, trunk["embed"], trunk["head"], hidden, batch.targets, batch.mask, keys.head)

    loss, grads = await value_and_grad(forward)((trunk, experts))
    whole = jax.jit(
        jax.value_and_grad(
            lambda params: txl.local_forward(*params, config, ROUTER, batch, memory, keys=keys)[1].nll,
        )
    )
    expected_loss, expected = whole((trunk, experts))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for grad, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(grad, wanted, atol=1e-5)


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
    batch, memory = make_batch(batch=5), empty_memory(config, 5)
    had_key.clear()
    jax.eval_shape(lambda: txl.local_forward(trunk, experts, config, router, batch, memory))
    keys = step_keys(num_layers=1, batch=5, seed=0, trainer=0, step=0)
    _, aux = local_forward(trunk, experts, config, router, batch, memory, keys=keys)
    expected = (np.asarray(batch.tokens[:, 0]) + int(keys.gates[0, 0] % 4)) % 4
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
    batch = make_batch(seq_len=2)
    loss, aux = local_forward(trunk, experts, other, ROUTER, batch, empty_memory(other, 2))
    assert np.isfinite(loss)
    assert aux.memory[0].states.shape == (2, 6, CONFIG.d_model)


def test_dead_experts_are_not_used():
    """alive is per layer: the dead get no load and no gradient, and all dead makes a layer the identity."""
    trunk, experts = make_params()
    alive = jnp.ones((2, 2, 2), bool).at[0, 0].set(False).at[1].set(False)
    run = functools.partial(txl.local_forward, config=CONFIG, router=ROUTER, batch=make_batch(), memory=filled_memory())
    (loss, aux), grads = jax.jit(jax.value_and_grad(lambda t, e: run(t, e, alive=alive), argnums=(0, 1), has_aux=True))(
        trunk, experts
    )
    assert aux.layers[0].load.tolist() == [0, 0, 2, 2]
    assert aux.layers[1].load.tolist() == [0, 0, 0, 0]
    assert not aux.layers[1].mask.any()
    for leaf in jax.tree.leaves(grads[1][0]):
        np.testing.assert_array_equal(leaf[:2], 0)
    for leaf in jax.tree.leaves((grads[1][1], grads[0]["gates"][1])):
        np.testing.assert_array_equal(leaf, 0)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((loss, grads)))


def train(router: Router, steps: int) -> list[float]:
    """Losses of a model that reads one repeated sentence, trunk and experts updated separately."""
    trunk, experts = (
        txl.init_trunk(jax.random.key(0), CONFIG, router),
        txl.init_experts(jax.random.key(1), CONFIG),
    )
    optimizer = optax.adam(1e-2)
    trunk_state, expert_states = (
        optimizer.init(trunk),
        [init_opt_states(optimizer, layer) for layer in experts],
    )

    @jax.jit
    def step(trunk, trunk_state, experts, expert_states, batch, memory):
        run = jax.value_and_grad(txl.local_forward, argnums=(0, 1), has_aux=True)
        (loss, aux), (trunk_grads, expert_grads) = run(trunk, experts, CONFIG, router, batch, memory)
        updates, trunk_state = optimizer.update(trunk_grads, trunk_state)
        updated = [
            update_experts(optimizer, params, state, grads, layer.load > 0)
            for params, state, grads, layer in zip(experts, expert_states, expert_grads, aux.layers, strict=True)
        ]
        experts, expert_states = tuple(new[0] for new in updated), [new[1] for new in updated]
        return optax.apply_updates(trunk, updates), trunk_state, experts, expert_states, aux.memory, loss

    sentence = [3, 15, 0, 7, 11, 3, 1, 19]
    memory, losses = empty_memory(CONFIG, 2), []
    for i in range(steps):
        text = jnp.array([[sentence[(4 * i + shift + j) % 8] for j in range(5)] for shift in (0, 4)], jnp.int32)
        batch = as_batch(text[:, :-1], text[:, 1:])
        trunk, trunk_state, experts, expert_states, memory, loss = step(
            trunk, trunk_state, experts, expert_states, batch, memory
        )
        losses.append(float(loss))
    return losses


def test_training_reduces_the_loss():
    """A repeated sentence is learnt: from about log 20 = 3 nats to a tenth of that within 100 steps."""
    losses = train(ROUTER, 100)
    assert losses[0] > 2.5
    assert np.mean(losses[-4:]) < 0.3


def test_a_router_for_another_grid_is_refused():
    """Both grids are named."""
    with pytest.raises(ValueError, match=r"is for grid \(3,\), the model's grid is \(2, 2\)"):
        txl.TransformerXL(CONFIG, product_key((3,)), [AsyncMock(), AsyncMock()])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_layers", 0, "num_layers must be a positive integer, got 0"),
        ("k_best", 5, r"k_best is at most the number of cells of grid \(2, 2\), got 5"),
        ("cutoffs", (12, 6), "must ascend strictly between 0 and 20"),
        ("d_model", 9, "multiple of num_heads"),
        ("input_dropout", 1.0, "input_dropout must be a probability of at least 0 and below 1, got 1.0"),
        ("grid_size", (), "k_best is at most the number of cells of grid"),
    ],
)
def test_configurations_that_cannot_work_are_refused(field, value, message):
    """Mistakes surface when the configuration is made, and name the field."""
    with pytest.raises(ValueError, match=message):
        CONFIG.replace(**{field: value})
