"""A thousand peers that call each other: how many messages a second of real time the simulation carries."""

import random
import time

import trio

from dmoe_net import Address, Contact, PeerId, Reply, Request, RpcPeer, open_rpc_peer
from dmoe_net.transport.sim import LogNormal, SimNetwork, run, simulate

NEIGHBOURS = 8
"""Peers that each of them calls, drawn at random."""


def measure_messages(*, peers: int, messages: int, seed: int) -> dict[str, float]:
    """Let every peer call its neighbours in turn, one call after the other, until all messages are exchanged.

    Args:
      peers: each on a host of its own, with the RPC layer of a real one; connections are made at the first call.
      messages: in all, half of them replies; rounded down to as many calls for every peer.

    Returns:
      `messages`: requests and replies; neither greetings nor what opens a connection. `dials`: connections made.
      `wall_s`: real time from the first call to the last answer, dialling included. `virtual_s`: the same in the
      simulation. `messages_per_s`: of real time.
    """
    return run(_exchange, peers, messages // 2 // peers, seed, seed=seed)


async def _exchange(num_peers: int, calls_each: int, seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    peers: list[RpcPeer] = []
    all_live = trio.Event()
    num_served = 0

    async def serve(request: Request) -> Reply:
        nonlocal num_served
        num_served += 1
        return Reply(body={"number": request.body["number"]})

    async def live(host: str, network: SimNetwork) -> None:
        peer_id = PeerId.draw(random.Random(f"{seed}/{host}"))
        async with open_rpc_peer(network.transport(host, peer_id), peer_id=peer_id, listen=Address(host, 1)) as peer:
            peer.add_handler("gossip", serve)
            peers.append(peer)
            if len(peers) == num_peers:
                all_live.set()
            await trio.sleep_forever()

    async def talk(peer: RpcPeer, targets: list[Contact]) -> None:
        for number in range(calls_each):
            body = {"number": number, "text": "x" * 150}
            reply = await peer.call(targets[number % len(targets)], "gossip", body, timeout_s=600.0)
            assert reply.body == {"number": number}

    async with simulate(seed=seed, latency=LogNormal(median_s=0.05, sigma=0.5)) as network:
        for index in range(num_peers):
            network.start(f"peer{index}", live, f"peer{index}", network)
        await all_live.wait()
        everybody = [Contact(peer.peer_id, peer.address) for peer in peers if peer.address is not None]
        started, started_virtual = time.perf_counter(), trio.current_time()
        async with trio.open_nursery() as nursery:
            for peer in peers:
                others = rng.sample([contact for contact in everybody if contact.peer_id != peer.peer_id], NEIGHBOURS)
                nursery.start_soon(talk, peer, others)
        wall_s = time.perf_counter() - started
        assert num_served == calls_each * num_peers
        return {
            "messages": 2 * num_served,
            "dials": network.statistics().dials,
            "wall_s": wall_s,
            "virtual_s": trio.current_time() - started_virtual,
            "messages_per_s": 2 * num_served / wall_s,
        }
