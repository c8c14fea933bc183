"""Search for a leader by peers that look for one group, without I/O.

Theory of operation. Every peer that can be called declares until when it gathers followers. (expiration, peer id) is a
total order, the *rank*; a peer only ever asks peers that precede it, and refuses those that precede itself, so two
peers never wait for each other and there is nothing to lock. A search is in one of these states:

- *leading*: once its group is full it begins; when its window ends it begins with what there is, if that is enough, and
  else sends its followers away and opens the next window. A search that was told when to begin (`begins_at`) has a
  first window until then, and its group waits for that time even if it is full;
- *following*: a leader has its request. Its own followers were sent there, and whoever asks it is sent there too. Its
  window stands still; if the leader fails or refuses, it leads again where it left off;
- *ended*: it has its group, or its time is over.

A client cannot lead, and has one window, as long as its search: so it may follow any leader that begins in time. A
group has 2 to `side` members with a vector, besides auxiliary peers, which must neither take the places of others nor
make a group out of one.

Peers may know of each other without the DHT (`hinted`). Searches that were told when to begin mostly declare the same
time, and then the least peer id leads: so of two peers the one with the greater id asks. If that one is the earlier all
the same, its question says so, and whoever was asked comes to it.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dmoe_net.averaging.grouping.group import GROUP_ID_BYTES, MAX_GROUP_SIZE, Group, Member, Role
from dmoe_net.averaging.grouping.join_messages import (
    MAX_MEMBER_BYTES,
    MAX_MEMBERS_BYTES,
    Candidate,
    JoinRequest,
    Reason,
    Refusal,
    member_bytes,
)
from dmoe_net.identity import Contact, PeerId

MAX_WINDOW_S = 3600.0
"""Calls that wait for a leader stay within what the RPC layer allows, and DHT entries end the same day."""

SOON_S = 0.05
"""Seconds until a peer that does not look yet for a group of a given time is asked again; twice as many each further
time. It may be about to hear of the group, and there may be little time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblyConfig:
    """Settings of a search for a group."""

    window_s: float = 5.0
    """Seconds for which a leader gathers followers; a full group begins at once. Let it be longer than the DHT's
    `rpc_timeout_s`: a declaration may have to pass by dead peers, and those that come late form a group of their own
    (where 3 of 8 x 8 peers had died in each of six rounds, the last 46 formed 14 groups with 3 s, and 8 with 8 s)."""
    request_timeout_s: float = 3.0
    """Seconds that a leader may take to say whether it would have us, and to answer after its window."""
    grace_s: float = 0.3
    """Seconds to wait, once a leader is willing, for the answers of peers that precede it."""
    poll_s: float = 1.0
    """Seconds until the key is read again, a leader pinged, and a peer that refused asked again."""
    silence_s: float = 1.5
    """Seconds for which a leader that has taken us on may leave a ping unanswered."""
    margin_s: float = 0.5
    """Seconds between a leader's last window and its deadline: its answer takes a moment to arrive."""
    withdrawal_timeout_s: float = 1.0
    """Longest time for taking a declaration back after a cancellation, seconds."""
    max_questions: int = 4
    """Most leaders asked at once: dead ones, of which there may be several, then cost one timeout together."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not self.request_timeout_s < self.window_s:
            raise ValueError(
                f"request_timeout_s must be below window_s, or a dead leader costs a whole window, "
                f"got {self.request_timeout_s} and {self.window_s}"
            )
        if self.window_s > MAX_WINDOW_S:
            raise ValueError(f"window_s must be at most {MAX_WINDOW_S:g}, got {self.window_s}")


Answer = Group | Refusal
"""Answer to a follower's `join` call: its group, or why there is none."""


class Matchmaking:
    """One search for one group.

    Args:
      me: what the group will know of us.
      schema: what our vector means.
      side: of the grid: the size of a full group.
      deadline: swarm time at which the search ends, unless it is postponed; then at most `window_s` later.
      begins_at: swarm time at which a group is to begin, and not before; None: as soon as it is full.
      fewest: how few members with a vector make a group, asked when it is to begin; at least 2.
    """

    def __init__(
        self,
        me: Member,
        *,
        key: str,
        schema: bytes,
        side: int,
        deadline: float,
        config: AssemblyConfig,
        rng: random.Random,
        now: float,
        begins_at: float | None = None,
        fewest: Callable[[], int] = lambda: 2,
    ) -> None:
        self.me = me
        self.key = key
        self.group: Group | None = None
        """The group that was found."""
        self.is_over = False
        """True once the search has ended, with a group or without."""
        self.leader: Candidate | None = None
        """The peer that we follow."""
        self.expiration = now
        """Our declared expiration: the end of our window."""
        self.search_ends_at = deadline
        """Swarm time at which the search ends: at its deadline, or later if it was postponed."""
        self._schema = schema
        self._side = side
        self._deadline = deadline
        self._config = config
        self._rng = rng
        self._begins_at = begins_at
        self._fewest = fewest
        # Full groups begin at once, so this holds at most the two bounds of `_has_room`.
        self._followers: dict[PeerId, Member] = {}
        # At most one entry for each question of this search; the deadline bounds them.
        self._failed: set[PeerId] = set()
        self._ask_again_at: dict[PeerId, float] = {}
        self._num_disbanded: Counter[PeerId] = Counter()
        self._num_not_looking: Counter[PeerId] = Counter()
        self._suggested: Candidate | None = None
        self._answers: dict[PeerId, Answer] = {}
        self._told: set[float] = set()  # what this window's expiration was and is; a handful, for postponing ends
        self._open_window(now)

    @property
    def request(self) -> JoinRequest:
        """Our request to a leader."""
        return JoinRequest(
            key=self.key, schema=self._schema, side=self._side, member=self.me, expiration=self.expiration
        )

    @property
    def is_client(self) -> bool:
        """True if we cannot lead, and need not be declared."""
        return self.me.role is Role.CLIENT

    @property
    def is_timed(self) -> bool:
        """True if the group is to begin at a time that was given, which may be postponed."""
        return self._begins_at is not None

    def candidates(self, declared: Iterable[Candidate], now: float) -> tuple[Candidate, ...]:
        """The peers to be asked, first things first: they precede us, and have neither failed nor just refused."""
        found = {candidate.contact.peer_id: candidate for candidate in declared}
        suggested = self.suggested(now)
        if suggested is not None:
            found[suggested.contact.peer_id] = suggested
        may_be_asked = [candidate for candidate in found.values() if self._may_ask(candidate, now)]
        # Who was named to us leads, as far as others know; of the rest we know that they may.
        return tuple(sorted(may_be_asked, key=lambda candidate: (candidate != suggested, candidate.rank)))

    def suggested(self, now: float) -> Candidate | None:
        """The peer that was named to us as a leader, by itself or by others, if it may be asked now."""
        if self._suggested is not None and not self._suggested.expiration > now:
            self._suggested = None  # and make room for others
        return self._suggested if self._suggested is not None and self._may_ask(self._suggested, now) else None

    def hinted(self, contacts: Iterable[Contact]) -> tuple[Candidate, ...]:
        """Candidates of peers that are known to look for our group, with the expiration that they probably have."""
        asks_all = self.is_client or self._begins_at is None  # nobody asks a client; and later windows end anyhow
        expiration = math.nextafter(self.expiration, -math.inf) if asks_all else self.expiration
        return tuple(Candidate(contact=each, expiration=expiration) for each in contacts)

    def precedes_us(self, candidate: Candidate) -> bool:
        """True if it may lead us."""
        return candidate.contact.peer_id != self.me.peer_id and candidate.rank < (self.expiration, self.me.peer_id)

    def follow(self, leader: Candidate) -> None:
        """Ask this willing leader to have us: our followers are better off there."""
        self.leader = leader
        self._suggested = None
        self._send_away(Refusal(reason=Reason.FOLLOWING, leader=leader))

    def on_group(self, group: Group) -> None:
        """Take the group that our leader has begun."""
        self.group, self.leader, self.is_over = group, None, True

    def on_refused(
        self, candidate: Candidate, refusal: Refusal, now: float, *, asked: JoinRequest | None = None
    ) -> None:
        """Note that a candidate, or the leader that we followed, will not have us now.

        Args:
          asked: the request that was refused, if it may be another than ours is now.
        """
        peer_id = candidate.contact.peer_id
        pause_s = self._config.poll_s
        if refusal.reason is Reason.LATER and asked is not None and asked.expiration != self.expiration:
            pause_s = 0.0  # we have been postponed meanwhile, and it may lead us now
        if refusal.reason is Reason.NOT_LOOKING and self.is_timed:
            pause_s = min(pause_s, SOON_S * 2.0 ** self._num_not_looking[peer_id])
            self._num_not_looking[peer_id] += 1
        if refusal.reason is Reason.DISBANDED:
            # It has cost us a window. One that does it again and again must not keep us from all other groups.
            self._num_disbanded[peer_id] += 1
            pause_s = self._config.window_s * 2.0 ** (self._num_disbanded[peer_id] - 1)
        self._ask_again_at[peer_id] = now + pause_s
        if refusal.reason is Reason.WRONG_SCHEMA:
            self._failed.add(peer_id)
        self._forget_leader(peer_id)
        if refusal.leader is not None and refusal.leader.contact.peer_id != peer_id:
            self._suggest(refusal.leader)

    def on_failed(self, candidate: Candidate) -> None:
        """Never ask again a candidate, or the leader that we followed, that did not answer or answered nonsense."""
        self._failed.add(candidate.contact.peer_id)
        self._forget_leader(candidate.contact.peer_id)

    def consider(self, request: JoinRequest) -> float | Refusal:
        """The time until which we gather, or why we would not lead this peer."""
        if self.is_over or self.is_client or request.member.peer_id == self.me.peer_id:
            return Refusal(reason=Reason.NOT_LOOKING)
        if request.key != self.key:
            return Refusal(reason=Reason.WRONG_KEY)
        if (request.schema, request.side) != (self._schema, self._side):
            return Refusal(reason=Reason.WRONG_SCHEMA)
        if self.leader is not None:
            return Refusal(reason=Reason.FOLLOWING, leader=self.leader)
        if (request.expiration, request.member.peer_id) < (self.expiration, self.me.peer_id):
            if request.member.address is not None:
                self._suggest(Candidate(contact=request.member.contact, expiration=request.expiration))
            return Refusal(reason=Reason.LATER)
        return self.expiration if self._has_room(request.member) else Refusal(reason=Reason.FULL)

    def receive(self, request: JoinRequest) -> Refusal | None:
        """Take a follower that is none yet, or say why not. The last one of a full group begins it."""
        answer = self.consider(request)
        if isinstance(answer, Refusal):
            return answer
        if request.window not in self._told:  # it was meant for our last window
            return Refusal(reason=Reason.LATER)
        self._followers[request.member.peer_id] = request.member
        if self._is_full() and self._begins_at is None:
            self._begin()
        return None

    def leave(self, peer_id: PeerId) -> None:
        """Drop a follower that does not wait any more."""
        self._followers.pop(peer_id, None)

    def deadline(self) -> float | None:
        """Time at which `tick` is due; None: not before something else happens."""
        return None if self.is_over or self.leader is not None else self.expiration

    def tick(self, now: float) -> None:
        """Begin at the end of our window, or open the next one, or end the search."""
        due = self.deadline()
        if due is None or now < due:
            return
        if not self.is_client and self._num_senders() >= max(2, self._fewest()):
            self._begin()
            return
        self._send_away(Refusal(reason=Reason.DISBANDED))
        if self.is_client or self.search_ends_at - now <= self._config.margin_s:
            self.is_over = True
        else:
            self._begins_at = None  # late already
            self._open_window(now)

    def postpone(self, begins_at: float) -> None:
        """Let the group begin later than was said, and the search end later, by `window_s` at most.

        A follower does as its leader, which is told the same: else it would have left when its group begins.
        """
        if self._begins_at is None or self.is_over or begins_at <= self._begins_at:
            return
        ends_at = self.search_ends_at + begins_at - self._begins_at
        self.search_ends_at = min(ends_at, self._deadline + self._config.window_s)
        self._begins_at = begins_at
        # As every window it ends before the search, so that followers still hear of their group.
        latest = self.search_ends_at - self._config.margin_s
        self.expiration = max(self.expiration, latest if self.is_client else min(begins_at, latest))
        self._told.add(self.expiration)
        self._ask_again_at.clear()  # who would not have us may lead us now

    def stop(self) -> None:
        """End the search; followers are sent away."""
        self.is_over = True
        self._send_away(Refusal(reason=Reason.DISBANDED))

    def take_answers(self) -> dict[PeerId, Answer]:
        """Return the answers to followers that follow no more. Each is given out once."""
        answers, self._answers = self._answers, {}
        return answers

    def _open_window(self, now: float) -> None:
        # Half of a time shorter than two margins: there is no use in a window without a length.
        latest = self.search_ends_at - min(self._config.margin_s, (self.search_ends_at - now) / 2)
        end = now + self._config.window_s if self._begins_at is None else max(now, self._begins_at)
        self.expiration = latest if self.is_client else min(latest, end)
        self._told = {self.expiration}

    def _may_ask(self, candidate: Candidate, now: float) -> bool:
        peer_id = candidate.contact.peer_id
        return (
            self.precedes_us(candidate)
            and candidate.expiration > now
            and peer_id not in self._failed
            and self._ask_again_at.get(peer_id, now) <= now
        )

    def _forget_leader(self, peer_id: PeerId) -> None:
        if self.leader is not None and self.leader.contact.peer_id == peer_id:
            self.leader = None
        if self._suggested is not None and self._suggested.contact.peer_id == peer_id:
            self._suggested = None

    def _suggest(self, leader: Candidate) -> None:
        """Note whom somebody else, or the leader itself, says to lead: of several the first in rank is asked."""
        if self.precedes_us(leader) and (self._suggested is None or leader.rank < self._suggested.rank):
            self._suggested = leader

    def _members(self) -> tuple[Member, ...]:
        return (self.me, *self._followers.values())

    def _num_senders(self) -> int:
        return sum(member.sends for member in self._members())

    def _has_room(self, member: Member) -> bool:
        # As many auxiliary peers as senders at most: more would not find a slot's worth of work each.
        return sum(other.sends is member.sends for other in self._members()) < self._side

    def _is_full(self) -> bool:
        members = self._members()
        return (
            self._num_senders() >= self._side
            or len(members) >= MAX_GROUP_SIZE
            or sum(map(member_bytes, members)) > MAX_MEMBERS_BYTES - MAX_MEMBER_BYTES
        )

    def _begin(self) -> None:
        # By wanted slots; auxiliary peers come after all others, which so come first to their slots.
        members = sorted(self._members(), key=lambda each: (not each.sends, each.wanted_slot, each.peer_id))
        self.group = Group(group_id=self._rng.randbytes(GROUP_ID_BYTES), members=tuple(members), side=self._side)
        self.is_over = True
        self._send_away(self.group)

    def _send_away(self, answer: Answer) -> None:
        self._answers |= dict.fromkeys(self._followers, answer)
        self._followers.clear()
