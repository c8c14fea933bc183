"""One expert on a node: padding changes nothing, updates happen once and in place, frozen experts stay."""

import gc
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from dmoe_jax.experts import expert_from_functions, expert_from_linen, feedforward
from dmoe_jax.experts.base import init_by_uid
from dmoe_jax.experts.dropout import row_keys_of_seed
from dmoe_jax.node import programs
from dmoe_jax.node.backend import (
    ExpertBackend,
    UpdateRejected,
    make_backends,
)
from dmoe_jax.node.programs import bucket_of, buckets_up_to, expert_programs, nbytes_of

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
    np.testing.assert_allclose(backend.forward([x]), jax.jit(EXPERT.apply)(params, x), atol=1e-6)


def test_backward_is_one_optimiser_step() -> None:
    """Input gradients are taken before the update, and the update is Optax's on the summed gradient."""
    backend, params = make()
    x, grads = rows(3, seed=2), rows(3, seed=3)
    (input_grads,) = backend.backward([x], grads)

    @jax.jit
    def by_hand(params: Any) -> Any:
        _, pull = jax.vjp(EXPERT.apply, params, jnp.asarray(x))
        param_grads, input_grads = pull(jnp.asarray(grads))
        updates, _ = OPTIMIZER.update(param_grads, OPTIMIZER.init(params), params)
        return input_grads, optax.apply_updates(params, updates)

    expected_input_grads, expected = by_hand(params)
    np.testing.assert_allclose(input_grads, expected_input_grads, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), backend.params, expected)
    assert backend.update_count == 1


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="another device selects number by number")
def test_an_update_stores_no_second_state() -> None:
    """Looking whether the outcome is finite takes no memory: temporary buffers are the gradients, and a little."""
    expert = feedforward(d_model=96)
    backend = ExpertBackend(expert, OPTIMIZER, expert.init(jax.random.key(0)))
    x = np.zeros((1, 96), np.float32)
    program = expert_programs(expert, OPTIMIZER).grad_and_update
    compiled = cast(Any, program).lower(*backend.group.read(0), (x,), x, None, np.float32(0)).compile()
    params = nbytes_of(backend.params)
    assert compiled.memory_analysis().temp_size_in_bytes < 1.6 * params  # with selected numbers it is 3 times


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on another device gradients are temporary")
def test_large_experts_share_buffers_for_their_gradients(monkeypatch: pytest.MonkeyPatch, compilations: Any) -> None:
    """They learn as without, one after the other and after a failure, and nothing as large is left to be temporary."""
    monkeypatch.setattr(programs, "LARGE_BYTES", 1)
    expert = feedforward(d_model=64)._replace(name="large")
    sharing = [ExpertBackend(expert, OPTIMIZER, expert.init(jax.random.key(seed))) for seed in range(2)]
    monkeypatch.setattr(programs, "LARGE_BYTES", 1 << 40)
    plain = feedforward(d_model=64)._replace(name="small")
    alone = [ExpertBackend(plain, OPTIMIZER, expert.init(jax.random.key(seed))) for seed in range(2)]
    own = cast(programs.ExpertPrograms, sharing[0].programs)
    for backend in (sharing[0], alone[0]):
        backend.warm_up_bucket(2)
    assert own._grads is not None
    compiled = compilations.count
    for step in range(3):
        x = np.random.default_rng(step).normal(size=(2, 64)).astype(np.float32)
        for backends in (sharing, alone):
            for backend in backends:
                backend.backward([x], x)
    assert compilations.count == compiled
    for ours, theirs in zip(sharing, alone, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ours.state, theirs.state)
    with pytest.raises(UpdateRejected):
        sharing[0].backward([x], np.full_like(x, 3e38))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), sharing[0].state, alone[0].state)
    own._grads = None  # as after a failure
    sharing[1].backward([x], x)
    alone[1].backward([x], x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), sharing[1].state, alone[1].state)


def test_frozen_expert_returns_gradients_and_stays() -> None:
    """With updates switched off the gradients are the same and the parameters bitwise so."""
    learning, _ = make()
    frozen, params = make(optimizer=None)
    x, grads = rows(4, seed=4), rows(4, seed=5)
    np.testing.assert_allclose(frozen.backward([x], grads)[0], learning.backward([x], grads)[0], atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, frozen.params, params)
    assert frozen.update_count == 0


def test_a_frozen_expert_may_have_integer_parameters() -> None:
    """Quantised weights have no gradient, and need none."""
    init = lambda key: {"w": jnp.full(6, 3, jnp.int8)}  # noqa: E731
    expert = expert_from_functions(init, lambda params, x: params["w"] * x, rows(1, 0))
    backend = ExpertBackend(expert, None, expert.init(jax.random.key(0)))
    np.testing.assert_allclose(backend.backward([rows(2, 1)], rows(2, 2))[0], 3 * rows(2, 2), rtol=1e-6)
    assert backend.params["w"].tolist() == [3] * 6


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


def test_warm_up_makes_no_arrays() -> None:
    """Programs are compiled from shapes: a copy of the state for each of them would leave as many holes in the heap."""
    expert = expert_from_linen(nn.Dense(4, name="from_shapes"), rows(1, 0))
    backend = ExpertBackend(expert, optax.adam(0.1), expert.init(jax.random.key(0)))
    gc.collect()  # else what earlier tests have left may go meanwhile
    before = len(jax.live_arrays())
    backend.warm_up_bucket(1)
    backend.warm_up_bucket(2)
    assert len(jax.live_arrays()) == before
    assert backend.programs.warm == {1, 2}


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


HUGE = np.full((2, 6), 1e38, np.float32)


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))])
@pytest.mark.parametrize("inputs_too", [True, False])
def test_no_finite_request_can_poison_an_expert(optimizer: optax.GradientTransformation, inputs_too: bool) -> None:
    """After gradients (and inputs) of 1e38 the expert is finite, says why it did not learn, and goes on learning."""
    backend, params = make(optimizer)
    with pytest.raises(UpdateRejected) as rejected:
        backend.backward([HUGE if inputs_too else rows(2, seed=1)], -HUGE)
    assert rejected.value.reason == "update"
    jax.tree.map(np.testing.assert_array_equal, backend.params, params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(backend.state))
    assert backend.update_count == 0
    untouched, _ = make(optimizer)
    for expert in (backend, untouched):
        expert.backward([rows(2, seed=3)], rows(2, seed=4))
    jax.tree.map(np.testing.assert_array_equal, backend.state, untouched.state)
    assert backend.update_count == 1


def test_an_input_gradient_that_overflows_is_rejected_too() -> None:
    """The optimiser is content with it (its step is bounded), but the trainer could do nothing with infinity."""
    steep = expert_from_functions(
        lambda key: {"w": jnp.full((6,), 1e30)}, lambda params, x: x * jax.lax.stop_gradient(params["w"]), rows(1, 0)
    )
    for optimizer in (OPTIMIZER, None):
        backend = ExpertBackend(steep, optimizer, steep.init(jax.random.key(0)))
        with pytest.raises(UpdateRejected) as rejected:
            backend.backward([rows(2, seed=1)], HUGE)
        assert rejected.value.reason == "input gradient"
        assert backend.update_count == 0


def test_gradients_come_back_in_the_type_of_each_input() -> None:
    """float32 beside bfloat16, with an integer input between them that has none."""
    init = lambda key: {"w": jnp.ones(3)}  # noqa: E731
    examples = np.zeros((1, 3), np.float32), np.zeros(1, np.int32), jnp.zeros((1, 3), jnp.bfloat16)
    expert = expert_from_functions(init, lambda params, x, n, y: params["w"] * x * y + n[:, None], *examples)
    backend = ExpertBackend(expert, optax.sgd(0.1), expert.init(jax.random.key(0)))
    x, n, y = np.full((3, 3), 2.0, np.float32), np.arange(3, dtype=np.int32), np.full((3, 3), 3, jnp.bfloat16)
    output = backend.forward([x, n, y])
    grads = backend.backward([x, n, y], np.ones(output.shape, output.dtype))
    assert [grad.dtype for grad in grads] == [np.float32, jnp.bfloat16]
    np.testing.assert_array_equal(grads[0], np.full((3, 3), 3.0))
    np.testing.assert_array_equal(grads[1].astype(np.float32), np.full((3, 3), 2.0))


CHAINS: dict[str, Any] = {
    "adam": lambda: optax.adam(1e-2),
    "schedule by updates": lambda: optax.sgd(optax.linear_schedule(0.0, 0.1, 4)),
    "lion": lambda: optax.lion(1e-3),
    "lamb": lambda: optax.lamb(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "MultiSteps": lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "multi_transform": lambda: optax.multi_transform(
        {"kernel": optax.adam(1e-2), "other": optax.set_to_zero()},
        lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: "kernel" if path[-1].key == "kernel" else "other", params
        ),
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(0.1), 3),
    "prodigy": lambda: optax.contrib.prodigy(1.0),
    "lbfgs": lambda: optax.lbfgs(1e-2, linesearch=None),
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
}


OFTEN = ("adam", "MultiSteps", "multi_transform", "prodigy", "add_noise")
"""Plain, with a counter, masked, with the initial parameters in its state, with random keys in it."""


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in CHAINS]
)
def test_any_optax_chain_trains_as_by_hand(name: str) -> None:
    """Three updates are Optax's own, with donated states that may alias each other; one program does them all."""
    expert = expert_from_linen(nn.Dense(3), rows(1, 0), check=False)
    params, optimizer = expert.init(jax.random.key(0)), CHAINS[name]()
    backend = ExpertBackend(expert, optimizer, params)

    @jax.jit
    def by_hand(params: Any, state: Any, x: Any, output_grads: Any) -> Any:
        grads = jax.vjp(lambda p: expert.apply(p, x), params)[1](output_grads)[0]
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for step in range(3):
        x, grads = rows(4, seed=step), rows(4, seed=10 + step)[:, :3]
        backend.backward([x], grads)
        params, state = by_hand(params, state, x, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), backend.params, params)
    assert backend.update_count == 3
    assert backend.programs.grad_and_update._cache_size() == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
        optax.polyak_sgd(),
        optax.lbfgs(1e-2),
    ],
)
def test_what_needs_the_loss_is_refused(optimizer: Any) -> None:
    """At construction, before anybody calls: a node has no loss."""
    with pytest.raises(ValueError, match=r"has gradients but no loss .*its update raised TypeError: .*'value'"):
        make(optimizer)


class Dropping(nn.Module):
    """Ordinary dropout."""

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(32)(x))


def test_backward_drops_what_forward_dropped(compilations: Any) -> None:
    """In other batches, at other places and beside other padding; without keys nothing is dropped. All of it is warm
    after the warm-up."""
    expert = expert_from_linen(Dropping(), rows(1, 0))
    backend = ExpertBackend(expert, optax.sgd(0.0), expert.init(jax.random.key(0)))
    backend.warm_up(4)
    compiled = compilations.count
    x, keys = rows(3, seed=1), row_keys_of_seed(11, 3)
    output = backend.forward([x], keys)
    assert 0.2 < (output == 0).mean() < 0.8
    assert (backend.forward([x]) != 0).all()
    np.testing.assert_allclose(backend.forward([x[2:]], keys[2:]), output[2:], atol=1e-5)
    (grads,) = backend.backward([x[1:]], np.ones((2, 32), np.float32), keys[1:])
    kernel = np.asarray(backend.params["Dense_0"]["kernel"])
    np.testing.assert_allclose(grads, 2 * (output[1:] != 0) @ kernel.T, atol=1e-4)
    assert compilations.count == compiled
