"""Work of a process of eight devices for `test_node_devices`; it prints a line for each thing that holds."""

import functools
import gc
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import trio
from jax.sharding import PartitionSpec

from dmoe_jax.experts import feedforward
from dmoe_jax.experts.base import Expert, TensorSpec
from dmoe_jax.machine.device import ThreadDevice
from dmoe_jax.mesh.layout import MeshShape, ShardingRule
from dmoe_jax.node.backend import ExpertBackend, make_backends
from dmoe_jax.node.server import NodeConfig
from dmoe_jax.node.sharding import PlacedDevice, node_devices
from dmoe_jax.peers.security import Plain
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.swarm.swarm import Swarm
from tests.dmoe_jax.node_rig import Rig, open_rig, rows

EXPERT = feedforward(d_model=16)
ADAM = optax.adam(1e-2)
MESH = "data=2,model=4"
WIDTH = 16


def count_compilations() -> SimpleNamespace:
    """Counter, `count`, of the programs that XLA compiles from now on."""
    counter = SimpleNamespace(count=0)

    def note(event: str, duration: float, **_: object) -> None:
        counter.count += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(note)
    return counter


def on(devices: tuple[PlacedDevice, ...], pattern: str, expert: Expert = EXPERT) -> dict[str, ExpertBackend]:
    return make_backends({pattern: expert}, ADAM, seed=0, places=[each.place for each in devices])


def shardings(backend: ExpertBackend) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, backend.state)


def bytes_on_each_device(backend: ExpertBackend) -> list[int]:
    shards = [shard for leaf in jax.tree.leaves(backend.state) for shard in leaf.addressable_shards]
    return [sum(shard.data.nbytes for shard in shards if shard.device == device) for device in jax.devices()]


def agree(found: Any, expected: Any, atol: float) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=atol), found, expected)


async def ask_everyone(rig: Rig, uids: list[str]) -> dict[str, list[np.ndarray]]:
    """A forward and a backward pass of every expert, all at once; the answers in float32."""
    answers: dict[str, list[np.ndarray]] = {uid: [] for uid in uids}

    async def ask(number: int, uid: str) -> None:
        x, grads = rows(3, WIDTH, seed=number), rows(3, WIDTH, seed=100 + number)
        for reply in (await rig.forward(uid, x), await rig.backward(uid, uid.encode(), x, grads)):
            answers[uid].append(np.asarray(reply.tensors[0]))

    async with trio.open_nursery() as nursery:
        for number, uid in enumerate(uids):
            nursery.start_soon(ask, number, uid)
    return answers


async def like_one_device(compilations: Any, devices: str, pattern: str, strategy: Any) -> dict[str, Any]:
    """Serve experts on these devices: answers and states are those of one device, every expert stays on its own, and
    nothing is compiled meanwhile. The node's status at the end."""
    placed, alone = node_devices(ThreadDevice(), devices, None), on(node_devices(ThreadDevice(), "0", None), pattern)
    backends, config = on(placed, pattern), NodeConfig(warm_up_rows=4, strategy=strategy)
    async with open_rig(device=placed, backends=backends, config=config) as rig:
        before = compilations.count
        answers = await ask_everyone(rig, list(backends))
        assert compilations.count == before
        status = rig.node.status()
    numbers = [int(each["name"].removeprefix("cpu:")) for each in status["devices"]]
    for number, (uid, backend) in enumerate(alone.items()):
        x, grads = rows(3, WIDTH, seed=number), rows(3, WIDTH, seed=100 + number)
        agree(answers[uid], [backend.forward([x]), *backend.backward([x], grads)], 1e-6)
        agree(backends[uid].state, backend.state, 1e-6)
        own = {jax.devices()[numbers[number % len(numbers)]]}
        assert all(leaf.devices() == own for leaf in jax.tree.leaves(backends[uid].state))
    return status


async def sixteen_experts_on_eight_devices(compilations: Any) -> None:
    """Each device has two."""
    status = await like_one_device(compilations, "all", "ffn.[0:16]", "single")
    assert [(each["name"], each["experts"]) for each in status["devices"]] == [(f"cpu:{n}", 2) for n in range(8)]
    # Of a forward and a backward of 3 rows for each of two experts.
    assert [each["rows"] for each in status["devices"]] == [12] * 8
    assert all(each["busy_s"] > 0 for each in status["devices"])
    np.testing.assert_allclose(sum(each["busy_s"] for each in status["devices"]), status["busy_s"])
    print("sixteen experts on eight devices")


async def stacked_on_two_devices(compilations: Any) -> None:
    """Each has a stack of its two experts, which stays there."""
    status = await like_one_device(compilations, "2,5", "ffn.[0:4]", "stacked")
    assert [(each["place"], each["experts"]) for each in status["strategies"]] == [("cpu:2", 2), ("cpu:5", 2)]
    print("stacked on two devices")


async def two_devices_at_once() -> None:
    """Each of two experts computes only while the other one does."""
    together = threading.Barrier(2)

    def meet(forward: Callable[..., Any], *args: Any) -> Any:
        together.wait(timeout=120.0)  # a deadline, not a pause: raises if the other one has not begun
        result = forward(*args)
        together.wait(timeout=120.0)
        return result

    def apply(params: Any, x: Any) -> Any:
        return params * x + x

    spec = TensorSpec(name="x", shape=(4,), dtype="float32", differentiable=True)
    expert = Expert("meets", lambda key: np.float32(2), apply, (spec,), spec)
    devices = node_devices(ThreadDevice(), "2,5", None)
    answers: list[np.ndarray] = []

    async def ask(rig: Rig, uid: str) -> None:
        answers.append(np.asarray((await rig.forward(uid, rows(1), timeout_s=300.0)).tensors[0]))

    backends = on(devices, "meets.[0:2]", expert)
    for backend in backends.values():
        backend.forward = functools.partial(meet, backend.forward)  # type: ignore[method-assign]
    async with open_rig(device=devices, backends=backends, config=NodeConfig(warm_up_rows=1)) as rig:
        async with trio.open_nursery() as nursery:
            for uid in backends:
                nursery.start_soon(ask, rig, uid)
        assert [each["name"] for each in rig.node.status()["devices"]] == ["cpu:2", "cpu:5"]
    agree(answers, [3 * rows(1)] * 2, 1e-6)
    print("two devices at once")


def five_updates(backend: ExpertBackend) -> None:
    for step in range(5):
        # 1 to 5 rows, of which 1 and 3 and 5 are not divided by data=2.
        backend.backward([rows(1 + step, WIDTH, seed=step)], rows(1 + step, WIDTH, seed=10 + step))


async def an_expert_on_a_mesh(compilations: Any) -> None:
    """Five updates are those of one device; every array stays where it began, with an eighth or a fourth on each."""
    (mesh,) = node_devices(ThreadDevice(), None, MESH)
    (backend,) = on((mesh,), "ffn.0").values()
    (alone,) = make_backends({"ffn.0": EXPERT}, ADAM, seed=0).values()
    before = shardings(backend)
    kernel = backend.params["Dense_0"]["kernel"]  # [16, 64]: the larger dimension is split by four
    assert kernel.sharding.shard_shape(kernel.shape) == (16, 16)
    # Everything but Adam's count (4 bytes) is split by four.
    assert bytes_on_each_device(backend) == [(backend.nbytes - 4) // 4 + 4] * 8
    backend.warm_up(8)
    assert backend.programs.warm == {2, 4, 8}  # rows that data=2 divides
    compiled = compilations.count
    five_updates(backend)
    output = backend.forward([rows(3, WIDTH)])
    assert compilations.count == compiled
    five_updates(alone)
    agree(output, alone.forward([rows(3, WIDTH)]), 1e-5)
    agree(backend.state, alone.state, 1e-5)
    assert shardings(backend) == before
    print("an expert on a mesh")


async def saved_and_restored(swarm: Swarm, folder: Path, compilations: Any) -> None:
    """From a mesh to the same mesh, to two meshes side by side, and to one device; each lays out as it does."""
    topologies: list[dict[str, Any]] = [{"mesh": MESH}, {"mesh": MESH}, {"devices": 8, "mesh": "model=4"}, {}]
    expert, saved, before = {"ffn.[0:2]": EXPERT}, None, None
    for options in topologies:
        served = await swarm.serve(expert, optimizer=ADAM, warm_up_rows=8, checkpoint_dir=folder, **options)
        first, second = served.backends.values()
        if saved is None:
            before = shardings(first)
            for backend in (first, second):
                await swarm.device.run(five_updates, backend)
            saved = jax.device_get([first.state, second.state])
        assert (first.update_count, second.update_count) == (5, 5)
        agree([first.state, second.state], saved, 0)
        names = [each["name"] for each in served.node.status()["devices"]]
        if options.get("mesh") == MESH:
            assert names == ["cpu:0-7"]
            assert shardings(first) == shardings(second) == before
        elif options:
            assert names == ["cpu:0-3", "cpu:4-7"]
            for backend, devices in ((first, jax.devices()[:4]), (second, jax.devices()[4:])):
                assert {device for leaf in jax.tree.leaves(backend.state) for device in leaf.devices()} == {*devices}
        compiled = compilations.count
        first.forward([rows(3, WIDTH)])
        assert compilations.count == compiled  # a restored state is no reason to
        await served.close()
    print("saved and restored")


def held_once() -> None:
    """An expert on the sixth device leaves nothing of its size on the first, and on its own no second copy."""

    def held(number: int) -> int:
        return sum(leaf.nbytes for leaf in jax.live_arrays() if leaf.devices() == {jax.devices()[number]})

    expert = feedforward(d_model=WIDTH, expansion=3)
    gc.collect()
    before = held(0), held(5)
    (backend,) = on(node_devices(ThreadDevice(), "5", None), "ffn.0", expert).values()
    backend.warm_up(2)
    gc.collect()
    assert held(0) - before[0] < 64  # a key, at most
    assert held(5) - before[1] == backend.nbytes
    print("held once")


def laid_out_by(rule: ShardingRule, expert: Expert) -> ExpertBackend:
    """An expert on a mesh of all devices."""
    mesh = node_devices(ThreadDevice(), None, replace(MeshShape.parse(MESH), rule=rule))
    return on(mesh, "ffn.0", expert)["ffn.0"]


def refused() -> None:
    """Print the error of each layout that cannot be made, a line each."""
    rules: list[ShardingRule] = [
        lambda name, array, mesh: PartitionSpec("rows"),
        lambda name, array, mesh: PartitionSpec(None, None, "model") if name.endswith("kernel") else PartitionSpec(),
        lambda name, array, mesh: PartitionSpec("model"),
    ]
    devices = [("0-8", None), (9, None), (None, "data=4,model=4"), ("0-5", "model=4")]
    attempts: list[Callable[[], Any]] = [
        *(functools.partial(node_devices, ThreadDevice(), *each) for each in devices),
        *(functools.partial(laid_out_by, rule, feedforward(d_model=6, expansion=1)) for rule in rules),
    ]
    for attempt in attempts:
        try:
            attempt()
        except ValueError as error:
            print(error)


def a_rule_of_ones_own() -> None:
    """Fully sharded over all eight devices, both axes on one dimension, where its name says so."""

    def rule(name: str, array: jax.ShapeDtypeStruct, mesh: MeshShape) -> PartitionSpec:
        return PartitionSpec(("data", "model")) if name == "params/Dense_0/kernel" else PartitionSpec()

    backend = laid_out_by(rule, EXPERT)
    (alone,) = make_backends({"ffn.0": EXPERT}, ADAM, seed=0).values()
    five_updates(backend)
    five_updates(alone)
    agree(backend.state, alone.state, 1e-5)
    for path, leaf in jax.tree_util.tree_leaves_with_path(backend.params):
        is_split = jax.tree_util.keystr(path, simple=True, separator="/") == "Dense_0/kernel"
        assert leaf.sharding.shard_shape(leaf.shape) == ((2, 64) if is_split else leaf.shape)
    print("a rule of one's own")


async def main() -> None:
    compilations = count_compilations()
    await sixteen_experts_on_eight_devices(compilations)
    await stacked_on_two_devices(compilations)
    await two_devices_at_once()
    await an_expert_on_a_mesh(compilations)
    a_rule_of_ones_own()
    held_once()
    with tempfile.TemporaryDirectory() as folder:
        async with open_swarm(security=Plain()) as swarm:
            await saved_and_restored(swarm, Path(folder), compilations)
    refused()


if __name__ == "__main__":
    trio.run(main)
