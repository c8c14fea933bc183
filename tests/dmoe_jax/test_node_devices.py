"""A node with several devices: experts spread over them, over meshes of them, and what each device does."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import jax
import numpy as np
import pytest
import trio
from jax.sharding import PartitionSpec

from dmoe_jax.machine.device import AllDevices, CostModel, DeviceTime, InlineDevice
from dmoe_jax.mesh.layout import MeshShape, parse_devices, shard_largest_dimension
from dmoe_jax.metrics.node import NodeRecorder
from dmoe_jax.node import sharding
from dmoe_jax.node.backend import ExpertBackend, make_backends
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.programs import bucket_of, buckets_up_to
from dmoe_jax.node.runner import BatchRunner
from dmoe_jax.node.sharding import Place, node_devices, placed
from tests.dmoe_jax.node_rig import EXPERT, SGD, Rig, open_rig, rows
from tests.dmoe_jax.test_mixture_grouped import on_eight_devices
from tests.dmoe_jax.training_rig import outcome

UIDS = tuple(f"ffn.{index}" for index in range(4))


@pytest.mark.slow
def test_eight_devices() -> None:
    """See `eight_devices`: one process, since JAX counts its devices once."""
    fits = "which does not fit the mesh data=2,model=4"
    hint = "(XLA_FLAGS=--xla_force_host_platform_device_count=N makes N devices of a CPU)"
    assert on_eight_devices("-m", "tests.dmoe_jax.eight_devices") == [
        "sixteen experts on eight devices",
        "stacked on two devices",
        "two devices at once",
        "an expert on a mesh",
        "a rule of one's own",
        "held once",
        "saved and restored",
        f"devices '0-8' name number 8, but the last of 8 is 7 {hint}",
        f"9 devices, but there are 8 {hint}",
        f"a mesh data=4,model=4 takes 16 devices, but there are 8 {hint}",
        "a mesh data=1,model=4 takes 4 devices, or a multiple for several side by side, but 6 were given",
        f"the sharding rule gives P('rows',) for params/Dense_0/bias of shape (6,), {fits}",
        f"the sharding rule gives P(None, None, 'model') for params/Dense_0/kernel of shape (6, 6), {fits}",
        f"the sharding rule gives P('model',) for params/Dense_0/bias of shape (6,), {fits}",
    ]


def test_devices_are_named_by_numbers() -> None:
    """Singly or as ranges, in the order in which they are named."""
    numbers = {"all": (0, 1, 2, 3, 4, 5, 6, 7), "0-2": (0, 1, 2), "0,2,5": (0, 2, 5), "6, 0-1": (6, 0, 1)}
    assert {text: parse_devices(text, 8) for text in numbers} == numbers


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: parse_devices("first", 8), "expected devices such as 0-7, 0,2,5 or all, got 'first'"),
        (lambda: parse_devices("", 8), "expected devices such as 0-7, 0,2,5 or all, got ''"),
        (lambda: parse_devices("1,0-2", 8), "expected each device once, .* got '1,0-2'"),
        (lambda: parse_devices("0,3-1", 8), "of a range the smaller first, got '0,3-1'"),
        (lambda: MeshShape.parse("data=2,expert=4"), "axes data and model, got 'data=2,expert=4'"),
        (lambda: MeshShape.parse("model=2,model=2"), "axes data and model, got 'model=2,model=2'"),
        (lambda: MeshShape.parse("model"), "axes data and model, got 'model'"),
        (lambda: MeshShape.parse("model=0"), "at least one device each, got data=1,model=0"),
        (lambda: MeshShape(data=-2), "at least one device each, got data=-2,model=1"),
        (
            lambda: sharding.layouts_on(jax.devices()[:1], MeshShape(model=2)),
            "model=2 takes 2 devices, .* but 1 was given",
        ),
        (lambda: node_devices(InlineDevice(), 0, None), "devices must be at least 1, got 0"),
        (lambda: node_devices(InlineDevice(), None, "model=64"), "a mesh data=1,model=64 takes 64 devices, but there"),
    ],
)
def test_wrong_devices_and_meshes(call: Callable[[], Any], line: str) -> None:
    with pytest.raises(ValueError, match=line) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_wrong_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """One line and a status, before the node joins anything."""
    for flag, line in (("--devices 0-63", "devices '0-63' name number 63, but"), ("--mesh rows=2", "expected a mesh")):
        status, error = outcome(["node", *flag.split()], capsys)
        assert status == 2
        assert error.startswith(f"dmoe: error: {line}")
        assert error.count("\n") == 1


def test_the_largest_dimension_is_split() -> None:
    """That which the axis divides, the first of equal ones; without one an array is whole everywhere."""
    mesh = MeshShape(data=2, model=4)

    def split(*shape: int) -> PartitionSpec:
        return shard_largest_dimension("w", jax.ShapeDtypeStruct(shape, np.float32), mesh)

    assert split(16, 64) == PartitionSpec(None, "model")
    assert split(8, 8) == PartitionSpec("model")
    assert split(8, 9) == PartitionSpec("model")
    assert split(2, 3) == split() == split(0) == PartitionSpec()


def test_rows_of_a_program_are_split_evenly() -> None:
    """Powers of two in each of the parts: 1 to 9 rows over three parts are 1, 2 or 4 in each."""
    assert [bucket_of(rows, 3) for rows in range(1, 10)] == [3, 3, 3, 6, 6, 6, 12, 12, 12]
    assert (buckets_up_to(9, 3), buckets_up_to(1, 4), buckets_up_to(5, 2)) == ((3, 6, 12), (4,), (2, 4, 8))


def test_experts_are_spread_by_bytes() -> None:
    """The largest first, each where the fewest bytes are."""
    places = [Place(number=number) for number in range(3)]
    # 9 -> 0, 5 -> 1, 5 -> 2, then 3 -> 1 (8), 2 -> 2 (7), 1 -> 2 (8): 9, 8 and 8 bytes.
    chosen = sharding.spread({"a": 1, "b": 5, "c": 9, "d": 3, "e": 5, "f": 2}, places)
    assert {uid: place.number for uid, place in chosen.items()} == {"a": 2, "b": 1, "c": 0, "d": 1, "e": 2, "f": 2}
    assert list(chosen) == ["a", "b", "c", "d", "e", "f"]
    assert sharding.bytes_by_place([(places[0], 1), (places[2], 2), (places[0], 3)], 3) == [4, 0, 2]


@asynccontextmanager
async def open_two_devices() -> AsyncIterator[Rig]:
    """Four experts in turn on two devices, which take a second for each batch."""
    devices = node_devices(InlineDevice(CostModel(call_s=1.0)), 2, None)
    backends = make_backends(dict.fromkeys(UIDS, EXPERT), SGD, seed=0, places=[each.place for each in devices])
    async with open_rig(device=devices, backends=backends) as rig:
        yield rig


async def test_simulated_devices_work_at_the_same_time(autojump_clock: trio.testing.MockClock) -> None:
    """Each does its own experts in turn: of four calls of a second two end after one, and two after two."""
    async with open_two_devices() as rig:
        times: dict[str, float] = {}
        start = trio.current_time()

        async def ask(uid: str) -> None:
            await rig.forward(uid, rows(1))
            times[uid] = trio.current_time() - start

        async with trio.open_nursery() as nursery:
            for uid in UIDS:
                nursery.start_soon(ask, uid)
                await trio.sleep(1e-4)  # in this order
        # Beside the second 10 ms on the way, and ffn.1 and ffn.3 were asked 0.1 ms later than the one before.
        assert times == pytest.approx({"ffn.0": 1.01, "ffn.1": 1.0101, "ffn.2": 2.01, "ffn.3": 2.0101}, abs=1e-5)
        await rig.forward("ffn.1", rows(2))
        status = rig.node.status()
        nbytes, counted = 2 * rig.backends["ffn.0"].nbytes, ("name", "busy_s", "batches", "rows", "waiting_rows")
        assert [(each["experts"], each["nbytes"]) for each in status["devices"]] == [(2, nbytes)] * 2
        found = [tuple(each[name] for name in counted) for each in status["devices"]]
        assert found == [("0", 2.0, 2, 2, 0), ("1", 3.0, 3, 4, 0)]
        assert (status["busy_s"], status["batches"], status["rows"]) == (5.0, 5, 6)
        shown = rig.shown()
        assert shown["dmoe_node_each_device_busy_seconds_total"] == {("0",): 2.0, ("1",): 3.0}
        assert shown["dmoe_node_each_device_rows_total"] == {("0",): 2, ("1",): 4}
        assert shown["dmoe_node_each_device_state_bytes"] == {("0",): nbytes, ("1",): nbytes}
        assert shown["dmoe_node_device_busy_seconds_total"] == {(): 5.0}


async def test_each_device_has_a_queue_of_its_own(autojump_clock: trio.testing.MockClock) -> None:
    """A caller that gives up leaves the queue of its expert's device, and a late call of the other is not behind it."""
    async with open_two_devices() as rig:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.forward, "ffn.0", rows(1))
            await trio.sleep(0.1)
            for _ in range(3):
                nursery.start_soon(rig.forward, "ffn.2", rows(1))
            await trio.sleep(0.1)
            assert [each["waiting_rows"] for each in rig.node.status()["devices"]] == [3, 0]
            started = trio.current_time()
            await rig.forward("ffn.1", rows(1))
            assert trio.current_time() - started == pytest.approx(1.01)
        with trio.move_on_after(0.5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(rig.forward, "ffn.3", rows(1))
                await trio.sleep(0.1)
                nursery.start_soon(rig.forward, "ffn.1", rows(1))
        await trio.sleep(2.0)
        # The first had begun when its caller gave up, the second was dropped.
        assert [each["rows"] for each in rig.node.status()["devices"]] == [4, 2]


async def test_all_devices_as_one(autojump_clock: trio.testing.MockClock) -> None:
    """A function for all devices waits until none of them works, and none of them begins before it is done."""
    first, second = InlineDevice(CostModel(call_s=1.0)), InlineDevice(CostModel(call_s=3.0))
    together, ended = AllDevices([first, second]), dict[str, float]()
    spent = DeviceTime()

    async def work(name: str, device: Any, **options: Any) -> None:
        await device.run(lambda: None, **options)
        ended[name] = trio.current_time()

    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(work, "second", second)
        await trio.sleep(0.1)
        nursery.start_soon(lambda: work("together", together, spent=spent))
        await trio.sleep(0.1)
        nursery.start_soon(work, "first", first)  # whose turn `together` has not taken yet
        await trio.sleep(2.9)
        nursery.start_soon(work, "second again", second)
    took = {name: round(time - start, 6) for name, time in ended.items()}
    assert took == {"first": 1.2, "second": 3.0, "together": 4.0, "second again": 7.0}
    assert (spent.seconds, together.busy_s) == (1.0, 8.0)
    async with trio.open_nursery() as nursery:
        start = trio.current_time()
        async with together.turn():
            nursery.start_soon(work, "after the turn", second)
            await trio.sleep(10.0)
    assert ended["after the turn"] - start == 13.0


def test_an_expert_without_a_device() -> None:
    lost = {"ffn.0": ExpertBackend(EXPERT, SGD, EXPERT.init(jax.random.key(0)), place=Place(number=1))}
    with pytest.raises(ValueError, match=r"expert ffn\.0 lives at place 1, but there are 1"):
        BatchRunner(lost, placed(InlineDevice()), NodeConfig(), NodeRecorder())
