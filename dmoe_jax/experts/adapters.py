"""Experts made of Flax modules and of plain functions.

    expert = as_expert(MyLinenModule(width=64), np.zeros((1, 32)))                # Linen: the module itself
    expert = as_expert(lambda rngs: MyNnxModule(32, rngs=rngs), np.zeros((1, 32)))  # NNX: what makes the module
    expert = as_expert((init, apply), np.zeros((1, 32)))                          # init(key), apply(params, x)

An example stands for one input: its first axis is the batch, of any length; the shape behind it and the type are the
input's. Every constructor tries the expert once (`check_expert`) and says in a sentence what is wrong with it. Equal
arguments give the same object wherever they can be hashed, so keep a `make` or `apply` function and do not write the
lambda anew in each call.

Dropout. In training a node hands over one key for each row, and the module is applied row by row under `vmap`, each row
with its own key. So a row's masks depend neither on the rows beside it nor on padding, and the backward pass, which
recomputes the forward, drops the same. Without keys the module runs in evaluation mode.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx
from jaxtyping import PRNGKeyArray

from dmoe_jax.arrays import PyTree
from dmoe_jax.experts.base import Expert, TensorSpec
from dmoe_jax.experts.check import ExpertError, called, check_expert
from dmoe_jax.experts.dropout import wrap_key

_TRAINING_FLAGS = {"deterministic": False, "train": True, "training": True, "is_training": True}
"""Arguments of a module's call that say whether it trains, and what they are then."""

_MOST_MADE = 256
"""Experts of one kind of maker that are remembered."""
_TRIAL_ROWS = 7
"""Rows of the batch that finds out an output's shape: a number that is seldom one of the model's own."""

P = ParamSpec("P")


def as_expert(what: Any, *examples: Any, **options: Any) -> Expert:
    """An expert of whatever can be one.

    Args:
      what: an `Expert`, returned as it is; a Linen module; a function or class that is called with `nnx.Rngs` and gives
        an NNX module; or a tuple (init, apply).
      examples: one array for each input, batch axis first; none for an Expert.
      options: the keyword arguments of `expert_from_linen`, `expert_from_nnx` or `expert_from_functions`.

    Raises:
      ExpertError: if it is none of these, or cannot be an expert.
    """
    if isinstance(what, Expert):
        if examples or options:
            raise ExpertError(f"expert {what.name!r} is complete: it takes no examples and no options")
        return what
    if isinstance(what, nn.Module):
        return expert_from_linen(what, *examples, **options)
    if isinstance(what, tuple) and len(what) == 2 and all(map(callable, what)):
        return expert_from_functions(*what, *examples, **options)
    if isinstance(what, type) and issubclass(what, nn.Module):
        raise ExpertError(f"{what.__name__} is a class: give a module of it, {what.__name__}(...)")
    if isinstance(what, nnx.Module):
        raise ExpertError(
            f"{type(what).__name__} is an NNX module that holds its parameters already; give what makes it, such as "
            f"lambda rngs: {type(what).__name__}(..., rngs=rngs), so that each expert starts from parameters of its own"
        )
    if callable(what):
        return expert_from_nnx(what, *examples, **options)
    raise ExpertError(
        "expected an Expert, a Linen module, a function from nnx.Rngs to an NNX module, or a tuple (init, apply) of "
        f"functions, got {type(what).__name__}: {what!r:.80}"
    )


def _remembered(num_makers: int) -> Callable[[Callable[P, Expert]], Callable[P, Expert]]:
    """A decorator: equal arguments give the same expert, wherever they can be hashed; `num_makers` of them come before
    the examples, of which shape and type count."""

    def decorate(make: Callable[P, Expert]) -> Callable[P, Expert]:
        made: dict[Any, Expert] = {}

        def hashable(option: Any) -> Any:
            if isinstance(option, Mapping):
                return tuple(sorted(option.items()))
            return tuple(option) if isinstance(option, list) else option

        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(make).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }

        @functools.wraps(make)
        def remembered(*args: Any, **options: Any) -> Expert:
            named = tuple((name, hashable(option)) for name, option in sorted((defaults | options).items()))
            key = args[:num_makers], _described(args[num_makers:]), named
            try:
                hash(key)
            except TypeError:  # a module with an array or a list among its fields: a new expert each time
                return make(*args, **options)
            if key not in made:
                made[key] = make(*args, **options)
                if len(made) > _MOST_MADE:
                    del made[next(iter(made))]
            return made[key]

        return cast(Callable[P, Expert], remembered)

    return decorate


@_remembered(1)
def expert_from_linen(
    module: nn.Module,
    *examples: Any,
    name: str | None = None,
    differentiable: Sequence[str] | None = None,
    train: Mapping[str, Any] | None = None,
    evaluate: Mapping[str, Any] | None = None,
    check: bool = True,
) -> Expert:
    """An expert of a Linen module that holds parameters only and draws from no stream of random numbers but "dropout".

    Args:
      module: its `__call__` takes one positional argument for each input and returns one array.
      examples: one array for each input, batch axis first.
      name: the expert's; None: the module's class.
      differentiable: names of the inputs that get a gradient, which are the names of the call's arguments; None: all
        of a floating type.
      train: keyword arguments of the call in training. `deterministic`, `train`, `training` and `is_training` are set
        by themselves where the call has them.
      evaluate: keyword arguments of the call in evaluation.
      check: whether to try the expert once, which costs an initialisation and a compilation.

    Raises:
      ExpertError: if the module keeps other state than parameters, such as running statistics, or is no expert for
        another reason.
    """
    name = name or type(module).__name__
    specs = _specs(name, module.__call__, examples, differentiable)
    training, evaluating = _modes(module.__call__, specs, train, evaluate)

    def init(key: PRNGKeyArray) -> PyTree:
        zeros = [jnp.zeros((1, *spec.shape), spec.dtype) for spec in specs]
        variables = module.init({"params": key}, *zeros, **evaluating)
        _refuse_state(name, set(variables) - {"params"})
        return variables.get("params", {})

    def evaluate_rows(params: PyTree, *inputs: Any) -> Any:
        return module.apply({"params": params}, *inputs, **evaluating)

    def train_row(params: PyTree, key: PRNGKeyArray | None, *inputs: Any) -> Any:
        return module.apply({"params": params}, *inputs, rngs=None if key is None else {"dropout": key}, **training)

    params = called(name, "init", jax.eval_shape, init, jax.random.key(0))
    try:
        jax.eval_shape(lambda params, *inputs: train_row(params, None, *inputs), params, *_shapes(specs, 1))
        takes_key = False
    except flax_errors.InvalidRngError:
        takes_key = True
    except Exception:  # said below, by the trial of the whole expert, with the module's name
        takes_key = bool(training)
    apply = _by_row(evaluate_rows, train_row) if takes_key else evaluate_rows
    return _complete(name, init, apply, specs, takes_key, check)


@_remembered(1)
def expert_from_nnx(
    make: Callable[..., nnx.Module],
    *examples: Any,
    name: str | None = None,
    differentiable: Sequence[str] | None = None,
    train: Mapping[str, Any] | None = None,
    evaluate: Mapping[str, Any] | None = None,
    check: bool = True,
) -> Expert:
    """An expert of an NNX module whose variables are `nnx.Param`, beside the streams of its dropout.

    Args:
      make: (rngs) -> the module. It is called once for each expert, and must build the same graph each time.
      examples, name, differentiable, train, evaluate, check: as in `expert_from_linen`. The module's `train()` and
        `eval()` are called by themselves.

    Raises:
      ExpertError: if the module keeps other variables, such as `nnx.BatchStat`, or is no expert for another reason.
    """
    label = name or str(getattr(make, "__name__", type(make).__name__))
    by_name = called(label, "its signature", lambda: "rngs" in inspect.signature(make).parameters)

    def module_of(key: PRNGKeyArray) -> Any:
        module = make(rngs=nnx.Rngs(key)) if by_name else make(nnx.Rngs(key))
        if not isinstance(module, nnx.Module):
            raise ExpertError(f"expert {label!r}: expected an NNX module from nnx.Rngs, got {type(module).__name__}")
        return module

    blueprint = called(label, "making the module", lambda: nnx.eval_shape(lambda: module_of(jax.random.key(0))))
    name = name or type(blueprint).__name__
    parts: Any = nnx.split(blueprint, nnx.Param, nnx.RngState, ...)
    graph, template, streams, others = parts
    variables = jax.tree.leaves(others, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    _refuse_state(name, {type(variable).__name__ for variable in variables})
    specs = _specs(name, blueprint.__call__, examples, differentiable)
    training, evaluating = _modes(blueprint.__call__, specs, train, evaluate)

    def init(key: PRNGKeyArray) -> PyTree:
        return nnx.to_pure_dict(nnx.split(module_of(key), nnx.Param, ...)[1])

    def merged(params: PyTree, key: PRNGKeyArray) -> Any:
        state = jax.tree.map(lambda leaf: leaf, template)  # a copy: the next line writes into it
        nnx.replace_by_pure_dict(state, params)
        leaves, structure = jax.tree.flatten(streams)
        # Each stream gets a key of its own: those that modules keep are forked from one another.
        fresh = [
            jax.random.fold_in(key, index)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else jnp.zeros(leaf.shape, leaf.dtype)
            for index, leaf in enumerate(leaves)
        ]
        return nnx.merge(graph, state, jax.tree.unflatten(structure, fresh))

    def evaluate_rows(params: PyTree, *inputs: Any) -> Any:
        module = merged(params, jax.random.key(0))
        module.eval()
        return module(*inputs, **evaluating)

    def train_row(params: PyTree, key: PRNGKeyArray, *inputs: Any) -> Any:
        module = merged(params, key)
        module.train()
        return module(*inputs, **training)

    takes_key = bool(jax.tree.leaves(streams))
    apply = _by_row(evaluate_rows, train_row) if takes_key else evaluate_rows
    return _complete(name, init, apply, specs, takes_key, check)


@_remembered(2)
def expert_from_functions(
    init: Callable[..., PyTree],
    apply: Callable[..., Any],
    *examples: Any,
    takes_key: bool = False,
    name: str | None = None,
    differentiable: Sequence[str] | None = None,
    check: bool = True,
) -> Expert:
    """An expert of two pure functions.

    Args:
      init: (key) -> params, a tree of arrays.
      apply: (params, *inputs) -> output; with `takes_key` it also takes `keys`, see `Expert`.
      examples: one array for each input, batch axis first.
      takes_key: True if `apply` drops out.
      name: the expert's; None: the name of `apply`.
      differentiable, check: as in `expert_from_linen`.

    Raises:
      ExpertError: if they make no expert.
    """
    name = name or str(getattr(apply, "__name__", type(apply).__name__))
    specs = _specs(name, apply, examples, differentiable, skip=1)
    return _complete(name, init, apply, specs, takes_key, check)


def _complete(
    name: str,
    init: Callable[..., PyTree],
    apply: Callable[..., Any],
    specs: tuple[TensorSpec, ...],
    takes_key: bool,
    check: bool,
) -> Expert:
    """The expert with its output's specification, which an abstract trial finds out."""
    params = called(name, "init", jax.eval_shape, init, jax.random.key(0))
    output = called(name, "apply", jax.eval_shape, apply, params, *_shapes(specs, _TRIAL_ROWS))
    if not hasattr(output, "shape"):
        raise ExpertError(
            f"expert {name!r}: expected one array as output, got {type(output).__name__}; concatenate or stack several"
        )
    if output.shape[:1] != (_TRIAL_ROWS,):
        raise ExpertError(
            f"expert {name!r}: expected an output [batch, ...], got {list(output.shape)} for a batch of {_TRIAL_ROWS}; "
            "the first axis of every example is the batch"
        )
    if not jnp.issubdtype(output.dtype, jnp.floating):
        raise ExpertError(f"expert {name!r}: expected an output of a floating type, got {output.dtype}")
    spec = TensorSpec(name="output", shape=output.shape[1:], dtype=str(output.dtype), differentiable=True)
    expert = Expert(name=name, init=jax.jit(init), apply=apply, inputs=specs, output=spec, takes_key=takes_key)
    if check:
        check_expert(expert)
    return expert


def _by_row(evaluate_rows: Callable[..., Any], train_row: Callable[..., Any]) -> Callable[..., Any]:
    def apply(params: PyTree, *inputs: Any, keys: Any = None) -> Any:
        if keys is None:
            return evaluate_rows(params, *inputs)

        def one(key_data: Any, *row: Any) -> Any:
            return train_row(params, wrap_key(key_data), *(part[None] for part in row))[0]

        return jax.vmap(one)(jnp.asarray(keys), *map(jnp.asarray, inputs))

    return apply


def _described(examples: Iterable[Any]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shape without the batch axis, and type, of each example."""
    arrays = [example if hasattr(example, "shape") else np.asarray(example) for example in examples]
    if not arrays or not all(array.shape for array in arrays):
        got = ", ".join(str(list(array.shape)) for array in arrays) or "none"
        raise ExpertError(f"expected an example array [batch, ...] for each input of the expert, got {got}")
    return tuple((tuple(array.shape[1:]), str(jax.dtypes.canonicalize_dtype(array.dtype))) for array in arrays)


def _specs(
    name: str, call: Callable[..., Any], examples: Sequence[Any], differentiable: Sequence[str] | None, *, skip: int = 0
) -> tuple[TensorSpec, ...]:
    """One specification for each example, named after the call's arguments behind the first `skip`."""
    arguments = list(inspect.signature(call).parameters.values())[skip:]
    names = [argument.name for argument in arguments if argument.kind <= argument.POSITIONAL_OR_KEYWORD]
    if any(argument.kind == argument.VAR_POSITIONAL for argument in arguments):
        names += [f"input{index}" for index in range(len(names), len(examples))]
    if len(names) < len(examples):
        raise ExpertError(
            f"expert {name!r} takes {len(names)} inputs ({', '.join(names)}), got {len(examples)} examples"
        )
    names = names[: len(examples)]
    if unknown := sorted(set(differentiable or ()) - set(names)):
        raise ExpertError(f"expert {name!r} has no input {', '.join(unknown)}; its inputs are {', '.join(names)}")
    specs = []
    for label, (shape, dtype) in zip(names, _described(examples), strict=True):
        floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
        chosen = floating if differentiable is None else label in differentiable
        if chosen and not floating:
            raise ExpertError(f"expert {name!r}: input {label!r} is {dtype}, which has no gradient")
        specs.append(TensorSpec(name=label, shape=shape, dtype=dtype, differentiable=chosen))
    return tuple(specs)


def _modes(
    call: Callable[..., Any],
    specs: tuple[TensorSpec, ...],
    train: Mapping[str, Any] | None,
    evaluate: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    flags = set(inspect.signature(call).parameters) & set(_TRAINING_FLAGS) - {spec.name for spec in specs}
    training = {flag: _TRAINING_FLAGS[flag] for flag in flags}
    evaluating = {flag: not value for flag, value in training.items()}
    return {**training, **(train or {})}, {**evaluating, **(evaluate or {})}


def _shapes(specs: tuple[TensorSpec, ...], rows: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((rows, *spec.shape), jnp.dtype(spec.dtype)) for spec in specs]


def _refuse_state(name: str, kinds: set[str]) -> None:
    if kinds:
        raise ExpertError(
            f"expert {name!r} keeps state beside its parameters ({', '.join(sorted(kinds))}). A node joins the rows of "
            "different trainers and pads them with zeros, so statistics of a batch would mix strangers' rows: use "
            "LayerNorm or RMSNorm in place of BatchNorm, and parameters in place of other variables"
        )
