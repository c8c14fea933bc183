"""The local mixture against loops over samples and experts, and its per-expert optimiser."""

import functools
import itertools
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax.directory.grid import all_uids
from dmoe_jax.experts import Expert, TensorSpec, feedforward, make_expert
from dmoe_jax.experts.base import init_by_uid
from dmoe_jax.mixture import local_update
from dmoe_jax.mixture.local import expert_load, init_experts, local_mixture
from dmoe_jax.mixture.local_update import TURN_BYTES, init_opt_states, update_chosen, update_experts
from dmoe_jax.models.layers import dmoe_layer
from dmoe_jax.node.backend import make_backends
from dmoe_jax.routing import gather_logits, product_key

GRID = (2, 3)
SPEC = TensorSpec(name="x", shape=(2,), dtype="float32", differentiable=True)
SCALE = Expert("scale", lambda key: jax.random.uniform(key, ()), lambda factor, x: factor * x, (SPEC,), SPEC)
"""An expert that multiplies by its only parameter: mixtures can be worked out by hand."""


def take(params, index):
    return jax.tree.map(lambda leaf: leaf[index], params)


def assert_trees_close(left, right, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), left, right)


def make_selection():
    """Four samples, two experts each: both alive, one dead, the same expert as another sample, none alive."""
    indices = jnp.array([[[0, 0], [1, 2]], [[0, 1], [1, 1]], [[1, 2], [0, 2]], [[0, 0], [1, 0]]], jnp.int32)
    mask = jnp.array([[True, True], [True, False], [True, True], [False, False]])
    weights = jnp.array([[0.25, 0.75], [1.0, 0.0], [0.5, 0.5], [0.0, 0.0]])
    return indices, mask, weights


def test_mixture_worked_out_by_hand():
    """Experts 0..5 multiply by 0, 10, ..., 50; the last sample has no expert and passes through."""
    x = jnp.array([[1.0, 2.0]] * 4)
    output = local_mixture(SCALE, jnp.arange(6) * 10.0, GRID, *make_selection(), x)
    # 1/4 * 0 + 3/4 * 50 = 37.5;  1 * 10;  1/2 * 50 + 1/2 * 20 = 35;  unchanged
    np.testing.assert_allclose(output, [[37.5, 75.0], [10.0, 20.0], [35.0, 70.0], [1.0, 2.0]])


def test_expert_gradient_is_the_sum_over_its_samples():
    """d/d factor_e sum(y * c) = sum over the samples that chose e of weight * x . c; masked choices give nothing."""
    x = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    gradient = jax.grad(lambda p: jnp.sum(local_mixture(SCALE, p, GRID, *make_selection(), x)))(jnp.ones(6))
    # expert 0: 1/4 * 3; expert 1: 1 * 7; expert 2: 1/2 * 11; 3, 4: none; expert 5: 3/4 * 3 + 1/2 * 11
    np.testing.assert_allclose(gradient, [0.75, 7.0, 5.5, 0.0, 0.0, 7.75])


@pytest.mark.parametrize("kind", ["feedforward", "transformer_xl"])
def test_mixture_equals_loops_over_samples(kind):
    """Both kinds of expert, called one sample and one expert at a time."""
    sizes = {"feedforward": {}, "transformer_xl": {"num_heads": 2, "d_ff": 6, "seq_len": 3, "mem_len": 2}}
    expert = make_expert(kind, d_model=4, **sizes[kind])
    params = init_experts(jax.random.key(0), expert, "ffn", GRID)
    rng = np.random.default_rng(0)
    inputs = [jnp.asarray(rng.normal(size=(4, *spec.shape)) > 0, spec.dtype) for spec in expert.inputs]
    indices, mask, weights = make_selection()
    output = jax.jit(local_mixture, static_argnums=(0, 2))(expert, params, GRID, indices, mask, weights, *inputs)
    apply = jax.jit(expert.apply)
    for b in range(4):
        expected = jnp.zeros(inputs[0].shape[1:])
        for k in range(2):
            if mask[b, k]:
                one = take(params, int(indices[b, k, 0]) * 3 + int(indices[b, k, 1]))
                expected += weights[b, k] * apply(one, *(part[b : b + 1] for part in inputs))[0]
        expected = expected if mask[b].any() else inputs[0][b]
        np.testing.assert_allclose(output[b], expected, atol=1e-5)


def test_a_layer_without_any_live_expert_is_the_identity_without_nan():
    """All experts dead: the output is the input, its gradient passes through, gate and experts get exact zeros."""
    router, expert = product_key(GRID), feedforward(d_model=4)
    gate, params = router.init(jax.random.key(0), 4), init_experts(jax.random.key(1), expert, "ffn", GRID)
    x = jax.random.normal(jax.random.key(2), (3, 4))

    def layer(gate, params, x):
        scores = router.scores(gate, x)
        indices, mask = router.select(scores, 2, jnp.zeros(GRID, bool))
        weights = router.combine(gather_logits(scores, indices, router.grid_size), mask)
        return local_mixture(expert, params, GRID, indices, mask, weights, x)

    output, pull_back = jax.vjp(jax.jit(layer), gate, params, x)
    np.testing.assert_array_equal(output, x)
    cotangent = jax.random.normal(jax.random.key(3), x.shape)
    gate_grad, params_grad, x_grad = pull_back(cotangent)
    np.testing.assert_array_equal(x_grad, cotangent)
    assert_trees_close((gate_grad, params_grad), jax.tree.map(jnp.zeros_like, (gate, params)), atol=0)


def test_masked_experts_have_no_influence_even_if_broken():
    """An expert full of NaN that is masked changes neither the output nor a gradient."""
    indices, mask, weights = make_selection()
    factors = jnp.arange(6.0).at[4].set(jnp.nan).at[3].set(jnp.inf)  # chosen by samples 1 and 3, masked in both
    x = jnp.ones((4, 2))
    loss, (factor_grad, x_grad) = jax.value_and_grad(
        lambda p, x: jnp.sum(local_mixture(SCALE, p, GRID, indices, mask, weights, x)), argnums=(0, 1)
    )(jnp.where(jnp.isfinite(factors), factors, 7.0), x)
    assert bool(jnp.isfinite(local_mixture(SCALE, factors, GRID, indices, mask, weights, x)).all())
    np.testing.assert_array_equal(factor_grad[3:5], 0)
    np.testing.assert_allclose(float(loss), 2 * (0.75 * 5 + 1 + 0.5 * 5 + 0.5 * 2 + 1))
    assert bool(jnp.isfinite(x_grad).all())


def test_a_node_makes_the_same_parameters():
    """A cell of the stacked grid holds what a node makes for its uid; other cells and prefixes differ."""
    expert, key = feedforward(d_model=4), jax.random.key(7)
    stacked = init_experts(key, expert, "ffn", GRID)
    uids = "ffn.[0:2].[0:3]", "other.0.0", "deep.1.0.250"
    backends = make_backends(dict.fromkeys(uids, expert), None, seed=7)
    for index, uid in enumerate(all_uids("ffn", GRID)):
        assert_trees_close(take(stacked, index), backends[str(uid)].params, atol=1e-7)
    assert_trees_close(init_by_uid(key, expert, "deep", (1, 0, 250)), backends["deep.1.0.250"].params, atol=1e-7)
    kernels = [backend.params["Dense_0"]["kernel"] for backend in backends.values()]
    for left, right in itertools.combinations(kernels, 2):
        assert not np.allclose(left, right)


def test_many_experts_are_drawn_a_few_at_a_time():
    """They are then the same ones, also the last few: 65 experts of 2^16 numbers are more than are drawn at once."""
    key, large = jax.random.key(7), SCALE._replace(init=lambda key: jax.random.normal(key, (1 << 16,)))
    stacked = init_experts(key, large, "ffn", (65,))
    for cell in (0, 1, 63, 64):
        np.testing.assert_allclose(stacked[cell], init_by_uid(key, large, "ffn", (cell,)), atol=1e-6)


def test_load_counts_served_samples():
    """Masked choices are not load: expert 5 serves two samples, 0, 1 and 2 one each."""
    indices, mask, _ = make_selection()
    assert expert_load(indices, mask, GRID).tolist() == [1, 1, 1, 0, 0, 2]


def test_experts_that_draw_get_the_key_of_each_sample():
    """Wherever the sample goes; without keys nothing is random, and experts that take none refuse them."""
    noisy = SCALE._replace(
        apply=lambda factor, x, keys=None: factor * x + (0 if keys is None else keys[:, :1].astype(jnp.float32)),
        takes_key=True,
    )
    indices, mask, weights = make_selection()
    x, keys = jnp.ones((4, 2)), jnp.array([[10, 0], [20, 0], [30, 0], [40, 0]], jnp.uint32)
    plain = local_mixture(SCALE, jnp.arange(6.0), GRID, indices, mask, weights, x)
    np.testing.assert_array_equal(local_mixture(noisy, jnp.arange(6.0), GRID, indices, mask, weights, x), plain)
    drawn = local_mixture(noisy, jnp.arange(6.0), GRID, indices, mask, weights, x, dropout_keys=keys)
    # Weights sum to 1 but for the last sample, which no expert sees.
    np.testing.assert_allclose(drawn - plain, [[10, 10], [20, 20], [30, 30], [0, 0]], rtol=1e-6)
    with pytest.raises(ValueError, match="'scale' takes no dropout keys"):
        local_mixture(SCALE, jnp.ones(6), GRID, indices, mask, weights, x, dropout_keys=keys)
    with pytest.raises(ValueError, match=r"takes 1 inputs \(x\), got 2"):
        local_mixture(SCALE, jnp.ones(6), GRID, indices, mask, weights, x, x)
    with pytest.raises(ValueError, match="needs 3 coordinates, got 2"):
        local_mixture(SCALE, jnp.ones(6), (1, *GRID), indices, mask, weights, x)


def test_an_output_of_another_shape_or_type_leaves_no_rest():
    """Weights add nothing for what they leave over: half a weight is half an output, and none is zero."""
    wide = SCALE._replace(
        apply=lambda factor, x: factor * jnp.concatenate([x, x], axis=1),
        output=TensorSpec(name="y", shape=(4,), dtype="float32", differentiable=True),
    )
    indices, mask, weights = make_selection()
    output = local_mixture(wide, jnp.arange(6.0), GRID, indices, mask, weights / 2, jnp.ones((4, 2)))
    np.testing.assert_allclose(output[:, 0], [0.75 * 5 / 2, 1 / 2, (0.5 * 5 + 0.5 * 2) / 2, 0])
    half = SCALE._replace(apply=lambda factor, x: (factor * x).astype(jnp.bfloat16))
    assert local_mixture(half, jnp.arange(6.0), GRID, indices, mask, weights, jnp.ones((4, 2)))[3].tolist() == [0, 0]


OPTIMIZERS = {
    "sgd+momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "clip+adam": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    "amsgrad": optax.amsgrad(1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_expert_is_updated_as_if_alone(name):
    """Steps in which different experts take part equal separate optimisers; the others do not move by a bit."""
    optimizer = OPTIMIZERS[name]
    rng = np.random.default_rng(0)

    def draw():
        return {
            name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in (("w", (3, 4)), ("b", (3, 1)))
        }

    params = draw()
    state = init_opt_states(optimizer, params)
    alone = [take(params, e) for e in range(3)]
    alone_states = [optimizer.init(one) for one in alone]
    step = jax.jit(lambda *args: update_experts(optimizer, *args))
    step_alone = jax.jit(optimizer.update)
    for used in ([True, True, False], [False, True, False], [True, True, False]):
        # Expert 1's gradient is a hundred times larger: clipping by a common norm would shrink expert 0's.
        grads = jax.tree.map(lambda leaf: leaf.at[1].multiply(100.0), draw())
        before = (params, state)
        params, state = step(params, state, grads, jnp.array(used))
        for e in range(3):
            if used[e]:
                updates, alone_states[e] = step_alone(take(grads, e), alone_states[e], alone[e])
                alone[e] = optax.apply_updates(alone[e], updates)
            else:
                assert_trees_close(take((params, state), e), take(before, e), rtol=0, atol=0)
            assert_trees_close(take(params, e), alone[e], atol=1e-6)
            assert_trees_close(take(state, e), alone_states[e], rtol=1e-5, atol=1e-6)


SQUARE = (4, 4)
ROUTER = product_key(SQUARE, init_scale=1.0)
ROW = TensorSpec(name="x", shape=(3,), dtype="float32", differentiable=True)
SMALL = Expert("small", lambda key: jax.random.normal(key, (1, 3)), lambda w, x: x + jnp.tanh(w[0] * x), (ROW,), ROW)
LARGE = SMALL._replace(init=lambda key: jax.random.normal(key, (TURN_BYTES // 12 + 1, 3)))
"""Experts of which the chosen take their steps all at once, and, large enough for it, one after the other."""
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1))


def loss(gates, experts, x, alive):
    """Two layers: what the second chooses depends on the first."""
    layers = []
    for gate, params, own_alive in zip(gates, experts, alive, strict=True):
        x, aux = dmoe_layer(SMALL, params, ROUTER, 2, ROUTER.scores(gate, x), own_alive, x)
        layers.append(aux)
    return jnp.sum(jnp.sin(x)), layers


@pytest.mark.slow
@pytest.mark.parametrize("expert", [LARGE, SMALL], ids=["in turns", "at once"])
def test_updates_of_the_chosen_equal_updates_of_all(expert):
    """Loss, gradients, parameters and states agree in three steps; who is not chosen does not move by a bit."""
    keys = jax.random.split(jax.random.key(0))
    gates = [ROUTER.init(own, 3) for own in keys]
    experts = [jax.vmap(expert.init)(jax.random.split(own, 16)) for own in keys]
    states = [init_opt_states(CLIPPED, layer) for layer in experts]

    def step(gradient, update):
        @jax.jit
        def run(experts, states, *args):
            (value, layers), (grads, expert_grads) = gradient(gates, experts, *args)
            used = [layer.load > 0 for layer in layers]
            new = [update(CLIPPED, *own) for own in zip(experts, states, expert_grads, used, strict=True)]
            return (value, grads), expert_grads, used, [each[0] for each in new], [each[1] for each in new]

        return run

    of_all = step(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), update_experts)
    of_chosen = step(local_update.chosen_value_and_grad(loss, layers_of=lambda layers: layers), update_chosen)
    rng, ours, theirs = np.random.default_rng(0), [experts, states], [experts, states]
    for number in range(3):
        x = jnp.asarray(rng.normal(size=(2, 3)), jnp.float32)
        # Then one slot of each sample has no expert.
        alive = jnp.ones((2, *SQUARE), bool) if number != 1 else jnp.zeros((2, *SQUARE), bool).at[:, 1, 1].set(True)
        before = ours
        expected, _, used, *theirs = of_all(*theirs, x, alive)
        found, compact, used, *ours = of_chosen(*ours, x, alive)
        close = (found, [*ours]), (expected, [*theirs])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-5), *close)
        assert {leaf.shape[0] for leaf in jax.tree.leaves(compact)} == {4}
        for layer, is_used in enumerate(used):
            assert 0 < int(is_used.sum()) <= 4
            still = np.flatnonzero(~np.asarray(is_used))
            for old, new in zip(before, ours, strict=True):
                unmoved = [
                    jax.tree.map(lambda leaf, of=still: np.asarray(leaf)[of], each[layer]) for each in (old, new)
                ]
                jax.tree.map(np.testing.assert_array_equal, *unmoved)


@pytest.mark.slow
@pytest.mark.parametrize("num_grads", [3, 20])
def test_large_experts_take_their_steps_in_place(num_grads):
    """No more than one expert is copied: to copy all in every turn takes twenty times as long."""
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.normal(size=(20, 100, 200)), jnp.float32) for name in ("in", "out")}
    assert params["in"].nbytes // 20 * 2 > TURN_BYTES
    states = init_opt_states(CLIPPED, params)
    all_grads = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), params)
    used = jnp.zeros(20, bool).at[jnp.array([0, 7, 19])].set(True)
    expected = update_experts(CLIPPED, params, states, all_grads, used)
    grads = all_grads if num_grads == 20 else jax.tree.map(lambda leaf: leaf[used], all_grads)
    step = jax.jit(lambda *args: update_chosen(CLIPPED, *args), donate_argnums=(0, 1))
    analysis = step.lower(params, states, grads, used).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < params["in"].nbytes
    found = step(params, states, grads, used)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-5), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("width", [TURN_BYTES // 2, 3])
def test_updates_can_be_transformed(width):
    """Side by side for several seeds, and differentiated by the gradients, as meta-learning does; bfloat16 stays so."""
    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.normal(size=(2, 5, width)), jnp.bfloat16)
    grads = jnp.asarray(rng.normal(size=(2, 2, width)), jnp.float32)  # wider than the parameters
    used = jnp.asarray([[True, False, False, True, False], [False, True, False, False, False]])
    optimizer = optax.sgd(0.5, momentum=0.9)
    update = functools.partial(update_chosen, optimizer)
    both = jax.vmap(update)(params, jax.vmap(functools.partial(init_opt_states, optimizer))(params), grads, used)
    assert both[0].dtype == jnp.bfloat16
    for seed in range(2):
        one = update(params[seed], init_opt_states(optimizer, params[seed]), grads[seed], used[seed])
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(itemgetter(seed), both), one)
        np.testing.assert_array_equal(np.flatnonzero((one[0] != params[seed]).any(axis=1)), np.flatnonzero(used[seed]))
    noisy = optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(1)), optax.sgd(0.5))
    new, _ = jax.jit(functools.partial(update_chosen, noisy))(
        params[0], init_opt_states(noisy, params[0]), grads[0], used[0]
    )
    np.testing.assert_array_equal(np.flatnonzero((new != params[0]).any(axis=1)), [0, 3])
    start = jnp.zeros((5, width))
    sums = jax.grad(lambda own: jnp.sum(update(start, init_opt_states(optimizer, start), own, used[0])[0]))(grads[0])
    np.testing.assert_allclose(sums, np.full((2, width), -0.5))
