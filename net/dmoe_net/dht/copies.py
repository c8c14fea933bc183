"""The peers that held a copy of a record when this node last walked to it, so that it need not walk again.

Two mistakes are easy here, and each loses living experts. Remember who *had* a copy, not who was nearest: a peer that
came later is nearer and has nothing. And a writer has to learn of peers that came since its walk: therefore each answer
to a store names the nearest peers that the holder knows.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dmoe_net.dht.routing_table import NodeId, node_id
from dmoe_net.identity import Contact, PeerId

MAX_RECORDS = 4096
"""Most records of which holders are remembered; the least recently used go first."""


class Position(NamedTuple):
    """Last of a holder's changes that a reader has seen."""

    epoch: int
    """Names the holder's counting."""
    change: int
    """Number of the last change seen."""


@dataclass(slots=True, kw_only=True)
class _Known:
    holders: tuple[Contact, ...] = ()
    until: float = 0.0
    turn: int = 0
    positions: dict[PeerId, Position] = field(default_factory=dict)


class Copies:
    """Holders by key id, each for `life_s` after the walk that found them. `now` is in seconds on any one clock."""

    def __init__(self, *, life_s: float) -> None:
        self._life_s = life_s
        self._known: OrderedDict[NodeId, _Known] = OrderedDict()

    def holders(self, key: NodeId, now: float) -> tuple[Contact, ...]:
        """The remembered holders, nearest first; none once the walk is too long ago."""
        known = self._known.get(key)
        return known.holders if known is not None and now < known.until else ()

    def next_holder(self, key: NodeId) -> Contact:
        """The holder to read from now: each in turn. IndexError if none is remembered."""
        known = self._known[key]
        known.turn += 1
        return known.holders[(known.turn - 1) % len(known.holders)]

    def position(self, key: NodeId, peer_id: PeerId) -> Position | None:
        """Position of the last change seen in a peer's copy of a record; None if none was seen."""
        known = self._known.get(key)
        return None if known is None else known.positions.get(peer_id)

    def walked(self, key: NodeId, holders: Iterable[Contact], now: float) -> None:
        """Remember the holders that a walk has found, none if there were none."""
        known = self._touch(key)
        known.holders, known.until = nearest(holders, key), now + self._life_s
        kept = {contact.peer_id for contact in known.holders}
        known.positions = {peer: position for peer, position in known.positions.items() if peer in kept}

    def changed(self, key: NodeId, holders: Iterable[Contact]) -> None:
        """Put others in the place of the holders, without a walk: they are remembered no longer than before."""
        self._touch(key).holders = nearest(holders, key)

    def read(self, key: NodeId, peer_id: PeerId, position: Position) -> None:
        """Note what has been seen of a peer's changes."""
        self._touch(key).positions[peer_id] = position

    def forget(self, key: NodeId) -> None:
        """Walk again the next time."""
        if (known := self._known.get(key)) is not None:
            known.holders = ()

    def _touch(self, key: NodeId) -> _Known:
        known = self._known.setdefault(key, _Known())
        self._known.move_to_end(key)
        if len(self._known) > MAX_RECORDS:
            self._known.popitem(last=False)
        return known


def nearest(contacts: Iterable[Contact], key: NodeId, count: int | None = None) -> tuple[Contact, ...]:
    """Contacts by their distance to a key, each peer once, at most `count`."""
    by_peer = {contact.peer_id: contact for contact in contacts}
    ordered: Sequence[Contact] = sorted(by_peer.values(), key=lambda contact: node_id(contact.peer_id) ^ key)
    return tuple(ordered[:count])
