"""Loops under jit that do not read their results, with experts in the same process, never stop and lose no call."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax.experimental import io_callback

from dmoe_jax import connect, feedforward, product_key
from dmoe_jax.routing.base import score
from tests.dmoe_jax.unread_steps import Loop


def run_in_process(when: str, loops: Sequence[Loop], *, devices: int = 1, cores: str | None = None) -> None:
    """Run loops in a process of their own, on some CPU devices and cores; raises unless all of them end."""
    environment = {name: text for name, text in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    command = [sys.executable, "-m", "tests.dmoe_jax.unread_steps", when, json.dumps([asdict(loop) for loop in loops])]
    if cores is not None:
        command = ["taskset", "-c", cores, *command]
    done = subprocess.run(
        command,
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600 + 60 * len(loops),  # one that stops stands still for ever; beside other work all take long
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def test_experts_are_served_while_every_place_of_xla_is_taken(tmp_path: Path) -> None:
    """More programs than XLA runs at once (32) are dispatched, and the first waits: calls, updates and saves go on."""
    expert = feedforward(d_model=4)
    go, x = threading.Event(), np.ones((3, 4), np.float32)
    dispatched: list[int] = []

    def wait(value: object) -> np.ndarray:
        assert go.wait(60)
        return np.asarray(value)

    # XLA runs a program where it is dispatched, if its inputs are there: those of the one that waits are not yet.
    long = jax.jit(lambda x: jax.lax.fori_loop(0, 10, lambda _, x: x @ x, x)[0])
    waits = jax.jit(lambda x: io_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x))
    further = jax.jit(lambda x: x + 1)
    go.set()
    further(waits(long(jnp.zeros((1000, 1000))))).block_until_ready()  # compiled, else the long one ends meanwhile
    go.clear()

    def fill() -> None:
        value = waits(long(jnp.zeros((1000, 1000))))
        for number in range(40):
            dispatched.append(number)
            value = further(value)

    with connect(seed=0) as swarm:
        served = swarm.serve(
            {"e.[0:2].[0:2]": expert}, optimizer=optax.sgd(0.1), warm_up_rows=4, checkpoint_dir=tmp_path
        )
        mixture = swarm.mixture("e", expert, product_key((2, 2)), k_best=2)
        mixture.check()
        router = mixture.remote.router
        scores = jax.tree.map(
            np.asarray, score(router, router.init(jax.random.key(0), 4), jnp.asarray(x))._replace(extras=())
        )
        loop = threading.Thread(target=fill)
        loop.start()
        try:
            for _ in range(3000):
                loop.join(0.01)
                if len(dispatched) >= 20:
                    break

            async def call() -> int:
                choice = await mixture.remote.choose(scores)
                _, _, residual = await mixture.remote.forward(choice, (x,), None)
                await mixture.remote.backward(residual, np.stack([x, x], axis=1))
                return len(await swarm.swarm.experts())

            for _ in range(3):
                assert swarm.run(call) == 4
            served.close()  # saves them
        finally:
            was_full = len(dispatched) < 40
            go.set()
            loop.join(60)
        assert was_full, "more than 40 programs run at once"
        assert swarm.statistics.failures == {}
        assert any(tmp_path.iterdir())


UNREAD = [
    Loop(steps=500),
    Loop(steps=500, layers=("convolution",)),
    Loop(steps=500, layers=("feedforward", "wide"), rows=256),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("when", ["first", "late"])
@pytest.mark.parametrize("devices", [1, 2])
def test_five_hundred_unread_steps(when: str, devices: int) -> None:
    """With one layer, with convolutions, with two layers and large arrays; the batch on one device or on two."""
    loops = [Loop(**asdict(loop) | {"all_devices": devices > 1}) for loop in UNREAD]
    run_in_process(when, read_often(loops) if when == "late" and devices > 1 else loops, devices=devices)


def read_often(loops: Sequence[Loop]) -> list[Loop]:
    """The loops with a read every 16 steps. With a thread a core XLA stops for good when 32 steps over several devices
    are under way, a loop of plain JAX, too; `connect` says so when it comes late."""
    return [replace(loop, read_every=min(loop.read_every or 16, 16)) for loop in loops]


@pytest.mark.slow
def test_who_connects_late_is_told_of_several_devices() -> None:
    """A warning names XLA's own limit and what to do; with one device, or first, there is none."""
    program = "import sys, jax; sys.argv[1] == 'late' and jax.numpy.zeros(3).sum(); import dmoe_jax; dmoe_jax.connect()"
    for when, devices, is_told in (("late", 2, True), ("late", 1, False), ("first", 2, False)):
        environment = {name: text for name, text in os.environ.items() if name != "NPROC"}
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        command = [sys.executable, "-c", program, when]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert ("read a result every 16 steps" in done.stderr) == is_told


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("when", ["first", "late"])
def test_one_core_is_enough(when: str) -> None:
    """XLA then has a single thread, if `connect` comes late."""
    run_in_process(when, [Loop(layers=("convolution", "wide"), rows=256), Loop(whole_grid=True)], cores="0")


LOOPS = st.builds(
    Loop,
    layers=st.lists(st.sampled_from(["feedforward", "convolution", "wide"]), min_size=1, max_size=3).map(tuple),
    whole_grid=st.booleans(),
    steps=st.integers(40, 80),
    read_every=st.sampled_from([None, 1, 7, 40]),
    rows=st.sampled_from([2, 32, 256]),
    all_devices=st.booleans(),
)
NUM_RANDOM_LOOPS = int(os.environ.get("DMOE_RANDOM_LOOPS", "20"))
LOOPS_A_PROCESS = max(5, NUM_RANDOM_LOOPS // 20)


@pytest.mark.slow
@pytest.mark.timeout(0)
@settings(
    max_examples=NUM_RANDOM_LOOPS // LOOPS_A_PROCESS,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # what failed is shown as it was: to shrink it takes minutes for each process
    suppress_health_check=list(HealthCheck),
)
@given(
    when=st.sampled_from(["first", "late"]),
    devices=st.sampled_from([1, 2]),
    loops=st.lists(LOOPS, min_size=LOOPS_A_PROCESS, max_size=LOOPS_A_PROCESS),
)
def test_random_loops(when: str, devices: int, loops: list[Loop]) -> None:
    """Layers, devices, reads and sizes as they come, several loops in each process."""
    run_in_process(when, read_often(loops) if when == "late" and devices > 1 else loops, devices=devices)
