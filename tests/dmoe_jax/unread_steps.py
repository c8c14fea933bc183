"""Jitted loops over remote layers whose experts are in the same process, as a program: it must end, and lose no call.

python -m tests.dmoe_jax.unread_steps first|late '[{"layers": ["feedforward"], ...}, ...]'
"""

import json
import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dmoe_jax import connect, expert_from_nnx, feedforward, product_key
from dmoe_jax.routing import expert_choice
from dmoe_jax.swarm.blocking import BlockingSwarm

ROWS = 256
GRID = (2, 2)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One training loop."""

    layers: tuple[str, ...] = ("feedforward",)
    """Kind of the experts of each layer: "feedforward", "convolution" or "wide"."""
    whole_grid: bool = False
    """True if the router selects in the graph, which takes one more callback."""
    steps: int = 100
    """Steps of the loop."""
    read_every: int | None = None
    """Steps after which the loss is read; None: only the last one is."""
    rows: int = 32
    """Samples of a batch."""
    all_devices: bool = False
    """True if the batch lies on all devices, else it is on the first."""


class Convolution(nnx.Module):
    """A small convolution over the features, added to them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.convolution = nnx.Conv(1, 4, (5,), rngs=rngs)
        self.out = nnx.Linear(4 * 32, 32, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.out(nnx.relu(self.convolution(x[..., None])).reshape(x.shape[0], -1))


def run(swarm: BlockingSwarm, experts: dict[str, Any], loop: Loop) -> float:
    """The last loss of a loop.

    Raises:
      AssertionError: a call failed, or was not made.
    """
    mixtures = []
    for kind in loop.layers:
        router = expert_choice(GRID) if loop.whole_grid else product_key(GRID)
        mixtures.append(swarm.mixture(kind, experts[kind], router, k_best=2, timeout_s=60.0, grace_s=60.0))
    widths = [mixture.remote.expert.inputs[0].shape[0] for mixture in mixtures]
    keys = iter(jax.random.split(jax.random.key(0), 2 * len(mixtures)))
    params = [
        {
            "gate": mixture.remote.router.init(next(keys), width),
            "anchor": jnp.zeros(()),
            "into": jax.random.normal(next(keys), (before, width))
            / before**0.5,  # wide layers in a row must not diverge
        }
        for mixture, before, width in zip(mixtures, [32, *widths], widths, strict=False)
    ]

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


if __name__ == "__main__":
    main(
        sys.argv[1], [Loop(**settings | {"layers": tuple(settings["layers"])}) for settings in json.loads(sys.argv[2])]
    )
