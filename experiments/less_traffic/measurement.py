"""Train with each method and each seed; or, with `--search`, with each step size on seed 0."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import jax
import numpy as np
import optax
from jax.typing import ArrayLike
from rich.progress import Progress

from dmoe_jax.data import DataError
from dmoe_jax.runs.report import ReportTable
from dmoe_net.wire.sparse import HEADER_BYTES, SparseCoding, sparse_nbytes
from experiments.bench import Experiment, Run
from experiments.less_traffic.figure import TITLES, Record, traffic_figure
from experiments.less_traffic.methods import Method, make_method
from experiments.less_traffic.settings import (
    INNER_RATES,
    RATES,
    LessTrafficSettings,
    MethodName,
)
from experiments.less_traffic.training import Lane, all_batches, train
from experiments.moshpit_sgd.tasks import Task, make_task
from experiments.results import Bar, Result

BLOCK_RATIO = 4 * 4096 / (sparse_nbytes(SparseCoding(), [4096]) - HEADER_BYTES)
"""Bytes of a whole block in float32 over its bytes compressed, 195.05: of models whose arrays are large."""

BARS = (
    Bar(name="sparse_payload_ratio", bound=100.0, comparison=">="),
    Bar(name="sparse_loss_ratio", bound=1.02),
    Bar(name="sparser_sent_ratio", bound=100.0, comparison=">="),
    Bar(name="sparser_loss_ratio", bound=1.02),
    Bar(name="diloco_bytes_ratio", bound=50.0, comparison=">="),
    Bar(name="diloco_loss_ratio", bound=1.02),
)
_LANES = 3
"""Trainings that are computed together: seeds, or step sizes in a search. One number, one compilation."""


def measure(run: Run[LessTrafficSettings]) -> None:
    """Train every method."""
    settings = run.settings
    task = make_task(settings.model)
    with Progress(console=run.console, transient=True) as progress:
        bar = progress.add_task("training", total=len(settings.names))
        for name in settings.names:
            progress.update(bar, description=TITLES[name])
            inner_rate, outer_rate = RATES[name]
            if settings.search:
                lanes = [Lane(seed=0, inner_rate=rate, outer_rate=outer_rate) for rate in INNER_RATES]
            else:
                seeds = range(settings.num_seeds)
                lanes = [Lane(seed=seed, inner_rate=inner_rate, outer_rate=outer_rate) for seed in seeds]
            _train(run, task, name, lanes)
            progress.advance(bar)


def _train(run: Run[LessTrafficSettings], task: Task, name: MethodName, lanes: Sequence[Lane]) -> None:
    """Train the lanes and log them."""
    settings, steps = run.settings, run.settings.num_steps
    sizes = tuple(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(task.init, jax.random.key(0))))

    def make(inner_rate: ArrayLike, outer_rate: ArrayLike) -> Method:
        decay = optax.cosine_decay_schedule(inner_rate, steps)
        inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(decay))
        return make_method(name, inner, outer_rate, sizes=sizes, peers=settings.peers, every=settings.every)

    batches = {
        seed: all_batches(task, peers=settings.peers, steps=steps, seed=seed) for seed in {lane.seed for lane in lanes}
    }
    for first in range(0, len(lanes), _LANES):
        some = lanes[first : first + _LANES]
        own = jax.tree.map(lambda *leaves: np.stack(leaves), *(batches[lane.seed] for lane in some))
        for lane, outcome in zip(some, train(task, make, some, batches=own, peers=settings.peers), strict=True):
            what = {"method": name, "seed": lane.seed, "inner_rate": lane.inner_rate, "outer_rate": lane.outer_rate}
            for step, loss in zip(outcome.steps, outcome.losses, strict=True):
                run.log("evaluation", **what, step=step, loss=loss)
            run.log(
                "result", **what, loss=outcome.losses[-1], own_loss=outcome.own_loss, rounds=outcome.rounds,
                payload_nbytes=outcome.payload_nbytes, sent_nbytes=outcome.sent_nbytes,
            )  # fmt: skip
            run.say(
                f"{TITLES[name]}, seed {lane.seed}, {lane.inner_rate:g} {lane.outer_rate:g}: {outcome.losses[-1]:.4f}"
            )


def figures_of(results: Sequence[Record]) -> dict[str, float]:
    """Mean losses and bytes of each method, and what the bars compare."""
    by_method = by_name(results)
    figures: dict[str, float] = {}
    for name, records in by_method.items():
        losses = [record["loss"] for record in records]
        figures |= {f"{name}_loss": fmean(losses), f"{name}_loss_min": min(losses), f"{name}_loss_max": max(losses)}
        figures[f"{name}_payload_mb"] = records[0]["payload_nbytes"] / 1e6
        figures[f"{name}_sent_mb"] = records[0]["sent_nbytes"] / 1e6
    plain = by_method.get("every_step")
    if plain is None:
        return figures
    for short, name in (("sparse", "sparse_diloco"), ("sparser", "sparser_diloco"), ("diloco", "diloco")):
        if name not in by_method:
            continue
        figures[f"{short}_loss_ratio"] = figures[f"{name}_loss"] / figures["every_step_loss"]
    if "sparse_diloco" in by_method:
        figures["sparse_payload_ratio"] = _ratio_of_an_averaging(by_method, "payload_nbytes", "sparse_diloco")
    if "sparser_diloco" in by_method:
        figures["sparser_sent_ratio"] = _ratio_of_an_averaging(by_method, "sent_nbytes", "sparser_diloco")
    if "diloco" in by_method:
        figures["diloco_bytes_ratio"] = plain[0]["sent_nbytes"] / by_method["diloco"][0]["sent_nbytes"]
    return figures


def _ratio_of_an_averaging(by_method: Mapping[str, Sequence[Record]], key: str, name: str) -> float:
    """Bytes of one averaging in float32 over those of one of this method: rarer averagings do not count."""
    plain, sparse = by_method["every_step"][0], by_method[name][0]
    return float(plain[key] / plain["rounds"] / (sparse[key] / sparse["rounds"]))


def by_name(results: Sequence[Record]) -> dict[str, list[Record]]:
    """Sort records by method."""
    sorted_: dict[str, list[Record]] = {}
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
        figures: dict[str, Any] = {}
        for name, record in best.items():
            figures |= {f"{name}_{key}": record[key] for key in ("inner_rate", "loss")}
        return Result(title="Best step sizes on seed 0", figures=figures)
    rows = []
    for name, records in by_name(results).items():
        losses = [record["loss"] for record in records]
        first = records[0]
        rows.append(
            (TITLES[name], first["inner_rate"], first["outer_rate"], fmean(losses), min(losses), max(losses),
             fmean(record["own_loss"] for record in records), first["payload_nbytes"] / 1e6, first["sent_nbytes"] / 1e6)
        )  # fmt: skip
    head = ("method", "inner rate", "outer rate", "loss", "least", "most", "own loss", "offered MB", "sent MB")
    return Result(
        title="Final loss against bytes sent",
        summary=f"{run.settings.peers} peers, {run.settings.num_steps} steps each, the same batches for all methods.",
        figures=figures_of(results) | {"block_ratio": BLOCK_RATIO},
        bars=[] if run.settings.quick or run.settings.steps else BARS,
        tables=[ReportTable(title="Methods", head=head, rows=rows, note=_NOTE)],
    )


_NOTE = """Offered: what a peer has to say, all averagings together. Sent: what leaves it, in an all-reduce or, of
sparse payloads, an all-gather. Loss: of the mean of all peers' parameters; own loss: the mean of their own."""

EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=lambda run, _: None if run.settings.search else traffic_figure(by_name(run.records("result"))),
    figure_text="Final validation loss over the bytes that leave a peer, a point for each method and seed",
    expected=(DataError,),
)
