"""Three implementations of one rule: over the network, over an axis of peers, over a mesh of devices."""

import jax
import numpy as np
import pytest

from dmoe_jax.optim.peer_axis import moshpit_round, random_cells, sharded_moshpit_rounds
from net.averaging.group_key import MoshpitGrid
from tests.net.averaging_peers import SIZE, Peers
from tests.net.averaging_swarm import Swarm, in_swarm


@pytest.mark.parametrize(("side", "num_peers"), [(4, 16), (4, 11), pytest.param(8, 64, marks=pytest.mark.slow)])
def test_network_and_peer_axis_and_mesh_agree(side: int, num_peers: int) -> None:
    """Round by round to 1e-6, on full grids and on one with holes, where groups differ in size."""
    grid = MoshpitGrid(side=side, dims=2)
    cells = np.asarray(random_cells(jax.random.key(num_peers), grid, num_peers))
    mesh = jax.make_mesh((1,), ("peers",))

    async def body(swarm: Swarm) -> None:
        peers = Peers(swarm, grid, num_peers, cells=cells.tolist())
        expected = peers.stacked()
        for number in range(3):
            before = expected
            expected = np.asarray(moshpit_round(before, grid=grid, cells=cells, round_number=number))
            sharded = sharded_moshpit_rounds(
                before, mesh=mesh, grid=grid, cells=cells, num_rounds=1, first_round=number
            )
            np.testing.assert_allclose(sharded, expected, atol=1e-6)
            await peers.rounds(number + 1)
            assert peers.stacked().shape == (num_peers, SIZE)
            np.testing.assert_allclose(peers.stacked(), expected, atol=1e-6)

    in_swarm(body)
