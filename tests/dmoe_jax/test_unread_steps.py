"""Loops under jit that do not read their results, with experts in the same process, never stop and lose no call."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dmoe_jax import connect, expert_from_nnx, feedforward, product_key
from dmoe_jax.routing import expert_choice
from dmoe_jax.routing.base import Scores, score
from dmoe_jax.swarm.blocking import BlockingSwarm

ROWS = 256
GRID = (2, 2)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One training loop."""

    layers: tuple[str, ...] = ("feedforward",)  # each layer's kind of experts, or "convolution" or "wide"
    whole_grid: bool = False  # the router selects in the graph, which takes one more callback
    steps: int = 100
    read_every: int | None = None  # steps after which the loss is read; None: only the last one is
    rows: int = 32  # samples of a batch
    all_devices: bool = False  # the batch lies on all devices, else on the first


class Convolution(nnx.Module):
    """A small convolution over the features, added to them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.convolution = nnx.Conv(1, 4, (5,), rngs=rngs)
        self.out = nnx.Linear(4 * 32, 32, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.out(nnx.relu(self.convolution(x[..., None])).reshape(x.shape[0], -1))


def run(swarm: BlockingSwarm, experts: dict[str, Any], loop: Loop) -> float:
    """The last loss of a loop; an AssertionError if a call failed, or was not made."""
    mixtures = []
    for kind in loop.layers:
        router = expert_choice(GRID) if loop.whole_grid else product_key(GRID)
        mixtures.append(swarm.mixture(kind, experts[kind], router, k_best=2, timeout_s=60.0, grace_s=60.0))
    widths = [mixture.remote.expert.inputs[0].shape[0] for mixture in mixtures]
    keys = iter(jax.random.split(jax.random.key(0), 2 * len(mixtures)))
    params = []
    for mixture, before, width in zip(mixtures, [32, *widths], widths, strict=False):
        gate = mixture.remote.router.init(next(keys), width)
        into = jax.random.normal(next(keys), (before, width)) / before**0.5  # wide layers in a row must not diverge
        params.append({"gate": gate, "anchor": jnp.zeros(()), "into": into})

    def loss(params: Any, x: Any) -> Any:
        for own, mixture in zip(params, mixtures, strict=True):
            hidden = x @ own["into"]
            x, _ = mixture.call(own["gate"], own["anchor"], hidden, hidden)
        return jnp.mean((x - 1) ** 2)

    @jax.jit
    def step(params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda leaf, grad: leaf - 0.01 * grad, params, grads), value

    x = np.random.default_rng(0).normal(size=(loop.rows, 32)).astype(np.float32)
    if loop.all_devices:
        mesh = Mesh(np.array(jax.devices()), ("data",))
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    calls = swarm.statistics.ok
    for number in range(loop.steps):
        params, value = step(params, x)
        if loop.read_every is not None and number % loop.read_every == 0:
            float(value)
    last = float(value)
    jax.block_until_ready(params)
    assert not swarm.statistics.failures, f"calls failed: {swarm.statistics.failures}"
    assert swarm.statistics.ok - calls >= 2 * loop.steps * len(mixtures), "calls are missing"
    assert np.isfinite(last)
    return last


def main(when: str, loops: list[Loop]) -> None:
    """Run loops one after the other, `connect` called before JAX computes anything ("first") or after it ("late")."""
    if when == "late":
        jnp.zeros(3).sum().block_until_ready()
    with connect(seed=0) as swarm:
        experts = {
            "feedforward": feedforward(d_model=32),
            "convolution": expert_from_nnx(Convolution, jnp.zeros((1, 32))),
            "wide": feedforward(d_model=256),
        }
        used = {kind: experts[kind] for loop in loops for kind in loop.layers}
        served = {f"{kind}.[0:2].[0:2]": expert for kind, expert in used.items()}
        swarm.serve(served, optimizer=optax.sgd(1e-3), warm_up_rows=ROWS)
        for number, loop in enumerate(loops):
            print(f"loop {number} of {len(loops)}: {loop}: {run(swarm, experts, loop):.4f}", flush=True)


def environment_of(devices: int) -> dict[str, str]:
    """Environment of a process with so many CPU devices, and as many threads as XLA takes by itself."""
    environment = {name: text for name, text in os.environ.items() if name != "NPROC"}
    return environment | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}


def run_in_process(when: str, loops: Sequence[Loop], *, devices: int = 1, cores: str | None = None) -> None:
    """Run loops in a process of their own, on some CPU devices and cores; raises unless all of them end."""
    if when == "late" and devices > 1:
        # With a thread a core XLA stops for good when 32 steps over several devices are under way, a loop of plain JAX,
        # too; `connect` says so when it comes late. So these loops are read every 16 steps.
        loops = [replace(loop, read_every=min(loop.read_every or 16, 16)) for loop in loops]
    program = [sys.executable, "-m", "tests.dmoe_jax.test_unread_steps", when]
    command = [*(["taskset", "-c", cores] if cores else []), *program, json.dumps([asdict(loop) for loop in loops])]
    timeout_s = 600 + 60 * len(loops)  # one that stops stands still for ever; beside other work all take long
    pipes = {"capture_output": True, "text": True, "timeout": timeout_s}
    done = subprocess.run(command, env=environment_of(devices), cwd=Path(__file__).parents[2], **pipes)
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
        settings = {"optimizer": optax.sgd(0.1), "warm_up_rows": 4, "checkpoint_dir": tmp_path}
        served = swarm.serve({"e.[0:2].[0:2]": expert}, **settings)
        mixture = swarm.mixture("e", expert, product_key((2, 2)), k_best=2)
        mixture.check()
        router = mixture.remote.router
        scores = Scores(tuple(map(np.asarray, score(router, router.init(jax.random.key(0), 4), jnp.asarray(x)).logits)))
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
    """Loops have one layer, convolutions, or two layers and large arrays; the batch lies on one device or on two."""
    run_in_process(when, [replace(loop, all_devices=devices > 1) for loop in UNREAD], devices=devices)


@pytest.mark.slow
def test_who_connects_late_is_told_of_several_devices() -> None:
    """A warning names XLA's own limit and what to do; with one device, or first, there is none."""
    program = "import sys, jax; sys.argv[1] == 'late' and jax.numpy.zeros(3).sum(); import dmoe_jax; dmoe_jax.connect()"
    for when, devices, is_told in (("late", 2, True), ("late", 1, False), ("first", 2, False)):
        command, environment = [sys.executable, "-c", program, when], environment_of(devices)
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
    run_in_process(when, loops, devices=devices)


if __name__ == "__main__":
    main(sys.argv[1], [Loop(**each | {"layers": tuple(each["layers"])}) for each in json.loads(sys.argv[2])])
