"""Members of a swarm, as announced in a DHT of direct calls, in virtual time."""

import math
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from dmoe_jax.directory import members
from dmoe_jax.directory.directory import open_expert_directory
from dmoe_jax.directory.members import Member, check_info, declare_member, list_members, withdraw_member
from dmoe_net.dht.node import DhtNode
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.wire.versions import CALLS
from tests.net.direct_network import DirectNetwork, open_swarm

NODE: dict[str, Any] = {"role": "node", "state": "serving", "experts": 4, "grids": ["layer0", "layer1"]}
TRAINER: dict[str, Any] = {"role": "trainer", "step": 17, "loss": 2.5}


def contact(node: DhtNode) -> Contact:
    assert node.address is not None
    return Contact(node.peer_id, node.address)


def key_of(node: DhtNode) -> str:
    """The key under which a peer announces itself as a member: that of the ids with its first digit."""
    return f"members:demo/{node.peer_id.raw.hex()[0]}"


async def test_members_announce_and_withdraw_themselves(autojump_clock: MockClock) -> None:
    """Nodes, and trainers that listen nowhere, are listed by swarm until they withdraw or fall silent."""
    async with open_swarm(DirectNetwork(), 4) as nodes:
        first, second, third, fourth = nodes
        assert await declare_member(first, "demo", contact(first), NODE, life_s=60.0)
        # The same peer once more in another role, and a client.
        assert await declare_member(first, "demo", contact(first), TRAINER, life_s=60.0)
        assert await declare_member(second, "demo", contact(second), NODE | {"experts": 1}, life_s=70.0)
        assert await declare_member(third, "demo", None, TRAINER, life_s=60.0)
        await declare_member(fourth, "other", contact(fourth), NODE, life_s=60.0)

        async def listed() -> dict[tuple[PeerId, str], Member]:
            everyone = [((member.peer_id, member.role), member) for member in await list_members(fourth, "demo")]
            assert [name for name, _ in everyone] == sorted(dict(everyone))
            return dict(everyone)

        found = await listed()
        everybody = (first, "node"), (first, "trainer"), (second, "node"), (third, "trainer")
        assert found.keys() == {(node.peer_id, role) for node, role in everybody}
        assert found[second.peer_id, "node"].info == NODE | {"experts": 1}
        assert found[second.peer_id, "node"].contact == contact(second)
        assert found[third.peer_id, "trainer"].contact is None
        assert 50 < found[third.peer_id, "trainer"].left_s <= 60
        await withdraw_member(second, "demo", "trainer")
        await withdraw_member(first, "demo", "node")
        assert found.keys() - (await listed()).keys() == {(first.peer_id, "node")}
        await trio.sleep(62.0)
        assert list(await listed()) == [(second.peer_id, "node")]


async def test_served_prefixes_are_those_of_all_nodes(autojump_clock: MockClock) -> None:
    """Each once, sorted; of a swarm without nodes there are none."""
    async with open_swarm(DirectNetwork(), 3) as nodes, open_expert_directory(nodes[1], swarm="demo") as directory:
        assert await directory.served_prefixes() == ()
        for node, grids in zip(nodes, (["b", "a"], ["b", "c"]), strict=False):
            await declare_member(node, "demo", contact(node), NODE | {"grids": grids}, life_s=60.0)
        await declare_member(nodes[2], "demo", None, TRAINER, life_s=60.0)
        assert await directory.served_prefixes() == ("a", "b", "c")


BAD_INFOS: dict[str, tuple[dict[str, Any], str]] = {
    "no role": ({"state": "serving"}, "expected a role among node, trainer, .*, got None"),
    "another role": ({"role": "king"}, "got 'king'"),
    "a list for a role": ({"role": ["node"]}, "expected a role"),
    "too many facts": (TRAINER | {f"f{n}": n for n in range(members.MAX_FACTS)}, f"at most {members.MAX_FACTS} facts"),
    "a long name": (TRAINER | {"x" * 65: 1}, "at most 64 characters"),
    "a long text": (TRAINER | {"state": "x" * 65}, "state is a text of at most 64 characters"),
    "an escape sequence": (TRAINER | {"state": "\x1b[2J"}, "state is a text"),
    "nested": (TRAINER | {"step": [1]}, "step is a text"),
    "too many grids": (NODE | {"grids": ["a"] * (members.MAX_GRIDS + 1)}, f"at most {members.MAX_GRIDS} prefixes"),
    "a grid that is none": (NODE | {"grids": ["a.b"]}, "prefix"),
    "grids of numbers": (NODE | {"grids": [1]}, "list of at most"),
}


@pytest.mark.parametrize("kind", BAD_INFOS)
async def test_only_sound_facts_are_told_and_believed(autojump_clock: MockClock, kind: str) -> None:
    """They are refused with a sentence where they are declared, and left out where a stranger wrote them."""
    info, message = BAD_INFOS[kind]
    with pytest.raises(ValueError, match=message):
        check_info(info)
    with pytest.raises(ValueError, match=r"loss is a text .* or a finite number, got nan"):
        check_info(TRAINER | {"loss": math.nan})  # the DHT carries none
    async with open_swarm(DirectNetwork(), 3) as nodes:
        good, bad, reader = nodes
        await declare_member(good, "demo", contact(good), NODE, life_s=60.0)
        for role in ("node", "trainer"):
            await bad.store(key_of(bad), [None, info, CALLS], suffix=role, life_s=60.0)
        assert [member.peer_id for member in await list_members(reader, "demo")] == [good.peer_id]


OTHER = Contact(PeerId(bytes(32)), Address("10.6.6.6", 6))
FORGERIES: list[tuple[str, Any]] = [
    ("junk", [None, TRAINER, CALLS]),
    ("trainer", ["junk", TRAINER, CALLS]),
    ("trainer", "junk"),
    ("trainer", [None, TRAINER, CALLS, 1]),
    ("node", [None, TRAINER, CALLS]),
    ("", [None, TRAINER, CALLS]),
    ("trainer", [[OTHER.peer_id.raw, "10.6.6.6", 6], TRAINER, CALLS]),
    ("trainer", [None, TRAINER, "two"]),
]


@pytest.mark.parametrize(("suffix", "value"), FORGERIES)
async def test_malformed_announcements_are_left_out(autojump_clock: MockClock, suffix: str, value: Any) -> None:
    """Another role or peer than the entry is for, or no announcement at all."""
    async with open_swarm(DirectNetwork(), 2) as nodes:
        assert await nodes[0].store(key_of(nodes[0]), value, suffix=suffix, life_s=60.0)
        assert await list_members(nodes[1], "demo") == ()
