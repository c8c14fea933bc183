"""Rules of matchmaking, without a network: who leads whom; and the messages of peers that assemble a group."""

import math
import random
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmoe_net.averaging.grouping.group import Group, Member, Role
from dmoe_net.averaging.grouping.join_messages import (
    MAX_MEMBER_BYTES,
    Candidate,
    JoinRequest,
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
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.wire.codec import decode_untrusted, encode

CONFIG = AssemblyConfig(window_s=5.0, poll_s=1.0, margin_s=0.5)


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


def member(number: int, **facts: Any) -> Member:
    facts = {"peer_id": peer(number), "address": Address(f"host{number}", 1)} | facts
    if facts.get("role") is Role.CLIENT:
        facts["address"] = None
    return Member(**facts)


def core(number: int, **options: Any) -> Matchmaking:
    """A search; options that are none of a search are facts of its member."""
    known = {"side": 3, "deadline": 20.0, "begins_at": None, "now": 0.0, "config": CONFIG}
    own = {name: options.pop(name, default) for name, default in known.items()}
    return Matchmaking(member(number, **options), key="key", schema=b"schema", rng=random.Random(number), **own)


seeker_of_a_step = partial(core, side=9, begins_at=5.0)
"""A search that was told when to begin."""


def contact(number: int) -> Contact:
    return Contact(peer(number), Address(f"host{number}", 1))


def candidate(number: int, expiration: float) -> Candidate:
    return Candidate(contact=contact(number), expiration=expiration)


def request(number: int, expiration: float = 9.0, *, window: float | None = 5.0, **facts: Any) -> JoinRequest:
    """Join request of a peer, for a search that began at 0 s with a window of 5 s."""
    return JoinRequest(
        key="key", schema=b"schema", side=3, member=member(number, **facts), expiration=expiration, window=window
    )


def told(search: Matchmaking) -> dict[PeerId, Any]:
    """Answer that each follower gets; for a refusal, its reason."""
    answers = search.take_answers().items()
    return {peer_id: each.reason if isinstance(each, Refusal) else each for peer_id, each in answers}


def test_a_full_group_begins_at_once() -> None:
    """The last follower begins it; all are told the same, in the order of their slots, and further ones come late."""
    leader = core(1, wanted_slot=2)
    assert leader.receive(request(2, wanted_slot=1)) is None
    assert leader.take_answers() == {}
    assert leader.receive(request(3, wanted_slot=1)) is None
    assert [each.peer_id for each in leader.group.members] == [peer(2), peer(3), peer(1)]
    assert told(leader) == {peer(2): leader.group, peer(3): leader.group}
    assert leader.is_over
    assert leader.deadline() is None
    assert leader.consider(request(4)) == Refusal(reason=Reason.NOT_LOOKING)


def test_a_window_ends_with_what_there_is() -> None:
    """Two of three are enough at 5 s, and not before."""
    leader = core(1)
    leader.receive(request(2))
    leader.tick(4.99)
    assert leader.group is None
    assert leader.deadline() == 5.0
    leader.tick(5.0)
    assert told(leader) == {peer(2): leader.group}
    assert len(leader.group.members) == 2


def test_too_few_are_sent_away() -> None:
    """An auxiliary peer makes no group out of one: it is sent away, and the next window opens."""
    leader = core(1)
    leader.receive(request(2, role=Role.AUXILIARY))
    leader.tick(5.0)
    assert told(leader) == {peer(2): Reason.DISBANDED}
    assert leader.group is None
    assert leader.expiration == 10.0


@pytest.mark.parametrize(("search_s", "ends"), [(12.0, [5.0, 10.0, 11.5]), (0.6, [0.3])])
def test_windows_end_before_the_deadline(search_s: float, ends: list[float]) -> None:
    """A search shorter than its margins has a window of half of its time; after the last one there are no more."""
    alone, found = core(1, deadline=search_s), []
    while (due := alone.deadline()) is not None:
        found.append(due)
        alone.tick(due)
    assert found == pytest.approx(ends)
    assert alone.is_over
    assert alone.group is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key": "other"}, Reason.WRONG_KEY),
        ({"schema": b"other"}, Reason.WRONG_SCHEMA),
        ({"side": 4}, Reason.WRONG_SCHEMA),
        ({"expiration": 4.9}, Reason.LATER),
        ({"member": member(5)}, Reason.NOT_LOOKING),
        ({"expiration": 5.0, "member": member(4)}, Reason.LATER),
        ({"expiration": 5.0, "member": member(6)}, None),
    ],
)
def test_who_may_follow(changes: dict[str, Any], reason: Reason | None) -> None:
    """The leader must precede it: in time, and at the same time by peer id. Nobody follows itself."""
    leader = core(5)
    answer = leader.consider(replace(request(9), **changes))
    assert answer == (5.0 if reason is None else Refusal(reason=reason))


def test_room_is_counted_by_kind() -> None:
    """Auxiliary peers take nobody's place, and nobody theirs; there are as many as senders at most."""
    leader = core(1, role=Role.AUXILIARY, side=2)
    ask = {"side": 2}
    assert leader.receive(replace(request(2), **ask)) is None
    assert leader.receive(replace(request(3, role=Role.AUXILIARY), **ask)) is None
    refused = leader.receive(replace(request(4, role=Role.AUXILIARY), **ask))
    assert refused == Refusal(reason=Reason.FULL)
    assert leader.receive(replace(request(5, role=Role.CLIENT), **ask)) is None
    assert [each.peer_id for each in leader.group.members] == [peer(2), peer(5), peer(1), peer(3)]


def test_a_call_for_the_last_window_does_not_wait_through_the_next() -> None:
    leader = core(1)
    leader.tick(5.0)
    assert leader.receive(request(2, 11.0, window=5.0)) == Refusal(reason=Reason.LATER)
    assert leader.receive(request(2, 11.0, window=10.0)) is None


def test_of_two_that_know_of_each_other_the_greater_id_asks() -> None:
    """They declare one time; a client, whom nobody asks, asks all, and so does whoever is late."""
    three, four = contact(3), contact(4)
    least, greatest = seeker_of_a_step(3), seeker_of_a_step(4)
    assert [each.contact for each in greatest.candidates(greatest.hinted([three]), 0.0)] == [three]
    assert least.candidates(least.hinted([four]), 0.0) == ()
    client = seeker_of_a_step(2, role=Role.CLIENT)
    assert len(client.candidates(client.hinted([three, four]), 0.0)) == 2
    late = core(3)
    assert len(late.candidates(late.hinted([four]), 0.0)) == 1


def test_who_asks_and_is_the_earlier_is_asked_next() -> None:
    """Its question says that it precedes us: of the hinted it comes first, whatever their ids. No client does."""
    seeker = seeker_of_a_step(6)
    asker = replace(request(9, 4.0), side=9)
    assert seeker.consider(asker) == Refusal(reason=Reason.LATER)
    assert seeker.suggested(0.0) == candidate(9, 4.0)
    hinted = seeker.hinted([contact(2), contact(3)])
    assert [each.contact.peer_id for each in seeker.candidates(hinted, 0.0)] == [peer(9), peer(2), peer(3)]
    seeker.on_refused(candidate(9, 4.0), Refusal(reason=Reason.FOLLOWING, leader=candidate(5, 3.0)), 0.0)
    assert seeker.suggested(0.0) == candidate(5, 3.0)
    assert seeker.suggested(3.0) is None  # it has begun
    assert seeker.consider(replace(request(1, 4.0, role=Role.CLIENT), side=9)) == Refusal(reason=Reason.LATER)
    assert seeker.suggested(0.0) is None


def test_of_several_that_are_named_the_first_in_rank_is_asked() -> None:
    seeker = seeker_of_a_step(6)
    for number, expiration in ((5, 4.0), (4, 3.0), (3, 4.5)):
        seeker.consider(replace(request(number, expiration), side=9))
    assert seeker.suggested(0.0) == candidate(4, 3.0)
    seeker.on_failed(candidate(4, 3.0))
    assert seeker.suggested(0.0) is None


def test_who_was_postponed_meanwhile_asks_again_at_once() -> None:
    """The refusal was of an earlier declaration; one of the present declaration costs a pause."""
    seeker = seeker_of_a_step(6)
    asked = seeker.request
    seeker.postpone(7.0)
    seeker.on_refused(candidate(3, 6.0), Refusal(reason=Reason.LATER), 1.0, asked=asked)
    assert seeker.candidates([candidate(3, 6.0)], 1.0) == (candidate(3, 6.0),)
    seeker.on_refused(candidate(3, 6.0), Refusal(reason=Reason.LATER), 1.0, asked=seeker.request)
    assert seeker.candidates([candidate(3, 6.0)], 1.0) == ()
    assert seeker.candidates([candidate(3, 6.0)], 1.0 + CONFIG.poll_s) == (candidate(3, 6.0),)


def test_candidates_come_in_the_order_of_leaders() -> None:
    """They precede us and have not ended; of two at one time the lesser id comes first."""
    seeker = core(5, now=1.0)
    declared = [candidate(7, 5.0), candidate(4, 6.0), candidate(3, 5.0), candidate(5, 6.0), candidate(6, 6.0)]
    declared.append(candidate(1, 0.9))
    assert seeker.candidates(declared, 1.0) == (candidate(3, 5.0), candidate(7, 5.0), candidate(4, 6.0))


def test_whoever_failed_is_not_asked_again() -> None:
    """A peer that refused is asked again after a while, unless it refused because the vectors differ."""
    seeker = core(9)
    failing, refusing, strange = (candidate(number, 4.0) for number in (1, 2, 3))
    seeker.on_failed(failing)
    seeker.on_refused(refusing, Refusal(reason=Reason.FULL), 0.5)
    seeker.on_refused(strange, Refusal(reason=Reason.WRONG_SCHEMA), 0.5)
    assert seeker.candidates([failing, refusing, strange], 1.4) == ()
    assert seeker.candidates([failing, refusing, strange], 1.5) == (refusing,)


def test_a_leader_that_disbands_again_and_again_is_asked_less_and_less() -> None:
    """Each time costs those who followed it a window: after the first it is left alone for one, then for two, four."""
    search, leader, now = core(9, deadline=1000.0), candidate(1, 4.0), 0.0
    for pause_s in (CONFIG.window_s, 2 * CONFIG.window_s, 4 * CONFIG.window_s):
        search.follow(leader)
        search.on_refused(leader, Refusal(reason=Reason.DISBANDED), now)
        far = replace(candidate(1, now + 4.0), expiration=search.expiration - 0.1)
        assert search.candidates([far], now + pause_s - 0.1) == ()
        while search.expiration <= now + pause_s + 0.1:
            search.tick(search.expiration)
        now += pause_s + 0.1
        leader = candidate(1, search.expiration - 0.1)
        assert search.candidates([leader], now) == (leader,)


def test_a_leader_that_follows_sends_its_followers_there() -> None:
    """It redirects who asks meanwhile, its window stands still, and it leads again when it is refused."""
    leader, earlier = core(5), candidate(4, 4.0)
    leader.receive(request(6))
    leader.follow(earlier)
    assert leader.take_answers() == {peer(6): Refusal(reason=Reason.FOLLOWING, leader=earlier)}
    assert leader.consider(request(7)) == Refusal(reason=Reason.FOLLOWING, leader=earlier)
    leader.tick(6.0)
    assert leader.deadline() is None
    leader.on_refused(earlier, Refusal(reason=Reason.FULL), 6.0)
    assert leader.deadline() == 5.0
    leader.tick(6.0)
    assert leader.expiration == 11.0


def test_a_redirection_is_followed() -> None:
    """It may lead to one that the key did not show, but not to one that does not precede us, nor to ourselves."""
    seeker, leader = core(5), candidate(3, 4.0)
    seeker.follow(leader)
    seeker.on_refused(leader, Refusal(reason=Reason.FOLLOWING, leader=candidate(2, 3.0)), 1.0)
    assert seeker.candidates([], 1.0) == (candidate(2, 3.0),)
    seeker.on_failed(candidate(2, 3.0))
    assert seeker.candidates([], 1.0) == ()
    for useless in (candidate(6, 5.0), candidate(5, 1.5)):
        seeker.on_refused(leader, Refusal(reason=Reason.FOLLOWING, leader=useless), 1.0)
        assert seeker.candidates([], 1.0) == ()


def test_a_client_never_leads() -> None:
    """Its one window lasts as long as its search, so that it may follow whoever begins in time."""
    client = core(1, role=Role.CLIENT)
    assert client.consider(request(2, 30.0)) == Refusal(reason=Reason.NOT_LOOKING)
    assert client.deadline() == 19.5
    assert client.candidates([candidate(2, 19.4), candidate(3, 19.6)], 0.0) == (candidate(2, 19.4),)
    client.tick(19.5)
    assert client.is_over


def test_settings_are_checked() -> None:
    wrong = [("window_s", 0.0, "positive"), ("poll_s", math.nan, "positive"), ("window_s", 4000.0, "at most 3600")]
    for name, value, message in (*wrong, ("request_timeout_s", 5.0, "below window_s")):
        with pytest.raises(ValueError, match=f"{name} must be {message}"):
            AssemblyConfig(**{name: value})


class World:
    """Searches that reach each other by function calls; some die."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.cores: dict[PeerId, Matchmaking] = {}
        self.dead: set[PeerId] = set()

    def step(self) -> None:
        """Everybody acts once, in any order."""
        for search in self.rng.sample(list(self.cores.values()), len(self.cores)):
            if search.is_over or search.me.peer_id in self.dead:
                continue
            search.tick(self.now)
            self.deliver(search)
            declared = [
                Candidate(contact=each.me.contact, expiration=each.expiration)
                for each in self.cores.values()
                if not each.is_client
            ]
            found = search.candidates(declared, self.now)
            if found and search.leader is None and not search.is_over:
                # The first is the rule, but silence of others may make it any.
                self.ask(search, found[0] if self.rng.random() < 0.7 else self.rng.choice(found))

    def ask(self, search: Matchmaking, asked: Candidate) -> None:
        leader = self.cores[asked.contact.peer_id]
        if leader.me.peer_id in self.dead:
            search.on_failed(asked)
            return
        answer = leader.consider(search.request)
        if not isinstance(answer, Refusal):
            willing = replace(asked, expiration=answer)
            assert search.precedes_us(willing)
            join = replace(search.request, window=answer)
            search.follow(willing)
            self.deliver(search)
            refusal = leader.receive(join)
            self.deliver(leader)
            if refusal is None:
                return
            answer = refusal
        search.on_refused(asked, answer, self.now)

    def deliver(self, search: Matchmaking) -> None:
        for peer_id, answer in search.take_answers().items():
            follower = self.cores[peer_id]
            assert follower.leader.contact.peer_id == search.me.peer_id
            if isinstance(answer, Group):
                follower.on_group(answer)
            else:
                follower.on_refused(follower.leader, answer, self.now)

    def die(self, search: Matchmaking) -> None:
        self.dead.add(search.me.peer_id)
        for other in self.cores.values():
            if other.leader is not None and other.leader.contact.peer_id == search.me.peer_id:
                other.on_failed(other.leader)
            other.leave(search.me.peer_id)


@given(seed=st.integers(0, 2**32), count=st.integers(1, 24), side=st.integers(2, 6))
@settings(max_examples=60)
def test_searches_always_end(seed: int, count: int, side: int) -> None:
    """Nobody waits for a later one, nobody is in two groups, and all end in time, whoever comes and dies when."""
    world = World(seed)
    rng, roles = world.rng, (Role.NODE, Role.NODE, Role.NODE, Role.CLIENT, Role.AUXILIARY)
    arrivals = sorted(rng.uniform(0.0, 10.0) for _ in range(count))
    deaths = {number: rng.uniform(0.0, 20.0) for number in range(count) if rng.random() < 0.2}
    for step in range(400):
        world.now = step / 10
        while arrivals and arrivals[0] <= world.now:
            number, deadline = len(world.cores), arrivals.pop(0) + rng.uniform(1.0, 20.0)
            options = {"now": world.now, "deadline": deadline, "side": side, "role": rng.choice(roles)}
            world.cores[peer(number)] = core(number, **options)
        for number, when in deaths.items():
            if when <= world.now and peer(number) in world.cores and peer(number) not in world.dead:
                world.die(world.cores[peer(number)])
        world.step()
        for search in world.cores.values():
            assert search.leader is None or search.precedes_us(search.leader)
    living = [search for search in world.cores.values() if search.me.peer_id not in world.dead]
    in_groups: dict[PeerId, bytes] = {}
    for search in living:
        assert search.is_over
        if search.group is not None:
            assert search.me in search.group.members
            assert 2 <= sum(each.sends for each in search.group.members) <= side
            for each in search.group.members:
                assert in_groups.setdefault(each.peer_id, search.group.group_id) == search.group.group_id


def test_who_is_postponed_searches_longer_within_bounds() -> None:
    """So do followers, who are told the same time as their leader; the window of both ends before the search."""
    leader, follower = seeker_of_a_step(2), seeker_of_a_step(6)
    follower.follow(candidate(2, 5.0))
    for search in (leader, follower):
        for until, expected in ((6.5, (6.5, 21.5)), (6.0, (6.5, 21.5)), (100.0, (24.5, 25.0))):
            search.postpone(until)
            assert (search.expiration, search.search_ends_at) == expected
    client = seeker_of_a_step(3, role=Role.CLIENT)
    assert client.expiration == 19.5
    client.postpone(7.0)
    assert (client.expiration, client.search_ends_at) == (21.5, 22.0)


FULL = Speeds(up=1.1e6, down=2.3e7, reducing=3.1e9)
"""All facts, none of which a shorter float would hold."""


def travelled(body: Any) -> dict[str, Any]:
    return decode_untrusted(encode(dict(body)))


unknown_or_any = st.none() | st.floats(*BANDWIDTHS_BPS)
members = st.builds(
    member,
    st.integers(0, 2**256 - 1),
    role=st.sampled_from(Role),
    wanted_slot=st.integers(0, 2),
    weight=st.floats(1e-6, 1e6),
    speeds=st.builds(Speeds, up=unknown_or_any, down=unknown_or_any, reducing=unknown_or_any),
)


@given(members, st.floats(-1e9, 1e9), st.none() | st.floats(0, 1e9))
def test_requests_arrive_as_they_were(who: Member, expiration: float, window: float | None) -> None:
    sent = replace(request(1), member=who, expiration=expiration, window=window)
    assert parse_request_untrusted(travelled(request_body(sent)), who.peer_id) == sent


def test_answers_arrive_as_they_were() -> None:
    assert parse_asked_untrusted(travelled({"expiration": 5.5})) == 5.5
    sent = request(2, speeds=Speeds(up=1e6, reducing=2e9))
    for refusal in (Refusal(reason=Reason.FULL), Refusal(reason=Reason.FOLLOWING, leader=candidate(1, 4.0))):
        body = travelled(refusal_body(refusal))
        assert parse_asked_untrusted(body) == parse_joined_untrusted(body, sent, peer(1)) == refusal
    group = Group(group_id=bytes(16), members=(member(1, role=Role.AUXILIARY), sent.member), side=3)
    assert parse_joined_untrusted(travelled(group_body(group)), sent, peer(1)) == group


def test_a_member_travels_as_it_always_did() -> None:
    """The bytes are [id, "peer7", 1, "node", 2, 1.5, up 1e6, down unknown, reducing 2.5e9]."""
    who = member(7, address=Address("peer7", 1), wanted_slot=2, weight=1.5, speeds=Speeds(up=1e6, reducing=2.5e9))
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
    """Their weights cannot be added up, shares cannot be solved for their bandwidths, or they have half an address."""
    facts = [list(request_body(replace(request(1), member=member(number, speeds=FULL)))["member"]) for number in (1, 2)]
    facts[0][place] = value
    with pytest.raises(RemoteProtocolError, match=message):
        parse_joined_untrusted(travelled({"group_id": bytes(16), "members": facts}), request(2), peer(1))


scalars = st.none() | st.booleans() | st.integers(-5, 70000) | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(scalars | st.just(bytes(32)), lambda inner: st.lists(inner, max_size=8), max_leaves=20)


@given(st.data())
def test_garbage_is_only_ever_a_protocol_error(data: st.DataObject) -> None:
    """It replaces a field of a good body, in a request or an answer, or an item of a member."""
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
    good = candidate(1, 50.0)
    values = [declaration_of(good), None, ["host", 1], ["host", 0, 50.0], ["host", 1, "soon"]]
    record = [Found(peer(number), "", value, 60.0) for number, value in enumerate(values, start=1)]
    assert candidates_in_untrusted(record) == (good,)
    assert candidates_in_untrusted(()) == ()


@pytest.mark.parametrize("host_length", [4, 255])
def test_the_largest_group_fits_a_message(host_length: int) -> None:
    """With a side of 1024 it begins when no further member is sure to fit: with at least 150 of the longest names."""
    long_name = Address("h" * host_length, 65535)
    leader = core(0, address=long_name, speeds=FULL, side=1024, config=AssemblyConfig())
    number = 0
    while leader.group is None:
        number += 1
        who = {"address": long_name, "speeds": FULL, "weight": 1.1, "wanted_slot": 1023}
        assert leader.receive(replace(request(number, **who), side=1024)) is None
    assert len(leader.group.members) >= (150 if host_length == 255 else 550)
    assert len(encode(dict(group_body(leader.group)))) < 60 * 1024


@given(members)
def test_the_size_of_a_member_is_an_upper_bound(who: Member) -> None:
    """`member_bytes` bounds the bytes of a member's encoding, and `MAX_MEMBER_BYTES` bounds both."""
    assert len(encode(request_body(replace(request(1), member=who))["member"])) <= member_bytes(who) <= MAX_MEMBER_BYTES
