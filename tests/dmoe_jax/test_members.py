"""Who takes part in a swarm, as announced in a DHT of direct calls, in virtual time."""

import math
import random
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from dmoe_jax.directory.directory import open_expert_directory
from dmoe_jax.directory.members import (
    MAX_FACTS,
    MAX_GRIDS,
    check_info,
    declare_member,
    list_members,
    withdraw_member,
)
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.wire.versions import CALLS
from tests.net.direct_network import DirectNetwork, open_swarm

RNG = random.Random(0)
HOSTS = sorted((Contact(PeerId.draw(RNG), Address("10.1.0.1", 2000 + n)) for n in range(4)), key=lambda c: c.peer_id)
NODE: dict[str, Any] = {"role": "node", "state": "serving", "experts": 4, "grids": ["layer0", "layer1"]}
TRAINER: dict[str, Any] = {"role": "trainer", "step": 17, "loss": 2.5}


def now() -> float:
    return trio.current_time()


async def test_members_announce_and_withdraw_themselves(autojump_clock: MockClock) -> None:
    """Nodes, and trainers that listen nowhere, are listed by swarm until they withdraw or fall silent."""
    async with open_swarm(DirectNetwork(), 4) as nodes:
        end = now() + 60
        for number, host in enumerate(HOSTS[:2]):
            info = NODE | {"experts": number}
            assert await declare_member(nodes[number], "demo", host.peer_id, host, info, expiration=end + number)
        # The same peer once more in another role, and a client.
        assert await declare_member(nodes[0], "demo", HOSTS[0].peer_id, HOSTS[0], TRAINER, expiration=end)
        assert await declare_member(nodes[2], "demo", HOSTS[2].peer_id, None, TRAINER, expiration=end)
        await declare_member(nodes[0], "other", HOSTS[3].peer_id, HOSTS[3], NODE, expiration=end)
        listed = await list_members(nodes[3], "demo")
        assert [(m.peer_id, m.role, m.contact) for m in listed] == [
            (HOSTS[0].peer_id, "node", HOSTS[0]),
            (HOSTS[0].peer_id, "trainer", HOSTS[0]),
            (HOSTS[1].peer_id, "node", HOSTS[1]),
            (HOSTS[2].peer_id, "trainer", None),
        ]
        assert listed[0].info == NODE | {"experts": 0}
        assert listed[3].info == TRAINER
        await withdraw_member(nodes[1], "demo", HOSTS[1].peer_id, "trainer")
        await withdraw_member(nodes[0], "demo", HOSTS[0].peer_id, "node")
        left = [(HOSTS[0].peer_id, "trainer"), (HOSTS[1].peer_id, "node"), (HOSTS[2].peer_id, "trainer")]
        assert [(m.peer_id, m.role) for m in await list_members(nodes[3], "demo")] == left
        await trio.sleep_until(end + 0.5)
        assert [m.peer_id for m in await list_members(nodes[3], "demo")] == [HOSTS[1].peer_id]


async def test_served_prefixes_are_those_of_all_nodes(autojump_clock: MockClock) -> None:
    """Each once, sorted; of a swarm without nodes there are none."""
    async with open_swarm(DirectNetwork(), 2) as nodes, open_expert_directory(nodes[1], swarm="demo") as directory:
        assert await directory.served_prefixes() == ()
        for host, grids in ((HOSTS[0], ["b", "a"]), (HOSTS[1], ["b", "c"])):
            info = NODE | {"grids": grids}
            await declare_member(nodes[0], "demo", host.peer_id, host, info, expiration=now() + 60)
        await declare_member(nodes[0], "demo", HOSTS[2].peer_id, None, TRAINER, expiration=now() + 60)
        assert await directory.served_prefixes() == ("a", "b", "c")


BAD_INFOS: dict[str, tuple[dict[str, Any], str]] = {
    "no role": (
        {"state": "serving"},
        "expected a role among node, trainer, .*, got None",
    ),
    "another role": ({"role": "king"}, "got 'king'"),
    "a list for a role": ({"role": ["node"]}, "expected a role"),
    "too many facts": (TRAINER | {f"f{n}": n for n in range(MAX_FACTS)}, f"at most {MAX_FACTS} facts"),
    "a long name": (TRAINER | {"x" * 65: 1}, "at most 64 characters"),
    "a long text": (TRAINER | {"state": "x" * 65}, "state is a text of at most 64 characters"),
    "an escape sequence": (TRAINER | {"state": "\x1b[2J"}, "state is a text"),
    "nested": (TRAINER | {"step": [1]}, "step is a text"),
    "too many grids": (NODE | {"grids": ["a"] * (MAX_GRIDS + 1)}, f"at most {MAX_GRIDS} prefixes"),
    "a grid that is none": (NODE | {"grids": ["a.b"]}, "prefix"),
    "grids of numbers": (NODE | {"grids": [1]}, "list of at most"),
}


@pytest.mark.parametrize("kind", BAD_INFOS)
async def test_only_sound_facts_are_told_and_believed(autojump_clock: MockClock, kind: str) -> None:
    """They are refused with a sentence where they are declared, and left out where a stranger wrote them."""
    info, message = BAD_INFOS[kind]
    with pytest.raises(ValueError, match=message):
        check_info(info)
    async with open_swarm(DirectNetwork(), 2) as nodes:
        good = HOSTS[0]
        await declare_member(nodes[0], "demo", good.peer_id, good, NODE, expiration=now() + 60)
        for role in ("node", "trainer"):
            await nodes[0].store(
                "members:demo", [None, info, CALLS], subkey=f"{HOSTS[1].peer_id}/{role}", expiration=now() + 60
            )
        assert [member.peer_id for member in await list_members(nodes[1], "demo")] == [good.peer_id]


def test_a_loss_that_is_not_a_number_is_not_announced() -> None:
    """The DHT carries none."""
    with pytest.raises(ValueError, match=r"loss is a text .* or a finite number, got nan"):
        check_info(TRAINER | {"loss": math.nan})


FORGERIES: list[tuple[str, Any]] = [
    ("junk", [None, TRAINER, CALLS]),
    (f"{HOSTS[1].peer_id}/trainer", ["junk", TRAINER, CALLS]),
    (f"{HOSTS[1].peer_id}/trainer", "junk"),
    (f"{HOSTS[1].peer_id}/trainer", [None, TRAINER, CALLS, 1]),
    (f"{HOSTS[1].peer_id}/node", [None, TRAINER, CALLS]),
    (f"{HOSTS[1].peer_id}", [None, TRAINER, CALLS]),
    (f"{HOSTS[1].peer_id}/trainer", [[HOSTS[2].peer_id.raw, "10.6.6.6", 6], TRAINER, CALLS]),
    (f"{HOSTS[1].peer_id}/trainer", [None, TRAINER, "two"]),
]


@pytest.mark.parametrize(("subkey", "value"), FORGERIES)
async def test_malformed_announcements_are_left_out(autojump_clock: MockClock, subkey: str, value: Any) -> None:
    """Another role or peer than the entry is for, or no announcement at all."""
    async with open_swarm(DirectNetwork(), 2) as nodes:
        assert await nodes[0].store("members:demo", value, subkey=subkey, expiration=now() + 60)
        assert await list_members(nodes[1], "demo") == ()
