"""Rules for the fields of messages: said once for each, checked strictly, and told to whoever broke them.

A `Field` reads a value that the network brought and says what it stands for, or raises a `RemoteProtocolError` with the
field's name, what was expected, and what came. Types are compared exactly: True is no integer, and 1 no float. Bytes
and maps are taken as they came, not copied.
"""

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import PEER_ID_BYTES, PeerId

T = TypeVar("T")
E = TypeVar("E", bound=enum.StrEnum)

MAX_HOST_CHARACTERS = 255
"""RFC 1035 section 2.3.4."""


def _as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Field(Generic[T]):
    """One kind of value."""

    expected: str
    """Description of the allowed values in error messages."""
    holds: Callable[[Any], bool]
    """Returns True if a value is allowed; never raises."""
    unpack: Callable[[Any], T] = _as_it_is
    """Returns the object that an allowed value stands for."""
    pack: Callable[[T], Any] = _as_it_is
    """The inverse of `unpack`."""

    def read_untrusted(self, value: Any, name: str) -> T:
        """Return the object that the value stands for.

        Raises:
          RemoteProtocolError: it is something else; the message names the field `name`.
        """
        if not self.holds(value):
            raise RemoteProtocolError(f"{name} must be {self.expected}, got {value!r:.80}")
        return self.unpack(value)

    def of_untrusted(self, body: Mapping[str, Any], name: str) -> T:
        """`read_untrusted` of the field `name` of a body; one that is missing reads as None."""
        return self.read_untrusted(body.get(name), name)


def integer(low: int, high: int) -> Field[int]:
    """An int from `low` to `high`."""
    return Field(f"an integer from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def real(low: float = -math.inf, high: float = math.inf) -> Field[float]:
    """A finite float from `low` to `high`."""
    expected = "a finite float" if low == -high == -math.inf else f"a float from {low:g} to {high:g}"
    return Field(
        expected, lambda value: type(value) is float and low <= value <= high and math.isfinite(value), pack=float
    )


def text(shortest: int, longest: int) -> Field[str]:
    """A str of `shortest` to `longest` characters."""
    return Field(
        f"a string of {shortest} to {longest} characters",
        lambda value: type(value) is str and shortest <= len(value) <= longest,
    )


def octets(shortest: int, longest: int) -> Field[bytes]:
    """Bytes, `shortest` to `longest` of them."""
    expected = f"{longest} bytes" if shortest == longest else f"{shortest} to {longest} bytes"
    return Field(expected, lambda value: type(value) is bytes and shortest <= len(value) <= longest)


def choice(kind: type[E]) -> Field[E]:
    """The name of one of an enumeration's members."""
    names = frozenset(member.value for member in kind)
    return Field(f"one of {', '.join(sorted(names))}", lambda value: type(value) is str and value in names, kind, str)


def several(each: Field[T], most: int) -> Field[tuple[T, ...]]:
    """A list of at most `most` values of one kind."""
    return Field(
        f"a list of at most {most}, each {each.expected}",
        lambda value: type(value) is list and len(value) <= most and all(map(each.holds, value)),
        lambda value: tuple(map(each.unpack, value)),
        lambda values: list(map(each.pack, values)),
    )


def rows(most: int) -> Field[list[object]]:
    """A list of at most `most` values, which are still to be read one by one."""
    return Field(f"a list of at most {most}", lambda value: type(value) is list and len(value) <= most)


def optional(field: Field[T]) -> Field[T | None]:
    """A value of a kind, or None."""
    return Field(
        f"{field.expected}, or null",
        lambda value: value is None or field.holds(value),
        lambda value: None if value is None else field.unpack(value),
        lambda value: None if value is None else field.pack(value),
    )


FLAG: Field[bool] = Field("true or false", lambda value: type(value) is bool)
MAPPING: Field[Mapping[str, Any]] = Field("a map", lambda value: type(value) is dict, pack=dict)
PEER_ID: Field[PeerId] = Field(
    f"an id of {PEER_ID_BYTES} bytes", octets(PEER_ID_BYTES, PEER_ID_BYTES).holds, PeerId, lambda peer_id: peer_id.raw
)
PORT = integer(1, 65535)
HOST: Field[str] = Field(
    f"a host of 1 to {MAX_HOST_CHARACTERS} ASCII characters",
    lambda value: type(value) is str and 1 <= len(value) <= MAX_HOST_CHARACTERS and value.isascii(),
)


def row_untrusted(value: Any, what: str, /, **fields: Field[Any]) -> tuple[Any, ...]:
    """Read a list with one value for each field, in their order; `what` names the whole in errors.

    Raises:
      RemoteProtocolError: it is anything else.
    """
    if type(value) is not list or len(value) != len(fields):
        raise RemoteProtocolError(f"{what} must be [{', '.join(fields)}], got {value!r:.80}")
    found: list[Any] = []
    for item, (name, field) in zip(value, fields.items(), strict=True):
        if not field.holds(item):
            field.read_untrusted(item, f"the {name} of {what}")
        found.append(item if field.unpack is _as_it_is else field.unpack(item))
    return tuple(found)
