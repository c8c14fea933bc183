"""Division of the vacant experts among claimers: a fair share each, and as few collisions as may be.

Rendezvous hashing (Thaler and Ravishankar, 1998): a claimer's weight for an expert is a hash of both names. Every
claimer computes the same table from what it has read, and takes what the table gives to itself; so those that see the
same choose without a word different experts.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dmoe_net.identity import PeerId

MAX_PAIRS = 100_000
"""Most pairs of a claimer and a vacant expert that are looked at in one round: a tenth of a second. Of more experts
only some are dealt out, the same ones by everybody, and the others in the next round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """A node that takes experts up."""

    peer_id: PeerId
    room: int
    """Number of further experts that it may take up."""
    is_warm: bool
    """True if its programs are compiled, so that it can serve at once."""


def weight(peer_id: PeerId, uid: str) -> tuple[int, bytes]:
    """Strength of a peer's claim for an expert; no two peers have the same."""
    return int.from_bytes(hashlib.blake2b(peer_id.raw + uid.encode(), digest_size=8).digest(), "big"), peer_id.raw


def fair_share(num_vacant: int, num_claimants: int) -> int:
    """Most experts that one of so many claimants takes in a round: ceil(num_vacant / num_claimants)."""
    return -(-num_vacant // num_claimants)


def those_who_share(claimants: Sequence[Claimant], num_vacant: int) -> list[Claimant]:
    """Claimants that take part: those that can serve at once, if they have room for all; else all that have room."""
    with_room = [each for each in claimants if each.room > 0]
    warm = [each for each in with_room if each.is_warm]
    return warm if sum(each.room for each in warm) >= num_vacant else with_room


def dealt_out(vacant: Mapping[str, Collection[PeerId]], claimants: Sequence[Claimant]) -> dict[PeerId, list[str]]:
    """The vacant experts of each claimant, the strongest claims first; the order of the arguments does not matter.

    Nobody gets more than its room, nor more than its fair share, nor what it serves already. What is left over waits
    for the next round.

    Args:
      vacant: who serves each of the vacant experts.
    """
    uids = sorted(vacant)
    if not uids or not claimants:
        return {each.peer_id: [] for each in claimants}
    share = fair_share(len(uids), len(claimants))
    if len(uids) * len(claimants) > MAX_PAIRS:
        # In an order that all share and that favours no part of the grid.
        uids.sort(key=lambda uid: hashlib.blake2b(uid.encode()).digest())
        uids = uids[: max(1, MAX_PAIRS // len(claimants))]
    pairs = [
        (weight(each.peer_id, uid), uid, each) for each in claimants for uid in uids if each.peer_id not in vacant[uid]
    ]
    dealt: dict[PeerId, list[str]] = {each.peer_id: [] for each in claimants}
    taken: set[str] = set()
    for _, uid, each in sorted(pairs, reverse=True, key=lambda pair: pair[:2]):
        hand = dealt[each.peer_id]
        if uid not in taken and len(hand) < min(share, each.room):
            hand.append(uid)
            taken.add(uid)
    return dealt
