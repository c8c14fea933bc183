"""Three implementations of one rule: over the network, over an axis of peers, over a mesh of devices."""

from typing import Any

import jax
import numpy as np
import pytest

from dmoe_jax.optim.peer_axis import moshpit_rounds, random_cells, sharded_moshpit_rounds
from net.averaging.grouping.group_key import MoshpitGrid
from tests.net.averaging_peers import SIZE, Peers
from tests.net.averaging_swarm import Swarm, in_swarm


@pytest.mark.parametrize(
    ("side", "num_peers", "heaviest"), [(4, 16, 1.0), (4, 11, 9.0), pytest.param(8, 64, 1.0, marks=pytest.mark.slow)]
)
def test_network_and_peer_axis_and_mesh_agree(side: int, num_peers: int, heaviest: float) -> None:
    """Round by round to 1e-6, on full grids and on one with holes, where groups differ in size and peers in weight."""
    grid = MoshpitGrid(side=side, dims=2)
    cells = np.asarray(random_cells(jax.random.key(num_peers), grid, num_peers))
    weights = np.linspace(1.0, heaviest, num_peers)
    mesh = jax.make_mesh((1,), ("peers",))

    async def body(swarm: Swarm) -> None:
        peers = Peers(swarm, grid, num_peers, cells=cells.tolist(), weights=weights.tolist())
        begin = peers.stacked()
        for number in range(1, 4):
            rounds: dict[str, Any] = {"grid": grid, "cells": cells, "weights": weights, "num_rounds": number}
            expected = np.asarray(moshpit_rounds(begin, **rounds))
            np.testing.assert_allclose(sharded_moshpit_rounds(begin, mesh=mesh, **rounds), expected, atol=1e-6)
            await peers.rounds(number)
            assert peers.stacked().shape == (num_peers, SIZE)
            np.testing.assert_allclose(peers.stacked(), expected, atol=1e-6)

    in_swarm(body)
