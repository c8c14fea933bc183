"""Numbers of an expert that its replicas average, and the weight of each copy.

Parameters and whatever of the optimiser's state is a floating-point number are averaged: first moments, second moments,
traces. All of these are linear in gradients or in their squares, so that the mean of several is that of one optimiser
which has seen all gradients; with moments of their own, copies would pull apart again right after each average.
Integers (step counts) and random keys stay each copy's own: replies count by them how stale a gradient is.

Parameters take the *difference* between average and what was sent, so that updates made meanwhile stay. The optimiser's
numbers are replaced: they forget within some steps anyway, and a difference could leave a second moment below zero, or
beside a first moment that is far too large for it.

Each copy counts as the updates that it has taken since its last average, or since the state that it began with. One
that has taken none counts a little: it is where the others were, and if nobody has taken any the mean is plain.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax.arrays import PyTree
from dmoe_jax.optim.tree_vectors import TreeLayout
from dmoe_net.types import Array

LEAST_WEIGHT = 1e-3
"""Weight of a copy without updates, beside 1 for each update of others."""

_PARAMS = "['params']"


class CopyLayout:
    """Places in a vector for the numbers of an expert's state that replicas average.

    Args:
      state: as of `ExpertBackend.state`; its shapes alone are used.

    Raises:
      ValueError: it has no floating-point number.
    """

    def __init__(self, state: PyTree, *, meaning: str = "") -> None:
        self._layout = TreeLayout(_averaged(state))
        self.size = self._layout.size
        """Numbers in the vector."""
        self.schema = f"{self._layout.schema}\n{meaning}"
        """Meaning of these numbers, for replicas to compare: a line for each array, then the expert's meaning."""

    def vector(self, state: PyTree) -> Array:
        """A state's numbers, float32 [size]."""
        return self._layout.to_vector(_averaged(state))

    def with_average(self, state: PyTree, sent: Array, average: Array) -> PyTree | None:
        """The state with an average in it; None if it, or the average, is not finite.

        Args:
          sent: this copy's part in the average, float32 [size].
          average: of all copies, float32 [size].

        Returns: arrays on the host, of the state's shapes.
        """
        if not np.isfinite(average).all():
            return None
        where, start = {}, 0
        for name, leaf in sorted(_averaged(state).items()):  # as JAX orders a dictionary
            where[name] = slice(start, start + leaf.size)
            start += leaf.size

        def merged(path: Any, leaf: Any) -> Any:
            name = jax.tree_util.keystr(path)
            if name not in where:
                return np.asarray(leaf)
            mean = average[where[name]].reshape(np.shape(leaf))
            if not name.startswith(_PARAMS):
                return mean
            return np.asarray(leaf, np.float32) + (mean - sent[where[name]].reshape(np.shape(leaf)))

        new = jax.tree_util.tree_map_with_path(merged, state)
        return new if np.isfinite(self.vector(new)).all() else None


class Progress:
    """Weight of a copy of an expert in the next average: see the head of this file. Counts are its `update_count`."""

    def __init__(self) -> None:
        self._since = 0
        self._has_met = False
        self._is_behind = False

    def met(self, count: int) -> None:
        """It has the state of another copy, of this count, or an average for which it sent what was of this count."""
        self._since, self._has_met, self._is_behind = count, True, False

    def gave(self, count: int) -> None:
        """Another copy has got its state. If it is the first one to meet another, both go on from here: it would
        otherwise count with all that it has learnt alone, which the other has already."""
        if not self._has_met:
            self._since, self._has_met = count, True

    def missed(self) -> None:
        """It began while others lived whose state it could not get: until it has averaged with them, it counts as one
        that has learnt nothing."""
        self._is_behind = True

    def weight(self, count: int) -> float:
        """Its weight now."""
        return LEAST_WEIGHT if self._is_behind else max(LEAST_WEIGHT, float(count - self._since))


def _averaged(state: PyTree) -> dict[str, Any]:
    """The floating-point arrays of a state, by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)}
