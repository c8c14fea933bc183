"""Segments of text: in order, disjoint between trainers, every target once in evaluation."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dmoe_jax.data.batches import SegmentStream, evaluation_segments


def text(num_tokens: int) -> np.ndarray:
    """A text in which every word is its own place."""
    return np.arange(num_tokens, dtype=np.int32)


def test_stream_by_hand() -> None:
    """13 tokens are 4 segments of 3; two rows start at segments 0 and 2 and walk round."""
    stream = SegmentStream(text(13), batch_size=2, seq_len=3)
    first, second, third, fourth, fifth = itertools.islice(stream, 5)
    for batch, tokens, is_first in (
        (first, [[0, 1, 2], [6, 7, 8]], [True, True]),
        (second, [[3, 4, 5], [9, 10, 11]], [False, False]),
        (third, [[6, 7, 8], [0, 1, 2]], [False, True]),
        (fourth, [[9, 10, 11], [3, 4, 5]], [False, False]),
        (fifth, [[0, 1, 2], [6, 7, 8]], [True, False]),
    ):
        np.testing.assert_array_equal(batch.tokens, tokens)
        np.testing.assert_array_equal(batch.targets, np.array(tokens) + 1)
        np.testing.assert_array_equal(batch.is_first, is_first)
    assert first.tokens.dtype == first.targets.dtype == np.int32
    assert first.mask.all()
    assert stream.position == 5


def test_stream_that_resumes_goes_on_where_it_was() -> None:
    """A new stream at the saved position gives the batch that the old one gives next."""
    settings_ = {"batch_size": 2, "seq_len": 5, "shard": 1, "num_shards": 3, "seed": 7}
    old = SegmentStream(text(400), **settings_)
    for _ in range(30):
        next(old)
    new = SegmentStream(text(400), **settings_, position=old.position)
    for ours, theirs in zip(next(new), next(old), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    new.seek(0)
    np.testing.assert_array_equal(next(new).tokens, SegmentStream(text(400), **settings_).at(0).tokens)
    with pytest.raises(ValueError, match="position must not be negative"):
        new.at(-1)


@settings(deadline=None, max_examples=100)
@given(st.integers(2, 300), st.integers(1, 4), st.integers(1, 7), st.integers(1, 4), st.none() | st.integers(0, 5))
def test_stream_properties(num_tokens: int, batch_size: int, seq_len: int, num_shards: int, seed: int | None) -> None:
    """Targets follow tokens, rows continue or restart, shards are disjoint, a full walk reads all once."""
    num_segments = (num_tokens - 1) // seq_len
    assume(num_segments >= batch_size * num_shards)
    options = {"batch_size": batch_size, "seq_len": seq_len, "num_shards": num_shards, "seed": seed}
    streams = [SegmentStream(text(num_tokens), shard=shard, **options) for shard in range(num_shards)]
    rounds = num_segments // (batch_size * num_shards)
    epoch = [next(stream) for stream in streams for _ in range(rounds)]
    read = np.concatenate([batch.tokens.ravel() for batch in epoch])
    assert len(np.unique(read)) == len(read)

    walk = [streams[0].at(position) for position in range(num_segments)]
    for batch in walk:
        np.testing.assert_array_equal(batch.targets, batch.tokens + 1)
    for before, after in itertools.pairwise(walk):
        continues = after.tokens[:, 0] == before.targets[:, -1]
        np.testing.assert_array_equal(continues, ~after.is_first)
        assert (after.tokens[after.is_first, 0] == 0).all()
    for row in range(batch_size):
        seen = np.concatenate([batch.tokens[row] for batch in walk])
        np.testing.assert_array_equal(np.sort(seen), np.arange(num_segments * seq_len))


@pytest.mark.parametrize(
    ("num_tokens", "settings_", "message"),
    [
        (10, {"batch_size": 0}, "batch_size must be a positive integer, got 0"),
        (10, {"shard": 2, "num_shards": 2}, "shard must be from 0 to 1, got 2"),
        (12, {"batch_size": 3, "num_shards": 2}, r"2 x 3 rows, that is 13 tokens, got 12"),
        (12, {"position": -1}, "position must not be negative"),
    ],
)
def test_stream_checks_its_arguments(num_tokens: int, settings_: dict[str, int], message: str) -> None:
    """Wrong counts and texts that are too short are refused with the numbers in the message."""
    with pytest.raises(ValueError, match=message):
        SegmentStream(text(num_tokens), **{"batch_size": 1, "seq_len": 2} | settings_)


def test_evaluation_by_hand() -> None:
    """Eight tokens have seven targets: rows of four and three, in batches of three columns."""
    first, second = evaluation_segments(text(8), batch_size=2, seq_len=3)
    np.testing.assert_array_equal(first.tokens, [[0, 1, 2], [4, 5, 6]])
    np.testing.assert_array_equal(first.targets, [[1, 2, 3], [5, 6, 7]])
    np.testing.assert_array_equal(first.mask, np.ones((2, 3), bool))
    np.testing.assert_array_equal(second.targets, [[4, 4, 4], [7, 7, 7]])
    np.testing.assert_array_equal(second.mask, [[True, False, False], [False, False, False]])
    np.testing.assert_array_equal(first.is_first, [True, True])
    np.testing.assert_array_equal(second.is_first, [False, False])


@settings(deadline=None, max_examples=150)
@given(num_tokens=st.integers(2, 200), batch_size=st.integers(1, 9), seq_len=st.integers(1, 9))
def test_evaluation_covers_each_target_once(num_tokens: int, batch_size: int, seq_len: int) -> None:
    """Under the mask all targets occur once, after their own word."""
    batches = list(evaluation_segments(text(num_tokens), batch_size=batch_size, seq_len=seq_len))
    targets = np.concatenate([batch.targets[batch.mask] for batch in batches])
    np.testing.assert_array_equal(np.sort(targets), np.arange(1, num_tokens))
    for batch in batches:
        assert batch.tokens.shape == batch.targets.shape == batch.mask.shape == (batch_size, seq_len)
        np.testing.assert_array_equal(batch.targets, batch.tokens + 1)
    for before, after in itertools.pairwise(batches):
        counted = after.mask[:, 0]
        np.testing.assert_array_equal(after.tokens[counted, 0], before.targets[counted, -1])


def test_evaluation_checks_its_arguments_at_the_call() -> None:
    """Nothing has to be iterated to learn that the arguments are wrong."""
    with pytest.raises(ValueError, match="seq_len must be a positive integer, got 0"):
        evaluation_segments(text(8), batch_size=2, seq_len=0)
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        evaluation_segments(text(1), batch_size=2, seq_len=3)
