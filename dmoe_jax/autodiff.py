"""Reverse-mode differentiation of a step that is partly somewhere else.

A training step is a few jitted *segments* (embedding, gating, mixing, loss) joined by *remote calls* that are awaited.
Callbacks inside one big `jit` would block XLA's thread pool while they wait. So user code runs eagerly, as ordinary
Python, a `Recording` notes which segment consumed and produced which values, and the backward pass walks the notes from
last to first.

    async def forward(run, params, batch):
        hidden = run(embed, params["embed"], batch.tokens)
        hidden = await run.call(remote_layer, hidden)
        return run(loss_head, params["head"], hidden, batch.targets)

    loss, grads = await value_and_grad(forward)(params, batch)

A segment keeps what its backward needs, as in `jax.grad`, until the step is over. What of it was among the inputs, such
as parameters, is not kept twice: `jit` would copy it. A function under `jax.checkpoint` keeps its inputs alone and is
computed again (gradient checkpointing, Learning@home section 3.3).
"""

import functools
import itertools
import operator
import types
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

from dmoe_jax.arrays import PyTree
from dmoe_jax.mesh.layout import sharding_of

T = TypeVar("T")


class Value:
    """A value on the tape: one array, known now, through which gradients will flow; a leaf to `jax.tree`.

    `.value` is the array; what is computed from it outside the recording is a constant to the gradient.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value if hasattr(value, "dtype") else jnp.asarray(value)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the array."""
        return self.value.dtype

    def __repr__(self) -> str:
        return f"Value({self.dtype}{list(self.shape)})"


def without_waiting(coroutine: Coroutine[Any, Any, T]) -> T:
    """Drive a coroutine that never waits, such as one whose experts are at hand, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise RuntimeError(f"{coroutine} waits for an event loop: await it under trio")


@runtime_checkable
class RemoteCall(Protocol):
    """A differentiable operation that is carried out elsewhere. What backward needs from forward is its `residual`."""

    async def forward(self, *inputs: Any) -> tuple[PyTree, Any]:
        """Return (outputs, residual). Inputs are concrete arrays in the order given to `Recording.call`."""
        ...

    async def backward(self, residual: Any, output_grads: PyTree) -> tuple[Any, ...]:
        """Return one gradient per input, None for an input without one. `output_grads` has the outputs' structure."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class _Kept:
    """Needs of the backward of a segment."""

    arrays: list[Any]
    """Arrays computed by its forward."""
    structure: Any = field(metadata={"static": True})
    """Structure of the function that computes gradients, a pytree of all that it needs."""
    places: tuple[int, ...] = field(metadata={"static": True})
    """For each leaf of that pytree the number of the argument that it is; -1: it is the next of `arrays`."""


@dataclass(frozen=True, slots=True)
class _Segment:
    programs: "_Programs"
    args: tuple[Any, ...]
    outputs: tuple[Value, ...]
    kept: _Kept


@dataclass(frozen=True, slots=True)
class _Remote:
    operation: RemoteCall
    args: tuple[Any, ...]
    residual: Any
    outputs: PyTree


class Recording:
    """The tape of one step, and the `run` that user code calls. Not to `differentiate` is for evaluation."""

    def __init__(self, *, differentiate: bool = True) -> None:
        self._notes: list[_Segment | _Remote] | None = [] if differentiate else None

    @property
    def differentiates(self) -> bool:
        """True if a backward pass may follow: training, where dropout is random, and not evaluation."""
        return self._notes is not None

    def __call__(self, function: Callable[..., PyTree], *args: PyTree) -> PyTree:
        """Run the pure `function` as one jitted segment.

        Args:
          function: pure, positional arguments only, returns a pytree of arrays. The same object in every step: compiled
            code belongs to it, and a lambda made anew would compile for ever.
          args: pytrees whose leaves are tape values or plain arrays.
        Returns: the function's result with each array as a tape value. Dispatch is asynchronous, as always in JAX.
        """
        programs = _programs_of(function)
        if self._notes is None or not any(wanted := _wanted(args)):
            return jax.tree.map(Value, programs.run(*concrete(args)))
        result, kept = programs.run_and_keep(wanted, concrete(args))
        leaves, treedef = jax.tree.flatten(result)
        outputs = tuple(Value(leaf) for leaf in leaves)
        self._notes.append(_Segment(programs, args, outputs, kept))
        return jax.tree.unflatten(treedef, outputs)

    async def call(self, operation: RemoteCall, *inputs: Value | Any) -> PyTree:
        """Carry out a remote operation. If cancelled, the operation is cancelled and the tape is as it was.

        It gets its backward when a gradient reaches its outputs, even if its inputs are plain data: the first layer's
        experts learn, too.
        """
        outputs, residual = await operation.forward(*concrete(inputs))
        values = jax.tree.map(Value, outputs)
        if self._notes is not None:
            self._notes.append(_Remote(operation, inputs, residual, values))
        return values

    async def backward(self, loss: Value) -> dict[Value, Any]:
        """Gradients of the scalar `loss` with respect to every tape value that it depends on."""
        if self._notes is None:
            raise RuntimeError("this recording was made with differentiate=False")
        if not isinstance(loss, Value) or loss.shape != () or not _is_inexact(loss.value):
            raise ValueError(f"the loss must be a floating scalar computed by the recording, got {loss!r}")
        grads: dict[Value, Any] = {loss: np.ones((), loss.dtype)}
        for note in reversed(self._notes):
            if not any(output in grads for output in jax.tree.leaves(note.outputs)):
                continue
            if isinstance(note, _Segment):
                for value, grad in _input_gradients(note, grads):
                    grads[value] = _add_in_place(grad, grads[value]) if value in grads else grad
                continue
            output_grads = jax.tree.map(lambda out: _gradient_or_zero(grads, out), note.outputs)
            input_grads = await note.operation.backward(note.residual, output_grads)
            for value, grad in zip(note.args, input_grads, strict=True):
                if isinstance(value, Value) and grad is not None:
                    grads[value] = _add(grads[value], grad) if value in grads else grad
        return grads


def value_and_grad(
    forward: Callable[..., Awaitable[Any]], *, has_aux: bool = False
) -> Callable[..., Awaitable[tuple[Any, PyTree]]]:
    """The asynchronous counterpart of `jax.value_and_grad`.

    Args:
      forward: `async forward(run, params, *args) -> loss`; with `has_aux`, `-> (loss, aux)`. `run` is the step's
        `Recording`. Tape values in `aux` are replaced by their arrays.

    Returns: an async function `(params, *args) -> (loss, grads)` or `((loss, aux), grads)`; `grads` has the structure
      of `params`, zeros where the loss does not depend on a parameter. If it is cancelled nothing is left behind but
      the expert updates that had already happened on other machines.
    """

    async def differentiated(params: PyTree, *args: Any) -> tuple[Any, PyTree]:
        run = Recording()
        taped = jax.tree.map(Value, params)
        result = await forward(run, taped, *args)
        loss, aux = result if has_aux else (result, None)
        by_value = await run.backward(loss)
        grads = jax.tree.map(lambda leaf: _gradient_or_zero(by_value, leaf), taped)
        return ((loss.value, concrete(aux)) if has_aux else loss.value), grads

    return differentiated


def concrete(tree: PyTree) -> Any:
    """The tree with tape values replaced by their arrays."""
    return jax.tree.map(lambda leaf: leaf.value if isinstance(leaf, Value) else leaf, tree)


def _is_inexact(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def _gradient_or_zero(grads: dict[Value, Any], leaf: Value) -> Any:
    return grads[leaf] if leaf in grads else jnp.zeros(leaf.shape, leaf.dtype, device=sharding_of(leaf.value))


def _input_gradients(note: _Segment, grads: dict[Value, Any]) -> Iterable[tuple[Value, Any]]:
    """The inputs of a segment with their gradients, in arrays that nobody else has; an input may come twice."""
    # An output that the loss does not use gets zeros, not an absent gradient: the compiled program then does not
    # depend on which outputs happened to be used. Integer outputs carry no gradient and are skipped.
    output_grads = tuple(_gradient_or_zero(grads, out) for out in note.outputs if _is_inexact(out.value))
    leaves, places = jax.tree.leaves(note.args), set(note.kept.places)
    needed = [leaf if number in places else None for number, leaf in enumerate(concrete(leaves))]
    wanted = [*itertools.compress(leaves, _wanted(note.args))]
    shardings = tuple(_kept_sharding(leaf.value) for leaf in wanted)
    return zip(wanted, note.programs.pull_back(shardings, note.kept, needed, output_grads), strict=True)


def _kept_sharding(array: Any) -> NamedSharding | None:
    """The sharding that the gradient of an array on several devices shall have, too: XLA might choose to have it whole
    on each of them. None: there is only one device, or an array's type says where it lies, and so its gradient's."""
    sharding = sharding_of(array)
    if not isinstance(sharding, NamedSharding) or any(kind is not AxisType.Auto for kind in sharding.mesh.axis_types):
        return None
    return sharding


def _wanted(args: tuple[PyTree, ...]) -> tuple[bool, ...]:
    """For each leaf True if it is differentiated."""
    return tuple(isinstance(leaf, Value) and _is_inexact(leaf.value) for leaf in jax.tree.leaves(args))


class _Programs:
    """The compiled programs of one segment function: it itself, `_with_kept` and `_pulled_back`."""

    def __init__(self, function: Callable[..., PyTree]) -> None:
        def pull_back(*args: Any) -> list[Any]:  # one of its own: JAX keeps compiled code with the function
            return _pulled_back(*args)

        self.run = jax.jit(lambda *args: function(*args))
        self.run_and_keep = jax.jit(functools.partial(_with_kept, function), static_argnums=0)
        self.pull_back = jax.jit(pull_back, static_argnums=0)


_of_functions: weakref.WeakKeyDictionary[Callable[..., PyTree], _Programs] = weakref.WeakKeyDictionary()
"""The programs of functions that somebody still has: those of settings that were tried before are gone."""
_of_others = functools.lru_cache(maxsize=64)(_Programs)
"""The programs of methods, which are new objects each time they are looked up, and of what knows no weak reference."""


def _programs_of(function: Callable[..., PyTree]) -> _Programs:
    if isinstance(function, types.MethodType):
        return _of_others(function)
    try:
        alive = weakref.ref(function)
    except TypeError:
        return _of_others(function)
    programs = _of_functions.get(function)
    if programs is None:
        # Weakly: a program that held its function would keep itself alive.
        programs = _of_functions[function] = _Programs(lambda *args: cast(Any, alive())(*args))
    return programs


def _with_kept(
    function: Callable[..., PyTree], wanted: tuple[bool, ...], args: tuple[PyTree, ...]
) -> tuple[PyTree, _Kept]:
    """The segment's result, and what its backward needs for the gradients of the wanted leaves of its arguments."""
    leaves, treedef = jax.tree.flatten(args)

    def of_wanted(chosen: list[Any]) -> tuple[tuple[Any, ...], PyTree]:
        supply = iter(chosen)
        merged = [next(supply) if want else leaf for leaf, want in zip(leaves, wanted, strict=True)]
        result = function(*jax.tree.unflatten(treedef, merged))
        return tuple(out for out in jax.tree.leaves(result) if _is_inexact(out)), result

    _, pull, result = jax.vjp(of_wanted, list(itertools.compress(leaves, wanted)), has_aux=True)
    needed, structure = jax.tree.flatten(pull)
    numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
    places = tuple(numbers.get(id(array), -1) for array in needed)
    return result, _Kept([array for array, place in zip(needed, places, strict=True) if place < 0], structure, places)


def _pulled_back(
    shardings: tuple[NamedSharding | None, ...], kept: _Kept, args: list[Any], output_grads: tuple[Any, ...]
) -> list[Any]:
    """The gradients of the wanted leaves of the arguments, of which only those in `kept.places` are looked at, with
    these shardings."""
    computed = iter(kept.arrays)
    needed = [next(computed) if place < 0 else args[place] for place in kept.places]
    (grads,) = jax.tree.unflatten(kept.structure, needed)(output_grads)
    return [
        grad if sharding is None else jax.lax.with_sharding_constraint(grad, sharding)
        for grad, sharding in zip(grads, shardings, strict=True)
    ]


_add = jax.jit(operator.add)
_add_in_place = jax.jit(operator.add, donate_argnums=0)
