"""The rows of the table, simulated one after the other, beside the paper and the theory.

Numbers of N(0, 1), one a peer, are averaged by each method while peers come and go. Definitions are those of the
simulator published with Moshpit SGD. In each round each peer is absent with probability p, independently, and keeps its
number. All methods see the same numbers and the same absences, and all restarts are simulated at once.

A round of a method is a function that may be traced, also under `vmap`: values are [peers], `alive` is bool [peers],
and absent peers keep their own values.
"""

import functools
from collections.abc import Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PRNGKeyArray
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dmoe_jax.arrays import PyTree
from dmoe_jax.optim import FailureRule, distortion, group_mean, moshpit_round, random_cells
from dmoe_jax.runs.report import ReportTable
from dmoe_jax.runs.style import GREY, dress, end_labels
from dmoe_net import MoshpitGrid
from experiments.bench import Experiment, Run
from experiments.moshpit_averaging.paper import SQUARE, TARGETS, TITLES, MethodName, Rounds, Setting, paper_rounds
from experiments.moshpit_averaging.settings import AveragingSettings
from experiments.panels import series_style
from experiments.results import Result

ROUNDS = 50
"""Rounds after which a restart is given up; it counts as that many."""

BARRED: tuple[MethodName, ...] = ("random_groups", "moshpit")
"""Methods to which the bar applies, under "exclude". Deterministic ones agree anyway or differ by definition."""

TOLERANCE = 0.5
"""Rounds by which these may differ from the paper's."""

_MIXING_TOLERANCE = 0.05
"""Parts of the formula by which random groups may mix otherwise."""
_MIXING_RUNS, _MIXING_ROUNDS = 2048, 3

_FLOOR = 1e-12
"""Least variance drawn: below the targets, and above what float32 rounds away."""
_MOST_ROUNDS = 20
"""Rounds drawn: by then Moshpit and random groups are done, and gossip and PushSum never would be."""

_SUMMARY = (
    "Each peer holds a number of N(0, 1). Mean rounds until the variance over the peers is at most 1e-9 (at most "
    f"1e-4), {ROUNDS} where it never is; in square brackets what the paper's simulators need."
)


def simulate(setting: Setting, *, restarts: int, rounds: int, seed: int) -> dict[MethodName, np.ndarray]:
    """Compute the variance over the peers before the first round and after each: [restarts, rounds + 1] by method."""
    num_peers, grid = setting.num_peers, setting.grid
    keys = jax.vmap(lambda key: jax.random.split(key, 4))(jax.random.split(jax.random.key(seed), restarts))
    draws = (
        jax.vmap(lambda key: jax.random.normal(key, (num_peers,)))(keys[:, 0]),
        jax.vmap(lambda key: jax.random.uniform(key, (rounds, num_peers)) >= setting.failure)(keys[:, 1]),
        jax.vmap(lambda key: random_cells(key, grid, num_peers))(keys[:, 2]),
        keys[:, 3],
    )
    rules = {"grid": grid, "failure_rule": setting.failure_rule}
    return {method: np.asarray(_variances(*draws, method=method, **rules)) for method in get_args(MethodName)}


def mean_rounds(variances: np.ndarray) -> dict[str, float]:
    """Average over the restarts the rounds after which the variance first is at most each target.

    Where it never is, all rounds count.
    """
    rounds = {}
    for target in TARGETS:
        is_done = variances <= float(target)
        first = np.where(is_done.any(axis=1), is_done.argmax(axis=1), variances.shape[1] - 1)
        rounds[f"rounds_to_{target}"] = float(first.mean())
    return rounds


def measure_mixing(*, runs: int, rounds: int, seed: int) -> tuple[float, float]:
    """Set random groups, of a full square of peers who are all there, beside what a round leaves by the formula.

    That is (r - 1)/N + r/N^2 of the variance for N peers in r groups, whatever the values are (Ryabinin et al., 2021).

    Returns:
      The share that a round leaves, mean over all rounds of all runs, over the formula's; the same of all rounds.
    """
    num_peers, num_groups = SQUARE.num_cells, SQUARE.num_groups
    values_key, groups_key = jax.random.split(jax.random.key(seed))
    found = _variances(
        jax.random.normal(values_key, (runs, num_peers)),
        jnp.ones((runs, rounds, num_peers), bool),
        jnp.zeros((runs, num_peers), jnp.int32),
        jax.random.split(groups_key, runs),
        method="random_groups",
        grid=SQUARE,
        failure_rule="exclude",
    )
    variances = np.asarray(found, np.float64)
    factor = (num_groups - 1) / num_peers + num_groups / num_peers**2
    of_a_round = (variances[:, 1:] / variances[:, :-1]).mean() / factor
    of_all = (variances[:, -1] / variances[:, 0]).mean() / factor**rounds
    return float(of_a_round), float(of_all)


@functools.partial(jax.jit, static_argnames=("method", "grid", "failure_rule"))
def _variances(
    values: Float[Array, "restarts peers"],
    alive: Array,
    cells: Array,
    keys: PRNGKeyArray,
    *,
    method: MethodName,
    grid: MoshpitGrid,
    failure_rule: FailureRule,
) -> Float[Array, "restarts rounds_and_start"]:
    """Simulate one method in all restarts.

    Args:
      values: what is averaged.
      alive: bool [restarts, rounds, peers].
      cells: int [restarts, peers], where peers sit on Moshpit's grid.
      keys: [restarts], for random groups.
    """

    def restart(values: Array, alive: Array, cells: Array, key: PRNGKeyArray) -> Array:
        def mix(values: Array, number: Array, alive: Array) -> Any:
            rule: dict[str, Any] = {"alive": alive, "failure_rule": failure_rule}
            match method:
                case "all_reduce":
                    return jnp.where(alive.all(), values.mean(), values)
                case "gossip":
                    return gossip_round(values, alive)
                case "push_sum":
                    return published_push_sum_round(values, alive, number)
                case "random_groups":
                    own_key = jax.random.fold_in(key, number)
                    return random_groups_round(values, key=own_key, group_size=grid.side, **rule)
                case "moshpit":
                    return moshpit_round(values, grid=grid, cells=cells, round_number=number, **rule)

        def one_round(values: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
            values = mix(values, *inputs)
            return values, distortion(values)

        _, after = jax.lax.scan(one_round, values, (jnp.arange(alive.shape[0]), alive))
        return jnp.append(distortion(values), after)

    return jax.vmap(restart)(values, alive, cells, keys)


def gossip_round(values: Array, alive: Array) -> Array:
    """Everybody on a ring gets the mean of itself and those of its two neighbours who are there."""
    shifts, present = (-1, 0, 1), alive.astype(values.dtype)
    total = sum(jnp.roll(jnp.where(alive, values, 0), shift) for shift in shifts)
    count = sum(jnp.roll(present, shift) for shift in shifts)
    return jnp.where(alive, total / jnp.maximum(count, 1), values)


def published_push_sum_round(values: Array, alive: Array, round_number: ArrayLike) -> Array:
    """Make a round of the SGP of the paper's table: plain means of a peer's and its present in-neighbours' values.

    Peer i hears i + 2^h and i + 2^(h+1), beginning with h = 1. Its matrices shift entries along the flattened matrix,
    so that whoever would hear past the last peer hears what its predecessor should: not doubly stochastic, and other
    rounds than with a closed graph. Kept, since the table was made with it.
    """
    num_peers = len(values)
    peer = jnp.arange(num_peers)
    hops = max(1, (num_peers - 1).bit_length() - 1)  # floor(log2(peers - 1)): then the graph begins anew
    hop = 2 ** ((jnp.asarray(round_number) + 1) % hops)
    sent, present = jnp.where(alive, values, 0), alive.astype(values.dtype)
    total, count = sent, present
    for shift in (hop, 2 * hop):
        sender, hearer = (peer + shift) % num_peers, (peer + (peer + shift >= num_peers)) % num_peers
        total = total.at[hearer].add(sent[sender])
        count = count.at[hearer].add(present[sender])
    return jnp.where(alive, total / jnp.maximum(count, 1), values)


def random_groups_round(
    tree: PyTree, alive: Array, *, key: PRNGKeyArray, group_size: int, failure_rule: FailureRule = "exclude"
) -> PyTree:
    """Peers are split at random into groups of `group_size`, anew each round; those left over join one each.

    Under "exclude" only those who are there are split; under "group_skips" all are, and absent ones stop their groups.
    The leaves of the tree are [peers, ...].
    """
    num_peers = len(alive)
    is_drawn = jnp.ones(num_peers, bool) if failure_rule == "group_skips" else alive
    place = jnp.where(is_drawn, jax.random.uniform(key, (num_peers,)), 2)  # those who are not drawn come last
    count = jnp.maximum(is_drawn.sum() // group_size, 1)
    rank = jnp.arange(num_peers)
    group_of_rank = jnp.where(rank < count * group_size, rank // group_size, rank % count)
    groups = jnp.zeros(num_peers, jnp.int32).at[jnp.argsort(place)].set(group_of_rank)
    return group_mean(tree, groups, num_groups=max(num_peers // group_size, 1), alive=alive, failure_rule=failure_rule)


def measure(run: Run[AveragingSettings]) -> None:
    """Simulate every row, then random groups beside the formula."""
    settings = run.settings
    for row in settings.rows:
        found = simulate(row, restarts=settings.restarts, rounds=ROUNDS, seed=settings.seed)
        methods = {method: mean_rounds(variances) for method, variances in found.items()}
        run.log(
            "setting",
            peers=row.num_peers,
            grid=[row.grid.side, row.grid.dims],
            failure=row.failure,
            failure_rule=row.failure_rule.replace("_", "-"),
            methods=methods,
            variances={method: each.mean(axis=0, dtype=np.float64).tolist() for method, each in found.items()},
        )
        texts = (f"{TITLES[method]} {rounds['rounds_to_1e-9']:.1f}" for method, rounds in methods.items())
        run.say(f"{row}, rounds to 1e-9: {', '.join(texts)}")
    of_a_round, of_all = measure_mixing(runs=_MIXING_RUNS, rounds=_MIXING_ROUNDS, seed=settings.seed)
    run.log("mixing", **{"mixing_ratio": of_a_round, f"mixing_ratio_of_{_MIXING_ROUNDS}_rounds": of_all})


def finished(run: Run[AveragingSettings]) -> list[tuple[Setting, Mapping[str, Any]]]:
    """Rows that are done, in order, with their records."""
    return list(zip(run.settings.rows, run.records("setting"), strict=False))


def summarise(run: Run[AveragingSettings]) -> Result | None:
    """Set what was simulated beside the paper; None where no row was finished."""
    rows = finished(run)
    if not rows:
        return None
    facts = {name: each[name] for each in run.records("mixing") for name in each if name.startswith("mixing_ratio")}
    missed = [text for row, record in rows for text in missed_bars(row, record["methods"])]
    if abs(facts.get("mixing_ratio", 1.0) - 1) > _MIXING_TOLERANCE:
        missed.append(f"mixing of random groups: {facts['mixing_ratio']:.3f} of the formula")
    facts["restarts"] = run.settings.restarts
    keys = ("peers", "grid", "failure", "failure_rule", "methods")
    cells = [
        (str(row), *(_cell(record["methods"][method], paper_rounds(row).get(method)) for method in TITLES))
        for row, record in rows
    ]
    return Result(
        title="Rounds of averaging among peers that may be absent",
        summary=_SUMMARY,
        figures={"table": [{key: record[key] for key in keys} for _, record in rows], **facts},
        missed=missed,
        shown={**facts, "missed_bars": "; ".join(missed) or "none"},
        tables=[ReportTable(title="Mean rounds to 1e-9 (to 1e-4)", head=("", *TITLES.values()), rows=cells)],
    )


def missed_bars(row: Setting, methods: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Name the methods and targets whose mean rounds are further from the paper's than they may be."""
    if row.failure_rule != "exclude":
        return []
    missed = []
    for method in BARRED:
        for target, theirs in zip(TARGETS, paper_rounds(row).get(method, ()), strict=False):
            ours = methods[method][f"rounds_to_{target}"]
            if theirs is not None and abs(ours - theirs) > TOLERANCE:
                missed.append(f"{TITLES[method]} to {target}, {row}: {ours:.2f}, paper {theirs:g}")
    return missed


def _cell(ours: Mapping[str, float], theirs: Rounds | None) -> str:
    """Our rounds, and in brackets the paper's."""
    text = f"{ours['rounds_to_1e-9']:.1f} ({ours['rounds_to_1e-4']:.1f})"
    if theirs is None:
        return text
    return text + (f" [{theirs[0]:.1f}]" if theirs[1] is None else f" [{theirs[0]:.1f} ({theirs[1]:.1f})]")


def draw(run: Run[AveragingSettings], _: Result) -> Figure:
    """Draw the mean variance after each round in one row, and rings where the paper's means of rounds lie."""
    # Methods differ where peers fail, but not so often that all do badly.
    published = [(row, record) for row, record in finished(run) if row.failure_rule == "exclude"]
    row, record = max(published, key=lambda each: (each[0].num_peers, -abs(each[0].failure - 0.005)))
    figure = Figure(figsize=(8.0, 4.4), layout="constrained")
    axes = figure.subplots()
    labels = []
    for place, (method, title) in enumerate(TITLES.items()):
        colour, _ = series_style(place)
        drawn = [max(value, _FLOOR) for value in record["variances"][method][: _MOST_ROUNDS + 1]]
        drawn = drawn[: drawn.index(_FLOOR) + 1] if _FLOOR in drawn else drawn
        axes.plot(range(len(drawn)), drawn, color=colour, linewidth=1.6)
        for target, theirs in zip(TARGETS, paper_rounds(row).get(method, ()), strict=False):
            if theirs is not None and theirs <= _MOST_ROUNDS:
                axes.plot(theirs, float(target), "o", mfc="white", mec=colour, markersize=6, zorder=3)
        labels.append((drawn[-1], title, colour))
    for target in TARGETS:
        axes.axhline(float(target), color=GREY, linewidth=0.9, linestyle=(0, (5, 3)), zorder=1)
    axes.set_yscale("log")
    axes.set_ylim(_FLOOR, 3)
    axes.set_xlim(0, _MOST_ROUNDS)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    dress(axes, f"Variance: {row}", "round (rings: the paper's mean rounds to the dashed lines)")
    end_labels(axes, labels)
    return figure


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Variance over rounds for each method, with rings where the paper's mean rounds lie",
)
