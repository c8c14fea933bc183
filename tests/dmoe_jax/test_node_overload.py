"""A node that is asked for more than it can do: who is turned away, and what the others wait."""

import pytest
import trio

from dmoe_jax.machine.device import CostModel
from dmoe_jax.node.config import NodeConfig
from dmoe_net.errors import PeerBusy
from tests.dmoe_jax.node_rig import open_rig, rows

CONFIG = NodeConfig(max_batch_rows=4, max_wait_s=2.0)
TENTH = CostModel(row_s=0.1)


@pytest.mark.slow
async def test_a_flood_of_backward_calls_leaves_room_for_forward_ones(autojump_clock: trio.testing.MockClock) -> None:
    """Fifty callers ask for fifty times of what the node can do. A forward call is always taken, and no call waits for
    longer than the bound and the batch that runs."""
    async with open_rig(cost=TENTH, config=CONFIG) as rig:
        hints: list[float | None] = []
        await rig.forward("ffn.2.3", rows(2))  # now it is known how long they take
        await rig.backward("ffn.0.1", b"first", rows(2), 0 * rows(2))

        async def flood(caller: int) -> None:
            for number in range(10**6):
                try:
                    await rig.backward("ffn.0.1", b"%d %d" % (caller, number), rows(2), 0 * rows(2))
                except PeerBusy as busy:
                    hints.append(busy.retry_after_s)
                    await trio.sleep(0.05)

        waited: list[float] = []
        async with trio.open_nursery() as nursery:
            for caller in range(50):
                nursery.start_soon(flood, caller)
            await trio.sleep(5.0)
            accepted_before = rig.node.recorder.queue_s["backward"].count
            for _ in range(20):
                since = trio.current_time()
                await rig.forward("ffn.2.3", rows(2), timeout_s=60.0)
                waited.append(trio.current_time() - since)
            nursery.cancel_scope.cancel()
        batch_s = 0.4
        assert max(waited) <= CONFIG.max_wait_s + 2 * batch_s
        assert rig.node.recorder.queue_s["backward"].count > accepted_before
        assert rig.node.status()["busy"] > 100
        late = [hint for hint in hints[-100:] if hint is not None]
        assert len(late) == 100
        assert all(0.3 < hint <= CONFIG.max_wait_s / 2 for hint in late)


async def test_what_is_accepted_is_begun_in_time(autojump_clock: trio.testing.MockClock) -> None:
    """Whoever obeys the hint comes back when about half of the queue is done."""
    async with open_rig(cost=TENTH, config=CONFIG) as rig:
        await rig.forward("ffn.0.1", rows(4))
        times: list[float] = []

        async def ask() -> None:
            while True:
                since = trio.current_time()
                try:
                    await rig.forward("ffn.0.1", rows(4), timeout_s=60.0)
                except PeerBusy as busy:
                    await trio.sleep(busy.retry_after_s or 60.0)
                else:
                    times.append(trio.current_time() - since)
                    return

        async with trio.open_nursery() as nursery:
            for _ in range(30):
                nursery.start_soon(ask)
        assert len(times) == 30
        assert max(times) < CONFIG.max_wait_s + 1.0
        # No batch waited while callers were sent away: 31 batches of 0.4 s, and little more.
        assert trio.current_time() < 31 * 0.4 + 1.5


@pytest.mark.parametrize(("head_start_s", "done"), [(0.1, ["forward"] + ["backward"] * 4), (0.0, None)])
async def test_forward_calls_go_ahead_of_backward_ones(
    head_start_s: float, done: list[str] | None, autojump_clock: trio.testing.MockClock
) -> None:
    """With a head start, a forward call goes ahead of waiting backward calls to its expert, which become one batch."""
    config = NodeConfig(max_batch_rows=4, forward_head_start_s=head_start_s)
    async with open_rig(cost=TENTH, config=config) as rig:
        ended: list[str] = []

        async def ask(kind: str, number: int) -> None:
            await trio.sleep(0.01 * number)
            if kind == "forward":
                await rig.forward("ffn.0.1", rows(1), timeout_s=60.0)
            else:
                await rig.backward("ffn.0.1", b"%d" % number, rows(1), 0 * rows(1))
            ended.append(kind)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.forward, "ffn.2.3", rows(4))
            for number, kind in enumerate(["backward", "backward", "forward", "backward", "backward"], start=1):
                nursery.start_soon(ask, kind, number)
        assert ended == (done or ["backward"] * 4 + ["forward"])


@pytest.mark.parametrize("head_start_s", [-0.1, float("inf"), float("nan")])
def test_a_head_start_is_a_number_of_seconds(head_start_s: float) -> None:
    """Without an end, backward calls could wait for ever."""
    with pytest.raises(ValueError, match="forward_head_start_s must be 0 or a number of seconds"):
        NodeConfig(forward_head_start_s=head_start_s)
