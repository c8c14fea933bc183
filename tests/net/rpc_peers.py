"""A server and a client on loopback, and handlers for them, for the tests of the RPC layer."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio

from dmoe_net.identity import Address, PeerId
from dmoe_net.rpc.base import Reply, Request
from dmoe_net.rpc.peer import RpcPeer, open_rpc_peer
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.wire.frame_reader import WINDOW_BYTES
from dmoe_net.wire.frames import Part, whole_part
from dmoe_net.wire.messages import Hello, Message, encode_message

ANY_PORT = Address("127.0.0.1", 0)
SERVER, CLIENT = PeerId(b"s" * 32), PeerId(b"c" * 32)
LONG_S = 60.0


def hello(peer_id: PeerId = CLIENT, *, port: int | None = None, lane: bool = False) -> Part:
    """First part that a peer sends: its Hello."""
    return part(Hello(peer_id=peer_id, instance=bytes(8), port=port, window_bytes=WINDOW_BYTES, lane=lane))


def part(message: Message) -> Part:
    """A message on its way."""
    return whole_part(encode_message(message))


@asynccontextmanager
async def peers(**server_options: Any) -> AsyncIterator[tuple[RpcPeer, RpcPeer, Address]]:
    """A server, a client in client mode, and the server's address."""
    async with (
        open_rpc_peer(TcpTransport(), peer_id=SERVER, listen=ANY_PORT, **server_options) as server,
        open_rpc_peer(TcpTransport(), peer_id=CLIENT) as client,
    ):
        yield server, client, server.address


@asynccontextmanager
async def tcp_listener(serve: Callable[[trio.SocketStream], Awaitable[None]]) -> AsyncIterator[Address]:
    """A listener on loopback whose connections are served by hand."""
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        yield Address("127.0.0.1", listeners[0].socket.getsockname()[1])
        nursery.cancel_scope.cancel()


async def echo(request: Request) -> Reply:
    return Reply(body=request.body, tensors=request.tensors)


class Clumsy:
    """A handler that waits, and fails while it is cancelled."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error
        self.started = trio.Event()

    async def __call__(self, request: Request) -> Reply:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                self.started.set()
                await trio.sleep_forever()
            finally:
                raise self.error("while cleaning up")
        return Reply()


class Stuck:
    """A handler that waits until it is let go, and says what happens to it."""

    def __init__(self) -> None:
        self.started = trio.Event()
        self.cancelled = trio.Event()
        self.let_go = trio.Event()
        self.num_started = 0

    async def __call__(self, request: Request) -> Reply:
        self.num_started += 1
        self.started.set()
        try:
            await self.let_go.wait()
        except trio.Cancelled:
            self.cancelled.set()
            raise
        return Reply()
