"""One all-reduce of a replica's processes: each of its own piece, in the same group of replicas.

The leader tells its processes the group that it has found; each averages its piece with the same process of the other
replicas; then all know what became of every piece.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dmoe_net.averaging.grouping.group import MAX_GROUP_SIZE, Group
from dmoe_net.averaging.grouping.join_messages import group_body, parse_group_untrusted
from dmoe_net.averaging.reduction.all_reduce import AllReduceResult
from dmoe_net.averaging.replica import Replica
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import PeerId
from dmoe_net.wire.fields import FLAG, MAPPING, Field, integer, octets, optional, real, row_untrusted, rows, several

_PLACES = several(integer(0, MAX_GROUP_SIZE - 1), MAX_GROUP_SIZE)
_SUMMARY: dict[str, Field[Any]] = {
    "received": integer(0, 2**62),
    "size": integer(0, 2**62),
    "lost_reducers": _PLACES,
    "lost_senders": _PLACES,
    "complete": FLAG,
    "weight": optional(real(0.0)),
    "digest": octets(0, 64),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A group that the leader has found."""

    group: Group
    """Its members are the leaders of replicas."""
    part: Group | None
    """The same, of the processes that average this one's piece; None: a member does not say which they are."""
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of all pieces; peers are leaders."""

    received: float
    """Share of the replica's numbers that holds an average."""
    lost_reducers: tuple[PeerId, ...]
    lost_senders: tuple[PeerId, ...]
    complete: bool
    weight: float | None
    digests: tuple[bytes, ...]


async def tell_group(replica: Replica, mark: str, group: Group, timeout_s: float) -> Told:
    """As the leader: tell the other processes of a group."""
    parts = await replica.parts_of(group)
    await replica.decided(
        mark, {"group": group_body(group), "side": group.side, "parts": parts, "timeout_s": float(timeout_s)}
    )
    return Told(group=group, part=None if parts is None else group, timeout_s=timeout_s)


async def tell_over(replica: Replica, mark: str, **facts: Any) -> None:
    """As the leader: tell the other processes that no further group comes."""
    await replica.decided(mark, {"over": facts})
    replica.forget(mark)


async def hear(replica: Replica, mark: str) -> Told | Mapping[str, Any]:
    """As another process: wait for the next group; when there is none, the facts of `tell_over`."""
    told = MAPPING.read_untrusted(await replica.decided(mark), "what the leader tells")
    if "over" in told:
        replica.forget(mark)
        return MAPPING.of_untrusted(told, "over")
    group = parse_group_untrusted(MAPPING.of_untrusted(told, "group"), integer(1, 2**31).of_untrusted(told, "side"))
    parts = optional(rows(MAX_GROUP_SIZE)).of_untrusted(told, "parts")
    timeout_s = real().of_untrusted(told, "timeout_s")
    contacts = rows(replica.size)
    part = (
        None if parts is None else replica.part_of(group, [contacts.read_untrusted(each, "a part") for each in parts])
    )
    return Told(group=group, part=part, timeout_s=timeout_s)


async def outcome_of(
    replica: Replica, mark: str, told: Told, result: AllReduceResult | None, *, digest: bytes = b""
) -> Outcome:
    """Return the outcome of all pieces, the same in all processes.

    Args:
      result: of this process's piece; None: it has no numbers, or nobody to average them with.
      digest: of its average.
    """
    part = told.part
    if result is None or part is None:
        summary: list[Any] = [0, 0, [], [], part is not None, None, digest]
    else:
        size = result.average.size

        def places(peers: Iterable[PeerId]) -> list[int]:
            return [part.index(peer) for peer in peers]

        lost = places(result.lost_reducers), places(result.lost_senders)
        weight = None if result.weight is None else float(result.weight)
        summary = [round(result.received * size), size, *lost, result.complete, weight, digest]
    told_all = [row_untrusted(each, "a summary", **_SUMMARY) for each in await replica.agree(mark, summary)]
    received, sizes, reducers, senders, complete, weights, digests = zip(*told_all, strict=True)
    known = {weight for weight, size in zip(weights, sizes, strict=True) if size}
    is_complete = all(complete) and len(known) <= 1 and None not in known
    return Outcome(
        received=sum(received) / max(1, sum(sizes)),
        lost_reducers=_peers(told.group, reducers),
        lost_senders=_peers(told.group, senders),
        complete=is_complete,
        weight=next(iter(known)) if is_complete and known else None,
        digests=digests,
    )


def _peers(group: Group, places: Iterable[Collection[int]]) -> tuple[PeerId, ...]:
    found = dict.fromkeys(place for each in places for place in each)
    if max(found, default=0) >= len(group.members):
        raise RemoteProtocolError(f"a group of {len(group.members)} has no member {max(found)}")
    return tuple(group.members[place].peer_id for place in found)
