"""Members of a swarm: nodes, trainers, averagers and auxiliary peers tell the DHT, and `dmoe status` reads it.

Each member has one entry for each of its roles, under the key of its shard: `members:SWARM/a` for the ids that begin
with the hexadecimal digit a. It holds the contact that the member listens at (none in client mode), a small dictionary
of facts, and the version of its calls and records. Members announce again and again, and silence is how a crashed one
disappears. Strangers write these records: whatever is malformed is left out.
"""

import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio

from dmoe_jax.directory.grid import check_prefix
from dmoe_net.dht.entries import MAX_LIFE_S, Found, Value
from dmoe_net.dht.messages import contact_to_wire, parse_contact_untrusted
from dmoe_net.dht.node import DhtNode
from dmoe_net.errors import NetError, RemoteProtocolError
from dmoe_net.identity import Contact, PeerId
from dmoe_net.nursery import background_nursery, for_each
from dmoe_net.rpc.base import Caller
from dmoe_net.rpc.peer import RpcPeer
from dmoe_net.wire.fields import integer
from dmoe_net.wire.versions import CALLS, MAX_VERSION

_log = logging.getLogger(__name__)

ROLES = ("node", "trainer", "averager", "auxiliary", "collaborator")
"""Roles of members. One peer may have several at once."""

_VERSION = integer(1, MAX_VERSION)

_STATUS_TIMEOUT_S = 2.0

MAX_FACTS = 32
"""Most facts that a member tells."""
MAX_TEXT = 64
"""Most characters of a fact's name, or of a fact that is a text."""
MAX_GRIDS = 64
"""Most prefixes of experts that a node lists; of further ones it does not speak here."""

Facts = Mapping[str, Value]
"""Facts that a member tells of itself; see `Member.info`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member of a swarm, as it describes itself."""

    peer_id: PeerId
    contact: Contact | None
    """Contact to call it at; None for a client, which listens nowhere."""
    info: Facts
    """Facts by name: texts and finite numbers. "role" is always among them; "state" (such as "compiling" or "serving")
    and "grids" (the prefixes that a node serves) often are."""
    left_s: float
    """Seconds for which the announcement still lives."""
    calls: int = CALLS
    """Version of its calls and records, see `dmoe_net.wire.versions`."""

    @property
    def role(self) -> str:
        """One of `ROLES`."""
        return str(self.info["role"])

    @property
    def grids(self) -> tuple[str, ...]:
        """Prefixes of the experts that it serves."""
        return tuple(self.info.get("grids", ()))


async def declare_member(dht: DhtNode, swarm: str, contact: Contact | None, info: Facts, *, life_s: float) -> bool:
    """Announce this peer under its swarm's name for `life_s` seconds; True if somebody keeps the announcement.

    Raises:
      ValueError: a fact is of another kind than `Member.info` describes.
    """
    facts = check_info(info)
    value = [None if contact is None else contact_to_wire(contact), facts, CALLS]
    return await dht.store(_key(swarm, dht.peer_id), value, suffix=facts["role"], life_s=life_s) > 0


def traffic(caller: Caller) -> dict[str, float]:
    """Facts on the bytes that this process has received and sent, in MB; none of a caller that does not count them."""
    if not isinstance(caller, RpcPeer):
        return {}
    now = caller.statistics()
    return {"received_mb": now.received_bytes / 1e6, "sent_mb": now.sent_bytes / 1e6}


async def list_members(dht: DhtNode, swarm: str) -> tuple[Member, ...]:
    """Every announced member of a swarm, ordered by peer id and role; malformed announcements are left out."""
    records = await dht.get_many(f"members:{check_prefix(swarm)}/{digit}" for digit in _SHARDS)
    members = (
        _parse(entry, dht.clock.ticks())
        for key, record in records.items()
        for entry in record
        if key == _key(swarm, entry.owner)  # in its own shard: elsewhere it would be listed twice
    )
    return tuple(member for member in members if member is not None)


async def node_statuses(rpc: Caller, members: Sequence[Member]) -> dict[PeerId, Mapping[str, Any]]:
    """Counters of the nodes among the members that answer within two seconds; see `ExpertNode.status`."""
    return await ask_nodes(rpc, [each.contact for each in members if each.role == "node" and each.contact is not None])


async def ask_nodes(rpc: Caller, nodes: Iterable[Contact]) -> dict[PeerId, Mapping[str, Any]]:
    """Counters of these nodes, as far as they answer within two seconds; see `ExpertNode.status`."""
    statuses: dict[PeerId, Mapping[str, Any]] = {}

    async def ask(node: Contact) -> None:
        try:
            answer = await rpc.call(node, "node.status", {}, timeout_s=_STATUS_TIMEOUT_S)
            statuses[node.peer_id] = answer.body
        except NetError as error:
            _log.info("node %s does not say what it serves: %s", node, error)

    await for_each(ask, nodes)
    return statuses


async def withdraw_member(dht: DhtNode, swarm: str, role: str) -> None:
    """Take this peer's announcement in this role back."""
    await dht.withdraw(_key(swarm, dht.peer_id), role)


@asynccontextmanager
async def listed_member(
    dht: DhtNode,
    swarm: str,
    contact: Contact | None,
    info: Callable[[], Facts],
    *,
    period_s: float = 10.0,
) -> AsyncIterator[None]:
    """Keep this peer listed while the context is open, and take its announcement back at the end.

    Each announcement is valid for three periods; one that reaches nobody does no harm. Taking it back takes at most two
    seconds, for which `dht` must still run.

    Args:
      info: called for each announcement; see `Member.info`.
      period_s: seconds between announcements.

    Raises:
      ValueError: as `declare_member`, or three periods are longer than an entry lives.
    """
    if 3 * period_s > MAX_LIFE_S:
        raise ValueError(f"members are announced at least every {MAX_LIFE_S / 3:g} s, got a period of {period_s:g} s")

    async def announce() -> None:
        while True:
            await declare_member(dht, swarm, contact, info(), life_s=3 * period_s)
            await trio.sleep(period_s)

    role = str(check_info(info())["role"])
    async with background_nursery() as nursery:
        nursery.start_soon(announce)
        try:
            yield
        finally:
            nursery.cancel_scope.cancel()
            with trio.move_on_after(2.0, shield=True):
                await withdraw_member(dht, swarm, role)


def check_info(info: Facts) -> dict[str, Value]:
    """Copy a member's facts. Raises ValueError naming the fact that is not as `Member.info` describes."""
    if info.get("role") not in ROLES:
        raise ValueError(f"expected a role among {', '.join(ROLES)}, got {info.get('role')!r:.80}")
    if len(info) > MAX_FACTS:
        raise ValueError(f"a member tells at most {MAX_FACTS} facts, got {len(info)}")
    return {name: _check_fact(name, value) for name, value in info.items()}


def _check_fact(name: str, value: Value) -> Value:
    if not isinstance(name, str) or len(name) > MAX_TEXT:
        raise ValueError(f"a fact's name has at most {MAX_TEXT} characters, got {name!r:.80}")
    if name == "grids":
        if not isinstance(value, list | tuple) or len(value) > MAX_GRIDS or not all(isinstance(p, str) for p in value):
            raise ValueError(f"grids are a list of at most {MAX_GRIDS} prefixes, got {value!r:.80}")
        return [check_prefix(prefix) for prefix in value]
    if isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable():
        return value
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError(f"{name} is a text of at most {MAX_TEXT} characters or a finite number, got {value!r:.80}")


def _parse(entry: Found, ticks: float) -> Member | None:
    if not isinstance(entry.value, list) or len(entry.value) != 3 or not isinstance(entry.value[1], dict):
        return None
    listed, info, version = entry.value
    try:
        calls = _VERSION.read_untrusted(version, "version")
        contact = None if listed is None else parse_contact_untrusted(listed)
        facts = check_info(info)
    except (ValueError, RemoteProtocolError):
        return None
    if entry.suffix != facts["role"] or (contact is not None and contact.peer_id != entry.owner):
        return None
    return Member(peer_id=entry.owner, contact=contact, info=facts, left_s=entry.ends_at - ticks, calls=calls)


_SHARDS = "0123456789abcdef"
"""First hexadecimal digits of peer ids: the node list of a large swarm is spread over as many records."""


def _key(swarm: str, peer_id: PeerId) -> str:
    return f"members:{check_prefix(swarm)}/{peer_id.raw.hex()[0]}"
