"""Arrays of a training state: copies of their own, the forms in which they are kept and travel, and sums over them.

- An optimiser's state may be the parameters themselves, or one array twice, and is donated: it is copied first.
- A random key with a type of its own is kept, and travels, as its data.
- NumPy's buffers know neither bfloat16 nor float8: their bits are looked at as bytes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool

from dmoe_net.wire.tensors import DTYPES

PyTree = Any
"""A nested structure of tuples, lists, dictionaries and registered nodes with arrays as leaves, as JAX has it."""


def copied(tree: PyTree) -> PyTree:
    """Copies of all arrays, strongly typed: weak types would be compiled for once more after one update."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, dtype=jnp.result_type(leaf)), tree)


def as_params(tree: PyTree) -> PyTree:
    """A caller's parameters as arrays of their own. A ValueError names a leaf that is no array of numbers."""

    def own(path: Any, leaf: Any) -> Any:
        try:
            return copied(leaf)
        except TypeError as error:
            name = jax.tree_util.keystr(path)
            raise ValueError(f"parameters are arrays of numbers, {name} is {leaf!r:.80}") from error

    return jax.tree_util.tree_map_with_path(own, tree)


def is_key(leaf: Any) -> bool:
    """True for a random key with a type of its own, or an array of them."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def stored(leaf: Any) -> Any:
    """The array in the form of checkpoints: of a random key its data, anything else as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def host_copy(tree: PyTree) -> PyTree:
    """The tree in NumPy arrays of its own, as `stored`: donating the original later does not reach them."""
    return jax.tree.map(lambda leaf: np.array(stored(leaf), copy=True), tree)


def sent(leaf: Any) -> Any:
    """The array in the form that travels: as `stored`, or bytes if the wire has no name for its type (float8)."""
    leaf = stored(leaf)
    array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return np.asarray(array).view(np.uint8) if _travels_as_bytes(array.dtype) else array


def kept_like(own: Any, saved: Any) -> Any:
    """A `stored` or `sent` array as a buffer of its own, of the kind, type and place of `own`, which it follows."""
    if is_key(own):
        keys = jax.random.wrap_key_data(jnp.array(stored(saved)), impl=jax.random.key_impl(own))
        return jax.device_put(keys, own.sharding) if own.committed else keys
    if not isinstance(own, jax.Array):
        array = np.array(_from_bytes(saved, np.asarray(own).dtype))
        return array if isinstance(own, np.ndarray | np.generic) else array.item()
    saved = _from_bytes(saved, own.dtype)
    if not own.committed:
        return jnp.array(saved, dtype=own.dtype)
    array = np.asarray(saved, dtype=own.dtype)
    if not own.is_fully_addressable:  # each process puts what it holds; JAX would first compare all of it
        return jax.make_array_from_callback(array.shape, own.sharding, lambda index: array[index])
    return jax.device_put(array, own.sharding, may_alias=False)


def bytes_of(leaf: Any) -> memoryview:
    """The bytes of an array in C order, whatever its type."""
    return np.ascontiguousarray(stored(leaf)).reshape(-1).view(np.uint8).data


def wide(values: ArrayLike) -> Array:
    """The values in float32 at least: sums and differences of narrower numbers would be lost in rounding."""
    array = jnp.asarray(values)
    is_narrow = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4  # float8 has no promotion
    return array.astype(jnp.float32 if is_narrow else jnp.promote_types(array.dtype, jnp.float32))


def in_type_of(new: Any, old: Any) -> Any:
    """The array in the type of another. Random keys know no `astype`."""
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def typed_like(tree: PyTree, like: PyTree) -> PyTree:
    """The tree in the types of another of its structure."""
    return jax.tree.map(lambda leaf, own: leaf.astype(jnp.asarray(own).dtype), tree, like)


def against(leading: Any, leaf: Any) -> Any:
    """An array of the leading axes of the leaf, with as many axes as this: so it broadcasts against it."""
    return leading.reshape(leading.shape + (1,) * (leaf.ndim - leading.ndim))


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """True if every number of the tree is finite. A sum of them, or of their squares, might overflow."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves] or [jnp.array(True)]))


def gradients_like(grads: PyTree, params: PyTree) -> PyTree:
    """The gradients with zeros where JAX has a placeholder: integers among the parameters stay as they are."""
    return jax.tree.map(
        lambda grad, own: jnp.zeros_like(own) if grad.dtype == jax.dtypes.float0 else grad, grads, params
    )


def _travels_as_bytes(dtype: Any) -> bool:
    return np.dtype(dtype).name not in DTYPES and np.dtype(dtype).itemsize == 1


def _from_bytes(saved: Any, dtype: Any) -> Any:
    is_bytes = _travels_as_bytes(dtype) and np.asarray(saved).dtype == np.uint8
    return np.asarray(saved).view(dtype) if is_bytes else saved
