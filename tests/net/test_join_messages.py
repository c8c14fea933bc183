"""The messages of peers that assemble a group."""

import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmoe_net.averaging.grouping.group import Group, Member, Role
from dmoe_net.averaging.grouping.join_messages import (
    MAX_MEMBER_BYTES,
    Reason,
    Refusal,
    candidates_in_untrusted,
    declaration_of,
    group_body,
    member_bytes,
    parse_asked_untrusted,
    parse_joined_untrusted,
    parse_request_untrusted,
    refusal_body,
    request_body,
)
from dmoe_net.averaging.grouping.matchmaking import AssemblyConfig, Matchmaking
from dmoe_net.averaging.speeds import BANDWIDTHS_BPS, Speeds
from dmoe_net.dht.entries import Found
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import Address, PeerId
from dmoe_net.wire.codec import decode_untrusted, encode
from tests.net.test_matchmaking import candidate, member, peer, request

FULL = Speeds(up=1.1e6, down=2.3e7, reducing=3.1e9)
"""All facts, none of which a shorter float would hold."""


def travelled(body: Any) -> dict[str, Any]:
    """A body after its way through the codec."""
    received = decode_untrusted(encode(dict(body)))
    assert isinstance(received, dict)
    return received


members = st.builds(
    lambda number, role, slot, weight, up, down, reducing: member(
        number,
        role=role,
        wanted_slot=slot,
        weight=weight,
        speeds=Speeds(up=up, down=down, reducing=reducing),
    ),
    st.integers(0, 2**256 - 1),
    st.sampled_from(Role),
    st.integers(0, 2),
    st.floats(1e-6, 1e6),
    st.none() | st.floats(*BANDWIDTHS_BPS),
    st.none() | st.floats(*BANDWIDTHS_BPS),
    st.none() | st.floats(*BANDWIDTHS_BPS),
)


@settings(deadline=None)
@given(members, st.floats(-1e9, 1e9), st.none() | st.floats(0, 1e9))
def test_requests_arrive_as_they_were(who: Member, expiration: float, window: float | None) -> None:
    """All facts of a member, by value."""
    sent = replace(request(1), member=who, expiration=expiration, window=window)
    assert parse_request_untrusted(travelled(request_body(sent)), who.peer_id) == sent


def test_answers_arrive_as_they_were() -> None:
    """Willingness, refusals with and without a leader, groups."""
    assert parse_asked_untrusted(travelled({"expiration": 5.5})) == 5.5
    sent = request(2, speeds=Speeds(up=1e6, reducing=2e9))
    for refusal in (
        Refusal(reason=Reason.FULL),
        Refusal(reason=Reason.FOLLOWING, leader=candidate(1, 4.0)),
    ):
        body = travelled(refusal_body(refusal))
        assert parse_asked_untrusted(body) == parse_joined_untrusted(body, sent, peer(1)) == refusal
    group = Group(group_id=bytes(16), members=(member(1, role=Role.AUXILIARY), sent.member), side=3)
    assert parse_joined_untrusted(travelled(group_body(group)), sent, peer(1)) == group


def test_a_member_travels_as_it_always_did() -> None:
    """Byte by byte: [id, "peer7", 1, "node", 2, 1.5, up 1e6, down unknown, reducing 2.5e9]."""
    who = Member(
        peer_id=PeerId(bytes(31) + b"\7"),
        address=Address("peer7", 1),
        wanted_slot=2,
        weight=1.5,
        speeds=Speeds(up=1e6, reducing=2.5e9),
    )
    # RFC 8949: an array of 9; 32 bytes; a text of 5 and one of 4; floats in the shortest form that holds them, 1.5 as a
    # half (f9), 1e6 = 1.9073... * 2**19 and 2.5e9 as singles (fa); null is f6.
    expected = f"89 5820 {'00' * 31}07 65{b'peer7'.hex()} 01 64{b'node'.hex()} 02 f93e00 fa49742400 f6 fa4f1502f9"
    row = request_body(replace(request(1), member=who))["member"]
    assert encode(row) == bytes.fromhex(expected)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ((member(1), member(3)), "does not have us"),
        ((member(1), member(2, weight=3.0)), "other facts"),
        ((member(2), member(3)), "does not have it"),
        ((member(1, role=Role.CLIENT), member(2)), "does not have it"),
        ((member(1), member(2), member(2)), "twice"),
        ((member(1), member(2), member(3, wanted_slot=3)), "slot"),
        ((member(1), member(2), member(3), member(4)), "at most 3 members of either kind, got 4"),
    ],
)
def test_groups_are_checked(members: tuple[Member, ...], message: str) -> None:
    """A group has us in it as we are, its leader, nobody twice, and nobody that would spoil the plan."""
    body = {"group_id": bytes(16), "members": [request_body(replace(request(1), member=m))["member"] for m in members]}
    with pytest.raises(RemoteProtocolError, match=message):
        parse_joined_untrusted(travelled(body), request(2), peer(1))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (5, -1.0, "weight"),
        (5, 1.7e308, "weight"),
        (6, 0.0, "bandwidth up is from"),
        (7, 1e300, "bandwidth down is from"),
        (8, -1.0, "reducing is from"),
        (8, "fast", "reducing"),
        (1, None, "both host and port"),
    ],
)
def test_members_that_would_spoil_the_plan_are_refused(place: int, value: object, message: str) -> None:
    """Weights that cannot be added up, bandwidths that shares cannot be solved for, half an address."""
    facts = [list(request_body(replace(request(1), member=member(number, speeds=FULL)))["member"]) for number in (1, 2)]
    facts[0][place] = value
    with pytest.raises(RemoteProtocolError, match=message):
        parse_joined_untrusted(travelled({"group_id": bytes(16), "members": facts}), request(2), peer(1))


scalars = st.none() | st.booleans() | st.integers(-5, 70000) | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(scalars | st.just(bytes(32)), lambda inner: st.lists(inner, max_size=8), max_leaves=20)


@given(st.data())
@settings(deadline=None)
def test_garbage_is_only_ever_a_protocol_error(data: st.DataObject) -> None:
    """Whatever replaces a field of a good body, in a request or an answer, or an item of a member."""
    who = list(request_body(request(2))["member"])
    who[data.draw(st.integers(0, 8))] = data.draw(values)
    group = {"group_id": bytes(16), "members": [who, request_body(request(1))["member"]]}
    for good in (
        dict(request_body(request(2))),
        dict(request_body(request(2))) | {"member": who},
        group,
        dict(refusal_body(Refusal(reason=Reason.FOLLOWING, leader=candidate(1, 4.0)))),
        {"expiration": 3.0},
    ):
        body = dict(good)
        if data.draw(st.booleans()):
            body[data.draw(st.sampled_from(sorted(body)))] = data.draw(values)
        for parse in (
            lambda body: parse_request_untrusted(body, peer(2)),
            parse_asked_untrusted,
            lambda body: parse_joined_untrusted(body, request(2), peer(1)),
        ):
            with suppress(RemoteProtocolError):
                parse(body)


def test_declarations_are_read_past_rubbish() -> None:
    """Good ones are found; None and nonsense are passed over."""
    good = candidate(1, 50.0)
    values = [declaration_of(good), None, ["host", 1], ["host", 0, 50.0], ["host", 1, "soon"]]
    record = [Found(peer(number), "", value, 60.0) for number, value in enumerate(values, start=1)]
    assert candidates_in_untrusted(record) == (good,)
    assert candidates_in_untrusted(()) == ()


@pytest.mark.parametrize("host_length", [4, 255])
def test_the_largest_group_fits_a_message(host_length: int) -> None:
    """With a side of 1024 it begins when no further member is sure to fit: with at least 150 of the longest names."""
    leader = Matchmaking(
        member(0, address=Address("h" * host_length, 1), speeds=FULL),
        key="key",
        schema=b"schema",
        side=1024,
        deadline=20.0,
        config=AssemblyConfig(),
        rng=random.Random(0),
        now=0.0,
    )
    number = 0
    while leader.group is None:
        number += 1
        who = {"address": Address("h" * host_length, 65535), "speeds": FULL, "weight": 1.1, "wanted_slot": 1023}
        assert leader.receive(replace(request(number, **who), side=1024)) is None
    assert len(leader.group.members) >= (150 if host_length == 255 else 550)
    assert len(encode(dict(group_body(leader.group)))) < 60 * 1024


@given(members)
@settings(deadline=None)
def test_the_size_of_a_member_is_an_upper_bound(who: Member) -> None:
    """`member_bytes` bounds the bytes of a member's encoding, and `MAX_MEMBER_BYTES` bounds both."""
    assert len(encode(request_body(replace(request(1), member=who))["member"])) <= member_bytes(who) <= MAX_MEMBER_BYTES
