"""Many peers' training on one device: gradients are vmapped over those whose stretches are to be computed."""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from dmoe_jax.optim import Sent, apply_average, moshpit_average, what_to_send, with_average
from dmoe_jax.types import PyTree
from experiments.moshpit_sgd.tasks import Task

_SIZES = (4, 16, 64, 256)


class Programs:
    """The compiled parts, for all methods and numbers of peers.

    Args:
      task: what is trained.
      local_steps: of a stretch.
      seed: of the parameters, which are the same for all peers at first.
    """

    def __init__(self, task: Task, *, local_steps: int, seed: int) -> None:
        self.task = task
        self.local_steps = local_steps
        self.optimizer = moshpit_average(task.optimizer, every=local_steps)
        params = task.init(jax.random.key(seed))
        vector, self._unravel = ravel_pytree(params)
        self.vector = np.asarray(vector)
        """[numbers], the parameters that all begin with."""
        self.state = self.optimizer.init(params)
        self.stretch = jax.jit(self._stretch, donate_argnums=0)
        self.receive = jax.jit(self._receive, donate_argnums=0)
        self.evaluate = jax.jit(jax.vmap(lambda vector: task.evaluate(self._unravel(vector))))

    def _stretch(self, rows: PyTree, index: jax.Array, vectors: jax.Array, batches: PyTree) -> tuple[PyTree, jax.Array]:
        """(rows after a stretch of these peers, their parameters after it [some peers, numbers]).

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
                updates, state = self.optimizer.update(grads, state, params)
                return (optax.apply_updates(params, updates), state, carry), None

            (params, state, carry), _ = jax.lax.scan(step, (self._unravel(vector), *row), batches)
            return (state, carry), ravel_pytree(params)[0]

        old = jax.tree.map(lambda leaf: leaf[index], rows)
        new, vectors = jax.vmap(of_one)(old, vectors, batches)
        return jax.tree.map(lambda all_, some: all_.at[index].set(some), rows, new), vectors

    def _receive(
        self, rows: PyTree, index: jax.Array, vectors: jax.Array, averaged: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        """Averages as the host of one peer would hand them in, for some peers at once."""

        def of_one(state: PyTree, vector: jax.Array, averaged: jax.Array) -> tuple[PyTree, jax.Array]:
            params = self._unravel(vector)
            sent: Sent = what_to_send(state, params)
            state = with_average(state, sent, self._unravel(averaged))
            params, state = apply_average(self.optimizer, state, params)
            return state, ravel_pytree(params)[0]

        states, carries = rows
        new, vectors = jax.vmap(of_one)(jax.tree.map(lambda leaf: leaf[index], states), vectors, averaged)
        return (jax.tree.map(lambda all_, some: all_.at[index].set(some), states, new), carries), vectors


class PeerLearner:
    """The peers of one simulation.

    Args:
      programs: what they train; shared by simulations.
      num_peers: how many.
      seed: of their batches.
    """

    def __init__(self, programs: Programs, *, num_peers: int, seed: int) -> None:
        self._programs = programs
        self._first_row = (programs.state, programs.task.carry)
        self._rows = jax.tree.map(lambda leaf: jnp.stack([leaf] * num_peers), self._first_row)
        self._held = np.tile(programs.vector, (num_peers, 1))
        self._after = self._held.copy()
        self._pending: dict[int, None] = {}
        self._batches: list[Iterator[PyTree]] = [
            programs.task.batches(peer, num_peers, seed) for peer in range(num_peers)
        ]
        # Few sizes, since each is compiled, and shared by swarms of different sizes; the rest of a call repeats its
        # last peer.
        self._sizes = [*(size for size in _SIZES if size < num_peers), num_peers]

    def begin(self, peer: int) -> None:
        """See `simulation.Learner`, also for the others."""
        self._pending[peer] = None

    def results(self, peers: Sequence[int]) -> np.ndarray:
        if any(peer in self._pending for peer in peers):
            self._compute()
        return self._after[list(peers)]

    def put(self, peers: Sequence[int], vectors: np.ndarray) -> None:
        assert not any(peer in self._pending for peer in peers)
        places = self._padded(peers)
        averaged = np.asarray(vectors, np.float32)[np.minimum(np.arange(len(places)), len(peers) - 1)]
        self._rows, held = self._programs.receive(self._rows, places, self._after[places], averaged)
        self._held[places] = held

    def adopt(self, peer: int, donor: int) -> None:
        self._held[peer] = self._held[donor]
        self._rows = jax.tree.map(lambda rows, first: rows.at[peer].set(first), self._rows, self._first_row)

    def losses(self, peers: Sequence[int]) -> np.ndarray:
        """[peers], validation losses of the parameters that these peers hold."""
        return np.asarray(self._programs.evaluate(self._held[list(peers)]))

    def _compute(self) -> None:
        """All stretches that were begun."""
        peers = list(self._pending)
        places = self._padded(peers)
        own = [
            jax.tree.map(lambda *leaves: np.stack(leaves), *(next(self._batches[peer]) for _ in self._steps))
            for peer in peers
        ]
        own += own[-1:] * (len(places) - len(own))
        batches = jax.tree.map(lambda *leaves: np.stack(leaves), *own)
        self._rows, after = self._programs.stretch(self._rows, places, self._held[places], batches)
        self._after[places] = after
        self._pending.clear()

    @property
    def _steps(self) -> range:
        return range(self._programs.local_steps)

    def _padded(self, peers: Sequence[int]) -> np.ndarray:
        size = next(size for size in self._sizes if size >= len(peers))
        return np.array([*peers, *[peers[-1]] * (size - len(peers))])
