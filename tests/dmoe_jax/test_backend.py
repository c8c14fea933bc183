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
from dmoe_jax.experts.base import Expert, init_by_uid
from dmoe_jax.experts.dropout import row_keys_of_seed
from dmoe_jax.node.backend import ExpertBackend, UpdateRejected, make_backends
from dmoe_jax.node.programs import expert_programs, nbytes_of

EXPERT = feedforward(d_model=6)
OPTIMIZER = optax.adam(1e-2)


def make(optimizer: optax.GradientTransformation | None = OPTIMIZER) -> tuple[ExpertBackend, Any]:
    params = EXPERT.init(jax.random.key(0))
    return ExpertBackend(EXPERT, optimizer, jax.tree.map(jnp.copy, params)), params


def rows(count: int, seed: int, width: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def assert_close(ours: Any, theirs: Any, *, atol: float = 1e-6) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), ours, theirs)


def by_hand(expert: Expert, optimizer: optax.GradientTransformation) -> Any:
    """(params, opt_state, x, output_grads) -> (input_grads, params, opt_state), compiled, without a backend."""

    @jax.jit
    def step(params: Any, opt_state: Any, x: Any, output_grads: Any) -> Any:
        param_grads, input_grads = jax.vjp(expert.apply, params, x)[1](output_grads)
        updates, opt_state = optimizer.update(param_grads, opt_state, params)
        return input_grads, optax.apply_updates(params, updates), opt_state

    return step


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_forward_equals_the_plain_network(count: int, compilations: Any) -> None:
    """Padding to a power of two changes no row, and a warm-up no expert; then no number of rows compiles anything."""
    backend, params = make()
    backend.warm_up(4)
    jax.tree.map(np.testing.assert_array_equal, backend.params, params)
    assert backend.update_count == 0
    x = rows(count, seed=1)
    expected, compiled = jax.jit(EXPERT.apply)(params, x), compilations.count
    np.testing.assert_allclose(backend.forward([x]), expected, atol=1e-6)
    backend.backward([x], x)
    assert compilations.count == compiled


def test_backward_is_one_optimiser_step() -> None:
    """Input gradients are taken before the update, and the update is Optax's on the summed gradient."""
    backend, params = make()
    x, grads = rows(3, seed=2), rows(3, seed=3)
    expected_input_grads, expected, _ = by_hand(EXPERT, OPTIMIZER)(params, OPTIMIZER.init(params), x, grads)
    (input_grads,) = backend.backward([x], grads)
    assert_close(input_grads, expected_input_grads, atol=1e-5)
    assert_close(backend.params, expected, atol=2e-6)
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


WIDE = 1024
"""Width of a layer whose parameters, 4 MiB, are worth buffers of their own for their gradients."""


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on another device gradients are temporary")
def test_large_experts_share_buffers_for_their_gradients(compilations: Any) -> None:
    """Two have one buffer and the programs of one; both learn as by hand, after a refusal and a failure, too."""
    expert, optimizer = expert_from_linen(nn.Dense(WIDE), rows(1, 0, WIDE), check=False), optax.sgd(0.1, momentum=0.9)
    step, x = by_hand(expert, optimizer), rows(2, 0, WIDE)
    expected = [(params := expert.init(jax.random.key(seed)), optimizer.init(params)) for seed in range(2)]
    backends = [ExpertBackend(expert, optimizer, params) for params, _ in expected]
    del params
    step(*expected[0], x, x)

    def matrices() -> int:
        gc.collect()
        return sum(leaf.shape == (WIDE, WIDE) for leaf in jax.live_arrays())

    held = matrices()
    backends[0].warm_up_bucket(2)
    assert matrices() == held + 1
    compiled = compilations.count
    for turn in range(4):
        for number, backend in enumerate(backends):
            backend.backward([x], x)
            _, *new = step(*expected[number], x, x)
            expected[number] = (new[0], new[1])
        if turn == 0:
            assert (compilations.count, matrices()) == (compiled, held + 1)
        if turn == 1:
            with pytest.raises(UpdateRejected):
                backends[0].backward([x], np.full_like(x, 3e38))
        if turn == 2:
            with pytest.raises(TypeError):
                backends[0].backward([x[:, 1:]], x)
    for backend, (params, _) in zip(backends, expected, strict=True):
        assert_close(backend.params, params, atol=1e-5)


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
    for patterns, message in (
        ([], "expected at least one expert, got none"),
        (["ffn.[0:2].1", "ffn.1.[0:3]"], r"ffn.1.1 is named twice, by 'ffn.\[0:2\].1' and by 'ffn.1.\[0:3\]'"),
    ):
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
    steep = expert_from_functions(lambda _: jnp.full((6,), 1e30), lambda w, x: x * jax.lax.stop_gradient(w), rows(1, 0))
    for optimizer in (OPTIMIZER, None):
        backend = ExpertBackend(steep, optimizer, steep.init(jax.random.key(0)))
        with pytest.raises(UpdateRejected) as rejected:
            backend.backward([rows(2, seed=1)], HUGE)
        assert rejected.value.reason == "input gradient"
        assert backend.update_count == 0


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
def test_any_optax_chain_trains_as_by_hand(name: str, compilations: Any) -> None:
    """Three updates are Optax's own, with donated states that may alias each other; one program does them all."""
    expert = expert_from_linen(nn.Dense(3), rows(1, 0), check=False)
    params, optimizer = expert.init(jax.random.key(0)), CHAINS[name]()
    backend, step, state = ExpertBackend(expert, optimizer, params), by_hand(expert, optimizer), optimizer.init(params)
    for number in range(3):
        x, grads = rows(4, seed=number), rows(4, seed=10 + number)[:, :3]
        compiled = compilations.count
        backend.backward([x], grads)
        assert number == 0 or compilations.count == compiled
        _, params, state = step(params, state, x, grads)
    assert_close(backend.params, params, atol=1e-5)
    assert backend.update_count == 3


@pytest.mark.parametrize(
    "optimizer", [optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), optax.polyak_sgd(), optax.lbfgs(1e-2)]
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
    """In other batches, at other places and beside other padding; without keys nothing is dropped. All is warm."""
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
    for count in (1, 2, 3, 4):
        backend.backward([rows(count, seed=6)], rows(count, seed=7, width=32), row_keys_of_seed(11, count))
    assert compilations.count == compiled
