"""Butterfly all-reduce among members that are late, break the rules, or fail, in virtual time."""

import enum
import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio

from dmoe_net.averaging.reduction.all_reduce import AllReduceResult
from dmoe_net.averaging.reduction.partition import ChunkName
from dmoe_net.errors import CallRefused, DialFailed, PeerBusy
from dmoe_net.types import Array
from tests.net.all_reduce_swarm import CONFIG, GROUP, METHOD, T, Watched, assert_complete, mean, swarm, vectors
from tests.net.sim_hosts import in_simulation, peer


@in_simulation
async def test_who_hears_of_the_group_later() -> None:
    """The others' calls wait for it."""
    async with swarm(3) as peers:
        values = vectors(3)
        assert_complete(await peers.run(values, delays_s={1: 0.9 * T}), mean(values))


@in_simulation
async def test_who_comes_too_late_is_left_out() -> None:
    """The others have the mean of themselves, but for its part; it keeps its own values, and does not hang."""
    async with swarm(3) as peers:
        values = vectors(3)
        results = await peers.run(values, delays_s={1: 10 * T})
        assert trio.current_time() < 12 * T
        (start, end), size = peers.part(1), 1234
        for index in (0, 2):
            assert results[index].lost_reducers == results[index].lost_senders == (peer("host1"),)
            assert results[index].received == pytest.approx(1 - (end - start) / size)
            assert not results[index].complete
            np.testing.assert_array_equal(results[index].average[start:end], values[index][start:end])
            np.testing.assert_allclose(
                results[index].average[:start], mean([values[0], values[2]])[:start], rtol=1e-5, atol=1e-6
            )
        assert np.array_equal(results[1].average, values[1])
        assert not results[1].complete


@in_simulation
async def test_calls_for_groups_that_never_come() -> None:
    """They wait for a time and are refused; of each peer only so many may wait; those for a group that is over do not
    wait."""
    async with swarm(2) as peers:
        errors: list[Exception] = []

        async def call(group_id: bytes) -> None:
            body = ChunkName(group_id=group_id, size=1234, start=0, wish=1).body()
            target = peers.group.members[1].contact
            try:
                await peers.callers[0].call(target, METHOD, body, [np.zeros(100, np.float32)], timeout_s=60.0)
            except (CallRefused, PeerBusy) as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(call, bytes([number]) * 16)
            await trio.sleep(0.5)
            assert [type(error) for error in errors] == [PeerBusy] * 4
            await trio.sleep(T)
            assert [type(error) for error in errors[4:]] == [CallRefused] * 16
        await peers.run(vectors(2))
        started = trio.current_time()
        await call(GROUP)
        assert "does not average" in str(errors[-1])
        assert trio.current_time() - started < 0.5


@pytest.mark.parametrize(
    ("caller", "body", "tensor", "reason"),
    [
        (3, {}, np.zeros(100, np.float32), "not in this group"),
        (0, {"size": 1235}, np.zeros(100, np.float32), "averages 1234 numbers"),
        (0, {"start": 1}, np.zeros(100, np.float32), "no chunk begins"),
        (0, {"group": b"short"}, np.zeros(100, np.float32), "group id"),
        (0, {}, np.zeros(99, np.float32), "float32 tensor of 100"),
        (0, {}, np.full(100, np.nan, np.float32), "not finite"),
    ],
)
def test_bad_calls_are_refused(caller: int, body: dict[str, Any], tensor: Array, reason: str) -> None:
    """The caller learns why, and the others average on: with the sender unless it has broken the rules."""

    @in_simulation
    async def test() -> None:
        async with swarm(4) as peers:
            peers.group = replace(peers.group, members=peers.group.members[:3], side=3)
            values = vectors(3)
            start, _ = peers.part(1)

            async def bad_call() -> None:
                name = ChunkName(group_id=GROUP, size=1234, start=start, wish=1).body()
                target = peers.group.members[1].contact
                with pytest.raises(CallRefused, match=reason):
                    await peers.callers[caller].call(target, METHOD, {**name, **body}, [tensor], timeout_s=60.0)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(bad_call)
                results = await peers.run(values, delays_s={0: 0.2})
            if "float32" in reason or "finite" in reason:
                assert results[1].lost_senders == (peer("host0"),)
                assert results[0].lost_reducers == (peer("host1"),)
                start, end = peers.part(1)
                others = mean(values[1:])[start:end]
                np.testing.assert_allclose(results[2].average[start:end], others, rtol=1e-5, atol=1e-6)
            else:
                assert_complete(results, mean(values))

    test()


@in_simulation
async def test_a_cancelled_member_costs_its_part_and_no_time() -> None:
    """The others learn of it at once."""
    async with swarm(4) as peers:
        values = vectors(4, 8000)
        results: list[AllReduceResult] = []

        async def soon_over() -> None:
            with trio.move_on_after(0.3):  # some chunks are back then, and not all
                await peers.all_reduces[0].run(peers.group, values[0], size=8000)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(soon_over)
            results = await peers.run(values, delays_s={0: None})
        assert trio.current_time() < 0.5 + T + 2.0
        for result in results:
            assert result.lost_reducers == (peer("host0"),)
            assert 0.75 <= result.received < 1


@in_simulation
async def test_dials_that_fail_at_first_and_busy_reducers_are_tried_again() -> None:
    """When a group begins all dial each other; a call that never arrived can be placed again."""
    async with swarm(3) as peers:
        errors = iter([DialFailed("one"), PeerBusy("two"), DialFailed("three")])

        async def fail() -> None:
            for error in errors:
                raise error

        peers.callers[1].before_call = fail
        values = vectors(3)
        assert_complete(await peers.run(values), mean(values))


@in_simulation
async def test_the_whole_ends_in_time() -> None:
    """One that sends each chunk just before the others lose patience does not hold them up for ever."""
    config = replace(CONFIG, timeout_s=3 * T)
    async with swarm(3, config=config) as peers:
        peers.callers[0].before_call = partial(trio.sleep, 0.8 * T)
        results = await peers.run(vectors(3, 50_000))
        assert trio.current_time() <= 3 * T + 0.1
        assert all(0 < result.received < 1 for result in results)
        assert not any(result.complete for result in results)


class Fault(enum.Enum):
    """Faults of a member."""

    FAIL_BEFORE = enum.auto()
    SLOW_SENDING = enum.auto()
    FAIL_SENDING = enum.auto()
    FAIL_REDUCING = enum.auto()
    CANCEL = enum.auto()


def install(fault: Fault, caller: Watched) -> None:
    """Make a member do that; `FAIL_BEFORE` and `CANCEL` are up to whoever runs it."""
    num_calls = itertools.count()

    async def stop_after_five() -> None:
        if next(num_calls) >= 5:
            await trio.sleep_forever()

    match fault:
        case Fault.SLOW_SENDING:
            caller.before_call = partial(trio.sleep, 1.5 * T)
        case Fault.FAIL_SENDING:
            caller.before_call = stop_after_five
        case Fault.FAIL_REDUCING:
            caller.before_serving = stop_after_five
        case Fault.FAIL_BEFORE | Fault.CANCEL:
            pass


@pytest.mark.parametrize("faults", [*itertools.combinations_with_replacement(Fault, 2)], ids=str)
def test_every_pair_of_faults(faults: tuple[Fault, Fault]) -> None:
    """Five members, two of them faulty: the healthy ones end in time, and on more than half of the coordinates have the
    mean of all of themselves, and of the faulty as far as they contributed."""

    @in_simulation
    async def test() -> None:
        async with swarm(5) as peers, trio.open_nursery() as nursery:
            values = vectors(5, 5000)

            async def run(index: int, fault: Fault) -> None:
                install(fault, peers.callers[index])
                with trio.move_on_after(0.3 if fault is Fault.CANCEL else 1000.0):
                    if fault is not Fault.FAIL_BEFORE:
                        await peers.all_reduces[index].run(peers.group, values[index], size=5000)

            for index, fault in enumerate(faults):
                nursery.start_soon(run, index, fault)
            results = await peers.run(values, delays_s={0: None, 1: None})
            # Two senders may fail one after the other, and then a reducer that had answered until then.
            assert trio.current_time() <= 4 * T + 1.0
            nursery.cancel_scope.cancel()
        wanted = [
            mean([*values[2:], *some]) for count in range(3) for some in itertools.combinations(values[:2], count)
        ]
        for result in results:
            is_good = np.any([np.isclose(result.average, each, rtol=1e-4, atol=1e-6) for each in wanted], axis=0)
            assert is_good.mean() > 0.5
            assert result.received > 0.5
            assert not result.complete
            assert set(result.lost_reducers + result.lost_senders) <= {peer("host0"), peer("host1")}

    test()
