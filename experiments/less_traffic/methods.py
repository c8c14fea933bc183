"""The methods: each an optimiser for all peers at once, and the bytes that leave a peer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.typing import ArrayLike

from dmoe_jax.arrays import PyTree
from dmoe_jax.optim import ErrorFeedback, moshpit_average, noloco, streaming_diloco
from dmoe_net.wire.sparse import SparseCoding, all_gather_nbytes, all_reduce_nbytes, sparse_nbytes
from experiments.less_traffic.settings import MethodName
from experiments.less_traffic.sparta import sparta
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
      feedback: how pseudo-gradients are compressed that peers exchange as real payloads between two stretches of
        steps; None where the optimiser averages by itself.
      exchanges: whether they are exchanged between stretches at all.
      payload_nbytes: bytes of what a peer offers in one averaging.
      sent_nbytes: bytes that leave a peer in one averaging.
      every: steps of a stretch, between exchanges.
      rounds: averagings in so many steps.
      ends_apart: whether peers differ in the end, so that one averaging of the parameters is due.
    """

    optimizer: optax.GradientTransformation
    feedback: ErrorFeedback | None = None
    exchanges: bool = False
    payload_nbytes: float
    sent_nbytes: float
    every: int
    rounds: Callable[[int], int]
    ends_apart: bool = False


def make_method(
    name: MethodName,
    inner: optax.GradientTransformation,
    outer_rate: ArrayLike,
    *,
    sizes: tuple[int, ...],
    peers: int,
    every: int,
) -> Method:
    """The method.

    Args:
      inner: of each peer.
      outer_rate: step size of the outer step; without one it has no meaning.
      sizes: numbers in each of the model's arrays.
      peers: how many there are.
      every: steps between two outer steps.
    """
    size = sum(sizes)
    plain: dict[str, Any] = {
        "every": every,
        "payload_nbytes": size * FLOAT32,
        "sent_nbytes": all_reduce_nbytes(size, peers),
    }
    outer = optax.sgd(outer_rate, momentum=OUTER_MOMENTUM, nesterov=True)
    if name == "every_step":
        optimizer = moshpit_average(inner, what="gradients", average=_mean)
        return Method(optimizer=optimizer, rounds=lambda steps: steps, **plain)
    if name == "diloco":
        optimizer = moshpit_average(inner, every=every, what="pseudo_gradients", outer=outer)
        return Method(optimizer=optimizer, exchanges=True, rounds=lambda steps: steps // every, **plain)
    if name == "streaming_diloco":
        optimizer = streaming_diloco(
            inner, average=_mean, every=every, fragments=FRAGMENTS, overlap=OVERLAP, mixing=MIXING, outer=outer
        )
        return Method(optimizer=optimizer, rounds=lambda steps: steps // every, ends_apart=True, **plain)
    if name == "noloco":
        optimizer = noloco(inner, average=_mean_of_pair, every=every, rate=outer_rate)
        both = 2 * size * FLOAT32  # the way and the slow parameters, to one other peer
        return Method(
            optimizer=optimizer,
            rounds=lambda steps: steps // every,
            ends_apart=True,
            every=every,
            payload_nbytes=both,
            sent_nbytes=both,
        )
    if name == "sparta":
        optimizer = sparta(inner, average=_mean, share=SHARE)
        return Method(
            optimizer=optimizer,
            rounds=lambda steps: steps,
            ends_apart=True,
            every=every,
            payload_nbytes=SHARE * size * FLOAT32,
            sent_nbytes=SHARE * all_reduce_nbytes(size, peers),
        )
    return _sparse_method(name, inner, outer_rate, sizes=sizes, peers=peers, every=every)


def _sparse_method(
    name: MethodName,
    inner: optax.GradientTransformation,
    outer_rate: ArrayLike,
    *,
    sizes: tuple[int, ...],
    peers: int,
    every: int,
) -> Method:
    """One of those that compress, with arguments as above."""
    feedback = CODINGS[name]
    if name != "sparse_gradients":
        every = min(every, SPARSE_EVERY)
    sparse: dict[str, Any] = {
        "every": every,
        "payload_nbytes": sparse_nbytes(feedback.coding, sizes),
        "sent_nbytes": all_gather_nbytes(feedback.coding, sizes, peers),
    }
    if name == "sparse_gradients":
        optimizer = moshpit_average(inner, what="gradients", average=_mean, compress=feedback)
        return Method(optimizer=optimizer, rounds=lambda steps: steps, **sparse)
    optimizer = moshpit_average(
        inner, every=every, what="pseudo_gradients", outer=optax.sgd(outer_rate), compress=feedback
    )
    return Method(optimizer=optimizer, feedback=feedback, exchanges=True, rounds=lambda steps: steps // every, **sparse)


def _mean(tree: PyTree, round_number: ArrayLike) -> PyTree:
    del round_number
    return jax.lax.pmean(tree, AXIS)


def _mean_of_pair(tree: PyTree, round_number: ArrayLike) -> PyTree:
    """Gathers everything from everybody, which is what a simulation can afford."""
    gathered, own = jax.lax.all_gather(tree, AXIS), jax.lax.axis_index(AXIS)
    key = jax.random.fold_in(jax.random.key(7), round_number)
    return jax.tree.map(lambda leaf: leaf[own], random_groups_round(gathered, key=key, group_size=2))
