"""Batches that know their position, so that a checkpoint can hold it and a resumed run goes on at the very record.

Whoever makes batches says where they are in one of three ways:

- `position` and `seek(position)`, as `SegmentStream`: the number of batches read is all.
- `get_state()` and `set_state(state)`, as the iterators of Grain; or `state_dict()` and `load_state_dict(state)`, as
  those of PyTorch and the iterable data sets of `datasets`. The state is anything that JSON can say, or bytes.
- Neither, as a generator: a resumed run reads on from the beginning, and drops what was read before.
"""

import base64
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

T = TypeVar("T")

Position = int | dict[str, Any]
"""Number of batches read; or {"read": that number, "state": the batches' own state}, "bytes" in base64 for "state"."""

_ACCESSORS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


@runtime_checkable
class Resumable(Protocol):
    """Batches that can be taken up again at any place, such as `dmoe_jax.data.SegmentStream`."""

    @property
    def position(self) -> int: ...
    def seek(self, position: int) -> None: ...


class Positioned(Iterator[T], Generic[T]):
    """An iterator over batches, with its position. Raises ValueError for a state that JSON and bytes cannot say."""

    def __init__(self, batches: Iterable[T]) -> None:
        self._batches = batches
        self._iterator = iter(batches)
        self._read = 0
        self._sought: Position | None = None
        self._owner, self._get_state, self._set_state = _accessors(batches, self._iterator)
        self.position  # noqa: B018 - raises now what it would raise at the first checkpoint

    @property
    def number(self) -> int:
        """Number of the next batch, from 0."""
        return self._batches.position if isinstance(self._batches, Resumable) else self._read

    @property
    def position(self) -> Position:
        """The position behind the last batch that was read, in JSON."""
        if self._sought is not None:
            return self._sought  # some batches know where they are only when they have read again
        if isinstance(self._batches, Resumable) or self._get_state is None:
            return self.number
        state = self._get_state()
        if isinstance(state, bytes):
            return {"read": self._read, "bytes": base64.b64encode(state).decode()}
        return {"read": self._read, "state": _as_json(state, type(self._batches).__name__)}

    def seek(self, position: Position) -> None:
        """Make the batch behind a position the next one.

        Raises:
          ValueError: the position is of other batches, or they end before it.
        """
        if isinstance(position, dict):
            self._restore(position)
            self._sought = position
        elif isinstance(self._batches, Resumable):
            self._batches.seek(position)
        elif position < self._read:
            raise ValueError(f"these batches cannot go back: {self._read} are read, asked for {position}")
        else:
            while self._read < position:
                try:
                    next(self)
                except StopIteration:
                    raise ValueError(f"there are only {self._read} batches, asked for number {position}") from None

    def __next__(self) -> T:
        batch = next(self._iterator)
        self._read += 1
        self._sought = None
        return batch

    def _restore(self, position: dict[str, Any]) -> None:
        read = position.get("read")
        if self._set_state is None or type(read) is not int or position.keys() - {"read"} not in ({"state"}, {"bytes"}):
            name = type(self._batches).__name__
            raise ValueError(f"the position is the state of other batches than these, which are of type {name}")
        state = position["state"] if "state" in position else base64.b64decode(position["bytes"], validate=True)
        self._set_state(state)
        self._read = read
        if self._owner is not self._iterator:
            self._iterator = iter(self._batches)  # which begins there


def positioned(batches: Iterable[T]) -> Positioned[T]:
    """The batches with their position."""
    return batches if isinstance(batches, Positioned) else Positioned(batches)


def _accessors(*owners: object) -> tuple[object, Callable[[], Any] | None, Callable[[Any], Any] | None]:
    """The first of some objects that has a state, with the functions that get and set it; None three times for none."""
    for owner in owners:
        for get, set_ in _ACCESSORS:
            if callable(getattr(owner, get, None)) and callable(getattr(owner, set_, None)):
                return owner, getattr(owner, get), getattr(owner, set_)
    return None, None, None


def _as_json(state: object, name: str) -> Any:
    """The state as it comes back from JSON, with NumPy's scalars as numbers."""
    try:
        found = json.loads(json.dumps(state, default=_number))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the state of {name} cannot be saved: {error}") from error
    if found != state:  # lists for tuples, texts for numbers as keys
        raise ValueError(f"the state of {name} cannot be saved: JSON gives {found!r:.100} back for {state!r:.100}")
    return found


def _number(value: object) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is nothing that JSON can say")
