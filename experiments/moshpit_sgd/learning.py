"""Many peers' training on one device: gradients are vmapped over those whose stretches are to be computed."""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from dmoe_jax.arrays import PyTree
from dmoe_jax.optim import Sent, apply_average, moshpit_average, what_to_send, with_average
from experiments.moshpit_sgd.tasks import Task

_SIZES = (4, 16, 64, 256)
"""Peers of a call, beside all: each size is compiled, and shared by swarms of different sizes."""


class Programs:
    """The compiled parts, for all methods and numbers of peers.

    Args:
      task: what is trained.
      local_steps: of a stretch.
      seed: of the parameters, which are the same for all peers at first.

    Attributes:
      vector: [numbers], the parameters that all begin with.
      row: (optimiser state, carry) that all begin with.
    """

    def __init__(self, task: Task, *, local_steps: int, seed: int) -> None:
        self.task = task
        self.local_steps = local_steps
        self._optimizer = moshpit_average(task.optimizer, every=local_steps)
        params = task.init(jax.random.key(seed))
        vector, self._unravel = ravel_pytree(params)
        self.vector = np.asarray(vector)
        self.row = (self._optimizer.init(params), task.carry)
        self.stretch = jax.jit(self._stretch, donate_argnums=0)
        self.receive = jax.jit(self._receive, donate_argnums=0)
        self.evaluate = jax.jit(jax.vmap(lambda vector: task.evaluate(self._unravel(vector))))

    def _stretch(self, rows: PyTree, index: jax.Array, vectors: jax.Array, batches: PyTree) -> tuple[PyTree, jax.Array]:
        """Compute (rows after a stretch of these peers, their parameters after it [some peers, numbers]).

        Args:
          rows: (optimiser state, carry) of all peers, [peers, ...].
          index: [some peers], whose stretches; one may be there twice.
          vectors: [some peers, numbers], their parameters.
          batches: [some peers, steps, ...].
        """

        def of_one(row: PyTree, vector: jax.Array, batches: PyTree) -> tuple[PyTree, jax.Array]:
            def step(carried: PyTree, batch: PyTree) -> tuple[PyTree, None]:
                params, state, carry = carried
                grads, carry = jax.grad(self.task.loss, has_aux=True)(params, batch, carry)
                updates, state = self._optimizer.update(grads, state, params)
                return (optax.apply_updates(params, updates), state, carry), None

            (params, *row), _ = jax.lax.scan(step, (self._unravel(vector), *row), batches)
            return tuple(row), ravel_pytree(params)[0]

        new, vectors = jax.vmap(of_one)(jax.tree.map(lambda leaf: leaf[index], rows), vectors, batches)
        return jax.tree.map(lambda all_, some: all_.at[index].set(some), rows, new), vectors

    def _receive(
        self, rows: PyTree, index: jax.Array, vectors: jax.Array, averaged: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        """Apply averages as the host of one peer would hand them in, for some peers at once."""

        def of_one(row: PyTree, vector: jax.Array, averaged: jax.Array) -> tuple[PyTree, jax.Array]:
            (state, carry), params = row, self._unravel(vector)
            sent: Sent = what_to_send(state, params)
            state = with_average(state, sent, self._unravel(averaged))
            params, state = apply_average(self._optimizer, state, params)
            return (state, carry), ravel_pytree(params)[0]

        new, vectors = jax.vmap(of_one)(jax.tree.map(lambda leaf: leaf[index], rows), vectors, averaged)
        return jax.tree.map(lambda all_, some: all_.at[index].set(some), rows, new), vectors


class PeerLearner:
    """The peers of one simulation. A stretch is noted when it begins and computed, many peers' at once, when somebody
    needs a result.

    Args:
      programs: what they train; shared by simulations.
      num_peers: how many.
      seed: of their batches.
    """

    def __init__(self, programs: Programs, *, num_peers: int, seed: int) -> None:
        self._programs = programs
        self._rows = jax.tree.map(lambda leaf: jnp.stack([leaf] * num_peers), programs.row)
        self._held = np.tile(programs.vector, (num_peers, 1))
        self._after = self._held.copy()
        self._pending: dict[int, None] = {}
        self._batches: list[Iterator[PyTree]] = [
            programs.task.batches(peer, num_peers, seed) for peer in range(num_peers)
        ]
        self._sizes = [*(size for size in _SIZES if size < num_peers), num_peers]

    def begin(self, peer: int) -> None:
        """Note that the peer begins a stretch with the parameters that it holds."""
        self._pending[peer] = None

    def results(self, peers: Sequence[int]) -> np.ndarray:
        """Return the parameters at the end of the stretches that these peers are in, [peers, numbers]."""
        if any(peer in self._pending for peer in peers):
            self._compute()
        return self._after[list(peers)]

    def put(self, peers: Sequence[int], vectors: np.ndarray) -> None:
        """Hand these peers the outcome of averaging, [peers, numbers], with which they begin their next stretch."""
        assert not any(peer in self._pending for peer in peers)
        places = self._padded(peers)
        averaged = np.asarray(vectors, np.float32)[np.minimum(np.arange(len(places)), len(peers) - 1)]
        self._rows, held = self._programs.receive(self._rows, places, self._after[places], averaged)
        self._held[places] = held

    def adopt(self, peer: int, donor: int) -> None:
        """Let a peer that is new hold what the donor holds; its optimiser begins anew."""
        self._held[peer] = self._held[donor]
        self._rows = jax.tree.map(lambda rows, first: rows.at[peer].set(first), self._rows, self._programs.row)

    def losses(self, peers: Sequence[int]) -> np.ndarray:
        """Compute the validation losses of the parameters that these peers hold, [peers]."""
        return np.asarray(self._programs.evaluate(self._held[list(peers)]))

    def _compute(self) -> None:
        """Compute all stretches that were begun."""
        places = self._padded(list(self._pending))
        steps = range(self._programs.local_steps)
        own = {peer: _stack([next(self._batches[peer]) for _ in steps]) for peer in self._pending}
        batches = _stack([own[peer] for peer in places.tolist()])
        self._rows, after = self._programs.stretch(self._rows, places, self._held[places], batches)
        self._after[places] = after
        self._pending.clear()

    def _padded(self, peers: Sequence[int]) -> np.ndarray:
        """Repeat the last peer until there are as many as in one of the sizes."""
        size = next(size for size in self._sizes if size >= len(peers))
        return np.array([*peers, *[peers[-1]] * (size - len(peers))])


def _stack(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
