"""Numbers of N(0, 1), one a peer, averaged by each method while peers come and go; all restarts at once.

Definitions are those of the simulator published with Moshpit SGD. In each round each peer is absent with probability
p, independently, and keeps its number. All methods see the same numbers and the same absences.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from dmoe_jax.optim.averaging_methods import (
    all_reduce_round,
    gossip_round,
    mixing_factor,
    push_sum_hops,
    push_sum_round,
    random_groups_round,
)
from dmoe_jax.optim.peer_axis import FailureRule, moshpit_round, random_cells
from dmoe_jax.optim.peer_trees import distortion
from experiments.moshpit_averaging.paper import TARGETS, MethodName, Setting
from net.averaging.grouping.group_key import MoshpitGrid

_MAX_ABSENCES = 2**26
"""Entries of the mask of absences at once: a quarter of a gigabyte while it is drawn."""

_ROUNDING = 1e-10
"""Parts of the first variance that float32 may make of none."""


class _Swarms(NamedTuple):
    """What chance decides, for all restarts: the same for every method.

    Attributes:
      values: [restarts, peers], what is averaged.
      alive: bool [restarts, rounds, peers].
      cells: int [restarts, peers], where peers sit on Moshpit's grid.
      keys: PRNG keys [restarts], for random groups.
    """

    values: Array
    alive: Array
    cells: Array
    keys: PRNGKeyArray


class Mixing(NamedTuple):
    """Random groups beside the theory.

    Attributes:
      runs: over which means were taken.
      factor: the formula's, for one round.
      factor_ratio: what a round leaves of the variance, mean over all rounds of all runs, over the formula's.
      kept: mean over the runs of what 0, 1, 2, ... rounds leave of the variance; the formula has factor^t.
    """

    runs: int
    factor: float
    factor_ratio: float
    kept: tuple[float, ...]


def simulate(
    setting: Setting,
    *,
    restarts: int,
    rounds: int,
    seed: int,
    on_progress: Callable[[float], None] = lambda share: None,
) -> dict[MethodName, np.ndarray]:
    """Variance over the peers before the first round and after each, for each method.

    Args:
      setting: the swarm.
      restarts: independent repetitions.
      rounds: of each.
      seed: of everything random.
      on_progress: told, now and then, which share of the work was done since it was told last.

    Returns:
      [restarts, rounds + 1] for each method.
    """
    at_once = min(restarts, max(1, _MAX_ABSENCES // (rounds * setting.num_peers)))
    batches = math.ceil(restarts / at_once)
    # The last batch is drawn in full and cut, so that nothing is compiled for its size.
    keys = jax.random.split(jax.random.key(seed), (batches, at_once))
    methods = get_args(MethodName)
    found: dict[MethodName, list[np.ndarray]] = {method: [] for method in methods}
    for batch in keys:
        swarms = _draw(batch, setting.failure, num_peers=setting.num_peers, grid=setting.grid, rounds=rounds)
        for method in methods:
            variances = _variances(swarms, method=method, grid=setting.grid, failure_rule=setting.failure_rule)
            found[method].append(np.asarray(variances))
            on_progress(1 / (batches * len(methods)))
    return {method: np.concatenate(parts)[:restarts] for method, parts in found.items()}


def rounds_to(variances: np.ndarray, target: float) -> np.ndarray:
    """Rounds after which the variance first is at most the target, for each restart; all of them where it never is."""
    rounds = variances.shape[1] - 1
    return np.where((variances <= target).any(axis=1), (variances <= target).argmax(axis=1), rounds)


def mean_rounds(variances: np.ndarray) -> dict[str, float]:
    """Mean over the restarts of the rounds to each target, by its name."""
    return {name: float(rounds_to(variances, target).mean()) for name, target in TARGETS.items()}


def measure_mixing(num_peers: int, group_size: int, *, runs: int, rounds: int, seed: int) -> Mixing:
    """Random groups of peers who are all there, beside the formula for what a round leaves of the distortion.

    Args:
      num_peers: N.
      group_size: of at least two groups.
      runs: over which means are taken.
      rounds: of each.
      seed: of numbers and groups.
    """
    values_key, groups_key = jax.random.split(jax.random.key(seed))
    swarms = _Swarms(
        values=jax.random.normal(values_key, (runs, num_peers)),
        alive=jnp.ones((runs, rounds, num_peers), bool),
        cells=jnp.zeros((runs, num_peers), jnp.int32),
        keys=jax.random.split(groups_key, runs),
    )
    grid = MoshpitGrid(side=group_size, dims=1)
    found = _variances(swarms, method="random_groups", grid=grid, failure_rule="exclude")
    variances = np.asarray(found, np.float64)
    factor = mixing_factor(num_peers, num_peers // group_size)
    before, after = variances[:, :-1], variances[:, 1:]
    counts = before > _ROUNDING * variances[:, :1]  # a handful of peers may all agree by chance
    return Mixing(
        runs=runs,
        factor=factor,
        factor_ratio=float((after[counts] / before[counts]).mean() / factor),
        kept=tuple(float(kept) for kept in (variances / variances[:, :1]).mean(axis=0)),
    )


@functools.partial(jax.jit, static_argnames=("num_peers", "grid", "rounds"))
def _draw(keys: PRNGKeyArray, failure: float, *, num_peers: int, grid: MoshpitGrid, rounds: int) -> _Swarms:
    """Swarms for as many restarts as there are keys."""

    def restart(key: PRNGKeyArray) -> _Swarms:
        values_key, absence_key, cells_key, groups_key = jax.random.split(key, 4)
        return _Swarms(
            values=jax.random.normal(values_key, (num_peers,)),
            alive=jax.random.uniform(absence_key, (rounds, num_peers)) >= failure,
            cells=random_cells(cells_key, grid, num_peers),
            keys=groups_key,
        )

    return jax.vmap(restart)(keys)


@functools.partial(jax.jit, static_argnames=("method", "grid", "failure_rule"))
def _variances(
    swarms: _Swarms, *, method: MethodName, grid: MoshpitGrid, failure_rule: FailureRule
) -> Float[Array, "restarts rounds_and_start"]:
    """What `simulate` gives for one method."""

    def restart(swarm: _Swarms) -> Array:
        def one_round(held: tuple[Array, Array], inputs: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
            values, push_weights = held
            number, alive = inputs
            if method == "push_sum_weighted":
                values, push_weights = push_sum_round(values, push_weights, round_number=number, alive=alive)
            else:
                values = _mix(values, swarm, number, alive, method=method, grid=grid, failure_rule=failure_rule)
            return (values, push_weights), distortion(values)

        start = (swarm.values, jnp.ones_like(swarm.values))
        _, after = jax.lax.scan(one_round, start, (jnp.arange(swarm.alive.shape[0]), swarm.alive))
        return jnp.append(distortion(swarm.values), after)

    return jax.vmap(restart)(swarms)


def _mix(
    values: Array,
    swarm: _Swarms,
    number: Array,
    alive: Array,
    *,
    method: MethodName,
    grid: MoshpitGrid,
    failure_rule: FailureRule,
) -> Array:
    """What the peers hold after round `number`."""
    match method:
        case "all_reduce":
            return all_reduce_round(values, alive=alive)
        case "gossip":
            return gossip_round(values, alive=alive)
        case "push_sum":
            return _published_push_sum(values, number, alive)
        case "random_groups":
            key = jax.random.fold_in(swarm.keys, number)
            return random_groups_round(values, key=key, group_size=grid.side, alive=alive, failure_rule=failure_rule)
        case "moshpit":
            return moshpit_round(
                values, grid=grid, cells=swarm.cells, round_number=number, alive=alive, failure_rule=failure_rule
            )
    raise ValueError(f"no rule for {method!r}")


def _published_push_sum(values: Array, number: Array, alive: Array) -> Array:
    """What the paper's table calls SGP: everybody takes the plain mean of what those present of its in-neighbours have.

    Peer i hears i + 2^h and i + 2^(h+1), beginning with h = 1. Its matrices shift entries along the flattened matrix,
    so that whoever would hear past the last peer hears what its predecessor should: not doubly stochastic, and other
    rounds than with a closed graph. Kept, since the table was made with it.
    """
    num_peers = values.shape[0]
    peer = jnp.arange(num_peers)
    present = alive.astype(values.dtype)
    sent = jnp.where(alive, values, 0)
    hop = 2 ** ((number + 1) % push_sum_hops(num_peers))
    total, count = sent, present
    for shift in (hop, 2 * hop):
        sender, hearer = (peer + shift) % num_peers, (peer + (peer + shift >= num_peers)) % num_peers
        total = total.at[hearer].add(sent[sender])
        count = count.at[hearer].add(present[sender])
    return jnp.where(alive, total / jnp.maximum(count, 1), values)
