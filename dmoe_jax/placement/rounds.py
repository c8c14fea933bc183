"""Choice of experts and partners for a round of averages, so that all nodes come to the same without a word.

Rounds are numbered: round n begins when the swarm's time is n periods. Everybody reads in the DHT who serves its
experts, and cuts them, in the order of their names, into *bundles*: as many experts of the same nodes as fit into
`MAX_BUNDLE_SIZE` numbers, or one that is larger. A bundle is one vector and one all-reduce, one after the other, which
bounds the memory. Its group id follows from the round, the nodes, the experts and their shapes; so those who have seen
something else do not average with each other, and that is all that happens.

In the vector each expert has its numbers times its weight, and then its weight: the mean of the first over the mean of
the last is the weighted mean of the copies, each expert with weights of its own.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dmoe_net.averaging.grouping.group import GROUP_ID_BYTES, Group, Member
from dmoe_net.identity import Contact, PeerId
from dmoe_net.types import Array

MAX_BUNDLE_SIZE = 2**22
"""Numbers of a bundle with more than one expert: 16 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Experts that the same nodes serve, averaged together."""

    uids: tuple[str, ...]
    """In the order of names."""
    members: tuple[Contact, ...]
    """All nodes that take part, this one included, in the order of peer ids."""


def next_round(now: float, period_s: float) -> tuple[int, float]:
    """(number of the first round that begins after `now`, swarm time at which it does)."""
    number = math.floor(now / period_s) + 1
    return number, number * period_s


def bundles_of(
    members: Mapping[str, frozenset[Contact]], sizes: Mapping[str, int], *, max_size: int = MAX_BUNDLE_SIZE
) -> list[Bundle]:
    """The bundles of a round, in the order in which they are averaged: the same at all who see the same.

    Args:
      members: who serves each expert and takes part, this node included; those that it serves alone are left out.
      sizes: numbers of each expert.
    """
    open_bundles: dict[frozenset[PeerId], tuple[list[str], int]] = {}
    bundles: list[list[str]] = []
    for uid in sorted(uid for uid, contacts in members.items() if len(contacts) > 1):
        nodes = frozenset(contact.peer_id for contact in members[uid])
        uids, filled = open_bundles.get(nodes, ([], 0))
        if not uids or filled + sizes[uid] > max_size:
            uids, filled = [], 0
            bundles.append(uids)
        uids.append(uid)
        open_bundles[nodes] = uids, filled + sizes[uid]
    by_peer_id = {uid: tuple(sorted(contacts, key=lambda each: each.peer_id)) for uid, contacts in members.items()}
    return [Bundle(uids=tuple(uids), members=by_peer_id[uids[0]]) for uids in bundles]


def group_of(bundle: Bundle, *, swarm: str, round_number: int, schemas: Sequence[str]) -> Group:
    """The group that averages a bundle.

    Args:
      schemas: what the numbers of each of its experts mean.
    """
    said = [swarm, str(round_number), *(str(each.peer_id) for each in bundle.members), *bundle.uids, *schemas]
    group_id = hashlib.blake2b("\0".join(said).encode(), digest_size=GROUP_ID_BYTES).digest()
    members = tuple(
        Member(peer_id=each.peer_id, address=each.address, wanted_slot=place)
        for place, each in enumerate(bundle.members)
    )
    return Group(group_id=group_id, members=members, side=len(members))


def weighted(vectors: Sequence[Array], weights: Sequence[float]) -> Array:
    """One vector of the copies of several experts, float32 [their numbers and one more each].

    A copy that is not finite counts nothing: the others of its bundle need not suffer from it.
    """
    parts = []
    for vector, weight in zip(vectors, weights, strict=True):
        is_sound = bool(np.isfinite(vector).all())
        counted = np.float32(weight if is_sound else 0.0)
        parts += [vector * counted if is_sound else np.zeros_like(vector), np.full(1, counted)]
    return np.concatenate(parts)


def unweighted(average: Array, sizes: Sequence[int]) -> list[Array | None]:
    """The weighted mean of each expert's copies; None where no copy counted."""
    means: list[Array | None] = []
    start = 0
    for size in sizes:
        total = average[start + size]
        means.append(average[start : start + size] / total if total > 0 else None)
        start += size + 1
    return means
