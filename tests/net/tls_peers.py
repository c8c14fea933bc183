"""Two ends of encrypted links, honest ones and ones moved by hand, for the tests of TLS."""

import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import trio

from dmoe_net.errors import ConnectionLost, HandshakeFailed, NetError
from dmoe_net.identity import Address, PeerId
from dmoe_net.keys import CertificateChain, Identity, Membership, certificate_chain
from dmoe_net.transport.tls import TlsLink, TlsTransport
from dmoe_net.transport.tls_engine import TlsEngine, client_context
from tests.net.link_frames import numbered, parts_of

ANY_PORT = Address("127.0.0.1", 0)
ALICE, BOB, EVE = (Identity.from_seed(name * 32) for name in (b"a", b"b", b"e"))
OPEN = Membership()
SECRET = Membership(secret=b"correct horse battery staple")
OTHER_SECRET = Membership(secret=b"incorrect horse battery staple")


def allowing(*peers: Identity) -> Membership:
    """A swarm without a secret but with an allow-list."""
    return Membership(allowed=frozenset(peer.peer_id for peer in peers))


async def caught(operation: Callable[[], Awaitable[object]]) -> NetError | None:
    """The error that an operation of the network ends with."""
    try:
        await operation()
    except NetError as exc:
        return exc
    return None


async def dial_and_accept(
    dialler: TlsTransport, acceptor: TlsTransport, *, peer_id: PeerId | None = None
) -> tuple[TlsLink | NetError, TlsLink, NetError | None]:
    """One connection: the dialled link or why there is none, the accepted one, and how its handshake failed."""
    listener = await acceptor.listen(ANY_PORT)
    dialled: list[TlsLink | NetError] = []

    async def dial() -> None:
        try:
            dialled.append(await dialler.dial(listener.address, peer_id=peer_id))
        except NetError as exc:
            dialled.append(exc)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dial)
        accepted = await listener.accept()
        error = await caught(accepted.handshake)
    await listener.aclose()
    return dialled[0], accepted, error


@contextlib.asynccontextmanager
async def link_pair(membership: Membership = OPEN, **options: int) -> AsyncIterator[tuple[TlsLink, TlsLink]]:
    """Alice's dialled and Bob's accepted end of a connection; aborted in the end."""
    dialled, accepted, error = await dial_and_accept(
        TlsTransport(ALICE, membership=membership, **options), TlsTransport(BOB, membership=membership, **options)
    )
    assert isinstance(dialled, TlsLink)
    assert error is None
    try:
        yield dialled, accepted
    finally:
        dialled.abort()
        accepted.abort()


class RawPeer:
    """One end of a connection whose TLS is moved by hand."""

    def __init__(self, stream: trio.SocketStream, context: ssl.SSLContext) -> None:
        self.stream = stream
        self.engine = TlsEngine(context, remote="the library")

    async def handshake(self) -> None:
        """To the end, or the other side's."""
        while not self.engine.handshake():
            await self.flush()
            data = await self.stream.receive_some()
            if not data:
                raise ConnectionLost("no more")
            self.engine.feed(memoryview(data))
        await self.flush()

    async def flush(self) -> None:
        """Send what there is to send."""
        await self.stream.send_all(self.engine.take_ciphertext())

    async def send(self, plaintext: bytes) -> None:
        """Send bytes that need not be frames."""
        self.engine.encrypt(plaintext)
        await self.flush()

    async def received(self) -> bytes:
        """All plaintext until the other side ends the connection, however it does."""
        plaintext = bytearray()
        buffer = memoryview(bytearray(2**16))
        with contextlib.suppress(NetError, trio.BrokenResourceError):
            while True:
                while nbytes := self.engine.decrypt_into(buffer):
                    plaintext += buffer[:nbytes]
                data = await self.stream.receive_some()
                if not data:
                    break
                self.engine.feed(memoryview(data))
        return bytes(plaintext)


@contextlib.asynccontextmanager
async def raw_dialler(
    context: ssl.SSLContext | None = None, membership: Membership = OPEN
) -> AsyncIterator[tuple[RawPeer, TlsLink]]:
    """A hand-moved dialler, Alice unless its context says otherwise, and Bob's accepted link, both before their
    handshake."""
    listener = await TlsTransport(BOB, membership=membership).listen(ANY_PORT)
    async with await trio.open_tcp_stream("127.0.0.1", listener.address.port) as stream:
        link = await listener.accept()
        await listener.aclose()
        yield RawPeer(stream, context or client_context(certificate_chain(ALICE, OPEN))), link
        link.abort()


@contextlib.asynccontextmanager
async def raw_pair() -> AsyncIterator[tuple[RawPeer, TlsLink]]:
    """A hand-moved Alice and Bob's link, after their handshake."""
    async with raw_dialler() as (raw, link):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raw.handshake)
            await link.handshake()
        yield raw, link


@contextlib.asynccontextmanager
async def raw_listener(context: ssl.SSLContext, serve: Callable[[RawPeer], Awaitable[None]]) -> AsyncIterator[Address]:
    """A listener whose first connection is moved by hand."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def accept() -> None:
        async with await listener.accept() as stream:
            await serve(RawPeer(stream, context))

    async with listener, trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        yield Address("127.0.0.1", listener.socket.getsockname()[1])


def trusting(chain: CertificateChain, trusted: CertificateChain) -> CertificateChain:
    """Shows one chain and trusts another's."""
    return replace(chain, swarm_certificate=trusted.swarm_certificate)


def assert_refused(link: TlsLink, error: NetError | None, why: str) -> None:
    """An accepted link whose handshake failed is closed, and was never of use."""
    assert isinstance(error, HandshakeFailed)
    assert why in str(error)
    assert "\n" not in str(error)
    assert link.remote_peer_id is None


def hostile_context(pem: bytes, path: Path, *, is_server: bool = False) -> ssl.SSLContext:
    """Shows what `pem` says, trusts everybody."""
    path.write_bytes(pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if pem:
        context.load_cert_chain(path)
    return context


async def rejection(context: ssl.SSLContext) -> NetError | None:
    """Error of an accepted link's handshake with this dialler, or None; the dialler must not hear a byte of data."""
    async with raw_dialler(context) as (raw, link), trio.open_nursery() as nursery:
        error: NetError | None = None

        async def listener() -> None:
            nonlocal error
            error = await caught(link.handshake)
            await caught(lambda: link.send(*parts_of(numbered(1))))

        nursery.start_soon(listener)
        with contextlib.suppress(NetError, trio.BrokenResourceError):
            await raw.handshake()
        assert await raw.received() == b""
        assert link.remote_peer_id is None
    return error
