"""What the trainers of an emulated swarm read."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dmoe_jax.model import Model
from dmoe_jax.types import PyTree


class Data(NamedTuple):
    """All batches of a run; leaves [trainers, steps, ...], with a leading axis of seeds where there are several.

    Attributes:
      batches: of the model. keys: chance of each step, from `Model.keys`; None for none.
    """

    batches: PyTree
    keys: PyTree = None


def take_batches(model: Model, streams: Sequence[Iterable[Any]], *, steps: int, seed: int = 0) -> Data:
    """The next batches of each trainer, with the chance that a `Trainer` with this seed would give them.

    Args:
      model: for its keys.
      streams: one for each trainer; their batches are of one shape.
      steps: how many of each; a little more than updates by trainers, as some trainers are faster than others.
      seed: of the keys.

    Raises:
      ValueError: a stream ends before.
    """
    batches, keys = [], []
    for trainer, stream in enumerate(streams):
        own = list(itertools.islice(stream, steps))
        if len(own) < steps:
            raise ValueError(f"expected {steps} batches for trainer {trainer}, got {len(own)}")
        batches.append(_stacked(own))
        keys.append(_stacked([model.keys(one, seed=seed, trainer=trainer, step=step) for step, one in enumerate(own)]))
    return Data(_stacked(batches), _stacked(keys))


def stack_seeds(data: Sequence[Data]) -> Data:
    """The data of several seeds, with a leading axis of them."""
    return Data(*_stacked([tuple(one) for one in data]))


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
