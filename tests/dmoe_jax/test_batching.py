"""The node's queue: oldest group first, whole batches, bounded; retries and quorums counted right."""

import numpy as np
import pytest

from dmoe_jax.mixture.quorum import Quorum
from dmoe_jax.node.batching import BatchQueue, QueueFull
from dmoe_jax.node.replay import ReplayCache


def payloads(batch: tuple) -> list[str]:
    return [ticket.payload for ticket in batch]


def test_oldest_group_first_and_together() -> None:
    """The group whose head came first is served first, with everything of its kind that fits."""
    queue: BatchQueue[str] = BatchQueue(max_batch_rows=8, max_waiting_rows=64)
    for key, rows, name in [("a", 2, "a1"), ("b", 2, "b1"), ("a", 3, "a2"), ("b", 2, "b2"), ("a", 4, "a3")]:
        queue.submit(key, rows, name)
    # a1 + a2 = 5 rows; a3 would make 9 > 8. Then b's head (arrived second) precedes a3 (arrived last).
    assert [payloads(queue.take()) for _ in range(4)] == [["a1", "a2"], ["b1", "b2"], ["a3"], []]
    assert queue.waiting_rows == 0


def test_a_request_never_overtakes_an_older_one_of_its_group() -> None:
    """A small request behind one that does not fit waits, so that no request starves."""
    queue: BatchQueue[str] = BatchQueue(max_batch_rows=4, max_waiting_rows=64)
    for rows, name in [(3, "first"), (3, "second"), (1, "small")]:
        queue.submit("a", rows, name)
    assert [payloads(queue.take()) for _ in range(2)] == [["first"], ["second", "small"]]


def test_a_limit_of_the_moment_cuts_batches_but_never_a_request() -> None:
    """Batches stay within what is compiled for their key; a single larger request is taken alone."""
    queue: BatchQueue[str] = BatchQueue(max_batch_rows=8, max_waiting_rows=64)
    for key, rows, name in [
        ("a", 2, "a1"),
        ("a", 1, "a2"),
        ("a", 5, "a3"),
        ("a", 1, "a4"),
        ("b", 3, "b1"),
        ("b", 3, "b2"),
    ]:
        queue.submit(key, rows, name)
    limit = {"a": 3, "b": 100}
    assert queue.waits("a")
    assert [payloads(queue.take(lambda key: limit[str(key)])) for _ in range(4)] == [
        ["a1", "a2"],
        ["a3"],
        ["a4"],
        ["b1", "b2"],
    ]
    assert not queue.waits("a")


def test_full_queue_turns_away_and_recovers() -> None:
    """Rows beyond the bound are refused at once; taking or withdrawing makes room."""
    queue: BatchQueue[str] = BatchQueue(max_batch_rows=4, max_waiting_rows=6)
    first = queue.submit("a", 4, "first")
    queue.submit("a", 2, "second")
    with pytest.raises(QueueFull, match="6 rows wait already, at most 6 may"):
        queue.submit("b", 1, "third")
    assert queue.withdraw(first)
    queue.submit("b", 1, "third")
    assert not queue.withdraw(first)
    assert [payloads(queue.take()) for _ in range(2)] == [["second"], ["third"]]


@pytest.mark.parametrize("rows", [0, 5])
def test_impossible_requests_are_refused(rows: int) -> None:
    """A request that no batch could hold is a mistake, not a full queue."""
    with pytest.raises(ValueError, match=f"1 to 4 rows in one request, got {rows}"):
        BatchQueue(max_batch_rows=4, max_waiting_rows=6).submit("a", rows, "x")


def test_replay_cache_forgets_the_oldest() -> None:
    """Entries and bytes are bounded; the newest entry always stays."""
    cache: ReplayCache[str] = ReplayCache(max_entries=2, max_bytes=100)
    cache.remember(b"1", "one", nbytes=10)
    cache.remember(b"2", "two", nbytes=10)
    cache.remember(b"3", "three", nbytes=10)
    assert (cache.find(b"1"), cache.find(b"2"), cache.find(b"3")) == (None, "two", "three")
    cache.remember(b"4", "four", nbytes=1000)
    assert (cache.find(b"3"), cache.find(b"4"), len(cache)) == (None, "four", 1)


def test_quorum_counts_per_sample() -> None:
    """Enough answers in all do not help a sample that has none (hivemind counts over the whole batch)."""
    quorum = Quorum([np.array([0, 1]), np.array([0]), np.array([2])], num_samples=3, k_min=1)
    quorum.note(0, answered=True)
    quorum.note(1, answered=True)
    assert not quorum.reached
    quorum.note(2, answered=True)
    assert quorum.reached


def test_quorum_does_not_wait_for_the_hopeless() -> None:
    """A sample whose calls all failed cannot reach k_min any more and holds nobody up."""
    quorum = Quorum([np.array([0, 1]), np.array([1])], num_samples=2, k_min=2)
    assert not quorum.reached  # sample 1 may still get its two answers
    quorum.note(0, answered=True)
    quorum.note(1, answered=False)
    assert quorum.reached
