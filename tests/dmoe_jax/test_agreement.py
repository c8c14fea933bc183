"""Words that processes of a replica tell each other, and rows that each owns, without any second process."""

import jax
import numpy as np
import pytest
import trio
import trio.lowlevel
from jax.sharding import Mesh

from dmoe_jax.mesh.agreement import StepsAlike, from_each, from_first, of_each, raise_alike, stopped, word_of
from dmoe_jax.mixture.rows import owned_runs
from dmoe_jax.trainer import EndOfData
from dmoe_net.averaging.replica import ReplicaLost
from dmoe_net.errors import NetError, NoQuorum, PeerTimeout

KINDS = (RuntimeError, NoQuorum, NetError)


def raised(*failures: Exception | None, place: int) -> Exception | None:
    """The error that the process in this place raises if these are the errors of all."""
    words = np.stack([word_of(failure, KINDS) for failure in failures])
    try:
        raise_alike(words, KINDS, failures[place])
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize(
    ("failures", "kind", "text"),
    [
        ((None, NoQuorum("no expert")), NoQuorum, "process 1 of this replica: no expert"),
        ((PeerTimeout("too late"), None), NetError, "process 0 of this replica: too late"),
        ((NoQuorum("none"), RuntimeError("far too few")), RuntimeError, "process 1 of this replica: far too few"),
        ((NoQuorum("none"), KeyError("bug")), ReplicaLost, "process 1 of this replica: KeyError: 'bug'"),
        ((None, ReplicaLost("it was stopped")), ReplicaLost, "process 1 of this replica: it was stopped"),
        ((None, NoQuorum("é" * 500)), NoQuorum, "process 1 of this replica: é"),
    ],
)
def test_the_gravest_error_is_raised_in_all(
    failures: tuple[Exception | None, ...], kind: type[Exception], text: str
) -> None:
    """All raise one kind; a process whose own it is raises it as it was, others with its text."""
    at_fault = next(place for place, each in enumerate(failures) if f"process {place} " in text)
    found = [raised(*failures, None, place=place) for place in range(3)]
    assert found[at_fault] is failures[at_fault]
    for place in {0, 1, 2} - {at_fault}:
        assert type(found[place]) is kind
        assert str(found[place]).startswith(text)
    assert raised(None, None, None, place=0) is None


def test_different_batches_are_told() -> None:
    words = np.stack([word_of(None, KINDS, checksum=number) for number in (2**32 - 1, 2**32 - 1, 7)])
    raise_alike(words[:2], KINDS, None)
    with pytest.raises(ValueError, match="have read different batches"):
        raise_alike(words, KINDS, None)


def test_numbers_come_to_all_devices_and_back() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    numbers = np.arange(6, dtype=np.int32).reshape(2, 3)
    np.testing.assert_array_equal(of_each(mesh, from_each(mesh, numbers)), numbers[None])
    np.testing.assert_array_equal(from_first(mesh, numbers), numbers)


async def test_a_batch_is_taken_if_all_have_one() -> None:
    """Its own error is raised as it is, and a loop that was cancelled ends before the next step."""
    alike = StepsAlike(Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model")))
    batch = np.ones(3, np.float32)
    with alike.step():
        assert await alike.agreed(lambda: batch, (EndOfData,)) is batch

    def ended() -> None:
        raise EndOfData("the last was number 3")

    with alike.step(), pytest.raises(EndOfData, match="the last was number 3"):
        await alike.agreed(ended, (EndOfData,))


async def test_a_cancelled_loop_takes_no_batch() -> None:
    alike, taken = StepsAlike(Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))), list[int]()
    assert stopped() is None
    with trio.CancelScope() as scope, alike.step():
        scope.cancel()
        await trio.lowlevel.checkpoint()  # a step is not cancelled halfway
        taken.append(0)
        await alike.agreed(lambda: taken.append(1), ())
    assert scope.cancelled_caught
    assert taken == [0]


@pytest.mark.parametrize(
    "holders",
    [
        {(0, 4): {0}, (4, 8): {1}},
        {(0, 8): {0, 1, 2}},
        {(0, 1): {0, 1}, (1, 2): {0, 1}},
        {(0, 5): {1, 3}, (5, 10): {0, 2}},
    ],
    ids=str,
)
def test_each_row_has_one_owner(holders: dict[tuple[int, int], set[int]]) -> None:
    """Among those that hold it, which own equally many up to one."""
    owners: dict[int, list[int]] = {}
    for process in range(4):
        for start, end in owned_runs(holders, process):
            for row in range(start, end):
                owners.setdefault(row, []).append(process)
    for (start, end), processes in holders.items():
        of_rows = [owners[row] for row in range(start, end)]
        assert all(len(each) == 1 and each[0] in processes for each in of_rows)
        counts = [of_rows.count([process]) for process in processes]
        assert max(counts) - min(counts) <= 1
