"""Waiting a moment before a long batch, for those who shared the last one."""

import pytest
import trio
import trio.testing

from dmoe_jax.machine.device import CostModel
from dmoe_jax.node.config import NodeConfig
from tests.dmoe_jax.node_rig import open_rig, rows
from tests.dmoe_jax.test_batching import asked, queue_of


def test_only_what_would_be_one_batch_may_wait() -> None:
    """Requests may wait if they would be one batch; a device that has something else to do does that."""
    assert queue_of(max_batch_rows=4).only_batch() == ()
    one = asked("a", 1, "a1"), asked("a", 3, "a2")
    assert queue_of(*one, max_batch_rows=4).only_batch() == one
    assert queue_of(*one, max_batch_rows=3).only_batch() == ()
    assert queue_of(*one, asked("b", 1), max_batch_rows=8).only_batch() == ()


async def mean_rows(cost_s: float, *, callers: int = 8, delay_s: float = 0.02, away_s: float = 0.002) -> float:
    """Mean rows of a batch; callers of one row, who began at different times, come back after 10 ms on the way and
    `away_s` seconds."""
    config = NodeConfig(max_batch_rows=8, max_queue_delay_s=delay_s)
    async with open_rig(cost=CostModel(call_s=cost_s), config=config) as rig:
        calls, ends_at = 0, trio.current_time() + 100 * cost_s

        async def call(number: int) -> None:
            nonlocal calls
            await trio.sleep(cost_s * number / 6)
            while trio.current_time() < ends_at:
                calls += 1
                own = b"%d" % calls
                await rig.forward("ffn.0.1", rows(1), timeout_s=60.0)
                await rig.backward("ffn.0.1", own, rows(1), 0 * rows(1))
                await trio.sleep(away_s)

        async with trio.open_nursery() as nursery:
            for number in range(callers):
                nursery.start_soon(call, number)
        status = rig.node.status()
        return status["rows"] / status["batches"]


async def test_callers_of_one_large_expert_share_its_steps(autojump_clock: trio.testing.MockClock) -> None:
    """Those who are back in a moment are soon served together, wherever they began; not where nobody waits for them,
    nor before a batch that is not much longer than the wait."""
    assert await mean_rows(0.08) > 7.0
    assert await mean_rows(0.08, delay_s=0.0) < 6.0
    assert await mean_rows(0.079) < 6.0


async def test_who_calls_alone_does_not_wait(autojump_clock: trio.testing.MockClock) -> None:
    """Ten forward and ten backward calls of a tenth of a second take two seconds and their way."""
    async with open_rig(cost=CostModel(call_s=0.1), config=NodeConfig(max_queue_delay_s=0.02)) as rig:
        started = trio.current_time()
        for number in range(10):
            await rig.forward("ffn.0.1", rows(1))
            await rig.backward("ffn.0.1", b"%d" % number, rows(1), 0 * rows(1))
        assert trio.current_time() - started == pytest.approx(20 * 0.11)


async def test_it_waits_no_longer_than_the_delay(autojump_clock: trio.testing.MockClock) -> None:
    """A caller that does not come back in time delays one batch; the next, for one caller alone, is not delayed."""
    async with open_rig(cost=CostModel(call_s=0.1), config=NodeConfig(max_queue_delay_s=0.02)) as rig:
        await rig.forward("ffn.0.1", rows(1))  # how long one row takes is known from now on
        took = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.forward, "ffn.2.3", rows(1))
            await trio.sleep(0.001)
            nursery.start_soon(rig.forward, "ffn.0.1", rows(1))
            nursery.start_soon(rig.forward, "ffn.0.1", rows(1))
        for _ in range(2):
            started = trio.current_time()
            await rig.forward("ffn.0.1", rows(1))
            took.append(trio.current_time() - started)
        assert took == pytest.approx([0.01 + 0.01 + 0.1, 0.11])
