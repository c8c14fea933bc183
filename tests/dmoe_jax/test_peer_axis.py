"""Moshpit over a peer axis: against the rule peer by peer, exact means, failures, weights, gradients, meshes."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from dmoe_jax.optim import distortion, group_mean, moshpit_round, moshpit_rounds, random_cells
from dmoe_net.averaging.grouping.group_key import MoshpitGrid, group_key

ROOT = Path(__file__).parents[2]
GRID = MoshpitGrid(side=4, dims=2)
CUBE = MoshpitGrid(side=3, dims=3)
KEY = jax.random.key(0)

# What the process with eight devices runs: all kinds of input over the only axis, and the tree alone over one of two.
EIGHT_DEVICES = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from dmoe_jax.optim import moshpit_rounds, random_cells
from dmoe_net.averaging.grouping.group_key import MoshpitGrid

key = jax.random.key(0)
grid = MoshpitGrid(side=5, dims=2)
tree = {"a": jax.random.normal(key, (24, 3, 2)), "b": jax.random.normal(key, (24,))}
shared = {"grid": grid, "cells": random_cells(key, grid, 24), "num_rounds": 3, "first_round": 1}
everything = {"alive": jax.random.uniform(key, (3, 24)) > 0.2, "weights": jnp.arange(24.0)}
for axes, given in (({"peers": 8}, everything), ({"peers": 4, "x": 2}, {})):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    place = {"alive": PartitionSpec(None, "peers")}
    split = {
        name: jax.device_put(array, NamedSharding(mesh, place.get(name, PartitionSpec("peers"))))
        for name, array in {"tree": tree, **given}.items()
    }
    average = jax.jit(lambda tree, **given: moshpit_rounds(tree, failure_rule="group_skips", **shared, **given))
    compiled = average.lower(**split).compile()
    assert "all-gather" not in compiled.as_text()
    found, expected = compiled(**split), average(tree, **given)
    assert {s.data.shape[0] for s in found["b"].addressable_shards} == {24 // axes["peers"]}
    found, expected = jax.device_get((found, expected))
    assert max(abs(found[name] - expected[name]).max() for name in tree) < 1e-6, axes
    print("agrees")
"""


def by_keys(
    values: np.ndarray, grid: MoshpitGrid, cells: Any, round_number: int, alive: Any, rule: str, weights: Any
) -> np.ndarray:
    """The slow way: peers find each other under the names of the network averager, and groups average in float64."""
    groups: dict[str, list[int]] = {}
    for peer, cell in enumerate(cells):
        groups.setdefault(group_key("x", grid, int(cell), round_number), []).append(peer)
    after = values.astype(np.float64)
    for members in groups.values():
        there = [peer for peer in members if alive[peer]]
        if not there or (rule == "group_skips" and there != members) or sum(weights[peer] for peer in there) == 0:
            continue
        after[there] = np.average(values[there], axis=0, weights=[weights[peer] for peer in there])
    return after


@pytest.mark.parametrize("rule", ["exclude", "group_skips"])
@pytest.mark.parametrize(("grid", "num_peers"), [(GRID, 11), (CUBE, 20), (MoshpitGrid(side=9, dims=1), 7)])
def test_rounds_follow_the_rule_of_the_network(rule: Any, grid: MoshpitGrid, num_peers: int) -> None:
    """Holes in the grid, absent peers, unequal weights and a traced round number: as peers that meet under keys."""
    cells = random_cells(KEY, grid, num_peers)
    alive = jax.random.uniform(jax.random.key(1), (6, num_peers)) > 0.15
    weights = jnp.arange(num_peers) % 4
    assert not alive.all()

    @jax.jit
    def step(values: Any, cells: Any, number: Any) -> Any:
        return moshpit_round(
            values, grid=grid, cells=cells, round_number=number, alive=alive[number], weights=weights, failure_rule=rule
        )

    after = jax.random.normal(jax.random.key(2), (num_peers, 3))
    for number in range(6):
        values, after = np.asarray(after), step(after, cells, number)
        expected = by_keys(values, grid, cells, number, alive[number], rule, weights)
        np.testing.assert_allclose(after, expected, atol=1e-6)


@pytest.mark.parametrize("grid", [GRID, CUBE, MoshpitGrid(side=5, dims=1)])
def test_a_full_grid_is_exact_after_one_round_for_each_axis(grid: MoshpitGrid) -> None:
    """The weighted mean is exact too, wherever the count of rounds begins; one round less is not enough."""
    tree = {"w": jax.random.normal(KEY, (grid.num_cells, 2, 3)), "b": jax.random.normal(KEY, (grid.num_cells,))}
    average = partial(moshpit_rounds, tree, grid=grid, cells=random_cells(KEY, grid, grid.num_cells), first_round=2)
    for given in (None, jnp.arange(grid.num_cells)):
        after = average(num_rounds=grid.dims, weights=given)
        for name, leaf in tree.items():
            mean = np.average(np.asarray(leaf), axis=0, weights=given)
            np.testing.assert_allclose(after[name], np.broadcast_to(mean, leaf.shape), atol=1e-6)
    assert distortion(average(num_rounds=grid.dims - 1)) > 1e-3


def test_weighted_rounds_keep_the_weighted_sum() -> None:
    """Over any number of rounds with absent peers, values and weights averaged together lose nothing."""
    values, weights = jax.random.normal(KEY, (13,)), jnp.arange(13.0)
    alive = jax.random.uniform(jax.random.key(3), (5, 13)) > 0.3
    average = partial(moshpit_rounds, grid=GRID, cells=random_cells(KEY, GRID, 13), num_rounds=5, alive=alive)
    after = average(values, weights=weights)
    np.testing.assert_allclose(after @ average(weights), values @ weights, rtol=1e-5)
    assert distortion(after) < 0.2 * distortion(values)


def test_several_rounds_are_rounds_one_by_one() -> None:
    """Without weights the scan does what a loop does, and no rounds change nothing."""
    values, alive = jax.random.normal(KEY, (13,)), jax.random.uniform(jax.random.key(3), (4, 13)) > 0.3
    shared: dict[str, Any] = {"grid": GRID, "cells": random_cells(KEY, GRID, 13), "failure_rule": "group_skips"}
    found, expected = moshpit_rounds(values, num_rounds=4, first_round=7, alive=alive, **shared), values
    for number in range(4):
        expected = moshpit_round(expected, round_number=7 + number, alive=alive[number], **shared)
    np.testing.assert_allclose(found, expected, atol=1e-7)
    np.testing.assert_array_equal(moshpit_rounds(values, num_rounds=0, **shared), values)


def test_what_absent_and_weightless_peers_hold_stays_out() -> None:
    """Nothing becomes NaN; a weightless peer gets the mean, and a group without weight keeps what it has."""
    values = jnp.array([1.0, 3.0, jnp.nan, jnp.inf])
    alive, weights = jnp.array([True, True, False, True]), jnp.array([1.0, 3.0, 1.0, 0.0])

    def average(values: Any) -> Any:
        return group_mean(values, jnp.zeros(4, int), num_groups=2, alive=alive, weights=weights)

    np.testing.assert_array_equal(average(values), [2.5, 2.5, jnp.nan, 2.5])
    gradient = jax.grad(lambda values: average(values)[:2].sum())(values)
    np.testing.assert_allclose(gradient, [0.5, 1.5, 0.0, 0.0])
    values, weights = jnp.array([1.0, 2.0, 3.0, 5.0]), jnp.array([0.0, -1.0, 1.0, 1.0])
    found = group_mean(values, jnp.array([0, 0, 1, 1]), num_groups=2, weights=weights)
    np.testing.assert_array_equal(found, [1.0, 2.0, 4.0, 4.0])


def test_gradients_and_vmap() -> None:
    """Derivatives by values and weights are those of finite differences; many swarms at once are each by itself."""
    cells = jnp.stack([random_cells(key, GRID, 9) for key in jax.random.split(KEY, 3)])
    values, weights = jax.random.normal(KEY, (3, 9)), jnp.arange(1.0, 10.0)
    alive = jax.random.uniform(KEY, (3, 9)) > 0.2

    @jax.jit
    def average(values: Any, weights: Any, cells: Any, alive: Any, number: Any) -> Any:
        return moshpit_round(values, grid=GRID, cells=cells, round_number=number, alive=alive, weights=weights)

    check_grads(lambda v, w: average(v, w, cells[0], alive[0], 1), (values[0], weights), order=1, modes=["rev", "fwd"])
    together = jax.vmap(average, in_axes=(0, None, 0, 0, 0))(values, weights, cells, alive, jnp.arange(3))
    for each in range(3):
        alone = average(values[each], weights, cells[each], alive[each], each)
        np.testing.assert_allclose(together[each], alone, atol=1e-7)


def test_types_are_kept_and_sums_are_wide() -> None:
    """The mean of bfloat16 numbers is right to its last bit, which sums in bfloat16 would miss from 256 peers on."""
    values = jnp.ones((1024, 1), jnp.bfloat16)
    found = moshpit_round(values, grid=MoshpitGrid(side=1024, dims=1), cells=jnp.arange(1024), round_number=0)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(jnp.float32), 1.0)


def test_random_cells_are_distinct_and_all_are_used() -> None:
    """Without replacement; a full grid is a permutation, another key another one."""
    found = random_cells(KEY, GRID, 16)
    assert sorted(found.tolist()) == list(range(16))
    assert found.tolist() != random_cells(jax.random.key(1), GRID, 16).tolist()
    assert len(set(random_cells(KEY, GRID, 7).tolist())) == 7
    with pytest.raises(ValueError, match=r"4\^2 cells seats up to 16 peers, not 17"):
        random_cells(KEY, GRID, 17)


def test_peers_split_over_a_named_axis_agree() -> None:
    """Each place on the axis of a vmap, as of a mesh, holds three of twelve peers, and sums are summed."""
    values, cells = jax.random.normal(KEY, (12, 2)), random_cells(KEY, GRID, 12)
    average = partial(moshpit_rounds, grid=GRID, num_rounds=3)
    split = jax.vmap(lambda v, c: average(v, cells=c, axis_name="devices"), axis_name="devices")
    found = split(values.reshape(4, 3, 2), cells.reshape(4, 3)).reshape(12, 2)
    np.testing.assert_allclose(found, average(values, cells=cells), atol=1e-6)


@pytest.mark.slow
def test_eight_devices_agree_with_one() -> None:
    """Peers split over a mesh of eight, or over one axis of two: each device has its share, and gathers no others."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", EIGHT_DEVICES]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["agrees"] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tree": {"a": jnp.ones(4), "b": jnp.ones((3, 2))}}, r"leaf \['b'\] must begin with the axis of peers \(4,\)"),
        ({"tree": {"a": jnp.ones(())}}, r"leaf \['a'\] must begin with the axis of peers"),
        ({"tree": jnp.arange(4)}, "floating numbers to have a mean, got int32"),
        ({"tree": ()}, "at least one array"),
        ({"cells": jnp.arange(3)}, r"groups must have one entry for each of 4 peers, got \(3,\)"),
        ({"alive": jnp.ones((2, 4), bool)}, "alive must have one entry"),
        ({"weights": jnp.ones(5)}, "weights must have one entry"),
        ({"alive": jnp.ones(4, bool), "num_rounds": 2}, r"a row for each of 2 rounds, got the shape \(4,\)"),
        ({"alive": jnp.ones((3, 4), bool), "num_rounds": 2}, r"a row for each of 2 rounds, got the shape \(3, 4\)"),
    ],
)
def test_wrong_arguments_of_a_round(change: dict[str, Any], message: str) -> None:
    """The message names the argument, what it was and what was expected."""
    arguments: dict[str, Any] = {"tree": jnp.ones(4), "grid": GRID, "cells": jnp.arange(4)} | change
    average = moshpit_rounds if "num_rounds" in change else partial(moshpit_round, round_number=0)
    with pytest.raises(ValueError, match=message):
        average(arguments.pop("tree"), **arguments)


def test_distortion_by_hand() -> None:
    """(1 + 1)/2 from scalars -1 and 1, and (4 + 9 + 4 + 9)/2 from vectors at the distance (2, 3) from their mean."""
    assert float(distortion(jnp.array([-1.0, 1.0]))) == pytest.approx(1)
    assert float(distortion({"a": jnp.array([-1.0, 1.0]), "b": jnp.array([[0.0, 0], [4, 6]])})) == pytest.approx(14)
