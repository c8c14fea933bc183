"""Settling on an average: either all members of a group use the same one, or nobody does.

Theory of operation. Whoever dies in an all-reduce leaves one part without a mean, or some parts with its vector in them
and others without. A step that some made and others did not would part their parameters for good. So after an
all-reduce every member *votes* (is its average whole, and what is its digest) at the first member, in the order of the
group, that it can reach, and gets the *outcome* from there:

- all that are there have the same whole average, of the same weights: it is used (`committed`), whoever died since;
- else those that have voted average once more, as a new group, from the vectors that they had.

The first member decides when all others have voted or are gone. Should it go, the votes come to the second, which asks
all others whether they know an outcome already before it decides by itself. This is two-phase commit whose coordinator
is replaced by asking around (Skeen 1981, cooperative termination): with crashes alone the living agree; if a network
falls apart, and its parts decide differently, the smaller chain is given up later (`progress`).
"""

import math
import random
from dataclasses import asdict, dataclass, field
from typing import Any

import trio

from dmoe_net.averaging.grouping.group import GROUP_ID, GROUP_ID_BYTES, MAX_GROUP_SIZE, Group, Role
from dmoe_net.averaging.reduction.partition import TOTAL_WEIGHT
from dmoe_net.dht.calls import PEER_ERRORS
from dmoe_net.errors import CallFailed, CallRefused, PeerUnavailable, RemoteProtocolError
from dmoe_net.nursery import background_nursery
from dmoe_net.rpc.base import Body, Caller, Reply, Request, read_request
from dmoe_net.rpc.liveness import call_living, ping
from dmoe_net.wire.fields import FLAG, Field, integer, octets, optional, real, several

DIGEST_BYTES = 16
CLIENT_S = 3.0
"""A client that has not voted so long after the first vote is gone: nobody can ask it."""
_POLL_S = 0.5
"""Seconds between two questions to members that are waited for, whether they live."""
_MAX_PAST = 64
"""Outcomes that are remembered for members that ask late."""

_NOTE = real(-1e15, 1e15)
_PLACES = several(integer(0, MAX_GROUP_SIZE - 1), MAX_GROUP_SIZE)
_ASKED: dict[str, Field[Any]] = {
    "group": GROUP_ID,
    "complete": optional(FLAG),
    "digest": optional(octets(0, DIGEST_BYTES)),
    "note": optional(_NOTE),
    "weight": optional(TOTAL_WEIGHT),
}
_TOLD: dict[str, Field[Any]] = {
    "committed": FLAG,
    "survivors": _PLACES,
    "next": octets(0, GROUP_ID_BYTES),
    "notes": _NOTE,
    "weight": TOTAL_WEIGHT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """A member's word on its all-reduce, sent by these names."""

    complete: bool
    """True if its average is whole."""
    digest: bytes
    """Hash of the average; empty for an auxiliary member, which has only its part."""
    note: float = 0.0
    """A number to be added up over the members."""
    weight: float | None = None
    """Sum of the weights in its average; None if it was not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a group's average."""

    committed: bool
    """True if it is used."""
    survivors: tuple[int, ...] = ()
    """Else: the members, by their places, that average once more."""
    next_id: bytes = b""
    """Their new group's id."""
    notes: float = 0.0
    """Sum of the members' notes, where it is used."""
    weight: float = 0.0
    """Sum of the weights in the average, where it is used: for members that were not told."""

    def group_after(self, group: Group) -> Group:
        members = tuple(group.members[place] for place in self.survivors)
        return Group(group_id=self.next_id, members=members, side=group.side)


@dataclass(slots=True, eq=False)
class Case:
    """One group's votes, and the rule by which they are decided."""

    group: Group
    votes: dict[int, Vote] = field(default_factory=dict)
    """By the member's place in the group."""
    gone: set[int] = field(default_factory=set)
    """Members that are not waited for."""
    outcome: Outcome | None = None
    first_vote_at: float = math.inf
    changed: trio.Event = field(default_factory=trio.Event)
    """Set, and replaced, after each vote and with the outcome."""

    @property
    def missing(self) -> list[int]:
        """Members that have neither voted nor gone."""
        places = range(len(self.group.members))
        return [place for place in places if place not in self.votes and place not in self.gone]

    @property
    def decider(self) -> int | None:
        """The member that decides: the first that can be called and is not gone."""
        members = enumerate(self.group.members)
        return next((n for n, each in members if each.role is not Role.CLIENT and n not in self.gone), None)

    def count(self, place: int, vote: Vote, now: float) -> None:
        """Count a member's vote, though it may have seemed gone; its first one stands."""
        if self.outcome is None:
            self.votes.setdefault(place, vote)
            self.gone.discard(place)
            self.first_vote_at = min(self.first_vote_at, now)
            self._tell()

    def lose(self, place: int) -> None:
        """Wait no more for a member. Its vote stays: its vector is in the average or is not."""
        self.gone.add(place)
        self._tell()

    def decide(self, rng: random.Random) -> None:
        """Settle it, if nobody is missing any more."""
        if self.missing or self.outcome is not None:
            return
        digests = {vote.digest for vote in self.votes.values() if vote.digest}
        weights = {vote.weight for vote in self.votes.values() if vote.weight is not None}
        if all(vote.complete for vote in self.votes.values()) and len(digests) <= 1 and len(weights) <= 1:
            notes = math.fsum(vote.note for vote in self.votes.values())
            self.settle(Outcome(committed=True, notes=notes, weight=weights.pop() if weights else 0.0))
        else:
            there = tuple(place for place in sorted(self.votes) if place not in self.gone)
            self.settle(Outcome(committed=False, survivors=there, next_id=rng.randbytes(GROUP_ID_BYTES)))

    def settle(self, outcome: Outcome) -> None:
        """Make an outcome known; the first one stands."""
        if self.outcome is None:
            self.outcome = outcome
            self._tell()

    async def changes(self) -> bool:
        """Wait for a vote or the outcome; return False if none comes within `_POLL_S`."""
        with trio.move_on_after(_POLL_S) as scope:
            await self.changed.wait()
        return not scope.cancelled_caught

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


@dataclass(kw_only=True, eq=False)
class Settlement:
    """Votes and outcomes of all groups of a process under one name.

    Raises:
      ValueError: the caller serves the prefix already.
    """

    caller: Caller
    prefix: str
    rng: random.Random
    """Draws ids of groups."""
    timeout_s: float
    """Longest that a settlement takes; after it a member does not know the outcome."""
    silence_s: float
    """A member that leaves a question unanswered is gone if nothing has moved between it and us for so long. May be set
    longer where that has proved too short."""

    def __post_init__(self) -> None:
        self._method = f"averaging.{self.prefix}.settle"
        self._cases: dict[bytes, Case] = {}
        self._arrival = trio.Event()
        self.caller.add_handler(self._method, self._serve, max_concurrent=2 * MAX_GROUP_SIZE)

    def close(self) -> None:
        self.caller.remove_handler(self._method)

    def open(self, group: Group) -> None:
        """Promise to vote. Before the all-reduce, so that others can ask for it."""
        self._cases[group.group_id] = Case(group)
        for group_id in list(self._cases)[:-_MAX_PAST]:
            del self._cases[group_id]
        self._arrival.set()
        self._arrival = trio.Event()

    def give_up(self, group: Group) -> None:
        """Take the promise back, if there is no outcome; others are told when they ask."""
        case = self._cases.get(group.group_id)
        if case is not None and case.outcome is None:
            del self._cases[group.group_id]

    async def settle(self, group: Group, vote: Vote) -> Outcome | None:
        """Vote, and wait for the outcome; None if it cannot be known in time. The group was opened before."""
        own, case = group.index(self.caller.peer_id), self._cases[group.group_id]
        case.count(own, vote, trio.current_time())
        with trio.move_on_after(self.timeout_s):
            while case.outcome is None and case.decider is not None:
                if case.decider == own:
                    await self._decide(case)
                else:
                    await self._ask(case, case.decider, vote)
        if case.outcome is None:
            self.give_up(group)
        return case.outcome

    async def _ask(self, case: Case, place: int, vote: Vote) -> None:
        """Bring our vote to whoever decides, and wait for what it says as long as it lives."""
        body = {"group": case.group.group_id, **asdict(vote)}
        contact = case.group.members[place].contact
        try:
            async with background_nursery() as nursery:
                nursery.start_soon(self._watch, case, place, nursery.cancel_scope)
                reply = await self.caller.call(contact, self._method, body, timeout_s=self.timeout_s)
                outcome = _parse_outcome_untrusted(reply.body, case.group)
        except PEER_ERRORS:
            case.lose(place)
            return
        if place not in case.gone and outcome is not None:
            case.settle(outcome)
        else:
            case.lose(place)

    async def _watch(self, case: Case, place: int, scope: trio.CancelScope) -> None:
        """Cancel `scope` once another knows the outcome, or the member falls silent."""
        while case.outcome is None and place not in case.gone:
            if await case.changes():
                continue
            try:
                await ping(self.caller, case.group.members[place].contact, silence_s=self.silence_s)
            except PeerUnavailable:
                case.lose(place)
            except (CallFailed, RemoteProtocolError):
                pass  # it lives
        scope.cancel()

    async def _decide(self, case: Case) -> None:
        """Wait for all votes, and decide; ends early if somebody knows an outcome."""
        while case.outcome is None:
            case.decide(self.rng)
            if case.outcome is not None:
                return
            if await case.changes():
                continue
            async with trio.open_nursery() as nursery:
                for place in case.missing:
                    nursery.start_soon(self._find, case, place)

    async def _find(self, case: Case, place: int) -> None:
        """Ask a member that has not voted whether it lives, and what it knows."""
        member = case.group.members[place]
        if member.role is Role.CLIENT:
            if trio.current_time() - case.first_vote_at >= CLIENT_S:
                case.lose(place)
            return
        body = {"group": case.group.group_id}
        try:
            reply = await call_living(
                self.caller, member.contact, self._method, body, silence_s=self.silence_s, timeout_s=self.timeout_s
            )
            outcome = _parse_outcome_untrusted(reply.body, case.group)
        except PEER_ERRORS:
            if place in case.missing:
                case.lose(place)
            return
        if outcome is not None:
            case.settle(outcome)

    async def _serve(self, request: Request) -> Reply:
        group_id, complete, digest, note, weight = read_request(request, **_ASKED)
        case = await self._known(group_id)
        try:
            place = case.group.index(request.peer_id)
        except ValueError:
            raise CallRefused("you are not in this group") from None
        if complete is not None:
            vote = Vote(complete=complete, digest=digest or b"", note=note or 0.0, weight=weight)
            case.count(place, vote, trio.current_time())
            while case.outcome is None:
                await case.changed.wait()
        return Reply(body=_outcome_body(case.outcome))

    async def _known(self, group_id: bytes) -> Case:
        """The case, for which a vote may come before this peer has heard of the group."""
        with trio.move_on_after(self.silence_s / 2):
            while group_id not in self._cases:
                await self._arrival.wait()
        case = self._cases.get(group_id)
        if case is None:
            raise CallRefused(f"this peer has no part in group {group_id.hex()}")
        return case


def _outcome_body(outcome: Outcome | None) -> Body:
    if outcome is None:
        return {}
    told = (outcome.committed, list(outcome.survivors), outcome.next_id, outcome.notes, outcome.weight)
    return dict(zip(_TOLD, told, strict=True))


def _parse_outcome_untrusted(body: Body, group: Group) -> Outcome | None:
    if "committed" not in body:
        return None
    committed, survivors, next_id, notes, weight = [field.of_untrusted(body, name) for name, field in _TOLD.items()]
    outcome = Outcome(committed=committed, survivors=survivors, next_id=next_id, notes=notes, weight=weight)
    if not committed:
        if max(survivors, default=0) >= len(group.members):
            raise RemoteProtocolError(f"a group of {len(group.members)} has no member {max(survivors)}")
        try:
            outcome.group_after(group)
        except ValueError as error:
            raise RemoteProtocolError(f"the survivors make no group: {error}") from error
    return outcome
