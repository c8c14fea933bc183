"""Error feedback: what is sent, what stays, and that a payload carries exactly what the residual was relieved of."""

import copy
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax import optim
from dmoe_jax.optim import ErrorFeedback, apply_average, compress, moshpit_average, what_to_send, with_average
from dmoe_jax.optim.host_state import without_gathered
from dmoe_net.wire.sparse import SparseCoding, encode_sparse, parse_sparse_untrusted, to_dense

RNG = np.random.default_rng(0)
SMALL = SparseCoding(block_size=16, kept=2, bits=2)
SPARSE = ErrorFeedback(coding=SMALL, decay=0.9)


def numpy_round(total: np.ndarray, coding: SparseCoding) -> np.ndarray:
    """Values that are sent of a flat array, with zeros for all others, by plain loops."""
    sent = np.zeros(total.size)
    for start in range(0, total.size, coding.block_size):
        block = total[start : start + coding.block_size].astype(np.float64)
        kept = -(-block.size * coding.kept // coding.block_size)
        places = [place for place in np.argsort(-np.abs(block), kind="stable")[:kept] if block[place] != 0]
        if not places:
            continue
        size = np.abs(block[places])
        low, high = 2, coding.greatest_level
        scale = size.mean() * 2 / (low + high)
        for _ in range(4):
            levels = np.clip(np.round(size / scale), low, high)
            scale = (size * levels).sum() / (levels**2).sum()
        levels = np.clip(np.round(size / scale), low, high)
        sent[start + np.array(places)] = np.sign(block[places]) * levels * scale
    return sent


def test_a_block_by_hand() -> None:
    """Two of 3, -2, 0.1 and zeros are kept: exactly 3 and 2 times the scale 1, so nothing but 0.1 stays. The one value
    of a block comes through exactly, and a block of zeros has none."""
    x = jnp.zeros(48).at[jnp.array([4, 7, 9, 20])].set(jnp.array([3.0, -2.0, 0.1, -0.3]))
    sent = compress({"w": x}, optim.zero_residual({"w": x}), SPARSE)
    np.testing.assert_allclose(sent.tree["w"], x.at[9].set(0), rtol=1e-6)
    np.testing.assert_allclose(sent.residual["w"], jnp.zeros(48).at[9].set(0.1), atol=1e-6)
    assert [int(np.count_nonzero(part.levels)) for part in sent.parts] == [3]


@pytest.mark.parametrize("coding", [SMALL, SparseCoding(block_size=16, kept=5, bits=4)], ids=["2 bits", "4 bits"])
def test_rounds_against_plain_loops(coding: SparseCoding) -> None:
    """e <- decay e + x, c = Q(TopK(e)), e <- e - c: several rounds of a tree with whole and short blocks."""
    shapes = {"a": (5, 7), "b": (16,), "c": (), "d": (3,), "e": (0, 4)}
    feedback = ErrorFeedback(coding=coding, decay=0.9)
    step = jax.jit(functools.partial(compress, feedback=feedback))
    residual = optim.zero_residual({name: jnp.zeros(shape) for name, shape in shapes.items()})
    own = {name: np.zeros(int(np.prod(shape))) for name, shape in shapes.items()}
    for _ in range(4):
        tree = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        sent = step(tree, residual)
        residual = sent.residual
        for name, shape in shapes.items():
            total = 0.9 * own[name] + tree[name].reshape(-1)
            expected = numpy_round(total, coding)
            own[name] = total - expected
            np.testing.assert_allclose(sent.tree[name], expected.reshape(shape), rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(residual[name], own[name].reshape(shape), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [2, 4])
def test_a_payload_carries_just_what_left(bits: int) -> None:
    """A peer decodes, bit for bit, the tree that was taken off the residual."""
    coding = SparseCoding(block_size=64, kept=4, bits=bits)
    tree = {"w": RNG.standard_t(3, size=(30, 11)).astype(np.float32), "b": RNG.normal(size=5).astype(np.float32)}
    sent = jax.jit(functools.partial(compress, feedback=ErrorFeedback(coding=coding)))(tree, optim.zero_residual(tree))
    payload = encode_sparse(optim.sparse_vector(sent.parts, tree, coding))
    arrived = to_dense(parse_sparse_untrusted(payload, coding, (5, 330)))
    expected = np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(sent.tree)])
    assert np.array_equal(arrived, expected)


def test_it_contracts() -> None:
    """|x - c|^2 <= (1 - k / n) |x|^2, which convergence of error feedback rests on (EF21), rounding included."""
    for draw in (RNG.normal, RNG.laplace, functools.partial(RNG.standard_t, 2)):
        x = draw(size=4096 * 3).astype(np.float32)
        sent = compress(x, optim.zero_residual(x), ErrorFeedback())
        assert (np.asarray(sent.residual) ** 2).sum() <= (1 - 64 / 4096) * (x.astype(np.float64) ** 2).sum()


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e3, 1e30])
def test_scale_does_not_matter(scale: float) -> None:
    """From the smallest to the largest numbers: the same levels at the same places."""
    x = RNG.normal(size=64).astype(np.float32)
    plain, scaled = (compress(each, optim.zero_residual(x), SPARSE) for each in (x, x * np.float32(scale)))
    np.testing.assert_allclose(scaled.tree / np.float32(scale), plain.tree, rtol=1e-4)


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_a_fault_is_seen_and_not_sent(fault: float) -> None:
    """It passes as something that is not finite, and nothing can be sent of it."""
    sent = compress(jnp.zeros(16).at[3].set(fault), optim.zero_residual(jnp.zeros(16)), SPARSE)
    assert not np.isfinite(sent.tree).all()
    with pytest.raises(ValueError, match="finite"):
        encode_sparse(optim.sparse_vector(sent.parts, jnp.zeros(16), SMALL))


def test_bfloat16_keeps_its_residual_in_float32() -> None:
    """A thousand gradients of 2^-9 beside a parameter's gradient of 1 add up in float32; in bfloat16 they would not."""
    coding = SparseCoding(block_size=2, kept=1, bits=2)
    grads = jnp.array([1.0, 2.0**-9], jnp.bfloat16)
    total, residual = np.zeros(2), optim.zero_residual(grads)
    once = jax.jit(functools.partial(compress, feedback=ErrorFeedback(coding=coding, decay=1.0)))
    for _ in range(1000):
        sent = once(grads, residual)
        residual = sent.residual
        total += np.asarray(sent.tree, np.float64)
    assert residual.dtype == jnp.float32
    np.testing.assert_allclose(total + np.asarray(residual), [1000, 1000 / 512], rtol=2e-2)
    assert total[1] > 0


def sgd_peers(optimizer: Any, grads: np.ndarray, params: np.ndarray) -> tuple[np.ndarray, Any]:
    """Parameters [peers, n] after grads [steps, peers, n], jitted over a vmapped axis."""

    @jax.jit
    @functools.partial(jax.vmap, axis_name="peers")
    def step(params: Any, state: Any, grad: Any) -> Any:
        updates, state = optimizer.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    held, state = jnp.asarray(params), jax.vmap(optimizer.init)(jnp.asarray(params))
    for grad in grads:
        held, state = step(held, state, grad)
    return np.asarray(held), state


def pmean(tree: Any, _: Any) -> Any:
    return jax.lax.pmean(tree, "peers")


def test_sparse_diloco_against_plain_loops() -> None:
    """SparseLoCo, algorithm 1: H steps of SGD, e <- beta e + (anchor - theta), c = Q(TopK(e)), e <- e - c,
    anchor <- anchor - alpha mean(c), theta <- anchor."""
    peers, size, every, decay, rate, outer = 3, 40, 4, SPARSE.decay, 0.1, 0.8
    grads = RNG.normal(size=(12, peers, size)).astype(np.float32)
    start = RNG.normal(size=size).astype(np.float32)
    settings: dict[str, Any] = {"what": "pseudo_gradients", "outer": optax.sgd(outer), "average": pmean}
    optimizer = moshpit_average(optax.sgd(rate), every=every, compress=SPARSE, **settings)
    held, state = sgd_peers(optimizer, grads, np.tile(start, (peers, 1)))
    anchor, residuals = start.astype(np.float64), np.zeros((peers, size))
    for first in range(0, 12, every):
        theta = anchor - rate * grads[first : first + every].sum(axis=0)
        total = decay * residuals + (anchor - theta)
        sent = np.stack([numpy_round(row, SMALL) for row in total])
        residuals = total - sent
        anchor = anchor - outer * sent.mean(axis=0)
    np.testing.assert_allclose(held, np.tile(anchor, (peers, 1)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.residual, residuals, rtol=1e-3, atol=1e-5)


def test_compressed_gradients_against_plain_loops() -> None:
    """Gradients of every step: theta <- theta - rate * mean(Q(TopK(e + g)))."""
    peers, size = 3, 20
    grads = RNG.normal(size=(6, peers, size)).astype(np.float32)
    feedback = ErrorFeedback(coding=SMALL, decay=1.0)
    optimizer = moshpit_average(optax.sgd(0.1), what="gradients", average=pmean, compress=feedback)
    held, _ = sgd_peers(optimizer, grads, np.zeros((peers, size), np.float32))
    theta, residuals = np.zeros(size), np.zeros((peers, size))
    for grad in grads:
        sent = np.stack([numpy_round(row, SMALL) for row in residuals + grad])
        residuals = residuals + grad - sent
        theta -= 0.1 * sent.mean(axis=0)
    np.testing.assert_allclose(held, np.tile(theta, (peers, 1)), rtol=1e-4, atol=1e-5)


def offered(what: Any, **settings: Any) -> tuple[Any, Any, Any, Any]:
    """A peer whose host averages, after a step with the gradient 0, 1, ...: (optimiser, parameters, state, offer)."""
    optimizer = moshpit_average(optax.sgd(0.1), what=what, compress=SPARSE, **settings)
    params = jnp.zeros(16)
    updates, state = optimizer.update(jnp.arange(16.0), optimizer.init(params), params)
    params = optax.apply_updates(params, updates)
    return optimizer, params, state, what_to_send(state, params)


def test_a_lost_averaging_loses_nothing() -> None:
    """The next pseudo-gradient has what was offered, and the residual stays; lost gradients are one's own step."""
    optimizer, params, state, before = offered("pseudo_gradients", outer=optax.sgd(1.0))
    held, state = apply_average(optimizer, with_average(state, before, None), params)
    assert int(state.lost) == 1
    assert not np.any(state.residual)
    assert np.array_equal(what_to_send(state, held).tree, before.tree)
    assert np.array_equal(held, params)
    optimizer, params, state, sent = offered("gradients")
    held, state = apply_average(optimizer, with_average(state, sent, None), params)
    np.testing.assert_allclose(held, -0.1 * np.arange(16.0), rtol=1e-6)
    assert not np.any(state.residual)


def test_a_newcomer_does_not_send_what_its_donor_will() -> None:
    """The residual of a state that was taken over is zero, its momentum and anchor are not touched."""
    optimizer, params, state, sent = offered("pseudo_gradients", outer=optax.sgd(1.0))
    _, state = apply_average(optimizer, with_average(state, sent, sent.tree), params)
    assert np.any(state.residual)
    fresh = without_gathered(state)
    assert not np.any(fresh.residual)
    assert np.array_equal(fresh.anchor, state.anchor)


def test_a_state_says_how_it_is_compressed() -> None:
    """After an update, a pickle or a copy too; equal settings make states of one structure."""
    _, params, state, _ = offered("gradients")
    for each in (state, pickle.loads(pickle.dumps(state)), copy.deepcopy(state), jax.tree.map(jnp.copy, state)):
        assert optim.host_state(each).feedback == SPARSE
        assert jax.tree.structure(each) == jax.tree.structure(offered("gradients")[2])
    other = moshpit_average(optax.sgd(0.1), what="gradients", compress=ErrorFeedback(coding=SMALL, decay=0.8))
    assert jax.tree.structure(other.init(params)) != jax.tree.structure(state)


def test_what_is_refused() -> None:
    """Wrong settings and calls say what was expected."""
    with pytest.raises(ValueError, match=r"decay must be from 0 to 1, got 1\.5"):
        ErrorFeedback(decay=1.5)
    with pytest.raises(ValueError, match="compress is for gradients and pseudo_gradients"):
        moshpit_average(optax.sgd(0.1), compress=SPARSE)
    with pytest.raises(ValueError, match="another structure than the tree"):
        compress({"a": jnp.zeros(3)}, jnp.zeros(3), SPARSE)
