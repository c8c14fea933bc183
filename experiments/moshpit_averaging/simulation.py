"""The measurement: numbers of N(0, 1), one a peer, averaged by each method while peers come and go.

Definitions are those of the simulator published with Moshpit SGD. In each round each peer is absent with probability
p, independently, and keeps its number. All methods see the same numbers and the same absences, and all restarts are
simulated at once.
"""

import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from dmoe_jax.optim import FailureRule, distortion, moshpit_round, random_cells
from dmoe_net import MoshpitGrid
from experiments.moshpit_averaging.methods import (
    gossip_round,
    published_push_sum_round,
    push_sum_round,
    random_groups_round,
)
from experiments.moshpit_averaging.paper import SQUARE, TARGETS, MethodName, Setting


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
        def mix(values: Array, weights: Array, number: Array, alive: Array) -> tuple[Array, Array]:
            rule: dict[str, Any] = {"alive": alive, "failure_rule": failure_rule}
            match method:
                case "all_reduce":
                    return jnp.where(alive.all(), values.mean(), values), weights
                case "gossip":
                    return gossip_round(values, alive), weights
                case "push_sum":
                    return published_push_sum_round(values, alive, number), weights
                case "push_sum_weighted":
                    return push_sum_round(values, weights, alive, number)
                case "random_groups":
                    own_key = jax.random.fold_in(key, number)
                    return random_groups_round(values, key=own_key, group_size=grid.side, **rule), weights
                case "moshpit":
                    return moshpit_round(values, grid=grid, cells=cells, round_number=number, **rule), weights

        def one_round(held: tuple[Array, Array], inputs: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
            values, weights = mix(*held, *inputs)
            return (values, weights), distortion(values)

        inputs = (jnp.arange(alive.shape[0]), alive)
        _, after = jax.lax.scan(one_round, (values, jnp.ones_like(values)), inputs)
        return jnp.append(distortion(values), after)

    return jax.vmap(restart)(values, alive, cells, keys)
