"""An answer is waited for as long as anything moves, and no longer."""

import numpy as np
import pytest
import trio

from dmoe_net.errors import PeerTimeout, PeerUnavailable
from dmoe_net.identity import Address, Contact
from dmoe_net.rpc.base import Reply, Request, handlers
from dmoe_net.rpc.liveness import call_living, ping
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.sim import simulate
from dmoe_net.transport.sim.events import HostDown
from dmoe_net.transport.sim.links import HostOptions
from tests.net.sim_hosts import in_simulation, peer


def slow(name: str) -> HostOptions:
    return HostOptions(up_bps=1e6) if name == "there" else HostOptions()


@in_simulation
async def test_an_answer_behind_bulk_is_waited_for_and_a_dead_peer_is_not() -> None:
    async def much(request: Request) -> Reply:
        return Reply(tensors=(np.zeros(2**18, np.float32),))

    async with (
        simulate(hosts=slow) as network,
        open_rpc_peer(network.transport("here", peer("here")), peer_id=peer("here")) as here,
        trio.open_nursery() as nursery,
    ):

        async def live() -> None:
            listen = Address("there", 1)
            transport = network.transport("there", peer("there"))
            async with open_rpc_peer(transport, peer_id=peer("there"), listen=listen) as there:
                with handlers(there, {"much": much}):
                    await trio.sleep_forever()

        network.start("there", live)
        target = Contact(peer("there"), Address("there", 1))
        await ping(here, target, silence_s=1.0)

        async def fetch() -> None:
            await here.call(target, "much", {}, timeout_s=100.0)

        for _ in range(4):  # 8 s each alone
            nursery.start_soon(fetch)
        await trio.sleep(1.0)
        began = trio.current_time()
        await call_living(here, target, "much", {}, silence_s=6.0, timeout_s=100.0)
        assert trio.current_time() - began > 12.0
        with pytest.raises(PeerTimeout):
            await call_living(here, target, "much", {}, silence_s=6.0, timeout_s=3.0)

        network.apply(HostDown("there", silent=True))
        began = trio.current_time()
        with pytest.raises(PeerUnavailable):
            await ping(here, target, silence_s=2.0)
        assert trio.current_time() - began <= 2.0 + 1.0
