"""The node's queue: oldest group first, whole batches, bounded; retries and quorums counted right."""

from typing import Any

import numpy as np
import pytest

from dmoe_jax.mixture.expert_calls import Answer
from dmoe_jax.mixture.fan_out import Quorum
from dmoe_jax.node.queue import BatchQueue, Job, QueueFull, RememberedJobs


def asked(
    uid: str, rows: int, name: str = "x", kind: str = "forward", *, expected_s: float = 0.0, arrived_at: float = 0.0
) -> Job:
    """A job of a name."""
    array = np.zeros((rows, 1))
    grads = array if kind == "backward" else None
    times = {"expected_s": expected_s, "arrived_at": arrived_at}
    return Job(uid=uid, inputs=(array,), output_grads=grads, replay_key=name.encode(), **times)


def queue_of(*waiting: Job, max_batch_rows: int, max_waiting_rows: int = 64, **bounds: Any) -> BatchQueue:
    queue = BatchQueue(max_batch_rows=max_batch_rows, max_waiting_rows=max_waiting_rows, **bounds)
    for job in waiting:
        queue.submit(job)
    return queue


def names(batch: tuple[Job, ...]) -> list[str]:
    return [(job.replay_key or b"").decode() for job in batch]


def test_oldest_group_first_and_together() -> None:
    """The group whose head came first is served first, with everything of its kind that fits."""
    waiting = [("a", 2, "a1"), ("b", 2, "b1"), ("a", 3, "a2"), ("b", 2, "b2"), ("a", 4, "a3")]
    queue = queue_of(*(asked(*each) for each in waiting), max_batch_rows=8)
    # a1 + a2 = 5 rows; a3 would make 9 > 8. Then b's head (arrived second) precedes a3 (arrived last).
    assert [names(queue.take()) for _ in range(4)] == [["a1", "a2"], ["b1", "b2"], ["a3"], []]
    assert queue.waiting_rows == 0


def test_a_request_never_overtakes_an_older_one_of_its_group() -> None:
    """A small request behind one that does not fit waits, so that no request starves."""
    queue = queue_of(asked("a", 3, "first"), asked("a", 3, "second"), asked("a", 1, "small"), max_batch_rows=4)
    assert [names(queue.take()) for _ in range(2)] == [["first"], ["second", "small"]]


def asked_at(arrived_at: float, kind: str, uid: str, name: str) -> Job:
    return asked(uid, 1, name, kind, arrived_at=arrived_at)


def test_a_kind_with_a_head_start_goes_ahead_of_what_came_little_before_it() -> None:
    """Its requests count as if they had come earlier by so much; what is older still is not overtaken."""
    backward = [asked_at(0.0, "backward", "a", "b1"), asked_at(1.5, "backward", "a", "b2")]
    forward = [asked_at(1.9, "forward", "a", "f1"), asked_at(2.1, "forward", "b", "f2")]
    queue = queue_of(*backward, *forward, max_batch_rows=1, head_starts={"forward": 2.0})
    assert [names(queue.take()) for _ in range(5)] == [["f1"], ["b1"], ["f2"], ["b2"], []]


def test_a_head_start_is_nothing_to_what_may_not_run() -> None:
    """An expert that is busy holds nobody up."""
    waiting = [asked_at(0.0, "backward", "a", "b1"), asked_at(0.1, "forward", "b", "f1")]
    queue = queue_of(*waiting, max_batch_rows=8, head_starts={"forward": 10.0})
    assert names(queue.take(may_run=lambda key: key[:2] == ("a", "backward"))) == ["b1"]
    assert names(queue.take(may_run=lambda key: False)) == []
    assert names(queue.take()) == ["f1"]


def test_a_limit_of_the_moment_cuts_batches_but_never_a_request() -> None:
    """Batches stay within what is compiled for their key; a single larger request is taken alone."""
    waiting = [("a", 2, "a1"), ("a", 1, "a2"), ("a", 5, "a3"), ("a", 1, "a4"), ("b", 3, "b1"), ("b", 3, "b2")]
    queue = queue_of(*(asked(*each) for each in waiting), max_batch_rows=8)
    limit = {"a": 3, "b": 100}
    assert queue.waits(("a", "forward", False))
    taken = [names(queue.take(lambda key: limit[key[0]])) for _ in range(4)]
    assert taken == [["a1", "a2"], ["a3"], ["a4"], ["b1", "b2"]]
    assert not queue.waits(("a", "forward", False))


def test_full_queue_turns_away_and_recovers() -> None:
    """Rows beyond the bound are refused at once; taking or withdrawing makes room."""
    first, second = asked("a", 4, "first"), asked("a", 2, "second", kind="backward")
    third = asked("b", 1, "third")
    queue = queue_of(first, second, max_batch_rows=4, max_waiting_rows=6)
    with pytest.raises(QueueFull, match="6 rows wait already, at most 6 may"):
        queue.submit(third)
    assert queue.withdraw(first)
    queue.submit(third)
    assert not queue.withdraw(first)
    assert [names(queue.take()) for _ in range(2)] == [["second"], ["third"]]


def test_one_kind_of_work_leaves_room_for_the_other() -> None:
    """Three quarters of the rows are for one kind, but always a whole batch."""
    backward = [asked("a", 2, kind="backward") for _ in range(3)]
    queue = queue_of(*backward, max_batch_rows=4, max_waiting_rows=8)
    with pytest.raises(QueueFull, match="6 rows of backward requests wait already, at most 6 may"):
        queue.submit(asked("b", 1, kind="backward"))
    queue.submit(asked("a", 2))
    with pytest.raises(QueueFull, match="8 rows wait already, at most 8 may"):
        queue.submit(asked("a", 1))
    queue_of(asked("a", 4), max_batch_rows=4, max_waiting_rows=4)


def test_the_time_that_what_waits_will_take_is_bounded() -> None:
    """Whoever would come behind more than that is turned away, and told how much waits; a single request never is."""
    queue = queue_of(asked("a", 1, expected_s=50.0), max_batch_rows=4, max_wait_s=8.0)
    queue.take()
    for _ in range(3):
        queue.submit(asked("a", 1, expected_s=2.0, kind="backward"))
    with pytest.raises(QueueFull, match="6 s of work of backward requests wait already, at most 6 s may") as full:
        queue.submit(asked("b", 1, expected_s=0.5, kind="backward"))
    assert full.value.waiting_s == 6.0
    queue.submit(asked("a", 1, expected_s=2.0))
    with pytest.raises(QueueFull, match="8 s of work wait already, at most 8 s may") as full:
        queue.submit(asked("a", 1, expected_s=0.1))
    assert full.value.waiting_s == 8.0


@pytest.mark.parametrize("rows", [0, 5])
def test_impossible_requests_are_refused(rows: int) -> None:
    """A request that no batch could hold is a mistake, not a full queue."""
    with pytest.raises(ValueError, match=f"1 to 4 rows in one request, got {rows}"):
        queue_of(asked("a", rows), max_batch_rows=4)


def backward_job(nbytes: int) -> Job:
    return Job(uid="a.0", inputs=(np.zeros((1, nbytes), np.uint8),), output_grads=np.zeros(1), arrived_at=0.0)


def test_the_oldest_jobs_are_forgotten() -> None:
    """Entries and bytes are bounded; the newest entry always stays."""
    remembered = RememberedJobs(max_entries=2, max_bytes=100)
    jobs = [backward_job(nbytes) for nbytes in (10, 10, 10, 1000)]

    def known() -> list[int]:
        return [number for number in range(4) if remembered.find(bytes([number])) is jobs[number]]

    for number, found in enumerate(([0], [0, 1], [1, 2], [3])):
        remembered.remember(bytes([number]), jobs[number])
        assert known() == found
        jobs[number].answer((), 1)
    remembered.forget(b"unknown")
    remembered.forget(bytes([3]))
    assert known() == []


def test_what_is_remembered_keeps_its_own_rows_alone() -> None:
    """A part of a large batch is copied out of it; what is nearly all of its batch is not, and nothing else is."""
    batch = np.arange(40, dtype=np.float32).reshape(10, 4)
    for replay_key, rows, is_copied in ((b"key", 3, True), (b"key", 9, False), (None, 3, False)):
        job = Job(uid="a.0", inputs=(batch,), output_grads=batch, replay_key=replay_key, arrived_at=0.0)
        job.answer((batch[:rows],), 1)
        assert isinstance(job.outcome, Answer)
        (result,) = job.outcome.tensors
        assert np.shares_memory(result, batch) != is_copied
        np.testing.assert_array_equal(result, batch[:rows])
        assert job.nbytes == 0


def test_jobs_that_have_not_ended_are_remembered() -> None:
    """However much comes after them: a retry would train a second time. One that has ended since is the oldest."""
    remembered = RememberedJobs(max_entries=2, max_bytes=100)
    jobs = [backward_job(60) for _ in range(4)]

    def known() -> list[int]:
        return [number for number in range(4) if remembered.find(bytes([number])) is jobs[number]]

    for number, job in enumerate(jobs[:3]):
        remembered.remember(bytes([number]), job)
        if number:
            job.answer((), 1)
    assert known() == [0, 2]
    jobs[0].answer((), 1)
    remembered.remember(bytes([3]), jobs[3])
    assert known() == [3]


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
