"""Remote mixtures as layers of ordinary Flax models, under `jit` and `grad`.

    with connect("PEER") as swarm:
        layer = swarm.mixture("ffn", expert, router)          # a BlockingMixture
        y = layer.linen()(x)                                  # one line in a Linen module
        self.experts = layer.nnx(rngs=rngs)                   # one line in an NNX module; then self.experts(x)

Theory of operation. Scores and mixing are ordinary JAX. Between them stands one host callback, which chooses the
experts, calls them all at once over the network and returns their outputs; its `custom_vjp` has one more, which sends
the gradients. XLA waits while the network does: the asynchronous `dmoe_jax.autodiff` costs less.

- The callbacks are `io_callback`, which XLA never drops; a `pure_callback` whose result is not used vanishes, and with
  it the experts' learning. JAX asks for a backward pass only where something that is differentiated comes in. `anchor`
  is that something, a scalar parameter of gradient zero, so that experts learn which are fed with plain data.
- Nothing is computed with JAX inside a callback, which could wait for the very thread that it blocks. Routers that must
  see the whole grid therefore select in the graph, and a callback before it fetches which experts are alive.
- Callbacks may wait on all of the few threads with which XLA's CPU client computes. So nothing that they wait for needs
  these: experts of this process compute on devices of their own (`machine.own_devices`), and arrays come in pieces
  that JAX hands over without a thread, where `make_room` could not give the client threads to spare.
- The residual of a forward pass stays on the host, under a ticket that travels through the graph, until its backward
  pass takes it; of forward passes that are never followed by one the oldest are forgotten.

Errors inside a callback come out of the compiled program as `jax.errors.JaxRuntimeError`, with their message in it.
`vmap` is refused with a sentence. `jax.checkpoint` (remat) around the layer is refused by JAX itself ("Effects not
supported"): put it around the parts beside it. Forward-mode differentiation does not exist for a `custom_vjp`.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback
from jaxtyping import Array, Float, PRNGKeyArray

from dmoe_jax.arrays import PyTree
from dmoe_jax.machine.xla_threads import MAX_WAITING_CALLS, make_room
from dmoe_jax.mixture.remote import RemoteMixture, Residual, mix_segment
from dmoe_jax.routing.base import Features, Ids, Traffic, score

T = TypeVar("T")

_PIECE_BYTES = 64 << 10
"""Bytes of one piece of an array for a callback: JAX copies up to 100 KiB itself, and more on one of XLA's threads."""

MAX_RESIDUALS = 64
"""Forward passes of one layer whose backward pass may be outstanding."""

_free_slots = threading.Semaphore(MAX_WAITING_CALLS)
"""Places for callbacks that wait, of all layers: XLA's threads are the process's."""


@runtime_checkable
class Portal(Protocol):
    """A way into the thread in which trio and the swarm live."""

    def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run `await function(*args)` there, and wait for its result or its error here."""


class HostCall:
    """One remote mixture, which does its work in the portal's thread, callable with arrays or tracers."""

    def __init__(self, mixture: RemoteMixture, portal: Portal) -> None:
        self.mixture = mixture
        self._portal = portal
        self._name = f"remote layer {mixture.config.prefix!r}"
        self._residuals: OrderedDict[int, Residual] = OrderedDict()  # touched in the portal's thread only
        self._tickets = 0
        self._remote: Any = jax.custom_vjp(lambda anchor, chosen, inputs: tuple(self._ask(False, chosen, inputs)[1:]))
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
          features: [batch, ...], for the router.
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
        """The layer's output if no expert answers, for a model that is being initialised: nobody is called."""
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
        """(ticket, outputs, answered, indices and, for a router that heeds it, traffic); see `_forward`."""
        scores, selected = chosen
        spec, router = self.mixture.expert.output, self.mixture.router
        pairs = scores.logits[0].shape[0], selected[0].shape[1] if selected else self.mixture.config.k_best
        shapes = [
            jax.ShapeDtypeStruct((), np.uint32),
            jax.ShapeDtypeStruct((*pairs, *spec.shape), spec.dtype),
            jax.ShapeDtypeStruct(pairs, np.bool_),
            jax.ShapeDtypeStruct((*pairs, len(router.grid_size)), np.int32),
        ]
        if router.heeds_traffic:
            shapes += [jax.ShapeDtypeStruct(pairs, np.bool_), jax.ShapeDtypeStruct(router.grid_size, np.float32)]
        return self._on_host(functools.partial(self._forward, keep), shapes, chosen, inputs)

    def _on_host(self, function: Callable[..., Awaitable[Any]], shapes: Any, *args: Any) -> Any:
        """The function's result in the portal's thread. `vmap` is refused: it would call the experts once for each
        element, one after the other."""
        like = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), args)

        def in_callback(*pieces: Any) -> Any:
            if not _free_slots.acquire(blocking=False):  # to wait for one would hold another of XLA's threads
                raise RuntimeError(
                    f"{self._name}: {MAX_WAITING_CALLS} calls of remote layers are waiting in this process already, "
                    "and one more could stop XLA for good; run fewer training loops at once, or asynchronous ones "
                    "(dmoe_jax.autodiff)"
                )
            try:
                return self._portal.run(function, *_joined(like, pieces))
            finally:
                _free_slots.release()

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


class LinenMixture(nn.Module):
    """A layer of remote experts for Linen. Made by `BlockingMixture.linen`.

    A router that draws takes its noise from the rng stream "router"; without one nothing is random. The router's
    auxiliary loss is sown into the collection "losses":

        y, sown = model.apply({"params": params}, x, mutable=["losses"])
        loss = ... + sum(jax.tree.leaves(sown["losses"]))
    """

    call: HostCall

    @nn.compact
    def __call__(self, *inputs: Array, features: Features | None = None, ids: Ids | None = None) -> Array:
        """Mix the experts' outputs for a batch of samples; no expert is called while the model is initialised.

        Args:
          inputs: the experts' inputs, [batch, ...].
          features: for the router; None: the first input.
          ids: of each sample, for routers that hash.
        """
        features = inputs[0] if features is None else features
        gate = self.param("gate", self.call.mixture.router.init, features.shape[-1])
        anchor = self.param("anchor", nn.initializers.zeros, ())
        if self.is_initializing():
            return self.call.without_network(*inputs)
        key = self.make_rng("router") if self.has_rng("router") else None
        mixed, penalty = self.call(gate, anchor, features, *inputs, key=key, ids=ids)
        self.sow("losses", "aux_loss", penalty)
        return mixed


class AuxiliaryLoss(nnx.Variable[jax.Array]):
    """The router's auxiliary loss in a layer's last call, a scalar."""


class NnxMixture(nnx.Module):
    """A layer of remote experts for NNX. Made by `BlockingMixture.nnx`.

    A router that draws takes its noise from `rngs.router`, if the layer was made with that stream and is in training,
    as `nnx.Dropout` does. The router's auxiliary loss of the last call is `layer.aux_loss`, for a loss function to add:

        loss = ... + model.experts.aux_loss[...]
        loss = ... + sum(jax.tree.leaves(nnx.state(model, AuxiliaryLoss)))      # of all layers

    Args:
      call: the mixture.
      features: width of the router's input.
      rngs: for the router's parameters, and for its noise.
    """

    def __init__(self, call: HostCall, features: int, *, rngs: nnx.Rngs) -> None:
        self.call = call
        self.gate = nnx.data(jax.tree.map(nnx.Param, call.mixture.router.init(rngs.params(), features)))
        self.anchor = nnx.Param(jnp.zeros(()))
        self.aux_loss = AuxiliaryLoss(jnp.zeros(()))
        self.rngs = rngs.fork() if "router" in rngs else None
        self.deterministic = False
        """True if the router draws nothing; set by `eval()` and `train()` of the module and of those that hold it."""

    def __call__(self, *inputs: Array, features: Features | None = None, ids: Ids | None = None) -> Array:
        """Mix the experts' outputs for a batch of samples; arguments as of `LinenMixture`."""
        gate = jax.tree.map(lambda leaf: leaf[...], self.gate, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        key = None if self.rngs is None or self.deterministic else self.rngs.router()
        features = inputs[0] if features is None else features
        mixed, penalty = self.call(gate, self.anchor[...], features, *inputs, key=key, ids=ids)
        self.aux_loss[...] = penalty
        return mixed


class BlockingMixture:
    """A remote mixture for programs without trio. Made by `BlockingSwarm.mixture`; the portal leads into the thread of
    its swarm."""

    def __init__(self, mixture: RemoteMixture, portal: Portal) -> None:
        self.remote = mixture
        """The mixture, whose functions must be awaited in the portal's thread."""
        self.call = HostCall(mixture, portal)
        """The layer as a plain function of arrays, for models without Flax."""
        self._portal = portal

    def check(self, *, timeout_s: float = 60.0, say: Callable[[str], None] = lambda _: None) -> int:
        """Wait until the layer has an expert that answers; see `RemoteMixture.check`."""
        return self._portal.run(functools.partial(self.remote.check, timeout_s=timeout_s, say=say))

    def linen(self, *, name: str | None = None) -> LinenMixture:
        """The mixture as a layer for a Linen module: `y = mixture.linen()(x)` in a compact `__call__`."""
        return LinenMixture(self.call, name=name)

    def nnx(self, *, rngs: nnx.Rngs, features: int | None = None) -> NnxMixture:
        """The mixture as a layer for an NNX module: `self.experts = mixture.nnx(rngs=rngs)` in its `__init__`.

        Args:
          rngs: for the router's parameters, and for its noise.
          features: width of the router's input; None: that of the experts' first input.
        Raises:
          ValueError: without `features`, where the first input is no vector.
        """
        first = self.remote.expert.inputs[0]
        if features is None and len(first.shape) != 1:
            raise ValueError(
                f"the router's width must be given as features: input {first.name} has shape {first.shape}"
            )
        return NnxMixture(self.call, first.shape[0] if features is None else features, rngs=rngs)
