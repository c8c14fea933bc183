"""A member's process: `python -m experiments.allreduce_speed.member ...`.

It says where it listens, and answers each order with what its exchange took.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import trio
import tyro

from experiments.allreduce_speed.baseline import BlockingMember
from experiments.allreduce_speed.vectors import Vector, digest_of, vector_of
from experiments.processes import async_orders, memory_bytes, orders, say
from net.averaging.grouping.group import Group, Member
from net.averaging.reduction.all_reduce import AllReduce
from net.averaging.reduction.partition import AllReduceConfig
from net.identity import Address, Contact
from net.keys import Identity
from net.rpc.peer import open_rpc_peer
from net.transport.tcp import TcpTransport
from net.transport.tls import TlsTransport


@dataclass(frozen=True, kw_only=True)
class MemberSettings:
    """Take part in measurements until standard input closes."""

    side: Literal["rpc", "blocking"]
    """Ours or the baseline."""
    network: Literal["tls", "plain"]
    """Encrypted or not."""
    index: int
    """Its place among the members."""
    peers: int
    """Members."""
    size: int
    """Numbers in the vector."""
    seed: int
    """Of all vectors."""
    certificate: Path
    """Certificate and key of the baseline, PEM."""
    chunk_bytes: int
    """As in `AllReduceConfig`."""
    window_bytes: int
    """As in `AllReduceConfig`."""


def main() -> None:
    """Take part until standard input closes."""
    settings = tyro.cli(MemberSettings)
    if settings.side == "rpc":
        trio.run(_serve_rpc, settings)
    else:
        _serve_blocking(settings)


async def _serve_rpc(settings: MemberSettings) -> None:
    """Ours: a peer with an `AllReduce`, as in every process that averages."""
    config = AllReduceConfig(chunk_bytes=settings.chunk_bytes, window_bytes=settings.window_bytes)
    identity = Identity.generate()
    transport = TlsTransport(identity) if settings.network == "tls" else TcpTransport()
    async with open_rpc_peer(transport, peer_id=identity.peer_id, listen=Address("127.0.0.1", 0)) as peer:
        assert peer.address is not None
        all_reduce = AllReduce(peer, prefix="speed", config=config)
        say(where=Contact(peer.peer_id, peer.address).full)
        held = memory_bytes()
        vector = vector_of(settings.index, settings.size, settings.seed)
        async for order in async_orders():
            measured = await _exchange(all_reduce, order, vector)
            memory = memory_bytes()
            say(**measured, grown_bytes=memory[1] - held[0] if memory and held else None)


async def _exchange(all_reduce: AllReduce, order: Mapping[str, Any], vector: Vector) -> dict[str, Any]:
    """Average with the others.

    Raises:
      ConnectionError: not everybody took part to the end.
    """
    contacts = [Contact.parse(text) for text in order["members"]]
    members = tuple(
        Member(peer_id=contact.peer_id, address=contact.address, wanted_slot=slot)
        for slot, contact in enumerate(contacts)
    )
    group = Group(group_id=bytes.fromhex(order["group"]), members=members, side=len(members))
    cpu_s, started = time.process_time(), time.perf_counter()
    result = await all_reduce.run(group, vector, size=vector.size)
    ended, cpu_s = time.perf_counter(), time.process_time() - cpu_s
    if not result.complete:
        raise ConnectionError("the average is not that of all members")
    return {"started": started, "ended": ended, "cpu_s": cpu_s, "digest": digest_of(result.average)}


def _serve_blocking(settings: MemberSettings) -> None:
    member = BlockingMember(
        settings.index,
        part_bytes=settings.size * 4 // settings.peers,
        certificate=settings.certificate if settings.network == "tls" else None,
    )
    say(where=str(member.address))
    for number, order in enumerate(orders()):
        if number == 0:
            member.connect([Address.parse(text) for text in order["members"]])
        cpu_s = time.process_time()
        started, ended = member.exchange()
        say(started=started, ended=ended, cpu_s=time.process_time() - cpu_s)


if __name__ == "__main__":
    main()
