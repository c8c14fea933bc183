"""One expert as a node keeps it: parameters, optimiser state and two compiled programs.

    apply(params, *inputs) -> output
    grad_and_update(params, opt_state, inputs, output_grads) -> (input_grads, params, opt_state)

Both are pure and jitted, and shared by every expert of one kind and optimiser. The backward recomputes the forward
(Learning@home section 3.3) and applies the optimiser at once; `params` and `opt_state` are donated, so an update
happens in place. Rows are padded to powers of two, so that a node compiles two programs per bucket whatever batch
sizes its trainers send; padded rows carry zero gradients and change nothing beyond rounding.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dmoe_jax.experts.base import Expert, init_by_uid
from dmoe_jax.grid import expand_grid_pattern, parse_uid
from dmoe_jax.types import PyTree
from net.types import Array


class ExpertPrograms(NamedTuple):
    """The compiled programs of one expert kind.

    Attributes:
      apply: (params, *inputs) -> output.
      grad_and_update: (params, opt_state, inputs, output_grads) -> (input_grads, params, opt_state), with a gradient
        for each differentiable input, in order.
      grad: (params, inputs, output_grads) -> input_grads, for a node whose experts do not learn.
    """

    apply: Callable[..., Any]
    grad_and_update: Callable[..., tuple[tuple[Any, ...], PyTree, PyTree]]
    grad: Callable[..., tuple[Any, ...]]


@functools.cache
def expert_programs(expert: Expert, optimizer: optax.GradientTransformation) -> ExpertPrograms:
    """Programs for `expert` trained by `optimizer`; cached, so equal arguments share their compiled code."""
    positions = tuple(i for i, spec in enumerate(expert.inputs) if spec.differentiable)

    def pull_back(params: PyTree, inputs: tuple[Any, ...], output_grads: Any) -> tuple[PyTree, tuple[Any, ...]]:
        def output(params: PyTree, chosen: tuple[Any, ...]) -> Any:
            merged = list(inputs)
            for position, value in zip(positions, chosen, strict=True):
                merged[position] = value
            return expert.apply(params, *merged)

        _, pull = jax.vjp(output, params, tuple(inputs[i] for i in positions))
        param_grads, input_grads = pull(output_grads)
        return param_grads, input_grads

    def grad_and_update(
        params: PyTree, opt_state: PyTree, inputs: tuple[Any, ...], output_grads: Any
    ) -> tuple[tuple[Any, ...], PyTree, PyTree]:
        param_grads, input_grads = pull_back(params, inputs, output_grads)
        updates, opt_state = optimizer.update(param_grads, opt_state, params)
        return input_grads, optax.apply_updates(params, updates), opt_state

    def grad(params: PyTree, inputs: tuple[Any, ...], output_grads: Any) -> tuple[Any, ...]:
        return pull_back(params, inputs, output_grads)[1]

    return ExpertPrograms(jax.jit(expert.apply), jax.jit(grad_and_update, donate_argnums=(0, 1)), jax.jit(grad))


class ExpertBackend:
    """The state of one expert and what can be done with it. Synchronous: call it through a `Device`.

    Args:
      expert: the network and the specification of its inputs.
      optimizer: an Optax optimiser, or None for an expert that never changes.
      params: initial parameters; the backend owns them from here on (updates donate their buffers).
    """

    def __init__(self, expert: Expert, optimizer: optax.GradientTransformation | None, params: PyTree) -> None:
        self.expert = expert
        self.update_count = 0
        """Optimiser steps taken. Replies carry it, so that trainers can measure staleness."""
        self._trains = optimizer is not None
        self._programs = expert_programs(expert, optimizer if optimizer is not None else _FROZEN)
        self._params = params
        self._opt_state = optimizer.init(params) if optimizer is not None else ()

    @property
    def params(self) -> PyTree:
        """The current parameters. Valid until the next `backward`, which donates them."""
        return self._params

    @property
    def state(self) -> dict[str, PyTree]:
        """Parameters and optimiser state; valid until the next `backward`, like `params`."""
        return {"params": self._params, "opt_state": self._opt_state}

    def load(self, state: dict[str, PyTree], *, update_count: int) -> None:
        """Take up a saved state of the same structure."""
        self._params, self._opt_state = jax.tree.map(jnp.asarray, (state["params"], state["opt_state"]))
        self.update_count = update_count

    def forward(self, inputs: Sequence[Array]) -> Array:
        """Output for `inputs`, each [rows, ...]. Rows are padded to a power of two and cut again."""
        rows = inputs[0].shape[0]
        padded = [_pad_rows(array, bucket_of(rows)) for array in inputs]
        return np.asarray(self._programs.apply(self._params, *padded))[:rows]

    def backward(self, inputs: Sequence[Array], output_grads: Array) -> tuple[Array, ...]:
        """Gradients of the differentiable inputs, taken at the current parameters, which are then updated once."""
        rows = output_grads.shape[0]
        bucket = bucket_of(rows)
        padded = tuple(_pad_rows(array, bucket) for array in inputs)
        padded_grads = _pad_rows(output_grads, bucket)
        if self._trains:
            input_grads, self._params, self._opt_state = self._programs.grad_and_update(
                self._params, self._opt_state, padded, padded_grads
            )
            self.update_count += 1
        else:
            input_grads = self._programs.grad(self._params, padded, padded_grads)
        return tuple(np.asarray(grad)[:rows] for grad in input_grads)

    def warm_up(self, max_rows: int) -> None:
        """Compile every bucket up to `max_rows` without changing the expert."""
        for bucket in buckets_up_to(max_rows):
            inputs = tuple(np.zeros((bucket, *spec.shape), spec.dtype) for spec in self.expert.inputs)
            output = jax.block_until_ready(self._programs.apply(self._params, *inputs))
            grads = np.zeros(output.shape, output.dtype)
            if self._trains:
                # A copy is stepped: the program donates its arguments, and this expert must not change.
                params, opt_state = jax.tree.map(lambda leaf: leaf.copy(), (self._params, self._opt_state))
                jax.block_until_ready(self._programs.grad_and_update(params, opt_state, inputs, grads))
            else:
                jax.block_until_ready(self._programs.grad(self._params, inputs, grads))


def make_backends(
    experts: Mapping[str, Expert], optimizer: optax.GradientTransformation | None, *, seed: int
) -> dict[str, ExpertBackend]:
    """A backend for each uid, with the parameters that the seed and the uid decide (see `init_by_uid`).

    Args:
      experts: uid such as "ffn.3.1", or pattern such as "ffn.[0:4].[0:4]" -> the network.
      optimizer: of every expert, each with a state of its own; None: the experts never change.
      seed: of the initial parameters; the same on all nodes of a swarm.

    Raises:
      ValueError: naming the pattern, if it is malformed, or the uid, if two patterns name it, or if there is no expert.
    """
    named: dict[str, tuple[str, Expert]] = {}
    for pattern, expert in experts.items():
        for uid in map(str, expand_grid_pattern(pattern)):
            if uid in named:
                raise ValueError(f"expert {uid} is named twice, by {named[uid][0]!r} and by {pattern!r}")
            named[uid] = pattern, expert
    if not named:
        raise ValueError("expected at least one expert, got none")
    key = jax.random.key(seed)
    places = {uid: parse_uid(uid) for uid in named}
    return {
        uid: ExpertBackend(expert, optimizer, init_by_uid(key, expert, places[uid].prefix, places[uid].coordinates))
        for uid, (_, expert) in named.items()
    }


_FROZEN = optax.set_to_zero()


def bucket_of(rows: int) -> int:
    """The number of rows that `rows` are padded to: the next power of two."""
    if rows < 1:
        raise ValueError(f"a batch has at least one row, got {rows}")
    return 1 << (rows - 1).bit_length()


def buckets_up_to(max_rows: int) -> tuple[int, ...]:
    """Every bucket that batches of 1..max_rows rows can fall into, ascending."""
    return tuple(1 << power for power in range(bucket_of(max_rows).bit_length()))


def _pad_rows(array: Array, rows: int) -> Array:
    """The array with zero rows appended, in a fresh buffer: JAX may read the original later than the call."""
    if array.shape[0] == rows:
        return array
    padded = np.zeros((rows, *array.shape[1:]), array.dtype)
    padded[: array.shape[0]] = array
    return padded
