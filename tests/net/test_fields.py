"""Fields of messages: what passes comes back as it is meant, what does not is told with name, bound and value."""

import enum
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import PeerId
from dmoe_net.wire.fields import (
    FLAG,
    HOST,
    MAPPING,
    PEER_ID,
    PORT,
    Field,
    choice,
    integer,
    octets,
    optional,
    real,
    row_untrusted,
    rows,
    several,
    text,
)


class Kind(enum.StrEnum):
    """A choice."""

    ONE = "one"
    TWO = "two"


GOOD: list[tuple[Field[Any], list[Any]]] = [
    (integer(1, 5), [1, 5]),
    (real(), [-1e300, 0.0]),
    (real(1.0, 2.0), [1.0, 2.0]),
    (text(1, 3), ["a", "\u00fcbe"]),
    (octets(2, 3), [b"ab", b"abc"]),
    (choice(Kind), ["one", "two"]),
    (several(integer(0, 9), 2), [[], [0, 9]]),
    (rows(2), [[], [None, []]]),
    (optional(PORT), [None, 1, 65535]),
    (HOST, ["h", "h" * 255]),
    (FLAG, [True, False]),
    (MAPPING, [{}, {"a": 1}]),
    (PEER_ID, [bytes(32)]),
]
BAD: list[tuple[Field[Any], list[Any]]] = [
    (integer(1, 5), [0, 6, True, 1.0, "1", None]),
    (real(), [math.inf, -math.inf, math.nan, 1, True]),
    (real(1.0, 2.0), [0.5, 2.5, 1]),
    (text(1, 3), ["", "abcd", b"a", None]),
    (octets(2, 3), [b"a", b"abcd", "ab", bytearray(b"ab")]),
    (choice(Kind), ["ONE", "three", None, ["one"]]),
    (several(integer(0, 9), 2), [[0, 1, 2], [10], [True], (1,), None]),
    (rows(2), [[1, 2, 3], (1,), None]),
    (optional(PORT), [0, 65536, "1"]),
    (HOST, ["", "h" * 256, "h\u00f6st", b"h"]),
    (FLAG, [0, 1, None, "true"]),
    (MAPPING, [[], None, "{}"]),
    (PEER_ID, [bytes(31), bytes(33), "0" * 32]),
]


@pytest.mark.parametrize(("field", "values"), GOOD, ids=lambda each: getattr(each, "expected", ""))
def test_what_holds_travels_there_and_back(field: Field[Any], values: list[Any]) -> None:
    """An unpacked value packs to the same value again."""
    for value in values:
        packed = field.pack(field.read_untrusted(value, "x"))
        assert (packed, type(packed)) == (value, type(value))


@pytest.mark.parametrize(("field", "values"), BAD, ids=lambda each: getattr(each, "expected", ""))
def test_what_does_not_hold_is_told(field: Field[Any], values: list[Any]) -> None:
    """By the field's name, what it must be, and what came, however long that is."""
    for value in values:
        with pytest.raises(RemoteProtocolError) as caught:
            field.of_untrusted({"speed": value}, "speed")
        assert str(caught.value).startswith(f"speed must be {field.expected}, got {value!r}"[:60])
        assert len(str(caught.value)) < 300


def test_meanings() -> None:
    """Ids are ids and names are members; a missing field reads as None."""
    assert PEER_ID.read_untrusted(bytes(32), "x") == PeerId(bytes(32))
    assert choice(Kind).read_untrusted("two", "x") is Kind.TWO
    assert several(choice(Kind), 2).read_untrusted(["two"], "x") == (Kind.TWO,)
    assert optional(PORT).of_untrusted({}, "port") is None
    with pytest.raises(RemoteProtocolError, match="port must be an integer from 1 to 65535, got None"):
        PORT.of_untrusted({}, "port")


@given(st.none() | st.integers() | st.lists(st.none() | st.integers(0, 99) | st.sampled_from(["", "h"]), max_size=3))
def test_a_row_is_one_value_for_each_field(value: Any) -> None:
    """Anything else is refused by the name of the whole, or of the value in it."""
    if isinstance(value, list) and len(value) == 2 and HOST.holds(value[0]) and PORT.holds(value[1]):
        assert row_untrusted(value, "a contact", host=HOST, port=PORT) == tuple(value)
        return
    with pytest.raises(RemoteProtocolError, match=r"^(a contact must be \[host, port\]|the \w+ of a contact must be )"):
        row_untrusted(value, "a contact", host=HOST, port=PORT)
