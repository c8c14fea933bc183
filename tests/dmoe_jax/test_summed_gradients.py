"""Gradients that are added to a sum: the same numbers, and rows of a table without a second array of its size."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax.autodiff import Recording, Value
from dmoe_jax.summed_gradients import plus_sums

WORDS, WIDTH = 1000, 8
TABLE = np.random.default_rng(0).normal(size=(WORDS, WIDTH)).astype(np.float32)
TOKENS = np.array([[3, 999, 3], [0, 5, 7]], np.int32)


def indexed(table: Any) -> Any:
    return jnp.sin(table[TOKENS]).reshape(-1, WIDTH)


def taken(table: Any) -> Any:
    return jnp.sin(jnp.take(table, TOKENS, axis=0)).reshape(-1, WIDTH)


def twice(table: Any) -> Any:
    return indexed(table) + 2 * taken(table[::-1])


def of_rows_and_all(table: Any) -> Any:
    return indexed(table) * table.sum()


@pytest.mark.parametrize("function", [indexed, taken, twice, of_rows_and_all])
def test_the_sum_and_the_gradient_together(function: Any) -> None:
    """Whatever else the table is used for, and through a function that is compiled by itself."""
    output, pull = jax.vjp(function, TABLE)
    ones, total = jnp.ones_like(output), jnp.asarray(TABLE * 0.5)
    found = jax.jit(lambda total, ones: plus_sums(pull, [total], ones))(total, ones)
    np.testing.assert_allclose(found[0], total + pull(ones)[0], rtol=1e-5, atol=1e-5)
    alone = plus_sums(pull, [None], ones)
    np.testing.assert_array_equal(alone[0], pull(ones)[0])


@pytest.mark.parametrize("function", [indexed, taken])
def test_rows_go_where_the_sum_is(function: Any) -> None:
    """No array of the table's size is made beside the sum, which is donated: neither zeros nor a copy."""
    output, pull = jax.vjp(function, TABLE)
    program = jax.jit(lambda total, ones: plus_sums(pull, [total], ones), donate_argnums=0)
    total = jnp.asarray(TABLE * 0.5)
    compiled = program.lower(total, jnp.ones_like(output)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == TABLE.nbytes
    assert memory.temp_size_in_bytes < TABLE.nbytes / 4
    place = total.unsafe_buffer_pointer()
    (found,) = program(total, jnp.ones_like(output))
    assert found.unsafe_buffer_pointer() == place


def test_a_result_that_is_read_elsewhere_stays_what_it_is() -> None:
    """Two results, one of which is computed from the other: the sum is no part of what the second one reads."""

    def function(rows: Any) -> Any:
        scattered = jnp.zeros((WORDS, WIDTH)).at[TOKENS.reshape(-1)].add(rows)
        return [scattered, scattered.sum()]

    rows, total = jnp.ones((TOKENS.size, WIDTH)), jnp.full((WORDS, WIDTH), 3.0)
    first, second = plus_sums(function, [total, None], rows)
    np.testing.assert_allclose(first, function(rows)[0] + 3)
    np.testing.assert_allclose(second, TOKENS.size * WIDTH)


def tied_loss(table: Any, hidden: Any) -> Any:
    return jnp.sum(jnp.cos(hidden @ table.T))


def both(first: Any, second: Any) -> Any:
    return jnp.sum(first[TOKENS]) * 2 + jnp.sum(second**2)


@pytest.mark.parametrize("lookup", [indexed, taken])
async def test_a_tied_table_has_the_gradients_of_all_its_uses(lookup: Any) -> None:
    """Looked up at the beginning, multiplied with at the end, as a language model does."""
    run = Recording()
    table = Value(jnp.asarray(TABLE))
    loss = run(tied_loss, table, run(lookup, table))
    grads = await run.backward(loss)
    expected = jax.grad(lambda table: tied_loss(table, lookup(table)))(TABLE)
    np.testing.assert_allclose(grads[table], expected, rtol=1e-4, atol=1e-4)


async def test_a_value_given_twice_to_one_segment() -> None:
    """After it has a gradient already: each use counts once."""
    run = Recording()
    table = Value(jnp.asarray(TABLE))
    loss = run(jnp.add, run(both, table, table), run(tied_loss, table, run(indexed, table)))
    grads = await run.backward(loss)
    expected = jax.grad(lambda table: both(table, table) + tied_loss(table, indexed(table)))(TABLE)
    np.testing.assert_allclose(grads[table], expected, rtol=1e-4, atol=1e-4)


class Kept:
    """A remote operation that keeps the gradient that it returns."""

    grad: Any = None

    async def forward(self, table: Any) -> tuple[Any, Any]:
        return jnp.sum(table), None

    async def backward(self, residual: Any, output_grads: Any) -> tuple[Any, ...]:
        self.grad = jnp.full((WORDS, WIDTH), output_grads)
        return (self.grad,)


@pytest.mark.parametrize("remote_first", [False, True])
async def test_a_gradient_that_came_from_elsewhere_is_left_as_it_is(remote_first: bool) -> None:
    """Only what the tape has computed is added to in place: others may still hold theirs."""
    run, remote = Recording(), Kept()
    table = Value(jnp.asarray(TABLE))
    if remote_first:  # its backward comes last
        far = await run.call(remote, table)
        near = run(tied_loss, table, run(indexed, table))
    else:
        near = run(tied_loss, table, run(indexed, table))
        far = await run.call(remote, table)
    loss = run(jnp.add, far, near)
    grads = await run.backward(loss)
    expected = jax.grad(lambda table: jnp.sum(table) + tied_loss(table, indexed(table)))(TABLE)
    np.testing.assert_allclose(grads[table], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(remote.grad, np.ones((WORDS, WIDTH)))


async def test_no_gradient_of_the_tape_is_lost() -> None:
    """All of them are there to be read in the end, those of values in between too."""
    run = Recording()
    table = Value(jnp.asarray(TABLE))
    hidden = run(indexed, table)
    loss = run(jnp.add, run(tied_loss, table, hidden), run(tied_loss, table, hidden))
    grads = await run.backward(loss)
    assert all(np.isfinite(grad).all() for grad in grads.values())
    hidden_grad = jax.grad(lambda hidden: 2 * tied_loss(TABLE, hidden))(indexed(TABLE))
    np.testing.assert_allclose(grads[hidden], hidden_grad, rtol=1e-4, atol=1e-4)
