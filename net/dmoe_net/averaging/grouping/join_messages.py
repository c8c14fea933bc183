"""Messages of peers to each other while their group assembles, and what they leave in the DHT meanwhile.

    averaging.PREFIX.ask    {key, schema, side, member, expiration}         -> {expiration}, or a refusal
    averaging.PREFIX.join   {key, schema, side, member, expiration, window} -> {group_id, members}, or a refusal
    a refusal               {refusal} or {refusal, leader}
    DHT, KEY                [host, port, expiration], an entry of each peer

`ask` is answered at once and binds nobody: it tells whether `join` would have a chance now, and that the leader lives.
`join` is answered when the leader begins, or when it has to send its followers away; `window` is the expiration that it
told, so that a call that crosses the end of that window does not wait through the next. A member travels as
`[id, host, port, role, slot, weight, up, down, reducing]`, with None for an unknown speed and a client's address; a
leader as `[id, host, port, expiration]`.
"""

import enum
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

from dmoe_net.averaging.grouping.group import GROUP_ID, MAX_GROUP_SIZE, Group, Member, Role
from dmoe_net.averaging.speeds import Speeds
from dmoe_net.dht.entries import Found, Value
from dmoe_net.dht.routing_table import MAX_KEY_BYTES
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.rpc.base import Body
from dmoe_net.wire.fields import (
    HOST,
    PEER_ID,
    PORT,
    Field,
    choice,
    integer,
    octets,
    optional,
    real,
    row_untrusted,
    rows,
    text,
)

MAX_SCHEMA_BYTES = 64
"""A schema is a hash of what the vector means."""

MAX_MEMBER_BYTES = 354
"""Upper bound of an encoded member: 255 of host name, 34 of id, 11 of role, 54 of numbers and framing."""

MAX_MEMBERS_BYTES = 56 * 1024
"""Most bytes of a group's members: with them a header stays below 64 KiB. Some 550 members with short host names."""

_MAX_SIDE = 2**31
_FINITE = real()
_KEY, _SCHEMA, _SIDE = text(0, MAX_KEY_BYTES), octets(0, MAX_SCHEMA_BYTES), integer(1, _MAX_SIDE)
_DECLARATION: dict[str, Field[Any]] = {"host": HOST, "port": PORT, "expiration": _FINITE}
_MEMBER: dict[str, Field[Any]] = {
    "id": PEER_ID,
    "host": optional(HOST),
    "port": optional(PORT),
    "role": choice(Role),
    "slot": integer(0, _MAX_SIDE - 1),
    "weight": _FINITE,
    "up": optional(_FINITE),
    "down": optional(_FINITE),
    "reducing": optional(_FINITE),
}
_MEMBERS = rows(MAX_GROUP_SIZE)


class Reason(enum.StrEnum):
    """Why a peer cannot be followed now."""

    NOT_LOOKING = "not_looking"  # it has no search: not yet, or not any more; or it is in client mode
    WRONG_KEY = "wrong_key"  # it looks for another group
    WRONG_SCHEMA = "wrong_schema"  # its vector, or its grid, is another: it will never do
    FULL = "full"  # its group has all the members that it can have
    FOLLOWING = "following"  # it follows a leader itself, which is named
    LATER = "later"  # its declaration is the later one: it is to follow us, not we it
    DISBANDED = "disbanded"  # its group came to nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A peer that may lead; at `expiration`, swarm time, it stops gathering. Its DHT entry may end later."""

    contact: Contact
    expiration: float

    @property
    def rank(self) -> tuple[float, PeerId]:
        """The total order of leaders: the earlier leads."""
        return self.expiration, self.contact.peer_id


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """A peer that would follow."""

    key: str
    """DHT key of the group that it looks for."""
    schema: bytes
    """Meaning of its vector."""
    side: int
    """Side of its grid."""
    member: Member
    """Facts that the group will know of it."""
    expiration: float
    """Its declared expiration."""
    window: float | None = None
    """In `join`, the leader's expiration as it was told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a peer cannot be followed now, and who else could."""

    reason: Reason
    leader: Candidate | None = None
    """The peer that the refusing one follows, with `Reason.FOLLOWING`."""


def request_body(request: JoinRequest) -> Body:
    """The body of `ask` or `join`."""
    body: dict[str, object] = {
        "key": request.key,
        "schema": request.schema,
        "side": request.side,
        "member": _member_to_wire(request.member),
        "expiration": request.expiration,
    }
    return body if request.window is None else body | {"window": request.window}


def refusal_body(refusal: Refusal) -> Body:
    """The answer to `ask` or `join` of a peer that will not have the asker."""
    body = {"refusal": refusal.reason.value}
    if refusal.leader is None:
        return body
    return body | {"leader": [refusal.leader.contact.peer_id.raw, *declaration_of(refusal.leader)]}


def group_body(group: Group) -> Body:
    """The answer to `join` of a leader that begins."""
    return {"group_id": group.group_id, "members": [_member_to_wire(member) for member in group.members]}


def member_bytes(member: Member) -> int:
    """Upper bound of a member's encoded size."""
    return MAX_MEMBER_BYTES - 255 + (0 if member.address is None else len(member.address.host))


def declaration_of(candidate: Candidate) -> list[Value]:
    """The DHT value that `candidates_in_untrusted` reads."""
    return [candidate.contact.address.host, candidate.contact.address.port, candidate.expiration]


def candidates_in_untrusted(record: Iterable[Found]) -> tuple[Candidate, ...]:
    """The peers that are declared under a key. Entries that cannot be read are passed over: anybody can write them."""
    found: list[Candidate] = []
    for entry in record:
        try:
            host, port, expiration = row_untrusted(entry.value, "a declaration", **_DECLARATION)
            contact = Contact(entry.owner, Address(host, port))
        except (RemoteProtocolError, ValueError):
            continue
        found.append(Candidate(contact=contact, expiration=expiration))
    return tuple(found)


def parse_request_untrusted(body: Body, peer_id: PeerId) -> JoinRequest:
    """Read a request of `ask` or `join` that came from `peer_id`."""
    key, schema = _KEY.of_untrusted(body, "key"), _SCHEMA.of_untrusted(body, "schema")
    side = _SIDE.of_untrusted(body, "side")
    member = _parse_member_untrusted(body.get("member"), side)
    if member.peer_id != peer_id:
        raise RemoteProtocolError(f"{peer_id.short} asks for {member.peer_id.short}")
    return JoinRequest(
        key=key,
        schema=schema,
        side=side,
        member=member,
        expiration=_FINITE.of_untrusted(body, "expiration"),
        window=optional(_FINITE).of_untrusted(body, "window"),
    )


def parse_asked_untrusted(body: Body) -> float | Refusal:
    """The answer to `ask`: when the willing leader stops gathering, or its refusal."""
    return _parse_refusal_untrusted(body) if "refusal" in body else _FINITE.of_untrusted(body, "expiration")


def parse_joined_untrusted(body: Body, request: JoinRequest, leader: PeerId) -> Group | Refusal:
    """The answer of `leader` to our `join`: the group, in which we stand with the facts that we gave, or a refusal."""
    if "refusal" in body:
        return _parse_refusal_untrusted(body)
    group = parse_group_untrusted(body, request.side)
    members = group.members
    if request.member not in members:
        raise RemoteProtocolError("the group that we joined does not have us as a member, or with other facts")
    num_senders = sum(member.sends for member in members)
    if max(num_senders, len(members) - num_senders) > request.side:
        raise RemoteProtocolError(f"a group has at most {request.side} members of either kind, got {len(members)}")
    if not any(member.peer_id == leader and member.address is not None for member in members):
        raise RemoteProtocolError(f"the group of {leader.short} does not have it as a member")
    return group


def parse_group_untrusted(body: Body, side: int) -> Group:
    """Read what `group_body` made, of a group on a grid of this side."""
    group_id = GROUP_ID.of_untrusted(body, "group_id")
    members = tuple(_parse_member_untrusted(item, side) for item in _MEMBERS.of_untrusted(body, "members"))
    try:
        return Group(group_id=group_id, members=members, side=side)
    except ValueError as exc:
        raise RemoteProtocolError(f"bad group: {exc}") from exc


def _parse_refusal_untrusted(body: Body) -> Refusal:
    reason, raw = choice(Reason).of_untrusted(body, "refusal"), body.get("leader")
    if raw is None:
        return Refusal(reason=reason)
    peer_id, host, port, expiration = row_untrusted(raw, "a leader", id=PEER_ID, **_DECLARATION)
    return Refusal(
        reason=reason, leader=Candidate(contact=Contact(peer_id, Address(host, port)), expiration=expiration)
    )


def _parse_member_untrusted(raw: object, side: int) -> Member:
    peer_id, host, port, role, slot, weight, up, down, reducing = row_untrusted(raw, "a member", **_MEMBER)
    if slot >= side:
        raise RemoteProtocolError(f"the slot of a member must be from 0 to {side - 1}, got {slot}")
    if (host is None) != (port is None):
        raise RemoteProtocolError(f"a member has both host and port or neither, got {host!r:.80} and {port}")
    try:
        return Member(
            peer_id=peer_id,
            address=None if host is None else Address(host, port),
            role=role,
            wanted_slot=slot,
            weight=weight,
            speeds=Speeds(up=up, down=down, reducing=reducing),
        )
    except ValueError as exc:
        raise RemoteProtocolError(f"bad member: {exc}") from exc


def _member_to_wire(member: Member) -> list[object]:
    host, port = (None, None) if member.address is None else (member.address.host, member.address.port)
    speeds = [None if each is None else float(each) for each in astuple(member.speeds)]
    return [member.peer_id.raw, host, port, member.role.value, member.wanted_slot, float(member.weight), *speeds]
