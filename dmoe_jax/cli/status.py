"""`dmoe status`: who takes part in a swarm, and what they do."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import trio
import tyro
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from dmoe_jax.cli.common import UsageError, check_swarm_name
from dmoe_jax.cli.lifecycle import Stop, run_until_done
from dmoe_jax.cli.network import JoinTexts, NetworkOptions
from dmoe_jax.cli.swarm import join_swarm
from dmoe_jax.members import ROLES, Member, list_members
from dmoe_jax.peer import SwarmPeer
from net.errors import NetError
from net.identity import Contact

_STATUS_TIMEOUT_S = 2.0

_ONCE_INTERVAL_S = 0.5
"""Between the two readings of `--once`: rates need two, and this is enough to see whether anything moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One member at one time."""

    member: Member
    """What it says about itself in the DHT."""
    status: dict[str, Any] | None = None
    """A node's counters, asked for directly; None when it did not answer, and for members of other roles."""


@dataclass(frozen=True, kw_only=True)
class StatusCommand:
    """Show who takes part in a swarm: nodes (those that still compile, too), trainers and averagers.

    Refreshes until interrupted.
    """

    join: JoinTexts
    """Peers to join through, as HOST:PORT, or PEERID@HOST:PORT to make sure who is there."""
    network: Annotated[NetworkOptions, tyro.conf.arg(name="")] = field(default_factory=NetworkOptions)
    """Who this process is and which swarm it belongs to."""
    swarm: str = "dmoe"
    """Name under which the members are listed."""
    interval_s: float = 2.0
    """Seconds between refreshes."""
    once: bool = False
    """Print one table of each kind and end."""
    json: bool = False
    """Print one JSON object instead of tables and end."""

    def run(self) -> int:
        """Show the tables; the exit status."""
        return run_until_done(self._show)

    async def _show(self, stop: Stop) -> int:
        del stop  # nothing to take back: a client leaves no trace
        if not self.join:
            raise UsageError("--join needs at least one HOST:PORT")
        if not self.interval_s > 0:
            raise UsageError(f"--interval-s must be positive, got {self.interval_s}")
        check_swarm_name(self.swarm)
        async with join_swarm(self.network, join=self.join) as peer:
            readings = await read_members(peer, self.swarm)
            if self.json:
                print(json.dumps({"swarm": self.swarm, **_as_json(readings)}))
                return 0
            await self._show_tables(peer, readings)
        return 0

    async def _show_tables(self, peer: SwarmPeer, readings: list[Reading]) -> None:
        if self.once:
            await trio.sleep(_ONCE_INTERVAL_S)
            Console().print(status_tables(self.swarm, readings, await read_members(peer, self.swarm)))
            return
        with Live(status_tables(self.swarm, readings, readings), auto_refresh=False) as live:
            while True:
                await trio.sleep(self.interval_s)
                previous, readings = readings, await read_members(peer, self.swarm)
                live.update(status_tables(self.swarm, previous, readings), refresh=True)


async def read_members(peer: SwarmPeer, swarm: str) -> list[Reading]:
    """Every listed member. Nodes are asked for their counters at once; who does not answer in two seconds has none."""
    members = await list_members(peer.dht, swarm)
    statuses: dict[Contact, dict[str, Any]] = {}

    async def ask(node: Contact) -> None:
        with contextlib.suppress(NetError):
            reply = await peer.rpc.call(node, "node.status", {}, timeout_s=_STATUS_TIMEOUT_S)
            statuses[node] = dict(reply.body)

    nodes = {member.contact for member in members if member.role == "node" and member.contact is not None}
    async with trio.open_nursery() as nursery:
        for node in nodes:
            nursery.start_soon(ask, node)
    return [
        Reading(
            member=member, status=statuses.get(member.contact) if member.role == "node" and member.contact else None
        )
        for member in members
    ]


def status_tables(swarm: str, before: Sequence[Reading], now: Sequence[Reading]) -> RenderableType:
    """A rich table for each role that is there; rates come from the difference between two readings."""
    if not now:
        return (
            f"Nobody is listed under the name {swarm!r}. Names cannot be looked up here: "
            "is --swarm the same as on the nodes and trainers?"
        )
    nodes, trainers, averagers = (_of_role(now, role) for role in ("node", "trainer", "averager"))
    tables = [_node_table(swarm, _of_role(before, "node"), nodes)]
    if trainers:
        rows = [_row(reading, "step", "loss", "items_per_s", "failed_calls") for reading in trainers]
        tables.append(_table("trainers", ("trainer", "address", "step", "loss", "items/s", "failed calls"), rows))
    if averagers:
        rows = [_row(reading, "group", "averages") for reading in averagers]
        tables.append(_table("averagers", ("averager", "address", "group", "averages"), rows))
    return Group(*tables)


def _node_table(swarm: str, before: Sequence[Reading], now: Sequence[Reading]) -> Table:
    title = f"swarm {swarm!r}: {len(now)} node{'' if len(now) == 1 else 's'}, {sum(map(_experts, now))} experts"
    earlier = {reading.member.peer_id: reading.status for reading in before}
    rows = [_node_row(reading, earlier.get(reading.member.peer_id)) for reading in now]
    return _table(title, ("node", "address", "experts", "calls/s", "queue", "busy", "updates", "state"), rows)


def _node_row(reading: Reading, before: dict[str, Any] | None) -> list[str]:
    """How long it has been up is the state of a node that serves: what else there is to see are its counters."""
    state, status = str(reading.member.info.get("state", "")), reading.status
    if status is None:  # as long as a node compiles it may have no counters
        return [*_row(reading), str(_experts(reading)), "", "", "", "", "no answer" if state == "serving" else state]
    state = str(status.get("state", state))
    calls = _growth(before, status, "forward") + _growth(before, status, "backward")
    return [
        *_row(reading),
        str(_experts(reading)),
        f"{calls:.1f}",
        str(status.get("waiting_rows", "?")),
        # A batch counts when it is done: one that began before the first reading may be longer than the interval.
        f"{100 * min(1.0, _growth(before, status, 'busy_s')):.0f} %",
        str(sum(status.get("updates", {}).values())),
        f"up {status.get('uptime_s', 0):.0f} s" if state == "serving" else state,
    ]


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for column in columns:
        is_text = column in ("node", "trainer", "averager", "group", "address", "state")
        table.add_column(column, no_wrap=True, justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*row, style="red" if row[-1] == "no answer" else "")
    return table


def _row(reading: Reading, *facts: str) -> list[str]:
    """Who and where a member is, and these facts about it."""
    member = reading.member
    values = [member.info.get(name, "") for name in facts]
    texts = [f"{value:,.4g}" if isinstance(value, float) else str(value) for value in values]
    return [member.peer_id.short, "-" if member.contact is None else str(member.contact.address), *texts]


def _of_role(readings: Sequence[Reading], role: str) -> list[Reading]:
    return [reading for reading in readings if reading.member.role == role]


def _experts(reading: Reading) -> int:
    if reading.status is not None and reading.status.get("updates"):
        return len(reading.status["updates"])
    listed = reading.member.info.get("experts", 0)
    return listed if isinstance(listed, int) else 0


def _growth(before: dict[str, Any] | None, now: dict[str, Any], counter: str) -> float:
    """Growth of a node's counter per second of the node's own clock; 0 without two readings."""
    if before is None or now.get("uptime_s", 0.0) <= before.get("uptime_s", 0.0):
        return 0.0
    growth = float(now.get(counter, 0)) - float(before.get(counter, 0))
    return max(0.0, growth / (now["uptime_s"] - before["uptime_s"]))


def _as_json(readings: Sequence[Reading]) -> dict[str, list[dict[str, Any]]]:
    """The readings under the plural of each role."""
    return {f"{role}s": [_member_as_json(reading) for reading in _of_role(readings, role)] for role in ROLES}


def _member_as_json(reading: Reading) -> dict[str, Any]:
    member = reading.member
    return {
        "peer_id": str(member.peer_id),
        "address": None if member.contact is None else str(member.contact.address),
        "info": dict(member.info),
        **({"status": reading.status} if member.role == "node" else {}),
    }
