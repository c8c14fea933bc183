"""One expert on a node: padding changes nothing, updates happen once and in place, frozen experts stay."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax.experts.base import init_by_uid
from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.node.backend import ExpertBackend, bucket_of, buckets_up_to, make_backends

EXPERT = feedforward(d_model=6)
OPTIMIZER = optax.adam(1e-2)


def make(optimizer: optax.GradientTransformation | None = OPTIMIZER) -> tuple[ExpertBackend, Any]:
    params = EXPERT.init(jax.random.key(0))
    return ExpertBackend(EXPERT, optimizer, jax.tree.map(jnp.copy, params)), params


def rows(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 6)).astype(np.float32)


def test_buckets_are_powers_of_two() -> None:
    """1..5 rows fall into 1, 2, 4, 4, 8."""
    assert [bucket_of(n) for n in range(1, 6)] == [1, 2, 4, 4, 8]
    assert buckets_up_to(5) == (1, 2, 4, 8)
    with pytest.raises(ValueError, match="at least one row, got 0"):
        bucket_of(0)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_forward_equals_the_plain_network(count: int) -> None:
    """Padding to a power of two does not change the rows that were asked for."""
    backend, params = make()
    x = rows(count, seed=1)
    np.testing.assert_allclose(backend.forward([x]), EXPERT.apply(params, jnp.asarray(x)), atol=1e-6)


def test_backward_is_one_optimiser_step() -> None:
    """Input gradients are taken before the update, and the update is Optax's on the summed gradient."""
    backend, params = make()
    x, grads = rows(3, seed=2), rows(3, seed=3)
    (input_grads,) = backend.backward([x], grads)
    _, pull = jax.vjp(EXPERT.apply, params, jnp.asarray(x))
    expected_param_grads, expected_input_grads = pull(jnp.asarray(grads))
    updates, _ = OPTIMIZER.update(expected_param_grads, OPTIMIZER.init(params), params)
    np.testing.assert_allclose(input_grads, expected_input_grads, atol=1e-5)
    expected = optax.apply_updates(params, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), backend.params, expected)
    assert backend.update_count == 1


def test_frozen_expert_returns_gradients_and_stays() -> None:
    """With updates switched off the gradients are the same and the parameters bitwise so."""
    learning, _ = make()
    frozen, params = make(optimizer=None)
    x, grads = rows(4, seed=4), rows(4, seed=5)
    np.testing.assert_allclose(frozen.backward([x], grads)[0], learning.backward([x], grads)[0], atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, frozen.params, params)
    assert frozen.update_count == 0


def test_warm_up_compiles_everything_and_changes_nothing(compilations: Any) -> None:
    """After warm-up no batch size up to the bound compiles, and the expert is as it was."""
    backend, params = make()
    backend.warm_up(4)
    jax.tree.map(np.testing.assert_array_equal, backend.params, params)
    assert backend.update_count == 0
    compiled = compilations.count
    for count in (1, 2, 3, 4):
        backend.forward([rows(count, seed=6)])
        backend.backward([rows(count, seed=6)], rows(count, seed=7))
    assert compilations.count == compiled


def test_experts_of_one_kind_share_their_programs(compilations: Any) -> None:
    """A node with many experts compiles as much as a node with one."""
    (first, _), (second, _) = make(), make()
    first.warm_up(2)
    compiled = compilations.count
    second.forward([rows(2, seed=8)])
    second.backward([rows(2, seed=8)], rows(2, seed=9))
    assert compilations.count == compiled


def test_make_backends_serves_patterns_from_one_seed() -> None:
    """Each expert starts from what the seed and its uid decide, and has an optimiser state of its own."""
    other = feedforward(d_model=6, expansion=2)
    backends = make_backends({"ffn.[0:2].1": EXPERT, "wide.3": other}, OPTIMIZER, seed=5)
    assert list(backends) == ["ffn.0.1", "ffn.1.1", "wide.3"]
    expected = init_by_uid(jax.random.key(5), EXPERT, "ffn", (1, 1))
    jax.tree.map(np.testing.assert_array_equal, backends["ffn.1.1"].params, expected)
    assert backends["wide.3"].expert is other
    backends["ffn.0.1"].backward([rows(1, seed=1)], rows(1, seed=2))
    assert [backend.update_count for backend in backends.values()] == [1, 0, 0]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ([], "expected at least one expert, got none"),
        (["ffn.[0:2].1", "ffn.1.[0:3]"], r"expert ffn.1.1 is named twice, by 'ffn.\[0:2\].1' and by 'ffn.1.\[0:3\]'"),
        (["ffn"], "expected a grid pattern such as .*, got 'ffn'"),
        (["ffn.[2:1]"], r"bad grid pattern 'ffn.\[2:1\]'"),
    ],
)
def test_make_backends_names_a_bad_pattern(patterns: list[str], message: str) -> None:
    """Nothing is made of a grid that is wrong."""
    with pytest.raises(ValueError, match=message):
        make_backends(dict.fromkeys(patterns, EXPERT), OPTIMIZER, seed=0)
