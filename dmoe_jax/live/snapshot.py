"""The state of a swarm, of what its members say of themselves. Pure.

Members are strangers. `dmoe_jax.directory.members` leaves malformed announcements out; the counters of nodes come here
as the network brought them. Each number that is kept is a number that a browser holds exactly, each text is short, and
of everything there is a bound.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dmoe_jax.directory.members import MAX_TEXT, Member
from dmoe_jax.live.events import State
from dmoe_net.identity import PeerId

MAX_PEERS = 5_000
"""Most peers on the page; of further ones only the number is told."""
MAX_EXPERTS = 2_000
"""Most experts of one node that are shown."""
MAX_GROUPS = 200
"""Most groups that are shown."""
MAX_NEWS = 20
"""Most lines of news."""

_KEY_DIGITS = 16
"""Hexadecimal digits of a peer id that make its key: short, and nobody finds a second peer with the same ones."""
_MOST_NUMBER = 2.0**53
"""Beyond it JavaScript's numbers lose digits."""
_UID = re.compile(r"[A-Za-z0-9_-]{1,64}(\.[0-9]{1,5}){1,16}")
_MOST_SEEN = 64
"""Characters of a group's peers that are named, about."""
_NAMED_PEERS = 3
"""Peers that news name one by one; of more that came or went at once they tell the number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """All that a swarm said at one moment."""

    time_s: float
    """Seconds since the watching began."""
    members: Sequence[Member]
    """Members, as `dmoe_jax.directory.members.list_members` finds them."""
    statuses: Mapping[PeerId, Mapping[str, Any]]
    """Counters of the nodes that answered, as the network brought them."""


def snapshot(now: Reading, before: Reading | None = None, news: Sequence[Any] = ()) -> State:
    """Return the state of a swarm.

    Args:
      now: the last reading.
      before: the one before, for rates and news; None: there are none yet.
      news: the news until then.
    """
    listed = now.members[:MAX_PEERS]
    then = {} if before is None else before.statuses
    peers = {_key(each): _peer(each, now.statuses.get(each.peer_id), then.get(each.peer_id)) for each in listed}
    fresh = [] if before is None else [[round(now.time_s, 3), text] for text in _news(before.members, now.members)]
    return {
        "totals": {"peers": len({each.peer_id for each in now.members}), **_totals(listed, peers)},
        "peers": peers,
        "groups": dict(islice(_groups(listed).items(), MAX_GROUPS)),
        "news": [*news, *fresh][-MAX_NEWS:],
    }


def number_untrusted(value: object) -> int | float | None:
    """Return a value that is a finite number that a browser holds, rounded to six digits; else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MOST_NUMBER:
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def growth_untrusted(before: Mapping[str, Any] | None, now: Mapping[str, Any], counter: str) -> float:
    """Return the growth of a node's counter per second of the node's own clock; 0 without two readings."""
    seconds = _between(before, now)
    values = [number_untrusted(each.get(counter)) for each in (before or {}, now)]
    if not seconds or values[0] is None or values[1] is None:
        return 0.0
    return max(0.0, (values[1] - values[0]) / seconds)


def num_devices_untrusted(status: Mapping[str, Any]) -> int:
    """Return the number of a node's devices, at least 1."""
    devices = status.get("devices")
    return max(1, len(devices)) if isinstance(devices, list | tuple) else 1


def mean_staleness_untrusted(statuses: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the mean staleness of the updates that nodes have made since they started; None before the first."""
    counted = [(number_untrusted(each.get("steps")), number_untrusted(each.get("staleness"))) for each in statuses]
    weighted = [(steps, mean) for steps, mean in counted if steps is not None and mean is not None]
    num_steps = sum(steps for steps, _ in weighted)
    return sum(steps * mean for steps, mean in weighted) / num_steps if num_steps > 0 else None


def _between(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> float:
    """Seconds between two readings of a node by its own clock; 0 if it was started anew, or is not known."""
    times = [number_untrusted(each.get("uptime_s")) for each in (before or {}, now)]
    return max(0.0, float(times[1] - times[0])) if times[0] is not None and times[1] is not None else 0.0


def _key(member: Member) -> str:
    """Key of a peer in one of its roles."""
    return f"{member.peer_id.raw.hex()[:_KEY_DIGITS]}/{member.role}"


def _peer(member: Member, now: Mapping[str, Any] | None, before: Mapping[str, Any] | None) -> dict[str, Any]:
    named = {name: value for name, value in member.info.items() if name not in ("role", "state", "grids")}
    facts = {name: fact for name, value in named.items() if (fact := _fact(value)) is not None}
    state = str(member.info.get("state", ""))[:MAX_TEXT]
    known: dict[str, Any] = {"role": member.role, "name": member.peer_id.short}
    if member.contact is not None:
        known["address"] = str(member.contact.address)[: 4 * MAX_TEXT]
    if member.role == "node":
        if now is None:
            state = "no answer" if state == "serving" else state
        else:
            facts |= _node_facts_untrusted(now, before)
            known["experts"] = _experts_untrusted(now, before)
    return known | {"state": state, "facts": facts}


def _fact(value: object) -> str | int | float | None:
    return value[:MAX_TEXT] if isinstance(value, str) else number_untrusted(value)


def _node_facts_untrusted(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, int | float]:
    calls = growth_untrusted(before, now, "forward") + growth_untrusted(before, now, "backward")
    busy = min(1.0, growth_untrusted(before, now, "busy_s") / num_devices_untrusted(now))
    told = {name: number_untrusted(now.get(name)) for name in ("waiting_rows", "steps", "staleness", "uptime_s")}
    facts: dict[str, int | float] = {"calls_per_s": float(f"{calls:.4g}"), "busy": float(f"{busy:.3g}")}
    return facts | {name: value for name, value in told.items() if value is not None}


def _experts_untrusted(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, list[int | float]]:
    """Updates of each expert of a node, and updates per second since the reading before."""
    updates, then, seconds = now.get("updates"), (before or {}).get("updates"), _between(before, now)
    found: dict[str, list[int | float]] = {}
    for uid, value in islice(updates.items(), MAX_EXPERTS) if isinstance(updates, dict) else ():
        count = number_untrusted(value)
        if not isinstance(uid, str) or not _UID.fullmatch(uid) or count is None:
            continue
        old = number_untrusted(then.get(uid)) if isinstance(then, dict) else None
        per_s = 0.0 if old is None or not seconds else max(0.0, (count - old) / seconds)
        found[uid] = [count, float(f"{per_s:.3g}")]
    return found


def _totals(members: Sequence[Member], peers: Mapping[str, Mapping[str, Any]]) -> dict[str, int | float]:
    """Figures of the whole swarm; those that nobody tells are left out."""
    facts: dict[str, list[Mapping[str, Any]]] = {"node": [], "trainer": [], "collaborator": []}
    for peer in peers.values():
        facts.setdefault(peer["role"], []).append(peer["facts"])
    nodes, trainers = facts["node"], facts["trainer"]
    # One peer in several roles tells its bytes in each.
    by_peer = {each.peer_id: peers[_key(each)]["facts"] for each in members}
    found: dict[str, int | float | None] = {
        "nodes": len(nodes),
        "trainers": len(trainers),
        "experts": len({uid for peer in peers.values() for uid in peer.get("experts", ())}),
        "step": max(_told([*trainers, *facts["collaborator"]], "step"), default=None),
        "loss": _mean(_told(trainers, "loss")),
        "items_per_s": _sum(_told(trainers, "items_per_s")),
        "failed_calls": _sum(_told(trainers, "failed_calls")),
        "calls_per_s": _sum(_told(nodes, "calls_per_s")),
        "waiting_rows": _sum(_told(nodes, "waiting_rows")),
        "staleness": mean_staleness_untrusted(nodes),
        "sent_mb": _sum(_told(by_peer.values(), "sent_mb")),
    }
    return {name: value for name, told in found.items() if (value := number_untrusted(told)) is not None}


def _told(facts: Iterable[Mapping[str, Any]], name: str) -> list[int | float]:
    """Numbers that peers tell under a name."""
    return [each[name] for each in facts if isinstance(each.get(name), int | float)]


def _sum(values: Sequence[int | float]) -> int | float | None:
    return sum(values) if values else None


def _mean(values: Sequence[int | float]) -> float | None:
    return sum(values) / len(values) if values else None


def _groups(members: Sequence[Member]) -> dict[str, dict[str, Any]]:
    """Groups by key: peers whose last average was the same one, and collaborations by name."""
    found: dict[str, dict[str, Any]] = {}
    for member in members:
        facts = {name: fact for name, value in member.info.items() if (fact := _fact(value)) is not None}
        told = ["averages"]
        if member.role == "collaborator":
            key, told = (
                f"collaboration {facts.get('group', '')}",
                ["step", "gathered", "target", "samples_per_s", "peers"],
            )
        elif facts.get("met"):
            key = f"group {facts['met']}"
        else:
            continue
        group = found.setdefault(key, {"peers": facts.get("met_peers", 0), "seen": ""})
        group |= {name: facts[name] for name in told if name in facts}
        if len(group["seen"]) < _MOST_SEEN:
            group["seen"] = f"{group['seen']} {member.peer_id.short}".lstrip()
    return found


def _news(before: Sequence[Member], now: Sequence[Member]) -> list[str]:
    """Sentences on the peers that came, and that went."""
    news = []
    for verb, here, there in (("joined", now, before), ("left", before, now)):
        known = {(each.peer_id, each.role) for each in there}
        moved = [each for each in here if (each.peer_id, each.role) not in known]
        if len(moved) <= _NAMED_PEERS:
            news += [f"{each.role} {each.peer_id.short} {verb}" for each in moved]
        else:
            counts = Counter(each.role for each in moved)
            news.append(f"{', '.join(f'{count} {role}s' for role, count in counts.items())} {verb}")
    return news
