"""Moshpit All-Reduce as pure JAX over a peer axis: thousands of simulated peers on one device, or split over a mesh.

Every leaf of a pytree has a leading axis of peers, and a round is one segment sum over groups. The rule by which peers
meet is `dmoe_net.averaging.grouping.group_key.MoshpitGrid`, as in the averager over the network, whose oracle this is.

If a peer is absent, it keeps its own values. With "exclude" the others of its group average without it (the published
simulator of Moshpit SGD; the network averager); with "group_skips" its whole group keeps what it has (the simulator's
first version). Rounds to a given precision differ two- to threefold.
"""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Int, PRNGKeyArray

from dmoe_jax.arrays import PyTree, against, wide
from dmoe_net.averaging.grouping.group_key import MoshpitGrid

FailureRule = Literal["exclude", "group_skips"]
"""Fate of a group without one of its peers; see the head of this module."""


def moshpit_round(
    tree: PyTree,
    *,
    grid: MoshpitGrid,
    cells: ArrayLike,
    round_number: ArrayLike,
    alive: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    failure_rule: FailureRule = "exclude",
    axis_name: str | None = None,
) -> PyTree:
    """One round: every peer that takes part gets the weighted mean of those in its group that do.

    Args:
      tree: leaves [peers, ...] of floating numbers.
      grid: static under `jit`. It has `grid.num_groups` groups whoever is there: one far larger than its peers costs
        memory.
      cells: int [peers], each peer's cell; see `random_cells`. Several peers may share one.
      round_number: gives the axis of the grid along which peers meet; may be traced.
      alive: bool [peers], False for those who are absent; None: all are there.
      weights: float [peers], for instance samples; None for equal ones. A peer whose weight is not positive adds
        nothing and still gets the mean; a group without any weight keeps what it has.
      axis_name: inside `shard_map` or a named `vmap`, the mesh axis over which peers are split; every array then holds
        the peers of one device.

    Returns: the tree, of the same shapes and types. Means are taken in float32 at least. The values of an absent or
      weightless peer, even if they are no numbers, have no influence on the others.
    """
    number = round_number if isinstance(round_number, int) else jnp.asarray(round_number)
    groups, among = grid.group(jnp.asarray(cells), number), {"alive": alive, "weights": weights}
    return group_mean(tree, groups, num_groups=grid.num_groups, **among, failure_rule=failure_rule, axis_name=axis_name)


def moshpit_rounds(
    tree: PyTree,
    *,
    grid: MoshpitGrid,
    cells: ArrayLike,
    num_rounds: int,
    first_round: ArrayLike = 0,
    alive: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    failure_rule: FailureRule = "exclude",
    axis_name: str | None = None,
) -> PyTree:
    """Several rounds. On a full grid without failures all have the exact weighted mean after `grid.dims` of them.

    Peers may be split over an axis of a mesh: `jit` this, and place the arrays with `PartitionSpec(axis)` on a mesh
    whose axes are `AxisType.Auto`. Devices exchange num_groups / peers of the tree a round, whatever the cells are.

    Weights are averaged along with the values, as in PushSum: after a round each peer stands for the mean weight of its
    group. So the weighted sum over all peers is the same after any round, whoever was absent. (The weights of the first
    round in every round would favour those who met the heavy ones.)

    Args:
      tree, grid, cells, weights, failure_rule, axis_name: as of `moshpit_round`.
      num_rounds: number of rounds, static.
      first_round: number of the first, so that averaging goes on where it ended; may be traced.
      alive: bool [num_rounds, peers]; None: all are there in all rounds.
    """
    if alive is not None and (jnp.ndim(alive) != 2 or jnp.shape(alive)[0] != num_rounds):
        raise ValueError(f"alive must have a row for each of {num_rounds} rounds, got the shape {jnp.shape(alive)}")

    rule = {"grid": grid, "cells": cells, "failure_rule": failure_rule, "axis_name": axis_name}

    def one_round(carry: tuple[PyTree, Array | None], inputs: tuple[Array, Array | None]) -> tuple[PyTree, None]:
        tree, weights = carry
        round_number, alive = inputs
        shared: dict[str, Any] = {"round_number": round_number, "alive": alive, **rule}
        averaged = moshpit_round(tree, weights=weights, **shared)
        return (averaged, None if weights is None else moshpit_round(weights, **shared)), None

    tree = jax.tree.map(jnp.asarray, tree)
    start = (tree, None if weights is None else wide(weights))
    inputs = (jnp.asarray(first_round) + jnp.arange(num_rounds), None if alive is None else jnp.asarray(alive, bool))
    (averaged, _), _ = jax.lax.scan(one_round, start, inputs)
    return averaged


def group_mean(
    tree: PyTree,
    groups: ArrayLike,
    *,
    num_groups: int,
    alive: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    failure_rule: FailureRule = "exclude",
    axis_name: str | None = None,
) -> PyTree:
    """`moshpit_round` for groups of any make: the mean of each group, to each of its peers that takes part.

    `groups`, int [peers], has each peer's group, 0 to `num_groups` - 1, static; groups may be empty.
    """
    if failure_rule not in get_args(FailureRule):
        raise ValueError(f"failure_rule is one of {', '.join(get_args(FailureRule))}, got {failure_rule!r}")
    num_peers = count_peers(tree, groups=groups, alive=alive, weights=weights)
    groups = jnp.asarray(groups)

    def total(values: Array) -> Array:
        sums = jax.ops.segment_sum(values, groups, num_segments=num_groups)
        return sums if axis_name is None else jax.lax.psum(sums, axis_name)

    takes_part = jnp.ones(num_peers, bool) if alive is None else jnp.asarray(alive, bool)
    if failure_rule == "group_skips":
        absent = total((~takes_part).astype(jnp.int32))
        takes_part &= (absent == 0)[groups]
    weight = jnp.ones(num_peers, jnp.float32) if weights is None else wide(weights)
    adds = takes_part & (weight > 0)
    weight = jnp.where(adds, weight, 0)
    group_weight = total(weight)
    is_mean = takes_part & (group_weight > 0)[groups]
    group_weight = jnp.where(group_weight > 0, group_weight, 1)

    def mean(leaf: Array) -> Array:
        # Zero times what a diverged peer holds would not be zero, in the sum as in its gradient.
        added = wide(jnp.where(against(adds, leaf), leaf, 0))
        means = total(added * against(weight, leaf)) / against(group_weight, leaf)
        return jnp.where(against(is_mean, leaf), means[groups].astype(leaf.dtype), leaf)

    return jax.tree.map(mean, jax.tree.map(jnp.asarray, tree))


def random_cells(key: PRNGKeyArray, grid: MoshpitGrid, num_peers: int) -> Int[Array, " peers"]:
    """A cell of its own for each peer, at random: in a grid with holes these should fall on all groups alike."""
    if not 0 <= num_peers <= grid.num_cells:
        raise ValueError(f"a grid of {grid.side}^{grid.dims} cells seats up to {grid.num_cells} peers, not {num_peers}")
    return jax.random.choice(key, grid.num_cells, (num_peers,), replace=False)


def distortion(tree: PyTree) -> Array:
    """Distance of peers: (1/N) sum_i |x_i - mean|^2 over all leaves [peers, ...]. Of scalars, their variance."""
    num_peers = count_peers(tree)

    def of_leaf(leaf: Array) -> Array:
        values = wide(leaf)
        return jnp.sum(jnp.abs(values - values.mean(axis=0)) ** 2) / num_peers

    return sum((of_leaf(leaf) for leaf in jax.tree.leaves(tree)), start=jnp.zeros(()))


def count_peers(tree: PyTree, **of_peers: ArrayLike | None) -> int:
    """The number of peers. A ValueError names a leaf, or an array [peers], that does not agree on it."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        raise ValueError("expected a tree with at least one array")
    num_peers = jnp.shape(leaves[0][1])[:1]
    for path, leaf in leaves:
        name = f"leaf {jax.tree_util.keystr(path) or 'of the tree'}"
        if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[:1] != num_peers:
            raise ValueError(f"{name} must begin with the axis of peers {num_peers}, got shape {jnp.shape(leaf)}")
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(f"{name} must be of floating numbers to have a mean, got {leaf.dtype}")
    for name, array in of_peers.items():
        if array is not None and jnp.shape(array) != num_peers:
            raise ValueError(f"{name} must have one entry for each of {num_peers[0]} peers, got {jnp.shape(array)}")
    return int(num_peers[0])
