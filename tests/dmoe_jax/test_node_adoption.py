"""Experts that come to a node and leave it while it serves."""

import jax
import pytest
import trio

from dmoe_jax.directory import directory
from dmoe_jax.directory.grid import parse_uid
from dmoe_jax.machine.device import CostModel
from dmoe_jax.node.backend import ExpertBackend
from dmoe_net.errors import CallRefused, PeerTimeout
from tests.dmoe_jax.node_rig import EXPERT, HOST, open_rig, rows
from tests.dmoe_jax.small_swarm import find_experts


async def test_an_expert_that_is_given_up_answers_what_was_accepted(autojump_clock: trio.testing.MockClock) -> None:
    """Further calls are refused with a word, other experts go on, and only its announcement is taken back. It may come
    back."""
    async with open_rig(cost=CostModel(call_s=1.0)) as rig:
        given_up = trio.Event()

        async def give_up() -> None:
            await rig.node.give_up("ffn.0.1")
            given_up.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.backward, "ffn.0.1", b"runs", rows(1), rows(1))
            nursery.start_soon(rig.forward, "ffn.0.1", rows(1))  # waits
            await trio.sleep(0.5)
            nursery.start_soon(give_up)
            await trio.sleep(0.1)
            with pytest.raises(CallRefused, match=r"unknown expert 'ffn\.0\.1': this node serves 2 experts"):
                await rig.forward("ffn.0.1", rows(1))
            assert set(rig.node.status()["updates"]) == {"ffn.2.3", "xl.0"}
            assert not given_up.is_set()
            nursery.start_soon(rig.forward, "ffn.2.3", rows(1))
        assert given_up.is_set()
        status = rig.node.status()
        assert (status["answered"], status["steps"], status["staleness"]) == (3, 1, 0.0)
        assert set(rig.backends) == {"ffn.2.3", "xl.0"}
        async with directory.open_expert_directory(rig.node._dht) as reader:
            found = await find_experts(reader, [parse_uid("ffn.0.1"), parse_uid("ffn.2.3")])
        assert [contact and contact.address for contact in found.values()] == [None, HOST]
        rig.node.adopt("ffn.0.1", ExpertBackend(EXPERT, None, EXPERT.init(jax.random.key(0))))
        assert (await rig.forward("ffn.0.1", rows(2))).tensors[0].shape == (2, 4)
        await rig.node.introduce(["ffn.0.1"])
        async with directory.open_expert_directory(rig.node._dht) as reader:
            found = await find_experts(reader, [parse_uid("ffn.0.1"), parse_uid("ffn.2.3")])
        assert [contact and contact.address for contact in found.values()] == [HOST, HOST]
        with pytest.raises(ValueError, match=r"serves ffn\.0\.1 already"):
            rig.node.adopt("ffn.0.1", rig.backends["ffn.2.3"])


async def test_a_caller_that_gave_up_does_not_hold_a_given_up_expert(autojump_clock: trio.testing.MockClock) -> None:
    """The only job that waits for the expert is taken back, and nothing runs for it: then it can go."""
    async with open_rig(cost=CostModel(call_s=5.0)) as rig, trio.open_nursery() as nursery:
        nursery.start_soon(rig.forward, "ffn.2.3", rows(1))
        await trio.sleep(0.1)

        async def give_up_while_it_waits() -> None:
            await trio.sleep(0.5)
            await rig.node.give_up("ffn.0.1")

        nursery.start_soon(give_up_while_it_waits)
        with pytest.raises(PeerTimeout):
            await rig.forward("ffn.0.1", rows(1), timeout_s=1.0)
        assert "ffn.0.1" in rig.backends
        await trio.sleep(0.1)
        assert "ffn.0.1" not in rig.backends
