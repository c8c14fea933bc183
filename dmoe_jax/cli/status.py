"""`dmoe status`: the members of a swarm, and their figures."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import trio
import tyro
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from dmoe_jax.cli.checks import check_positive
from dmoe_jax.cli.lifecycle import Stop, run_until_done
from dmoe_jax.cli.network import JoinTexts, MemberOptions, join_swarm
from dmoe_jax.cli.sources import ConfigFile
from dmoe_jax.directory.members import ROLES, Member, list_members, node_statuses
from dmoe_jax.live.snapshot import growth_untrusted, mean_staleness_untrusted, num_devices_untrusted
from dmoe_jax.peers.peer import SwarmPeer
from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.speech import say, why_unheard
from dmoe_net.identity import PeerId
from dmoe_net.wire.versions import CALLS, versions_differ

_TABLES = {
    "trainer": (
        "trainers",
        ("step", "loss", "items_per_s", "failed_calls", "load_entropy", "bias_range", "state"),
        ("step", "loss", "items/s", "failed calls", "balance", "bias", "state"),
    ),
    "averager": ("averagers", ("group", "averages"), ("group", "averages")),
    "auxiliary": (
        "auxiliaries",
        ("group", "averages", "moved_mb", "state"),
        ("group", "averages", "MB each way", "state"),
    ),
    "collaborator": (
        "collaborations, as each of their peers sees them",
        ("group", "step", "gathered", "target", "samples_per_s", "peers", "averaged_s"),
        ("group", "step", "gathered", "of", "samples/s", "peers", "averaged in s"),
    ),
}
"""Role -> title, facts and columns of its table. The entropy of a load is 1 where all experts share it alike; the bias
is of a balanced router."""

_ORIGINS = ("replica", "checkpoint", "seed")
"""Beginnings of claimed experts."""

_ONCE_INTERVAL_S = 0.5
"""Seconds between the two readings of `--once`: rates need two, and this shows whether anything moves."""


Statuses = Mapping[PeerId, Mapping[str, Any]]
"""Counters of the nodes that answered; see `node_statuses`."""


@dataclass(frozen=True, kw_only=True)
class StatusCommand:
    """Show who takes part in a swarm: nodes (those that still compile, too), trainers, averagers and auxiliary peers.

    Refreshes until interrupted.
    """

    join: JoinTexts
    """Peers to join through: HOST:PORT, PEERID@HOST:PORT to make sure who is there, or file:PATH, which lists some."""
    network: Annotated[MemberOptions, tyro.conf.arg(name="")] = field(default_factory=MemberOptions)
    interval_s: float = 2.0
    """Seconds between refreshes."""
    once: bool = False
    """Print one table of each kind and end."""
    config: ConfigFile = None
    json: bool = False
    """Print one JSON object instead of tables and end."""

    def run(self) -> int:
        return run_until_done(self._show)

    async def _show(self, stop: Stop) -> int:
        del stop  # nothing to take back: a client leaves no trace
        if not self.join:
            raise UsageError("--join needs at least one HOST:PORT")
        check_positive(self, "interval_s")
        async with join_swarm(self.network, join=self.join) as peer:
            name = self.network.swarm
            members, statuses = await read_members(peer, name)
            if self.json:
                say(json.dumps({"swarm": name, **_as_json(members, statuses)}))
                return 0

            def tables(before: Statuses) -> RenderableType:
                doubts = peer.dht.clock.doubts()
                return Group(status_tables(name, members, before, statuses), *([f"Note: {doubts}"] if doubts else []))

            async def tables_after(seconds: float) -> RenderableType:
                nonlocal members, statuses
                await trio.sleep(seconds)
                before = statuses
                members, statuses = await read_members(peer, name)
                return tables(before)

            if self.once:
                Console().print(await tables_after(_ONCE_INTERVAL_S))
                return 0
            with Live(tables({}), auto_refresh=False) as live:
                while why_unheard() is None:  # nobody looks at what cannot be shown
                    live.update(await tables_after(self.interval_s), refresh=True)
        return 0


async def read_members(peer: SwarmPeer, swarm: str) -> tuple[tuple[Member, ...], Statuses]:
    """Every listed member, and the counters of those nodes that answer within two seconds."""
    members = await list_members(peer.dht, swarm)
    return members, await node_statuses(peer.rpc, members)


def status_tables(swarm: str, members: Sequence[Member], before: Statuses, now: Statuses) -> RenderableType:
    """Tables for each role that is there; rates come from the difference between two readings of the counters."""
    if not members:
        return (
            f"No node or trainer is listed under the name {swarm!r} yet. They may still be joining; or they were "
            "given another --swarm than this command."
        )
    nodes = [member for member in members if member.role == "node"]
    num_experts = sum(_num_experts(node, now.get(node.peer_id)) for node in nodes)
    title = f"swarm {swarm!r}: {len(nodes)} node{'' if len(nodes) == 1 else 's'}, {num_experts} experts"
    if (mean := mean_staleness_untrusted(now.values())) is not None:
        title += f", mean staleness {mean:.1f}"
    rows = [_node_row(node, before.get(node.peer_id), now.get(node.peer_id)) for node in nodes]
    tables = [_table(title, ("node", "address", "experts", "calls/s", "queue", "busy", "updates", "state"), rows)]
    if rows := [_claims_row(node, claims) for node in nodes if (claims := _claims_of(now.get(node.peer_id)))]:
        of_claims = ("node", "may claim", "won", "lost", "failed", "given up", *_ORIGINS)
        tables.append(_table("claims, and what the experts that were taken up began with", of_claims, rows))
    if replicating := [node for node in nodes if "averages" in node.info]:
        rows = [_replica_row(node, now.get(node.peer_id)) for node in replicating]
        of_replicas = ("node", "address", "averages", "failed", "state")
        tables.append(_table("nodes that share experts with others", of_replicas, rows))
    for role, (name, facts, columns) in _TABLES.items():
        if rows := [_row(member, *facts) for member in members if member.role == role]:
            tables.append(_table(name, (role, "address", *columns), rows))
    others = (each for each in members if each.calls != CALLS)
    told = (f"{each.peer_id.short} {versions_differ('calls and records', each.calls, CALLS)}" for each in others)
    return Group(*tables, *told)


def _node_row(node: Member, before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> list[str]:
    """Counters of a node; the state of one that serves is its time up."""
    listed = str(node.info.get("state", ""))
    start = [*_row(node), str(_num_experts(node, now))]
    if now is None:  # as long as a node compiles it may have no counters
        return [*start, "", "", "", "", "no answer" if listed == "serving" else listed]
    state = str(now.get("state", listed))
    calls = growth_untrusted(before, now, "forward") + growth_untrusted(before, now, "backward")
    return [
        *start,
        f"{calls:.1f}",
        str(now.get("waiting_rows", "?")),
        # A batch counts when it is done: one that began before the first reading may be longer than the interval.
        f"{100 * min(1.0, growth_untrusted(before, now, 'busy_s') / num_devices_untrusted(now)):.0f} %",
        str(sum(now.get("updates", {}).values())),
        f"up {now.get('uptime_s', 0):.0f} s" if state == "serving" else state,
    ]


def _claims_of(status: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A node's word on its claims; nothing if it claims nothing."""
    claims = (status or {}).get("claims")
    return claims if isinstance(claims, Mapping) else {}


def _claims_row(node: Member, claims: Mapping[str, Any]) -> list[str]:
    adopted = claims.get("adopted")
    origins = adopted if isinstance(adopted, Mapping) else {}
    counts = [claims.get(name, "?") for name in ("room", "won", "lost", "failed", "given_up")]
    return [node.peer_id.short, *map(str, counts), *(str(origins.get(origin, 0)) for origin in _ORIGINS)]


def _replica_row(node: Member, status: Mapping[str, Any] | None) -> list[str]:
    """Averages as the node has announced them, and its reasons of averages that failed."""
    failed = ((status or {}).get("replicas") or {}).get("failed")
    reasons = failed if isinstance(failed, dict) else {}
    return [*_row(node, "averages", "averages_failed"), ", ".join(f"{why}: {n}" for why, n in reasons.items())]


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for column in columns:
        is_text = column in (*ROLES, "group", "address", "state")
        table.add_column(column, no_wrap=True, justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*row, style="red" if row[-1] == "no answer" else "")
    return table


def _row(member: Member, *facts: str) -> list[str]:
    """A member, its address, and these facts about it."""
    values = [member.info.get(name, "") for name in facts]
    texts = [f"{value:,.4g}" if isinstance(value, float) else str(value) for value in values]
    return [member.peer_id.short, "-" if member.contact is None else str(member.contact.address), *texts]


def _num_experts(node: Member, status: Mapping[str, Any] | None) -> int:
    listed = node.info.get("experts", 0)
    return len((status or {}).get("updates") or ()) or (listed if isinstance(listed, int) else 0)


def _as_json(members: Sequence[Member], statuses: Statuses) -> dict[str, list[dict[str, Any]]]:
    """Facts about the members, under the plural of each role."""
    plurals = {role: "auxiliaries" if role == "auxiliary" else f"{role}s" for role in ROLES}
    found: dict[str, list[dict[str, Any]]] = {plural: [] for plural in plurals.values()}
    for member in members:
        address = None if member.contact is None else str(member.contact.address)
        known: dict[str, Any] = {"peer_id": str(member.peer_id), "address": address, "info": dict(member.info)}
        if member.role == "node":
            known["status"] = statuses.get(member.peer_id)
        found[plurals[member.role]].append(known)
    return found
