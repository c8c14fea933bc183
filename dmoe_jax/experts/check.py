"""Does an expert keep to its contract? Asked when it is made, so that a mistake gets a sentence and not a crash."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax.experts.base import Expert, TensorSpec
from dmoe_jax.experts.dropout import row_keys_of_seed
from dmoe_net.types import Array


class ExpertError(ValueError):
    """Something cannot be an expert. The message names it and says what to use instead."""


def check_expert(expert: Expert) -> None:
    """Try an expert on two rows, and on each of them beside a row of zeros.

    Costs one initialisation and one compilation, or two for an expert that takes keys.

    Raises:
      ExpertError: if its output is not what it declares or not finite, a row's output depends on the rows beside it, or
        one of its functions raised.
    """
    params = called(expert.name, "init", expert.init, jax.random.key(0))
    if not all(map(_finite, jax.tree.leaves(params))):
        raise ExpertError(f"expert {expert.name!r}: its initial parameters are not finite")
    rng = np.random.default_rng(0)
    inputs = [_sample(spec, rng) for spec in expert.inputs]
    apply = jax.jit(expert.apply)
    for keys in (None, row_keys_of_seed(0, 2)) if expert.takes_key else (None,):
        named = {} if keys is None else {"keys": keys}
        both = called(expert.name, "apply", apply, params, *inputs, **named)
        _check_output(expert, both)
        for row in range(2):
            alone = np.asarray(apply(params, *(_only(row, array) for array in inputs), **named), np.float64)
            difference = np.abs(alone[row] - np.asarray(both[row], np.float64)).max(initial=0.0)
            # The same program on the same row: a few roundings may differ, no more.
            tolerance = min(100 * float(jnp.finfo(both.dtype).eps), 0.05)
            if difference > tolerance * (1 + np.abs(alone[row]).max(initial=0.0)):
                raise ExpertError(
                    f"expert {expert.name!r}: the output of a row changes by {difference:.3g} with the rows beside it. "
                    "A node joins rows of different trainers and pads them with zeros, so rows must be independent: "
                    "normalise and attend within a row"
                )


def called(name: str, part: str, function: Any, *args: Any, **named: Any) -> Any:
    """Return `function`'s result; what it raises becomes an ExpertError that names the expert and the part of it."""
    try:
        return function(*args, **named)
    except ExpertError:
        raise
    except Exception as error:  # a stranger's code may raise anything
        said, *_ = [*str(error).strip().splitlines(), "no message"]
        raise ExpertError(f"expert {name!r}: {part} raised {type(error).__name__}: {said}") from error


def _check_output(expert: Expert, output: Any) -> None:
    wanted = f"{expert.output.dtype}{[2, *expert.output.shape]}"
    got = f"{output.dtype}{list(output.shape)}" if hasattr(output, "shape") else type(output).__name__
    if got != wanted:
        raise ExpertError(f"expert {expert.name!r}: for 2 rows its output must be {wanted}, got {got}")
    if not _finite(output):
        raise ExpertError(f"expert {expert.name!r}: its output is not finite for a sample of ordinary size")


def _finite(array: Any) -> bool:
    return not jnp.issubdtype(array.dtype, jnp.inexact) or bool(jnp.isfinite(array).all())


def _sample(spec: TensorSpec, rng: np.random.Generator) -> Array:
    """Two different rows: normal numbers, or zeros and ones, which are in the range of every embedding."""
    dtype = jnp.dtype(spec.dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return rng.normal(size=(2, *spec.shape)).astype(dtype)
    return rng.integers(0, 2, size=(2, *spec.shape)).astype(dtype)


def _only(row: int, array: Array) -> Array:
    kept = np.zeros_like(array)
    kept[row] = array[row]
    return kept
