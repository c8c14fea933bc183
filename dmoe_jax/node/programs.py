"""The programs of one kind of expert: its forward pass, and its backward pass with the optimiser's step.

They are pure, and shared by every expert of one kind, optimiser and layout. The backward pass recomputes the forward
(Learning@home section 3.3), with the same dropout keys, and applies the optimiser at once; parameters and state are
donated. The step itself looks whether its outcome is finite, and keeps the old parameters and state if it is not
(`update_unless_not_finite`).
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.layout import Layout as ArrayLayout
from jax.experimental.layout import with_layout_constraint

from dmoe_jax.arrays import PyTree, copied, gradients_like, in_type_of, kept_like, stored
from dmoe_jax.experts.base import Expert, folded_in
from dmoe_jax.machine.remembered import remembered
from dmoe_jax.mesh.layout import Layout, put, to_host
from dmoe_jax.node.host_calls import calls_host, check_threads_for_host_calls
from dmoe_net.types import Array

State = tuple[PyTree, PyTree]
"""Parameters and optimiser state, of one expert or of all experts of a group."""

LARGE_BYTES = 4 << 20
"""Bytes of parameters, beyond which the gradients have buffers of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Work for one expert, to be computed at once."""

    inputs: tuple[Array, ...]
    """As the expert specifies them, each [rows, ...]."""
    output_grads: Array | None = None
    """[rows, ...]; None: a forward pass."""
    keys: Array | None = None
    """uint32 [rows, 2], a dropout key for each row; None: evaluation."""
    seen: Array | None = None
    """int64 [rows], the update count at each row's forward, at least 0. The optimiser is told the rows' mean staleness;
    counts beyond today's, of an expert that was restored since, have none. None: nothing is stale."""
    requests: Mapping[bytes, float] = field(default_factory=dict)
    """Names of the requests in a backward pass, and when they came, by one clock for all."""

    @property
    def rows(self) -> int:
        """Number of its rows."""
        return self.inputs[0].shape[0]


class Work(NamedTuple):
    """A batch for one expert of a group, by its position, and the staleness for the optimiser. A program has a batch
    of an expert at most; all are forward passes or all backward ones, and all have dropout keys or none has."""

    position: int
    batch: Batch
    staleness: float = 0.0


class Result(NamedTuple):
    """The end of a batch.

    Attributes:
      arrays: the output, or the gradients of the differentiable inputs; each [rows, ...].
      finite: bool [2], of a backward pass: the update, and the gradients. If one is not, the expert is as it was.
    """

    arrays: tuple[Array, ...]
    finite: Array | None = None


@runtime_checkable
class Programs(Protocol):
    """The compiled programs of a group of experts of one kind. They hold no state: equal groups may share them."""

    size: int
    """Experts of a group."""
    nbytes: int
    """Bytes of the state of one of them, all parts together."""
    least_rows: int
    """Fewest rows for which a program is worth its memory."""
    at_once: bool
    """True if a program takes about as long for many experts as for one."""
    warm: set[int]
    """Numbers of rows for which they are compiled."""
    kind: int
    """Equal where the compiled programs are the same."""

    @property
    def calls_host(self) -> bool:
        """True if a compiled one calls the host, see `dmoe_jax.node.host_calls`."""

    def most_together(self, rows: int) -> int:
        """The most experts of a program for so many rows of each."""

    def compile(self, bucket: int) -> None:
        """Compile for batches of so many rows, from shapes; may run beside the device."""

    def begin(self, state: State, work: Sequence[Work]) -> tuple[State, Callable[[], list[Result]]]:
        """Have XLA begin batches; return the new state, for what is begun next, and what waits for the results. The
        state that is given is lost where updates are made."""

    def read(self, state: State, index: int) -> State:
        """The state of one expert, valid until the next update."""

    def write(self, state: State, index: int, saved: State) -> State:
        """The state with that of one expert replaced by a saved one, laid out over devices as the present one is."""


def bucket_of(rows: int, parts: int = 1) -> int:
    """Rows of the program for so many: the next power of two, of rows in each of so many parts."""
    if rows < 1:
        raise ValueError(f"a batch has at least one row, got {rows}")
    return parts << (math.ceil(rows / parts) - 1).bit_length()


def buckets_up_to(max_rows: int, parts: int = 1) -> tuple[int, ...]:
    """Every bucket that batches of 1..max_rows rows can fall into, ascending."""
    return tuple(parts << power for power in range((bucket_of(max_rows, parts) // parts).bit_length()))


def warm_bucket_of(rows: int, programs: Programs, parts: int = 1) -> int:
    """Rows of the program that so many are computed by: the smallest that is compiled; if none is, their bucket."""
    warm = (bucket for bucket in tuple(programs.warm) if bucket >= rows)
    return min(warm, default=bucket_of(rows, parts))


class ExpertPrograms:
    """The programs of one expert kind, for groups of one. `keys` is None, or a dropout key for each row.

    On a CPU the gradients of a large expert have buffers of their own, which all experts of the kind use in turn. As
    temporary buffers they would be as large as the parameters and a little more, by so much as the rows make out; a
    heap keeps another hole for each size.

    Args:
      expert: what is computed.
      optimizer: what trains it; None: it never changes.
      layout: where the state lies; what an update returns is pinned to lie so, too, so that nothing drifts to other
        devices and nothing is compiled twice. None: where JAX puts it.

    Raises:
      ValueError: as `check_optimizer`, or the layout does not fit the state.
    """

    def __init__(
        self, expert: Expert, optimizer: optax.GradientTransformation | None, layout: Layout | None = None
    ) -> None:
        self._expert = expert
        self._layout = layout
        is_whole = layout is None or len(layout.devices) == 1
        self._apply, self._grad_and_update = functions_of(expert, optimizer, is_whole=is_whole)
        is_large = nbytes_of(state_shapes(expert, optimizer)[0]) >= LARGE_BYTES
        self._keeps_grads = is_large and layout is None and jax.default_backend() == "cpu" and optimizer is not None
        self._grads: PyTree = None  # buffers for them; None: not made yet, or given to a program
        self._forward_options: dict[str, Any] = {}
        self._backward_options: dict[str, Any] = {"donate_argnums": (0, 1)}
        self.size = self.least_rows = 1
        self.at_once = self.calls_host = False
        self.warm: set[int] = set()
        self.kind = id(self)
        self.state = jax.tree.map(_shape_at, state_shapes(expert, optimizer))
        """Shape and type of each array of (params, opt_state), and with a layout its sharding."""
        self.nbytes = nbytes_of(self.state)

        def init(key_data: Any) -> PyTree:
            return copied(expert.init(jax.random.wrap_key_data(key_data)))

        def init_opt_state(params: PyTree) -> PyTree:
            return () if optimizer is None else copied(optimizer.init(params))

        self.init: Callable[..., PyTree] = EachCompiledAlone(init)
        """(key data) -> params, which lie where they shall stay."""
        self.init_opt_state: Callable[..., PyTree] = EachCompiledAlone(init_opt_state)
        """(params) -> opt_state, likewise."""
        if layout is not None:
            params, opt_state = self._lay_out(layout)
            self.init = jax.jit(init, out_shardings=params)
            self.init_opt_state = jax.jit(init_opt_state, in_shardings=(params,), out_shardings=opt_state)
        self.apply = jax.jit(self._apply, **self._forward_options)
        """(params, inputs, keys) -> output, for any number of rows."""
        self.grad_and_update = jax.jit(without_grads(self._grad_and_update), **self._backward_options)
        """(params, opt_state, inputs, output_grads, keys, staleness) -> (finite, params, opt_state, input_grads), for
        any number of rows, with a gradient for each differentiable input, in order. `staleness` is for the optimiser,
        float32. `finite` is bool [2]: the update, and the input gradients. If one of them is not finite, params and
        opt_state are returned as they came."""
        self._compiled: dict[tuple[int, bool], tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def most_together(self, rows: int) -> int:
        del rows
        return 1

    def begin_with(self, params: PyTree) -> State:
        """The state of an expert with these parameters, which are copied, that has learnt nothing."""
        own = own_copies(params) if self._layout is None else jax.tree.map(_laid_out, self.state[0], params)
        # Waited for: else the first call would.
        return own, jax.block_until_ready(self.init_opt_state(own))

    def begin(self, state: State, work: Sequence[Work]) -> tuple[State, Callable[[], list[Result]]]:
        ((_, batch, staleness),) = work
        params, opt_state = state
        rows, grads = batch.rows, batch.output_grads
        bucket = warm_bucket_of(rows, self, 1 if self._layout is None else self._layout.mesh_shape.data)
        compile_when_called = self.apply, self.grad_and_update
        forward, backward = self._compiled.get((bucket, batch.keys is not None), compile_when_called)
        if grads is None:
            output = forward(params, *self._for_program((batch.inputs, batch.keys), bucket))
            return state, lambda: [Result((np.asarray(output)[:rows],))]
        arguments = self._for_program((batch.inputs, grads, batch.keys, np.float32(staleness)), bucket)
        finite, *new, input_grads = backward(params, opt_state, *arguments)

        def wait() -> list[Result]:
            try:
                return [Result(tuple(np.asarray(grad)[:rows] for grad in input_grads), np.asarray(finite))]
            except Exception:  # of XLA: what the program was given is lost, with others' buffers
                self._grads = None
                raise

        return (new[0], new[1]), wait

    def read(self, state: State, index: int) -> State:
        del index
        if self._layout is None or not self._layout.spans_processes:
            return state
        return jax.tree.map(lambda leaf: to_host(stored(leaf)), state)

    def write(self, state: State, index: int, saved: State) -> State:
        del index
        return jax.tree.map(laid_out_like, state, saved)

    def _for_program(self, tree: PyTree, bucket: int) -> Any:
        """Padded to so many rows, and where the program wants it."""
        padded = _padded(tree, bucket)
        return padded if self._layout is None else self._layout.for_program(padded)

    def compile(self, rows: int) -> None:
        params, opt_state = self.state
        specs = (*self._expert.inputs, self._expert.output)
        *inputs, grads = (self._shape((rows, *spec.shape), spec.dtype) for spec in specs)
        for keys in (None, self._shape((rows, 2), np.uint32)) if self._expert.takes_key else (None,):
            forward = compiled_alone(self._apply, (params, tuple(inputs), keys), of=self, **self._forward_options)
            arguments = params, opt_state, tuple(inputs), grads, keys, self._shape((), np.float32)
            self._compiled[rows, keys is not None] = forward, self._compiled_backward(arguments)
        self.warm.add(rows)

    def _compiled_backward(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        """`grad_and_update` for arguments of these shapes."""
        options = dict(self._backward_options)
        if not self._keeps_grads:
            return compiled_alone(without_grads(self._grad_and_update), arguments, of=self, **options)
        params, opt_state, *batch = arguments

        def into(params: PyTree, opt_state: PyTree, grads: PyTree, *batch: Any) -> Any:
            del grads  # its buffers are those of the result
            return self._grad_and_update(params, opt_state, *batch)

        options |= {"donate_argnums": (0, 1, 2), "keep_unused": True}
        program = compiled_alone(into, (params, opt_state, params, *batch), of=self, **options)
        if self._grads is None:  # else something small would be compiled while serving
            self._grads = self._new_grads()

        def backward(params: PyTree, opt_state: PyTree, *batch: Any) -> Any:
            grads, self._grads = self._grads, None
            if grads is None:
                grads = self._new_grads()
            finite, params, opt_state, self._grads, input_grads = program(params, opt_state, grads, *batch)
            return finite, params, opt_state, input_grads

        return backward

    def _new_grads(self) -> PyTree:
        shapes = self.state[0]
        return compiled_alone(lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), ())()

    def _lay_out(self, layout: Layout) -> tuple[PyTree, PyTree]:
        """Have programs keep the state as the layout says; return the shardings of params and opt_state."""
        params = layout.state_shardings({"params": self.state[0]})["params"]
        opt_state = layout.state_shardings({"opt_state": self.state[1]})["opt_state"]
        rows, everywhere, results = layout.rows, layout.everywhere, layout.results
        self.state = jax.tree.map(_shape_at, self.state, (params, opt_state))
        self._forward_options = {"in_shardings": (params, rows, rows), "out_shardings": results}
        self._backward_options |= {
            "in_shardings": (params, opt_state, rows, rows, rows, everywhere),
            "out_shardings": (everywhere, params, opt_state, results),
        }
        return params, opt_state

    def _shape(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        if self._layout is None:
            return jax.ShapeDtypeStruct(shape, dtype)
        return self._layout.shape_for_program(shape, dtype)


@remembered()
def expert_programs(
    expert: Expert, optimizer: optax.GradientTransformation | None, layout: Layout | None = None
) -> ExpertPrograms:
    """`ExpertPrograms`, cached, so that equal arguments share their compiled code."""
    return ExpertPrograms(expert, optimizer, layout)


def compiled_alone(
    function: Callable[..., Any], arguments: Sequence[Any], *, of: Any = None, **options: Any
) -> Callable[..., Any]:
    """A program for arguments of these shapes and types, of which JAX remembers nothing but the machine's code: all
    that it remembers of a program which it traces by itself is several times as large, a megabyte at least.

    `of` are the `Programs` to which it belongs, which then say if it calls the host; where it does and XLA has too few
    threads, TooFewThreadsError is raised. Options are those of `jax.jit`.
    """

    # JAX remembers traces and what they were lowered to as long as their function lives: so it gets one of its own.
    @functools.wraps(function)
    def own(*args: Any) -> Any:
        return function(*args)

    traced = jax.jit(own, **options).trace(*arguments)
    if of is not None and calls_host(traced.jaxpr):
        check_threads_for_host_calls()
        of.calls_host = True
    return traced.lower().compile()


class EachCompiledAlone:
    """A function as `jax.jit` makes it, but compiled by `compiled_alone`, for each structure, shape and type of its
    arguments. For seldom calls: each takes longer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._programs: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        shapes = [_shape_of(leaf) for leaf in leaves]
        kind = structure, tuple((shape.shape, shape.dtype, shape.sharding) for shape in shapes)
        if kind not in self._programs:
            self._programs[kind] = compiled_alone(self._function, jax.tree.unflatten(structure, shapes))
        return self._programs[kind](*arguments)


@remembered(64)
def state_shapes(expert: Expert, optimizer: optax.GradientTransformation | None) -> tuple[PyTree, PyTree]:
    """(params, opt_state) of an expert as shapes and types; nothing is computed."""
    params = jax.eval_shape(lambda key: copied(expert.init(key)), jax.random.key(0))
    return params, () if optimizer is None else jax.eval_shape(optimizer.init, params)


@remembered(16)
def functions_of(
    expert: Expert, optimizer: optax.GradientTransformation | None, *, is_whole: bool = True
) -> tuple[Callable[..., Any], Callable[..., tuple[Any, PyTree, PyTree, PyTree, tuple[Any, ...]]]]:
    """`apply` and `grad_and_update` of `ExpertPrograms` before they are compiled; the latter returns the gradients of
    the parameters, too, before those of the inputs. `is_whole`: an expert lies on one device.

    JAX pairs what is donated with results of the same shape in the order of both: gradients of inputs that have the
    shape of a parameter would take its place, were they not the last.
    """
    if optimizer is not None:
        check_optimizer(expert, optimizer)
        optimizer = optax.with_extra_args_support(optimizer)
    positions = tuple(i for i, spec in enumerate(expert.inputs) if spec.differentiable)

    def apply(params: PyTree, inputs: tuple[Any, ...], keys: Any) -> Any:
        return expert.apply(params, *inputs, keys=keys) if expert.takes_key else expert.apply(params, *inputs)

    def grad_and_update(
        params: PyTree, opt_state: PyTree, inputs: tuple[Any, ...], output_grads: Any, keys: Any, staleness: Any
    ) -> tuple[Any, PyTree, PyTree, PyTree, tuple[Any, ...]]:
        def output(params: PyTree, chosen: tuple[Any, ...]) -> Any:
            merged = list(inputs)
            for position, value in zip(positions, chosen, strict=True):
                merged[position] = value
            return apply(params, tuple(merged), keys)

        _, pull_back = jax.vjp(output, params, tuple(inputs[i] for i in positions))
        param_grads, input_grads = pull_back(output_grads)
        param_grads = gradients_like(param_grads, params)
        if is_whole:
            param_grads = laid_out(param_grads)
        state = params, opt_state
        if optimizer is None:
            zeros = jax.tree.map(jnp.zeros_like, input_grads)
            finite = jnp.stack([jnp.array(True), stays_finite(zeros, input_grads, is_whole=is_whole)])
        else:
            finite, state = update_unless_not_finite(
                optimizer, state, param_grads, input_grads, staleness, is_whole=is_whole
            )
        return finite, *state, param_grads, input_grads

    return apply, grad_and_update


def without_grads(grad_and_update: Callable[..., Any]) -> Callable[..., Any]:
    """The second of `functions_of` without the gradients of the parameters in its result."""

    def grad_and_update_only(*arguments: Any) -> Any:
        finite, params, opt_state, _, input_grads = grad_and_update(*arguments)
        return finite, params, opt_state, input_grads

    return grad_and_update_only


def check_optimizer(expert: Expert, optimizer: optax.GradientTransformation) -> None:
    """Raise ValueError, without computing anything, unless an optimiser can step this expert from gradients alone: if
    its update needs more than gradients, state, parameters and staleness, such as the loss, or changes the structure of
    its state."""
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


def laid_out_like(own: Any, saved: Any) -> Any:
    """A saved array as a buffer of its own, of the type and in the place of the array that it follows."""
    if own.is_fully_addressable:
        return kept_like(own, saved)
    # From the host: on the way there no device holds an array of which it shall have a part.
    return put(np.asarray(saved, dtype=own.dtype), own.sharding)


def _laid_out(shape: jax.ShapeDtypeStruct, leaf: Any) -> Any:
    """A buffer of its own, as `shape` says."""
    own = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    return put(own.astype(shape.dtype) if own.dtype != shape.dtype else own, shape.sharding)


def _padded(tree: PyTree, rows: int) -> Any:
    """The tree with zero rows appended to each array that has fewer."""

    def padded(array: Array) -> Array:
        count = array.shape[0]
        if count == rows:
            return array
        whole = np.zeros((rows, *array.shape[1:]), array.dtype)  # np.pad takes as long as a small expert's forward pass
        whole[:count] = array
        return whole

    return jax.tree.map(lambda leaf: padded(leaf) if leaf.ndim else leaf, tree)


own_copies = EachCompiledAlone(copied)
"""`copied`, by one program."""

key_data_with = EachCompiledAlone(
    lambda key_data, numbers: jax.random.key_data(folded_in(jax.random.wrap_key_data(key_data), list(numbers)))
)
"""(data of a random key, numbers as uint32 [n]) -> data of the key with these folded in, see `folded_in`."""


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and type of an argument, and where it lies, if that is decided."""
    if not isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if leaf.committed else None)


def _shape_at(shape: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """The shape and type alone, strongly typed, and where it lies."""
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def nbytes_of(tree: PyTree) -> int:
    """Bytes of all arrays."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def update_unless_not_finite(
    optimizer: optax.GradientTransformationExtraArgs,
    state: State,
    grads: PyTree,
    input_grads: tuple[Any, ...],
    staleness: Any,
    *,
    is_whole: bool,
) -> tuple[Any, State]:
    """Take an optimiser step, if it and the gradients that go back to the trainer are finite.

    An optimiser may make anything of finite gradients, so every number of its outcome is looked at before any of the
    old state is given up. On a CPU the outcome is computed twice: once inside the reduction that looks at it, which
    stores nothing, and once more in place, inside a branch. Selecting between old and new instead, number by number,
    stores the outcome before it is known to be good: with Adam two and a half times the memory of the parameters, and
    up to twice the time of the whole step. A GPU would wait for the host to take the branch, so there numbers are
    selected.

    Args:
      optimizer: is given `staleness`, float32.
      state: to be donated to the program that this is traced into.
      grads: of the parameters; on one device, `laid_out`.
      input_grads: of the expert's inputs; nothing is done with them.
      is_whole: the state lies on one device, not spread over several.

    Returns: (bool [2]: the update, and the input gradients, are finite; the new state, or the old one).
    """

    def step(state: State, grads: PyTree) -> State:
        params, opt_state = state
        # In the types that they had: a state that changed its type would be compiled for again.
        updates, new_state = optimizer.update(grads, opt_state, params, staleness=staleness)
        return jax.tree.map(in_type_of, (optax.apply_updates(params, updates), new_state), state)

    zeros = jax.tree.map(jnp.zeros_like, input_grads)
    outcome = step(state, grads)
    finite = jnp.stack(
        [stays_finite(old, new, is_whole=is_whole) for old, new in ((state, outcome), (zeros, input_grads))]
    )

    def branched(state: State, grads: PyTree, is_good: Any) -> Any:
        return jax.lax.cond(is_good, step, lambda state, grads: state, state, grads)

    def selected(state: State, grads: PyTree, is_good: Any) -> Any:
        return jax.tree.map(functools.partial(jnp.where, is_good), step(state, grads), state)

    new = jax.lax.platform_dependent(state, grads, finite.all(), cpu=branched, default=selected)
    return finite, cast(State, new)


def laid_out(grads: PyTree) -> PyTree:
    """Gradients as parameters lie in memory, computed once; for a state on one device.

    XLA would take a product's transpose as it comes, and the branch would then read it across; and it would compute the
    gradients of a single row anew wherever they are used. Either takes half as long again.
    """

    def in_rows(grad: Any) -> Any:
        return grad if grad.ndim < 2 else with_layout_constraint(grad, ArrayLayout(tuple(range(grad.ndim))))

    return jax.lax.optimization_barrier(jax.tree.map(in_rows, grads))


def stays_finite(old: PyTree, new: PyTree, *, is_whole: bool) -> Any:
    """True if no number became NaN or infinite; what was so before may stay: some optimisers start from infinity."""
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    sound = [
        jnp.isfinite(after) | ~jnp.isfinite(before)
        for before, after in pairs
        if jnp.issubdtype(before.dtype, jnp.inexact)
    ]
    if is_whole:
        # Arrays of one shape, such as a parameter and its moments, at once: what they are computed from is read once.
        by_shape: dict[tuple[int, ...], list[Any]] = {}
        for each in sound:
            by_shape.setdefault(each.shape, []).append(each)
        sound = [functools.reduce(jnp.logical_and, alike) for alike in by_shape.values()]
    return jnp.stack([each.all() for each in sound] or [jnp.array(True)]).all()
