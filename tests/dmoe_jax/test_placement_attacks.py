"""Strangers that say they serve or claim experts, and do not."""

import random

import trio
import trio.testing

from dmoe_jax.directory.directory import Announcer, find_replicas
from dmoe_jax.directory.grid import expand_grid_pattern
from dmoe_jax.placement.claimer import KEEP
from dmoe_jax.placement.config import PlacementConfig
from dmoe_jax.placement.survey import Claims
from dmoe_jax.placement.watch import Watch
from dmoe_jax.swarm.opening import open_swarm
from dmoe_net.dht.routing_table import node_id
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.rpc.base import Reply, Request
from dmoe_net.rpc.service import PING
from tests.dmoe_jax.placement_swarm import ENTRANCE, PATTERN, UIDS, World, in_world
from tests.net.direct_network import DirectNetwork

PEERS = [PeerId.draw(random.Random(number)) for number in range(5)]
LIFE_S = PlacementConfig().claim_life_s
NAMES = {str(uid): uid for uid in expand_grid_pattern(PATTERN)}


def test_claims_without_a_node_stand_for_two_lives() -> None:
    """Confirmed claims for everything, renewed for ever by a peer that is no node: the experts are served all the
    same."""

    async def body(world: World) -> None:
        claims = Claims(world.entrance.dht, NAMES, life_s=LIFE_S)

        async def squat() -> None:
            while True:
                await claims.write(confirmed=NAMES)
                await trio.sleep(LIFE_S / 3)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(squat)
            await trio.sleep(1.0)
            world.start("node0", max_experts=20)
            await trio.sleep(2 * LIFE_S - 2)
            assert world.holders() == {}
            await world.settled(1, within_s=30)
            nursery.cancel_scope.cancel()

    in_world(body)


async def test_who_claims_for_long_has_to_answer(autojump_clock: trio.testing.MockClock) -> None:
    """Two that claim for ever are found dead: a silent node, too far from the own id to be watched otherwise, and one
    that is no node. A third, which claims for a while, is not."""
    network, (own, *others) = DirectNetwork(), PEERS
    near, *_, silent = sorted(others, key=lambda peer: node_id(peer) ^ node_id(own))
    unlisted, late = (peer for peer in others if peer not in (near, silent))
    contacts = {peer: Contact(peer, Address(f"host{number}", 1)) for number, peer in enumerate(PEERS)}

    async def answer(_: Request) -> Reply:
        return Reply(body={})

    network.caller(contacts[near].address, near).add_handler(PING, answer)
    claimers, changes = [silent, unlisted], list[frozenset[PeerId]]()
    watch = Watch(
        network.caller(contacts[own].address, own),
        PlacementConfig(max_watched=1),
        nodes=lambda: {peer: contacts[peer] for peer in (near, silent)},
        claimers=lambda: claimers,
        on_change=lambda: changes.append(watch.dead),
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        await trio.sleep(2 * LIFE_S - 1)
        assert watch.dead == set()
        claimers.append(late)
        await trio.sleep(10.0)
        assert watch.dead == {silent, unlisted}
        assert len(changes) == 1
        nursery.cancel_scope.cancel()


def test_nobody_gives_up_to_one_that_computes_nothing() -> None:
    """It announces all experts, says that they were updated 2^62 times and that it was told to serve them, and promises
    to keep them; no call for an expert is answered. The node keeps serving, and readers find it."""

    async def status(_: Request) -> Reply:
        return Reply(body={"updates": dict.fromkeys(UIDS, 2**62), "claims": {"fixed": sorted(UIDS)}})

    async def keep(request: Request) -> Reply:
        return Reply(body={"kept": request.body["uids"]})

    async def body(world: World) -> None:
        world.start("node0", max_experts=20)
        await world.settled(1)
        async with open_swarm(ENTRANCE, network=world.network, host="liar", seed=0) as liar:
            liar.rpc.add_handler("node.status", status)
            liar.rpc.add_handler(KEEP, keep)
            announcer = Announcer(liar.dht, Contact.parse(liar.contact), life_s=30.0)
            for _ in range(6):
                assert await announcer.announce(NAMES.values()) == []
                await trio.sleep(10.0)
            assert set(world.served["node0"].uids) == UIDS
            assert world.claims("node0")["given_up"] == 0
            found = await find_replicas(world.entrance.dht, NAMES.values())
            assert all(
                {each.contact.address.host for each in several} == {"node0", "liar"} for several in found.values()
            )

    in_world(body)
