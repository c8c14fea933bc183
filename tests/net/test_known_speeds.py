"""Speeds that a peer tells its group: what the user says of the line, then what a download has shown."""

import random
from contextlib import AsyncExitStack

import numpy as np

from dmoe_net.averaging.averager import Averager
from dmoe_net.averaging.config import AveragerConfig
from dmoe_net.averaging.grouping.group_key import MoshpitGrid
from dmoe_net.averaging.opening import open_averager
from dmoe_net.averaging.plan import AveragingPlan
from dmoe_net.averaging.speeds import Speeds
from dmoe_net.averaging.state.sharing import SharedState, StateSource
from dmoe_net.clock import SwarmClock
from dmoe_net.dht.node import open_dht_node
from dmoe_net.identity import Address
from dmoe_net.keys import Identity
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.sim import simulate
from dmoe_net.transport.sim.links import Constant, HostOptions
from tests.net.sim_hosts import in_simulation

MB = 8e6
"""A megabyte a second, as hosts have it: in bits."""
PLAN = AveragingPlan.of(size=500_000, grid=MoshpitGrid(side=2, dims=1))


@in_simulation
async def test_a_state_that_was_downloaded_tells_of_the_line() -> None:
    """12 MB over a line of 4 MB a second down, from a donor that is faster; what the user says of the line stands."""
    state = SharedState(version=7, tensors=(np.zeros(3_000_000, np.float32),))

    async def snapshot() -> SharedState:
        return state

    lines, averagers = {"donor": HostOptions(), "newcomer": HostOptions(down_bps=4 * MB)}, list[Averager]()
    async with AsyncExitStack() as stack:
        opened = stack.enter_async_context
        network = await opened(simulate(latency=Constant(0.02), hosts=lines.__getitem__))
        for host in lines:
            identity = Identity.from_seed(random.Random(host).randbytes(32))
            transport, rng, is_first = network.transport(host, identity.peer_id), random.Random(host), host == "donor"
            caller = await opened(open_rpc_peer(transport, peer_id=identity.peer_id, listen=Address(host, 7)))
            entrances = () if is_first else (Address("donor", 7),)
            node = open_dht_node(
                caller, identity=identity, clock=SwarmClock.virtual(), rng=rng, initial_peers=entrances
            )
            dht = await opened(node)
            source = StateSource(lambda: 7, snapshot) if is_first else None
            config = AveragerConfig(speeds=Speeds(up=5e5))
            averager = open_averager(caller, dht, PLAN, prefix="x", rng=rng, state=source, config=config)
            averagers.append(await opened(averager))
        _, newcomer = averagers
        assert newcomer.known_speeds() == Speeds(up=5e5)
        assert await newcomer.download_state(min_version=1, timeout_s=60.0) is not None
        # Finding the donor, and the round trips of its pieces, take their time, too.
        assert newcomer.known_speeds().up == 5e5
        assert 3e6 < (newcomer.known_speeds().down or 0.0) <= 4e6
