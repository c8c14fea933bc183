"""The node's queue: oldest group first, whole batches; retries and quorums counted right. See `test_node_overload`."""

from typing import Any

import numpy as np
import pytest

from dmoe_jax.mixture.expert_calls import Answer
from dmoe_jax.mixture.fan_out import Quorum
from dmoe_jax.node.queue import BatchQueue, Job, QueueFull, RememberedJobs


def asked(uid: str, rows: int, name: str = "x", kind: str = "forward", **times: float) -> Job:
    """A job of a name."""
    array = np.zeros((rows, 1))
    grads = array if kind == "backward" else None
    return Job(uid=uid, inputs=(array,), output_grads=grads, replay_key=name.encode(), **{"arrived_at": 0.0} | times)


def queue_of(*waiting: Job, max_batch_rows: int, **bounds: Any) -> BatchQueue:
    queue = BatchQueue(max_batch_rows=max_batch_rows, **{"max_waiting_rows": 64} | bounds)
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


def test_a_kind_with_a_head_start_goes_ahead_of_what_came_little_before_it() -> None:
    """Its jobs count as if they had come two seconds earlier, but for those of an expert that is busy."""
    came = [("busy", "f0", "forward", 0.0), ("a", "b1", "backward", 0.0), ("a", "b2", "backward", 1.5)]
    came += [("a", "f1", "forward", 1.9), ("b", "f2", "forward", 2.1)]
    waiting = [asked(uid, 1, name, kind, arrived_at=at) for uid, name, kind, at in came]
    queue = queue_of(*waiting, max_batch_rows=1, head_starts={"forward": 2.0})
    taken = [names(queue.take(may_run=lambda key: key[0] != "busy")) for _ in range(5)]
    assert taken == [["f1"], ["b1"], ["f2"], ["b2"], []]
    assert names(queue.take()) == ["f0"]


@pytest.mark.parametrize(("bound", "most", "much"), [("max_waiting_rows", 4, "rows"), ("max_wait_s", 4.0, "s of work")])
def test_one_kind_of_work_leaves_room_for_the_other(bound: str, most: float, much: str) -> None:
    """A kind may take three quarters of the rows and of the seconds, but always one batch, however long."""
    queue_of(asked("a", 4, kind="backward", expected_s=50.0), max_batch_rows=4, **{bound: most})
    waiting = [asked("a", 2, kind="backward", expected_s=2.0) for _ in range(3)]
    queue = queue_of(*waiting, max_batch_rows=4, **{bound: 2 * most})
    with pytest.raises(QueueFull, match=f"6 {much} of backward requests wait already, at most 6") as full:
        queue.submit(asked("b", 1, kind="backward", expected_s=0.5))
    assert full.value.waiting_s == 6.0
    queue.submit(asked("a", 2, expected_s=2.0))
    with pytest.raises(QueueFull, match=f"8 {much} wait already, at most 8") as full:
        queue.submit(asked("a", 1, expected_s=0.1))
    assert full.value.waiting_s == 8.0


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


def backward_jobs(*sizes: int) -> list[Job]:
    """Jobs of so many bytes."""
    inputs = [np.zeros((1, nbytes), np.uint8) for nbytes in sizes]
    return [Job(uid="a.0", inputs=(each,), output_grads=np.zeros(1), arrived_at=0.0) for each in inputs]


def known(remembered: RememberedJobs, jobs: list[Job]) -> list[int]:
    """Numbers of the jobs that are remembered, which are their names."""
    return [number for number, job in enumerate(jobs) if remembered.find(bytes([number])) is job]


def test_the_oldest_jobs_are_forgotten() -> None:
    """Entries and bytes are bounded; the newest entry always stays."""
    remembered = RememberedJobs(max_entries=2, max_bytes=100)
    jobs = backward_jobs(10, 10, 10, 1000)
    for number, found in enumerate(([0], [0, 1], [1, 2], [3])):
        remembered.remember(bytes([number]), jobs[number])
        assert known(remembered, jobs) == found
        jobs[number].answer((), 1)
    remembered.forget(b"unknown")
    remembered.forget(bytes([3]))
    assert known(remembered, jobs) == []


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
    jobs = backward_jobs(60, 60, 60, 60)
    for number, job in enumerate(jobs[:3]):
        remembered.remember(bytes([number]), job)
        if number:
            job.answer((), 1)
    assert known(remembered, jobs) == [0, 2]
    jobs[0].answer((), 1)
    remembered.remember(bytes([3]), jobs[3])
    assert known(remembered, jobs) == [3]


@pytest.mark.parametrize(
    ("rows", "k_min", "answers", "reached"),
    [
        # Enough answers in all do not help a sample that has none (hivemind counts over the whole batch).
        ([[0, 1], [0], [2]], 1, [True, True, True], [False, False, False, True]),
        # A sample whose calls all failed cannot reach k_min any more, and holds nobody up.
        ([[0, 1], [1]], 2, [True, False], [False, False, True]),
    ],
)
def test_quorum_counts_per_sample(rows: list[list[int]], k_min: int, answers: list[bool], reached: list[bool]) -> None:
    """It is reached once each sample has k_min answers, or no hope of them."""
    quorum = Quorum([np.array(each) for each in rows], num_samples=max(map(max, rows)) + 1, k_min=k_min)
    assert quorum.reached == reached[0]
    for number, answered in enumerate(answers):
        quorum.note(number, answered=answered)
        assert quorum.reached == reached[number + 1]
