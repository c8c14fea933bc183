"""The state of an expert on its way to another node: its arrays, and the names of what it was learnt from.

The names of the requests (`dmoe_jax.placement.learnt`) are the last array, uint8 [names, 16].
"""

from collections.abc import Callable

import jax
import numpy as np

from dmoe_jax.arrays import PyTree, sent
from dmoe_jax.averaging.donor import table_of
from dmoe_jax.node.backend import MOST_REMEMBERED, ExpertBackend
from dmoe_jax.node.queue import NAME_BYTES
from dmoe_jax.node.saving import is_sound
from dmoe_jax.placement.learnt import packed, unpacked
from dmoe_net.averaging.state.buffer import Table
from dmoe_net.averaging.state.sharing import SharedState
from dmoe_net.wire.tensors import plain


def shared(backend: ExpertBackend) -> SharedState:
    """A copy of an expert's state; run it on the device: no batch can come between count, arrays and names."""
    leaves = (np.array(sent(leaf), copy=True) for leaf in jax.tree.leaves(backend.state))
    return SharedState(version=backend.update_count, tensors=(*leaves, packed(backend.learnt_from)))


def load(backend: ExpertBackend, state: SharedState) -> None:
    """Put a state into an expert; run it on the device."""
    names = unpacked(plain(state.tensors[-1]))
    backend.load(_like(backend.state, state), update_count=state.version, learnt_from=names)


def checks_of(backend: ExpertBackend) -> tuple[Callable[[int, Table], bool], Callable[[SharedState], bool]]:
    """Two checks for `download_state`. The first returns True if an offered state has the expert's arrays and has
    names, the second if a state that came is finite."""
    own = table_of(backend.state)

    def fits(version: int, offered: Table) -> bool:
        del version
        if offered[:-1] != own or len(offered) != len(own) + 1:
            return False
        dtype, shape = offered[-1]
        return bool(dtype == "uint8" and shape[1:] == [NAME_BYTES] and shape[0] <= MOST_REMEMBERED)

    return fits, lambda state: is_sound(_like(backend.state, state))


def _like(tree: PyTree, state: SharedState) -> PyTree:
    return jax.tree.unflatten(jax.tree.structure(tree), state.tensors[:-1])
