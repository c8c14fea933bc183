"""Soft MoE (Puigcerver, Riquelme, Mustafa, Houlsby 2023): experts serve mixtures of samples, and nothing is chosen.

    logits = norm(X) (scale norm(Phi))         [samples, slots]; section 2.3
    D, C = softmax(logits) over the samples, over the slots
    slots = D^T X,   Y = C f(slots)            slot s is served by expert s // slots_per_expert; section 2.1

All experts work in every step, evenly, and the whole is differentiable. It is no `Router`, since an expert never sees a
sample. But its slots are rows like others, each bound for one expert, and `slot_router` says so to any mixture: the
same few lines run on one machine, emulated, and over a network, where an expert that does not answer adds nothing.

A sample's output depends on all samples that are mixed with it. The paper mixes the patches of one image; the MLP here
(`MLPConfig.slots_per_expert`) mixes the images of a batch. In a language model a slot would mix the words of the future
into those before them, so that it is refused there (`make_router("soft_moe")` says why).

Our experts carry their own residual connection, whose input is the slot and not the sample. So a sample gets back what
the experts *add* to their slots, Y = X + C (f(slots) - slots), which is the paper's block, X + C g(slots), for experts
f(s) = s + g(s). For experts whose output is unlike their input it is the formula above.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from dmoe_jax.arrays import PyTree, wide
from dmoe_jax.checks import check_positive
from dmoe_jax.experts.base import Expert
from dmoe_jax.machine.remembered import remembered
from dmoe_jax.routing.base import Features, Ids, Router, Scores, router_factory, score, top_k_router
from dmoe_jax.routing.weights import uniform_weights


class Slots(NamedTuple):
    """The rows that go to the experts, and the weights by which their outputs come back.

    Attributes:
      scores: of `slot_router`, for the rows of `inputs`; a mixture's first argument.
      inputs: [num_slots, d_model], mixtures of the samples.
      combine: [samples, num_slots], each row sums to 1.
    """

    scores: Scores
    inputs: Float[Array, "num_slots d_model"]
    combine: Float[Array, "samples num_slots"]


class SoftSegments(NamedTuple):
    """The layer but for its experts: pure, stable functions."""

    dispatch: Callable[[PyTree, Array], Slots]
    """(params of `init_soft_gate`, x [samples, d_model]) -> `Slots`."""
    spread: Callable[[Array, Slots, Array], Array]
    """(x, slots, outputs [num_slots, ...]) -> [samples, ...]."""


@router_factory
def slot_router(grid_size: tuple[int, ...], *, slots_per_expert: int = 1) -> Router:
    """Sends row s to expert s // slots_per_expert, by flat index, and rows beyond the last expert nowhere."""
    check_positive(slots_per_expert=slots_per_expert)
    num_experts = math.prod(grid_size)

    def scores(params: PyTree, x: Features, *, key: PRNGKeyArray | None = None, ids: Ids | None = None) -> Scores:
        del params, key, ids
        own = jnp.arange(x.shape[0]) // slots_per_expert
        return Scores((jnp.where(jax.nn.one_hot(own, num_experts, dtype=bool), 0.0, -jnp.inf),))

    return top_k_router("slots", grid_size, lambda key, d_model: {}, scores, flat=True, combine=uniform_weights)


def init_soft_gate(key: PRNGKeyArray, d_model: int, num_slots: int) -> PyTree:
    """Parameters of the dispatch and combine weights: {"slots": Phi [d_model, num_slots], "scale": scalar}."""
    return {"slots": jax.nn.initializers.lecun_normal()(key, (d_model, num_slots)), "scale": jnp.ones(())}


def soft_weights(params: PyTree, x: Float[Array, "samples d_model"]) -> tuple[Array, Array]:
    """Dispatch and combine weights, both [samples, num_slots]; columns of the first and rows of the second sum to 1."""
    keys = params["scale"] * _unit(params["slots"], axis=0)
    logits = _unit(x, axis=1) @ keys
    return jax.nn.softmax(logits, axis=0), jax.nn.softmax(logits, axis=1)


@remembered(16)
def soft_segments(expert: Expert, router: Router) -> SoftSegments:
    """The functions of a layer with these experts, and a `slot_router` for as many slots as the gate's parameters have;
    equal arguments return the same objects."""

    def dispatch(params: PyTree, x: Float[Array, "samples d_model"]) -> Slots:
        to_slots, combine = soft_weights(params, x)
        inputs = (to_slots.T @ x).astype(x.dtype)
        return Slots(score(router, {}, inputs), inputs, combine)

    def spread(x: Float[Array, "samples d_model"], slots: Slots, outputs: Array) -> Array:
        if not expert.is_residual:
            return jnp.tensordot(slots.combine, outputs, axes=1).astype(outputs.dtype)
        return x + (slots.combine @ (outputs - slots.inputs)).astype(x.dtype)

    return SoftSegments(dispatch, spread)


def _unit(x: Array, axis: int) -> Array:
    """Vectors of length 1 along the axis, in float32 at least; zeros stay zeros, and have a finite gradient."""
    x = wide(x)
    return x * jax.lax.rsqrt(jnp.sum(x**2, axis=axis, keepdims=True) + 1e-12)
