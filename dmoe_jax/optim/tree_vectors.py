"""A pytree of parameters as one flat vector, the form in which the network averages it, and back."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax.types import PyTree
from net.types import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLayout:
    """Where each array of a tree lies in the vector. Made by `layout_of`."""

    structure: Any
    """The tree's definition."""
    shapes: tuple[tuple[int, ...], ...]
    """Of its arrays, in the order of its leaves."""
    dtypes: tuple[str, ...]
    """Of its arrays."""
    names: tuple[str, ...]
    """Of its arrays: their paths."""

    @property
    def size(self) -> int:
        """Numbers in the vector."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def schema(self) -> str:
        """What the vector means, for peers to compare: a line for each array."""
        rows = zip(self.names, self.dtypes, self.shapes, strict=True)
        return "\n".join(f"{name} {dtype} {list(shape)}" for name, dtype, shape in rows)

    def check(self, tree: PyTree) -> None:
        """Compare structure and shapes, without a look at the numbers.

        Raises:
          ValueError: the tree has another structure or other shapes.
        """
        leaves, structure = jax.tree.flatten(tree)
        if structure != self.structure or tuple(np.shape(leaf) for leaf in leaves) != self.shapes:
            raise ValueError("the tree is not of the layout: it has another structure or other shapes")

    def to_vector(self, tree: PyTree) -> Array:
        """The tree's numbers, float32 [size], in a fresh array on the host.

        Raises:
          ValueError: the tree has another structure or other shapes.
        """
        self.check(tree)
        leaves = jax.tree.leaves(tree)
        vector = np.empty(self.size, np.float32)
        start = 0
        for leaf in leaves:
            end = start + leaf.size
            vector[start:end] = np.asarray(leaf).reshape(-1)
            start = end
        return vector

    def to_tree(self, vector: Array) -> PyTree:
        """Arrays of the tree's shapes and types with the vector's numbers.

        Raises:
          ValueError: the vector has another length.
        """
        if vector.shape != (self.size,):
            raise ValueError(f"expected a vector of {self.size} numbers, got shape {list(vector.shape)}")
        leaves, start = [], 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            end = start + math.prod(shape)
            leaves.append(jnp.asarray(vector[start:end].reshape(shape), dtype))
            start = end
        return jax.tree.unflatten(self.structure, leaves)


def layout_of(tree: PyTree) -> TreeLayout:
    """The layout of a tree of floating-point arrays.

    Raises:
      ValueError: it has no array, or one that is not of floating-point numbers; the message names it.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in leaves:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                f"only floating-point arrays are averaged, {jax.tree_util.keystr(path)} is of {leaf.dtype}"
            )
    if not leaves:
        raise ValueError("the tree has no array")
    return TreeLayout(
        structure=structure,
        shapes=tuple(tuple(np.shape(leaf)) for _, leaf in leaves),
        dtypes=tuple(str(jnp.result_type(leaf)) for _, leaf in leaves),
        names=tuple(jax.tree_util.keystr(path) for path, _ in leaves),
    )
