"""The peers' training, all on one device: every peer has its own parameters, optimiser and batches."""

from collections.abc import Sequence

import jax
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from dmoe_jax.arrays import PyTree
from experiments.moshpit_sgd.tasks import Task


class PeerLearner:
    """The peers of one swarm. They begin with the same parameters.

    Args:
      task: what they train.
      num_peers: how many.
      local_steps: of a stretch.
      seed: of parameters and batches.
    """

    def __init__(self, task: Task, *, num_peers: int, local_steps: int, seed: int) -> None:
        params = task.init(jax.random.key(seed))
        vector, unravel = ravel_pytree(params)
        self._local_steps = local_steps
        self._first_row = (task.optimizer.init(params), task.carry)
        self._rows = [self._first_row] * num_peers
        self._held = np.tile(vector, (num_peers, 1))
        self._after = list(self._held)
        self._batches = [task.batches(peer, num_peers, seed) for peer in range(num_peers)]

        def step(carried: PyTree, batch: PyTree) -> tuple[PyTree, None]:
            params, state, carry = carried
            grads, carry = jax.grad(task.loss, has_aux=True)(params, batch, carry)
            updates, state = task.optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state, carry), None

        def stretch(row: PyTree, vector: jax.Array, batches: PyTree) -> tuple[PyTree, jax.Array]:
            (params, *row), _ = jax.lax.scan(step, (unravel(vector), *row), batches)
            return tuple(row), ravel_pytree(params)[0]

        self._stretch = jax.jit(stretch)
        self._evaluate = jax.jit(jax.vmap(lambda vector: task.evaluate(unravel(vector))))

    def begin(self, peer: int) -> None:
        """Compute a stretch of the peer, from the parameters that it holds."""
        batches = [next(self._batches[peer]) for _ in range(self._local_steps)]
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
        self._rows[peer], self._after[peer] = self._stretch(self._rows[peer], self._held[peer], stacked)

    def results(self, peers: Sequence[int]) -> np.ndarray:
        """Return the parameters at the end of the stretches that these peers are in, [peers, numbers]."""
        return np.stack([self._after[peer] for peer in peers])

    def put(self, peers: Sequence[int], vectors: np.ndarray) -> None:
        """Hand these peers the outcome of averaging, [peers, numbers], with which they begin their next stretch."""
        self._held[list(peers)] = vectors

    def adopt(self, peer: int, donor: int) -> None:
        """Let a peer that is new hold what the donor holds; its optimiser begins anew."""
        self._held[peer] = self._held[donor]
        self._rows[peer] = self._first_row

    def losses(self, peers: Sequence[int]) -> np.ndarray:
        """Compute the validation losses of the parameters that these peers hold, [peers]."""
        return np.asarray(self._evaluate(self._held[list(peers)]))
