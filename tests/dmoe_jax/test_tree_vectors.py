"""Trees of parameters as vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax.optim.tree_vectors import TreeLayout


def tree_of(offset: float = 0.0) -> dict[str, object]:
    """Arrays of several shapes and types, one of them a scalar and one empty."""
    return {
        "b": jnp.arange(6, dtype=jnp.float32).reshape(2, 3) + offset,
        "a": [jnp.asarray(7.5, jnp.bfloat16), jnp.zeros((0, 2), jnp.float32)],
    }


def test_a_tree_comes_back_from_its_vector() -> None:
    """Leaves in the tree's order, by hand; types and shapes as they were."""
    layout = TreeLayout(tree_of())
    vector = layout.to_vector(tree_of())
    np.testing.assert_array_equal(vector, np.array([7.5, 0, 1, 2, 3, 4, 5], np.float32))
    back = layout.to_tree(vector)
    jax.tree.map(np.testing.assert_array_equal, back, tree_of())
    assert jax.tree.map(lambda leaf: leaf.dtype, back) == jax.tree.map(lambda leaf: leaf.dtype, tree_of())
    assert layout.size == 7


def test_schemas_tell_trees_apart() -> None:
    """By names, types and shapes, not by values."""
    assert TreeLayout(tree_of()).schema == TreeLayout(tree_of(5.0)).schema
    others = [{"b": jnp.zeros((3, 2))}, {"c": jnp.zeros((2, 3))}, {"b": jnp.zeros((2, 3), jnp.bfloat16)}]
    assert len({TreeLayout(other).schema for other in [{"b": jnp.zeros((2, 3))}, *others]}) == 4


def test_what_does_not_fit_is_refused() -> None:
    """Another tree, other shapes, another length, whole numbers, nothing."""
    layout = TreeLayout(tree_of())
    with pytest.raises(ValueError, match="layout"):
        layout.to_vector({"b": jnp.zeros((2, 3))})
    with pytest.raises(ValueError, match="shapes"):
        layout.to_vector(tree_of() | {"b": jnp.zeros((3, 2))})
    with pytest.raises(ValueError, match="7 numbers"):
        layout.to_tree(np.zeros(8, np.float32))
    with pytest.raises(ValueError, match=r"'count'.*int32"):
        TreeLayout({"count": jnp.zeros(3, jnp.int32)})
    with pytest.raises(ValueError, match="no array"):
        TreeLayout({})
