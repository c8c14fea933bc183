"""Devices: what work costs in virtual time, and which thread computes it in real time."""

import importlib.util
import os
import threading
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trio
import trio.testing

from dmoe_jax.machine import device as device_module
from dmoe_jax.machine.device import CostModel, DeviceTime, InlineDevice, ThreadDevice, to_host


async def test_work_takes_its_cost_and_waits_its_turn(autojump_clock: trio.testing.MockClock) -> None:
    """Two calls of 3 and 5 rows on one device: 2 * (1 + 3 * 0.5) s, then 2 * (1 + 5 * 0.5) s; none is negative."""
    for wrong in ({"call_s": -1.0}, {"row_s": -1.0}, {"slowdown": 0.0}):
        with pytest.raises(ValueError, match="slowdown > 0"):
            CostModel(**wrong)
    device = InlineDevice(CostModel(call_s=1.0, row_s=0.5, slowdown=2.0))
    ended: list[tuple[int, float]] = []
    started = trio.current_time()

    async def call(rows: int) -> None:
        total = await device.run(jnp.sum, jnp.ones((rows, 4)))
        assert total == 4 * rows
        ended.append((rows, trio.current_time() - started))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call, 3)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(call, 5)
    assert ended == [(3, 5.0), (5, 12.0)]


async def test_a_cost_of_ones_own(autojump_clock: trio.testing.MockClock) -> None:
    """It is told the function's name and the rows of the first array in the arguments, however deep; 0 without one."""
    seen: list[tuple[str, int]] = []

    def cost(name: str, rows: int) -> float:
        seen.append((name, rows))
        return 0.0

    def work(*args: object) -> None: ...

    device = InlineDevice(cost)
    await device.run(work, {"a": np.ones((7, 2))}, np.ones(3))
    await device.run(work, 5.0, np.float32(1))
    assert seen == [("work", 7), ("work", 0)]


async def test_what_is_on_the_host_needs_no_thread() -> None:
    """Nor a turn of the device, unless somebody has to wait for XLA. A simulated device declares what it costs."""
    ready = jax.block_until_ready({"a": jnp.ones(3), "b": np.ones(2)})
    device = ThreadDevice()
    async with device.turn():
        with trio.fail_after(5.0):
            jax.tree.map(np.testing.assert_array_equal, await to_host(device, ready), ready)
    assert device.busy_s == 0.0
    late = jax.jit(lambda x: jax.lax.fori_loop(0, 1500, lambda _, y: jnp.cos(y @ y), x))(jnp.ones((256, 256)))
    assert not late.is_ready()
    await to_host(device, late)
    assert device.busy_s > 0.0
    simulated = InlineDevice(CostModel(call_s=1e-3))
    await to_host(simulated, ready)
    assert simulated.busy_s == 1e-3
    spent = DeviceTime()
    await simulated.run(np.sum, np.ones((3, 4)), spent=spent)
    assert (simulated.busy_s, spent.seconds) == (2e-3, 1e-3)


async def test_short_work_runs_in_the_loop() -> None:
    """A thread computes what is expected to take longer, or nobody knows; in the loop it waits its turn, too."""
    device, here = ThreadDevice(inline_s=0.5), threading.get_ident()
    spent = DeviceTime()
    assert await device.run(threading.get_ident, spent=spent, expected_s=0.4) == here
    assert spent.seconds == device.busy_s > 0
    assert await device.run(threading.get_ident, expected_s=0.5) != here
    assert await device.run(threading.get_ident) != here
    assert await ThreadDevice(inline_s=0.0).run(threading.get_ident, expected_s=1e-6) != here
    assert await device.another().run(threading.get_ident, expected_s=0.4) == here
    order: list[str] = []
    async with trio.open_nursery() as nursery, device.turn():
        nursery.start_soon(partial(device.run, order.append, "short", expected_s=0.1))
        await trio.testing.wait_all_tasks_blocked()
        order.append("turn")
    assert order == ["turn", "short"]


@pytest.mark.parametrize(
    ("cores", "backend", "expected"), [(2, "cpu", True), (1, "cpu", True), (3, "cpu", False), (2, "gpu", False)]
)
async def test_where_the_loop_shares_its_core(cores: int, backend: str, expected: bool, monkeypatch: Any) -> None:
    """Without a core to spare, the loop itself computes what is short, and turns are longer."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    spec = importlib.util.spec_from_file_location("fresh_device", device_module.__file__)  # it remembers its machine
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    runs_in = await fresh.ThreadDevice().run(threading.get_ident, expected_s=1e-3)
    assert (runs_in == threading.get_ident()) == expected
    assert (fresh.ThreadDevice().turn_s > 5e-3) == expected
