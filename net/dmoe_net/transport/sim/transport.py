"""A peer's access to a simulated network: dialling and listening."""

import itertools

import trio

from dmoe_net.errors import ConnectionLost, DialFailed, HandshakeFailed, ListenFailed
from dmoe_net.identity import Address, PeerId
from dmoe_net.transport.sim.endpoints import SimLink, SimListener, Topology, new_link
from dmoe_net.transport.sim.links import NUM_LISTEN_PORTS, SimHost


class SimTransport:
    """One peer's access to a simulated network, as a `dmoe_net.transport.base.Transport`."""

    def __init__(self, topology: Topology, host: SimHost, peer_id: PeerId) -> None:
        self._topology = topology
        self._host = host
        self.peer_id = peer_id

    async def dial(self, address: Address, *, peer_id: PeerId | None = None) -> SimLink:
        """Connect to a host of the simulation: `address.host` is its name."""
        await trio.lowlevel.checkpoint()
        destination = self._topology.hosts.get(address.host)
        if self._topology.is_closed or self._host.is_down:
            raise DialFailed(f"cannot connect to {address}: {self._why_not()}")
        if destination is None:
            raise DialFailed(f"cannot resolve {address}: the simulation has no such host")
        self._host.num_dials += 1
        link = new_link(self._topology, self._host, destination, self.peer_id, address)
        try:
            await link.connect()
        except ConnectionLost as exc:
            link.abort()
            raise DialFailed(f"cannot connect to {address}: {link.cause}") from exc
        except BaseException:
            link.abort()
            raise
        found = link.remote_peer_id
        if found == self.peer_id:
            link.abort()
            raise DialFailed(f"cannot connect to {address}: that is this peer itself")
        if peer_id is not None and found != peer_id:
            link.abort()
            why = f"expected {peer_id} at {address}, found {found}"
            raise DialFailed(why) from HandshakeFailed(why)
        return link

    async def listen(self, address: Address) -> SimListener:
        """Listen on this transport's own host."""
        await trio.lowlevel.checkpoint()
        if self._topology.is_closed or self._host.is_down:
            raise ListenFailed(f"cannot listen at {address}: {self._why_not()}")
        if address.host != self._host.name:
            raise ListenFailed(f"cannot listen at {address}: this peer is on host {self._host.name!r}")
        free = address if address.port else self._free_address()
        if free in self._topology.listeners:
            raise ListenFailed(f"cannot listen at {address}: address already in use")
        listener = self._topology.listeners[free] = SimListener(self._topology, free, self.peer_id)
        return listener

    def _free_address(self) -> Address:
        for port in itertools.islice(self._host.listen_ports, NUM_LISTEN_PORTS):
            address = Address(self._host.name, port)
            if address not in self._topology.listeners:
                return address
        raise ListenFailed(f"cannot listen at {self._host.name}: no port is free")

    def _why_not(self) -> str:
        return "the simulation is over" if self._topology.is_closed else f"{self._host.name} is down"
