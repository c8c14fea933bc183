"""Rates and round trips measured on paths, the windows that follow from these, and the memory that bounds windows."""

import pytest
import trio

from dmoe_net.averaging.window import BulkWindow
from dmoe_net.identity import PeerId
from dmoe_net.rpc.bulk import GAIN, MIN_BUDGET_BYTES, BulkTraffic, MemoryBudget, Path, bytes_of
from tests.net.sim_hosts import in_simulation

MIB = 2**20


def test_a_budget_is_taken_and_given_back() -> None:
    """All or none, and the most that was out is remembered."""
    budget = MemoryBudget(3 * MIB)
    assert budget.reserve(2 * MIB)
    assert not budget.reserve(2 * MIB)
    assert budget.reserve(MIB)
    budget.release(3 * MIB)
    assert (budget.used_bytes, budget.peak_bytes) == (0, 3 * MIB)


@pytest.mark.parametrize("nbytes", [-1, 0, MIN_BUDGET_BYTES - 1])
def test_a_budget_too_small_is_refused(nbytes: int) -> None:
    """With the value and the bound."""
    with pytest.raises(ValueError, match=rf"at least {MIN_BUDGET_BYTES} bytes \(1 MiB\), got {nbytes}"):
        MemoryBudget(nbytes)


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (2**20, 2**20),
        ("1048576", 2**20),
        ("256MiB", 256 * MIB),
        ("256 MiB", 256 * MIB),
        (" 1.5GiB", 3 * 2**29),
        ("2KB", 2000),
        ("3MB", 3_000_000),
        ("7B", 7),
        ("0.1KiB", 102),
    ],
)
def test_sizes_as_people_write_them(size: int | str, nbytes: int) -> None:
    """Whole bytes, rounded down."""
    assert bytes_of(size) == nbytes


@pytest.mark.parametrize("size", ["", "MiB", "-1MiB", "1e9", "256 mib", "256MiB/s", "1,5GiB", "inf", True, "9" * 40])
def test_what_is_no_size_is_refused(size: int | str) -> None:
    """With what was given."""
    with pytest.raises(ValueError, match=r"a size is .* got "):
        bytes_of(size)


def test_the_rate_of_a_path_that_waits_for_answers() -> None:
    """Four calls of 1000 bytes leave at 0 s and are answered at 0.5 s: 4000 bytes in half a second."""
    path = Path()
    calls = [path.placed(0.0) for _ in range(4)]
    for call in calls:
        path.answered(call, 1000, 0.5)
    path.note_round_trip(0.5, 0.5)
    assert path.rate == 8000.0
    assert path.under_way_bytes == 4000.0


def test_answers_that_were_held_back_do_not_look_like_a_fast_line() -> None:
    """A line carries a call of 1000 bytes a second. Ten leave in as many seconds, are held back by others, and
    come all at once at 10 s. One that was placed just before and answered just after saw 10,000 bytes in a moment; but
    they had been placed over 9 s, so the line may have carried no more than 1111 a second."""
    path = Path()
    calls = [path.placed(float(second)) for second in range(10)]
    last = path.placed(9.9)
    for call in calls:
        path.answered(call, 1000, 10.0)
    path.answered(last, 1000, 10.1)
    assert path.rate <= 10_000 / 9


def test_rates_and_round_trips_are_those_of_late() -> None:
    """The best of the last one to two periods, 10 s of rates and 60 s of round trips; idle time ends none."""
    path = Path()
    for now, nbytes in ((0.0, 4000), (11.0, 1000), (12.0, 2000)):
        path.answered(path.placed(now), nbytes, now + 1.0)
    assert path.rate == 4000.0
    path.answered(path.placed(500.0), 1000, 501.0)  # the third period: the first is forgotten
    assert path.rate == 2000.0
    for now, seconds in ((0.0, 0.1), (61.0, 0.3), (130.0, 0.2)):
        path.note_round_trip(seconds, now)
    assert path.round_trip_s == 0.2


def test_failed_calls_leave_nothing_behind() -> None:
    """After one that came to nothing, the next measures afresh."""
    path = Path()
    path.placed(0.0)
    path.failed()
    path.answered(path.placed(100.0), 1000, 101.0)
    assert path.rate == 1000.0


def test_paths_are_by_peer_and_only_noted_where_there_was_bulk() -> None:
    """A small call alone makes none."""
    bulk, peer_id = BulkTraffic(), PeerId(bytes(32))
    bulk.note_round_trip(peer_id, 0.1, 0.0)
    assert bulk.path(peer_id).round_trip_s is None
    bulk.note_round_trip(peer_id, 0.1, 0.0)
    assert bulk.path(peer_id).round_trip_s == 0.1


def test_a_window_follows_what_fills_the_line() -> None:
    """At least what it starts with; what goes beyond that is the budget's, and comes back."""
    budget, full = MemoryBudget(10 * MIB), 0.0
    window = BulkWindow(budget, start_bytes=2 * MIB, full_bytes=lambda: full, most_bytes=100 * MIB)
    assert [window.try_take(MIB) for _ in range(3)] == [True, True, False]
    assert budget.used_bytes == 0
    full = 3 * MIB
    assert window.wanted_bytes == int(GAIN * full)
    assert [window.try_take(MIB) for _ in range(7)] == [True] * 6 + [False]  # 8.66 MiB
    assert budget.used_bytes == 6 * MIB
    for _ in range(8):
        window.give_back(MIB)
    assert (window.under_way_bytes, budget.used_bytes) == (0, 0)


def test_a_window_keeps_to_what_the_other_end_allows_and_to_the_budget() -> None:
    """Whichever is less; one call always may leave."""
    budget = MemoryBudget(MIB)
    window = BulkWindow(budget, start_bytes=MIB, full_bytes=lambda: 1e9, most_bytes=4 * MIB)
    assert [window.try_take(MIB) for _ in range(3)] == [True, True, False]
    large = BulkWindow(MemoryBudget(8 * MIB), start_bytes=MIB, full_bytes=lambda: 1e9, most_bytes=4 * MIB)
    assert [large.try_take(MIB) for _ in range(5)] == [True] * 4 + [False]
    huge = BulkWindow(budget, start_bytes=1, full_bytes=lambda: 0.0, most_bytes=1)
    assert huge.try_take(50 * MIB)
    assert not huge.try_take(1)


@in_simulation
async def test_who_waits_for_room_gets_it() -> None:
    """When something comes back."""
    window = BulkWindow(MemoryBudget(), start_bytes=10, full_bytes=lambda: 0.0, most_bytes=10)
    await window.take(10)

    async def give_back_later() -> None:
        await trio.sleep(3.0)
        window.give_back(10)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(give_back_later)
        await window.take(10)
        assert trio.current_time() == 3.0
