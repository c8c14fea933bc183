"""Rules of matchmaking, without a network: who leads whom."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmoe_net.averaging.grouping.group import Group, Member, Role
from dmoe_net.averaging.grouping.join_messages import Candidate, JoinRequest, Reason, Refusal
from dmoe_net.averaging.grouping.matchmaking import AssemblyConfig, Matchmaking
from dmoe_net.identity import Address, Contact, PeerId

CONFIG = AssemblyConfig(window_s=5.0, poll_s=1.0, margin_s=0.5)


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


def member(number: int, **facts: Any) -> Member:
    facts = {"peer_id": peer(number), "address": Address(f"host{number}", 1)} | facts
    if facts.get("role") is Role.CLIENT:
        facts["address"] = None
    return Member(**facts)


def core(number: int, *, now: float = 0.0, deadline: float = 20.0, side: int = 3, **facts: Any) -> Matchmaking:
    """A search that begins now."""
    return Matchmaking(
        member(number, **facts),
        key="key",
        schema=b"schema",
        side=side,
        deadline=deadline,
        config=CONFIG,
        rng=random.Random(number),
        now=now,
    )


def candidate(number: int, expiration: float) -> Candidate:
    return Candidate(contact=Contact(peer(number), Address(f"host{number}", 1)), expiration=expiration)


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
    assert leader.group is not None
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
    assert leader.group is not None
    assert told(leader) == {peer(2): leader.group}


def test_too_few_are_sent_away() -> None:
    """An auxiliary peer makes no group out of one: it is sent away, and the next window opens."""
    leader = core(1)
    leader.receive(request(2, role=Role.AUXILIARY))
    leader.tick(5.0)
    assert told(leader) == {peer(2): Reason.DISBANDED}
    assert leader.group is None
    assert leader.expiration == 10.0


def test_windows_end_before_the_deadline() -> None:
    """A search of 12 s has windows until 5, 10 and 11.5 s, and then no more."""
    alone = core(1, deadline=12.0)
    ends = []
    while (due := alone.deadline()) is not None:
        ends.append(due)
        alone.tick(due)
    assert ends == [5.0, 10.0, 11.5]
    assert alone.is_over
    assert alone.group is None


def test_a_search_shorter_than_its_margins_has_a_window() -> None:
    """Half of its time."""
    hurried = core(1, deadline=0.6)
    assert hurried.deadline() == pytest.approx(0.3)
    hurried.tick(0.3)
    assert hurried.is_over


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
    """Only whom the leader precedes: in time, and at the same time by peer id. Nobody follows itself."""
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
    assert leader.group is not None
    assert [each.peer_id for each in leader.group.members] == [peer(2), peer(5), peer(1), peer(3)]


def test_a_follower_that_left_is_not_in_the_group() -> None:
    """Nor in the count."""
    leader = core(1)
    leader.receive(request(2))
    leader.leave(peer(2))
    leader.leave(peer(3))
    leader.tick(5.0)
    assert leader.group is None
    assert leader.take_answers() == {}


def test_a_call_for_the_last_window_does_not_wait_through_the_next() -> None:
    """It names the window that it was told of."""
    leader = core(1)
    leader.tick(5.0)
    assert leader.receive(request(2, 11.0, window=5.0)) == Refusal(reason=Reason.LATER)
    assert leader.receive(request(2, 11.0, window=10.0)) is None


def contact(number: int) -> Contact:
    return candidate(number, 0.0).contact


def seeker_of_a_step(number: int, *, begins_at: float = 5.0, **facts: Any) -> Matchmaking:
    """A search that was told when to begin."""
    return Matchmaking(
        member(number, **facts),
        key="key",
        schema=b"schema",
        side=9,
        deadline=20.0,
        config=CONFIG,
        rng=random.Random(number),
        now=0.0,
        begins_at=begins_at,
    )


def test_of_two_that_know_of_each_other_the_greater_id_asks() -> None:
    """They declare one time; a client, whom nobody asks, asks all, and so does whoever is late."""
    three, four = contact(3), contact(4)
    assert [each.contact for each in seeker_of_a_step(4).candidates(seeker_of_a_step(4).hinted([three]), 0.0)] == [
        three
    ]
    least = seeker_of_a_step(3)
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
    """Those that precede us and have not ended; of two at one time the lesser id first."""
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
    """To a leader that the key did not show, but not to one that does not precede us, nor to ourselves."""
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


def test_a_stopped_search_sends_its_followers_away() -> None:
    """And takes no more."""
    leader = core(1)
    leader.receive(request(2))
    leader.stop()
    assert told(leader) == {peer(2): Reason.DISBANDED}
    assert leader.receive(request(3)) == Refusal(reason=Reason.NOT_LOOKING)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_s": 0.0}, "window_s must be positive"),
        ({"poll_s": math.nan}, "poll_s must be positive"),
        ({"request_timeout_s": 5.0}, "below window_s"),
        ({"window_s": 4000.0}, "at most 3600"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], message: str) -> None:
    """Errors name the setting."""
    with pytest.raises(ValueError, match=message):
        AssemblyConfig(**options)


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
            leader = follower.leader
            assert leader is not None
            assert leader.contact.peer_id == search.me.peer_id
            if isinstance(answer, Group):
                follower.on_group(answer)
            else:
                follower.on_refused(leader, answer, self.now)

    def die(self, search: Matchmaking) -> None:
        self.dead.add(search.me.peer_id)
        for other in self.cores.values():
            if other.leader is not None and other.leader.contact.peer_id == search.me.peer_id:
                other.on_failed(other.leader)
            other.leave(search.me.peer_id)


@given(seed=st.integers(0, 2**32), count=st.integers(1, 24), side=st.integers(2, 6))
@settings(max_examples=60, deadline=None)
def test_searches_always_end(seed: int, count: int, side: int) -> None:
    """Whoever comes when and dies when: nobody waits for a later one, nobody is in two groups, all end in time."""
    world = World(seed)
    rng, roles = world.rng, (Role.NODE, Role.NODE, Role.NODE, Role.CLIENT, Role.AUXILIARY)
    arrivals = sorted(rng.uniform(0.0, 10.0) for _ in range(count))
    deaths = {number: rng.uniform(0.0, 20.0) for number in range(count) if rng.random() < 0.2}
    for step in range(400):
        world.now = step / 10
        while arrivals and arrivals[0] <= world.now:
            number = len(world.cores)
            arrival = arrivals.pop(0)
            deadline = arrival + rng.uniform(1.0, 20.0)
            world.cores[peer(number)] = core(
                number, now=world.now, deadline=deadline, side=side, role=rng.choice(roles)
            )
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
        search.postpone(6.5)
        assert (search.expiration, search.search_ends_at) == (6.5, 21.5)
        search.postpone(6.0)
        assert (search.expiration, search.search_ends_at) == (6.5, 21.5)
        search.postpone(100.0)
        assert (search.expiration, search.search_ends_at) == (24.5, 25.0)
    client = seeker_of_a_step(3, role=Role.CLIENT)
    assert client.expiration == 19.5
    client.postpone(7.0)
    assert (client.expiration, client.search_ends_at) == (21.5, 22.0)
