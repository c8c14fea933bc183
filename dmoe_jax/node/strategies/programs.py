"""The programs of a stack: each carries out one batch each of several experts, whose states lie stacked.

A batch is one expert's: `index` says which, and the first `count` of the batches are real. An update does exactly what
the program of a single expert does (`dmoe_jax.node.programs`), with its look whether the outcome is finite: an expert
that would not stay so keeps its state, whatever becomes of the others.

There are two forms. `looped` takes one expert after the other: its state is copied out of the stack and into it and
nothing else is, and it computes bit by bit what `single` does. It is the faster one where a device does one thing at a
time, and since `count` may vary there is one program for each number of rows. `vmapped` computes all of them at once,
which is what a GPU is good at; the batches beyond `count` are computed for nothing.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dmoe_jax.experts.base import Expert
from dmoe_jax.node.programs import functions_of, without_grads
from dmoe_jax.types import PyTree

Form = Literal["looped", "vmapped"]

_ForwardBackward = tuple[Callable[..., Any], Callable[..., tuple[Any, PyTree, tuple[Any, ...]]]]


class StackFunctions(NamedTuple):
    """What is compiled; every array of a batch has the axes [batches, rows, ...].

    Attributes:
      forward: (params, index, count, inputs, keys) -> outputs.
      backward: (state, index, count, inputs, output_grads, keys, staleness) -> (finite, state, input_grads), where
        `state` is (params, opt_state), to be donated, and `finite` is bool [batches, 2], see `ExpertPrograms`.
        `staleness` is float32 [batches].
      read: (state, index) -> the state of one expert.
      write: (state, index, the state of one expert) -> state, to be donated.
    """

    forward: Callable[..., Any]
    backward: Callable[..., tuple[Any, PyTree, tuple[Any, ...]]]
    read: Callable[..., PyTree]
    write: Callable[..., PyTree]


def stack_functions(expert: Expert, optimizer: optax.GradientTransformation | None, form: Form) -> StackFunctions:
    """The functions for stacks of experts of one kind.

    Raises:
      ValueError: if the optimiser cannot work on a node, see `check_optimizer`.
    """
    apply, with_grads = functions_of(expert, optimizer)
    grad_and_update = without_grads(with_grads)
    forward, backward = (_looped if form == "looped" else _vmapped)(apply, grad_and_update)
    return StackFunctions(forward, backward, _read, _write)


def _read(state: PyTree, index: Any) -> PyTree:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), state)


def _write(state: PyTree, index: Any, own: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf, part: jax.lax.dynamic_update_index_in_dim(leaf, part, index, 0), state, own)


def _looped(apply: Callable[..., Any], grad_and_update: Callable[..., Any]) -> _ForwardBackward:
    def forward(params: PyTree, index: Any, count: Any, inputs: tuple[Any, ...], keys: Any) -> Any:
        def one(number: Any) -> Any:
            own_inputs, own_keys = _read((inputs, keys), number)
            return apply(_read(params, index[number]), own_inputs, own_keys)

        def body(number: Any, outputs: Any) -> Any:
            return _write(outputs, number, one(number))

        return jax.lax.fori_loop(0, count, body, _zeros(one, index.shape[0]))

    def backward(
        state: PyTree, index: Any, count: Any, inputs: tuple[Any, ...], output_grads: Any, keys: Any, staleness: Any
    ) -> tuple[Any, PyTree, tuple[Any, ...]]:
        def one(state: PyTree, number: Any) -> tuple[tuple[Any, tuple[Any, ...]], PyTree]:
            batch = _read((inputs, output_grads, keys, staleness), number)
            finite, *new, input_grads = grad_and_update(*_read(state, index[number]), *batch)
            return (finite, input_grads), tuple(new)

        def body(number: Any, carried: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            state, results = carried
            result, new = one(state, number)
            return _write(state, index[number], new), _write(results, number, result)

        results = _zeros(lambda number: one(state, number)[0], index.shape[0])
        state, (finite, input_grads) = jax.lax.fori_loop(0, count, body, (state, results))
        return finite, state, input_grads

    return forward, backward


def _vmapped(apply: Callable[..., Any], grad_and_update: Callable[..., Any]) -> _ForwardBackward:
    def chosen(state: PyTree, index: Any) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.at[index].get(mode="clip"), state)

    def forward(params: PyTree, index: Any, count: Any, inputs: tuple[Any, ...], keys: Any) -> Any:
        del count
        return jax.vmap(apply)(chosen(params, index), inputs, keys)

    def backward(
        state: PyTree, index: Any, count: Any, inputs: tuple[Any, ...], output_grads: Any, keys: Any, staleness: Any
    ) -> tuple[Any, PyTree, tuple[Any, ...]]:
        batches = (inputs, output_grads, keys, staleness)
        finite, *new, input_grads = jax.vmap(grad_and_update)(*chosen(state, index), *batches)
        # Those that are not real go nowhere, each to a place of its own beyond the end.
        capacity = jax.tree.leaves(state)[0].shape[0]
        numbers = jnp.arange(index.shape[0])
        places = jnp.where(numbers < count, index, capacity + numbers)

        def put(leaf: Any, part: Any) -> Any:
            return leaf.at[places].set(part, mode="drop", unique_indices=True)

        return finite, jax.tree.map(put, state, tuple(new)), input_grads

    return forward, backward


def _zeros(function: Callable[[Any], PyTree], batches: int) -> PyTree:
    """Room for the results of so many batches, given what computes those of one."""
    shapes = jax.eval_shape(function, jax.ShapeDtypeStruct((), jnp.int32))
    return jax.tree.map(lambda shape: jnp.zeros((batches, *shape.shape), shape.dtype), shapes)
