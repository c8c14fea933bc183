"""The decisions of a claimer: what to claim, to confirm, to take up, to drop, and about what to ask other holders.

A claim's life:

    CHOSEN ── written ──► SETTLING ── read, nobody better ──► CONFIRMING ── written ──► WON ── served
                             │                                     │ written late ──► LATE ── read ──► WON
                             └── somebody better, or it is gone: dropped ◄──────────────┘

`dmoe_jax.placement` says why no more claimers win than an expert has places. Everything here is pure; `now` and all
times are in seconds of one clock.
"""

import enum
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from dmoe_jax.placement.config import PlacementConfig
from dmoe_jax.placement.sharing import Claimant, dealt_out, fair_share, those_who_share, weight
from dmoe_net.identity import Contact, PeerId

MAX_CLAIMABLE = 65_536
"""Most experts that the patterns of one claimer may stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Holders, claims and other nodes, as a claimer has read and found them."""

    read_at: float
    """Time at which the reading of claims, and of the holders of experts with a claim of ours, began."""
    holders: Mapping[str, Mapping[PeerId, Contact]]
    """The nodes that announce each expert."""
    claims: Mapping[str, Mapping[PeerId, bool]]
    """The claims for each expert: claimer -> True if it is confirmed."""
    claimants: tuple[Claimant, ...] = ()
    """The other nodes that claim and have room."""
    dead: Collection[PeerId] = frozenset()
    """Nodes that do not answer any more."""


class Stage(enum.Enum):
    """Stage of a claim; see the module."""

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
    """Actions to carry out now."""

    claim: list[str] = field(default_factory=list)
    """Write a claim; then call `Claiming.wrote`."""
    confirm: list[str] = field(default_factory=list)
    """Write it again, as confirmed; then call `Claiming.wrote`."""
    take_up: list[str] = field(default_factory=list)
    """These are won: take them up; then call `Claiming.served` or `Claiming.failed`."""
    drop: dict[str, str] = field(default_factory=dict)
    """Take the claim back; why."""
    contest: dict[str, tuple[Contact, ...]] = field(default_factory=dict)
    """Experts of ours that more nodes serve than are wanted, with the others that do."""


@dataclass(slots=True)
class ClaimTotals:
    """Outcomes of a node's claims since its start, counted."""

    won: int = 0
    """Claims that were confirmed."""
    lost: int = 0
    """Claims that somebody else won."""
    failed: int = 0
    """Claims that could not be written, and experts that could not be taken up."""
    given_up: int = 0
    """Experts that were left to another node that served them too."""
    adopted: dict[str, int] = field(default_factory=dict)
    """Experts that were taken up, by what they began with: "replica", "checkpoint" or "seed"."""


class Claiming:
    """State of a claimer; `uids` are the experts that it may claim."""

    def __init__(self, peer_id: PeerId, uids: Collection[str], config: PlacementConfig) -> None:
        self.totals = ClaimTotals()
        self._peer_id = peer_id
        self._uids = frozenset(uids)
        self._config = config
        self._held: dict[str, _Held] = {}
        self._vacant_since: dict[str, float] = {}  # of the vacant experts that are not served here
        self._shunned: dict[str, float] = {}  # uid -> until when

    def room(self, served: Collection[str]) -> int:
        """Number of further experts that the node may claim, while it serves these."""
        claimed = self._uids.intersection(served) | self._held.keys()
        return max(0, self._config.max_experts - len(claimed))

    @property
    def held(self) -> Mapping[str, Stage]:
        """The claims that stand, each until its expert is served."""
        return {uid: held.stage for uid, held in self._held.items()}

    def settles_at(self) -> float:
        """When the next claim has settled and is to be read; infinity: none waits."""
        waiting = (held.since for held in self._held.values() if held.stage in (Stage.SETTLING, Stage.LATE))
        return min(waiting, default=math.inf) + self._config.settle_s

    def step(self, view: View, served: Collection[str], *, is_warm: bool, now: float) -> Actions:
        """Decide by what was read.

        Args:
          served: the experts that the node serves, those that it is giving up too.
        """
        actions = Actions()
        for uid, held in list(self._held.items()):
            if held.stage in (Stage.SETTLING, Stage.LATE) and view.read_at >= held.since + self._config.settle_s:
                self._judge(uid, held, view, actions)
        for uid in sorted(self._uids.intersection(served)):
            if len(others := self._other_holders(uid, view)) >= self._config.replicas:
                actions.contest[uid] = tuple(others.values())
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

    def gave_up(self, uid: str, now: float) -> None:
        """An expert was left to others, who have promised to keep it; their announcements may not reach us yet."""
        self._shunned[uid] = now + self._config.claim_life_s
        self.totals.given_up += 1

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
        holders = self._other_holders(uid, view)
        if len(holders) >= self._config.replicas:
            return f"it is served by {' and '.join(sorted(peer_id.short for peer_id in holders))}"
        if self._peer_id not in view.claims.get(uid, {}):
            return "the claim has ended before it was read"
        rivals = self._rivals(uid, view, holders)
        if confirmed := [rival for rival, is_confirmed in rivals.items() if is_confirmed]:
            return f"{min(confirmed).short} has confirmed its claim"
        if held.stage is Stage.LATE:
            return None  # we have confirmed ours
        best = max([self._peer_id, *rivals], key=lambda peer_id: weight(peer_id, uid))
        return None if best == self._peer_id else f"{best.short} has the better claim"

    def _other_holders(self, uid: str, view: View) -> dict[PeerId, Contact]:
        """The other living nodes that serve an expert: what we announced in an earlier life counts for nothing."""
        return {
            peer_id: contact
            for peer_id, contact in view.holders.get(uid, {}).items()
            if peer_id != self._peer_id and peer_id not in view.dead
        }

    def _rivals(self, uid: str, view: View, holders: Collection[PeerId]) -> dict[PeerId, bool]:
        """The other living nodes that claim an expert and do not serve it yet; True for a confirmed claim."""
        return {
            peer_id: is_confirmed
            for peer_id, is_confirmed in view.claims.get(uid, {}).items()
            if peer_id != self._peer_id and peer_id not in holders and peer_id not in view.dead
        }

    def _vacant(self, view: View, served: Collection[str]) -> dict[str, Collection[PeerId]]:
        """The experts that fewer nodes serve than are wanted and that nobody claims, with those who serve them."""
        vacant: dict[str, Collection[PeerId]] = {}
        for uid in self._uids.difference(self._held, self._shunned):
            holders = {*self._other_holders(uid, view), *([self._peer_id] if uid in served else [])}
            if len(holders) < self._config.replicas and not self._rivals(uid, view, holders):
                vacant[uid] = holders
        return vacant

    def _choose(self, view: View, served: Collection[str], *, is_warm: bool, now: float) -> list[str]:
        """Experts to claim: first the vacant ones that are dealt to us, then those that others have left lying."""
        self._shunned = {uid: until for uid, until in self._shunned.items() if until > now}
        vacant = self._vacant(view, served)
        self._vacant_since = {uid: self._vacant_since.get(uid, now) for uid in vacant if uid not in served}
        room = min(self.room(served), self._config.max_at_once - len(self._held))
        is_settled = all(held.stage is Stage.WON for held in self._held.values())
        if not vacant or room < 1 or not is_settled:
            return []
        own = Claimant(peer_id=self._peer_id, room=room, is_warm=is_warm)
        claimants = [own, *(each for each in view.claimants if each.peer_id not in view.dead)]
        sharing = those_who_share(claimants, len(vacant))
        dealt = dealt_out(vacant, sharing).get(self._peer_id, [])
        share = fair_share(len(vacant), len(sharing) + (own not in sharing))
        return [*dealt, *self._left_lying(set(dealt), now)][: min(room, share)]

    def _left_lying(self, dealt: Collection[str], now: float) -> Iterable[str]:
        """Vacant experts that nobody has claimed for some rounds: whoever they were dealt to does not take them. Those
        of our strongest claims come first."""
        patience_s = 3 * self._config.settle_s
        lying = [uid for uid, since in self._vacant_since.items() if now - since >= patience_s and uid not in dealt]
        return sorted(lying, key=lambda uid: (weight(self._peer_id, uid), uid), reverse=True)
