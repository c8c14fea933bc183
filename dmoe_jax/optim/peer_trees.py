"""Pytrees with a leading axis of peers: how many there are, how far apart, and arrays of one number a peer."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from dmoe_jax.types import PyTree


def count_peers(tree: PyTree, **of_peers: ArrayLike | None) -> int:
    """The number of peers, once all agree on it.

    Raises:
      ValueError: naming the leaf or argument that does not.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        raise ValueError("expected a tree with at least one array")
    num_peers: int | None = None
    for path, leaf in leaves:
        name = f"leaf {jax.tree_util.keystr(path) or 'of the tree'}"
        if jnp.ndim(leaf) == 0 or num_peers not in (None, leaf.shape[0]):
            raise ValueError(f"{name} must begin with the axis of peers ({num_peers}), got shape {jnp.shape(leaf)}")
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(f"{name} must be of floating numbers to have a mean, got {leaf.dtype}")
        num_peers = leaf.shape[0]
    for name, array in of_peers.items():
        if array is not None and jnp.shape(array) != (num_peers,):
            raise ValueError(f"{name} must have one entry for each of {num_peers} peers, got shape {jnp.shape(array)}")
    assert num_peers is not None
    return num_peers


def distortion(tree: PyTree) -> Array:
    """How far peers are apart: (1/N) sum_i |x_i - mean|^2 over all leaves [peers, ...]. Of scalars, their variance.

    Raises:
      ValueError: leaves have different numbers of peers or none.
    """
    num_peers = count_peers(tree)

    def of_leaf(leaf: Array) -> Array:
        wide = leaf.astype(wide_type(leaf))
        return jnp.sum(jnp.abs(wide - wide.mean(axis=0)) ** 2) / num_peers

    return sum((of_leaf(leaf) for leaf in jax.tree.leaves(tree)), start=jnp.zeros(()))


def per_peer(values: Array, leaf: Array) -> Array:
    """[peers] (or [groups]) with as many axes as the leaf, so that they broadcast against it."""
    return values.reshape(-1, *(1 for _ in range(jnp.ndim(leaf) - 1)))


def wide_type(leaf: Array) -> jnp.dtype:
    """What sums of it are taken in: float32 at least."""
    return jnp.promote_types(leaf.dtype, jnp.float32)
