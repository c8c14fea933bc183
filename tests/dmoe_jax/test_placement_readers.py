"""Readers and the copies of an expert: which of them each asks, and where it turns when that one fails or is busy."""

import random
from collections import Counter

import trio
from trio.testing import MockClock

from dmoe_jax.directory.directory import Announcer, open_expert_directory
from dmoe_jax.directory.grid import Coordinates, parse_uid
from dmoe_jax.directory.preference import Renewals, by_preference
from dmoe_jax.directory.records import Replica, Replicas, experts_in_untrusted
from dmoe_net.dht.entries import Found
from dmoe_net.identity import Address, Contact, PeerId
from tests.net.direct_network import DirectNetwork, open_swarm

RNG = random.Random(0)
HOSTS = [Contact(PeerId.draw(RNG), Address("10.0.0.1", 3000 + n)) for n in range(8)]
UID = parse_uid("ffn.1.7")


def test_a_node_counts_once_however_often_it_announces_an_expert() -> None:
    """With what lives longest: it would otherwise draw several shares of the load."""
    value = ["10.0.0.1", 3000, [1, 7], None]
    ends = {"": 9.0, "1": 30.0, "2": 20.0}
    record = [Found(HOSTS[0].peer_id, suffix, value, ends_at) for suffix, ends_at in ends.items()]
    assert experts_in_untrusted("ffn.2d0", record) == {(1, 7): (Replica(contact=HOSTS[0], ends_at=30.0, due_at=30.0),)}


def experts(count: int, hosts: dict[int, range]) -> dict[Coordinates, Replicas]:
    """Experts 0..count-1 of row 1, and which of them each host serves."""
    return {
        (1, index): tuple(Replica(contact=HOSTS[host], ends_at=100.0) for host in hosts if index in hosts[host])
        for index in range(count)
    }


def firsts(found: dict[Coordinates, Replicas], readers: int) -> Counter[int]:
    """Number of times that each host comes first, over many readers and all experts."""
    rng, counts = random.Random(5), Counter[int]()
    for _ in range(readers):
        for replicas in by_preference(found, "ffn", PeerId.draw(rng)).values():
            counts[HOSTS.index(replicas[0].contact)] += 1
    return counts


def test_readers_spread_over_replicas() -> None:
    """Each of 3 replicas is the first of a third of 2400 choices: 800 with a deviation of 23. When one leaves, nothing
    changes but for readers who had it first."""
    found = experts(24, {host: range(24) for host in range(3)})
    assert all(abs(count - 800) < 4 * 23 for count in firsts(found, 100).values())
    reader = PeerId.draw(random.Random(9))
    before, after = (
        by_preference(experts(24, {host: range(24) for host in hosts}), "ffn", reader) for hosts in ((0, 1, 2), (0, 1))
    )
    for coordinates, replicas in before.items():
        assert tuple(each for each in replicas if each.contact != HOSTS[2]) == after[coordinates]


def test_a_node_that_serves_more_is_preferred_less() -> None:
    """A serves 8 experts, B two of them: each of the two goes to B with 1/2 : 1/8, four of five times."""
    counts = firsts(experts(8, {0: range(8), 1: range(2)}), 200)
    assert counts[0] + counts[1] == 1600
    assert abs(counts[1] - 320) < 4 * 8, "400 choices of 0.8: a deviation of 8"


def test_who_failed_is_waited_for_until_it_announces_itself_anew() -> None:
    """The first look after a failure may find an announcement from before it; only a later end is a sign of life."""
    renewals, who = Renewals(), HOSTS[0].peer_id
    failed: dict[PeerId, float] = {}

    def look(ends_at: float, asked_at: float) -> bool:
        renewals.note([Replica(contact=HOSTS[0], ends_at=ends_at)], failed.get, asked_at)
        return renewals.awaits(who, failed.get(who))

    assert not look(30.0, 0.0)
    failed[who] = 10.0
    assert renewals.awaits(who, 10.0)
    assert look(40.0, 9.0), "asked before it failed"
    assert look(40.0, 11.0), "perhaps announced before it failed"
    assert look(40.0, 15.0)
    assert not look(50.0, 20.0)
    failed[who] = 30.0
    assert look(60.0, 31.0), "it failed again"
    del failed[who]
    assert not renewals.awaits(who, None)


async def test_a_reader_goes_on_to_another_replica(autojump_clock: MockClock) -> None:
    """If one fails, or is busy, the next question is answered with another, and the expert is never dead before all
    are; one that failed comes last until it has announced itself again, however long its pause is over."""
    async with open_swarm(DirectNetwork(), 4) as nodes:
        hosts = [Contact(node.peer_id, node.address) for node in nodes[:2] if node.address is not None]
        announcers = [Announcer(node, host, life_s=30.0) for node, host in zip(nodes, hosts, strict=False)]

        async def announce() -> None:
            for announcer in announcers:
                assert await announcer.announce([UID]) == []

        async def chosen() -> Contact | None:
            return (await directory.living("ffn", (2, 8))).get(UID.coordinates)

        await announce()
        async with open_expert_directory(nodes[3]) as directory:
            first = await chosen()
            other = next(host for host in hosts if host != first)
            assert first is not None
            assert directory.another(str(UID), first) == other
            directory.busy(first, 2.0)
            assert await chosen() == other
            await trio.sleep(2.0)
            assert await chosen() == first
            directory.avoid(str(UID), first, "refused")
            assert not directory.answers(str(UID), first)
            assert await chosen() == other
            await trio.sleep(1.0)
            assert await chosen() == first
            directory.health.failed((first.peer_id, "expert"), trio.current_time(), "no answer")
            await trio.sleep(5.0)
            assert directory.answers(str(UID), first), "its pause of 1 s is over"
            assert await chosen() == other
            directory.health.failed((other.peer_id, "expert"), trio.current_time(), "no answer")
            assert await chosen() == first
            directory.health.succeeded((other.peer_id, "expert"))
            assert await chosen() == other
            await trio.sleep(8.0)
            await announce()
            await trio.sleep(10.0)
            assert await chosen() == first, "it has announced itself since"
            for announcer in announcers:
                await announcer.withdraw([UID])
            await trio.sleep(10.0)
            assert await chosen() is None


async def test_one_that_is_late_to_announce_itself_comes_last(autojump_clock: MockClock) -> None:
    """When the preferred one of two that serve an expert falls silent, the other one is asked from a third of the
    announcement's life before its end; alone, the silent one is listed to the end."""
    async with open_swarm(DirectNetwork(), 4) as nodes:
        hosts = [Contact(node.peer_id, node.address) for node in nodes[:2] if node.address is not None]
        announcers = [Announcer(node, host, life_s=30.0) for node, host in zip(nodes, hosts, strict=False)]
        for announcer in announcers:
            await announcer.announce([UID])
        async with open_expert_directory(nodes[3]) as directory:

            async def chosen() -> Contact | None:
                return (await directory.living("ffn", (2, 8))).get(UID.coordinates)

            silent = await chosen()
            (other,) = (host for host in hosts if host != silent)
            for _ in range(4):
                assert await chosen() == silent
                await announcers[hosts.index(other)].announce([UID])
                await trio.sleep(6.0)
            assert await chosen() == other
            await announcers[hosts.index(other)].withdraw([UID])
            await trio.sleep(1.5)
            directory._cache.clear()
            assert await chosen() == silent
