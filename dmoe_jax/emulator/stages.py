"""A model cut at its remote mixtures, into pure functions.

A step of a trainer is a chain: the model computes up to its first mixture, experts elsewhere answer, the model goes on
to the next one, and so on to the loss; then back the same way. `ModelStages` makes each link a pure function: the
model's own `forward`, traced with the mixtures before the cut replaced by their values; the rest is dead code.

    reach(layer, …)    the arguments of a layer's mixture: the router's scores and the experts' inputs
    mix(…)             its result for these answers of its experts
    finish(…)          the loss, from the results of all mixtures
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from dmoe_jax.arrays import PyTree
from dmoe_jax.autodiff import Recording, Value, concrete
from dmoe_jax.experts.base import Expert
from dmoe_jax.mixture.remote import mix_segment
from dmoe_jax.model import AnyModel, Outcome
from dmoe_jax.models.layers import LayerAux, dmoe_layer
from dmoe_jax.routing.base import Router, Scores, Traffic

ModelMaker = Callable[..., AnyModel]
"""(`MixtureMaker`) -> model: such as `lambda swarm: MLP.on(swarm, config, router)`."""


class Layer(NamedTuple):
    """One mixture of the model: the name of its grid of experts, their network, the router, and `k_best`."""

    prefix: str
    expert: Expert
    router: Router
    k_best: int


class LayerInput(NamedTuple):
    """The arguments of a mixture: the router's scores of each sample, and the experts' inputs, batch first."""

    scores: Scores
    inputs: tuple[Any, ...]


class Mixed(NamedTuple):
    """A mixture's output [batch, ...], and the router's auxiliary loss, a scalar."""

    output: Any
    aux_loss: Any


class Finished(NamedTuple):
    """The end of a step: the loss, what is reported of it, and what the trainer's next step begins with."""

    loss: Any
    reported: Any
    state: PyTree


class _Reached(Exception):
    """The model has come to the cut; the argument is a `LayerInput`."""


class _Eager(Recording):
    """A recording that records nothing and compiles nothing: segments are part of what is being traced."""

    def __init__(self) -> None:
        super().__init__(differentiate=False)

    @property
    def differentiates(self) -> bool:
        return True

    def __call__(self, function: Callable[..., PyTree], *args: PyTree) -> PyTree:
        return jax.tree.map(Value, function(*concrete(args)))


class _GivenMixtures:
    """Stands in for a swarm: makes mixtures that return what they are told, until the cut."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.given: Sequence[Mixed] = ()
        self.experts: Sequence[PyTree] = ()
        self.routed: list[LayerAux] = []

    def mixture(self, prefix: str, expert: Expert, router: Router, *, k_best: int, **_: Any) -> Any:
        """As `Swarm.mixture`."""
        number = len(self.layers)
        self.layers.append(Layer(prefix, expert, router, k_best))

        async def mixture(_: Recording, scores: Scores, *inputs: Any) -> tuple[Value, Value]:
            if number < len(self.given):
                mixed = self.given[number]
                return Value(mixed.output), Value(mixed.aux_loss)
            if self.experts:
                own = self.experts[number]
                there = map(jnp.asarray, concrete(inputs))  # what evaluates a model may be on the host
                output, aux = dmoe_layer(expert, own, router, k_best, concrete(scores), None, *there)
                self.routed.append(aux)
                return Value(output), Value(aux.aux_loss)
            raise _Reached(LayerInput(*concrete((scores, inputs))))

        return mixture


class ModelStages:
    """The pure functions of a model between its mixtures.

    Raises:
      ValueError: the model has no mixture.
    """

    def __init__(self, make_model: ModelMaker) -> None:
        self._mixtures = _GivenMixtures()
        self.model = make_model(self._mixtures)
        self.layers = tuple(self._mixtures.layers)
        if not self.layers:
            raise ValueError(f"model {self.model.name!r} has no mixture, so there is nothing asynchronous about it")

    def reach(
        self, layer: int, params: PyTree, batch: Any, state: PyTree, keys: Any, mixed: Sequence[Mixed]
    ) -> LayerInput:
        """The arguments of a layer's mixture, from what the `layer` mixtures before it returned.

        Raises:
          ValueError: the model comes to its end before.
        """
        try:
            self._run(params, batch, state, keys, mixed[:layer])
        except _Reached as reached:
            return cast(LayerInput, reached.args[0])
        raise ValueError(f"model {self.model.name!r} made {len(self.layers)} mixtures but does not call all of them")

    def finish(self, params: PyTree, batch: Any, state: PyTree, keys: Any, mixed: Sequence[Mixed]) -> Finished:
        """The end of a step, from what all mixtures returned."""
        outcome = self._run(params, batch, state, keys, mixed)
        return Finished(
            *concrete((outcome.loss, outcome.loss if outcome.reported is None else outcome.reported, outcome.state))
        )

    def routed(
        self, params: PyTree, experts: Sequence[PyTree], batch: Any, state: PyTree
    ) -> tuple[Outcome, list[LayerAux]]:
        """The model on one machine, nothing random, with each layer's experts stacked; and who was asked in each.

        Nothing of the outcome is on a tape.
        """
        self._mixtures.experts, self._mixtures.routed = experts, []
        try:
            return cast(Outcome, concrete(self._run(params, batch, state, None, ()))), self._mixtures.routed
        finally:
            self._mixtures.experts = ()

    def mix(self, layer: int, indices: Any, asked: Any, answered: Any, outputs: Any, layer_input: LayerInput) -> Mixed:
        """The result of a mixture for these answers of its experts; see `dmoe_jax.mixture.remote`."""
        segment = mix_segment(self.layers[layer].router)
        scores, (first, *_) = layer_input
        return Mixed(*segment(scores, indices, answered, outputs, first, Traffic(asked)))

    def _run(self, params: PyTree, batch: Any, state: PyTree, keys: Any, mixed: Sequence[Mixed]) -> Outcome:
        self._mixtures.given = mixed
        forward = self.model.forward(_Eager(), jax.tree.map(Value, params), batch, state, keys)
        try:
            forward.send(None)
        except StopIteration as done:
            return cast(Outcome, done.value)
        finally:
            forward.close()
        raise ValueError(f"model {self.model.name!r} awaits something else than its mixtures, so it cannot be emulated")
