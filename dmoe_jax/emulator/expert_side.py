"""What the experts of an emulated swarm do: one call, forward or backward."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from dmoe_jax.emulator.state import Calls, Events, Experts, SwarmState, at, is_finite, put
from dmoe_jax.experts.base import Expert
from dmoe_jax.node.backend import check_optimizer
from dmoe_jax.types import PyTree


class ExpertSide:
    """All experts.

    Args:
      expert: their network.
      optimizer: of each; None: they never change.

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

    def forward(self, state: SwarmState, event: Events, *, rows: int) -> SwarmState:
        """An expert computes one forward call, of at most so many rows, with the parameters that it has now."""
        calls = state.trainers.calls
        pairs, chosen = pairs_of(calls, event, forward=True)
        place = event.trainer, event.layer
        taken = _first_rows(pairs, rows)
        params = at(state.experts.params, chosen)
        computed = self._expert.apply(params, *(array[place][taken] for array in calls.inputs))
        outputs = jnp.zeros((pairs.shape[0], *computed.shape[1:]), computed.dtype).at[taken].set(computed)
        answers = pairs & event.answered
        cell = (...,) + (None,) * (outputs.ndim - 1)
        calls = calls._replace(
            outputs=calls.outputs.at[place].set(jnp.where(answers[cell], outputs[:, None], calls.outputs[place])),
            answered=calls.answered.at[place].set(calls.answered[place] | answers),
            seen=calls.seen.at[place].set(jnp.where(pairs, state.experts.updates[chosen], calls.seen[place])),
        )
        return state._replace(trainers=state.trainers._replace(calls=calls))

    def backward(self, state: SwarmState, event: Events, *, rows: int) -> SwarmState:
        """An expert computes one backward call with the parameters that it has now, and is updated."""
        calls, experts, totals = state.trainers.calls, state.experts, state.totals
        pairs, chosen = pairs_of(calls, event, forward=False)
        place = event.trainer, event.layer
        taken = _first_rows(pairs, rows)
        cell = (...,) + (None,) * (calls.outputs.ndim - 4)
        output_grads = jnp.sum(jnp.where(pairs[cell], calls.output_grads[place], 0), axis=1)[taken]
        params = at(experts.params, chosen)
        inputs = tuple(array[place][taken] for array in calls.inputs)
        param_grads, input_grads = self._grads(params, inputs, output_grads)
        seen = jnp.max(jnp.where(pairs, calls.seen[place], 0))
        staleness = experts.updates[chosen] - seen
        does = pairs.any() & event.computed
        learns = does & is_finite(jax.tree.map(jnp.zeros_like, input_grads), input_grads)
        if self._optimizer is not None:
            old = params, at(experts.opt_state, chosen)
            updates, opt_state = self._optimizer.update(
                param_grads, old[1], params, staleness=jnp.asarray(staleness, jnp.float32)
            )
            new = jax.tree.map(
                lambda after, before: after.astype(before.dtype), (optax.apply_updates(params, updates), opt_state), old
            )
            # Every write waits for this look at all that is new, and so for all reads. Where an array might be written
            # while it is still to be read for another one, XLA copies all experts.
            learns &= is_finite(old, new)
            new = jax.tree.map(lambda after, before: jnp.where(learns, after, before), new, old)
            experts = Experts(
                params=put(experts.params, chosen, new[0]),
                opt_state=put(experts.opt_state, chosen, new[1]),
                updates=experts.updates.at[chosen].add(learns.astype(jnp.int32)),
            )
        own = pairs.any(axis=1)[taken] & event.answered & learns
        summed = tuple(
            total.at[(*place, taken)].add(jnp.where(own[(...,) + (None,) * (grad.ndim - 1)], grad, 0))
            for total, grad in zip(calls.input_grads, input_grads, strict=True)
        )
        totals = totals._replace(
            calls=totals.calls + learns,
            expert_staleness=totals.expert_staleness + jnp.where(learns, staleness, 0),
            load=totals.load.at[chosen].add(jnp.where(learns, pairs.sum(), 0)),
            rejected=totals.rejected + (does & ~learns),
        )
        trainers = state.trainers._replace(calls=calls._replace(input_grads=summed))
        return state._replace(experts=experts, trainers=trainers, totals=totals)

    def _grads(self, params: PyTree, inputs: tuple[Any, ...], output_grads: Any) -> tuple[PyTree, list[Any]]:
        """Gradients of an expert's parameters and of its differentiable inputs, in order."""

        def output(params: PyTree, chosen: list[Any]) -> Any:
            merged = list(inputs)
            for place, value in zip(self._differentiable, chosen, strict=True):
                merged[place] = value
            return self._expert.apply(params, *merged)

        _, pull_back = jax.vjp(output, params, [inputs[i] for i in self._differentiable])
        return cast(tuple[PyTree, list[Any]], pull_back(output_grads))


def pairs_of(calls: Calls, event: Events, *, forward: bool) -> tuple[Any, Any]:
    """(the pairs that a call serves, bool [batch, slots], none if it is another call's; the expert)."""
    place = event.trainer, event.layer
    chosen = calls.chosen[place]
    expert = jnp.where(event.expert < 0, chosen.reshape(-1)[event.pair], event.expert)
    there = calls.wanted[place] if forward else calls.answered[place]
    pairs = (chosen == expert) & there
    flat = pairs.reshape(-1)
    is_first = (event.expert >= 0) | (flat[event.pair] & (jnp.argmax(flat) == event.pair))
    return pairs & is_first & event.computed, expert


def _first_rows(pairs: Any, rows: int) -> Any:
    """The numbers of `rows` samples, those that a call serves first."""
    if rows == pairs.shape[0]:
        return jnp.arange(rows)
    return jnp.argsort(~pairs.any(axis=1), stable=True)[:rows]
