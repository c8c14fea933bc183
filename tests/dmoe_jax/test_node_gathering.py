"""Waiting a moment before a long batch: for whom, for how long, and until when it is given up."""

import pytest
import trio
import trio.testing

from dmoe_jax.device import CostModel
from dmoe_jax.node.batching import BatchQueue
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.gathering import Gathering
from tests.dmoe_jax.node_rig import open_rig, rows
from tests.dmoe_jax.test_batching import Asked, queue_of

BATCH_S = 1.0


class Waiting:
    """What a device is about to compute, and who comes meanwhile."""

    def __init__(self) -> None:
        self.rows = 1
        self.gathering = Gathering(lambda: self.rows)

    async def comes(self, after_s: float) -> None:
        await trio.sleep(after_s)
        self.rows += 1
        self.gathering.has_arrived("ffn.0")

    async def waited(self, *comes_after: float, expected_s: float = BATCH_S, rows: int = 1) -> float:
        """Seconds that a batch of so many rows waits, while requests come after so many."""
        self.rows = rows
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for after_s in comes_after:
                nursery.start_soon(self.comes, after_s)
            await self.gathering.wait("ffn.0", expected_s)
            waited = trio.current_time() - began
        return waited


async def test_it_waits_for_those_who_were_answered(autojump_clock: trio.testing.MockClock) -> None:
    """Until all have come again, or for a quarter of the batch; not where nobody was answered by this expert."""
    device = Waiting()
    assert await device.waited() == 0.0
    device.gathering.have_answered(["ffn.1"])
    assert await device.waited() == 0.0
    device.gathering.have_answered(["ffn.0"] * 2)
    assert await device.waited(0.1, 0.2) == pytest.approx(0.2)
    assert await device.waited() == 0.0
    device.gathering.have_answered(["ffn.0"] * 2)
    assert await device.waited(0.1, 5.0) == pytest.approx(0.25)


async def test_what_is_short_or_unknown_does_not_wait(autojump_clock: trio.testing.MockClock) -> None:
    """Nor does what begins late anyhow: the quarter counts from the last answer."""
    device = Waiting()
    device.gathering.have_answered(["ffn.0"] * 2)
    assert await device.waited(expected_s=1e-3) == 0.0
    assert await device.waited(expected_s=float("inf")) == 0.0
    await trio.sleep(0.2)
    assert await device.waited() == pytest.approx(0.05)
    assert await device.waited() == 0.0


async def test_waiting_in_vain_is_given_up_but_for_a_trial(autojump_clock: trio.testing.MockClock) -> None:
    """Trainers that do not come back in time delay a few batches, then one in thirty-two; all when they do again."""
    device = Waiting()

    async def waits() -> bool:
        device.gathering.have_answered(["ffn.0"])
        return await device.waited() > 0.0

    first = [await waits() for _ in range(10)]
    assert first[0]
    assert not first[-1]
    later = [await waits() for _ in range(320)]
    assert sum(later) == 10
    while not await waits():
        pass
    for _ in range(200):
        device.gathering.have_answered(["ffn.0"])
        await device.waited(0.01)
    assert await waits()


async def test_few_rows_are_worth_a_short_wait(autojump_clock: trio.testing.MockClock) -> None:
    """One more row beside seven pays for a twentieth of the batch's time, however often, and not for a quarter."""
    device = Waiting()

    async def waits(comes_after: float) -> bool:
        device.gathering.have_answered(["ffn.0"])
        return await device.waited(comes_after, rows=7) > 0.0

    assert all([await waits(0.05) for _ in range(100)])
    assert not all([await waits(0.25) for _ in range(20)])


async def test_it_waits_no_longer_when_another_expert_is_asked(autojump_clock: trio.testing.MockClock) -> None:
    """The device has something else to do then."""
    device = Waiting()
    device.gathering.have_answered(["ffn.0"] * 2)
    async with trio.open_nursery() as nursery:

        async def another() -> None:
            await trio.sleep(0.1)
            device.gathering.has_arrived("ffn.1")

        nursery.start_soon(another)
        assert await device.waited(0.05) == pytest.approx(0.1)


def test_only_what_would_be_one_batch_may_wait() -> None:
    """Where a device has something else to do it does that."""
    empty: BatchQueue[Asked] = BatchQueue(max_batch_rows=4, max_waiting_rows=8)
    assert empty.only_batch() == ()
    one = Asked("a", 1, "a1"), Asked("a", 3, "a2")
    assert queue_of(*one, max_batch_rows=4).only_batch() == one
    assert queue_of(*one, max_batch_rows=3).only_batch() == ()
    assert queue_of(*one, Asked("b", 1), max_batch_rows=8).only_batch() == ()


async def test_callers_of_one_large_expert_share_its_steps(autojump_clock: trio.testing.MockClock) -> None:
    """Eight callers who are back in a moment, 10 ms of it on the way, are soon served together, wherever they began."""
    async with open_rig(cost=CostModel(call_s=0.08), config=NodeConfig(max_batch_rows=8)) as rig:
        calls = 0

        async def call(number: int) -> None:
            nonlocal calls
            await trio.sleep(0.013 * number)
            while trio.current_time() < 16.0:
                calls += 1
                own = b"%d" % calls
                await rig.forward("ffn.0.1", rows(1), timeout_s=60.0)
                await rig.backward("ffn.0.1", own, rows(1), 0 * rows(1))
                await trio.sleep(0.002)

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(call, number)
        status = rig.node.status()
        assert status["rows"] / status["batches"] > 7.0  # without waiting: 4
