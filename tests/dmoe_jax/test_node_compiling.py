"""Serving does not wait for the compiler: what a node does while its programs are compiled."""

import gc
import random
from typing import Any

import jax
import numpy as np
import pytest
import trio
from flax import linen as nn

from dmoe_jax.directory import directory
from dmoe_jax.directory.grid import parse_uid
from dmoe_jax.directory.members import list_members
from dmoe_jax.experts import expert_from_linen
from dmoe_jax.experts.base import key_of_uid, numbers_of_uid
from dmoe_jax.machine.device import CostModel
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.programs import EachCompiledAlone, copied, key_data_with
from dmoe_jax.node.server import open_expert_node
from dmoe_net.clock import SwarmClock
from dmoe_net.dht.node import open_dht_node
from dmoe_net.errors import CallRefused, RemoteFailure
from dmoe_net.identity import Address
from tests.dmoe_jax.node_rig import HOST, SGD, AsideDevice, open_rig, rows
from tests.dmoe_jax.small_swarm import find_experts, identity_of
from tests.net.direct_network import DirectNetwork


async def test_a_node_is_listed_while_it_compiles(autojump_clock: trio.testing.MockClock) -> None:
    """It answers its status and is announced as compiling; its experts only when they are warm. All is taken back."""
    network = DirectNetwork(latency_s=0.01)
    keys = [identity_of(index) for index in range(3)]
    meeting, host, asker = (
        network.caller(address, key.peer_id)
        for address, key in zip((Address("meeting", 1), HOST, None), keys, strict=True)
    )
    clock = SwarmClock(start_s=50.0)
    expert = expert_from_linen(nn.Dense(4, name="listed"), rows(1))
    backends = {"ffn.0.1": ExpertBackend(expert, SGD, expert.init(jax.random.key(0)))}
    config = NodeConfig(warm_up_rows=4)
    async with (
        open_dht_node(meeting, identity=keys[0], clock=clock, rng=random.Random(5)) as observer,
        open_dht_node(
            host, identity=keys[1], clock=clock, rng=random.Random(6), initial_peers=[Address("meeting", 1)]
        ) as host_dht,
        trio.open_nursery() as nursery,
    ):

        async def found() -> bool:
            async with directory.open_expert_directory(observer) as reader:
                return (await find_experts(reader, [parse_uid("ffn.0.1")]))[parse_uid("ffn.0.1")] is not None

        async def watch() -> None:
            await trio.sleep(12.0)  # buckets 1 and 2 are compiled, 4 is not
            status = (await asker.call(HOST, "node.status", {}, (), timeout_s=1.0)).body
            assert (status["state"], status["warm_rows"]) == ("compiling 3 of 3", 2)
            (listed,) = await list_members(observer, "dmoe")
            assert (listed.role, listed.info["experts"], listed.grids) == ("node", 1, ("ffn",))
            assert str(listed.info["state"]).startswith("compiling")
            assert not await found()

        progress: list[str] = []
        nursery.start_soon(watch)
        async with open_expert_node(
            host, host_dht, backends, device=AsideDevice(), config=config, on_progress=progress.append
        ) as node:
            assert progress == [f"compiling {number} of 3" for number in (1, 2, 3)]
            assert trio.current_time() > 12.0
            assert (node.state, node.status()["warm_rows"]) == ("serving", 4)
            assert await found()
        with pytest.raises(CallRefused):
            await asker.call(HOST, "node.status", {}, (), timeout_s=1.0)
        async with open_expert_node(host, host_dht, backends, device=AsideDevice(), config=config):
            pass  # the names are free again


async def test_batches_grow_with_what_is_compiled(autojump_clock: trio.testing.MockClock, compilations: Any) -> None:
    """Nothing compiles on the device: waiting requests go in batches of what is warm, the next size is compiled beside
    them because they wait, and the batches after that are larger."""
    expert = expert_from_linen(nn.Dense(4, name="growing"), rows(1))
    backend = ExpertBackend(expert, SGD, expert.init(jax.random.key(0)))
    device = AsideDevice(CostModel(call_s=1.0))
    async with open_rig(
        device=device, config=NodeConfig(warm_up_rows=2, max_batch_rows=8), backends={"ffn.0.1": backend}
    ) as rig:
        finished: list[float] = []

        async def ask() -> None:
            await rig.forward("ffn.0.1", rows(1))
            finished.append(trio.current_time())

        async def ask_at_once(count: int) -> tuple[int, float]:
            batches, started = rig.node.status()["batches"], trio.current_time()
            async with trio.open_nursery() as nursery:
                for _ in range(count):
                    nursery.start_soon(ask)
            return rig.node.status()["batches"] - batches, trio.current_time() - started

        batches, took = await ask_at_once(6)
        assert 3 <= batches <= 4  # of two rows, while four are compiled; the first may have left alone
        assert took < 5.0  # nobody waited for the compiler
        await trio.sleep(10.0)
        assert backend.warm_rows == 4
        compiled = compilations.count
        assert (await ask_at_once(4))[0] <= 2
        assert compilations.count == compiled


async def test_a_request_larger_than_what_is_compiled(autojump_clock: trio.testing.MockClock) -> None:
    """Forward is answered in parts at once; backward, one update, waits for its program while others are served."""
    expert = expert_from_linen(nn.Dense(4, name="large"), rows(1))
    params = expert.init(jax.random.key(0))
    own = {uid: ExpertBackend(expert, SGD, params) for uid in ("ffn.0.1", "ffn.0.2")}
    twin = ExpertBackend(expert, SGD, params)
    async with open_rig(
        device=AsideDevice(CostModel(call_s=0.1)), config=NodeConfig(warm_up_rows=2), backends=own
    ) as rig:
        x, grads = rows(7), rows(7, seed=3)
        started = trio.current_time()
        reply = await rig.forward("ffn.0.1", x)
        assert trio.current_time() - started < 1.0
        np.testing.assert_allclose(reply.tensors[0], expert.apply(params, x), atol=1e-5)

        async def learn() -> None:
            gradients = (await rig.backward("ffn.0.1", b"id", x, grads)).tensors[0]
            np.testing.assert_allclose(gradients, twin.backward([x], grads)[0], atol=1e-5)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(learn)
            await trio.sleep(0.1)
            started = trio.current_time()
            await rig.backward("ffn.0.2", b"id", rows(1), rows(1))
            assert trio.current_time() - started < 1.0
        assert own["ffn.0.1"].update_count == 1
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), own["ffn.0.1"].params, twin.params)


async def test_a_size_that_does_not_compile_is_not_tried_for_ever(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Too large for the device's memory, say: its requests fail with a reason, smaller ones go on."""
    expert = expert_from_linen(nn.Dense(4, name="too_large"), rows(1))
    backend = ExpertBackend(expert, SGD, expert.init(jax.random.key(0)))
    async with open_rig(device=AsideDevice(), config=NodeConfig(warm_up_rows=2), backends={"ffn.0.1": backend}) as rig:
        tries: list[int] = []

        def broken(bucket: int) -> None:
            tries.append(bucket)
            raise MemoryError("out of device memory")

        monkeypatch.setattr(backend, "warm_up_bucket", broken)
        for number in range(2):
            with pytest.raises(RemoteFailure, match="failed to compute"):
                await rig.backward("ffn.0.1", bytes([number]), rows(3), rows(3))
            await rig.forward("ffn.0.1", rows(3))
        await rig.backward("ffn.0.1", b"small", rows(2), rows(2))
        await trio.sleep(100.0)
        assert tries == [4, 4, 4]  # for each of the two backwards, and once to make batches larger
        assert rig.node.status()["failed"] == 2
        assert "batches stay smaller" in caplog.text


@pytest.mark.slow
def test_of_what_is_compiled_alone_jax_remembers_no_module() -> None:
    """Unlike of what it compiles by itself. What comes out is the same, once for each shape and type."""

    def modules() -> int:
        gc.collect()
        return sum(type(each).__name__ == "MeshComputation" for each in gc.get_objects())

    def doubled(tree: Any, number: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf * 2 + number, tree)

    alone, before = EachCompiledAlone(doubled), modules()
    ones = np.ones((2, 3), np.float32)
    for tree in ({"a": ones, "b": 2 * ones}, {"a": ones}, {"a": ones[:1]}, {"a": ones.astype(np.int32)}):
        jax.tree.map(np.testing.assert_array_equal, alone(tree, np.float32(1)), doubled(tree, np.float32(1)))
    assert len(alone._programs) == 4
    alone({"a": 5 * ones}, np.float32(2))
    assert len(alone._programs) == 4
    assert modules() == before
    remembered = jax.jit(doubled)
    remembered({"a": ones}, np.float32(1))
    assert modules() == before + 1, "this test looks for something else than what JAX remembers"


def test_what_is_compiled_alone_stays_on_its_device() -> None:
    """And is compiled once more for another one."""
    alone, devices = EachCompiledAlone(copied), jax.devices()
    for device in devices[:2]:
        (leaf,) = alone([jax.device_put(np.ones(3), device)])
        assert leaf.devices() == {device}
    (key,) = alone([jax.random.key(3)])
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(3)))


def test_a_key_is_made_for_an_expert_as_by_hand() -> None:
    """By one program, whatever the grid's dimensions."""
    key = jax.random.key(7)
    for coordinates in ((3,), (3, 250), (0, 1, 2)):
        numbers = np.array(numbers_of_uid("layer0", coordinates), np.uint32)
        expected = jax.random.key_data(key_of_uid(key, "layer0", coordinates))
        np.testing.assert_array_equal(key_data_with(np.asarray(jax.random.key_data(key)), numbers), expected)
