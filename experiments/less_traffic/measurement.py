"""Train with each method and each seed; or, with `--search`, with each step size on seed 0."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.progress import Progress

from dmoe_jax.arrays import PyTree
from dmoe_jax.data import DataError
from dmoe_jax.runs.style import FAINT, GREY, dress
from experiments.bench import Experiment, Run
from experiments.less_traffic.methods import AXIS, Method, make_method
from experiments.less_traffic.settings import LessTrafficSettings, MethodName
from experiments.moshpit_sgd.tasks import Task, make_task
from experiments.panels import SERIES
from experiments.results import Bar, Result

TITLES: Mapping[MethodName, str] = {
    "every_step": "averaging every step",
    "diloco": "DiLoCo",
    "streaming_diloco": "Streaming DiLoCo",
    "noloco": "NoLoCo",
    "sparta": "SPARTA",
    "sparse_gradients": "sparse gradients",
    "sparse_diloco": "sparse pseudo-gradients",
    "sparser_diloco": "sparser pseudo-gradients",
}
"""Names of the methods for readers."""

RATES = (1e-3, 3e-3, 1e-2)
"""Step sizes of Adam that a search tries, the same for all methods."""
BEST_RATES: dict[MethodName, float] = {"sparse_diloco": 1e-2, "sparser_diloco": 1e-2}
"""Those that a search found best on seed 0; of methods that are not here `RATES[1]`."""

PEERS = 8
STRETCH = 10
"""Steps that are computed in one go."""

BARS = (
    Bar(name="sparse_payload_ratio", bound=100.0, comparison=">="),
    Bar(name="sparse_loss_ratio", bound=1.02),
    Bar(name="sparser_sent_ratio", bound=100.0, comparison=">="),
    Bar(name="sparser_loss_ratio", bound=1.02),
    Bar(name="diloco_bytes_ratio", bound=50.0, comparison=">="),
    Bar(name="diloco_loss_ratio", bound=1.02),
)

_SUMMARY = """{peers} peers, {steps} steps each, the same batches for all methods. Payload: what a peer has to say, all
averagings together. Sent: what leaves it, in an all-reduce or, of sparse payloads, an all-gather. Loss: of the mean of
all peers' parameters."""

Record = Mapping[str, Any]
"""A line of metrics.jsonl: the result of one method with one seed."""


def measure(run: Run[LessTrafficSettings]) -> None:
    """Train every method."""
    settings = run.settings
    task = make_task(settings.model)
    seeds = [0] if settings.search else list(range(settings.num_seeds))
    with Progress(console=run.console, transient=True) as progress:
        bar = progress.add_task("training", total=len(settings.names))
        for name in settings.names:
            progress.update(bar, description=TITLES[name])
            for rate in RATES if settings.search else (BEST_RATES.get(name, RATES[1]),):
                _train(run, task, name, rate, seeds)
            progress.advance(bar)


def _train(run: Run[LessTrafficSettings], task: Task, name: MethodName, rate: float, seeds: Sequence[int]) -> None:
    """Train with these seeds at once, and log them."""
    steps = run.settings.num_steps
    sizes = tuple(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(task.init, jax.random.key(0))))
    adam = optax.adam(optax.cosine_decay_schedule(rate, steps))
    method = make_method(name, optax.chain(optax.clip_by_global_norm(1.0), adam), sizes=sizes, peers=PEERS)
    rounds = steps // method.every
    payload, sent = rounds * method.payload_nbytes, rounds * method.sent_nbytes
    traffic = {"payload_nbytes": payload + method.last_nbytes[0], "sent_nbytes": sent + method.last_nbytes[1]}
    for seed, loss in zip(seeds, train(task, method, seeds, steps=steps, peers=PEERS), strict=True):
        run.log("result", method=name, seed=seed, inner_rate=rate, loss=loss, rounds=rounds, **traffic)
        run.say(f"{TITLES[name]}, seed {seed}, {rate:g}: {loss:.4f}")


def train(task: Task, method: Method, seeds: Sequence[int], *, steps: int, peers: int) -> list[float]:
    """Train all peers with each seed, from the same parameters and on the same batches whatever the method.

    Returns: for each seed the validation loss in nats of the mean of all peers' parameters.
    """
    params = [task.init(jax.random.key(seed)) for seed in seeds]
    rows = _stack([_stack([(own, method.optimizer.init(own), task.carry)] * peers) for own in params])
    streams = [[task.batches(peer, peers, seed) for peer in range(peers)] for seed in seeds]

    def of_peer(row: tuple[PyTree, PyTree, PyTree], batch: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        params, state, carry = row
        grads, carry = jax.grad(task.loss, has_aux=True)(params, batch, carry)
        updates, state = method.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, carry

    def of_seed(rows: PyTree, batches: PyTree) -> PyTree:
        step = jax.vmap(of_peer, axis_name=AXIS)
        return jax.lax.scan(lambda rows, batch: (step(rows, batch), None), rows, batches)[0]

    stretch = jax.jit(jax.vmap(of_seed), donate_argnums=0)
    for _ in range(0, steps, STRETCH):
        rows = stretch(rows, _stack([_stack([_batch(own) for _ in range(STRETCH)]) for own in streams]))
    means = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=1), rows[0])
    return [float(loss) for loss in jax.jit(jax.vmap(task.evaluate))(means)]


def _batch(streams: Sequence[Iterator[PyTree]]) -> PyTree:
    """The next batch of each peer, [peers, ...]."""
    return _stack([next(stream) for stream in streams])


def _stack(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def figures_of(results: Sequence[Record]) -> dict[str, float]:
    """Mean losses and bytes of each method, and what the bars compare."""
    by_method = by_name(results)
    figures: dict[str, float] = {}
    for name, records in by_method.items():
        losses = [record["loss"] for record in records]
        figures |= {f"{name}_loss": fmean(losses), f"{name}_loss_min": min(losses), f"{name}_loss_max": max(losses)}
        figures[f"{name}_payload_mb"] = records[0]["payload_nbytes"] / 1e6
        figures[f"{name}_sent_mb"] = records[0]["sent_nbytes"] / 1e6
    if "every_step" not in by_method:
        return figures
    plain = by_method["every_step"][0]
    kinds: tuple[tuple[str, MethodName, str], ...] = (
        ("sparse", "sparse_diloco", "payload"),
        ("sparser", "sparser_diloco", "sent"),
        ("diloco", "diloco", "bytes"),
    )
    for short, name, kind in kinds:
        if name in by_method:
            figures[f"{short}_loss_ratio"] = figures[f"{name}_loss"] / figures["every_step_loss"]
            one, other = (
                # All bytes, or those of one averaging: rarer averagings do not count there.
                record["sent_nbytes"] if kind == "bytes" else record[f"{kind}_nbytes"] / record["rounds"]
                for record in (plain, by_method[name][0])
            )
            figures[f"{short}_{kind}_ratio"] = one / other
    return figures


def by_name(results: Sequence[Record]) -> dict[MethodName, list[Record]]:
    """Sort records by method."""
    sorted_: dict[MethodName, list[Record]] = {}
    for record in results:
        sorted_.setdefault(record["method"], []).append(record)
    return sorted_


def summarise(run: Run[LessTrafficSettings]) -> Result | None:
    """Set the methods that are finished side by side; None before the first is."""
    results = run.records("result")
    if not results:
        return None
    if run.settings.search:
        best = {name: min(records, key=lambda record: record["loss"]) for name, records in by_name(results).items()}
        figures = {f"{name}_{key}": record[key] for name, record in best.items() for key in ("inner_rate", "loss")}
        return Result(title="Best step sizes on seed 0", figures=figures)
    return Result(
        title="Final loss against bytes sent",
        summary=_SUMMARY.format(peers=PEERS, steps=run.settings.num_steps),
        figures=figures_of(results),
        bars=[] if run.settings.quick or run.settings.steps else BARS,
    )


def draw(run: Run[LessTrafficSettings], _: Result) -> Figure | None:
    """Draw final loss over bytes sent, a point for each method and seed; nothing for a search."""
    if run.settings.search:
        return None
    by_method = by_name(run.records("result"))
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    dress(axes, "validation loss (nats)", "bytes that leave a peer")
    axes.set_xscale("log")
    axes.grid(color=FAINT, linewidth=0.8)
    for place, (name, records) in enumerate(by_method.items()):
        x, y = [record["sent_nbytes"] for record in records], [record["loss"] for record in records]
        axes.plot(x, y, "os"[place // len(SERIES)], color=SERIES[place % len(SERIES)], markersize=5, label=TITLES[name])
    if "every_step" in by_method:
        bound = BARS[-1].bound * fmean(record["loss"] for record in by_method["every_step"])
        axes.axhline(bound, color=GREY, linestyle="--", linewidth=1, label="averaging every step, and 2 %")
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Final validation loss over the bytes that leave a peer, a point for each method and seed",
    expected=(DataError,),
)
