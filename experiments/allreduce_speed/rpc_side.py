"""Ours: a peer with an `AllReduce`, as in every process that averages."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from experiments.allreduce_speed.vectors import Vector
from net.averaging.grouping.group import Group, Member
from net.averaging.reduction.all_reduce import AllReduce, AllReduceConfig
from net.identity import Address, Contact
from net.keys import Identity
from net.rpc.peer import RpcPeer, open_rpc_peer
from net.transport.tcp import TcpTransport
from net.transport.tls import TlsTransport

_ANY_PORT = Address("127.0.0.1", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcMember:
    """One member on one network, plain or encrypted."""

    peer: RpcPeer
    """On the network."""
    all_reduce: AllReduce
    """On the peer."""

    @property
    def contact(self) -> Contact:
        """By which the others know it."""
        assert self.peer.address is not None
        return Contact(self.peer.peer_id, self.peer.address)

    async def exchange(
        self, contacts: Sequence[Contact], group_id: bytes, vector: Vector
    ) -> tuple[float, float, Vector]:
        """Average with the others; when that began and ended, and the average.

        Raises:
          ConnectionError: not everybody took part to the end.
        """
        members = tuple(
            Member(peer_id=contact.peer_id, address=contact.address, wanted_slot=slot)
            for slot, contact in enumerate(contacts)
        )
        group = Group(group_id=group_id, members=members, side=len(members))
        started = time.perf_counter()
        result = await self.all_reduce.run(group, vector)
        ended = time.perf_counter()
        if not result.complete:
            raise ConnectionError("the average is not that of all members")
        return started, ended, result.average


@asynccontextmanager
async def open_member(*, encrypted: bool, config: AllReduceConfig) -> AsyncIterator[RpcMember]:
    """A member on loopback with a fresh identity."""
    identity = Identity.generate()
    transport = TlsTransport(identity) if encrypted else TcpTransport()
    async with open_rpc_peer(transport, peer_id=identity.peer_id, listen=_ANY_PORT) as peer:
        yield RpcMember(peer=peer, all_reduce=AllReduce(peer, prefix="speed", config=config))
