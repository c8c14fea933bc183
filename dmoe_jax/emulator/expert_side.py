"""Work of an emulated swarm's experts: one call, forward or backward."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from dmoe_jax.arrays import PyTree, against, gradients_like, in_type_of
from dmoe_jax.emulator.events import Events
from dmoe_jax.emulator.state import Calls, Experts, at, is_finite, put
from dmoe_jax.experts.base import Expert
from dmoe_jax.node.programs import check_optimizer

LayerState = tuple[Experts, Calls]
"""The experts of a layer, and all trainers' calls to them."""


class ExpertSide:
    """The experts of a layer; without an optimiser they never change.

    Raises:
      ValueError: the expert takes keys from its node, or the optimiser needs more than gradients.
    """

    def __init__(self, expert: Expert, optimizer: optax.GradientTransformation | None) -> None:
        if expert.takes_key:
            raise ValueError(f"expert {expert.name!r} takes keys from its node, which the emulator has not")
        if optimizer is not None:
            check_optimizer(expert, optimizer)
        self._expert = expert
        self._optimizer = None if optimizer is None else optax.with_extra_args_support(optimizer)
        self._differentiable = [i for i, spec in enumerate(expert.inputs) if spec.differentiable]

    def forward(self, layer: LayerState, event: Events, *, rows: int) -> LayerState:
        """An expert computes one forward call, of at most so many rows, with the parameters that it has now."""
        experts, calls = layer
        own: Calls = at(calls, event.trainer)
        pairs, chosen = pairs_of(own, event, forward=True)
        taken = _first_rows(pairs, rows)
        computed = self._expert.apply(at(experts.params, chosen), *_rows_of(own.inputs, taken))
        if taken is not None:
            computed = jnp.zeros((len(pairs), *computed.shape[1:]), computed.dtype).at[taken].set(computed)
        answers = pairs & event.answered
        outputs = jnp.where(against(answers, own.outputs), computed[:, None], own.outputs)
        seen = jnp.where(pairs, experts.updates[chosen], own.seen)
        return experts, calls._replace(
            outputs=put(calls.outputs, event.trainer, outputs),
            answered=put(calls.answered, event.trainer, own.answered | answers),
            seen=put(calls.seen, event.trainer, seen),
        )

    def backward(self, layer: LayerState, event: Events, *, rows: int, trusts: bool) -> LayerState:
        """An expert computes one backward call with the parameters that it has now, and is updated.

        Args:
          trusts: the expert is updated with what is not finite, too; only the gradients of inputs are looked at, see
            `dmoe_jax.emulator.emulator`. Calls that nobody has made are not given.
        """
        experts, calls = layer
        own: Calls = at(calls, event.trainer)
        pairs, chosen = pairs_of(own, event, forward=False)
        taken = _first_rows(pairs, rows)
        output_grads = jnp.sum(jnp.where(against(pairs, own.output_grads), own.output_grads, 0), axis=1)
        params = at(experts.params, chosen)
        param_grads, input_grads = self._grads(params, *_rows_of((own.inputs, output_grads), taken))
        updates = experts.updates[chosen]
        staleness = updates - jnp.max(jnp.where(pairs, own.seen, 0))
        does = pairs.any() & event.computed
        is_sound = is_finite(jax.tree.map(jnp.zeros_like, input_grads), input_grads)
        learns = jnp.bool_(True) if trusts else does & is_sound
        if self._optimizer is not None:
            old = params, at(experts.opt_state, chosen)
            steps, opt_state = self._optimizer.update(
                param_grads, old[1], params, staleness=jnp.asarray(staleness, jnp.float32)
            )
            new = jax.tree.map(in_type_of, (optax.apply_updates(params, steps), opt_state), old)
            if not trusts:
                # Every write waits for this look at all that is new, and so for all reads. Where an array might be
                # written while it is still to be read for another one, XLA copies all experts.
                learns &= is_finite(old, new)
                new = jax.tree.map(lambda after, before: jnp.where(learns, after, before), new, old)
            experts = experts._replace(
                params=put(experts.params, chosen, new[0]),
                opt_state=put(experts.opt_state, chosen, new[1]),
                updates=put(experts.updates, chosen, updates + learns),
            )
        samples = pairs.any(axis=1) & event.answered & learns
        summed = tuple(
            _added(total, grad, _rows_of(samples, taken), taken)
            for total, grad in zip(own.input_grads, input_grads, strict=True)
        )
        experts = experts._replace(
            load=experts.load.at[chosen].add(jnp.where(learns, pairs.sum(dtype=jnp.int32), 0)),
            staleness=experts.staleness + jnp.where(learns, staleness, 0),
            calls=experts.calls + learns,
            rejected=experts.rejected + ((does & ~learns) if not trusts else ~is_sound),
        )
        return experts, calls._replace(input_grads=put(calls.input_grads, event.trainer, summed))

    def _grads(self, params: PyTree, inputs: tuple[Any, ...], output_grads: Any) -> tuple[PyTree, list[Any]]:
        """Gradients of an expert's parameters and of its differentiable inputs, in order."""

        def output(params: PyTree, chosen: list[Any]) -> Any:
            merged = list(inputs)
            for place, value in zip(self._differentiable, chosen, strict=True):
                merged[place] = value
            return self._expert.apply(params, *merged)

        _, pull_back = jax.vjp(output, params, [inputs[i] for i in self._differentiable])
        param_grads, input_grads = pull_back(output_grads)
        return gradients_like(param_grads, params), input_grads


def pairs_of(calls: Calls, event: Events, *, forward: bool) -> tuple[Any, Any]:
    """(the pairs that a call serves, bool [batch, slots], none if it is another call's; the expert).

    Args:
      calls: of the event's trainer. event: of the calls' layer.
    """
    expert = jnp.where(event.expert < 0, calls.chosen.reshape(-1)[event.pair], event.expert)
    pairs = (calls.chosen == expert) & (calls.wanted if forward else calls.answered)
    flat = pairs.reshape(-1)
    is_first = (event.expert >= 0) | (flat[event.pair] & (jnp.argmax(flat) == event.pair))
    return pairs & is_first & event.computed, expert


def _first_rows(pairs: Any, rows: int) -> Any:
    """The numbers of `rows` samples, those that a call serves first; None for all samples."""
    return None if rows == len(pairs) else jnp.argsort(~pairs.any(axis=1), stable=True)[:rows]


def _rows_of(tree: PyTree, taken: Any) -> Any:
    return tree if taken is None else jax.tree.map(lambda leaf: leaf[taken], tree)


def _added(total: Any, grad: Any, counts: Any, taken: Any) -> Any:
    """A sum over the calls of a batch and one more of them, in the rows that count."""
    grad = jnp.where(against(counts, grad), grad, 0)
    return total + grad if taken is None else total.at[taken].add(grad)
