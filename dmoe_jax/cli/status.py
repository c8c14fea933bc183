"""`dmoe status`: a live table of the swarm."""

import json
from dataclasses import dataclass, field
from typing import Annotated, Any

import trio
import tyro

from dmoe_jax.cli.common import UsageError
from dmoe_jax.cli.lifecycle import Stop, run_until_done
from dmoe_jax.cli.network import JoinTexts, NetworkOptions
from dmoe_jax.cli.swarm import join_swarm
from dmoe_jax.peer import SwarmPeer
from net.errors import NetError
from net.identity import Contact

_STATUS_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReading:
    """One node's counters at one time; `status` is None when it did not answer."""

    contact: Contact
    status: dict[str, Any] | None
    time_s: float


@dataclass(frozen=True, kw_only=True)
class StatusCommand:
    """Show the nodes of a swarm: experts, calls a second, queue, updates. Refreshes until interrupted."""

    join: JoinTexts
    """Peers to join through, as HOST:PORT, or PEERID@HOST:PORT to make sure who is there."""
    network: Annotated[NetworkOptions, tyro.conf.arg(name="")] = field(default_factory=NetworkOptions)
    """Who this process is and which swarm it belongs to."""
    swarm: str = "dmoe"
    """Name under which the nodes are listed."""
    interval_s: float = 2.0
    """Seconds between refreshes."""
    once: bool = False
    """Print one table and end."""
    json: bool = False
    """Print one JSON object instead of a table and end."""

    def run(self) -> int:
        """Show the table; the exit status."""
        return run_until_done(self._show)

    async def _show(self, stop: Stop) -> int:
        del stop  # nothing to take back: a client leaves no trace
        if not self.join:
            raise UsageError("--join needs at least one HOST:PORT")
        if not self.interval_s > 0:
            raise UsageError(f"--interval-s must be positive, got {self.interval_s}")
        async with join_swarm(self.network, join=self.join) as peer:
            readings = await read_nodes(peer, self.swarm)
            if self.json:
                print(json.dumps({"swarm": self.swarm, "nodes": [_as_json(reading) for reading in readings]}))
                return 0
            await self._show_tables(peer, readings)
        return 0

    async def _show_tables(self, peer: SwarmPeer, readings: list[NodeReading]) -> None:
        from rich.console import Console
        from rich.live import Live

        if self.once:
            # Rates need two readings; half a second apart is enough to see whether anything moves.
            await trio.sleep(0.5)
            Console().print(status_table(self.swarm, readings, await read_nodes(peer, self.swarm)))
            return
        with Live(status_table(self.swarm, readings, readings), auto_refresh=False) as live:
            while True:
                await trio.sleep(self.interval_s)
                previous, readings = readings, await read_nodes(peer, self.swarm)
                live.update(status_table(self.swarm, previous, readings), refresh=True)


async def read_nodes(peer: SwarmPeer, swarm: str) -> list[NodeReading]:
    """Every listed node's counters, asked for at once; a node that does not answer within two seconds has none."""
    from dmoe_jax.members import list_members

    members = await list_members(peer.dht, swarm)
    contacts = [member.contact for member in members if member.role == "node" and member.contact is not None]
    readings: dict[Contact, NodeReading] = {}

    async def read(contact: Contact) -> None:
        status: dict[str, Any] | None
        try:
            reply = await peer.rpc.call(contact, "node.status", {}, timeout_s=_STATUS_TIMEOUT_S)
            status = dict(reply.body)
        except NetError:
            status = None
        readings[contact] = NodeReading(contact=contact, status=status, time_s=trio.current_time())

    async with trio.open_nursery() as nursery:
        for contact in contacts:
            nursery.start_soon(read, contact)
    return [readings[contact] for contact in contacts]


def status_table(swarm: str, before: list[NodeReading], now: list[NodeReading]) -> Any:
    """A rich table: one row a node, rates from the difference between two readings."""
    from rich import box
    from rich.table import Table

    nodes = f"{len(now)} node{'' if len(now) == 1 else 's'}"
    title = f"swarm {swarm!r}: {nodes}, {sum(_experts(reading) for reading in now)} experts"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("node", "address", "experts", "calls/s", "queued", "busy", "updates", "up"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("node", "address") else "right")
    earlier = {reading.contact: reading for reading in before}
    for reading in now:
        name, address = reading.contact.peer_id.short, str(reading.contact.address)
        if reading.status is None:
            table.add_row(name, address, "no answer", *[""] * 5, style="red")
            continue
        status = reading.status
        table.add_row(
            name,
            address,
            str(_experts(reading)),
            f"{_rate(earlier.get(reading.contact), reading, 'forward', 'backward'):.1f}",
            str(status.get("waiting_rows", "?")),
            f"{100 * _rate(earlier.get(reading.contact), reading, 'busy_s'):.0f} %",
            str(sum(status.get("updates", {}).values())),
            f"{status.get('uptime_s', 0):.0f} s",
        )
    return table


def _experts(reading: NodeReading) -> int:
    return len(reading.status.get("updates", {})) if reading.status is not None else 0


def _rate(before: NodeReading | None, now: NodeReading, *fields: str) -> float:
    """Growth of the summed counters per second; 0 without two readings."""
    if before is None or before.status is None or now.status is None or now.time_s <= before.time_s:
        return 0.0
    growth = sum(float(now.status.get(field, 0)) - float(before.status.get(field, 0)) for field in fields)
    return max(0.0, growth / (now.time_s - before.time_s))


def _as_json(reading: NodeReading) -> dict[str, Any]:
    return {
        "peer_id": str(reading.contact.peer_id),
        "address": str(reading.contact.address),
        "status": reading.status,
    }
