"""A process on the network: serves calls, places calls, and owns every connection that either needs."""

import logging
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

import trio

from net.errors import ConnectionLost, DialFailed, PeerTimeout
from net.identity import Address, PeerId
from net.rpc.base import Body, Handler, Reply
from net.rpc.connection import Connection
from net.rpc.service import Service
from net.transport.base import Link, Listener, Transport
from net.wire.messages import MAX_TIMEOUT_S
from net.wire.tensors import Tensor

_log = logging.getLogger(__name__)

MAX_OUTGOING_CONNECTIONS = 384
MAX_INCOMING_CONNECTIONS = 512
"""Together they stay below the 1024 descriptors that most systems give a process. At either bound the connection that
has been idle for longest makes room; its peer dials again when it next needs to."""


class _Dial:
    """A connection being made, and how many callers wait for it."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.done = trio.Event()
        self.num_waiting = 0
        self.connection: Connection | None = None
        self.error: DialFailed | None = None


@asynccontextmanager
async def open_rpc_peer(
    transport: Transport,
    *,
    peer_id: PeerId,
    listen: Address | None = None,
    max_outgoing_connections: int = MAX_OUTGOING_CONNECTIONS,
    max_incoming_connections: int = MAX_INCOMING_CONNECTIONS,
) -> AsyncIterator["RpcPeer"]:
    """A peer that lives as long as the block.

    At its end, or when it is cancelled, the peer stops accepting, its handlers are cancelled, calls that other tasks
    still wait for fail with `ConnectionLost`, and all links are closed. An exception of the block comes out as it is,
    not in a group.

    Args:
      transport: the network.
      peer_id: who this is.
      listen: where to be called; port 0 lets the network choose. None: client mode, it only calls.
      max_outgoing_connections, max_incoming_connections: see `MAX_INCOMING_CONNECTIONS`.

    Raises:
      ListenFailed: on entry.
    """
    listener = None if listen is None else await transport.listen(listen)
    block_error: Exception | None = None
    try:
        async with trio.open_nursery() as nursery:
            peer = RpcPeer(
                transport,
                nursery,
                peer_id=peer_id,
                address=None if listener is None else listener.address,
                max_outgoing_connections=max_outgoing_connections,
                max_incoming_connections=max_incoming_connections,
            )
            if listener is not None:
                nursery.start_soon(peer._accept, listener)
            try:
                yield peer
            except Exception as exc:
                block_error = exc
                raise
            finally:
                peer._is_closed = True
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if block_error is not None and group.exceptions == (block_error,):
            raise block_error from block_error.__cause__
        raise
    finally:
        if listener is not None:
            with trio.CancelScope(shield=True):
                await listener.aclose()


class RpcPeer:
    """Implements `net.rpc.base.Caller` on a real or simulated network. Made by `open_rpc_peer`.

    One connection for each address called: dialled when first needed, shared by all callers, dropped when anything
    goes wrong with it, dialled again at the next call. A call is never repeated by itself: only its caller knows
    whether that would be safe.
    """

    def __init__(
        self,
        transport: Transport,
        nursery: trio.Nursery,
        *,
        peer_id: PeerId,
        address: Address | None,
        max_outgoing_connections: int,
        max_incoming_connections: int,
    ) -> None:
        self._transport = transport
        self._nursery = nursery
        self._peer_id = peer_id
        self._address = address
        self._max_outgoing = max_outgoing_connections
        self._max_incoming = max_incoming_connections
        self._service = Service()
        self._dials: dict[Address, _Dial] = {}
        self._outgoing: dict[Address, Connection] = {}
        self._incoming: set[Connection] = set()
        self._is_closed = False

    @property
    def peer_id(self) -> PeerId:
        """Who this process is."""
        return self._peer_id

    @property
    def address(self) -> Address | None:
        """Where this process listens; None in client mode."""
        return self._address

    def add_handler(self, method: str, handler: Handler, *, max_concurrent: int = 64) -> None:
        """See `Caller.add_handler`. The tensors of its replies must not be written to afterwards.

        Raises:
          ValueError: the method has a handler already, or an argument is out of range.
        """
        self._service.add(method, handler, max_concurrent=max_concurrent)

    async def call(
        self, address: Address, method: str, body: Body, tensors: Sequence[Tensor] = (), *, timeout_s: float
    ) -> Reply:
        """See `Caller.call`. The tensors are sent from where they lie: until this returns, and a moment longer if it
        is cancelled, nobody may write to them.

        `timeout_s` covers dialling too; if it runs out there, the error is `DialFailed`, for the peer cannot have
        carried out the call.

        Raises:
          ValueError: `timeout_s` is not a number, or above `MAX_TIMEOUT_S` (a day).
        """
        if not timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(f"timeout_s must be at most {MAX_TIMEOUT_S:g} s, got {timeout_s!r}")
        if timeout_s <= 0:  # what is left of somebody's time may be nothing: then nothing is sent
            await trio.lowlevel.checkpoint()
            raise PeerTimeout(f"no time left to call {method!r} at {address}")
        connection: Connection | None = None
        with trio.move_on_after(timeout_s) as scope:
            connection = await self._connection_to(address)
            return await connection.call(method, body, tensors, deadline=scope.deadline)
        if connection is None:
            raise DialFailed(f"cannot connect to {address} within {timeout_s:g} s")
        raise PeerTimeout(f"{address} did not answer {method!r} within {timeout_s:g} s")

    async def _connection_to(self, address: Address) -> Connection:
        """The open connection, or a new one; callers that come meanwhile wait for the same dial."""
        if self._is_closed:
            raise ConnectionLost("this peer was closed")
        connection = self._outgoing.get(address)
        if connection is not None and connection.is_open:
            return connection
        dial = self._dials.get(address)
        if dial is None:
            self._make_room()
            dial = self._dials[address] = _Dial()
            self._nursery.start_soon(self._dial, address, dial)
        dial.num_waiting += 1
        try:
            await dial.done.wait()
        finally:
            dial.num_waiting -= 1
            if dial.num_waiting == 0 and not dial.done.is_set():
                # Nobody waits any more. Out of the table at once: the next caller must start afresh.
                dial.scope.cancel()
                self._dials.pop(address)
        if dial.connection is None:
            # A fresh error for each caller: raising one object in several tasks would mix their tracebacks.
            raise DialFailed(str(dial.error or "this peer was closed")) from dial.error
        return dial.connection

    async def _dial(self, address: Address, dial: _Dial) -> None:
        """Connect for all who wait, then run the connection for its whole life."""
        link: Link | None = None
        try:
            with dial.scope:
                link = await self._transport.dial(address)
        except DialFailed as exc:
            dial.error = exc
        finally:
            if self._dials.get(address) is dial:
                del self._dials[address]
                if link is not None:
                    dial.connection = self._outgoing[address] = self._connection(link)
            elif link is not None:
                link.abort()  # it came up in the very moment in which the last caller left
            dial.done.set()
        if dial.connection is None:
            return
        try:
            await dial.connection.run()
        finally:
            if self._outgoing.get(address) is dial.connection:
                del self._outgoing[address]

    def _make_room(self) -> None:
        if len(self._outgoing) + len(self._dials) < self._max_outgoing:
            return
        if not _close_longest_idle(self._outgoing.values()):
            raise DialFailed(f"all {self._max_outgoing} connections of this peer are in use")

    async def _accept(self, listener: Listener) -> None:
        while True:
            link = await listener.accept()
            open_now = [connection for connection in self._incoming if connection.is_open]
            if len(open_now) >= self._max_incoming and not _close_longest_idle(open_now):
                _log.warning("turning %s away: all places are in use", link.remote_address)
                link.abort()
                continue
            connection = self._connection(link)
            self._incoming.add(connection)
            self._nursery.start_soon(self._run_incoming, connection)

    async def _run_incoming(self, connection: Connection) -> None:
        try:
            await connection.run()
        finally:
            self._incoming.discard(connection)

    def _connection(self, link: Link) -> Connection:
        port = None if self._address is None else self._address.port
        return Connection(link, peer_id=self._peer_id, port=port, service=self._service)


def _close_longest_idle(connections: Collection[Connection]) -> bool:
    """Close the connection without calls that was used least recently; False if all are in use."""
    idle = [connection for connection in connections if connection.is_open and connection.is_idle]
    longest = min(idle, key=lambda connection: connection.last_used, default=None)
    if longest is not None:
        longest.close("closed to make room for another connection")
    return longest is not None
