"""Experts whose programs call the host: found, run one at a time, and never in the event loop."""

import functools
from collections import Counter
from collections.abc import Callable
from threading import get_ident
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trio
import trio.testing

from dmoe_jax.experts import expert_from_functions
from dmoe_jax.experts.base import Expert
from dmoe_jax.machine.device import InlineDevice, ThreadDevice
from dmoe_jax.node.backend import make_backends
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.host_calls import calls_host
from dmoe_jax.node.sharding import Place, PlacedDevice
from tests.dmoe_jax.node_rig import SGD, Rig, open_rig, rows

WIDTH = 512
"""Width of arguments that are large enough for one of XLA's threads to give them to the host."""


class LongTurnDevice(ThreadDevice):
    """The way to it is worth many batches, and nothing runs in the event loop."""

    turn_s = 100.0  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(inline_s=0.0)


def _sin(array: Any) -> Any:
    return np.sin(np.asarray(array))


def on_host(array: Any, *, function: Callable[[Any], Any] = _sin) -> Any:
    """The sine, by Python."""
    return jax.pure_callback(function, jax.ShapeDtypeStruct(array.shape, array.dtype), array)


def expert_with(function: Callable[[Any], Any]) -> Expert:
    """x W times what the function makes of it, which has no gradient but is in that of x W."""

    def init(key: Any) -> Any:
        return {"w": jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH}

    def apply(params: Any, x: Any) -> Any:
        y = x @ params["w"]
        return y * jax.lax.stop_gradient(function(jax.lax.stop_gradient(y)))

    return expert_from_functions(init, apply, rows(1, WIDTH))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (on_host, True),
        (jax.jit(on_host), True),
        (lambda x: jax.lax.cond(x.sum() > 0, on_host, jnp.sin, x), True),
        (lambda x: jax.lax.fori_loop(0, 3, lambda _, y: on_host(y), x), True),
        (lambda x: jax.lax.scan(lambda y, _: (jax.checkpoint(on_host)(y), None), x, length=2)[0], True),
        (lambda x: (jax.debug.print("{x}", x=x), x)[1], True),
        (lambda x: jax.lax.cond(x.sum() > 0, jnp.cos, jnp.sin, x), False),
        (jax.nn.gelu, False),
    ],
)
def test_calls_of_the_host_are_found_wherever_they_are(function: Callable[[Any], Any], expected: bool) -> None:
    assert calls_host(jax.make_jaxpr(function)(jnp.ones(3))) == expected


async def ask_each(rig: Rig, *, forward: bool = False) -> None:
    """Six times a backward of every expert at once, and a forward of each beside it."""
    x, grads = rows(256, WIDTH), rows(256, WIDTH, seed=1)
    for number in range(6):
        async with trio.open_nursery() as nursery:
            for uid in rig.backends:
                nursery.start_soon(rig.backward, uid, b"%d" % number + uid.encode(), x, grads)
                if forward:
                    nursery.start_soon(rig.forward, uid, x)


@pytest.mark.parametrize("strategy", ["single", "stacked"])
@pytest.mark.parametrize("function", [jnp.sin, on_host])
async def test_a_node_answers_several_experts_at_once_as_one_after_the_other(function: Any, strategy: Any) -> None:
    """In real time, on a real device; also experts that call the host, which would wait for ever if they overlapped."""
    ours, alone = (make_backends({"ffn.[0:4]": expert_with(function)}, SGD, seed=0) for _ in range(2))
    with trio.fail_after(60.0):
        async with open_rig(device=LongTurnDevice(), backends=ours, config=NodeConfig(strategy=strategy)) as rig:
            await ask_each(rig)
    for uid, backend in alone.items():
        for _ in range(6):
            backend.backward([rows(256, WIDTH)], rows(256, WIDTH, seed=1))
        jax.tree.map(np.testing.assert_array_equal, ours[uid].params, backend.params)


@pytest.mark.parametrize("strategy", ["single", "stacked"])
async def test_devices_take_turns_with_experts_that_call_the_host(strategy: Any) -> None:
    """They share XLA's threads: as many calls as there are would wait for ever. The tests have some to spare."""
    inside, at_once = Counter[int](), set[int]()

    def counted(array: Any) -> Any:
        inside[get_ident()] += 1
        at_once.add(inside.total())
        result = _sin(array)
        inside[get_ident()] -= 1
        return result

    devices = [PlacedDevice(place=Place(number=number), device=LongTurnDevice()) for number in range(3)]
    expert, places = expert_with(functools.partial(on_host, function=counted)), [each.place for each in devices]
    ours = make_backends({"ffn.[0:6]": expert}, SGD, seed=0, places=places)
    with trio.fail_after(60.0):
        async with open_rig(device=devices, backends=ours, config=NodeConfig(strategy=strategy)) as rig:
            await ask_each(rig, forward=True)
            assert all(each["batches"] for each in rig.node.status()["devices"])
    assert {backend.update_count for backend in ours.values()} == {6}
    assert all(backend.programs.calls_host for backend in ours.values())
    assert at_once == {1}


async def test_what_calls_the_host_never_runs_in_the_event_loop() -> None:
    """However short it is: it may wait for something that the loop does."""
    calls: list[int] = []

    def asks_the_loop(array: Any) -> Any:
        trio.from_thread.run_sync(calls.append, 1, trio_token=loop)
        return _sin(array)

    loop = trio.lowlevel.current_trio_token()
    function = functools.partial(on_host, function=asks_the_loop)
    expert = await trio.to_thread.run_sync(expert_with, function)  # which tries it
    backends = make_backends({"ffn.0": expert}, SGD, seed=0)
    calls.clear()
    with trio.fail_after(60.0):
        async with open_rig(device=ThreadDevice(inline_s=100.0), backends=backends) as rig:
            for _ in range(4):
                await rig.forward("ffn.0", rows(1, WIDTH))
    assert len(calls) == 4


async def test_what_calls_the_host_costs_what_it_did(autojump_clock: trio.testing.MockClock) -> None:
    """In virtual time too, where a function's cost may go by its name."""
    seen: list[tuple[str, int]] = []

    def cost(name: str, rows: int) -> float:
        seen.append((name, rows))
        return 1.0

    backends = make_backends({"ffn.0": expert_with(on_host)}, SGD, seed=0)
    backends["ffn.0"].warm_up_bucket(2)
    assert backends["ffn.0"].programs.calls_host
    async with open_rig(device=InlineDevice(cost), backends=backends) as rig:
        await rig.forward("ffn.0", rows(2, WIDTH))
        await rig.backward("ffn.0", b"1", rows(2, WIDTH), rows(2, WIDTH, seed=1))
    assert seen == [("forward", 2), ("backward", 2)]
