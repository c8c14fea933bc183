"""One training step of a router and an expert layer in three ways, in turns.

The node serves from another process, as a volunteer's would: this module, run as a helper. The experts do not learn, so
that every step is the same.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax import BlockingSwarm, NodeConfig, Plain, connect, feedforward, open_swarm
from dmoe_jax.mixture.local import init_experts
from dmoe_jax.models.layers import dmoe_layer
from dmoe_jax.routing import product_key, score
from dmoe_jax.runs.setting_up import set_up_jax
from dmoe_net import NetError
from experiments.bench import Experiment, Run
from experiments.layer_cost.settings import LayerCostSettings
from experiments.processes import HelperFailed, open_helpers, orders, run_helper, say
from experiments.results import Result

GRID, K_BEST, BATCH_SIZE = (2, 2), 2, 64
ROUTER = product_key(GRID)
_WARM_UP = 3


async def serve(*, width: int) -> None:
    """Serve the experts until standard input closes."""
    set_up_jax()
    async with open_swarm(listen="127.0.0.1:0", security=Plain()) as swarm:
        experts = {"ffn.[0:2].[0:2]": feedforward(d_model=width)}
        await swarm.serve(experts, optimizer=None, config=NodeConfig(warm_up_rows=2 * BATCH_SIZE))
        say(contact=swarm.contact)
        async for _ in orders():
            pass


def _gate(params: Any, x: Any) -> Any:
    return score(ROUTER, params, x)


def _mean_square(mixed: Any, penalty: Any) -> Any:
    return jnp.mean(mixed**2) + penalty


def _steps(swarm: BlockingSwarm, mixture: Any, width: int, x: Any) -> dict[str, Callable[[], object]]:
    """A training step by each way: the loss, and its gradients for the gate and the input."""
    expert, layer = feedforward(d_model=width), mixture.linen()
    experts = init_experts(jax.random.key(1), expert, "ffn", GRID)
    params = {"gate": ROUTER.init(jax.random.key(0), width), "x": x}

    async def forward(run: Any, params: Any, x: Any) -> Any:
        mixed, penalty = await mixture.remote(run, run(_gate, params["gate"], params["x"]), params["x"])
        return run(_mean_square, mixed, penalty)

    def local_loss(params: Any) -> Any:
        scores = _gate(params["gate"], params["x"])
        mixed, aux = dmoe_layer(expert, experts, ROUTER, K_BEST, scores, None, params["x"])
        return _mean_square(mixed, aux.aux_loss)

    def layer_loss(params: Any) -> Any:
        variables = {"params": {"gate": params["gate"], "anchor": jnp.zeros(())}}
        mixed, sown = layer.apply(variables, params["x"], mutable=["losses"])
        return _mean_square(mixed, sum(jax.tree.leaves(sown["losses"])))

    recorded = swarm.value_and_grad(forward)
    local, layered = (jax.jit(jax.value_and_grad(loss)) for loss in (local_loss, layer_loss))
    return {
        "local": lambda: jax.block_until_ready(local(params)),
        "autodiff": lambda: jax.block_until_ready(recorded(params, x)),
        "in_jit": lambda: jax.block_until_ready(layered(params)),
    }


def measure(run: Run[LayerCostSettings]) -> None:
    """Step by each way in turns, for every width."""
    settings = run.settings
    rounds = 10 if settings.quick else 40
    for width in (64, 256) if settings.quick else (64, 256, 512):
        with (
            open_helpers("experiments.layer_cost.measurement", [{"width": width}]) as (node,),
            connect(node.hello["contact"], security=Plain(), listen=None, seed=settings.seed) as swarm,
        ):
            mixture = swarm.mixture("ffn", feedforward(d_model=width), ROUTER, k_best=K_BEST, grace_s=10.0)
            mixture.check()
            x = np.random.default_rng(settings.seed).normal(size=(BATCH_SIZE, width)).astype(np.float32)
            steps = _steps(swarm, mixture, width, jnp.asarray(x))
            took_s: dict[str, list[float]] = {way: [] for way in steps}
            for _ in range(_WARM_UP + rounds):
                for way, step in steps.items():
                    started = time.perf_counter()
                    step()
                    took_s[way].append(time.perf_counter() - started)
            medians_ms = {way: 1000 * median(each[_WARM_UP:]) for way, each in took_s.items()}
        run.log("width", width=width, medians_ms=medians_ms)
        run.say(f"width {width}: {', '.join(f'{way} {each:.1f} ms' for way, each in medians_ms.items())}")


def summarise(run: Run[LayerCostSettings]) -> Result | None:
    """Compute each way's median step, and what the layer under `jit` costs over the recording; None without a width."""
    figures: dict[str, object] = {}
    for record in run.records("width"):
        width, medians = record["width"], record["medians_ms"]
        figures |= {f"{way}_ms_{width}": value for way, value in medians.items()}
        figures[f"in_jit_over_autodiff_{width}"] = medians["in_jit"] / medians["autodiff"]
    return Result(title="Remote experts inside a jitted step", figures=figures) if figures else None


EXPERIMENT = Experiment(measure=measure, summarise=summarise, expected=(NetError,), causes=(HelperFailed,))

if __name__ == "__main__":
    run_helper(serve)
