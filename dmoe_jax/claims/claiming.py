"""The decisions of a claimer: what to claim, to confirm, to take up, to drop, and about what to ask a rival.

A claim's life:

    CHOSEN ── written ──► SETTLING ── read, nobody better ──► CONFIRMING ── written ──► WON ── served
                             │                                     │ written late ──► LATE ── read ──► WON
                             └── somebody better, or it is gone: dropped ◄──────────────┘

`dmoe_jax.claims` says why two claimers do not win one claim. Everything here is pure; `now` and all times are swarm
time, seconds.
"""

import enum
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from dmoe_jax.claims.sharing import Claimant, dealt_out, fair_share, own_order, those_who_share, weight
from dmoe_net.identity import Contact, PeerId

MAX_CLAIMABLE = 65_536
"""Most experts that the patterns of one claimer may stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimConfig:
    """Settings of a node that claims experts that nobody serves."""

    max_experts: int
    """Most experts that it serves beside those that it was told to serve."""
    of: tuple[str, ...] = ()
    """Which of the patterns that are handed to `Swarm.serve` it claims; the others it serves from the start. None
    named: all of them."""
    gather_s: float = 3.0
    """Seconds that the node is listed before it first claims, so that nodes that start together count each other."""
    settle_s: float = 2.0
    """Seconds that a claim stands before it is read again. Longer than a store and a read of the DHT usually take."""
    lifetime_s: float = 12.0
    """Seconds that a claim lives unless it is renewed: so long nobody takes the expert if its claimer dies."""
    scan_period_s: float = 5.0
    """Seconds between two looks at what all experts of the patterns are at."""
    probe_period_s: float = 2.0
    """Seconds between two probes of a node, and how long one waits for its answer."""
    max_misses: int = 3
    """Probes in a row without an answer after which a node is taken for dead."""
    max_watched: int = 16
    """Most nodes that are probed, those whose ids are nearest to the own one: all claimers together watch everybody,
    and a node's cost does not grow with the swarm."""
    max_at_once: int = 64
    """Most claims that are held at a time. All claims for one grid share a record of the DHT, which holds some 2500."""
    retry_s: float = 60.0
    """Seconds until an expert that could not be taken up is tried again."""

    def __post_init__(self) -> None:
        for name in ("max_experts", "max_misses", "max_watched", "max_at_once"):
            if not (type(getattr(self, name)) is int and getattr(self, name) >= 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {getattr(self, name)!r}")
        for name in ("settle_s", "lifetime_s", "scan_period_s", "probe_period_s", "retry_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a positive number of seconds, got {getattr(self, name)}")
        if not 0 <= self.gather_s < math.inf:
            raise ValueError(f"gather_s must be 0 or a number of seconds, got {self.gather_s}")
        if self.lifetime_s <= 2 * self.settle_s:
            raise ValueError(
                f"lifetime_s must exceed twice settle_s, or claims end before they are confirmed; "
                f"got {self.lifetime_s} and {self.settle_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """An announcement of an expert."""

    contact: Contact
    """Who serves it, as it says."""
    expiration: float
    """Swarm time at which it ends, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a claimer has read and found."""

    read_at: float
    """When the reading of claims, and of the listings of experts with a claim of ours, began."""
    listed: Mapping[str, Listing]
    """Who announces which expert."""
    claims: Mapping[str, Mapping[PeerId, bool]]
    """The claims for each expert: claimer -> whether it is confirmed."""
    claimants: tuple[Claimant, ...] = ()
    """The other nodes that claim and have room."""
    dead: Collection[PeerId] = frozenset()
    """Who does not answer any more."""


class Stage(enum.Enum):
    """How far a claim is; see the module."""

    CHOSEN = enum.auto()
    SETTLING = enum.auto()
    CONFIRMING = enum.auto()
    LATE = enum.auto()
    WON = enum.auto()


@dataclass(slots=True)
class _Held:
    stage: Stage
    since: float


@dataclass(slots=True)
class Actions:
    """What is to be done now."""

    claim: list[str] = field(default_factory=list)
    """Write a claim; then call `Claiming.wrote`."""
    confirm: list[str] = field(default_factory=list)
    """Write it again, as confirmed; then call `Claiming.wrote`."""
    take_up: list[str] = field(default_factory=list)
    """These are won: take them up; then call `Claiming.served` or `Claiming.failed`."""
    drop: dict[str, str] = field(default_factory=dict)
    """Take the claim back; why."""
    contest: dict[str, Listing] = field(default_factory=dict)
    """We serve it, and another node announces it."""


@dataclass(slots=True)
class ClaimTotals:
    """What has become of a node's claims since its start."""

    won: int = 0
    """Claims that were confirmed."""
    lost: int = 0
    """Claims that somebody else won."""
    failed: int = 0
    """Claims that could not be written, and experts that could not be taken up."""
    given_up: int = 0
    """Experts that were left to another node that served them too."""
    adopted: dict[str, int] = field(default_factory=dict)
    """Experts that were taken up, by what they began with: "checkpoint" or "seed"."""


class Claiming:
    """A claimer's state.

    Args:
      peer_id: who it is.
      uids: the experts that it may claim, at most `MAX_CLAIMABLE`.
      config: settings.
    """

    def __init__(self, peer_id: PeerId, uids: Collection[str], config: ClaimConfig) -> None:
        self.totals = ClaimTotals()
        self._peer_id = peer_id
        self._uids = frozenset(uids)
        self._config = config
        self._held: dict[str, _Held] = {}
        self._vacant_since: dict[str, float] = {}
        self._shunned: dict[str, float] = {}  # uid -> until when

    def room(self, served: Collection[str]) -> int:
        """How many further experts the node may claim, while it serves these."""
        claimed = self._uids.intersection(served) | self._held.keys()
        return max(0, self._config.max_experts - len(claimed))

    @property
    def held(self) -> Mapping[str, Stage]:
        """The claims that stand, each until its expert is served."""
        return {uid: held.stage for uid, held in self._held.items()}

    @property
    def is_unsettled(self) -> bool:
        """Whether it is still open of a claim who wins it."""
        return any(held.stage is not Stage.WON for held in self._held.values())

    def settles_at(self) -> float:
        """When the next claim has settled and is to be read; infinity: none waits."""
        waiting = (held.since for held in self._held.values() if held.stage in (Stage.SETTLING, Stage.LATE))
        return min(waiting, default=math.inf) + self._config.settle_s

    def step(self, view: View, served: Collection[str], *, is_warm: bool, now: float) -> Actions:
        """Decide by what was read.

        Args:
          served: the experts that the node serves, those that it is giving up too.
          is_warm: whether its programs are compiled.
        """
        actions = Actions()
        for uid, held in list(self._held.items()):
            if held.stage in (Stage.SETTLING, Stage.LATE) and view.read_at >= held.since + self._config.settle_s:
                self._judge(uid, held, view, actions)
        for uid in sorted(self._uids.intersection(served)):
            listing = view.listed.get(uid)
            if listing is not None and listing.contact.peer_id != self._peer_id and not _is_dead(listing, view):
                actions.contest[uid] = listing
        self._note_vacant(view, served, now)
        actions.claim = self._choose(view, served, is_warm=is_warm, now=now)
        for uid in actions.claim:
            self._held[uid] = _Held(Stage.CHOSEN, now)
        return actions

    def wrote(self, stands: Mapping[str, bool], now: float) -> list[str]:
        """Claims were written, or confirmed. Returns those that are won by it, to be taken up.

        Args:
          stands: by uid, whether the DHT has taken the record.
        """
        won = []
        for uid, is_stored in stands.items():
            held = self._held[uid]
            if not is_stored:
                del self._held[uid]
                self.totals.failed += 1
            elif held.stage is Stage.CHOSEN:
                self._held[uid] = _Held(Stage.SETTLING, now)
            elif now - held.since <= self._config.settle_s:
                self._win(uid)
                won.append(uid)
            else:
                self._held[uid] = _Held(Stage.LATE, now)
        return won

    def served(self, uid: str, origin: str) -> None:
        """A claimed expert was taken up and announced, beginning with this: its claim need not be renewed."""
        del self._held[uid]
        self.totals.adopted[origin] = self.totals.adopted.get(origin, 0) + 1

    def failed(self, uid: str, now: float) -> None:
        """A claimed expert could not be taken up: others may, and we do not try again for a while."""
        del self._held[uid]
        self._shunned[uid] = now + self._config.retry_s
        self.totals.failed += 1

    def _judge(self, uid: str, held: _Held, view: View, actions: Actions) -> None:
        why = self._why_lost(uid, held, view)
        if why is not None:
            del self._held[uid]
            self.totals.lost += 1
            actions.drop[uid] = why
        elif held.stage is Stage.SETTLING:
            self._held[uid] = _Held(Stage.CONFIRMING, view.read_at)
            actions.confirm.append(uid)
        else:
            self._win(uid)
            actions.take_up.append(uid)

    def _win(self, uid: str) -> None:
        self._held[uid].stage = Stage.WON
        self.totals.won += 1

    def _why_lost(self, uid: str, held: _Held, view: View) -> str | None:
        listing = view.listed.get(uid)
        if listing is not None and listing.contact.peer_id != self._peer_id and not _is_dead(listing, view):
            return f"{listing.contact.peer_id.short} serves it"
        claims = view.claims.get(uid, {})
        if self._peer_id not in claims:
            return "the claim has ended before it was read"
        rivals = {rival: confirmed for rival, confirmed in claims.items() if self._is_living_rival(rival, view)}
        if confirmed := [rival for rival, is_confirmed in rivals.items() if is_confirmed]:
            return f"{min(confirmed).short} has confirmed its claim"
        if held.stage is Stage.LATE:
            return None  # we have confirmed ours
        best = max([self._peer_id, *rivals], key=lambda peer_id: weight(peer_id, uid))
        return None if best == self._peer_id else f"{best.short} has the better claim"

    def _is_living_rival(self, peer_id: PeerId, view: View) -> bool:
        return peer_id != self._peer_id and peer_id not in view.dead

    def _note_vacant(self, view: View, served: Collection[str], now: float) -> None:
        self._shunned = {uid: until for uid, until in self._shunned.items() if until > now}
        before, self._vacant_since = self._vacant_since, {}
        for uid in self._uids.difference(served, self._held):
            if uid not in self._shunned and self._is_vacant(uid, view):
                self._vacant_since[uid] = before.get(uid, now)

    def _is_vacant(self, uid: str, view: View) -> bool:
        """Nobody serves or claims it. What we ourselves announced, in an earlier life, counts for nothing."""
        listing = view.listed.get(uid)
        if listing is not None and listing.contact.peer_id != self._peer_id and not _is_dead(listing, view):
            return False
        return not any(self._is_living_rival(rival, view) for rival in view.claims.get(uid, ()))

    def _choose(self, view: View, served: Collection[str], *, is_warm: bool, now: float) -> list[str]:
        """What to claim: what is ours of those that are vacant, and then what others have left lying."""
        room = min(self.room(served), self._config.max_at_once - len(self._held))
        if not self._vacant_since or room < 1 or self.is_unsettled:
            return []
        vacant = list(self._vacant_since)
        own = Claimant(peer_id=self._peer_id, room=room, is_warm=is_warm)
        claimants = [own, *(each for each in view.claimants if self._is_living_rival(each.peer_id, view))]
        sharing = those_who_share(claimants, len(vacant))
        dealt = dealt_out(vacant, sharing).get(self._peer_id, [])
        share = fair_share(len(vacant), len(sharing) + (own not in sharing))
        return [*dealt, *self._left_lying(set(dealt), now)][: min(room, share)]

    def _left_lying(self, dealt: Collection[str], now: float) -> Iterable[str]:
        """Vacant experts that nobody has claimed for some rounds: whoever they were dealt to does not take them."""
        patience_s = 3 * self._config.settle_s
        lying = [uid for uid, since in self._vacant_since.items() if now - since >= patience_s and uid not in dealt]
        return own_order(self._peer_id, lying)


def _is_dead(listing: Listing, view: View) -> bool:
    return listing.contact.peer_id in view.dead
