"""A process on the network: serves calls, places calls, and owns every connection that either needs."""

import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import trio

from dmoe_net.errors import (
    CallFailed,
    ConnectionLost,
    DialFailed,
    HandshakeFailed,
    NetError,
    PeerTimeout,
    PeerUnavailable,
    RemoteProtocolError,
    seconds_of,
)
from dmoe_net.identity import Address, Contact, PeerId, address_of, peer_id_of
from dmoe_net.nursery import background_nursery
from dmoe_net.peer_health import Pause, PeerHealth
from dmoe_net.rpc.base import Body, Handler, Reply
from dmoe_net.rpc.bulk import BulkTraffic, MemoryBudget
from dmoe_net.rpc.connection import HELLO_TIMEOUT_S, Connection
from dmoe_net.rpc.connections import ConnectionTable, RpcStatistics
from dmoe_net.rpc.faults import FaultInjector
from dmoe_net.rpc.lanes import Lanes
from dmoe_net.rpc.service import Service
from dmoe_net.transport.base import Link, Listener, Transport
from dmoe_net.wire.compression import COMPRESSIONS
from dmoe_net.wire.frame_reader import WINDOW_BYTES
from dmoe_net.wire.messages import INSTANCE_BYTES, MAX_TIMEOUT_S, Hello, check_announced
from dmoe_net.wire.sinks import check_sink
from dmoe_net.wire.tensors import Outgoing, Tensor

_log = logging.getLogger(__name__)

MAX_OUTGOING_CONNECTIONS = 384
MAX_INCOMING_CONNECTIONS = 512
"""Together they stay below the 1024 descriptors that most systems give a process. At either bound the connection that
has been idle for longest makes room; its peer dials again when it next needs to."""

_WRITTEN_POLL_S = 0.0005
_PATIENCE_S = 3.0
"""A dial that its callers gave up sooner says nothing about the address."""

DIAL_PAUSE = Pause(first_s=0.2, longest_s=30.0, forgiven=1)
"""Pause of a target after failed dials. The first costs nothing: a process that was just restarted, or one that gave a
connection up the moment we used it, answers the next call."""


@asynccontextmanager
async def open_rpc_peer(
    transport: Transport,
    *,
    peer_id: PeerId,
    listen: Address | None = None,
    announce: str | None = None,
    faults: FaultInjector | None = None,
    max_outgoing_connections: int = MAX_OUTGOING_CONNECTIONS,
    max_incoming_connections: int = MAX_INCOMING_CONNECTIONS,
    memory_budget: MemoryBudget | None = None,
) -> AsyncIterator["RpcPeer"]:
    """A peer that lives as long as the block.

    At its end, or when it is cancelled, the peer stops accepting, its handlers are cancelled, calls that other tasks
    still wait for fail with `ConnectionLost`, and all links are closed. An exception of the block comes out as it is,
    not in a group.

    Args:
      transport: the network.
      peer_id: who this is; on a network that proves identities, the one that it proves.
      listen: where to be called; port 0 lets the network choose. None: client mode, it only calls.
      announce: the host under which others reach this peer, if it is not the one that it listens on.
      faults: what is to go wrong with this peer's answers, on purpose.
      max_outgoing_connections, max_incoming_connections: see `MAX_INCOMING_CONNECTIONS`.
      memory_budget: bounds averaging and downloads of this peer; peers of one process may share one. None: one of the
        default size.

    Raises:
      ListenFailed: on entry.
      ValueError: on entry; the transport proves another peer id, or `announce` cannot be a host.
    """
    if announce is not None:
        check_announced(announce)
    if transport.peer_id not in (None, peer_id):
        raise ValueError(f"the transport proves us to be {transport.peer_id}, not {peer_id}")
    listener = None if listen is None else await transport.listen(listen)
    address = None if listener is None else Address(announce or listener.address.host, listener.address.port)
    hello = Hello(
        peer_id=peer_id,
        # Chance that changes nothing, not even in a simulation: it is only compared with another.
        instance=secrets.token_bytes(INSTANCE_BYTES),
        port=None if address is None else address.port,
        host=announce,
        window_bytes=WINDOW_BYTES,
        compressions=tuple(COMPRESSIONS),
    )
    service = Service(hello, address, None if faults is None else faults.of(peer_id))
    try:
        async with background_nursery() as nursery:
            connections = ConnectionTable(
                peer_id, nursery, max_outgoing=max_outgoing_connections, max_incoming=max_incoming_connections
            )
            peer = RpcPeer(transport, service, connections, BulkTraffic(memory_budget), nursery)
            if listener is not None:
                nursery.start_soon(peer._accept, listener)
            nursery.start_soon(connections.look_after)
            try:
                yield peer
            finally:
                peer._close()
    finally:
        if listener is not None:
            with trio.CancelScope(shield=True):
                await listener.aclose()


class _Dial:
    """A connection being made to `target`, for all who wait for it."""

    def __init__(self, target: Contact | Address) -> None:
        self.target = target
        self.expected = peer_id_of(target)
        self.scope = trio.CancelScope()
        self.proven = trio.Event()
        """Set when the network has proven who answers, if calls without tensors may leave then; at the latest with
        `done`."""
        self.done = trio.Event()
        """Set when the other end has said who it is, or the dial has failed."""
        self.num_waiting = 0
        self.is_connected = False
        self.connection: Connection | None = None
        self.error: DialFailed | None = None


class RpcPeer:
    """Implements `dmoe_net.rpc.base.Caller` on a real or simulated network. Made by `open_rpc_peer`.

    One connection for each peer, whoever dialled it: made when first needed, shared by all callers, dropped when
    anything goes wrong with it, dialled again at the next call (at growing intervals if that fails). A call is never
    repeated by itself: only its caller knows whether that would be safe.
    """

    def __init__(
        self,
        transport: Transport,
        service: Service,
        connections: ConnectionTable,
        bulk: BulkTraffic,
        nursery: trio.Nursery,
    ) -> None:
        self.peer_id = service.hello.peer_id
        self.address = service.address
        self.health = PeerHealth()
        self.bulk = bulk
        self._transport = transport
        self._service = service
        self._connections = connections
        self._nursery = nursery
        contact = () if self.address is None else (self.address, Contact(self.peer_id, self.address))
        self._itself = (self.peer_id, *contact)
        self._dials: dict[Contact | Address, _Dial] = {}
        self._lanes = Lanes(transport, service, connections, bulk, nursery)
        self._is_closed = False

    def moved_bytes(self, peer_id: PeerId) -> int:
        """Bytes that have moved between us and a peer, see `Caller.moved_bytes`."""
        return sum(each.link.num_moved for each in self._connections.all_with(peer_id))

    async def written(self, peer_id: PeerId) -> None:
        """Wait until nothing is left to be sent to a peer, see `Caller.written`."""
        await trio.lowlevel.checkpoint()
        while not all(each.is_written for each in self._connections.all_with(peer_id)):  # noqa: ASYNC110 (short)
            await trio.sleep(_WRITTEN_POLL_S)

    def statistics(self) -> RpcStatistics:
        """A snapshot of the connections and their traffic."""
        return self._connections.statistics(turned_away=self._service.turned_away)

    def add_handler(self, method: str, handler: Handler, *, max_concurrent: int = 64) -> None:
        """Serve `method`, see `Caller.add_handler`. The tensors of its replies must not be written to afterwards."""
        self._service.add(method, handler, max_concurrent=max_concurrent)

    def remove_handler(self, method: str) -> None:
        """Serve `method` no more, see `Caller.remove_handler`."""
        self._service.remove(method)

    async def call(
        self,
        target: Contact | Address | PeerId,
        method: str,
        body: Body,
        tensors: Sequence[Outgoing] = (),
        *,
        timeout_s: float,
        bulk_bytes: int = 0,
        on_partial: Callable[[Reply], None] | None = None,
        into: Tensor | None = None,
    ) -> Reply:
        """Call `method` at `target`, see `Caller.call`. If the time runs out while dialling, the error is `DialFailed`:
        the peer cannot have carried out the call."""
        if into is not None:
            check_sink(into)
        if not timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(f"timeout_s must be at most {MAX_TIMEOUT_S:g} s, got {timeout_s!r}")
        if timeout_s <= 0:  # what is left of somebody's time may be nothing: then nothing is sent
            await trio.lowlevel.checkpoint()
            raise PeerTimeout(f"no time left to call {method!r} at {target}")
        if self._is_closed:
            raise ConnectionLost("this peer was closed")
        is_own = target in self._itself
        peer_id = self.peer_id if is_own else peer_id_of(target)
        way = None if is_own else self._way_to(target)  # whoever is not even tried has not failed again
        dialled = isinstance(way, _Dial)
        started = trio.current_time()
        try:
            with trio.move_on_after(timeout_s) as scope:
                if way is None:
                    reply = await self._service.call_itself(method, body, tensors, on_partial, into)
                else:
                    early = not (tensors or bulk_bytes or into is not None)
                    connection = way if isinstance(way, Connection) else await self._dialled(way, early=early)
                    way, peer_id = connection, connection.remote_peer_id
                    place = connection.call
                    if bulk_bytes and not isinstance(target, PeerId):
                        place = partial(self._lanes.call, connection, address_of(target), bulk_bytes=bulk_bytes)
                    reply = await place(
                        method, body, tensors, deadline=scope.deadline, on_partial=on_partial, into=into
                    )
            if scope.cancelled_caught and isinstance(way, _Dial):
                raise DialFailed(f"cannot connect to {target} within {seconds_of(timeout_s)}")
            if scope.cancelled_caught:
                raise PeerTimeout(f"{target} did not answer {method!r} within {seconds_of(timeout_s)}")
        except (PeerUnavailable, RemoteProtocolError, CallFailed) as error:
            self._note_end(peer_id, method, started, error)
            raise
        self._note_end(peer_id, method, started, None)
        if peer_id is not None and not bulk_bytes and not dialled:
            self.bulk.note_round_trip(peer_id, trio.current_time() - started, trio.current_time())
        return reply

    def is_reached(self, contact: Contact) -> bool:
        """True if an open connection shows that the peer answers at its address, see `Caller.is_reached`."""
        return self._connections.is_reached(contact)

    async def reach(self, contact: Contact, *, timeout_s: float) -> None:
        """Make sure that the peer answers at its address, see `Caller.reach`."""
        if self._is_closed:
            raise ConnectionLost("this peer was closed")
        if self._connections.is_reached(contact):
            await trio.lowlevel.checkpoint()
            return
        with trio.move_on_after(timeout_s):
            await self._dialled(self._dial_of(contact))
            return
        raise DialFailed(f"cannot connect to {contact} within {seconds_of(timeout_s)}")

    def _note_end(self, peer_id: PeerId | None, method: str, started: float, error: NetError | None) -> None:
        """Tell the peer's health how a call of it ended."""
        service = (peer_id, method.partition(".")[0])
        if error is None or isinstance(error, CallFailed):
            self.health.succeeded(service)
        elif peer_id is not None and not self._is_closed:
            now = trio.current_time()
            # Calls that were under way when the last one failed are one failure with it.
            self.health.failed(service, now, str(error), together_s=now - started)

    def _close(self) -> None:
        """Place no more calls, and end those of this peer to itself."""
        self._is_closed = True
        self._service.close()
        self._connections.close()

    def _way_to(self, target: Contact | Address | PeerId) -> Connection | _Dial:
        """The open connection, or the dial that all callers of the target wait for; await it at once."""
        connection = self._connections.find(target)
        if connection is not None:
            return connection
        if isinstance(target, PeerId):
            raise DialFailed(f"there is no connection with {target}")
        return self._dial_of(target)

    def _dial_of(self, target: Contact | Address) -> _Dial:
        """The dial that all callers of the target wait for; await it at once."""
        if (way := self._dials.get(target)) is not None:
            return way
        if isinstance(target, Contact) and target.peer_id == self.peer_id:
            raise DialFailed(f"{target} is this peer itself")
        for dialled in (address_of(target), target):
            if (why_not := self.health.why_not(dialled, trio.current_time(), DIAL_PAUSE)) is not None:
                raise DialFailed(why_not)
        num_dials = sum(not dial.is_connected for dial in self._dials.values())
        if not self._connections.make_room(outgoing=True, num_dials=num_dials):
            raise DialFailed(f"all {self._connections.max_outgoing} connections of this peer are in use")
        dial = self._dials[target] = _Dial(target)
        self._nursery.start_soon(self._dial, dial)
        return dial

    async def _dialled(self, dial: _Dial, *, early: bool = False) -> Connection:
        """The connection that comes of the dial, or that the other end prefers to it; if `early`, perhaps before its
        hello."""
        dial.num_waiting += 1
        try:
            await (dial.proven if early else dial.done).wait()
        finally:
            dial.num_waiting -= 1
            if dial.num_waiting == 0 and not dial.proven.is_set():
                # Nobody waits any more. Out of the table at once: the next caller must start afresh.
                dial.scope.cancel()
                self._dials.pop(dial.target)
        connection = dial.connection
        if connection is None:
            # A fresh error for each caller: raising one object in several tasks would mix their tracebacks.
            raise DialFailed(str(dial.error or "this peer was closed")) from dial.error
        if connection.cause is not None or not (early or connection.remote is not None):
            raise DialFailed(f"{dial.target} ended the connection before it said who it is") from connection.cause
        if not connection.session.is_leaving:
            return connection
        # Both ends had dialled, and this connection gave way to the other one in the moment between. The other end has
        # our hello on that one, but its own may still be on its way: each connection has an order, two have none. Then
        # it is one of those that have not said yet who they are.
        peer_id = connection.remote_peer_id
        assert peer_id is not None  # only of a connection whose other end is known another is preferred
        with trio.move_on_after(HELLO_TIMEOUT_S):
            while (other := self._connections.find(peer_id)) is None:
                if not self._connections.has_strangers:
                    break
                await self._connections.news.wait()
            if other is not None:
                return other
        why = f"{dial.target} parted as soon as it had said hello"
        self.health.failed(dial.target, trio.current_time(), why)
        raise DialFailed(why)

    async def _dial(self, dial: _Dial) -> None:
        """Connect for all who wait, then run the connection until it rests or ends."""
        where, started = address_of(dial.target), trio.current_time()
        try:
            with dial.scope:
                link = await self._transport.dial(where, peer_id=dial.expected)
                dial.is_connected = True
            if dial.is_connected:
                connection = self._connection(link, dial)
                if self._connections.has_greeted and link.remote_peer_id is not None:
                    # The network has proven who it is, and this swarm is of our version: calls without tensors need
                    # not wait for its hello, which takes a round trip.
                    connection.speaks_first = True
                    dial.connection = connection
                    dial.proven.set()
                await self._connections.run(connection)
                if dial.done.is_set():
                    return
                is_refusal = isinstance(connection.cause, HandshakeFailed)
                why = str(connection.cause) if is_refusal else f"cannot connect to {dial.target}: {connection.cause}"
                raise DialFailed(why) from connection.cause
            if trio.current_time() - started >= _PATIENCE_S:
                raise DialFailed(f"{dial.target} did not answer in time")
        except DialFailed as error:
            dial.error = error.with_traceback(None)  # whose frames hold the dial
            if not dial.done.is_set():
                # Somebody else answers there: no reason to leave that one alone, only not to look for this one.
                failed = dial.target if isinstance(error.__cause__, HandshakeFailed) else where
                self.health.failed(failed, trio.current_time(), str(error))
        finally:
            self._end_dial(dial)

    def _end_dial(self, dial: _Dial) -> None:
        if self._dials.get(dial.target) is dial:
            del self._dials[dial.target]
        dial.done.set()
        dial.proven.set()

    async def _accept(self, listener: Listener) -> None:
        while True:
            link = await listener.accept()
            if self._connections.make_room(outgoing=False):
                self._connections.start(self._connection(link))
            else:
                _log.warning("turning %s away: all places are in use", link.remote_address)
                link.abort()

    def _connection(self, link: Link, dial: _Dial | None = None) -> Connection:
        """A connection over a link that came in, or that the dial has brought."""

        def on_hello(connection: Connection, remote: Hello) -> None:
            if link.remote_peer_id not in (None, remote.peer_id):
                raise RemoteProtocolError(f"{link.remote_peer_id} says that it is {remote.peer_id}")
            if dial is not None and dial.expected not in (None, remote.peer_id):
                raise HandshakeFailed(f"{remote.peer_id.short} answers at {link.remote_address}, not {dial.expected}")
            self._connections.greeted_untrusted(connection, remote)
            port = remote.port if dial is None else link.remote_address.port
            if port is not None:
                address = Address(link.remote_address.host, port)
                self.health.succeeded(address)
                self.health.succeeded(Contact(remote.peer_id, address))
            if dial is not None:
                dial.connection = connection
                self._end_dial(dial)

        connection = Connection(link, self._service, on_hello, self._connections.start, is_outgoing=dial is not None)
        self._connections.add(connection)
        return connection
