"""The methods, each an optimiser for all peers at once, and the bytes that leave a peer; all of them side by side."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from matplotlib.figure import Figure

from dmoe_jax.arrays import PyTree
from dmoe_jax.data import DataError
from dmoe_jax.optim import ErrorFeedback, moshpit_average, noloco, streaming_diloco
from dmoe_jax.runs.style import FAINT, GREY, dress
from dmoe_net.wire.sparse import SparseCoding, all_gather_nbytes, all_reduce_nbytes, sparse_nbytes
from experiments.bench import FACTORS, Experiment, Run
from experiments.emulation.settings import FIRST_SEARCH_SEED
from experiments.intervals import t_interval
from experiments.less_traffic.settings import EVERY, LessTrafficSettings, MethodName
from experiments.moshpit_averaging.measurement import random_groups_round
from experiments.moshpit_sgd.tasks import Task, make_task
from experiments.panels import SERIES
from experiments.results import Bar, Result, finals_of

AXIS = "peers"
FLOAT32 = 4

OUTER_MOMENTUM = 0.5
"""Momentum of (Streaming) DiLoCo. The papers' 0.9 is for many more than the 40 outer steps here; see the README."""
FRAGMENTS, OVERLAP, MIXING = 5, 5, 0.5
"""Streaming DiLoCo's parts of the model, steps that an average takes to arrive, and alpha."""
SHARE = 0.005
"""Share of the parameters that SPARTA averages after a step: the largest of the paper's."""
CODINGS: dict[MethodName, ErrorFeedback] = {
    # Without decay: what Adam does not get now it gets later.
    "sparse_gradients": ErrorFeedback(coding=SparseCoding(kept=64), decay=1.0),
    "sparse_diloco": ErrorFeedback(coding=SparseCoding(kept=64), decay=0.95),
    "sparser_diloco": ErrorFeedback(coding=SparseCoding(kept=24), decay=0.95),
}
"""Compression of what each of these methods sends; the second is SparseLoCo's setting."""
SPARSE_EVERY = 5
"""Steps between two averagings of compressed pseudo-gradients. With 50 a run of 1,000 steps would have 20, and each
parameter a chance of one in three to be sent at all."""

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

RATES: Mapping[MethodName, float] = {"sparse_diloco": 1e-2, "sparser_diloco": 1e-2}
"""Step sizes of Adam, of methods that are not here 3e-3: the best of 1e-3, 3e-3 and 1e-2 on seed 0. A search tries 1/32
to 4 times these."""

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

_COMPARED: Mapping[MethodName, tuple[str, str]] = {
    "sparse_diloco": ("sparse", "payload"),
    "sparser_diloco": ("sparser", "sent"),
    "diloco": ("diloco", "bytes"),
}
"""Methods with bars: their short names, and which bytes are compared."""

_SUMMARY = """{peers} peers, {steps} steps each, the same batches for all methods. Payload: what a peer has to say, all
averagings together. Sent: what leaves it, in an all-reduce or, of sparse payloads, an all-gather. Loss: of the mean of
all peers' parameters."""

Record = Mapping[str, Any]
"""A line of metrics.jsonl: the result of one method with one seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to train.

    Attributes:
      optimizer: of one peer, under `vmap` with the axis `AXIS`.
      every: steps between two averagings.
      payload_nbytes: bytes of what a peer offers in one averaging.
      sent_nbytes: bytes that leave a peer in one averaging.
      last_nbytes: the same two of the averaging of the parameters that is due in the end where peers differ then.
    """

    optimizer: optax.GradientTransformation
    every: int
    payload_nbytes: float
    sent_nbytes: float
    last_nbytes: tuple[int, int] = (0, 0)


def make_method(
    name: MethodName, inner: optax.GradientTransformation, *, sizes: tuple[int, ...], peers: int, every: int = EVERY
) -> Method:
    """The method of this name around the optimiser of each peer, for arrays of so many numbers."""
    size = sum(sizes)
    vector = (size * FLOAT32, all_reduce_nbytes(size, peers))
    whole: dict[str, Any] = {"payload_nbytes": vector[0], "sent_nbytes": vector[1]}
    outer = optax.sgd(1.0, momentum=OUTER_MOMENTUM, nesterov=True)
    diloco: dict[str, Any] = {"what": "pseudo_gradients", "average": _mean}
    match name:
        case "every_step":
            return Method(optimizer=moshpit_average(inner, what="gradients", average=_mean), every=1, **whole)
        case "diloco":
            return Method(optimizer=moshpit_average(inner, every=every, outer=outer, **diloco), every=every, **whole)
        case "streaming_diloco":
            optimizer = streaming_diloco(
                inner, average=_mean, every=every, fragments=FRAGMENTS, overlap=OVERLAP, mixing=MIXING, outer=outer
            )
            return Method(optimizer=optimizer, every=every, last_nbytes=vector, **whole)
        case "noloco":
            optimizer = noloco(inner, average=_mean_of_pair, every=every)
            both = 2 * vector[0]  # the way and the slow parameters, to one other peer
            return Method(optimizer=optimizer, every=every, payload_nbytes=both, sent_nbytes=both, last_nbytes=vector)
        case "sparta":
            few = {kind: SHARE * nbytes for kind, nbytes in whole.items()}
            return Method(optimizer=sparta(inner, share=SHARE), every=1, last_nbytes=vector, **few)
    feedback = CODINGS[name]
    sparse: dict[str, Any] = {
        "payload_nbytes": sparse_nbytes(feedback.coding, sizes),
        "sent_nbytes": all_gather_nbytes(feedback.coding, sizes, peers),
    }
    if name == "sparse_gradients":
        optimizer = moshpit_average(inner, what="gradients", average=_mean, compress=feedback)
        return Method(optimizer=optimizer, every=1, **sparse)
    every = min(every, SPARSE_EVERY)
    optimizer = moshpit_average(inner, every=every, outer=optax.sgd(1.0), compress=feedback, **diloco)
    return Method(optimizer=optimizer, every=every, **sparse)


def sparta(inner: optax.GradientTransformation, *, share: float, seed: int = 0) -> optax.GradientTransformation:
    """An optimiser that averages a random share of the parameters after each of its updates (Beton et al., "Improving
    the Efficiency of Distributed Training using Sparse Parameter Averaging", 2025).

    With m_t drawn from Bernoulli(share) for each parameter, alike at all peers:

        theta <- m_t * mean over peers of theta + (1 - m_t) * theta

    Here all parameters are averaged and the few are taken; a network carries the few. They follow from a seed that all
    share, so no indices travel.
    """

    def init(params: PyTree) -> PyTree:
        return inner.init(params), jnp.zeros((), jnp.int32)

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        inner_state, step = state
        updates, inner_state = inner.update(updates, inner_state, params)
        moved = optax.apply_updates(params, updates)
        mixed = jax.tree.map(jnp.where, sparta_masks(params, step, share=share, seed=seed), _mean(moved, step), moved)
        return jax.tree.map(jnp.subtract, mixed, params), (inner_state, step + 1)

    return optax.GradientTransformation(init, update)


def sparta_masks(params: PyTree, step: ArrayLike, *, share: float, seed: int) -> PyTree:
    """Return a mask of the parameters that are averaged after this step (from 0): a tree of bool of their shapes."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), step), len(leaves))
    masks = [jax.random.bernoulli(key, share, jnp.shape(leaf)) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, masks)


def _mean(tree: PyTree, round_number: ArrayLike) -> PyTree:
    del round_number
    return jax.lax.pmean(tree, AXIS)


def _mean_of_pair(tree: PyTree, round_number: ArrayLike) -> PyTree:
    """Gathers everything from everybody, which is what a simulation can afford."""
    gathered, own = jax.lax.all_gather(tree, AXIS), jax.lax.axis_index(AXIS)
    key, all_are_there = jax.random.fold_in(jax.random.key(7), round_number), jnp.ones(jax.lax.axis_size(AXIS), bool)
    mixed = random_groups_round(gathered, all_are_there, key=key, group_size=2)
    return jax.tree.map(lambda leaf: leaf[own], mixed)


def measure(run: Run[LessTrafficSettings]) -> None:
    """Train every method, with `--search` with each step size on a seed of its own."""
    settings, task, steps = run.settings, make_task("mnist"), run.settings.num_steps
    seeds, factors = ([FIRST_SEARCH_SEED], FACTORS) if settings.search else (list(range(settings.num_seeds)), (1.0,))
    sizes = tuple(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(task.init, jax.random.key(0))))
    for name, factor in itertools.product(settings.names, factors):
        rate = factor * RATES.get(name, 3e-3)
        adam = optax.adam(optax.cosine_decay_schedule(rate, steps))
        method = make_method(name, optax.chain(optax.clip_by_global_norm(1.0), adam), sizes=sizes, peers=PEERS)
        rounds = steps // method.every
        payload, sent = rounds * method.payload_nbytes, rounds * method.sent_nbytes
        traffic = {"payload_nbytes": payload + method.last_nbytes[0], "sent_nbytes": sent + method.last_nbytes[1]}
        run.say(f"{TITLES[name]}, {rate:g}: {len(seeds)} seeds at once")
        for seed, loss in zip(seeds, train(task, method, seeds, steps=steps, peers=PEERS), strict=True):
            run.log("result", method=name, seed=seed, step_size=rate, loss=loss, rounds=rounds, **traffic)
            run.say(f"{TITLES[name]}, seed {seed}: {loss:.4f}")


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
        batches = [[_stack([next(stream) for stream in own]) for _ in range(STRETCH)] for own in streams]
        rows = stretch(rows, _stack([_stack(own) for own in batches]))
    means = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=1), rows[0])
    return [float(loss) for loss in jax.jit(jax.vmap(task.evaluate))(means)]


def _stack(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def figures_of(results: Sequence[Record]) -> dict[str, Any]:
    """Mean losses and bytes of each method, and what the bars compare: ratios of losses are those of the means, their
    95 % intervals those of the ratios seed by seed."""
    by_method = by_name(results)
    figures: dict[str, Any] = {}
    for name, records in by_method.items():
        losses = [record["loss"] for record in records]
        figures |= {f"{name}_loss": fmean(losses), f"{name}_loss_min": min(losses), f"{name}_loss_max": max(losses)}
        figures[f"{name}_payload_mb"] = records[0]["payload_nbytes"] / 1e6
        figures[f"{name}_sent_mb"] = records[0]["sent_nbytes"] / 1e6
    if "every_step" not in by_method:
        return figures
    plain = by_method["every_step"][0]
    for name, (short, kind) in _COMPARED.items():
        if name in by_method:
            figures[f"{short}_loss_ratio"] = figures[f"{name}_loss"] / figures["every_step_loss"]
            pairs = zip(by_method[name], by_method["every_step"], strict=False)
            if (ends := t_interval([ours["loss"] / theirs["loss"] for ours, theirs in pairs]).ends) is not None:
                figures[f"{short}_loss_ratio_interval"] = ends
            one, other = (
                # All bytes, or those of one averaging: rarer averagings do not count there.
                record["sent_nbytes"] if kind == "bytes" else record[f"{kind}_nbytes"] / record["rounds"]
                for record in (plain, by_method[name][0])
            )
            figures[f"{short}_{kind}_ratio"] = one / other
    return figures


def by_name(results: Sequence[Record]) -> dict[MethodName, list[Record]]:
    """Sort records by method."""
    names = dict.fromkeys(record["method"] for record in results)
    return {name: [record for record in results if record["method"] == name] for name in names}


def summarise(run: Run[LessTrafficSettings]) -> Result | None:
    """Set the methods that are finished side by side; None before the first is."""
    results = run.records("result")
    if not results:
        return None
    if run.settings.search:
        best = {name: min(records, key=lambda record: record["loss"]) for name, records in by_name(results).items()}
        figures = {f"{name}_{key}": record[key] for name, record in best.items() for key in ("step_size", "loss")}
        return Result(title="Best step sizes", figures=figures)
    return Result(
        title="Final loss against bytes sent",
        summary=_SUMMARY.format(peers=PEERS, steps=run.settings.num_steps),
        figures=figures_of(results),
        runs=finals_of(results, "method"),
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
