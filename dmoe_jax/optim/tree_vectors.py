"""A pytree of parameters as one flat vector, the form in which the network averages it, and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax.arrays import PyTree
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
        self.size = sum(array.size for array in self._arrays)
        """Numbers in the vector."""
        self.schema = "\n".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in rows)
        """Meaning of the vector, for peers to compare: a line for each array."""
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

    def to_vector(self, tree: PyTree) -> Array:
        """The tree's numbers, float32 [size], in a fresh array on the host. Raises as `check`."""
        self.check(tree)
        return np.concatenate([np.asarray(leaf, np.float32).reshape(-1) for leaf in jax.tree.leaves(tree)])

    def to_tree(self, vector: Array) -> PyTree:
        """Arrays of the tree's shapes and types with the vector's numbers. Raises `ValueError` for another length."""
        if vector.shape != (self.size,):
            raise ValueError(f"expected a vector of {self.size} numbers, got shape {list(vector.shape)}")
        parts = np.split(vector, np.cumsum([array.size for array in self._arrays])[:-1])
        leaves = [jnp.asarray(part.reshape(a.shape), a.dtype) for part, a in zip(parts, self._arrays, strict=True)]
        return jax.tree.unflatten(self._structure, leaves)
