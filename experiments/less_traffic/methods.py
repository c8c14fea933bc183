"""The methods: each an optimiser for all peers at once, and the bytes that leave a peer."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from dmoe_jax.arrays import PyTree
from dmoe_jax.optim import ErrorFeedback, moshpit_average, noloco, streaming_diloco
from dmoe_net.wire.sparse import SparseCoding, all_gather_nbytes, all_reduce_nbytes, sparse_nbytes
from experiments.less_traffic.settings import EVERY, MethodName
from experiments.moshpit_averaging.methods import random_groups_round

AXIS = "peers"
FLOAT32 = 4

OUTER_MOMENTUM = 0.5
"""Momentum of (Streaming) DiLoCo. The papers' 0.9 is for many more than the 40 outer steps here; see the README."""
FRAGMENTS, OVERLAP, MIXING = 5, 5, 0.5
"""Streaming DiLoCo's parts of the model, steps that an average takes to arrive, and alpha."""
SHARE = 0.005
"""Share of the parameters that SPARTA averages after a step: the largest of the paper's."""
CODINGS: dict[MethodName, ErrorFeedback] = {
    # Without decay: what Adam does not get now it gets later.
    "sparse_gradients": ErrorFeedback(coding=SparseCoding(kept=64), decay=1.0),
    "sparse_diloco": ErrorFeedback(coding=SparseCoding(kept=64), decay=0.95),
    "sparser_diloco": ErrorFeedback(coding=SparseCoding(kept=24), decay=0.95),
}
"""Compression of what each of these methods sends; the second is SparseLoCo's setting."""
SPARSE_EVERY = 5
"""Steps between two averagings of compressed pseudo-gradients. With 50 a run of 1,000 steps would have 20, and each
parameter a chance of one in three to be sent at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to train.

    Attributes:
      optimizer: of one peer, under `vmap` with the axis `AXIS`.
      every: steps between two averagings.
      payload_nbytes: bytes of what a peer offers in one averaging.
      sent_nbytes: bytes that leave a peer in one averaging.
      last_nbytes: the same two of the averaging of the parameters that is due in the end where peers differ then.
    """

    optimizer: optax.GradientTransformation
    every: int
    payload_nbytes: float
    sent_nbytes: float
    last_nbytes: tuple[int, int] = (0, 0)


def make_method(
    name: MethodName, inner: optax.GradientTransformation, *, sizes: tuple[int, ...], peers: int, every: int = EVERY
) -> Method:
    """The method.

    Args:
      inner: of each peer.
      sizes: numbers in each of the model's arrays.
      peers: how many there are.
      every: steps between two outer steps.
    """
    size = sum(sizes)
    vector = (size * FLOAT32, all_reduce_nbytes(size, peers))
    whole: dict[str, Any] = {"payload_nbytes": vector[0], "sent_nbytes": vector[1]}
    outer = optax.sgd(1.0, momentum=OUTER_MOMENTUM, nesterov=True)
    diloco: dict[str, Any] = {"what": "pseudo_gradients", "average": _mean}
    match name:
        case "every_step":
            return Method(optimizer=moshpit_average(inner, what="gradients", average=_mean), every=1, **whole)
        case "diloco":
            return Method(optimizer=moshpit_average(inner, every=every, outer=outer, **diloco), every=every, **whole)
        case "streaming_diloco":
            optimizer = streaming_diloco(
                inner, average=_mean, every=every, fragments=FRAGMENTS, overlap=OVERLAP, mixing=MIXING, outer=outer
            )
            return Method(optimizer=optimizer, every=every, last_nbytes=vector, **whole)
        case "noloco":
            optimizer = noloco(inner, average=_mean_of_pair, every=every)
            both = 2 * vector[0]  # the way and the slow parameters, to one other peer
            return Method(optimizer=optimizer, every=every, payload_nbytes=both, sent_nbytes=both, last_nbytes=vector)
        case "sparta":
            few = {kind: SHARE * nbytes for kind, nbytes in whole.items()}
            return Method(optimizer=sparta(inner, share=SHARE), every=1, last_nbytes=vector, **few)
    feedback = CODINGS[name]
    sparse: dict[str, Any] = {
        "payload_nbytes": sparse_nbytes(feedback.coding, sizes),
        "sent_nbytes": all_gather_nbytes(feedback.coding, sizes, peers),
    }
    if name == "sparse_gradients":
        optimizer = moshpit_average(inner, what="gradients", average=_mean, compress=feedback)
        return Method(optimizer=optimizer, every=1, **sparse)
    every = min(every, SPARSE_EVERY)
    optimizer = moshpit_average(inner, every=every, outer=optax.sgd(1.0), compress=feedback, **diloco)
    return Method(optimizer=optimizer, every=every, **sparse)


def sparta(inner: optax.GradientTransformation, *, share: float, seed: int = 0) -> optax.GradientTransformation:
    """An optimiser that averages a random share of the parameters after each of its updates (Beton et al., "Improving
    the Efficiency of Distributed Training using Sparse Parameter Averaging", 2025).

    With m_t drawn from Bernoulli(share) for each parameter, alike at all peers:

        theta <- m_t * mean over peers of theta + (1 - m_t) * theta

    Here all parameters are averaged and the few are taken; a network carries the few. They follow from a seed that all
    share, so no indices travel.
    """

    def init(params: PyTree) -> PyTree:
        return inner.init(params), jnp.zeros((), jnp.int32)

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        inner_state, step = state
        updates, inner_state = inner.update(updates, inner_state, params)
        moved = optax.apply_updates(params, updates)
        mixed = jax.tree.map(jnp.where, sparta_masks(params, step, share=share, seed=seed), _mean(moved, step), moved)
        return jax.tree.map(jnp.subtract, mixed, params), (inner_state, step + 1)

    return optax.GradientTransformation(init, update)


def sparta_masks(params: PyTree, step: ArrayLike, *, share: float, seed: int) -> PyTree:
    """Return a mask of the parameters that are averaged after this step (from 0): a tree of bool of their shapes."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), step), len(leaves))
    masks = [jax.random.bernoulli(key, share, jnp.shape(leaf)) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, masks)


def _mean(tree: PyTree, round_number: ArrayLike) -> PyTree:
    del round_number
    return jax.lax.pmean(tree, AXIS)


def _mean_of_pair(tree: PyTree, round_number: ArrayLike) -> PyTree:
    """Gathers everything from everybody, which is what a simulation can afford."""
    gathered, own = jax.lax.all_gather(tree, AXIS), jax.lax.axis_index(AXIS)
    key, all_are_there = jax.random.fold_in(jax.random.key(7), round_number), jnp.ones(jax.lax.axis_size(AXIS), bool)
    mixed = random_groups_round(gathered, all_are_there, key=key, group_size=2)
    return jax.tree.map(lambda leaf: leaf[own], mixed)
