"""Members of a swarm: nodes, trainers, averagers and auxiliary peers tell the DHT, and `dmoe status` reads it.

Each member has one entry for each of its roles under the key `members:SWARM`, with the contact that it listens at (none
in client mode), a small dictionary of facts, and the version of its calls and records. Members announce again and
again, and silence is how a crashed one disappears. Strangers write these records: whatever is malformed is left out.
"""

import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import trio

from dmoe_jax.directory.grid import check_prefix
from dmoe_net.dht.messages import contact_to_wire, parse_contact_untrusted
from dmoe_net.dht.node import DhtNode, StoreItem
from dmoe_net.dht.records import Dictionary, Entry, Value
from dmoe_net.errors import NetError, RemoteProtocolError
from dmoe_net.identity import Contact, PeerId
from dmoe_net.nursery import background_nursery
from dmoe_net.rpc.base import Caller
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
    expiration: float
    """Swarm time until which the announcement stands, seconds."""
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


async def declare_member(
    dht: DhtNode,
    swarm: str,
    peer_id: PeerId,
    contact: Contact | None,
    info: Facts,
    *,
    expiration: float,
) -> bool:
    """Announce a member under its swarm's name; True if the announcement stands. Arguments as the fields of `Member`.

    Raises:
      ValueError: a fact is of another kind than `Member.info` describes.
    """
    facts = check_info(info)
    value = [None if contact is None else contact_to_wire(contact), facts, CALLS]
    return await dht.store(_key(swarm), value, subkey=_subkey(peer_id, facts["role"]), expiration=expiration)


async def list_members(dht: DhtNode, swarm: str) -> tuple[Member, ...]:
    """Every announced member of a swarm, ordered by peer id and role; malformed announcements are left out."""
    record = await dht.get(_key(swarm))
    entries = record.entries if isinstance(record, Dictionary) else {}
    members = (_parse(subkey, entries[subkey]) for subkey in sorted(entries))
    return tuple(member for member in members if member is not None)


async def node_statuses(rpc: Caller, members: Sequence[Member]) -> dict[PeerId, Mapping[str, Any]]:
    """Counters of the nodes among the members that answer within two seconds; see `ExpertNode.status`."""
    statuses: dict[PeerId, Mapping[str, Any]] = {}

    async def ask(node: Contact) -> None:
        try:
            answer = await rpc.call(node, "node.status", {}, timeout_s=_STATUS_TIMEOUT_S)
            statuses[node.peer_id] = answer.body
        except NetError as error:
            _log.info("node %s does not say what it serves: %s", node, error)

    async with trio.open_nursery() as nursery:
        for member in members:
            if member.role == "node" and member.contact is not None:
                nursery.start_soon(ask, member.contact)
    return statuses


async def withdraw_member(dht: DhtNode, swarm: str, peer_id: PeerId, role: str) -> None:
    """Take a member's announcement in this role back."""
    await withdraw(dht, [(_key(swarm), _subkey(peer_id, role))], lambda value: value is not None)


async def withdraw(dht: DhtNode, steps: Sequence[tuple[str, str]], is_ours: Callable[[Value], bool]) -> None:
    """Take announcements back: entries become None and end just after they would have ended.

    Args:
      steps: key and subkey of each.
      is_ours: True of an entry's value that is one to take back.
    """
    found = await dht.get_many(dict.fromkeys(key for key, _ in steps))
    items = []
    for key, subkey in steps:
        record = found[key]
        entry = record.entries.get(subkey) if isinstance(record, Dictionary) else None
        if entry is not None and is_ours(entry.value):
            # The next representable time: later than the entry it takes back, earlier than any new announcement.
            expiration = math.nextafter(entry.expiration, math.inf)
            items.append(StoreItem(key=key, subkey=subkey, value=None, expiration=expiration))
    await dht.store_many(items)


@asynccontextmanager
async def listed_member(
    dht: DhtNode,
    swarm: str,
    peer_id: PeerId,
    contact: Contact | None,
    info: Callable[[], Facts],
    *,
    period_s: float = 10.0,
) -> AsyncIterator[None]:
    """Keep a member listed while the context is open, and take its announcement back at the end.

    Each announcement is valid for three periods; one that reaches nobody does no harm. Taking it back takes at most two
    seconds, for which `dht` must still run.

    Args:
      contact: as of `Member`.
      info: called for each announcement; see `Member.info`.
      period_s: seconds between announcements.

    Raises:
      ValueError: as `declare_member`, or three periods are longer than the DHT keeps a record.
    """
    if 3 * period_s > dht.config.max_lifetime_s:
        longest_s = dht.config.max_lifetime_s / 3
        raise ValueError(f"members are announced at least every {longest_s:g} s, got a period of {period_s:g} s")

    async def announce() -> None:
        while True:
            with suppress(NetError):
                await declare_member(dht, swarm, peer_id, contact, info(), expiration=dht.clock.now() + 3 * period_s)
            await trio.sleep(period_s)

    role = str(check_info(info())["role"])
    async with background_nursery() as nursery:
        nursery.start_soon(announce)
        try:
            yield
        finally:
            nursery.cancel_scope.cancel()
            with trio.move_on_after(2.0, shield=True), suppress(NetError):
                await withdraw_member(dht, swarm, peer_id, role)


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


def _parse(subkey: str, entry: Entry) -> Member | None:
    if not isinstance(entry.value, list) or len(entry.value) != 3 or not isinstance(entry.value[1], dict):
        return None
    listed, info, version = entry.value
    try:
        calls = _VERSION.read_untrusted(version, "version")
        peer_id = PeerId.parse(subkey.partition("/")[0])
        contact = None if listed is None else parse_contact_untrusted(listed)
        facts = check_info(info)
    except (ValueError, RemoteProtocolError):
        return None
    if subkey != _subkey(peer_id, facts["role"]) or (contact is not None and contact.peer_id != peer_id):
        return None
    return Member(peer_id=peer_id, contact=contact, info=facts, expiration=entry.expiration, calls=calls)


def _key(swarm: str) -> str:
    return f"members:{check_prefix(swarm)}"


def _subkey(peer_id: PeerId, role: str) -> str:
    return f"{peer_id}/{role}"
