"""Expert discovery over a DHT of direct calls, in virtual time."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import trio
from trio import current_time as now
from trio.testing import MockClock

from dmoe_jax.directory.directory import Announcer, DirectoryConfig, find_replicas, host_target, open_expert_directory
from dmoe_jax.directory.grid import ExpertUid, all_uids, parse_uid
from dmoe_jax.directory.records import MAX_NUMBERS, announcements, experts_in_untrusted, grid_keys, group_key
from dmoe_net.dht import entries
from dmoe_net.dht.entries import Found
from dmoe_net.dht.node import DhtNode
from dmoe_net.identity import Address, Contact, PeerId
from tests.dmoe_jax.small_swarm import avoided, find_experts
from tests.net.direct_network import DirectNetwork, open_swarm


def uids(*texts: str) -> list[ExpertUid]:
    return [parse_uid(text) for text in texts]


def contact(node: DhtNode) -> Contact:
    return Contact(node.peer_id, node.address)


async def announce(node: DhtNode, experts: Sequence[ExpertUid], *, life_s: float = 60) -> Announcer:
    """Announce experts at a node, and return what announced them."""
    announcer = Announcer(node, contact(node), life_s=float(life_s))
    assert await announcer.announce(experts) == []
    return announcer


def test_rows_share_records() -> None:
    """Eight rows of a grid, or 256 experts of a line; other dimensions are elsewhere."""
    keys = [group_key("ffn", coordinates) for coordinates in ((31, 7), (255,), (256,), (7, 1, 2))]
    assert keys == ["ffn.2d3", "ffn.1d0", "ffn.1d1", "ffn.3d0"]
    assert grid_keys("ffn", (17, 4)) == ("ffn.2d0", "ffn.2d1", "ffn.2d2")
    assert grid_keys("ffn", (300,)) == ("ffn.1d0", "ffn.1d1")


def test_announcements_are_read_as_they_were_written() -> None:
    """One entry a record, however many experts; several where they do not fit one."""
    address = Address("10.1.0.1", 2000)
    grid = all_uids("ffn", (9, 3))
    values = announcements(grid, address, 0.5)
    assert {key: len(several) for key, several in values.items()} == {"ffn.2d0": 1, "ffn.2d1": 1}
    host = PeerId(b"h" * 32)
    found = experts_in_untrusted("ffn.2d1", [Found(host, "", values["ffn.2d1"][0], 9.0)])
    assert list(found) == [(8, 0), (8, 1), (8, 2)]
    ((replica,), *_) = found.values()
    assert (replica.contact, replica.ends_at, replica.call_s) == (Contact(host, address), 9.0, 0.5)
    many = announcements([ExpertUid("wide", (3, column)) for column in range(MAX_NUMBERS)], address)
    assert len(many["wide.2d0"]) == 2
    entries = [Found(host, str(number), value, 9.0) for number, value in enumerate(many["wide.2d0"])]
    assert len(experts_in_untrusted("wide.2d0", entries)) == MAX_NUMBERS


async def test_declared_experts_are_found(autojump_clock: MockClock) -> None:
    """Every expert of a grid is found at its host, one-dimensional ones too; the others are None."""
    async with open_swarm(DirectNetwork(), 6) as nodes, open_expert_directory(nodes[5]) as directory:
        await announce(nodes[0], list(all_uids("ffn", (3, 4))))
        await announce(nodes[1], uids("flat.7"))
        found = await find_experts(directory, [*all_uids("ffn", (3, 4)), *uids("flat.7", "ffn.3.0", "no.1")])
        assert list(found.values()) == [contact(nodes[0])] * 12 + [contact(nodes[1]), None, None]
        everybody = dict.fromkeys(itertools.product(range(2), range(4)), contact(nodes[0]))
        assert await directory.living("ffn", (2, 9)) == everybody
        assert await directory.living("nowhere", (2, 2)) == {}


async def test_silence_is_how_an_expert_disappears(autojump_clock: MockClock) -> None:
    """An expert that is not announced again is gone when its announcement has ended, even from a fresh cache."""
    async with open_swarm(DirectNetwork(), 4) as nodes:
        (uid,) = uids("ffn.1.1")
        issued = now()
        await announce(nodes[0], [uid], life_s=7.0)
        stored = now()
        async with open_expert_directory(nodes[1], config=DirectoryConfig(ttl_s=100.0, idle_s=100.0)) as directory:
            assert (await find_experts(directory, [uid]))[uid] == contact(nodes[0])
            await trio.sleep_until(issued + 6.9)
            assert (await find_experts(directory, [uid]))[uid] == contact(nodes[0])
            await trio.sleep_until(stored + 7.1)
            assert (await find_experts(directory, [uid]))[uid] is None


async def test_a_withdrawn_expert_is_invisible(autojump_clock: MockClock) -> None:
    """After a withdrawal readers do not see the expert; those of other hosts and in the same row stay."""
    async with open_swarm(DirectNetwork(), 6) as nodes:
        mine, theirs = uids("ffn.0.0", "ffn.0.1", "ffn.1.0"), uids("ffn.0.2", "ffn.1.1")
        stays = uids("ffn.0.7")
        first = await announce(nodes[0], [*mine, *stays])
        await announce(nodes[1], theirs)
        await first.withdraw([*mine, *theirs, *uids("ffn.9.9")])
        async with open_expert_directory(nodes[5]) as directory:
            found = await find_experts(directory, [*mine, *theirs, *stays])
            assert list(found.values()) == [None] * 3 + [contact(nodes[1])] * 2 + [contact(nodes[0])]
        assert await first.announce(mine) == [], "it may return"
        async with open_expert_directory(nodes[4]) as directory:
            assert list((await find_experts(directory, mine)).values()) == [contact(nodes[0])] * 3


async def test_a_row_costs_a_signature_for_each_of_its_hosts(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 experts of a row on 16 nodes: 16 signatures are verified when they are first read, and none again."""
    async with open_swarm(DirectNetwork(), 17) as (*hosts, reader):
        for number, node in enumerate(hosts):
            await announce(node, [ExpertUid("ffn", (3, 16 * number + column)) for column in range(16)])
        monkeypatch.setattr(entries, "_KNOWN", {})  # as if the reader were a process of its own
        for most in (16, 0):
            verified = reader.statistics().verified
            async with open_expert_directory(reader) as directory:
                assert len(await directory.living("ffn", (8, 256))) == 256
            assert reader.statistics().verified - verified == most


async def test_several_hosts_of_one_expert_do_not_disturb_each_other(autojump_clock: MockClock) -> None:
    """Each has its own announcement: one that is withdrawn or ends leaves the others."""
    async with open_swarm(DirectNetwork(), 6) as nodes:
        (uid,) = uids("ffn.1.1")
        hosts = [await announce(node, [uid], life_s=life_s) for node, life_s in zip(nodes, (30, 60, 90), strict=False)]

        async def found() -> set[DhtNode]:
            replicas = (await find_replicas(nodes[5], [uid]))[uid]
            return {node for node in nodes for replica in replicas if replica.contact == contact(node)}

        assert await found() == set(nodes[:3])
        await hosts[1].withdraw([uid])
        assert await found() == {nodes[0], nodes[2]}
        await trio.sleep(35)
        assert await found() == {nodes[2]}
        await hosts[2].withdraw([uid])
        assert await found() == set()


async def test_a_reader_goes_from_one_host_of_an_expert_to_the_next(autojump_clock: MockClock) -> None:
    """From memory, until all of them have failed."""
    network = DirectNetwork()
    async with open_swarm(network, 6) as nodes, open_expert_directory(nodes[5]) as directory:
        (uid,) = uids("ffn.1.1")
        for node in nodes[:3]:
            await announce(node, [uid])
        tried: list[Contact | None] = [(await find_experts(directory, [uid]))[uid]]
        before = len(network.calls)
        while (last := tried[-1]) is not None:
            directory.health.failed(host_target(last), now(), "no answer")
            tried.append(directory.another(str(uid), last))
        assert len(tried) == 4
        assert set(tried[:-1]) == {contact(node) for node in nodes[:3]}
        assert (await find_experts(directory, [uid]))[uid] is None
        assert len(network.calls) == before


async def test_a_training_step_asks_the_dht_nothing(autojump_clock: MockClock) -> None:
    """The background keeps a prefix in use fresh: a hundred reads cause no call of their own."""
    network = DirectNetwork()
    async with open_swarm(network, 4) as nodes, open_expert_directory(nodes[1]) as directory:
        wanted = list(all_uids("ffn", (2, 2)))
        await announce(nodes[0], wanted, life_s=300)
        await find_experts(directory, wanted)
        for _ in range(100):
            await trio.sleep(0.25)
            before = len(network.calls)
            started = now()
            assert all((await find_experts(directory, wanted)).values())
            assert (now(), len(network.calls)) == (started, before), "answered at once"


async def test_the_background_sees_what_is_new(autojump_clock: MockClock) -> None:
    """A new expert is seen within the time to live of its prefix, which is shorter for empty ones."""
    async with open_swarm(DirectNetwork(), 4) as nodes, open_expert_directory(nodes[1]) as directory:
        first, second, third = uids("ffn.0.0", "ffn.0.1", "new.0.0")
        await announce(nodes[0], [first], life_s=300)
        found = await find_experts(directory, [first, second, third])
        assert list(found.values()) == [contact(nodes[0]), None, None]
        await announce(nodes[2], [second, third], life_s=300)
        await trio.sleep(DirectoryConfig().negative_ttl_s)
        assert (await find_experts(directory, [third]))[third] == contact(nodes[2])
        await trio.sleep(DirectoryConfig().ttl_s - DirectoryConfig().negative_ttl_s)
        assert (await find_experts(directory, [second]))[second] == contact(nodes[2])


async def test_an_idle_prefix_is_no_longer_refreshed(autojump_clock: MockClock) -> None:
    """When nobody asks any more, the traffic ends after idle_s."""
    network = DirectNetwork()
    async with open_swarm(network, 2) as nodes, open_expert_directory(nodes[1]) as directory:
        await directory.prefetch("ffn", (2, 2))
        await trio.sleep(DirectoryConfig().idle_s + 2 * DirectoryConfig().ttl_s)
        before = len(network.calls)
        await trio.sleep(30)
        assert all(method != "dht.find" for _, _, method in network.calls[before:])


async def test_concurrent_readers_share_one_lookup(autojump_clock: MockClock) -> None:
    """Twenty tasks that ask for one prefix at once cause the calls of one, even if the first is cancelled."""
    network = DirectNetwork()
    async with open_swarm(network, 8) as nodes:
        await announce(nodes[0], uids("ffn.0.0"), life_s=300)
        before = len(network.calls)
        await nodes[6].get("ffn.2d0")
        one_lookup = len(network.calls) - before
        answers: list[Any] = []
        async with open_expert_directory(nodes[7]) as directory:

            async def read() -> None:
                answers.append(await directory.living("ffn", (1, 1)))

            before = len(network.calls)
            async with trio.open_nursery() as nursery:
                with trio.move_on_after(0.01):
                    await read()
                assert answers == []
                for _ in range(20):
                    nursery.start_soon(read)
            assert answers == [{(0, 0): contact(nodes[0])}] * 20
            assert len(network.calls) - before <= one_lookup + 1


async def test_a_failing_host_is_avoided_for_a_while(autojump_clock: MockClock) -> None:
    """After a reported failure a host's experts are dead for 1 s, then 2 s, up to 60; a success clears it."""
    async with open_swarm(DirectNetwork(), 3) as nodes, open_expert_directory(nodes[1]) as directory:
        wanted = uids("ffn.0.0", "ffn.0.1")
        await announce(nodes[0], wanted[:1], life_s=300)
        await announce(nodes[2], wanted[1:], life_s=300)
        for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
            directory.health.failed(host_target(contact(nodes[0])), now(), "no answer")
            started = now()
            assert list((await find_experts(directory, wanted)).values()) == [None, contact(nodes[2])]
            assert avoided(directory) == [contact(nodes[0]).peer_id]
            await trio.sleep_until(started + pause_s)
            assert list((await find_experts(directory, wanted)).values()) == [contact(nodes[0]), contact(nodes[2])]
        directory.health.succeeded(host_target(contact(nodes[0])))
        directory.health.failed(host_target(contact(nodes[0])), now(), "no answer")
        await trio.sleep(1.0)
        assert avoided(directory) == []


async def test_a_failing_expert_is_avoided_and_not_its_host(autojump_clock: MockClock) -> None:
    """For 1 s, then 2 s; failures during a pause are those of calls that were under way, and make it no longer."""
    async with open_swarm(DirectNetwork(), 3) as nodes, open_expert_directory(nodes[1]) as directory:
        bad, good = uids("ffn.0.0", "ffn.0.1")
        await announce(nodes[0], [bad, good], life_s=300)
        for pause_s in (1.0, 2.0, 4.0):
            for _ in range(3):
                directory.avoid(str(bad), contact(nodes[0]), "not finite")
            started = now()
            assert await find_experts(directory, [bad, good]) == {bad: None, good: contact(nodes[0])}
            assert avoided(directory) == [str(bad)]
            await trio.sleep_until(started + pause_s)
            assert (await find_experts(directory, [bad]))[bad] == contact(nodes[0])


async def test_a_busy_host_is_passed_over_while_there_are_others(autojump_clock: MockClock) -> None:
    """For as long as it said, the longest counts; where all hosts are busy they are chosen all the same."""
    async with open_swarm(DirectNetwork(), 4) as nodes, open_expert_directory(nodes[3]) as directory:
        await announce(nodes[0], uids("ffn.0.0", "ffn.0.1"))
        await announce(nodes[1], uids("ffn.0.2"))
        grid = (2, 4)
        everybody = {(0, 0): contact(nodes[0]), (0, 1): contact(nodes[0]), (0, 2): contact(nodes[1])}
        assert await directory.living("ffn", grid) == everybody
        directory.busy(contact(nodes[0]), 2.0)
        directory.busy(contact(nodes[0]), 1.0)
        assert await directory.living("ffn", grid) == {(0, 2): contact(nodes[1])}
        directory.busy(contact(nodes[1]), 1.0)
        assert await directory.living("ffn", grid) == everybody
        await trio.sleep(1.5)
        assert await directory.living("ffn", grid) == {(0, 2): contact(nodes[1])}
        await trio.sleep(1.0)
        assert await directory.living("ffn", grid) == everybody


async def test_with_no_backoff_nobody_is_avoided(autojump_clock: MockClock) -> None:
    """As in experiments whose failures are drawn for each call anew."""
    async with open_swarm(DirectNetwork(), 3) as nodes:
        wanted = uids("ffn.0.0", "ffn.0.1")
        await announce(nodes[0], wanted)
        async with open_expert_directory(nodes[1], config=DirectoryConfig(backoff_base_s=0.0)) as directory:
            directory.health.failed(host_target(contact(nodes[0])), now(), "no answer")
            directory.avoid("ffn.0.0", contact(nodes[0]), "not finite")
            assert list((await find_experts(directory, wanted)).values()) == [contact(nodes[0])] * 2


GOOD = ["10.1.0.1", 2000, [5, 5], None]
MALFORMED: list[Any] = [True, None, "text", [], {"host": "h"}, GOOD[:3], [*GOOD, 1], ["", *GOOD[1:]]]
MALFORMED += [["h", 0, [5, 5], None], ["h", 1, [5, 5], -1.0], ["h", 1, [5, 5], 1]]
MALFORMED += [["h", 1, place, None] for place in ([5, -1], [5, 100_000], [5, 5.0], [8, 5], [5])]


async def test_malformed_records_are_ignored(autojump_clock: MockClock) -> None:
    """A malformed value of a stranger under a key is no expert, and the good entries beside it stay."""
    async with open_swarm(DirectNetwork(), 3) as nodes:
        for number, value in enumerate(MALFORMED):
            await announce(nodes[0], uids(f"ffn{number}.5.5"))
            assert await nodes[1].store(f"ffn{number}.2d0", value, life_s=100)
        assert await nodes[1].store("ffn.2d0", GOOD, life_s=100)
        for number, case in enumerate(MALFORMED):
            record = await nodes[2].get(f"ffn{number}.2d0")
            assert len(record) == 2
            ((place, (replica,)),) = experts_in_untrusted(f"ffn{number}.2d0", record).items()
            assert (place, replica.contact) == ((5, 5), contact(nodes[0])), case
        async with open_expert_directory(nodes[2]) as directory:
            assert await directory.living("ffn0", (16, 9)) == {(5, 5): contact(nodes[0])}
            address = Address("10.1.0.1", 2000)
            assert await directory.living("ffn", (16, 9)) == {(5, 5): Contact(nodes[1].peer_id, address)}, "no mistake"


async def test_beam_search_goes_around_the_dead(autojump_clock: MockClock) -> None:
    """The withdrawn and the avoided are not chosen, the next best living ones are; of no such grid nobody is."""
    async with open_swarm(DirectNetwork(), 8) as nodes, open_expert_directory(nodes[7]) as directory:
        grid = list(all_uids("ffn", (4, 4)))
        rows = [await announce(nodes[row], grid[4 * row : 4 * row + 4]) for row in range(4)]
        await rows[3].withdraw(grid[12:])
        scores = [np.array([[0.0, 1.0, 2.0, 3.0]]), np.array([[0.0, 0.1, 0.2, 0.3]])]
        directory.health.failed(host_target(contact(nodes[2])), now(), "no answer")
        (chosen,), _ = await directory.beam_search("ffn", scores, 2)
        assert chosen.tolist() == [[1, 3], [1, 2]]
        directory.health.succeeded(host_target(contact(nodes[2])))
        (chosen,), contacts = await directory.beam_search("ffn", scores, 20)
        assert chosen[:2].tolist() == [[2, 3], [2, 2]]
        assert contacts == {(u, v): contact(nodes[u]) for u in range(3) for v in range(4)}
        assert {tuple(each) for each in chosen.tolist()} == contacts.keys() | {(-1, -1)}
        assert (await directory.beam_search("no", scores, 2))[1] == {}


async def test_a_search_costs_one_look_at_its_grid_and_after_a_prefetch_none(autojump_clock: MockClock) -> None:
    """Rows share a record, and 64 samples a look; a search in what is known asks nothing and is answered at once."""
    network, rng = DirectNetwork(), np.random.default_rng(0)
    async with open_swarm(network, 6) as nodes, open_expert_directory(nodes[5]) as directory:
        await announce(nodes[0], [*all_uids("ffn", (4, 4, 4)), *all_uids("flat", (20, 2))])
        started = now()
        await nodes[4].get("ffn.3d0")
        one_look_s = now() - started
        await directory.prefetch("flat", (20, 2))
        for prefix, sizes, looks in (("ffn", (4, 4, 4), 1.5), ("ffn", (4, 4, 4), 0), ("flat", (20, 2), 0)):
            started, calls = now(), len(network.calls)
            scores = [rng.normal(size=(64, size)) for size in sizes]
            chosen, _ = await directory.beam_search(prefix, scores, 16)
            assert now() - started <= looks * one_look_s
            assert looks or len(network.calls) == calls
            assert chosen.shape == (64, 16, len(sizes))
            assert (chosen >= 0).all()
        with pytest.raises(ValueError, match="prefix"):
            await directory.beam_search("ffn.", [np.zeros((1, 1))], 1)


async def test_errors_of_the_block_come_out_as_they_are(autojump_clock: MockClock) -> None:
    """Neither the node nor the directory wraps an error into an ExceptionGroup."""

    async def fail(node: DhtNode) -> None:
        async with open_expert_directory(node):
            raise KeyError("mine")

    async with open_swarm(DirectNetwork(), 1) as nodes:
        with pytest.raises(KeyError, match="mine"):
            await fail(nodes[0])


def test_a_config_is_checked() -> None:
    """Times to live out of order are refused."""
    with pytest.raises(ValueError, match="negative_ttl_s"):
        DirectoryConfig(ttl_s=1.0, negative_ttl_s=2.0)
