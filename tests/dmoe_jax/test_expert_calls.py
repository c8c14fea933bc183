"""The form of requests and answers about experts: what one side writes the other reads, and nothing else passes."""

from typing import Any

import numpy as np
import pytest

from dmoe_jax.mixture.expert_calls import (
    MAX_PARTS,
    Answer,
    answer_of,
    index_of,
    outcomes_of_untrusted,
    parts_of_untrusted,
)
from dmoe_net.errors import CallRefused, PeerBusy, RemoteFailure, RemoteProtocolError
from dmoe_net.identity import PeerId
from dmoe_net.rpc.base import Reply, Request
from dmoe_net.wire.compression import Compression


def request_of(parts: Any, *tensors: np.ndarray) -> Request:
    return Request(
        method="expert.forward",
        body={"parts": parts},
        tensors=tensors,
        peer_id=PeerId(bytes(32)),
        peer_address=None,
    )


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_row_that_several_parts_take_travels_once() -> None:
    """The parts find theirs by the index, in their own order, a row that is asked for twice included."""
    batch, rng = np.arange(40.0).reshape(20, 2), np.random.default_rng(0)
    for _ in range(50):
        wanted = [rng.integers(0, 20, size=rng.integers(1, 9)) for _ in range(3)]
        distinct, index = index_of(wanted)
        assert len(distinct) == len({int(row) for rows in wanted for row in rows})
        request = request_of([{"rows": len(rows)} for rows in wanted], index, batch[distinct])
        parts = parts_of_untrusted(request)
        for wanted_rows, (_, _, rows) in zip(wanted, parts, strict=True):
            np.testing.assert_array_equal(batch[distinct][rows], batch[wanted_rows])
        pairs = np.concatenate([np.arange(len(index))[own] for _, own, _ in parts])
        np.testing.assert_array_equal(pairs, np.arange(len(index)))


def test_rows_that_lie_together_are_not_copied() -> None:
    """Neither where there is one, nor the last ones."""
    batch = np.zeros((5, 2))
    indices = (int32(1, 2, 3), int32(4), int32(1, 3), int32(2, 1), int32(0, 2, 2), int32(3, 4), int32())
    described = [{"rows": len(index)} for index in indices]
    parts = parts_of_untrusted(request_of(described, np.concatenate(indices), batch))
    for (_, _, rows), is_view in zip(parts, (True, True, False, False, False, True, False), strict=True):
        assert np.shares_memory(batch[rows], batch) == is_view


X = np.zeros((3, 2), np.float32)
PART = {"uid": "ffn.0", "rows": 2}


@pytest.mark.parametrize(
    ("parts", "tensors", "message"),
    [
        (None, (int32(0, 1), X), "parts must be a list of at most 64, got None"),
        ([], (int32(), X), "a request has parts"),
        ([PART], (), "the index as its first tensor"),
        ([PART] * (MAX_PARTS + 1), (int32(0, 1), X), "parts must be a list of at most 64"),
        ([PART, 7], (int32(0, 1), X), "part 1 must be a map, got 7"),
        ([{"uid": "ffn.0"}], (int32(0, 1), X), "rows of part 0 must be an integer from 0 to .* got None"),
        ([{"rows": -1}], (int32(0, 1), X), "rows of part 0 must be an integer"),
        ([{"rows": True}], (int32(0), X), "rows of part 0 must be an integer"),
        ([PART], (int32(0, 1, 2), X), r"the index must be int32\[2\], .* got int32\[3\]"),
        ([PART, PART], (int32(0, 1, 2), X), r"the index must be int32\[4\]"),
        ([PART], (np.array([0, 1]), X), "got int64"),
        ([PART], (int32(0, 1).reshape(1, 2), X), r"got int32\[1, 2\]"),
        ([PART], (int32(0, 3), X), "within the 3 rows of the inputs"),
        ([PART], (int32(0, -1), X), "within the 3 rows"),
        ([PART], (int32(0, 1),), "within the 0 rows"),
        ([PART], (int32(0, 1), np.array(1.0)), "within the 0 rows"),
    ],
)
def test_requests_that_do_not_fit(parts: Any, tensors: Any, message: str) -> None:
    """Each is refused for its one fault, and says it."""
    parts_of_untrusted(request_of([PART], int32(0, 1), X))
    with pytest.raises(RemoteProtocolError, match=message):
        parts_of_untrusted(request_of(parts, *tensors))


def test_an_answer_says_what_became_of_each_part() -> None:
    """Each part that the answer speaks of comes back as it was; errors keep their kind and their words."""
    first, last = np.array([[1.0], [2.0]]), np.array([[3.0]])
    errors = {1: CallRefused("no \ud800"), 2: PeerBusy("full"), 3: RemoteFailure("x" * 2000)}
    outcomes: list[Any] = [(4, Answer(updates=7, tensors=(last, last[:, 0]))), *errors.items()]
    outcomes.append((0, Answer(updates=None, tensors=(first, first[:, 0]))))
    answer = answer_of(outcomes, Compression.NONE)
    got = dict(outcomes_of_untrusted(answer, {0: 2, 1: 5, 2: 1, 3: 1, 4: 1, 9: 1}))
    assert list(got) == [4, 1, 2, 3, 0]
    for number, tensor in ((0, first), (4, last)):
        outcome = got[number]
        assert isinstance(outcome, Answer)
        np.testing.assert_array_equal(outcome.tensors[0], tensor)
        np.testing.assert_array_equal(outcome.tensors[1], tensor[:, 0])
    assert (got[4].updates, got[0].updates) == (7, None)  # type: ignore[union-attr]
    assert {number: type(got[number]) for number in errors} == {number: type(error) for number, error in errors.items()}
    assert [str(got[number]) for number in errors] == ["no ?", "full", "x" * 1000]


OK = {"part": 0, "updates": 1}


@pytest.mark.parametrize(
    ("answers", "tensors", "message"),
    [
        (None, (X,), "answers must be a list"),
        ([7], (X,), "expected the number of a part that waits for its answer, got None"),
        ([{"part": 5, "updates": 1}], (X,), "got 5"),
        ([{"part": True, "updates": 1}], (X,), "got True"),
        ([OK, OK], (np.zeros((6, 2)),), "got 0"),
        ([OK], (X[:2],), r"expected 3 rows in each tensor of an answer, got the shapes \[2, 2\]"),
        ([OK], (X, np.array(1.0)), r"got the shapes \[3, 2\], \[\]"),
        ([], (X,), "expected 0 rows"),
        ([{"part": 0, "updates": -1}], (X,), "updates must be an integer from 0"),
        ([{"part": 0, "error": "asleep", "message": ""}], (), "error must be one of busy, failure, refused"),
        ([{"part": 0, "error": "busy"}], (), "message must be a string"),
    ],
)
def test_answers_that_do_not_fit(answers: Any, tensors: Any, message: str) -> None:
    """Each is refused for its one fault."""
    expected = {0: 3, 1: 1}
    outcomes_of_untrusted(Reply(body={"answers": [OK]}, tensors=(X,)), expected)
    with pytest.raises(RemoteProtocolError, match=message):
        outcomes_of_untrusted(Reply(body={"answers": answers}, tensors=tensors), expected)
    assert expected == {0: 3, 1: 1}
