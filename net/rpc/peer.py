"""A process on the network: serves calls, places calls, and owns every connection that either needs."""

import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio

from net.errors import (
    CallFailed,
    ConnectionLost,
    DialFailed,
    HandshakeFailed,
    NetError,
    PeerTimeout,
    PeerUnavailable,
    RemoteProtocolError,
)
from net.identity import Address, Contact, PeerId, address_of
from net.nursery import background_nursery
from net.peer_health import Pause, PeerHealth
from net.rpc.base import Body, Handler, Reply
from net.rpc.connection import HELLO_TIMEOUT_S, Connection
from net.rpc.connections import ConnectionTable
from net.rpc.faults import FaultInjector
from net.rpc.own_calls import OwnCalls
from net.rpc.service import Service
from net.rpc.session import hello_of
from net.transport.base import Link, Listener, Transport
from net.wire.fields import MAX_HOST_CHARACTERS
from net.wire.messages import INSTANCE_BYTES, MAX_TIMEOUT_S, is_host
from net.wire.tensors import Outgoing

_log = logging.getLogger(__name__)

MAX_OUTGOING_CONNECTIONS = 384
MAX_INCOMING_CONNECTIONS = 512
"""Together they stay below the 1024 descriptors that most systems give a process. At either bound the connection that
has been idle for longest makes room; its peer dials again when it next needs to."""

IDLE_S = 120.0
"""A connection without calls for so long is closed. Trainers call every few seconds, DHT peers every minute or so."""

_PATIENCE_S = 3.0
"""A dial that its callers gave up sooner says nothing about the address."""

DIAL_PAUSE = Pause(first_s=0.2, longest_s=30.0, forgiven=1)
"""After failed dials. The first costs nothing: a process that was just restarted, or one that gave a connection up the
moment we used it, answers the next call."""

CHECK_PERIOD_S = 5.0
"""How often all connections are looked at: one timer for each peer, not for each connection."""


class _Dial:
    """A connection being made, and how many callers wait for it."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.done = trio.Event()
        self.num_waiting = 0
        self.is_connected = False
        self.connection: Connection | None = None
        self.error: DialFailed | None = None


@asynccontextmanager
async def open_rpc_peer(
    transport: Transport,
    *,
    peer_id: PeerId,
    listen: Address | None = None,
    announce: str | None = None,
    faults: FaultInjector | None = None,
    idle_s: float = IDLE_S,
    max_outgoing_connections: int = MAX_OUTGOING_CONNECTIONS,
    max_incoming_connections: int = MAX_INCOMING_CONNECTIONS,
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
      idle_s: connections without calls for so long are closed.
      max_outgoing_connections, max_incoming_connections: see `MAX_INCOMING_CONNECTIONS`.

    Raises:
      ListenFailed: on entry.
      ValueError: on entry; the transport proves another peer id, or `announce` cannot be a host.
    """
    if announce is not None and not is_host(announce):
        raise ValueError(f"announce must be 1 to {MAX_HOST_CHARACTERS} ASCII characters, got {announce!r}")
    if transport.peer_id not in (None, peer_id):
        raise ValueError(f"the transport proves us to be {transport.peer_id}, not {peer_id}")
    listener = None if listen is None else await transport.listen(listen)
    try:
        async with background_nursery() as nursery:
            peer = RpcPeer(
                transport,
                nursery,
                peer_id=peer_id,
                address=None if listener is None else listener.address,
                announced_host=announce,
                faults=faults,
                idle_s=idle_s,
                max_outgoing_connections=max_outgoing_connections,
                max_incoming_connections=max_incoming_connections,
            )
            if listener is not None:
                nursery.start_soon(peer._accept, listener)
            nursery.start_soon(peer._look_after_connections)
            try:
                yield peer
            finally:
                peer._close()
    finally:
        if listener is not None:
            with trio.CancelScope(shield=True):
                await listener.aclose()


class RpcPeer:
    """Implements `net.rpc.base.Caller` on a real or simulated network. Made by `open_rpc_peer`.

    One connection for each peer, whoever dialled it: made when first needed, shared by all callers, dropped when
    anything goes wrong with it, dialled again at the next call (at growing intervals if that fails). A call is never
    repeated by itself: only its caller knows whether that would be safe.
    """

    def __init__(
        self,
        transport: Transport,
        nursery: trio.Nursery,
        *,
        peer_id: PeerId,
        address: Address | None,
        announced_host: str | None,
        faults: FaultInjector | None,
        idle_s: float,
        max_outgoing_connections: int,
        max_incoming_connections: int,
    ) -> None:
        if address is not None and announced_host is not None:
            address = Address(announced_host, address.port)
        self._transport = transport
        self._nursery = nursery
        self._peer_id = peer_id
        self._address = address
        self._contact = None if address is None else Contact(peer_id, address)
        self._faults = None if faults is None else faults.of(peer_id)
        self._idle_s = idle_s
        self._max_outgoing = max_outgoing_connections
        self._max_incoming = max_incoming_connections
        # Chance that changes nothing, not even in a simulation: an instance is only ever compared with another.
        instance = secrets.token_bytes(INSTANCE_BYTES)
        port = None if address is None else address.port
        self._hello = hello_of(peer_id, instance=instance, port=port, host=announced_host)
        self._service = Service()
        self._own_calls = OwnCalls(self._service, peer_id, address)
        self._health = PeerHealth()
        self._dials: dict[Contact | Address, _Dial] = {}
        self._connections = ConnectionTable(peer_id)
        self._news = trio.Event()
        self._is_closed = False

    @property
    def peer_id(self) -> PeerId:
        """Who this process is."""
        return self._peer_id

    @property
    def address(self) -> Address | None:
        """Where this process is reached; None in client mode."""
        return self._address

    @property
    def health(self) -> PeerHealth:
        """Who does not answer. Every dial and every call's end goes into it, see `Caller.health`."""
        return self._health

    def add_handler(self, method: str, handler: Handler, *, max_concurrent: int = 64) -> None:
        """Serve `method`, see `Caller.add_handler`. The tensors of its replies must not be written to afterwards.

        Raises:
          ValueError: the method has a handler already, or an argument is out of range.
        """
        self._service.add(method, handler, max_concurrent=max_concurrent)

    def remove_handler(self, method: str) -> None:
        """Serve `method` no more, see `Caller.remove_handler`.

        Raises:
          ValueError: the method has no handler.
        """
        self._service.remove(method)

    async def call(
        self,
        target: Contact | Address,
        method: str,
        body: Body,
        tensors: Sequence[Outgoing] = (),
        *,
        timeout_s: float,
    ) -> Reply:
        """Call `method` at `target`, see `Caller.call`.

        The tensors are sent from where they lie: until this returns, and a moment longer if it is cancelled, nobody
        may write to them.

        `timeout_s` covers dialling too; if it runs out there, the error is `DialFailed`, for the peer cannot have
        carried out the call.

        Raises:
          ValueError: `timeout_s` is not a number, or above `MAX_TIMEOUT_S` (a day).
        """
        if not timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(f"timeout_s must be at most {MAX_TIMEOUT_S:g} s, got {timeout_s!r}")
        if timeout_s <= 0:  # what is left of somebody's time may be nothing: then nothing is sent
            await trio.lowlevel.checkpoint()
            raise PeerTimeout(f"no time left to call {method!r} at {target}")
        if self._is_closed:
            raise ConnectionLost("this peer was closed")
        is_own = target in (self._address, self._contact)
        peer_id = self._peer_id if is_own else target.peer_id if isinstance(target, Contact) else None
        way = None if is_own else self._way_to(target)  # whoever is not even tried has not failed again
        started = trio.current_time()
        try:
            with trio.move_on_after(timeout_s) as scope:
                if way is None:
                    reply = await self._own_calls.call(method, body, tensors)
                else:
                    connection = way if isinstance(way, Connection) else await self._dialled(target, way)
                    way, peer_id = connection, connection.remote.peer_id if connection.remote else None
                    reply = await connection.call(method, body, tensors, deadline=scope.deadline)
            if scope.cancelled_caught and isinstance(way, _Dial):
                raise DialFailed(f"cannot connect to {target} within {timeout_s:g} s")
            if scope.cancelled_caught:
                raise PeerTimeout(f"{target} did not answer {method!r} within {timeout_s:g} s")
        except (PeerUnavailable, RemoteProtocolError, CallFailed) as error:
            self._note_end(peer_id, method, started, error)
            raise
        self._note_end(peer_id, method, started, None)
        return reply

    def _note_end(self, peer_id: PeerId | None, method: str, started: float, error: NetError | None) -> None:
        """Tell the peer's health how a call of it ended."""
        service = (peer_id, method.partition(".")[0])
        if error is None or isinstance(error, CallFailed):
            self._health.succeeded(service)
        elif peer_id is not None and not self._is_closed:
            now = trio.current_time()
            # Calls that were under way when the last one failed are one failure with it.
            self._health.failed(service, now, str(error), together_s=now - started)

    def _close(self) -> None:
        """Place no more calls; end those of this peer to itself, which no connection ends."""
        self._is_closed = True
        self._own_calls.close()

    def _way_to(self, target: Contact | Address) -> "Connection | _Dial":
        """The open connection, or the dial that all who call the target meanwhile wait for; await it at once.

        Raises:
          DialFailed: this peer may not dial it now.
        """
        connection = (
            self._connections.find(target.peer_id) if isinstance(target, Contact) else self._connections.find_at(target)
        )
        if connection is not None:
            return connection
        dial = self._dials.get(target)
        if dial is None:
            self._check_may_dial(target)
            dial = self._dials[target] = _Dial()
            self._nursery.start_soon(self._dial, target, dial)
        return dial

    async def _dialled(self, target: Contact | Address, dial: _Dial) -> Connection:
        """The connection that comes of the dial, or that the other end prefers to it."""
        connection = await self._outcome(target, dial)
        if not connection.has_parted:
            return connection
        # Both ends had dialled, and it gave way to the other connection in the moment between.
        assert connection.remote is not None
        other = await self._other_connection(connection.remote.peer_id)
        if other is None:
            why = f"{target} parted as soon as it had said hello"
            self._health.failed(target, trio.current_time(), why)
            raise DialFailed(why)
        return other

    async def _other_connection(self, peer_id: PeerId) -> Connection | None:
        """The connection that this peer prefers to the one that we dialled.

        It has our hello on the other one, but its own may still be on its way: each connection has an order, two have
        none. Then it is one of those that have not said yet who they are.
        """
        with trio.move_on_after(HELLO_TIMEOUT_S):
            while (other := self._connections.find(peer_id)) is None and self._connections.has_strangers:
                await self._news.wait()
            return other
        return None

    def _tell_news(self) -> None:
        """A connection has said who it is, or has ended."""
        self._news.set()
        self._news = trio.Event()

    async def _outcome(self, target: Contact | Address, dial: _Dial) -> Connection:
        dial.num_waiting += 1
        try:
            await dial.done.wait()
        finally:
            dial.num_waiting -= 1
            if dial.num_waiting == 0 and not dial.done.is_set():
                # Nobody waits any more. Out of the table at once: the next caller must start afresh.
                dial.scope.cancel()
                self._dials.pop(target)
        if dial.connection is None:
            # A fresh error for each caller: raising one object in several tasks would mix their tracebacks.
            raise DialFailed(str(dial.error or "this peer was closed")) from dial.error
        return dial.connection

    def _check_may_dial(self, target: Contact | Address) -> None:
        if isinstance(target, Contact) and target.peer_id == self._peer_id:
            raise DialFailed(f"{target} is this peer itself")
        now = trio.current_time()
        for dialled in (address_of(target), target):
            if (why_not := self._health.why_not(dialled, now, DIAL_PAUSE)) is not None:
                raise DialFailed(why_not)
        num_dials = sum(not dial.is_connected for dial in self._dials.values())
        is_full = self._connections.num_open(outgoing=True) + num_dials >= self._max_outgoing
        if is_full and not self._connections.close_longest_idle(outgoing=True):
            raise DialFailed(f"all {self._max_outgoing} connections of this peer are in use")

    async def _dial(self, target: Contact | Address, dial: _Dial) -> None:
        """Connect for all who wait, then run the connection for its whole life."""
        expected = target.peer_id if isinstance(target, Contact) else None
        started = trio.current_time()
        try:
            try:
                with dial.scope:
                    link = await self._transport.dial(address_of(target), peer_id=expected)
            except DialFailed as exc:
                dial.error = exc
                return
            if dial.scope.cancelled_caught:
                if trio.current_time() - started >= _PATIENCE_S:
                    dial.error = DialFailed(f"{target} did not answer in time")
                return
            dial.is_connected = True
            await self._run_dialled(link, target, dial, expected)
        finally:
            if not dial.done.is_set():
                if self._dials.get(target) is dial:
                    del self._dials[target]
                if dial.error is not None:
                    # Somebody else answers there: no reason to leave that one alone, only not to look for this one.
                    is_another = isinstance(dial.error.__cause__, HandshakeFailed)
                    failed = target if is_another else address_of(target)
                    self._health.failed(failed, trio.current_time(), str(dial.error))
                dial.done.set()

    async def _run_dialled(self, link: Link, target: Contact | Address, dial: _Dial, expected: PeerId | None) -> None:
        connection = self._connection(link, is_outgoing=True, dial=dial, expected=expected)
        try:
            await connection.run()
        finally:
            self._remove(connection)
            cause = connection.cause
            is_refusal = isinstance(cause, HandshakeFailed)
            dial.error = DialFailed(str(cause) if is_refusal else f"cannot connect to {target}: {cause}")
            dial.error.__cause__ = cause

    async def _accept(self, listener: Listener) -> None:
        while True:
            link = await listener.accept()
            if self._connections.num_open(
                outgoing=False
            ) >= self._max_incoming and not self._connections.close_longest_idle(outgoing=False):
                _log.warning("turning %s away: all places are in use", link.remote_address)
                link.abort()
                continue
            self._nursery.start_soon(self._run_incoming, self._connection(link, is_outgoing=False))

    async def _run_incoming(self, connection: Connection) -> None:
        try:
            await connection.run()
        finally:
            self._remove(connection)

    def _remove(self, connection: Connection) -> None:
        self._connections.remove(connection)
        self._tell_news()

    def _connection(
        self, link: Link, *, is_outgoing: bool, dial: _Dial | None = None, expected: PeerId | None = None
    ) -> Connection:
        def on_hello(connection: Connection) -> None:
            remote = connection.remote
            assert remote is not None
            if expected not in (None, remote.peer_id):
                raise HandshakeFailed(f"{remote.peer_id.short} answers at {link.remote_address}, not {expected}")
            self._connections.greeted_untrusted(connection)
            self._tell_news()
            port = link.remote_address.port if is_outgoing else remote.port
            if port is not None:
                address = Address(link.remote_address.host, port)
                self._health.succeeded(address)
                self._health.succeeded(Contact(remote.peer_id, address))
            if dial is not None:
                dial.connection = connection
                for target in [target for target, known in self._dials.items() if known is dial]:
                    del self._dials[target]
                dial.done.set()

        connection = Connection(
            link,
            is_outgoing=is_outgoing,
            hello=self._hello,
            service=self._service,
            on_hello=on_hello,
            faults=self._faults,
        )
        self._connections.add(connection)
        return connection

    async def _look_after_connections(self) -> None:
        """Close idle connections and notice dead ones."""
        while True:
            await trio.sleep(CHECK_PERIOD_S)
            now = trio.current_time()
            for connection in self._connections:
                connection.check(now, idle_s=self._idle_s)
