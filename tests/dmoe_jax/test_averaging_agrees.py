"""Three implementations of one rule: over the network, over an axis of peers, over a mesh of devices."""

import functools

import jax
import numpy as np
import pytest

from dmoe_jax.optim.peer_axis import moshpit_rounds, random_cells
from dmoe_net.averaging.grouping.group_key import MoshpitGrid
from tests.net.averaging_peers import Peers
from tests.net.averaging_swarm import Swarm, in_swarm


@pytest.mark.parametrize(
    ("side", "num_peers", "heaviest"),
    [(4, 11, 9.0), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, 16, 1.0), (8, 64, 1.0)))],
)
def test_network_and_peer_axis_and_mesh_agree(side: int, num_peers: int, heaviest: float) -> None:
    """Round by round to 1e-6, on full grids and on one with holes, where groups differ in size and peers in weight."""
    grid = MoshpitGrid(side=side, dims=2)
    cells = np.asarray(random_cells(jax.random.key(num_peers), grid, num_peers))
    weights = np.linspace(1.0, heaviest, num_peers)
    mesh = jax.make_mesh((1,), ("peers",), axis_types=(jax.sharding.AxisType.Auto,))
    on_mesh = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("peers"))

    average = jax.jit(
        functools.partial(moshpit_rounds, grid=grid, cells=cells, weights=weights), static_argnames="num_rounds"
    )

    async def body(swarm: Swarm) -> None:
        peers = Peers(swarm, grid, num_peers, cells=cells.tolist(), weights=weights.tolist())
        begin = peers.stacked()
        for number in range(1, 4):
            await peers.rounds(number)
            expected = average(begin, num_rounds=number)
            np.testing.assert_allclose(peers.stacked(), expected, atol=1e-6)
        np.testing.assert_allclose(average(jax.device_put(begin, on_mesh), num_rounds=3), expected, atol=1e-6)

    in_swarm(body)
