"""A training loop's state as arrays that travel, and back."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax.arrays import kept_like, sent, stored
from dmoe_jax.device import Device, to_host
from dmoe_jax.types import PyTree
from net.averaging.state.buffer import Table
from net.averaging.state.sharing import SharedState, StateSource
from net.errors import PeerBusy
from net.types import Array

_SNAPSHOT_ATTEMPTS = 3
"""A loop in another thread may donate the arrays of a state just when they are copied."""


def donor_source(state: Callable[[], tuple[int, PyTree]], device: Device) -> StateSource:
    """A donor's state, copied whenever a newcomer asks for it.

    Args:
      state: (how far it is, the state now); called from the event loop.
      device: brings the copies to the host.
    """

    async def snapshot() -> SharedState:
        for _ in range(_SNAPSHOT_ATTEMPTS):
            version, tree = state()
            leaves = jax.tree.leaves(tree)
            try:  # in the event loop: a training loop that runs in it cannot donate them meanwhile
                copies = [jnp.array(stored(leaf)) if isinstance(leaf, jax.Array) else np.array(leaf) for leaf in leaves]
            except RuntimeError:
                if not any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
                    raise
            else:
                return SharedState(version=version, tensors=tuple(map(sent, await to_host(device, copies))))
        raise PeerBusy("the state was donated to an update while it was copied")

    return StateSource(lambda: state()[0], snapshot)


def table_of(tree: PyTree) -> Table:
    """Type and shape of each array of a state, as donors announce them. Python numbers travel as NumPy's."""
    arrays = map(sent, jax.tree.leaves(tree))
    return [[np.dtype(array.dtype).name, list(array.shape)] for array in arrays]


def tree_like(own: PyTree, tensors: Sequence[Array]) -> PyTree:
    """A received state in the structure of this peer's own, each leaf as the kind of array or number that it is there.

    Args:
      tensors: one for each leaf, in their order.
    """
    leaves, structure = jax.tree.flatten(own)
    return jax.tree.unflatten(structure, list(map(kept_like, leaves, tensors)))


def is_finite_state(state: SharedState) -> bool:
    """Whether all its numbers are finite."""
    return all(np.isfinite(tensor).all() for tensor in state.tensors if jnp.issubdtype(tensor.dtype, jnp.inexact))
