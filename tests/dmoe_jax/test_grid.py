"""Expert uids, their prefixes, and grid patterns."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dmoe_jax.directory.grid import ExpertUid, all_uids, expand_grid_pattern, key_prefix, parse_uid

INVALID = "|.|ffn|ffn.|.3|ffn..3|ffn.3.|ffn.03|ffn.00|ffn.-1|ffn.+1|ffn.1e3|ffn. 1|ffn.1 |ffn.1\n|ffn.100000"
INVALID += "|ffn.[0:3]|f fn.1|fün.1|ffn.1.x|"
INVALID += "ffn.١"  # an Arabic-Indic digit: str.isdigit would accept it


@pytest.mark.parametrize("text", [*INVALID.split("|"), "x" * 65 + ".1", "x" + ".1" * 17])
def test_an_invalid_uid_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="uid") as caught:
        parse_uid(text)
    assert repr(text) in str(caught.value)


@given(
    st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True),
    st.lists(st.integers(0, 99_999), min_size=1, max_size=16),
)
@example("-", [1])
@example("_", [0, 10, 99_999])
@settings(max_examples=25, deadline=None)
def test_every_uid_survives_a_round_trip(prefix: str, coordinates: list[int]) -> None:
    uid = ExpertUid(prefix, tuple(coordinates))
    assert parse_uid(str(uid)) == uid


def test_a_partial_path_has_a_name() -> None:
    """It ends with a dot; that of a whole path is the uid and a dot."""
    assert key_prefix("ffn", ()) == "ffn."
    assert key_prefix("ffn", (3,)) == "ffn.3."
    assert key_prefix("ffn", (3, 17)) == f"{parse_uid('ffn.3.17')}."


@pytest.mark.parametrize(("prefix", "coordinates"), [("a.b", (1,)), ("", (1,)), ("a", ()), ("a", (-1,))])
def test_a_uid_cannot_be_made_wrong(prefix: str, coordinates: tuple[int, ...]) -> None:
    """The constructor checks as the parser does."""
    with pytest.raises(ValueError, match=r"prefix|coordinates"):
        ExpertUid(prefix, coordinates)


def test_a_pattern_expands_in_the_order_of_coordinates() -> None:
    """Ranges are half-open and the last dimension runs fastest; a number stands for itself."""
    expanded = [str(uid) for uid in expand_grid_pattern("ffn.[0:2].7.[9:11]")]
    assert expanded == ["ffn.0.7.9", "ffn.0.7.10", "ffn.1.7.9", "ffn.1.7.10"]


PATTERNS = "ffn|ffn.|ffn.[3:3]|ffn.[4:3]|ffn.[0:100001]|ffn.[0:4|ffn.[:4]|ffn.[0:1001].[0:1000]|.[0:4]"


@pytest.mark.parametrize("pattern", PATTERNS.split("|"))
def test_a_bad_pattern_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern") as caught:
        expand_grid_pattern(pattern)
    assert repr(pattern) in str(caught.value)


def test_all_uids_of_a_grid() -> None:
    assert [uid.coordinates for uid in all_uids("ffn", (2, 3))] == [(u, v) for u in range(2) for v in range(3)]
    with pytest.raises(ValueError, match="grid_size"):
        all_uids("ffn", (2, 0))
