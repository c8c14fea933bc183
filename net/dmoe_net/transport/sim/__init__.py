"""The simulated network: the same peers as on a real one, thousands of them in one process, in virtual time.

    import trio
    from dmoe_net.identity import Address
    from dmoe_net.rpc.peer import open_rpc_peer
    from dmoe_net.transport.sim import run, simulate
    from dmoe_net.transport.sim.links import LogNormal

    async def main() -> float:
        async with (
            simulate(seed=1, latency=LogNormal(median_s=0.08, sigma=0.5)) as network,
            open_rpc_peer(network.transport("node0", ALICE), peer_id=ALICE, listen=Address("node0", 0)) as alice,
            open_rpc_peer(network.transport("node1", BOB), peer_id=BOB) as bob,
        ):
            await bob.call(alice.address, "rpc.ping", {}, timeout_s=5.0)
            return trio.current_time()

    seconds = run(main, seed=1)

Links carry frames without encoding them; what each part costs in time follows from latency, bandwidth and loss
(`dmoe_net.transport.sim.links`), and what befalls the network meanwhile is a schedule of events
(`dmoe_net.transport.sim.events`). Under `run` the same seed gives the same run, to the last bit: time is virtual and
jumps when every task waits, trio's scheduling is seeded, deliveries are ordered by (time, order of sending), and the
network's randomness is a function of (seed, link, direction, number of the part). What happens in worker threads is not
seen by virtual time: do not wait for them in a simulation.

`simulate` also works in a test with pytest-trio's `autojump_clock` (then tasks that are ready at the same time run in
an order of trio's choosing) and on the real clock, where it delays for real: good to look at, not reproducible.
"""

from dmoe_net.transport.sim.events import Heal, HostDown, HostUp, NetworkEvent, Partition
from dmoe_net.transport.sim.links import Constant, HostOptions, LogNormal
from dmoe_net.transport.sim.network import SimNetwork
from dmoe_net.transport.sim.simulation import run, simulate

__all__ = [
    "Constant",
    "Heal",
    "HostDown",
    "HostOptions",
    "HostUp",
    "LogNormal",
    "NetworkEvent",
    "Partition",
    "SimNetwork",
    "run",
    "simulate",
]
