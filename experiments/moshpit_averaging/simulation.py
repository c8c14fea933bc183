"""The measurement: numbers of N(0, 1), one a peer, averaged by each method while peers come and go.

Definitions are those of the simulator published with Moshpit SGD. In each round each peer is absent with probability
p, independently, and keeps its number. All methods see the same numbers and the same absences, and all restarts are
simulated at once.
"""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from dmoe_jax.optim.peer_axis import FailureRule, distortion, moshpit_round, random_cells
from dmoe_net.averaging.grouping.group_key import MoshpitGrid
from experiments.moshpit_averaging.methods import (
    all_reduce_round,
    gossip_round,
    mixing_factor,
    push_sum_hops,
    push_sum_round,
    random_groups_round,
)
from experiments.moshpit_averaging.paper import TARGETS, MethodName, Mixing, Row, Setting

_MAX_ABSENCES = 2**26
"""Entries of the mask of absences at once: a quarter of a gigabyte while it is drawn."""

_ROUNDING = 1e-10
"""Parts of the first variance that float32 may make of none."""


class _Swarms(NamedTuple):
    """Random draws of all restarts: the same for every method.

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


def row_of(setting: Setting, variances: Mapping[MethodName, np.ndarray]) -> Row:
    """Average over the restarts what `simulate` computed."""
    return Row(
        setting=setting,
        rounds={method: mean_rounds(found) for method, found in variances.items()},
        variances={method: found.mean(axis=0, dtype=np.float64).tolist() for method, found in variances.items()},
    )


def simulate(setting: Setting, *, restarts: int, rounds: int, seed: int) -> dict[MethodName, np.ndarray]:
    """Compute the variance over the peers before the first round and after each: [restarts, rounds + 1] by method."""
    at_once = min(restarts, max(1, _MAX_ABSENCES // (rounds * setting.num_peers)))
    batches = math.ceil(restarts / at_once)
    # The last batch is drawn in full and cut, so that nothing is compiled for its size.
    keys = jax.random.split(jax.random.key(seed), (batches, at_once))
    methods = get_args(MethodName)
    found: dict[MethodName, list[np.ndarray]] = {method: [] for method in methods}
    for batch in keys:
        swarms = _draw(batch, setting.failure, num_peers=setting.num_peers, grid=setting.grid, rounds=rounds)
        for method in methods:
            found[method].append(_variances(swarms, method, setting.grid, setting.failure_rule))
    return {method: np.concatenate(parts)[:restarts] for method, parts in found.items()}


def rounds_to(variances: np.ndarray, target: float) -> np.ndarray:
    """Count the rounds after which the variance first is at most the target, for each restart; all of them where it
    never is."""
    is_done = variances <= target
    return np.where(is_done.any(axis=1), is_done.argmax(axis=1), variances.shape[1] - 1)


def mean_rounds(variances: np.ndarray) -> dict[str, float]:
    """Average over the restarts the rounds to each target, by its name."""
    return {name: float(rounds_to(variances, target).mean()) for name, target in TARGETS.items()}


def measure_mixing(num_peers: int, group_size: int, *, runs: int, rounds: int, seed: int) -> Mixing:
    """Set random groups of peers who are all there beside the formula for what a round leaves of the distortion. There
    must be at least two groups: one is exact at once."""
    values_key, groups_key = jax.random.split(jax.random.key(seed))
    swarms = _Swarms(
        values=jax.random.normal(values_key, (runs, num_peers)),
        alive=jnp.ones((runs, rounds, num_peers), bool),
        cells=jnp.zeros((runs, num_peers), jnp.int32),
        keys=jax.random.split(groups_key, runs),
    )
    grid = MoshpitGrid(side=group_size, dims=1)
    variances = np.asarray(_variances(swarms, "random_groups", grid, "exclude"), np.float64)
    factor = mixing_factor(num_peers, num_peers // group_size)
    before, after = variances[:, :-1], variances[:, 1:]
    counts = before > _ROUNDING * variances[:, :1]  # a handful of peers may all agree by chance
    return Mixing(
        num_peers=num_peers,
        group_size=group_size,
        runs=runs,
        factor=factor,
        factor_ratio=float((after[counts] / before[counts]).mean() / factor),
        kept=tuple((variances / variances[:, :1]).mean(axis=0).tolist()),
    )


@functools.partial(jax.jit, static_argnames=("num_peers", "grid", "rounds"))
def _draw(keys: PRNGKeyArray, failure: float, *, num_peers: int, grid: MoshpitGrid, rounds: int) -> _Swarms:
    """Draw the swarms of as many restarts as there are keys."""

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
    swarms: _Swarms, method: MethodName, grid: MoshpitGrid, failure_rule: FailureRule
) -> Float[Array, "restarts rounds_and_start"]:
    """Simulate one method; the variances are those of `simulate`."""

    def mix(swarm: _Swarms, values: Array, weights: Array, number: Array, alive: Array) -> tuple[Array, Array]:
        match method:
            case "all_reduce":
                return all_reduce_round(values, alive=alive), weights
            case "gossip":
                return gossip_round(values, alive=alive), weights
            case "push_sum":
                return _published_push_sum(values, number, alive), weights
            case "push_sum_weighted":
                return push_sum_round(values, weights, round_number=number, alive=alive)
            case "random_groups":
                key, size = jax.random.fold_in(swarm.keys, number), grid.side
                mixed = random_groups_round(values, key=key, group_size=size, alive=alive, failure_rule=failure_rule)
                return mixed, weights
            case "moshpit":
                average = functools.partial(moshpit_round, grid=grid, cells=swarm.cells, failure_rule=failure_rule)
                return average(values, round_number=number, alive=alive), weights

    def restart(swarm: _Swarms) -> Array:
        def one_round(held: tuple[Array, Array], inputs: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
            values, weights = mix(swarm, *held, *inputs)
            return (values, weights), distortion(values)

        start = (swarm.values, jnp.ones_like(swarm.values))
        _, after = jax.lax.scan(one_round, start, (jnp.arange(swarm.alive.shape[0]), swarm.alive))
        return jnp.append(distortion(swarm.values), after)

    return jax.vmap(restart)(swarms)


def _published_push_sum(values: Array, number: Array, alive: Array) -> Array:
    """Make a round of the SGP of the paper's table: plain means of a peer's and its present in-neighbours' values.

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
