"""Moshpit All-Reduce as pure JAX over a peer axis: thousands of simulated peers on one device, or split over a mesh.

The rule (who is in whose group) is `net.averaging.grouping.group_key.MoshpitGrid`, the same that the network averager
follows; here every leaf of a pytree has a leading axis of peers, and a round is one segment sum over groups. It serves
research without a network, and as the oracle for the averager over the network.

What becomes of a group with an absent peer is a choice, and rounds to a given precision differ two- to threefold:

- "exclude": the others average without it (the published simulator of Moshpit SGD; the network averager);
- "group_skips": its whole group keeps what it has (the simulator's first version).

Absent peers keep their own values under both. The number of groups is `grid.num_groups` whoever is there, so a grid far
larger than its peers costs memory.
"""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Int, PRNGKeyArray

from dmoe_jax.optim.peer_trees import count_peers, per_peer, wide_type
from dmoe_jax.types import PyTree
from net.averaging.grouping.group_key import MoshpitGrid

FailureRule = Literal["exclude", "group_skips"]
"""What a group does without one of its peers; see the head of this module."""


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
      grid: the grid, static under `jit`.
      cells: int [peers], each peer's cell; see `random_cells`. Several peers may share one.
      round_number: which axis of the grid it goes along; may be traced.
      alive: bool [peers], who is there; None for all.
      weights: float [peers], for instance samples; None for equal ones. A peer whose weight is not positive adds
        nothing and still gets the mean; a group without any weight keeps what it has.
      failure_rule: whether an absent peer is left out or stops its group.
      axis_name: inside `shard_map` or a named `vmap`, the mesh axis over which peers are split; every array then holds
        the peers of one device.

    Returns:
      The tree, of the same shapes and types. Means are taken in float32 at least. What an absent or weightless peer
      holds, even if it is not a number, has no influence on the others.

    Raises:
      ValueError: shapes do not agree, a leaf is not of floating numbers, or the failure rule is unknown.
    """
    return group_mean(
        tree,
        grid.group(jnp.asarray(cells), round_number if isinstance(round_number, int) else jnp.asarray(round_number)),
        num_groups=grid.num_groups,
        alive=alive,
        weights=weights,
        failure_rule=failure_rule,
        axis_name=axis_name,
    )


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

    Weights are averaged along with the values, as in PushSum: after a round each peer stands for the mean weight of its
    group. So the weighted sum over all peers is the same after any round, whoever was absent. (The weights of the first
    round in every round would favour those who met the heavy ones.)

    Args:
      tree: leaves [peers, ...] of floating numbers.
      grid: the grid, static under `jit`.
      cells: int [peers], each peer's cell.
      num_rounds: how many, static.
      first_round: number of the first, so that averaging goes on where it ended; may be traced.
      alive: bool [num_rounds, peers]; None for all.
      weights: float [peers]; None for equal ones.
      failure_rule: whether an absent peer is left out or stops its group.
      axis_name: mesh axis over which peers are split; see `moshpit_round`.

    Returns:
      The tree, of the same shapes and types.

    Raises:
      ValueError: as `moshpit_round`, or `alive` is not of that many rounds, or their number is negative.
    """
    if num_rounds < 0:
        raise ValueError(f"num_rounds must not be negative, got {num_rounds}")
    if alive is not None and (jnp.ndim(alive) != 2 or jnp.shape(alive)[0] != num_rounds):
        raise ValueError(f"alive must have a row for each of {num_rounds} rounds, got the shape {jnp.shape(alive)}")

    def one_round(carry: tuple[PyTree, Array | None], inputs: tuple[Array, Array | None]) -> tuple[PyTree, None]:
        tree, weights = carry
        round_number, alive = inputs
        average = functools.partial(
            moshpit_round,
            grid=grid,
            cells=cells,
            round_number=round_number,
            alive=alive,
            failure_rule=failure_rule,
            axis_name=axis_name,
        )
        return (average(tree, weights=weights), None if weights is None else average(weights)), None

    tree = jax.tree.map(jnp.asarray, tree)
    start = (tree, None if weights is None else _as_weights(weights))
    inputs = (jnp.asarray(first_round) + jnp.arange(num_rounds), None if alive is None else jnp.asarray(alive, bool))
    (averaged, _), _ = jax.lax.scan(one_round, start, inputs)
    return averaged


def sharded_moshpit_rounds(
    tree: PyTree,
    *,
    mesh: Mesh,
    mesh_axis: str = "peers",
    grid: MoshpitGrid,
    cells: ArrayLike,
    num_rounds: int,
    first_round: ArrayLike = 0,
    alive: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    failure_rule: FailureRule = "exclude",
) -> PyTree:
    """`moshpit_rounds` with the peers split over an axis of a mesh: each device sums its own, then sums are summed.

    Devices exchange num_groups / peers of the tree a round, whatever cells the peers sit on. Call it inside `jit`.

    Args:
      mesh: of devices; peers are replicated over its other axes.
      mesh_axis: the axis that peers are split over, in order; its size divides their number.

    Raises:
      ValueError: as `moshpit_rounds`, or the mesh has no such axis, or its size does not divide the number of peers.
    """
    if mesh_axis not in mesh.shape:
        raise ValueError(f"the mesh has the axes {', '.join(map(str, mesh.axis_names))}, not {mesh_axis!r}")
    num_peers = count_peers(tree, cells=cells, weights=weights)
    if num_peers % mesh.shape[mesh_axis]:
        raise ValueError(f"{num_peers} peers cannot be split evenly over {mesh.shape[mesh_axis]} devices")
    if alive is not None and jnp.shape(alive) != (num_rounds, num_peers):
        raise ValueError(f"alive must have the shape {(num_rounds, num_peers)}, got {jnp.shape(alive)}")

    def of_one_device(
        tree: PyTree, cells: Array, alive: Array | None, weights: Array | None, first_round: Array
    ) -> PyTree:
        return moshpit_rounds(
            tree,
            grid=grid,
            cells=cells,
            num_rounds=num_rounds,
            first_round=first_round,
            alive=alive,
            weights=weights,
            failure_rule=failure_rule,
            axis_name=mesh_axis,
        )

    peers, rounds_and_peers = P(mesh_axis), P(None, mesh_axis)
    specs = (peers, peers, rounds_and_peers, peers, P())
    inputs = (tree, jnp.asarray(cells), alive, weights, jnp.asarray(first_round))
    # Meshes with explicit axes, which jax.make_mesh gives, want what comes in to be where it belongs.
    placed = [jax.device_put(each, NamedSharding(mesh, spec)) for each, spec in zip(inputs, specs, strict=True)]
    averaged: PyTree = jax.shard_map(of_one_device, mesh=mesh, in_specs=specs, out_specs=peers)(*placed)
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

    Args:
      groups: int [peers], each peer's group, 0 to num_groups - 1.
      num_groups: how many there are, static; some may be empty.
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
    weight = jnp.ones(num_peers, jnp.float32) if weights is None else _as_weights(weights)
    adds = takes_part & (weight > 0)
    weight = jnp.where(adds, weight, 0)
    group_weight = total(weight)
    is_mean = takes_part & (group_weight > 0)[groups]
    group_weight = jnp.where(group_weight > 0, group_weight, 1)

    def mean(leaf: Array) -> Array:
        # Zero times what a diverged peer holds would not be zero, in the sum as in its gradient.
        added = jnp.where(per_peer(adds, leaf), leaf, 0).astype(wide_type(leaf))
        means = total(added * per_peer(weight, leaf)) / per_peer(group_weight, leaf)
        return jnp.where(per_peer(is_mean, leaf), means[groups].astype(leaf.dtype), leaf)

    return jax.tree.map(mean, jax.tree.map(jnp.asarray, tree))


def random_cells(key: PRNGKeyArray, grid: MoshpitGrid, num_peers: int) -> Int[Array, " peers"]:
    """A cell of its own for each peer, at random: in a grid with holes these should fall on all groups alike.

    It shuffles all cells of the grid, in memory.

    Raises:
      ValueError: there are more peers than cells.
    """
    if not 0 <= num_peers <= grid.num_cells:
        raise ValueError(f"a grid of {grid.side}^{grid.dims} cells seats up to {grid.num_cells} peers, not {num_peers}")
    return jax.random.choice(key, grid.num_cells, (num_peers,), replace=False)


def _as_weights(weights: ArrayLike) -> Array:
    """In float32 at least: samples may come as integers."""
    given = jnp.asarray(weights)
    return given.astype(wide_type(given))
