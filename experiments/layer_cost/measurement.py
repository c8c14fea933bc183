"""One training step of a router and an expert layer in three ways, in turns; then several loops under `jit` at once.

The node serves from another process, as a volunteer's would; the experts do not learn, so that every step is the same.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from dmoe_jax.experts import feedforward
from dmoe_jax.mixture.flax_layers import BlockingMixture
from dmoe_jax.mixture.local import init_experts, local_mixture
from dmoe_jax.peers.security import Plain
from dmoe_jax.routing.base import gather_logits, score
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.swarm.blocking import BlockingSwarm, connect
from dmoe_net.errors import NetError
from experiments.bench import Experiment, Run
from experiments.layer_cost.settings import LayerCostSettings
from experiments.results import Result

GRID, K_BEST = (2, 2), 2
ROUTER = product_key(GRID)
WAYS = ("local", "autodiff", "in_jit")
_WARM_UP = 3


def _gate(params: Any, x: Any) -> Any:
    return score(ROUTER, params, x)


def _mean_square(mixed: Any, penalty: Any) -> Any:
    return jnp.mean(mixed**2) + penalty


@contextmanager
def _node(width: int, batch_size: int) -> Iterator[str]:
    """A node in a process of its own, as long as the block; whom to join."""
    command = [
        *(sys.executable, "-u", "-m", "dmoe_jax.cli", "node", "--insecure-loopback", "--expert", "feedforward"),
        *("--d-model", str(width), "--experts", "ffn.[0:2].[0:2]", "--freeze-experts"),
        *("--warm-up-rows", str(2 * batch_size), "--exit-on-stdin-eof"),
    ]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "--join" in line:
                yield line.split("--join", 1)[1].split()[0]
                return
        raise OSError(f"the node ended with status {process.wait()} before it served")
    finally:
        process.kill()
        process.wait()


def _steps(swarm: BlockingSwarm, mixture: BlockingMixture, width: int, x: Any) -> dict[str, Callable[[], object]]:
    """A training step by each way: the loss, and its gradients for the gate and the input."""
    expert = feedforward(d_model=width)
    experts = init_experts(jax.random.key(1), expert, "ffn", GRID)
    layer = mixture.linen()
    params = {"gate": ROUTER.init(jax.random.key(0), width), "x": x}

    async def forward(run: Any, params: Any, x: Any) -> Any:
        mixed, penalty = await mixture.remote(run, run(_gate, params["gate"], params["x"]), params["x"])
        return run(_mean_square, mixed, penalty)

    def local_loss(params: Any) -> Any:
        scores = _gate(params["gate"], params["x"])
        indices, mask = ROUTER.select(scores, K_BEST, None)
        weights = ROUTER.combine(gather_logits(scores, indices, GRID), mask)
        mixed = local_mixture(expert, experts, GRID, indices, mask, weights, params["x"])
        return _mean_square(mixed, ROUTER.aux_loss(scores, indices, mask))

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
    """Step by each way in turns, for every width; then by several threads at once."""
    settings = run.settings
    for width in settings.widths:
        with (
            _node(width, settings.batch_size) as peer,
            connect(peer, security=Plain(), listen=None, seed=settings.seed) as swarm,
        ):
            mixture = swarm.mixture("ffn", feedforward(d_model=width), ROUTER, k_best=K_BEST, grace_s=10.0)
            mixture.check()
            x = np.random.default_rng(settings.seed).normal(size=(settings.batch_size, width)).astype(np.float32)
            steps = _steps(swarm, mixture, width, jnp.asarray(x))
            for number in range(-_WARM_UP, settings.chosen_rounds):
                for way in WAYS:
                    started = time.perf_counter()
                    steps[way]()
                    if number >= 0:
                        run.log("step", width=width, way=way, took_s=time.perf_counter() - started)
            for loops in dict.fromkeys((1, settings.loops)):
                rate = _steps_per_s(steps["in_jit"], loops, settings.chosen_rounds)
                run.log("loops", width=width, loops=loops, steps_per_s=rate)
        run.say(f"width {width}: {_medians_ms(run)[width]} ms")


def _steps_per_s(step: Callable[[], object], loops: int, rounds: int) -> float:
    """Steps a second of so many loops together, each in a thread."""
    started = time.perf_counter()
    with ThreadPoolExecutor(loops) as pool:
        list(pool.map(lambda _: [step() for _ in range(rounds)], range(loops)))
    return loops * rounds / (time.perf_counter() - started)


def _medians_ms(run: Run[LayerCostSettings]) -> dict[int, dict[str, float]]:
    """Width -> way -> median milliseconds of a step, of what has been measured."""
    steps = run.records("step")
    found: dict[int, dict[str, float]] = {}
    for width, way in dict.fromkeys((each["width"], each["way"]) for each in steps):
        times = [each["took_s"] for each in steps if (each["width"], each["way"]) == (width, way)]
        found.setdefault(width, {})[way] = round(1000 * median(times), 2)
    return found


def summarise(run: Run[LayerCostSettings]) -> Result | None:
    """Compute each way's median step, and what the layer under `jit` costs over the recording."""
    all_medians = _medians_ms(run)
    if not all_medians:
        return None
    figures: dict[str, object] = {"batch_size": run.settings.batch_size, "loops": run.settings.loops}
    for width, medians in all_medians.items():
        figures |= {f"{way}_ms_{width}": value for way, value in medians.items()}
        if "in_jit" in medians and "autodiff" in medians:
            figures[f"in_jit_over_autodiff_{width}"] = medians["in_jit"] / medians["autodiff"]
        for record in run.records("loops"):
            if record["width"] == width:
                figures[f"steps_per_s_{width}_of_{record['loops']}_loops"] = record["steps_per_s"]
    return Result(title="Remote experts inside a jitted step", figures=figures)


def draw(run: Run[LayerCostSettings], result: Result) -> Figure:
    """Draw each way's median step by the expert's width."""
    del result
    medians = _medians_ms(run)
    figure = Figure(figsize=(7.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for place, way in enumerate(WAYS):
        heights = [ways.get(way, 0.0) for ways in medians.values()]
        bars = axes.bar([index + 0.27 * (place - 1) for index in range(len(heights))], heights, 0.25, label=way)
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(medians)), [f"width {width}" for width in medians])
    axes.set_ylabel("one training step, median (ms)")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Median time of a training step by each way",
    expected=(NetError, OSError),
)
