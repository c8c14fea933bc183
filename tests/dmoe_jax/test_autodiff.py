"""The tape gives the gradients of the same computation in one jit, across remote calls and without recompiling."""

import gc
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trio

from dmoe_jax.autodiff import Recording, Value, value_and_grad


def embed(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"])


def head(params: Any, hidden: Any, targets: Any) -> Any:
    return jnp.mean((hidden @ params["w"].T - targets) ** 2)


def scale_and_shift(scale: Any, x: Any) -> Any:
    return scale * jnp.sin(x) + 1.0


class Elsewhere:
    """A remote operation: `scale_and_shift` after a wait, noting that its backward was asked for."""

    def __init__(self, scale: float, wait_s: float = 0.0) -> None:
        self.scale, self.wait_s = scale, wait_s
        self.backward_grads: list[np.ndarray] = []

    async def forward(self, x: Any) -> tuple[Any, Any]:
        await trio.sleep(self.wait_s)
        return np.asarray(scale_and_shift(self.scale, x)), np.asarray(x)

    async def backward(self, residual: Any, output_grads: Any) -> tuple[Any, ...]:
        await trio.sleep(self.wait_s)
        self.backward_grads.append(np.asarray(output_grads))
        return (np.asarray(output_grads * self.scale * np.cos(residual)),)


PARAMS = {"in": {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)}, "unused": np.ones(2, np.float32)}
X = np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)
TARGETS = np.ones((2, 3), np.float32)


def local_loss(params: Any, x: Any, targets: Any) -> Any:
    hidden = scale_and_shift(2.0, embed(params["in"], x))
    return head(params["in"], hidden, targets)


@pytest.mark.parametrize("again", [False, True])
async def test_what_a_segment_keeps(again: bool) -> None:
    """A segment keeps what its backward needs, and not its inputs twice; under `jax.checkpoint` it keeps nothing."""
    computed: list[int] = []

    def noting(params: Any, x: Any) -> Any:
        jax.debug.callback(lambda: computed.append(1))
        return jnp.sum(jnp.tanh(jnp.sin(x @ params["w"])))

    def living() -> Counter[tuple[int, ...]]:
        gc.collect()
        return Counter(array.shape for array in jax.live_arrays())

    function = jax.checkpoint(noting) if again else noting
    run = Recording()
    params, x = jax.tree.map(lambda leaf: Value(jnp.asarray(leaf)), (PARAMS["in"], X))
    before = living()
    loss = run(function, params, x)
    kept = living() - before
    assert kept[params["w"].shape] == kept[x.shape] == 0
    assert (kept[2, 4] > 0) != again
    grads = await run.backward(loss)
    jax.effects_barrier()
    assert len(computed) == 1 + again
    expected = jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.sin(X @ w))))(PARAMS["in"]["w"])
    np.testing.assert_allclose(grads[params["w"]], expected, rtol=1e-6)


async def test_gradients_equal_one_jit() -> None:
    """Segments joined by a remote call are as one program; tied parameters have sums, those that nobody uses zeros."""

    async def forward(run: Recording, params: Any) -> Value:
        hidden = await run.call(Elsewhere(2.0), run(embed, params["in"], X))
        return run(head, params["in"], hidden, TARGETS)

    loss, grads = await value_and_grad(forward)(PARAMS)
    expected_loss, expected = jax.value_and_grad(local_loss)(PARAMS, X, TARGETS)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, expected)


@pytest.mark.parametrize("is_used", [True, False])
async def test_a_remote_call_gets_its_backward_if_the_loss_uses_it(is_used: bool) -> None:
    """Also one that is fed with data, and not with anything differentiable; no gradient, no call."""
    remote = Elsewhere(3.0)

    async def forward(run: Recording, params: Any) -> Value:
        hidden = run(embed, params["in"], X)
        answer = await run.call(remote, np.zeros((2, 4), np.float32) if is_used else hidden)
        return run(head, params["in"], answer if is_used else hidden, TARGETS)

    await value_and_grad(forward)(PARAMS)
    assert len(remote.backward_grads) == is_used


async def test_values_outside_the_tape_are_constants() -> None:
    """Reading `.value` stops the gradient, as memory carried between segments of text must."""

    async def forward(run: Recording, params: Any) -> Value:
        hidden = run(embed, params["in"], X)
        return run(head, {"w": params["in"]["w"].value}, hidden, TARGETS)

    _, grads = await value_and_grad(forward)(PARAMS)
    expected = jax.grad(lambda p: head({"w": PARAMS["in"]["w"]}, embed(p["in"], X), TARGETS))(PARAMS)
    np.testing.assert_allclose(grads["in"]["w"], expected["in"]["w"], atol=1e-6)


def split_outputs(x: Any) -> Any:
    return {"double": 2 * x, "index": jnp.argmax(x, axis=-1), "unused": x**2}


def use_outputs(parts: Any) -> Any:
    return jnp.sum(parts["double"] * (1 + parts["index"].astype(jnp.float32))[:, None])


async def test_integer_and_unused_outputs_carry_no_gradient() -> None:
    """A segment may return integers and things the loss ignores; only the used floats are differentiated."""

    async def forward(run: Recording, params: Any) -> Value:
        parts = run(split_outputs, params)
        return run(use_outputs, {"double": parts["double"], "index": parts["index"]})

    _, grads = await value_and_grad(forward)(X)
    # argmax of the ascending rows is 2, so the loss is sum(2 x * 3).
    np.testing.assert_allclose(grads, np.full((2, 3), 6.0))


async def test_second_step_compiles_nothing(compilations: Any) -> None:
    """Compiled segments are found again by identity and shape."""

    async def forward(run: Recording, params: Any, x: Any) -> Value:
        hidden = await run.call(Elsewhere(2.0), run(embed, params["in"], x))
        return run(head, params["in"], hidden, np.ones((5, 3), np.float32))

    step, x = value_and_grad(forward), np.ones((5, 3), np.float32)  # of a shape that no other test has compiled
    await step(PARAMS, x)
    first = compilations.count
    assert first > 0
    await step(PARAMS, x + 1)
    assert compilations.count == first


async def test_aux_and_evaluation() -> None:
    """`has_aux` hands back arrays; a recording that does not differentiate refuses a backward."""

    async def forward(run: Recording, params: Any) -> tuple[Value, Any]:
        hidden = run(embed, params["in"], X)
        return run(head, params["in"], hidden, TARGETS), {"hidden": hidden, "count": 3}

    (_, aux), _ = await value_and_grad(forward, has_aux=True)(PARAMS)
    np.testing.assert_allclose(aux["hidden"], embed(PARAMS["in"], X), rtol=1e-6)
    assert aux["count"] == 3
    evaluation = Recording(differentiate=False)
    loss, _ = await forward(evaluation, PARAMS)
    with pytest.raises(RuntimeError, match="differentiate=False"):
        await evaluation.backward(loss)


async def test_a_loss_that_is_not_a_scalar_is_refused() -> None:
    """The error names what was returned."""
    run = Recording()
    with pytest.raises(ValueError, match=r"floating scalar .*float32\[2, 4\]"):
        await run.backward(run(embed, jax.tree.map(Value, PARAMS["in"]), X))


TABLE = np.random.default_rng(0).normal(size=(1000, 8)).astype(np.float32)
TOKENS = np.array([[3, 999, 3], [0, 5, 7]], np.int32)


def looked_up(table: Any) -> Any:
    return jnp.sin(jnp.take(table, TOKENS, axis=0)).reshape(-1, 8)


def tied_loss(table: Any, hidden: Any) -> Any:
    return jnp.sum(jnp.cos(hidden @ table.T))


def both(first: Any, second: Any) -> Any:
    return jnp.sum(first[TOKENS]) * 2 + jnp.sum(second**2)


async def test_a_value_given_twice_to_one_segment() -> None:
    """After it has a gradient already, as a table that is looked up and multiplied with: each use counts once."""
    run = Recording()
    table = Value(TABLE)
    loss = run(jnp.add, run(both, table, table), run(tied_loss, table, run(looked_up, table)))
    grads = await run.backward(loss)
    expected = jax.grad(lambda table: both(table, table) + tied_loss(table, looked_up(table)))(TABLE)
    np.testing.assert_allclose(grads[table], expected, rtol=1e-4, atol=1e-4)


class Kept:
    """A remote operation that keeps the gradient that it returns."""

    grad: Any = None

    async def forward(self, table: Any) -> tuple[Any, Any]:
        return jnp.sum(table), None

    async def backward(self, residual: Any, output_grads: Any) -> tuple[Any, ...]:
        self.grad = jnp.full(TABLE.shape, output_grads)
        return (self.grad,)


@pytest.mark.parametrize("remote_first", [False, True])
async def test_a_gradient_that_came_from_elsewhere_is_left_as_it_is(remote_first: bool) -> None:
    """Only what the tape has computed is added to in place: others may still hold theirs."""
    run, remote = Recording(), Kept()
    table = Value(TABLE)
    far = await run.call(remote, table) if remote_first else None  # then its backward comes last
    near = run(tied_loss, table, run(looked_up, table))
    far = far or await run.call(remote, table)
    grads = await run.backward(run(jnp.add, far, near))
    expected = jax.grad(lambda table: jnp.sum(table) + tied_loss(table, looked_up(table)))(TABLE)
    np.testing.assert_allclose(grads[table], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(remote.grad, np.ones(TABLE.shape))


async def test_no_gradient_of_the_tape_is_lost() -> None:
    """All of them are there to be read in the end, also those that a segment hands on as they are."""
    run = Recording()
    table = Value(TABLE)
    hidden = run(looked_up, table)
    doubled = run(jnp.add, hidden, hidden)
    loss = run(jnp.add, run(tied_loss, table, doubled), run(tied_loss, table, hidden))
    grads = await run.backward(loss)
    assert all(np.isfinite(grad).all() for grad in grads.values())
    hidden_grad = jax.grad(lambda hidden: tied_loss(TABLE, 2 * hidden) + tied_loss(TABLE, hidden))(looked_up(TABLE))
    np.testing.assert_allclose(grads[hidden], hidden_grad, rtol=1e-4, atol=1e-4)
