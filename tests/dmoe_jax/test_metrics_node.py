"""Counts of an expert node: batches, times on the device, staleness, and how each call ended."""

import time
from contextlib import nullcontext

import jax
import numpy as np
import pytest
import trio
import trio.testing

from dmoe_jax.machine.device import CostModel, DeviceTime, ThreadDevice
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.config import NodeConfig
from dmoe_net.errors import CallRefused, PeerBusy, PeerTimeout
from tests.dmoe_jax.node_rig import EXPERT, SGD, open_rig, rows


async def test_a_thread_device_measures_the_work_and_not_the_wait() -> None:
    """Four calls of 50 ms in turn: each counts its own 50 ms, though the last waits for 150 ms; errors count too."""
    device, spent = ThreadDevice(), [DeviceTime() for _ in range(4)]

    def work(index: int) -> None:
        time.sleep(0.05)
        assert index < 3, "on purpose"

    async def call(index: int) -> None:
        with nullcontext() if index < 3 else pytest.raises(AssertionError, match="on purpose"):
            await device.run(work, index, spent=spent[index])

    async with trio.open_nursery() as nursery:
        for index in range(4):
            nursery.start_soon(call, index)
    assert all(each.seconds >= 0.05 for each in spent)
    assert device.busy_s == pytest.approx(sum(each.seconds for each in spent))
    # In turn: of 200 ms of work by four threads at once each would have waited for the others.
    assert min(each.seconds for each in spent) < 0.15


async def test_a_node_counts_its_batches(autojump_clock: trio.testing.MockClock) -> None:
    """A forward of 2 rows takes 1 s; meanwhile three of 1 row gather, wait, and become one batch of 3 rows."""
    async with open_rig(cost=CostModel(call_s=1.0)) as rig:
        await trio.sleep(5.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.forward, "ffn.0.1", rows(2))
            await trio.sleep(0.1)
            for seed in range(3):
                nursery.start_soon(rig.forward, "ffn.0.1", rows(1, seed=seed))
        recorder, status = rig.node.recorder, rig.node.status()
        assert recorder.calls == {("ffn.0.1", "forward", "ok"): 4}
        batches, queue, device = (
            each["forward"] for each in (recorder.batch_rows, recorder.queue_s, recorder.device_s)
        )
        assert (batches.count, batches.total) == (2, 5)
        assert (device.count, device.total) == (2, 2.0)
        # The first goes at once; 0.9 s of its second are left when the other three arrive.
        assert (queue.count, queue.total) == (4, pytest.approx(3 * 0.9))
        assert status["busy_s"] == 2.0
        assert list(recorder.experts) == [("ffn.0.1", "forward")]
        own = recorder.experts["ffn.0.1", "forward"]
        assert (own.batches, own.rows, own.device_s, own.queue_s) == (2, 5, 2.0, queue.total)
        assert (own.received_bytes, own.sent_bytes) == (5 * 4 * 4, 5 * 4 * 4)  # 4 numbers a row, each way


async def test_what_each_expert_has_done_is_shown(autojump_clock: trio.testing.MockClock) -> None:
    """Two experts, one with a forward call, one with two backward calls of which the second saw an older state."""
    async with open_rig(cost=CostModel(call_s=1.0)) as rig:
        await rig.forward("ffn.0.1", rows(3))
        for index in range(2):
            body = {"uid": "ffn.2.3", "id": bytes([index]), "seen": 0}
            await rig.call("expert.backward", body, rows(2), rows(2, seed=1))
        staleness = rig.node.recorder.staleness
        assert staleness.cumulative[:2] == [(0.0, 1), (1.0, 2)]
        assert (staleness.count, staleness.total) == (2, 1.0)
        found = rig.shown()
    forward, backward = ("ffn.0.1", "forward"), ("ffn.2.3", "backward")
    assert found["dmoe_node_expert_calls_total"] == {(*forward, "ok"): 1, (*backward, "ok"): 2}
    assert found["dmoe_node_rows_total"] == {forward: 3, backward: 4}
    assert found["dmoe_node_expert_batches_total"] == {forward: 1, backward: 2}
    assert found["dmoe_node_expert_device_seconds_total"] == {forward: 1.0, backward: 2.0}
    assert found["dmoe_node_expert_queue_seconds_total"] == {forward: 0.0, backward: 0.0}
    assert found["dmoe_node_expert_staleness_updates_total"] == {forward: 0, backward: 1}
    assert found["dmoe_node_expert_received_bytes_total"] == {forward: 3 * 16, backward: 4 * 32}
    assert found["dmoe_node_expert_sent_bytes_total"] == {forward: 3 * 16, backward: 4 * 16}


async def test_a_node_counts_how_calls_end(autojump_clock: trio.testing.MockClock) -> None:
    """Refused for its shape, refused for what it would do to the expert, turned away, and given up by its caller."""
    backends = {"ffn.0.1": ExpertBackend(EXPERT, SGD, EXPERT.init(jax.random.key(0)))}
    config = NodeConfig(max_batch_rows=4, max_waiting_rows=8)
    async with open_rig(cost=CostModel(call_s=1.0), config=config, backends=backends) as rig:
        with pytest.raises(CallRefused):
            await rig.forward("ffn.0.1", rows(2, width=3))
        with pytest.raises(CallRefused):
            await rig.backward("ffn.0.1", b"1", rows(2), np.full((2, 4), 3e38, np.float32))
        with pytest.raises(PeerTimeout):
            await rig.forward("ffn.0.1", rows(2), timeout_s=0.5)
        await trio.sleep(2.0)  # what was given up is computed all the same
        async with trio.open_nursery() as nursery:
            for count in (1, 4):  # one runs, one waits; some room is left for backward requests
                nursery.start_soon(rig.forward, "ffn.0.1", rows(count))
                await trio.sleep(0.1)
            with pytest.raises(PeerBusy, match="4 rows of forward requests wait already, at most 6 may"):
                await rig.forward("ffn.0.1", rows(4))
        found = rig.shown()
    assert found["dmoe_node_calls_total"] == {
        ("backward", "refused"): 1,
        ("forward", "busy"): 1,
        ("forward", "given up"): 1,
        ("forward", "ok"): 2,
        ("forward", "refused"): 1,
    }
    assert found["dmoe_node_refused_total"] == {("busy",): 1, ("malformed",): 1, ("update not finite",): 1}
    of_expert = {key: count for key, count in found["dmoe_node_expert_calls_total"].items() if key[0] == "ffn.0.1"}
    assert sum(of_expert.values()) == 5  # all but the one that does not fit
    assert of_expert["ffn.0.1", "forward", "busy"] == 1
    assert found["dmoe_node_serving"] == {(): 1}
    assert found["dmoe_node_updates_total"] == {("ffn.0.1",): 0}


async def test_claims_are_shown(autojump_clock: trio.testing.MockClock) -> None:
    """Only by a node that claims; each figure under the name of what it counts."""
    async with open_rig() as rig:
        assert not [name for name in rig.shown() if "claim" in name]
        counts = {"room": 61, "scope": "ab", "held": 1, "won": 5, "lost": 2, "failed": 4, "given_up": 3, "fixed": []}
        rig.node.claims = lambda: counts | {"adopted": {"checkpoint": 4, "seed": 1}}
        found = rig.shown()
    assert found["dmoe_node_experts"] == {(): 3}
    assert found["dmoe_node_claim_room"] == {(): 61}
    assert found["dmoe_node_claims_held"] == {(): 1}
    assert found["dmoe_node_claims_total"] == {("won",): 5, ("lost",): 2, ("failed",): 4}
    assert found["dmoe_node_given_up_total"] == {(): 3}
    assert found["dmoe_node_adopted_total"] == {("checkpoint",): 4, ("seed",): 1}
