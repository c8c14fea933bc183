"""What peers say to each other while their group assembles, and what they leave in the DHT meanwhile.

    averaging.PREFIX.ask    {key, schema, side, member, expiration}         -> {expiration}, or a refusal
    averaging.PREFIX.join   {key, schema, side, member, expiration, window} -> {group_id, members}, or a refusal
    a refusal               {refusal} or {refusal, leader}
    DHT, KEY / peer id      [host, port, expiration], or None

`ask` is answered at once and binds nobody: it tells whether `join` would have a chance now, and that the leader lives.
`join` is answered when the leader begins, or when it has to send its followers away; `window` is what it told as its
expiration, so that a call that crosses the end of that window does not wait through the next. A member travels as
`[id, host, port, role, slot, weight, bandwidth]`, host and port None for a client; a leader as `[id, host, port,
expiration]`.

The order of leaders goes by *declared* expirations, which stand in the values of DHT entries. The entries themselves
may end later: a key's next entry must expire later than its last one, or the DHT would not take it.
"""

import enum
import math
from dataclasses import dataclass
from typing import Any

from net.averaging.grouping.group import GROUP_ID_BYTES, MAX_GROUP_SIZE, Group, Member, Role
from net.dht.messages import parse_contact_untrusted
from net.dht.records import MAX_KEY_BYTES, Dictionary, Record, Value
from net.errors import RemoteProtocolError
from net.identity import PEER_ID_BYTES, Contact, PeerId
from net.rpc.base import Body

MAX_SCHEMA_BYTES = 64
"""A schema is a hash of what the vector means."""

MAX_MEMBER_BYTES = 336
"""Upper bound of an encoded member: 255 of host name, 34 of id, 11 of role, 36 of numbers and framing."""

MAX_MEMBERS_BYTES = 56 * 1024
"""Most bytes of a group's members: with them a header stays below 64 KiB. Some 650 members with short host names."""

WEIGHTS = (1e-9, 1e12)
"""What a member may claim, such as samples: those of all members can be added up, and the lightest still counts."""

BANDWIDTHS_BPS = (1e3, 1e11)
"""Least and most bytes a second that a member may claim. Shares are solved for in floating point: one member that
claimed 1e-300 would spoil them for its whole group."""


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
    """A peer that may lead, by its declaration."""

    contact: Contact
    """How it is called."""
    expiration: float
    """Swarm time at which it stops gathering."""

    @property
    def rank(self) -> tuple[float, PeerId]:
        """The total order of leaders: the earlier leads."""
        return self.expiration, self.contact.peer_id


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """A peer that would follow."""

    key: str
    """Of the group it looks for."""
    schema: bytes
    """What its vector means."""
    side: int
    """Of its grid."""
    member: Member
    """What the group will know of it."""
    expiration: float
    """Its declared expiration."""
    window: float | None = None
    """In `join`, the leader's expiration as it was told."""

    @property
    def rank(self) -> tuple[float, PeerId]:
        """Its place in the order of leaders."""
        return self.expiration, self.member.peer_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why not, and who else."""

    reason: Reason
    """Why not."""
    leader: Candidate | None = None
    """Whom the refusing peer follows, with `Reason.FOLLOWING`."""


def request_body(request: JoinRequest) -> Body:
    """A request of `ask` or `join`."""
    body: dict[str, object] = {
        "key": request.key,
        "schema": request.schema,
        "side": request.side,
        "member": _member_to_wire(request.member),
        "expiration": request.expiration,
    }
    if request.window is not None:
        body["window"] = request.window
    return body


def accepted_body(expiration: float) -> Body:
    """The answer to `ask` of a peer that would have the asker; it gathers until `expiration`."""
    return {"expiration": expiration}


def refusal_body(refusal: Refusal) -> Body:
    """The answer to `ask` or `join` of a peer that will not have the asker."""
    if refusal.leader is None:
        return {"refusal": refusal.reason.value}
    contact = refusal.leader.contact
    leader = [contact.peer_id.raw, contact.address.host, contact.address.port, refusal.leader.expiration]
    return {"refusal": refusal.reason.value, "leader": leader}


def group_body(group: Group) -> Body:
    """The answer to `join` of a leader that begins."""
    return {"group_id": group.group_id, "members": [_member_to_wire(member) for member in group.members]}


def member_bytes(member: Member) -> int:
    """Upper bound of a member's encoded size."""
    return MAX_MEMBER_BYTES - 255 + (0 if member.address is None else len(member.address.host))


def declaration_of(candidate: Candidate) -> Value:
    """The DHT value that `candidates_in_untrusted` reads."""
    return [candidate.contact.address.host, candidate.contact.address.port, candidate.expiration]


def candidates_in_untrusted(record: Record | None) -> tuple[Candidate, ...]:
    """Whoever is declared under a key. Entries that cannot be read are passed over: anybody can write them."""
    if not isinstance(record, Dictionary):
        return ()
    found: list[Candidate] = []
    for subkey, entry in record.entries.items():
        try:
            value = entry.value
            if type(value) is not list or len(value) != 3 or len(subkey) != 2 * PEER_ID_BYTES:
                continue
            candidate = _parse_candidate_untrusted([_parse_hex_untrusted(subkey), *value])
        except RemoteProtocolError:
            continue
        if candidate.expiration <= entry.expiration:
            found.append(candidate)
    return tuple(found)


def parse_request_untrusted(body: Body, peer_id: PeerId) -> JoinRequest:
    """A request of `ask` or `join` from `peer_id`.

    Raises:
      RemoteProtocolError: it is anything else, or speaks for another peer.
    """
    key, schema, side = body.get("key"), body.get("schema"), body.get("side")
    if type(key) is not str or len(key) > MAX_KEY_BYTES:
        raise RemoteProtocolError(f"key must be a string of at most {MAX_KEY_BYTES} characters, got {key!r:.80}")
    if type(schema) is not bytes or len(schema) > MAX_SCHEMA_BYTES:
        raise RemoteProtocolError(f"schema must be at most {MAX_SCHEMA_BYTES} bytes, got {schema!r:.80}")
    if type(side) is not int or side < 1:
        raise RemoteProtocolError(f"side must be a positive integer, got {side!r:.80}")
    member = _parse_member_untrusted(body.get("member"), side)
    if member.peer_id != peer_id:
        raise RemoteProtocolError(f"{peer_id.short} asks for {member.peer_id.short}")
    expiration = _parse_number_untrusted(body.get("expiration"), "expiration")
    window = None if "window" not in body else _parse_number_untrusted(body["window"], "window")
    return JoinRequest(key=key, schema=schema, side=side, member=member, expiration=expiration, window=window)


def parse_asked_untrusted(body: Body) -> float | Refusal:
    """The answer to `ask`: when the willing leader stops gathering, or its refusal."""
    if "refusal" in body:
        return _parse_refusal_untrusted(body)
    return _parse_number_untrusted(body.get("expiration"), "expiration")


def parse_joined_untrusted(body: Body, request: JoinRequest, leader: PeerId) -> Group | Refusal:
    """The answer of `leader` to our `join`: the group, in which we stand with the facts that we gave, or a refusal.

    Raises:
      RemoteProtocolError: it is anything else.
    """
    if "refusal" in body:
        return _parse_refusal_untrusted(body)
    group_id, raw = body.get("group_id"), body.get("members")
    if type(group_id) is not bytes or len(group_id) != GROUP_ID_BYTES:
        raise RemoteProtocolError(f"group_id must be {GROUP_ID_BYTES} bytes, got {group_id!r:.80}")
    if type(raw) is not list or len(raw) > MAX_GROUP_SIZE:
        raise RemoteProtocolError(f"members must be a list of at most {MAX_GROUP_SIZE}")
    members = tuple(_parse_member_untrusted(item, request.side) for item in raw)
    if request.member not in members:
        raise RemoteProtocolError("the group that we joined does not have us as a member, or with other facts")
    num_senders = sum(member.sends for member in members)
    if max(num_senders, len(members) - num_senders) > request.side:
        raise RemoteProtocolError(f"a group has at most {request.side} members of either kind, got {len(members)}")
    if not any(member.peer_id == leader and member.address is not None for member in members):
        raise RemoteProtocolError(f"the group of {leader.short} does not have it as a member")
    try:
        return Group(group_id=group_id, members=members, side=request.side)
    except ValueError as exc:
        raise RemoteProtocolError(f"bad group: {exc}") from exc


def _parse_refusal_untrusted(body: Body) -> Refusal:
    reason = body.get("refusal")
    if type(reason) is not str or reason not in Reason.__members__.values():
        raise RemoteProtocolError(f"unknown reason {reason!r:.80}")
    leader = body.get("leader")
    return Refusal(reason=Reason(reason), leader=None if leader is None else _parse_candidate_untrusted(leader))


def _parse_candidate_untrusted(raw: Any) -> Candidate:
    if type(raw) is not list or len(raw) != 4:
        raise RemoteProtocolError("a leader must be [peer id, host, port, expiration]")
    expiration = _parse_number_untrusted(raw[3], "expiration")
    return Candidate(contact=parse_contact_untrusted(raw[:3]), expiration=expiration)


def _parse_member_untrusted(raw: Any, side: int) -> Member:
    if type(raw) is not list or len(raw) != 7:
        raise RemoteProtocolError("a member must be [peer id, host, port, role, slot, weight, bandwidth]")
    peer_id, host, port, role, slot, weight, bandwidth = raw
    if type(role) is not str or role not in Role.__members__.values():
        raise RemoteProtocolError(f"unknown role {role!r:.80}")
    if type(peer_id) is not bytes or len(peer_id) != PEER_ID_BYTES:
        raise RemoteProtocolError(f"an id must be {PEER_ID_BYTES} bytes, got {peer_id!r:.80}")
    if type(slot) is not int or not 0 <= slot < side:
        raise RemoteProtocolError(f"the slot of a member must be from 0 to {side - 1}, got {slot!r:.80}")
    low, high = WEIGHTS
    if not low <= _parse_number_untrusted(weight, "weight") <= high and role != Role.AUXILIARY:
        raise RemoteProtocolError(f"the weight of a member must be from {low:g} to {high:g}, got {weight:g}")
    if bandwidth is not None:
        low, high = BANDWIDTHS_BPS
        if not low <= _parse_number_untrusted(bandwidth, "bandwidth") <= high:
            raise RemoteProtocolError(f"the bandwidth of a member must be from {low:g} to {high:g}, got {bandwidth:g}")
    is_nowhere = host is None and port is None
    try:
        return Member(
            peer_id=PeerId(peer_id),
            address=None if is_nowhere else parse_contact_untrusted([peer_id, host, port]).address,
            role=Role(role),
            wanted_slot=slot,
            weight=weight,
            bandwidth=bandwidth,
        )
    except ValueError as exc:  # a client with an address, or another without
        raise RemoteProtocolError(f"bad member: {exc}") from exc


def _parse_number_untrusted(raw: Any, name: str) -> float:
    if type(raw) is not float or not math.isfinite(raw):
        raise RemoteProtocolError(f"{name} must be a finite float, got {raw!r:.80}")
    return raw


def _parse_hex_untrusted(text: str) -> bytes:
    try:
        return PeerId.parse(text).raw
    except ValueError as exc:
        raise RemoteProtocolError(str(exc)) from exc


def _member_to_wire(member: Member) -> list[object]:
    address = member.address
    return [
        member.peer_id.raw,
        None if address is None else address.host,
        None if address is None else address.port,
        member.role.value,
        member.wanted_slot,
        float(member.weight),
        None if member.bandwidth is None else float(member.bandwidth),
    ]
