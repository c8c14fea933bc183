"""The dense Transformer-XL against its equations; what may influence what; its dropout, sizes and lengths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax.data.batches import Batch, evaluation_segments
from dmoe_jax.layer_config import LayerConfig
from dmoe_jax.models import trunk
from dmoe_jax.models.config import TransformerXLConfig
from experiments.transformer_xl import dense
from tests.dmoe_jax import numpy_transformer_xl as reference

CONFIG = TransformerXLConfig(
    vocab_size=20,
    num_layers=2,
    layer=LayerConfig(d_model=8, num_heads=2, d_ff=12, seq_len=4, mem_len=3),
)
DROPPING = CONFIG.replace(
    dropout=0.2,
    attention_dropout=0.2,
    position_dropout=0.3,
    embedding_dropout=0.2,
    input_dropout=0.3,
    output_dropout=0.3,
)

forward = jax.jit(dense.forward, static_argnums=1)


@functools.cache
def make_params(cutoffs=(), num_layers=2):
    """Parameters moved far from their small initial values, so that every influence shows."""
    rng = np.random.default_rng(0)
    params = dense.init(jax.random.key(0), CONFIG.replace(cutoffs=cutoffs, num_layers=num_layers))
    return jax.tree.map(lambda leaf: leaf + jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32), params)


def make_text(length, seed=0):
    """Random words."""
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length)


def make_keys(step=0, batch=2):
    """Keys of a training step."""
    return trunk.step_keys(num_layers=CONFIG.num_layers, batch=batch, seed=0, trainer=0, step=step)


def make_batch(seed=0, batch=2):
    """One segment of random text."""
    text = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (batch, CONFIG.seq_len + 1)).astype(np.int32)
    return Batch(text[:, :-1], text[:, 1:], np.ones((batch, CONFIG.seq_len), bool), np.zeros(batch, bool))


def filled_memory(batch=2):
    """Memory of random states whose oldest slot is not filled."""
    states = jax.random.normal(jax.random.key(5), (CONFIG.num_layers, batch, CONFIG.mem_len, CONFIG.d_model))
    mask = jnp.ones((batch, CONFIG.mem_len), bool).at[:, 0].set(False)
    return tuple(trunk.LayerMemory(layer, mask) for layer in states)


def text_nll(config, text, batch_size=1):
    """nll of each next word, read in batches of rows with memory from segment to segment."""
    memory, losses, masks = trunk.empty_memory(config, batch_size), [], []
    for batch in evaluation_segments(text, batch_size=batch_size, seq_len=config.seq_len):
        nll, memory = forward(make_params(), config, batch, memory)
        losses.append(np.asarray(nll))
        masks.append(batch.mask)
    return np.concatenate(losses, axis=1)[np.concatenate(masks, axis=1)]


@pytest.mark.parametrize(
    ("clamp_len", "same_length", "cutoffs", "num_layers"),
    [(None, False, (6, 12), 2), (2, False, (), 2), (5, True, (), 2), (None, False, (), 5)],
)
def test_equals_the_papers_equations(clamp_len, same_length, cutoffs, num_layers):
    """Three segments with memory give the losses of explicit loops over the whole text; also where the program has a
    loop over the layers."""
    config = CONFIG.replace(clamp_len=clamp_len, same_length=same_length, cutoffs=cutoffs, num_layers=num_layers)
    text = make_text(3 * CONFIG.seq_len + 1)
    params = make_params(cutoffs, num_layers)
    memory, losses = trunk.empty_memory(config, 1), []
    for batch in evaluation_segments(text, batch_size=1, seq_len=config.seq_len):
        nll, memory = forward(params, config, batch, memory)
        losses += np.asarray(nll)[0].tolist()
    np.testing.assert_allclose(losses, reference.dense_nll(params, config, text), atol=1e-5)


@pytest.mark.parametrize("keys", [None, make_keys()], ids=["evaluation", "training"])
def test_later_words_do_not_reach_earlier_losses(keys):
    """d loss[t] / d embedding[s] is exactly zero for s > t, and not zero for s <= t."""
    batch, params = make_batch(), make_params()
    # In training without the dropouts that may close a whole position for one loss.
    config = CONFIG if keys is None else CONFIG.replace(attention_dropout=0.2, position_dropout=0.3)

    @jax.jit
    @jax.jacrev
    def jacobian(hidden):
        hidden, _ = dense.run_layers(params, config, hidden, filled_memory(), keys=keys)
        nll = trunk.token_nll(params["embed"], params["head"], hidden, jnp.asarray(batch.targets), config)
        return nll.sum(axis=0)

    gradient = jacobian(trunk.embed(params["embed"], jnp.asarray(batch.tokens), config))
    for t in range(CONFIG.seq_len):
        np.testing.assert_array_equal(gradient[t, :, t + 1 :], 0)
        assert bool(jnp.all(jnp.any(gradient[t, :, : t + 1] != 0, axis=-1)))


def test_no_gradient_flows_into_memory():
    """Memory is used but not differentiated, and what is remembered is a constant, too."""
    batch, params = make_batch(), make_params()

    def loss(memory):
        return jnp.mean(dense.forward(params, CONFIG, batch, memory)[0])

    grads = jax.jit(jax.grad(loss, allow_int=True))(filled_memory())
    for layer in grads:
        np.testing.assert_array_equal(layer.states, 0)
    moved = tuple(layer._replace(states=layer.states + 1) for layer in filled_memory())
    (before, _), (after, _) = (forward(params, CONFIG, batch, memory) for memory in (filled_memory(), moved))
    assert np.abs(before - after).max() > 1e-3


@pytest.mark.parametrize("same_length", [False, True])
def test_a_word_reaches_exactly_as_far_as_memory(same_length):
    """Changing one word changes the losses from it on, up to where no path through layers and memories leads back."""
    config = CONFIG.replace(same_length=same_length)
    segments, length = 4, 4 * CONFIG.seq_len

    def sees(p, j):
        start = p - p % CONFIG.seq_len
        oldest = p - CONFIG.mem_len + 1 if same_length else start - CONFIG.mem_len
        return oldest <= j <= p

    once = np.array([[sees(p, j) for j in range(length)] for p in range(length)])
    reach = (once.astype(int) @ once.astype(int)) > 0  # two layers: a path of two glances
    text = make_text(length + 1)
    before = text_nll(config, text)
    assert len(before) == segments * CONFIG.seq_len
    for j in (0, 3, 4, 6):
        other = text.copy()
        other[j] = (text[j] + 5) % CONFIG.vocab_size
        changed = text_nll(config, other) != before
        if j > 0:
            changed[j - 1] = False  # that loss has the changed word as its target
        assert changed.tolist() == reach[:, j].tolist()


def test_with_same_length_segments_make_no_difference():
    """Cut into segments of 4, 8 or 16, every word of a text has the same loss."""
    config = CONFIG.replace(same_length=True)
    text = make_text(33)
    first, *others = (text_nll(config.replace(seq_len=seq_len), text) for seq_len in (4, 8, 16))
    for other in others:
        np.testing.assert_allclose(other, first, atol=1e-5)


def test_the_batch_size_of_an_evaluation_concerns_only_the_start_of_rows():
    """Two rows instead of one: only the first layers * mem_len words of the second row have another past."""
    config = CONFIG.replace(mem_len=4)
    text = make_text(2 * 16 + 1)
    whole, rows = text_nll(config, text), text_nll(config, text, batch_size=2)
    start = 16 + config.num_layers * config.mem_len
    np.testing.assert_allclose(rows[:16], whole[:16], atol=1e-5)
    np.testing.assert_allclose(rows[start:], whole[start:], atol=1e-5)
    assert np.abs(rows[16:start] - whole[16:start]).max() > 1e-2


def test_the_embedding_learns_from_both_its_places():
    """The gradient of the tied table is the sum of that through the input and that through the softmax."""
    batch, params, memory = make_batch(), make_params(), filled_memory()

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def apart(into, out_of):
        hidden = trunk.embed({"table": into}, jnp.asarray(batch.tokens), CONFIG)
        hidden, _ = dense.run_layers(params, CONFIG, hidden, memory)
        nll = trunk.token_nll({"table": out_of}, params["head"], hidden, jnp.asarray(batch.targets), CONFIG)
        return jnp.mean(nll)

    table = params["embed"]["table"]
    tied = jax.jit(jax.grad(lambda p: jnp.mean(dense.forward(p, CONFIG, batch, memory)[0])))(params)
    through_input, through_softmax = apart(table, table)
    assert float(jnp.abs(through_input).max()) > 1e-3
    assert float(jnp.abs(through_softmax).max()) > 1e-3
    np.testing.assert_allclose(tied["embed"]["table"], through_input + through_softmax, atol=1e-5)
    # u and v are shared: one of each for all layers, and they learn.
    assert all(len(leaf) == CONFIG.num_layers for leaf in jax.tree.leaves(params["layers"]))
    assert "content_bias" not in params["layers"]
    assert all(float(jnp.abs(grad).max()) > 0 for grad in jax.tree.leaves(tied["biases"]))


def test_dropout_follows_the_keys():
    """Without keys the rates change nothing; equal keys give equal losses, other keys others."""
    batch, params, memory = make_batch(), make_params(), filled_memory()
    plain, _ = forward(params, CONFIG, batch, memory)
    evaluated, _ = forward(params, DROPPING, batch, memory)
    np.testing.assert_allclose(evaluated, plain, rtol=1e-5)
    first, again, other = (forward(params, DROPPING, batch, memory, keys=make_keys(step))[0] for step in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).all()
    assert (first != plain).all()
    # Every layer and either end has a key of its own.
    keys, others = make_keys(0), make_keys(1)
    mixed = [np.stack([keys.experts[0], others.experts[1]]), np.stack([others.experts[0], keys.experts[1]])]
    for moved in ({"embed": others.embed}, {"head": others.head}, *({"experts": own} for own in mixed)):
        assert (forward(params, DROPPING, batch, memory, keys=keys._replace(**moved))[0] != first).all()


def test_position_dropout_has_one_mask_for_all():
    """The same features of the encodings are gone in all layers and rows: their kernel rows have no gradient."""
    batch, params = make_batch(), make_params()
    config = CONFIG.replace(position_dropout=0.5)

    @jax.jit
    @jax.grad
    def gradient(params, keys):
        return jnp.mean(dense.forward(params, config, batch, filled_memory(), keys=keys)[0])

    masks = []
    for step in range(3):
        layers = dense.layers_of(gradient(params, make_keys(step)))
        gone = [np.abs(layer["position"]["kernel"]).sum(axis=(1, 2)) == 0 for layer in layers]
        np.testing.assert_array_equal(gone[0], gone[1])
        masks.append(gone[0])
    assert len(np.unique(masks, axis=0)) > 1
    assert 0 < np.mean(masks) < 1


def test_bfloat16_is_close_to_float32():
    """Losses differ by rounding only and are float32; so is the memory."""
    batch, memory = make_batch(), filled_memory()
    exact, _ = forward(make_params(), CONFIG, batch, memory)
    rounded, remembered = forward(make_params(), CONFIG.replace(compute_dtype="bfloat16"), batch, memory)
    assert rounded.dtype == remembered[1].states.dtype == jnp.float32
    np.testing.assert_allclose(rounded, exact, atol=0.2)
    assert not np.array_equal(rounded, exact)


@pytest.mark.parametrize(("d_model", "d_ff", "per_layer"), [(400, 900, 1_522_900), (200, 450, 381_450)])
def test_the_papers_sizes(d_model, d_ff, per_layer):
    """`base` and `small` of WikiText-2: 16 layers, 10 heads; parameters counted by hand."""
    config = TransformerXLConfig(
        vocab_size=33_278,
        num_layers=16,
        cutoffs=(20_000,),
        layer=LayerConfig(d_model=d_model, num_heads=10, d_ff=d_ff, seq_len=150, mem_len=150),
    )
    # q, k, v, output and position; two matrices with biases; two norms
    assert per_layer == 5 * d_model**2 + 2 * d_model * d_ff + d_ff + d_model + 4 * d_model
    params = jax.eval_shape(lambda: dense.init(jax.random.key(0), config))
    assert sum(leaf.size for leaf in jax.tree.leaves(params["layers"])) == 16 * per_layer
    assert sum(leaf.size for leaf in jax.tree.leaves(params["embed"])) == 33_278 * d_model
    assert sum(leaf.size for leaf in jax.tree.leaves(params["biases"])) == 2 * d_model


def test_initialisation_follows_the_recipe():
    """Weights, u and v are N(0, 0.02); no two layers are alike; output biases may be those of a unigram model."""
    config = CONFIG.replace(d_model=64, num_heads=4)
    counts = np.arange(20, 0, -1)
    params = dense.init(jax.random.key(0), config, word_counts=counts)
    first, second = dense.layers_of(params)
    for leaf in (first["query"]["kernel"], params["biases"]["content"], params["biases"]["position"]):
        assert 0.015 < float(jnp.std(leaf)) < 0.025
    assert (params["biases"]["content"] != params["biases"]["position"]).any()
    assert (first["query"]["kernel"] != second["query"]["kernel"]).any()
    assert (np.diff(params["head"]["bias"][:6]) < 0).all()


@pytest.mark.slow
def test_training_reduces_the_loss():
    """A repeated sentence is learnt under dropout: from about log 20 = 3 nats to below 1 within 150 steps."""
    config = CONFIG.replace(d_model=16, dropout=0.1, attention_dropout=0.1, input_dropout=0.1, output_dropout=0.1)
    params = dense.init(jax.random.key(0), config)
    optimizer = optax.adam(1e-2)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, batch, memory, keys):
        def loss(params):
            nll, after = dense.forward(params, config, batch, memory, keys=keys)
            return jnp.mean(nll), after

        (value, memory), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, memory, value

    sentence = np.tile([3, 15, 0, 7, 11, 3, 1, 19], 3).astype(np.int32)
    memory, losses = trunk.empty_memory(config, 2), []
    for i in range(150):
        text = np.stack([sentence[4 * i % 8 + shift :][:5] for shift in (0, 4)])
        batch = Batch(text[:, :-1], text[:, 1:], np.ones((2, 4), bool), np.zeros(2, bool))
        params, state, memory, loss = step(params, state, batch, memory, make_keys(i))
        losses.append(float(loss))
    assert losses[0] > 2.5
    assert np.mean(losses[-10:]) < 1


def test_dropped_words_leave_the_gradient_of_a_deep_model_finite():
    """Six new layers, an empty memory, nearly every word dropped: a first word of zeros would multiply the gradient by
    1 / sqrt(1e-5) = 316 in each of twelve norms."""
    config = CONFIG.replace(num_layers=6, embedding_dropout=0.9)
    keys = trunk.step_keys(num_layers=6, batch=2, seed=0, trainer=0, step=0)

    def loss(params):
        return jnp.mean(dense.forward(params, config, make_batch(), trunk.empty_memory(config, 2), keys=keys)[0])

    assert optax.tree.norm(jax.jit(jax.grad(loss))(dense.init(jax.random.key(0), config))) < 1e4
