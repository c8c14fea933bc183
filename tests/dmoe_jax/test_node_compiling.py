"""Serving does not wait for the compiler: what a node does while its programs are compiled."""

import functools
import gc
from typing import Any

import jax
import numpy as np
import pytest
import trio
from flax import linen as nn

from dmoe_jax.directory.directory import find_replicas
from dmoe_jax.directory.grid import parse_uid
from dmoe_jax.experts import expert_from_functions, expert_from_linen
from dmoe_jax.experts.base import Expert
from dmoe_jax.machine.device import CostModel
from dmoe_jax.node.backend import make_backends
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.programs import EachCompiledAlone
from dmoe_jax.swarm.opening import open_swarm
from dmoe_net.errors import CallRefused, RemoteFailure
from dmoe_net.identity import Contact
from dmoe_net.transport.sim import Constant, run, simulate
from tests.dmoe_jax.node_rig import SGD, AsideDevice, open_rig, rows


def dense(name: str) -> Expert:
    """An expert of its own, so that nothing is compiled for it yet."""
    return expert_from_linen(nn.Dense(4, name=name), rows(1))


def test_a_node_is_listed_while_it_compiles() -> None:
    """It is announced as compiling, its experts when they are warm; all is renewed, and withdrawn at the end."""
    config = NodeConfig(warm_up_rows=4, announce_period_s=10.0, record_lifetime_s=30.0)
    uid = parse_uid("ffn.0.1")

    async def main() -> None:
        async with (
            simulate(latency=Constant(0.01)) as network,
            open_swarm(network=network, host="meeting", seed=0) as observer,
            open_swarm(observer.contact, network=network, host="node", seed=1, device=AsideDevice()) as node,
            trio.open_nursery() as nursery,
        ):
            started, progress, at = trio.current_time(), list[str](), Contact.parse(node.contact)
            serve = functools.partial(node.serve, {str(uid): dense("listed")}, optimizer=SGD, config=config)

            async def status() -> dict[str, Any]:
                return (await observer.rpc.call(at, "node.status", {}, timeout_s=1.0)).body

            async def holders() -> list[Contact]:
                return [each.contact for each in (await find_replicas(observer.dht, [uid]))[uid]]

            async def watch() -> None:
                await trio.sleep(12.0)  # buckets 1 and 2 are compiled, 4 is not
                said = await status()
                assert (said["state"], said["warm_rows"]) == ("compiling 3 of 3", 2)
                (listed,) = await observer.members()
                assert (listed.role, listed.info["experts"], listed.grids) == ("node", 1, ("ffn",))
                assert str(listed.info["state"]).startswith("compiling")
                assert await holders() == []

            nursery.start_soon(watch)
            served = await serve(on_progress=progress.append)
            assert progress == [f"compiling {number} of 3" for number in (1, 2, 3)]
            assert trio.current_time() - started > 12.0
            for _ in range(2):
                said = await status()
                assert (said["state"], said["warm_rows"]) == ("serving", 4)
                assert await holders() == [member.contact for member in await observer.members()] == [at]
                await trio.sleep(100.0)
            await served.close()
            assert (await holders(), await observer.members()) == ([], ())
            with pytest.raises(CallRefused):
                await status()
            again = (await serve(devices=2)).node.status()["devices"]  # the names are free again
            assert [(each["name"], each["experts"]) for each in again] == [("0", 1), ("1", 0)]

    run(main)


async def test_batches_grow_with_what_is_compiled(autojump_clock: trio.testing.MockClock, compilations: Any) -> None:
    """Requests go in batches of what is warm while the next size is compiled; later batches are larger."""
    backends = make_backends({"ffn.0.1": dense("growing")}, SGD, seed=0)
    device, config = AsideDevice(CostModel(call_s=1.0)), NodeConfig(warm_up_rows=2, max_batch_rows=8)
    async with open_rig(device=device, config=config, backends=backends) as rig:

        async def ask_at_once(count: int) -> tuple[int, float]:
            batches, started = rig.node.status()["batches"], trio.current_time()
            async with trio.open_nursery() as nursery:
                for _ in range(count):
                    nursery.start_soon(rig.forward, "ffn.0.1", rows(1))
            return rig.node.status()["batches"] - batches, trio.current_time() - started

        batches, took = await ask_at_once(6)
        assert 3 <= batches <= 4  # of two rows, while four are compiled; the first may have left alone
        assert took < 5.0  # nobody waited for the compiler
        await trio.sleep(10.0)
        assert backends["ffn.0.1"].warm_rows == 4
        compiled = compilations.count
        assert (await ask_at_once(4))[0] <= 2
        assert compilations.count == compiled


async def test_a_request_larger_than_what_is_compiled(autojump_clock: trio.testing.MockClock) -> None:
    """Forward is answered in parts at once; backward, one update, waits for its program while others are served."""
    expert, device = dense("large"), AsideDevice(CostModel(call_s=0.1))
    own, alone = (make_backends({"ffn.0.[1:3]": expert}, SGD, seed=0) for _ in range(2))
    twin = alone["ffn.0.1"]
    async with open_rig(device=device, config=NodeConfig(warm_up_rows=2), backends=own) as rig:
        x, grads = rows(7), rows(7, seed=3)
        started = trio.current_time()
        reply = await rig.forward("ffn.0.1", x)
        assert trio.current_time() - started < 1.0
        np.testing.assert_allclose(reply.tensors[0], expert.apply(twin.params, x), atol=1e-5)

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


def too_large(tries: list[int]) -> Expert:
    """An expert that does not compile for four rows; tries to are noted."""

    def apply(params: Any, x: Any) -> Any:
        if x.shape[0] == 4:
            tries.append(4)
            raise MemoryError("out of device memory")
        return x @ params["w"]

    return expert_from_functions(lambda key: {"w": jax.random.normal(key, (4, 4))}, apply, rows(1), check=False)


async def test_a_crash_in_a_batch_is_that_batch_s_alone(autojump_clock: Any, caplog: Any) -> None:
    """An error of the device reaches its callers as RemoteFailure; other experts go on."""
    backends = make_backends({"ffn.0.1": too_large([]), "ffn.2.3": dense("sound")}, SGD, seed=0)
    async with open_rig(backends=backends) as rig:
        with pytest.raises(RemoteFailure, match=r"expert ffn\.0\.1 failed to compute"):
            await rig.forward("ffn.0.1", rows(3))
        await rig.forward("ffn.2.3", rows(3))
        assert rig.node.status()["failed"] == 1
        assert "out of device memory" in caplog.text


async def test_a_size_that_does_not_compile_is_not_tried_for_ever(autojump_clock: Any, caplog: Any) -> None:
    """Too large for the device's memory, say: its requests fail with a reason, smaller ones go on."""
    tries: list[int] = []
    backends = make_backends({"ffn.0.1": too_large(tries)}, SGD, seed=0)
    async with open_rig(device=AsideDevice(), config=NodeConfig(warm_up_rows=2), backends=backends) as rig:
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
def test_of_what_is_compiled_alone_jax_remembers_no_module(compilations: Any) -> None:
    """Unlike of what it compiles by itself. What comes out is the same, once for each shape and type."""

    def modules() -> int:
        gc.collect()
        return sum(type(each).__name__ == "MeshComputation" for each in gc.get_objects())

    def doubled(tree: Any, number: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf * 2 + number, tree)

    alone, before = EachCompiledAlone(doubled), modules()
    ones, compiled = np.ones((2, 3), np.float32), compilations.count
    for tree in ({"a": ones, "b": 2 * ones}, {"a": ones}, {"a": ones[:1]}, {"a": ones.astype(np.int32)}):
        jax.tree.map(np.testing.assert_array_equal, alone(tree, np.float32(1)), doubled(tree, np.float32(1)))
    alone({"a": 5 * ones}, np.float32(2))
    assert compilations.count == compiled + 4
    assert modules() == before
    remembered = jax.jit(doubled)
    remembered({"a": ones}, np.float32(1))
    assert modules() == before + 1, "this test looks for something else than what JAX remembers"
