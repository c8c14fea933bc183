"""A pytree of parameters as one flat vector, the form in which the network averages it, and back.

Of a tree on the devices of several processes the vector has this process's own numbers (`dmoe_jax.mesh.shards`).
"""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax.arrays import PyTree
from dmoe_jax.mesh.shards import OwnedLeaf, handed_on, placed_like, spans_processes, tree_spans_processes
from dmoe_net.types import Array


class TreeLayout:
    """Place of each array of a tree in the vector. A tree of other than floating-point arrays is refused."""

    def __init__(self, tree: PyTree) -> None:
        named, structure = jax.tree_util.tree_flatten_with_path(tree)
        if not named:
            raise ValueError("the tree has no array")
        self._structure: Any = structure
        self._arrays = [jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf)) for _, leaf in named]
        names = [jax.tree_util.keystr(path) for path, _ in named]
        rows = list(zip(names, self._arrays, strict=True))
        for name, array in rows:
            if not jnp.issubdtype(array.dtype, jnp.floating):
                raise ValueError(f"only floating-point arrays are averaged, {name} is of {array.dtype}")
        self.schema = "\n".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in rows)
        """Meaning of the vector, for peers to compare: a line for each array."""
        self._owned = _owned_leaves(named) if tree_spans_processes(tree) else []
        self.spans = bool(self._owned)
        """True if other processes hold parts of the tree."""
        if self.spans:
            # At least one number: a process without any would take no part.
            self.size = max(1, sum(leaf.size for leaf in self._owned))
            self.schema += f"\n{_cut(self._owned)}\nprocess {jax.process_index()} of {jax.process_count()}"
        else:
            self.size = sum(array.size for array in self._arrays)
        """Numbers in the vector."""
        double = [name for name, array in rows if array.dtype == jnp.float64]
        self.rounding = (
            f"{len(double)} arrays of float64, such as {double[0]}, travel as float32: what others take part in has "
            "7 digits; as long as this peer is alone it keeps all of them"
            if double
            else ""
        )
        """A sentence on the digits that are lost on the way; empty if none are."""

    def check(self, tree: PyTree) -> None:
        """Raise `ValueError` if a tree has another structure or other shapes."""
        leaves = jax.tree.leaves(tree)
        if jax.tree.structure(tree) != self._structure or any(
            np.shape(leaf) != array.shape for leaf, array in zip(leaves, self._arrays, strict=True)
        ):
            raise ValueError("the tree is not of the layout: it has another structure or other shapes")

    def laid_out(self, tree: PyTree) -> PyTree:
        """The tree with each array where the layout has it; all processes call this at the same time."""
        if not self.spans:
            return tree
        leaves = [
            jax.device_put(leaf, own.sharding)
            if not spans_processes(leaf) or not leaf.sharding.is_equivalent_to(own.sharding, leaf.ndim)
            else leaf
            for leaf, own in zip(jax.tree.leaves(tree), self._owned, strict=True)
        ]
        return jax.tree.unflatten(self._structure, leaves)

    def to_vector(self, tree: PyTree) -> Array:
        """The tree's numbers, float32 [size], in a fresh array on the host. Raises as `check`."""
        self.check(tree)
        leaves = jax.tree.leaves(tree)
        if self.spans:
            pieces = [piece for leaf, own in zip(leaves, self._owned, strict=True) for piece in own.pieces(leaf)]
        else:
            pieces = [np.asarray(leaf).reshape(-1) for leaf in leaves]
        vector = np.zeros(self.size, np.float32) if not pieces else np.empty(self.size, np.float32)
        return np.concatenate(pieces, out=vector, casting="unsafe") if pieces else vector

    def to_tree(self, vector: Array, like: PyTree = None) -> PyTree:
        """Arrays of the tree's shapes and types with the vector's numbers.

        Args:
          vector: float32 [size]. Of a tree over several processes each gives its own, all at the same time.
          like: a tree of the layout, where whose arrays are the new ones are put; None: on the default device.

        Raises:
          ValueError: the vector has another length.
        """
        if vector.shape != (self.size,):
            raise ValueError(f"expected a vector of {self.size} numbers, got shape {list(vector.shape)}")
        if self.spans:
            return jax.tree.unflatten(self._structure, self._joined(vector))
        parts = np.split(vector, np.cumsum([array.size for array in self._arrays])[:-1])
        leaves = [jnp.asarray(part.reshape(a.shape), a.dtype) for part, a in zip(parts, self._arrays, strict=True)]
        if like is not None:
            leaves = list(map(placed_like, leaves, jax.tree.leaves(like)))
        return jax.tree.unflatten(self._structure, leaves)

    def _joined(self, vector: Array) -> list[jax.Array]:
        start, arrays = 0, []
        for leaf in self._owned:
            pieces = []
            for size in leaf.sizes:
                pieces.append(vector[start : start + size])
                start += size
            arrays.append(leaf.local(pieces))
        return handed_on(self._owned, arrays)


def _owned_leaves(named: list[tuple[Any, Any]]) -> list[OwnedLeaf]:
    held: dict[int, int] = {}
    for path, leaf in named:
        if not spans_processes(leaf):
            raise ValueError(
                f"arrays of a model over several processes must all lie on its mesh, and {jax.tree_util.keystr(path)} "
                "is this process's own"
            )
    return [OwnedLeaf.of(leaf, held) for _, leaf in named]


def _cut(owned: list[OwnedLeaf]) -> str:
    """A hash of who owns which shards: replicas that are cut otherwise do not meet."""
    found = hashlib.sha256()
    for leaf in owned:
        found.update(repr(leaf.owners).encode())
    return f"cut {found.hexdigest()}"
