"""One large batch as pure functions: micro-batches add up, every way of sharing, loss scaling."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax.optim.collaborative import Collaborative, CollaborativeState, Contribution, LossScale, collaborative
from dmoe_jax.optim.moshpit import moshpit_average

PARAMS = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array(0.25)}


def loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def close(found: Any, expected: Any) -> None:
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5), found, expected)


def data(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 3)).astype(np.float32), rng.normal(size=count).astype(np.float32)


def whole_of(parts: list[Contribution]) -> Contribution:
    """Contribution that the network makes out of those of several peers."""
    samples = sum(float(part.samples) for part in parts)
    mean = jax.tree.map(
        lambda *leaves: sum(leaf * part.samples for leaf, part in zip(leaves, parts, strict=True)) / samples,
        *(part.mean for part in parts),
    )
    return Contribution(mean, samples, sum(float(part.overflows) for part in parts))


def gathered(together: Collaborative, state: CollaborativeState, sizes: list[int], x: Any, y: Any) -> Any:
    """The state after micro-batches of these sizes."""

    @jax.jit
    def step(state: CollaborativeState, x: Any, y: Any) -> CollaborativeState:
        scale = 1.0 if state.scale is None else state.scale
        return together.gather(state, jax.grad(lambda params: loss(params, x, y) * scale)(state.params), len(x))

    for part in zip(*(np.split(array, np.cumsum(sizes)[:-1]) for array in (x, y)), strict=True):
        state = step(state, *part)
    return state


def test_unequal_micro_batches_of_two_peers_make_the_step_of_one_batch() -> None:
    x, y = data(32)
    schedule = optax.linear_schedule(0.1, 0.0, 4)
    together, oracle = collaborative(optax.adam(schedule)), optax.adam(schedule)
    states = [together.init(PARAMS), together.init(PARAMS)]
    params, inner = PARAMS, oracle.init(PARAMS)
    for _ in range(4):
        states[0] = gathered(together, states[0], [3, 5, 8], x[:16], y[:16])
        states[1] = gathered(together, states[1], [15, 1], x[16:], y[16:])
        whole = whole_of([together.contribution(state) for state in states])
        states = [together.step(state, whole) for state in states]
        updates, inner = oracle.update(jax.grad(loss)(params, x, y), inner, params)
        params = optax.apply_updates(params, updates)
        for state in states:
            close(state.params, params)
    assert int(states[0].steps) == 4
    assert float(states[0].samples) == 0


def test_parameters_are_averaged_by_samples() -> None:
    together = collaborative(optax.sgd(0.1), shared="parameters")
    x, y = data(12)
    one = gathered(together, together.init(PARAMS), [4], x[:4], y[:4])
    two = gathered(together, together.init(PARAMS), [4, 4], x[4:], y[4:])
    by_hand = jax.tree.map(lambda a, b: (4 * a + 8 * b) / 12, one.params, two.params)
    whole = whole_of([together.contribution(one), together.contribution(two)])
    for state in (together.step(one, whole), together.step(two, whole)):
        close(state.params, by_hand)


def test_pseudo_gradients_are_diloco() -> None:
    together = collaborative(optax.adam(0.01), shared="pseudo_gradients")
    settings = {"outer": optax.sgd(0.7, momentum=0.9, nesterov=True), "average": lambda tree, _: tree}
    diloco = moshpit_average(optax.adam(0.01), every=2, what="pseudo_gradients", **settings)
    x, y = data(16)
    state, params, of_diloco = together.init(PARAMS), PARAMS, diloco.init(PARAMS)
    for _ in range(3):
        state = gathered(together, state, [8, 8], x, y)
        state = together.step(state, together.contribution(state))
        for start in (0, 8):
            grads = jax.grad(loss)(params, x[start : start + 8], y[start : start + 8])
            updates, of_diloco = diloco.update(grads, of_diloco, params)
            params = optax.apply_updates(params, updates)
        close(state.params, params)


def test_an_overflow_anywhere_halves_the_scale_everywhere_and_costs_one_micro_batch() -> None:
    together = collaborative(optax.sgd(0.1), loss_scale=LossScale(initial=4.0, grow_every=2))
    x, y = data(8)
    good, bad = together.init(PARAMS), together.init(PARAMS)
    good = gathered(together, good, [4], x[:4], y[:4])
    assert float(good.scale) == 4.0
    bad = gathered(together, bad, [4], np.full_like(x[:4], 3e38), y[:4])
    bad = gathered(together, bad, [4], x[4:], y[4:])
    assert (float(bad.samples), float(bad.overflows)) == (4, 1)
    whole = whole_of([together.contribution(good), together.contribution(bad)])
    states = [together.step(good, whole), together.step(bad, whole)]
    by_hand = jax.tree.map(lambda own, grad: own - 0.1 * grad, PARAMS, jax.grad(loss)(PARAMS, x, y))
    for state in states:
        assert float(state.scale) == 2.0
        close(state.params, by_hand)
    for expected in (2.0, 4.0):  # it grows after two good steps
        states = [gathered(together, state, [4], x[:4], y[:4]) for state in states]
        whole = whole_of([together.contribution(state) for state in states])
        states = [together.step(state, whole) for state in states]
        assert float(states[0].scale) == expected


def test_finite_gradients_whose_sum_is_not_are_left_out() -> None:
    """The mean of 16 samples fits float32, their sum does not: the step is made of the others, and it is counted."""
    together = collaborative(optax.sgd(1.0))
    state = together.gather(together.init(PARAMS), jax.tree.map(lambda leaf: jnp.full_like(leaf, 1e38), PARAMS), 16)
    state = together.gather(state, jax.tree.map(jnp.ones_like, PARAMS), 4)
    assert (float(state.samples), float(state.overflows)) == (4, 1)
    state = together.step(state, together.contribution(state))
    close(state.params, jax.tree.map(lambda old: old - 1, PARAMS))


def test_a_step_of_nothing_changes_nothing_and_counts() -> None:
    together = collaborative(optax.adam(0.1))
    state = together.init(PARAMS)
    stepped = together.step(state, together.contribution(state))
    assert int(stepped.steps) == 1
    jax.tree.map(np.testing.assert_array_equal, stepped.params, PARAMS)
    poisoned = Contribution(jax.tree.map(lambda leaf: leaf * np.nan, PARAMS), 4.0, 0.0)
    jax.tree.map(np.testing.assert_array_equal, together.step(state, poisoned).params, PARAMS)


def test_bfloat16_parameters_keep_their_type_and_sums_are_float32() -> None:
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    for shared in ("gradients", "parameters", "pseudo_gradients"):
        together = collaborative(optax.adam(0.1), shared=shared)  # type: ignore[arg-type]
        x, y = data(8)
        state = gathered(together, together.init(params), [4, 4], x, y)
        assert state.total is None or state.total["w"].dtype == jnp.float32
        state = together.step(state, together.contribution(state))
        assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.bfloat16.dtype}


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="an outer optimiser is for pseudo_gradients, not for gradients"):
        collaborative(optax.sgd(0.1), outer=optax.sgd(1.0))
    with pytest.raises(ValueError, match="expected 1 <= initial <= largest"):
        LossScale(initial=0.5)
