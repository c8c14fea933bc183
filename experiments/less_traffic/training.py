"""Eight peers' training on one device, in stretches of steps; between them what peers exchange is real bytes."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from dmoe_jax.arrays import PyTree
from dmoe_jax.optim import Sent, apply_average, sparse_vector, what_to_send, with_average
from dmoe_jax.optim.tree_vectors import TreeLayout
from dmoe_net.wire.sparse import all_reduce_nbytes, encode_sparse, mean_of_sparse, parse_sparse_untrusted
from experiments.less_traffic.methods import AXIS, FLOAT32, Method
from experiments.moshpit_sgd.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Losses and traffic of a training that has ended.

    Attributes:
      losses: validation loss in nats of the mean of all peers' parameters, at some steps and at the end.
      steps: these steps.
      own_loss: the mean over peers of the loss of each one's own parameters, at the end.
      rounds: averagings.
      payload_nbytes: bytes of what a peer offered, all averagings together.
      sent_nbytes: bytes that left a peer.
    """

    losses: tuple[float, ...]
    steps: tuple[int, ...]
    own_loss: float
    rounds: int
    payload_nbytes: float
    sent_nbytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One training of several that are computed together.

    Attributes:
      seed: of parameters and batches.
      inner_rate: step size of each peer's optimiser.
      outer_rate: of the outer step, if the method has one.
    """

    seed: int
    inner_rate: float
    outer_rate: float


MakeMethod = Callable[[ArrayLike, ArrayLike], Method]
"""(inner rate, outer rate) -> the method; rates may be traced."""


def all_batches(task: Task, *, peers: int, steps: int, seed: int) -> PyTree:
    """Return the batches that the peers see, [steps, peers, ...]: the same for all methods."""
    streams = [task.batches(peer, peers, seed) for peer in range(peers)]
    rows = [_stack([next(stream) for stream in streams]) for _ in range(steps)]
    return _stack(rows)


def train(task: Task, make: MakeMethod, lanes: Sequence[Lane], *, batches: PyTree, peers: int) -> list[Outcome]:
    """Train all peers of all lanes on all their batches; evaluate after each tenth of the steps or so.

    The peers of a lane begin with the same parameters.

    Args:
      batches: [lanes, steps, peers, ...]; steps a multiple of the method's `every`.
    """
    method = make(1e-3, 1.0)
    every = method.every
    rates = jnp.array([(lane.inner_rate, lane.outer_rate) for lane in lanes])
    starts = [task.init(jax.random.key(lane.seed)) for lane in lanes]
    rows: PyTree = _stack([_stack([(params, method.optimizer.init(params), task.carry)] * peers) for params in starts])
    layout = TreeLayout(starts[0])
    stretch = jax.jit(jax.vmap(partial(_stretch, task, make)), donate_argnums=1)
    receive = jax.jit(jax.vmap(partial(_receive, make)))
    offer = jax.jit(jax.vmap(jax.vmap(what_to_send)))
    evaluate = jax.jit(jax.vmap(task.evaluate))
    num_steps = jax.tree.leaves(batches)[0].shape[1]
    steps, losses = list[int](), list[np.ndarray]()
    for end in range(every, num_steps + 1, every):
        now = slice(end - every, end)
        rows = stretch(rates, rows, jax.tree.map(lambda leaf, now=now: leaf[:, now], batches))
        if method.exchanges:
            held, state, carry = rows
            sent = offer(state, held)
            means = jax.tree.map(lambda leaf: leaf.mean(axis=1), sent.tree)
            if end == num_steps and method.feedback is not None:
                check_payloads(_at(sent, 0), _at(means, 0), method, layout)
            rows = (*receive(rates, held, state, sent, means), carry)
        if end * 10 // num_steps != (end - every) * 10 // num_steps:
            steps.append(end)
            losses.append(np.asarray(evaluate(jax.tree.map(lambda leaf: leaf.mean(axis=1), rows[0]))))
    own = np.stack([evaluate(jax.tree.map(lambda leaf, peer=peer: leaf[:, peer], rows[0])) for peer in range(peers)])
    count = method.rounds(num_steps)
    payload, leaving = count * method.payload_nbytes, count * method.sent_nbytes
    if method.ends_apart:
        payload, leaving = payload + layout.size * FLOAT32, leaving + all_reduce_nbytes(layout.size, peers)
    return [
        Outcome(
            losses=tuple(float(loss[lane]) for loss in losses),
            steps=tuple(steps),
            own_loss=float(own[:, lane].mean()),
            rounds=count,
            payload_nbytes=payload,
            sent_nbytes=leaving,
        )
        for lane in range(len(lanes))
    ]


def check_payloads(sent: Sent, mean: PyTree, method: Method, layout: TreeLayout) -> None:
    """Pack what each peer of a lane sent, read it as the others would, and compare the mean with that on the device.

    Args:
      sent: leaves [peers, ...].
      mean: of what the peers sent.
      layout: of one peer's parameters.

    Raises:
      RuntimeError: the bytes are not as many as are counted, or say something else.
    """
    assert method.feedback is not None
    coding, on_host, like = method.feedback.coding, jax.tree.map(np.asarray, sent.parts), _at(sent.tree, 0)
    sizes, peers = tuple(leaf.size for leaf in jax.tree.leaves(like)), len(sent.steps)
    payloads = [encode_sparse(sparse_vector(_at(on_host, peer), like, coding)) for peer in range(peers)]
    if any(payload.nbytes != method.payload_nbytes for payload in payloads):
        raise RuntimeError(f"expected payloads of {method.payload_nbytes} bytes, got {payloads[0].nbytes}")
    arrived = mean_of_sparse([parse_sparse_untrusted(payload, coding, sizes) for payload in payloads], [1.0] * peers)
    # The device adds in float32, in an order of its own.
    if not np.allclose(arrived, layout.to_vector(mean), rtol=1e-4, atol=1e-6 * np.abs(arrived).max()):
        raise RuntimeError("the payloads' mean is not the mean of what was sent")


def _stretch(task: Task, make: MakeMethod, rates: jax.Array, rows: PyTree, batches: PyTree) -> PyTree:
    """(parameters, optimiser state, carry) of all peers of a lane after a stretch of steps."""
    optimizer = make(rates[0], rates[1]).optimizer

    def one(row: tuple[PyTree, PyTree, PyTree], batch: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        params, state, carry = row
        grads, carry = jax.grad(task.loss, has_aux=True)(params, batch, carry)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, carry

    step = jax.vmap(one, axis_name=AXIS)
    rows, _ = jax.lax.scan(lambda rows, batch: (step(rows, batch), None), rows, batches)
    return rows


def _receive(
    make: MakeMethod, rates: jax.Array, params: PyTree, state: PyTree, sent: Sent, averaged: PyTree
) -> tuple[PyTree, PyTree]:
    """The peers' parameters and states of a lane once the average, the same for all, is there."""
    optimizer = make(rates[0], rates[1]).optimizer

    def one(params: PyTree, state: PyTree, sent: Sent) -> tuple[PyTree, PyTree]:
        return apply_average(optimizer, with_average(state, sent, averaged), params)

    return jax.vmap(one)(params, state, sent)


def _at(tree: PyTree, place: int) -> PyTree:
    return jax.tree.map(operator.itemgetter(place), tree)


def _stack(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
