"""Expert discovery over a DHT of direct calls, in virtual time."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from dmoe_jax.directory.directory import (
    DirectoryConfig,
    declare_experts,
    host_target,
    open_expert_directory,
    withdraw_experts,
)
from dmoe_jax.directory.grid import ExpertUid, all_uids, parse_uid
from dmoe_net.dht.node import DhtNode
from dmoe_net.dht.records import Dictionary
from dmoe_net.dht.routing_table import key_id
from dmoe_net.identity import Address, Contact, PeerId
from tests.dmoe_jax.small_swarm import avoided, find_experts
from tests.net.direct_network import DirectNetwork, open_swarm

RNG = random.Random(0)
HOSTS = [Contact(PeerId.draw(RNG), Address("10.1.0.1", 2000 + n)) for n in range(4)]


def now() -> float:
    return trio.current_time()


def uids(*texts: str) -> list[ExpertUid]:
    return [parse_uid(text) for text in texts]


def dht_calls(network: DirectNetwork, since: int) -> int:
    return len(network.calls) - since


async def test_an_expert_is_announced_under_each_prefix(autojump_clock: MockClock) -> None:
    """A key for each partial path: the last step names the host, inner steps only exist."""
    async with open_swarm(DirectNetwork(), 4) as nodes:
        declared = await declare_experts(
            nodes[0], uids("e.1.2.3", "e.1.2.5", "e.2.0.0"), HOSTS[0], expiration=now() + 60
        )
        assert all(declared.values())
        expected = {
            "e.": {"1": True, "2": True},
            "e.1.": {"2": True},
            "e.2.": {"0": True},
            "e.1.2.": {"3": "host", "5": "host"},
            "e.2.0.": {"0": "host"},
        }
        host = [HOSTS[0].peer_id.raw, HOSTS[0].address.host, HOSTS[0].address.port]
        for key, children in expected.items():
            found = await nodes[3].get(key)
            assert isinstance(found, Dictionary)
            values = {subkey: entry.value for subkey, entry in found.entries.items()}
            assert values == {subkey: host if value == "host" else value for subkey, value in children.items()}


async def test_declared_experts_are_found(autojump_clock: MockClock) -> None:
    """Every expert of a grid is found at its host, one-dimensional ones too; the others are None."""
    async with open_swarm(DirectNetwork(), 6) as nodes:
        await declare_experts(nodes[0], list(all_uids("ffn", (3, 4))), HOSTS[0], expiration=now() + 60)
        await declare_experts(nodes[1], uids("flat.7"), HOSTS[1], expiration=now() + 60)
        async with open_expert_directory(nodes[5]) as directory:
            found = await find_experts(directory, [*all_uids("ffn", (3, 4)), *uids("flat.7", "ffn.3.0", "no.1")])
            assert list(found.values()) == [HOSTS[0]] * 12 + [HOSTS[1], None, None]
            children = await directory.children(["ffn.", "ffn.2.", "nowhere."])
            assert children == {
                "ffn.": {0: None, 1: None, 2: None},
                "ffn.2.": dict.fromkeys(range(4), HOSTS[0]),
                "nowhere.": {},
            }


async def test_silence_is_how_an_expert_disappears(autojump_clock: MockClock) -> None:
    """An expert that is not announced again is gone at its expiration, even from a fresh cache."""
    async with open_swarm(DirectNetwork(), 4) as nodes:
        (uid,) = uids("ffn.1.1")
        end = now() + 7.0
        await declare_experts(nodes[0], [uid], HOSTS[0], expiration=end)
        async with open_expert_directory(nodes[1], config=DirectoryConfig(ttl_s=100.0, idle_s=100.0)) as directory:
            assert (await find_experts(directory, [uid]))[uid] == HOSTS[0]
            await trio.sleep_until(end - 0.1)
            assert (await find_experts(directory, [uid]))[uid] == HOSTS[0]
            await trio.sleep_until(end)
            assert (await find_experts(directory, [uid]))[uid] is None


async def test_a_withdrawn_expert_is_invisible(autojump_clock: MockClock) -> None:
    """After a withdrawal readers do not see the expert; those of other hosts and in the same row stay."""
    async with open_swarm(DirectNetwork(), 6) as nodes:
        mine, theirs = uids("ffn.0.0", "ffn.0.1", "ffn.1.0"), uids("ffn.0.2", "ffn.1.1")
        await declare_experts(nodes[0], mine, HOSTS[0], expiration=now() + 60)
        await declare_experts(nodes[1], theirs, HOSTS[1], expiration=now() + 60)
        await withdraw_experts(nodes[0], [*mine, *theirs, *uids("ffn.9.9")], HOSTS[0])
        async with open_expert_directory(nodes[5]) as directory:
            found = await find_experts(directory, [*mine, *theirs])
            assert list(found.values()) == [None] * 3 + [HOSTS[1]] * 2
        assert all((await declare_experts(nodes[0], mine, HOSTS[0], expiration=now() + 60)).values()), "it may return"
        async with open_expert_directory(nodes[4]) as directory:
            assert list((await find_experts(directory, mine)).values()) == [HOSTS[0]] * 3


async def test_a_host_that_announces_for_longer_keeps_the_expert(autojump_clock: MockClock) -> None:
    """Of two hosts with one expert the later expiration stands, and the other is told."""
    async with open_swarm(DirectNetwork(), 4) as nodes:
        (uid,) = uids("ffn.1.1")
        assert (await declare_experts(nodes[0], [uid], HOSTS[0], expiration=now() + 60))[uid]
        assert not (await declare_experts(nodes[1], [uid], HOSTS[1], expiration=now() + 30))[uid]
        async with open_expert_directory(nodes[2]) as directory:
            assert (await find_experts(directory, [uid]))[uid] == HOSTS[0]


async def test_a_training_step_asks_the_dht_nothing(autojump_clock: MockClock) -> None:
    """The background keeps a prefix in use fresh: a hundred reads cause no call of their own."""
    network = DirectNetwork()
    async with open_swarm(network, 4) as nodes:
        wanted = list(all_uids("ffn", (2, 2)))
        await declare_experts(nodes[0], wanted, HOSTS[0], expiration=now() + 600)
        async with open_expert_directory(nodes[1]) as directory:
            await find_experts(directory, wanted)
            for _ in range(100):
                await trio.sleep(0.25)
                before = len(network.calls)
                started = now()
                assert all((await find_experts(directory, wanted)).values())
                assert now() == started, "answered at once"
                assert dht_calls(network, before) == 0


async def test_the_background_sees_what_is_new(autojump_clock: MockClock) -> None:
    """A new expert is seen within the time to live of its prefix, which is shorter for empty ones."""
    async with open_swarm(DirectNetwork(), 4) as nodes:
        first, second, third = uids("ffn.0.0", "ffn.0.1", "new.0.0")
        await declare_experts(nodes[0], [first], HOSTS[0], expiration=now() + 600)
        async with open_expert_directory(nodes[1]) as directory:
            assert list((await find_experts(directory, [first, second, third])).values()) == [
                HOSTS[0],
                None,
                None,
            ]
            await declare_experts(nodes[0], [second, third], HOSTS[1], expiration=now() + 600)
            await trio.sleep(DirectoryConfig().negative_ttl_s)
            assert (await find_experts(directory, [third]))[third] == HOSTS[1]
            await trio.sleep(DirectoryConfig().ttl_s - DirectoryConfig().negative_ttl_s)
            assert (await find_experts(directory, [second]))[second] == HOSTS[1]


async def test_an_idle_prefix_is_no_longer_refreshed(autojump_clock: MockClock) -> None:
    """When nobody asks any more, the traffic ends after idle_s."""
    network = DirectNetwork()
    async with open_swarm(network, 2) as nodes, open_expert_directory(nodes[1]) as directory:
        await directory.children(["ffn."])
        await trio.sleep(DirectoryConfig().idle_s + 2 * DirectoryConfig().ttl_s)
        before = len(network.calls)
        await trio.sleep(30)
        assert all(method != "dht.find" for _, _, method in network.calls[before:])


async def test_concurrent_readers_share_one_lookup(autojump_clock: MockClock) -> None:
    """Twenty tasks that ask for one prefix at once cause the calls of one, even if the first is cancelled."""
    network = DirectNetwork()
    async with open_swarm(network, 8) as nodes:
        await declare_experts(nodes[0], uids("ffn.0.0"), HOSTS[0], expiration=now() + 600)
        before = len(network.calls)
        await nodes[6].get("ffn.0.")
        one_lookup = dht_calls(network, before)
        answers: list[Any] = []
        async with open_expert_directory(nodes[7]) as directory:

            async def read() -> None:
                answers.append(await directory.children(["ffn.0."]))

            before = len(network.calls)
            async with trio.open_nursery() as nursery:
                with trio.move_on_after(0.01):
                    await read()
                assert answers == []
                for _ in range(20):
                    nursery.start_soon(read)
            assert answers == [{"ffn.0.": {0: HOSTS[0]}}] * 20
            assert dht_calls(network, before) <= one_lookup + 1


async def test_a_failing_host_is_avoided_for_a_while(autojump_clock: MockClock) -> None:
    """After a reported failure a host's experts are dead for 1 s, then 2 s, up to 60; a success clears it."""
    async with open_swarm(DirectNetwork(), 3) as nodes:
        wanted = uids("ffn.0.0", "ffn.0.1")
        await declare_experts(nodes[0], wanted[:1], HOSTS[0], expiration=now() + 6000)
        await declare_experts(nodes[0], wanted[1:], HOSTS[1], expiration=now() + 6000)
        async with open_expert_directory(nodes[1]) as directory:
            for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
                directory.health.failed(host_target(HOSTS[0]), now(), "no answer")
                started = now()
                assert list((await find_experts(directory, wanted)).values()) == [None, HOSTS[1]]
                assert avoided(directory) == [HOSTS[0].peer_id]
                await trio.sleep_until(started + pause_s)
                assert list((await find_experts(directory, wanted)).values()) == [HOSTS[0], HOSTS[1]]
            directory.health.succeeded(host_target(HOSTS[0]))
            directory.health.failed(host_target(HOSTS[0]), now(), "no answer")
            await trio.sleep(1.0)
            assert avoided(directory) == []


async def test_a_failing_expert_is_avoided_and_not_its_host(autojump_clock: MockClock) -> None:
    """For 1 s, then 2 s; failures during a pause are those of calls that were under way, and make it no longer."""
    async with open_swarm(DirectNetwork(), 3) as nodes:
        bad, good = uids("ffn.0.0", "ffn.0.1")
        await declare_experts(nodes[0], [bad, good], HOSTS[0], expiration=now() + 6000)
        async with open_expert_directory(nodes[1]) as directory:
            for pause_s in (1.0, 2.0, 4.0):
                for _ in range(3):
                    directory.avoid(str(bad), HOSTS[0], "not finite")
                started = now()
                assert await find_experts(directory, [bad, good]) == {bad: None, good: HOSTS[0]}
                assert avoided(directory) == [str(bad)]
                await trio.sleep_until(started + pause_s)
                assert (await find_experts(directory, [bad]))[bad] == HOSTS[0]


async def test_a_busy_host_is_passed_over_while_there_are_others(autojump_clock: MockClock) -> None:
    """For as long as it said, the longest counts; where all hosts are busy they are chosen all the same."""
    async with open_swarm(DirectNetwork(), 4) as nodes:
        await declare_experts(nodes[0], uids("ffn.0.0", "ffn.0.1"), HOSTS[0], expiration=now() + 60)
        await declare_experts(nodes[1], uids("ffn.0.2"), HOSTS[1], expiration=now() + 60)
        async with open_expert_directory(nodes[3]) as directory:
            grid = (2, 4)
            everybody = {(0, 0): HOSTS[0], (0, 1): HOSTS[0], (0, 2): HOSTS[1]}
            assert await directory.living("ffn", grid) == everybody
            directory.busy(HOSTS[0], 2.0)
            directory.busy(HOSTS[0], 1.0)
            assert await directory.living("ffn", grid) == {(0, 2): HOSTS[1]}
            directory.busy(HOSTS[1], 1.0)
            assert await directory.living("ffn", grid) == everybody
            await trio.sleep(1.5)
            assert await directory.living("ffn", grid) == {(0, 2): HOSTS[1]}
            await trio.sleep(1.0)
            assert await directory.living("ffn", grid) == everybody


async def test_with_no_backoff_nobody_is_avoided(autojump_clock: MockClock) -> None:
    """As in experiments whose failures are drawn for each call anew."""
    async with open_swarm(DirectNetwork(), 3) as nodes:
        wanted = uids("ffn.0.0", "ffn.0.1")
        await declare_experts(nodes[0], wanted, HOSTS[0], expiration=now() + 60)
        async with open_expert_directory(nodes[1], config=DirectoryConfig(backoff_base_s=0.0)) as directory:
            directory.health.failed(host_target(HOSTS[0]), now(), "no answer")
            directory.avoid("ffn.0.0", HOSTS[0], "not finite")
            assert list((await find_experts(directory, wanted)).values()) == [HOSTS[0]] * 2
            assert avoided(directory) == []


MALFORMED: list[tuple[str, Any]] = [
    ("-1", True),
    ("01", True),
    ("x", True),
    ("", True),
    ("100000", True),
    ("3", 1),
    ("3", "true"),
    ("3", None),
    ("3", [b"short", "h", 1]),
    ("3", [bytes(32), "h", 0]),
    ("3", [bytes(32), 5, 1]),
    ("3", {"host": "h"}),
]


async def test_malformed_records_are_ignored(autojump_clock: MockClock) -> None:
    """What a stranger writes under a prefix is no child, and the good entries beside it stay."""
    async with open_swarm(DirectNetwork(), 3) as nodes:
        for number, (subkey, value) in enumerate(MALFORMED):
            await declare_experts(nodes[0], uids(f"ffn{number}.5"), HOSTS[0], expiration=now() + 60)
            assert await nodes[1].store(f"ffn{number}.", value, subkey=subkey, expiration=now() + 100)
        await nodes[1].store("plain.", "boo", expiration=now() + 100)  # not even a dictionary
        async with open_expert_directory(nodes[2]) as directory:
            for number, case in enumerate(MALFORMED):
                assert await directory.children([f"ffn{number}."]) == {f"ffn{number}.": {5: HOSTS[0]}}, case
            assert await directory.children(["plain."]) == {"plain.": {}}


async def test_one_missed_replica_hides_nobody(autojump_clock: MockClock) -> None:
    """If a later lookup finds less (replicas lost the record), what was known stays until it expires."""
    async with open_swarm(DirectNetwork(), 4) as nodes:
        (uid,) = uids("ffn.0")
        end = now() + 60
        await declare_experts(nodes[0], [uid], HOSTS[0], expiration=end)
        async with open_expert_directory(nodes[1]) as directory:
            await find_experts(directory, [uid])
            for node in nodes:
                node._storage._put(key_id("ffn."), None)
            assert await nodes[1].get("ffn.") is None
            await trio.sleep(30)
            assert (await find_experts(directory, [uid]))[uid] == HOSTS[0]
            await trio.sleep_until(end)
            assert (await find_experts(directory, [uid]))[uid] is None


def exhaustive(scores: list[np.ndarray], alive: set[tuple[int, ...]], sample: int, k: int) -> list[tuple[int, ...]]:
    """The oracle: all living experts sorted by score, the lower coordinates first among equals."""
    total = {e: sum(m[sample, i] for m, i in zip(scores, e, strict=True)) for e in alive}
    return sorted(alive, key=lambda e: (-total[e], e))[:k]


async def test_beam_search_equals_exhaustive_search(autojump_clock: MockClock) -> None:
    """On a full 4 x 4 x 4 grid: the best three of each sample, in order, with their hosts."""
    grid_size = (4, 4, 4)
    async with open_swarm(DirectNetwork(), 8) as nodes:
        grid = list(all_uids("ffn", grid_size))
        await declare_experts(nodes[0], grid[:32], HOSTS[0], expiration=now() + 60)
        await declare_experts(nodes[1], grid[32:], HOSTS[1], expiration=now() + 60)
        rng = np.random.default_rng(0)
        scores = [rng.normal(size=(6, size)) for size in grid_size]
        everybody = set(itertools.product(*map(range, grid_size)))
        async with open_expert_directory(nodes[7]) as directory:
            found, contacts = await directory.beam_search("ffn", scores, 3)
        for sample, chosen in enumerate(found.tolist()):
            assert list(map(tuple, chosen)) == exhaustive(scores, everybody, sample, 3)
            for expert in map(tuple, chosen):
                assert contacts[expert] == HOSTS[0 if expert[0] < 2 else 1]


async def test_beam_search_goes_around_the_dead(autojump_clock: MockClock) -> None:
    """Withdrawn experts, a withdrawn row and avoided hosts are not chosen; the next best living ones are."""
    async with open_swarm(DirectNetwork(), 8) as nodes:
        for row in range(4):
            await declare_experts(
                nodes[row],
                list(all_uids("ffn", (4, 4)))[4 * row : 4 * row + 4],
                HOSTS[row],
                expiration=now() + 60,
            )
        await withdraw_experts(nodes[3], list(all_uids("ffn", (4, 4)))[12:], HOSTS[3])
        scores = [np.array([[0.0, 1.0, 2.0, 3.0]]), np.array([[0.0, 0.1, 0.2, 0.3]])]
        async with open_expert_directory(nodes[7]) as directory:
            directory.health.failed(host_target(HOSTS[2]), now(), "no answer")
            (chosen,), _ = await directory.beam_search("ffn", scores, 2)
            assert chosen.tolist() == [[1, 3], [1, 2]]
            directory.health.succeeded(host_target(HOSTS[2]))
            (chosen,), contacts = await directory.beam_search("ffn", scores, 20)
            assert chosen[:2].tolist() == [[2, 3], [2, 2]]
            assert np.count_nonzero(chosen[:, 0] >= 0) == len(contacts) == 12


async def test_beam_search_looks_up_each_dimension_once(autojump_clock: MockClock) -> None:
    """64 samples on a 3-D grid take the time of three lookups, and the second batch no time at all."""
    async with open_swarm(DirectNetwork(), 6) as nodes:
        await declare_experts(nodes[0], list(all_uids("ffn", (4, 4, 4))), HOSTS[0], expiration=now() + 60)
        rng = np.random.default_rng(0)
        async with open_expert_directory(nodes[5]) as directory:
            started = now()
            await nodes[4].get("ffn.")
            one_lookup_s = now() - started
            started = now()
            await directory.beam_search("ffn", [rng.normal(size=(64, 4)) for _ in range(3)], 16)
            # 16 lookups at a time is the node's own bound, and the last dimension has exactly 16 prefixes.
            assert now() - started <= 3.5 * one_lookup_s
            started = now()
            found, _ = await directory.beam_search("ffn", [rng.normal(size=(64, 4)) for _ in range(3)], 16)
            assert now() == started
            assert found.shape == (64, 16, 3)
            assert (found >= 0).all()


async def test_beam_search_of_nothing(autojump_clock: MockClock) -> None:
    """No such grid: nobody for each sample. A bad prefix or bad scores raise ValueError."""
    async with open_swarm(DirectNetwork(), 2) as nodes, open_expert_directory(nodes[1]) as directory:
        chosen, contacts = await directory.beam_search("ffn", [np.zeros((2, 3)), np.zeros((2, 3))], 2)
        assert (chosen == -1).all()
        assert contacts == {}
        with pytest.raises(ValueError, match="prefix"):
            await directory.beam_search("ffn.", [np.zeros((1, 1))], 1)
        with pytest.raises(ValueError, match="finite"):
            await directory.beam_search("ffn", [np.array([[np.nan]])], 1)


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
