"""A remote mixture as one differentiable function of arrays, for code that lives under `jit`.

Theory of operation. Scores and mixing are ordinary JAX. Between them stands one host callback, which chooses the
experts, calls them all at once over the network and returns their outputs; its `custom_vjp` has one more, which sends
the gradients. (Callbacks of one program run one after the other, so one for each expert would add up their waits.)
XLA waits while the network does: the asynchronous `dmoe_jax.autodiff` costs less and lets one thread run many trainers.

- The callbacks are `io_callback`, which XLA never drops; a `pure_callback` whose result is not used vanishes, and with
  it the experts' learning. JAX asks for a backward pass only where something that is differentiated comes in. `anchor`
  is that something, a scalar parameter of gradient zero: experts that are fed with plain data learn, too, and so do
  those of a router without parameters.
- Nothing is computed with JAX inside a callback, which could wait for the very thread that it blocks. Routers that must
  see the whole grid therefore select in the graph, and a callback before it fetches which experts are alive.
- A callback may wait on one of the few threads with which XLA's CPU client computes, by default as many as there are
  cores, and so may another callback on each of the others. So nothing that a callback waits for needs them: experts of
  this process compute on devices of their own (`dmoe_jax.own_devices`), and arrays come in pieces that JAX hands over
  without a thread, where `make_room` could not give the client threads to spare.
- What the backward pass needs stays on the host, under a ticket that travels through the graph. The backward pass takes
  it away; of forward passes that are never followed by one the oldest are forgotten. Evaluation keeps nothing.

Errors inside a callback come out of the compiled program as `jax.errors.JaxRuntimeError`, with their message in it.
`vmap` is refused with a sentence. `jax.checkpoint` (remat) around the layer is refused by JAX itself ("Effects not
supported"): put it around the parts beside it. Forward-mode differentiation does not exist for a `custom_vjp`.
"""

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback
from jaxtyping import Array, Float, PRNGKeyArray

from dmoe_jax.mixture.remote import RemoteMixture, Residual, mix_segment
from dmoe_jax.routing.base import Features, Ids, Traffic, score
from dmoe_jax.types import PyTree
from dmoe_jax.xla_threads import MAX_WAITING_CALLS, make_room

T = TypeVar("T")

_PIECE_BYTES = 64 << 10
"""Bytes of one piece of an array for a callback: JAX copies up to 100 KiB itself, and more on one of XLA's threads."""

MAX_RESIDUALS = 64
"""Forward passes of one layer whose backward pass may be outstanding."""


@runtime_checkable
class Portal(Protocol):
    """A way into the thread in which trio and the swarm live."""

    def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run `await function(*args)` there, and wait for its result or its error here."""
        ...


class CallSlots:
    """Bounds how many callbacks wait at once.

    Args:
      limit: how many.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free = threading.Semaphore(limit)

    @contextlib.contextmanager
    def take(self, what: str) -> Iterator[None]:
        """Hold a slot while the block lasts.

        Raises:
          RuntimeError: all are taken. To wait for one would hold another of XLA's threads.
        """
        if not self._free.acquire(blocking=False):
            raise RuntimeError(
                f"{what}: {self._limit} calls of remote layers are waiting in this process already, and one more could "
                "stop XLA for good; run fewer training loops at once, or asynchronous ones (dmoe_jax.autodiff)"
            )
        try:
            yield
        finally:
            self._free.release()


@functools.cache
def process_slots() -> CallSlots:
    """The slots of this process: the bound is the process's, so its count is, too."""
    return CallSlots(MAX_WAITING_CALLS)


class HostCall:
    """One remote mixture, callable with arrays or tracers.

    Args:
      mixture: does the work, in the portal's thread.
      portal: leads there.
      slots: bounds how many calls wait at once; None: those of the process.
    """

    def __init__(self, mixture: RemoteMixture, portal: Portal, *, slots: CallSlots | None = None) -> None:
        self.mixture = mixture
        self._portal = portal
        self._slots = process_slots() if slots is None else slots
        self._name = f"remote layer {mixture.config.prefix!r}"
        self._residuals: OrderedDict[int, Residual] = OrderedDict()  # touched in the portal's thread only
        self._tickets = 0
        self._remote: Any = jax.custom_vjp(lambda anchor, chosen, inputs: self._ask(False, chosen, inputs)[1:])
        self._remote.defvjp(self._vjp_forward, self._vjp_backward)

    def __call__(
        self,
        gate: PyTree,
        anchor: Float[Array, ""],
        features: Features,
        *inputs: Array,
        key: PRNGKeyArray | None = None,
        ids: Ids | None = None,
    ) -> tuple[Array, Float[Array, ""]]:
        """Mix the experts' outputs for a batch of samples.

        Args:
          gate: the router's parameters.
          anchor: a scalar that is differentiated whenever the experts shall learn; its gradient is zero.
          features: what the router looks at.
          inputs: the experts' inputs, [batch, ...].
          key, ids: see `dmoe_jax.routing.base.Router`.
        Returns: (mixed [batch, ...], the router's auxiliary loss, a scalar).
        Raises:
          ValueError: the inputs are not those of the expert.
        """
        self._check(inputs)
        router = self.mixture.router
        scores = score(router, gate, features, key=key, ids=ids)
        selected: tuple[Any, ...] = ()
        if router.whole_grid:
            alive = self._on_host(self.mixture.alive, jax.ShapeDtypeStruct(router.grid_size, np.bool_))
            selected = (*router.select(scores, self.mixture.config.k_best, alive), alive)
        outputs, answered, indices, *told = self._remote(anchor, (scores._replace(extras=()), selected), inputs)
        return mix_segment(router)(scores, indices, answered, outputs, inputs[0], Traffic(*told) if told else None)

    def without_network(self, *inputs: Array) -> Array:
        """What the layer returns if no expert answers, for a model that is being initialised: nobody is called."""
        self._check(inputs)
        spec, batch = self.mixture.expert.output, inputs[0].shape[0]
        return inputs[0] if self.mixture.expert.is_residual else jnp.zeros((batch, *spec.shape), spec.dtype)

    def _check(self, inputs: tuple[Any, ...]) -> None:
        specs = self.mixture.expert.inputs
        expected = [(spec.shape, np.dtype(spec.dtype)) for spec in specs]
        if [(part.shape[1:], np.dtype(part.dtype)) for part in inputs] != expected:
            wanted = ", ".join(f"{spec.name} {spec.dtype}{list(spec.shape)}" for spec in specs)
            got = ", ".join(f"{part.dtype}{list(part.shape)}" for part in inputs)
            raise ValueError(
                f"{self._name}: for each sample its experts take {wanted}; got the batch {got or 'nothing'}"
            )

    # The graph's side.

    def _vjp_forward(self, anchor: Any, chosen: Any, inputs: Any) -> tuple[Any, Any]:
        ticket, *found = self._ask(True, chosen, inputs)
        return tuple(found), ticket

    def _vjp_backward(self, ticket: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        specs, batch = self.mixture.expert.inputs, grads[0].shape[0]
        shapes = [jax.ShapeDtypeStruct((batch, *spec.shape), spec.dtype) for spec in specs if spec.differentiable]
        found = iter(self._on_host(self._backward, shapes, ticket, grads[0]))
        return None, None, tuple(next(found) if spec.differentiable else None for spec in specs)

    def _ask(self, keep: bool, chosen: Any, inputs: Any) -> Any:
        scores, selected = chosen
        expert, dims = self.mixture.expert, len(self.mixture.router.grid_size)
        batch = scores.logits[0].shape[0]
        slots = selected[0].shape[1] if selected else self.mixture.config.k_best
        router = self.mixture.router
        shapes: tuple[jax.ShapeDtypeStruct, ...] = (
            jax.ShapeDtypeStruct((), np.uint32),
            jax.ShapeDtypeStruct((batch, slots, *expert.output.shape), expert.output.dtype),
            jax.ShapeDtypeStruct((batch, slots), np.bool_),
            jax.ShapeDtypeStruct((batch, slots, dims), np.int32),
        )
        if router.heeds_traffic:
            shapes += (
                jax.ShapeDtypeStruct((batch, slots), np.bool_),
                jax.ShapeDtypeStruct(router.grid_size, np.float32),
            )
        return self._on_host(functools.partial(self._forward, keep), shapes, chosen, inputs)

    def _on_host(self, function: Callable[..., Awaitable[Any]], shapes: Any, *args: Any) -> Any:
        """What the function returns in the portal's thread. `vmap` is refused: it would call the experts once for each
        element, one after the other."""

        like = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), args)

        def in_callback(*pieces: Any) -> Any:
            with self._slots.take(self._name):
                return self._portal.run(function, *_joined(like, pieces))

        guarded = custom_vmap(lambda *args: io_callback(in_callback, shapes, *_in_pieces(args)))

        @guarded.def_vmap
        def refuse(axis_size: int, in_batched: Any, *args: Any) -> Any:
            raise NotImplementedError(
                f"{self._name} cannot be used under vmap; its inputs have a batch axis already: put all samples into it"
            )

        return guarded(*args)

    # The host's side, in the portal's thread.

    async def _forward(self, keep: bool, chosen: Any, inputs: Any) -> tuple[Any, ...]:
        mixture = self.mixture
        scores, selected = chosen
        if selected:
            mixture.check_scores(scores)
            choice = await mixture.choose_selected(*selected)
        else:
            choice = await mixture.choose(scores)
        seed = mixture.dropout_seed() if keep else None
        outputs, answered, residual = await mixture.forward(choice, inputs, seed)
        told: tuple[Any, ...] = ()
        if choice.traffic is not None:
            asked, capacity = choice.traffic
            told = (asked, np.ones(mixture.router.grid_size, np.float32) if capacity is None else capacity)
        return np.uint32(self._put(residual) if keep else 0), outputs, answered, choice.indices, *told

    async def _backward(self, ticket: Any, grads: Any) -> list[Any]:
        residual = self._residuals.pop(int(ticket), None)
        if residual is None:
            raise RuntimeError(
                f"{self._name}: what its forward pass kept for this backward pass is gone; a forward pass has one "
                f"backward pass, and at most {MAX_RESIDUALS} may be outstanding"
            )
        found = await self.mixture.backward(residual, grads)
        return [grad for grad in found if grad is not None]

    def _put(self, residual: Residual) -> int:
        self._tickets = (self._tickets + 1) % 2**32
        self._residuals[self._tickets] = residual
        if len(self._residuals) > MAX_RESIDUALS:
            self._residuals.popitem(last=False)
        return self._tickets


def _in_pieces(args: Any) -> list[Array]:
    """The arrays of a tree, large ones flat and in pieces where a callback would need a thread of XLA's to get them."""
    pieces: list[Array] = []
    for array in jax.tree.leaves(args):
        step = _PIECE_BYTES // array.dtype.itemsize
        if make_room() or array.size <= step:
            pieces.append(array)
        else:
            flat = array.reshape(-1)
            pieces += [flat[start : start + step] for start in range(0, flat.size, step)]
    return pieces


def _joined(like: Any, pieces: Sequence[Any]) -> Any:
    """The tree of NumPy arrays whose pieces these are; `like` gives the shapes."""
    left = iter(pieces)

    def join(array: Any) -> np.ndarray:
        found = [np.asarray(next(left))]
        while sum(piece.size for piece in found) < array.size:
            found.append(np.asarray(next(left)))
        return found[0] if len(found) == 1 else np.concatenate(found).reshape(array.shape)

    return jax.tree.map(join, like)
