"""The compiled programs of one kind of expert: its forward pass, and its backward pass with the optimiser's step.

They are pure, and shared by every expert of one kind, optimiser and layout. The backward pass recomputes the forward
(Learning@home section 3.3), with the same dropout keys, and applies the optimiser at once; parameters and state are
donated. With a layout, what an update returns is pinned to lie as what it was given, so that nothing drifts to other
devices and nothing is compiled twice.

The step itself looks whether its outcome is finite, and keeps the old parameters and state if it is not
(`dmoe_jax.node.finite_update`).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dmoe_jax.experts.base import Expert
from dmoe_jax.node.finite_update import stays_finite, update_unless_not_finite
from dmoe_jax.node.sharding import Layout
from dmoe_jax.types import PyTree


class ExpertPrograms(NamedTuple):
    """The compiled programs of one expert kind. `keys` is None, or a dropout key for each row.

    Attributes:
      apply: (params, inputs, keys) -> output.
      grad_and_update: (params, opt_state, inputs, output_grads, keys, staleness) -> (finite, input_grads, params,
        opt_state), with a gradient for each differentiable input, in order. `staleness` is for the optimiser, float32.
        `finite` is bool [2]: the update, and the input gradients. If one of them is not finite, params and opt_state
        are returned as they came.
      warm: the buckets for which they are compiled.
      init: (key data) -> params, and
      init_opt_state: (params) -> opt_state, both laid out; None without a layout, as the next.
      state: shape, type and sharding of each array of (params, opt_state).
    """

    apply: Callable[..., Any]
    grad_and_update: Callable[..., tuple[Any, tuple[Any, ...], PyTree, PyTree]]
    warm: set[int]
    init: Callable[..., PyTree] | None = None
    init_opt_state: Callable[..., PyTree] | None = None
    state: tuple[PyTree, PyTree] | None = None


@functools.cache
def expert_programs(
    expert: Expert, optimizer: optax.GradientTransformation | None, layout: Layout | None = None
) -> ExpertPrograms:
    """Programs for `expert` trained by `optimizer`; cached, so equal arguments share their compiled code.

    Args:
      layout: where the state lies, and stays; None: where JAX puts it.

    Raises:
      ValueError: if the optimiser cannot work on a node, see `check_optimizer`, or the layout does not fit the state.
    """
    is_whole = layout is None or len(layout.devices) == 1
    apply, grad_and_update = functions_of(expert, optimizer, is_whole=is_whole)
    if layout is None:
        return ExpertPrograms(jax.jit(apply), jax.jit(grad_and_update, donate_argnums=(0, 1)), set())
    shapes = state_shapes(expert, optimizer)
    params = layout.state_shardings({"params": shapes[0]})["params"]
    opt_state = layout.state_shardings({"opt_state": shapes[1]})["opt_state"]
    rows, everywhere, results = layout.rows, layout.everywhere, layout.results

    def init(key_data: Any) -> PyTree:
        return jax.tree.map(own_copy, expert.init(jax.random.wrap_key_data(key_data)))

    def init_opt_state(params: PyTree) -> PyTree:
        return () if optimizer is None else jax.tree.map(own_copy, optimizer.init(params))

    return ExpertPrograms(
        apply=jax.jit(apply, in_shardings=(params, rows, rows), out_shardings=results),
        grad_and_update=jax.jit(
            grad_and_update,
            donate_argnums=(0, 1),
            in_shardings=(params, opt_state, rows, rows, rows, everywhere),
            out_shardings=(everywhere, results, params, opt_state),
        ),
        warm=set(),
        init=jax.jit(init, out_shardings=params),
        init_opt_state=jax.jit(init_opt_state, in_shardings=(params,), out_shardings=opt_state),
        state=jax.tree.map(_with_sharding, shapes, (params, opt_state)),
    )


@functools.cache
def state_shapes(expert: Expert, optimizer: optax.GradientTransformation | None) -> tuple[PyTree, PyTree]:
    """(params, opt_state) of an expert as shapes and types; nothing is computed."""
    params = jax.eval_shape(lambda key: jax.tree.map(own_copy, expert.init(key)), jax.random.key(0))
    return params, () if optimizer is None else jax.eval_shape(optimizer.init, params)


def state_nbytes(expert: Expert, optimizer: optax.GradientTransformation | None) -> int:
    """How many bytes the parameters and the optimiser's state of an expert have, all parts together."""
    return nbytes_of(state_shapes(expert, optimizer))


@functools.cache
def functions_of(
    expert: Expert, optimizer: optax.GradientTransformation | None, *, is_whole: bool = True
) -> tuple[Callable[..., Any], Callable[..., tuple[Any, tuple[Any, ...], PyTree, PyTree]]]:
    """`apply` and `grad_and_update` of `ExpertPrograms` before they are compiled.

    Args:
      is_whole: an expert lies on one device, not spread over several.

    Raises:
      ValueError: if the optimiser cannot work on a node, see `check_optimizer`.
    """
    if optimizer is not None:
        check_optimizer(expert, optimizer)
        optimizer = optax.with_extra_args_support(optimizer)
    positions = tuple(i for i, spec in enumerate(expert.inputs) if spec.differentiable)

    def apply(params: PyTree, inputs: tuple[Any, ...], keys: Any) -> Any:
        return expert.apply(params, *inputs, keys=keys) if expert.takes_key else expert.apply(params, *inputs)

    def grad_and_update(
        params: PyTree, opt_state: PyTree, inputs: tuple[Any, ...], output_grads: Any, keys: Any, staleness: Any
    ) -> tuple[Any, tuple[Any, ...], PyTree, PyTree]:
        def output(params: PyTree, chosen: tuple[Any, ...]) -> Any:
            merged = list(inputs)
            for position, value in zip(positions, chosen, strict=True):
                merged[position] = value
            return apply(params, tuple(merged), keys)

        _, pull_back = jax.vjp(output, params, tuple(inputs[i] for i in positions))
        param_grads, input_grads = pull_back(output_grads)
        state = params, opt_state
        if optimizer is None:
            zeros = jax.tree.map(jnp.zeros_like, input_grads)
            finite = jnp.stack([jnp.array(True), stays_finite(zeros, input_grads, is_whole=is_whole)])
        else:
            finite, state = update_unless_not_finite(
                optimizer, state, param_grads, input_grads, staleness, is_whole=is_whole
            )
        return finite, input_grads, *state

    return apply, grad_and_update


def check_optimizer(expert: Expert, optimizer: optax.GradientTransformation) -> None:
    """Make sure, without computing anything, that an optimiser can step this expert from gradients alone.

    Raises:
      ValueError: if its update needs more than gradients, state, parameters and staleness, such as the loss, or changes
        the structure of its state.
    """
    params = jax.eval_shape(expert.init, jax.random.key(0))
    try:
        before = jax.eval_shape(optimizer.init, params)
        update = optax.with_extra_args_support(optimizer).update
        _, after = jax.eval_shape(update, params, before, params, staleness=np.float32(0))
    except Exception as error:  # an optimiser of a user's own may raise anything
        raise ValueError(
            "this optimiser cannot train an expert on a node, which has gradients but no loss (so no "
            f"reduce_on_plateau, polyak_sgd or line search): its update raised {type(error).__name__}: {error}"
        ) from error
    shapes = [jax.tree.map(lambda leaf: leaf.shape, state) for state in (before, after)]
    if shapes[0] != shapes[1]:
        raise ValueError("this optimiser cannot train an expert on a node: its update changes the shape of its state")


def own_copy(leaf: Any) -> Any:
    """A buffer of the backend's own, strongly typed: a weak type would be compiled for once more after one update."""
    return jnp.array(leaf, dtype=jnp.result_type(leaf))


def _with_sharding(shape: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def nbytes_of(tree: PyTree) -> int:
    """Bytes of all arrays."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
