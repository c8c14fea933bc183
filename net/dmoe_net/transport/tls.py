"""Frames over TLS 1.3, both ends proven: the network of a real swarm.

Before a link carries a frame, TLS refuses a peer whose certificate the swarm's key has not signed, or whose
certificate's key it does not hold; and in either direction the certificate must be a leaf of our format, its peer on
our allow-list and not ourselves, and a dialled peer the one that was asked for. A dialling end judges before it shows
its own certificate, an accepting one before it sends any data: nobody learns more of a swarm than the certificate of
the listener that it dials.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import trio

from dmoe_net.errors import ConnectionLost, DialFailed, HandshakeFailed, LocalProtocolError, RemoteProtocolError
from dmoe_net.identity import Address, PeerId
from dmoe_net.keys import Identity, Membership, certificate_chain, peer_id_of_certificate_untrusted
from dmoe_net.transport.sockets import BATCH_BYTES, ByteStream, SocketListener, batches, connect, listen
from dmoe_net.transport.tls_engine import REFUSED, TlsEngine, client_context, server_context
from dmoe_net.wire.frame_reader import FrameReader
from dmoe_net.wire.frames import MAX_BODY_BYTES, Frame, Part
from dmoe_net.wire.sinks import Sinks

_MAX_HANDSHAKE_BYTES = 64 * 1024
"""Most bytes of a peer that is not known yet. Ours send less than 2 KiB; a first frame may come along."""

_HANDSHAKE_RECEIVE_BYTES = 16 * 1024

_ENCRYPT_BYTES = 256 * 1024
"""Encrypted in one go. OpenSSL's buffer never shrinks: this bounds what each link keeps of what it sends."""


class TlsLink:
    """TLS on a stream of bytes as a `dmoe_net.transport.base.Link`.

    Args:
      admit: raises HandshakeFailed for a peer that must not be talked to.
      scratch: memory for ciphertext; all links of a transport share it.
      max_body_bytes: frames with larger bodies are refused.
    """

    when_heard = None

    def __init__(
        self,
        stream: ByteStream,
        engine: TlsEngine,
        *,
        admit: Callable[[PeerId], None],
        scratch: memoryview,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._stream = stream
        self._engine = engine
        self._admit = admit
        self._scratch = scratch
        self.remote_address = stream.remote_address
        self.remote_peer_id: PeerId | None = None  # until the peer is proven and admitted
        self.sinks = Sinks()
        self._reader = FrameReader(max_body_bytes=max_body_bytes, sinks=self.sinks)

    @property
    def num_moved(self) -> int:
        return self._stream.num_moved

    @property
    def num_received(self) -> int:
        return self._stream.num_received

    @property
    def num_sent(self) -> int:
        return self._stream.num_sent

    async def handshake(self) -> None:
        """Prove both ends. After a failure the link is closed."""
        if self.remote_peer_id is not None:
            await trio.lowlevel.checkpoint()
            return
        try:
            await self._negotiate()
            try:
                peer_id = peer_id_of_certificate_untrusted(self._engine.peer_certificate())
            except RemoteProtocolError as exc:
                raise HandshakeFailed(f"{self.remote_address} shows no certificate of a peer: {exc}") from exc
            self._admit(peer_id)
            # A dialling end's certificate leaves only here, when it knows whom it tells.
            await self._flush()
        except (HandshakeFailed, ConnectionLost):
            self._stream.reset()
            raise
        self.remote_peer_id = peer_id

    async def _negotiate(self) -> None:
        received = 0
        while True:
            try:
                if self._engine.handshake():
                    return
            except HandshakeFailed:
                # The alert says why, if it gets through. Closing and not resetting, which would drop it.
                self._stream.send_now(self._engine.take_ciphertext())
                self._stream.close()
                raise
            await self._flush()
            if received > _MAX_HANDSHAKE_BYTES:
                raise HandshakeFailed(f"{self.remote_address} sent {received} bytes and no end of a handshake")
            try:
                nbytes = await self._stream.receive_into(lambda: (self._scratch[:_HANDSHAKE_RECEIVE_BYTES],))
            except ConnectionLost as exc:
                if received or not self._engine.awaits_verdict or not isinstance(exc.__cause__, OSError):
                    raise
                # Whoever speaks another protocol drops our first message unread, which its system tells as a reset.
                raise HandshakeFailed(f"{self.remote_address} does not speak our TLS, or went down: {exc}") from exc
            if nbytes == 0:
                raise ConnectionLost(f"{self.remote_address} went away during the handshake")
            received += nbytes
            self._engine.feed(self._scratch[:nbytes])

    async def _flush(self) -> None:
        if ciphertext := self._engine.take_ciphertext():
            await self._stream.send([[ciphertext]])

    async def send(self, *parts: Part) -> None:
        self._check_usable()
        await self._stream.send(list(self._encrypted(batch)) for batch in batches(parts))

    def _encrypted(self, batch: Sequence[bytes | memoryview]) -> Iterator[bytes]:
        for piece in batch:
            for start in range(0, len(piece), _ENCRYPT_BYTES):
                self._engine.encrypt(memoryview(piece)[start : start + _ENCRYPT_BYTES])
                if self._engine.num_waiting >= _ENCRYPT_BYTES:
                    yield self._engine.take_ciphertext()
        if self._engine.num_waiting:
            yield self._engine.take_ciphertext()

    async def receive(self) -> Frame | None:
        self._check_usable()
        while True:
            frame = self._reader.next_frame_untrusted()
            if frame is not None:
                return frame
            nbytes = self._engine.decrypt_into(self._reader.buffer())
            if nbytes:
                self._reader.received(nbytes)
            elif self._engine.is_closed_by_peer:
                if self._reader.at_boundary:
                    return None
                raise ConnectionLost(f"connection to {self.remote_address} ended inside a frame")
            else:
                await self._receive_ciphertext()

    async def _receive_ciphertext(self) -> None:
        try:
            nbytes = await self._stream.receive_into(lambda: (self._scratch,))
            if nbytes == 0:  # anybody on the way can forge this end, and cut off what should have come before it
                raise ConnectionLost(f"connection to {self.remote_address} lost: it ended without a farewell")
        except ConnectionLost as exc:
            if self._engine.awaits_verdict and not self._stream.is_closed:
                raise HandshakeFailed(f"{self.remote_address} went down, or {REFUSED}") from exc
            raise
        self._engine.feed(self._scratch[:nbytes])

    def _check_usable(self) -> None:
        if self._stream.is_closed:
            raise ConnectionLost(f"connection to {self.remote_address} lost: it was closed on this side")
        # OpenSSL would finish the handshake by itself, and nobody would look at who it is.
        if self.remote_peer_id is None:
            raise LocalProtocolError(f"the link with {self.remote_address} needs its handshake first")

    async def aclose(self) -> None:
        """Say farewell (close_notify), do not wait for the peer's, and close."""
        try:
            # Inside a record, or of somebody unknown, there is no farewell.
            if self.remote_peer_id is None or self._stream.is_sending or self._stream.is_closed:
                await trio.lowlevel.checkpoint()
            else:
                self._engine.close()
                with suppress(ConnectionLost):
                    await self._flush()
        finally:
            self._stream.close()

    def abort(self) -> None:
        self._stream.reset()


class TlsTransport:
    """TLS as a `dmoe_net.transport.base.Transport`: one peer's access to one swarm, within one run of trio.

    Args:
      identity: who we are.
      membership: who else may be.
      max_body_bytes: frames with larger bodies are refused from the network.
    """

    def __init__(
        self, identity: Identity, *, membership: Membership | None = None, max_body_bytes: int = MAX_BODY_BYTES
    ) -> None:
        self.peer_id: PeerId | None = identity.peer_id
        self._membership = Membership() if membership is None else membership
        self._max_body_bytes = max_body_bytes
        chain = certificate_chain(identity, self._membership)
        self._server_context = server_context(chain)
        self._client_context = client_context(chain)
        # Shared by all links: each moves what it received here to its engine before another task runs.
        self._scratch = memoryview(bytearray(BATCH_BYTES))

    async def dial(self, address: Address, *, peer_id: PeerId | None = None) -> TlsLink:
        """Connect and prove both ends. The first of a host name's addresses that answers is taken."""

        def admit(remote: PeerId) -> None:
            if remote == self.peer_id:
                raise HandshakeFailed(f"{address}: that is this peer itself")
            if peer_id is not None and remote != peer_id:
                raise HandshakeFailed(f"{address} is peer {remote}, expected {peer_id}")
            self._admit(remote)

        stream = await connect(address)
        try:
            link = self._link(stream, TlsEngine(self._client_context, remote=str(address)), admit)
            await link.handshake()
        except (HandshakeFailed, ConnectionLost) as exc:
            raise DialFailed(str(exc)) from exc
        except BaseException:
            stream.reset()
            raise
        return link

    async def listen(self, address: Address) -> SocketListener:
        """Listen at any address of this machine; a host name means the first of its addresses."""
        return await listen(address, self._accepted_link)

    def _accepted_link(self, stream: ByteStream) -> TlsLink:
        return self._link(stream, TlsEngine(self._server_context, remote=str(stream.remote_address)), self._admit)

    def _link(self, stream: ByteStream, engine: TlsEngine, admit: Callable[[PeerId], None]) -> TlsLink:
        return TlsLink(stream, engine, admit=admit, scratch=self._scratch, max_body_bytes=self._max_body_bytes)

    def _admit(self, remote: PeerId) -> None:
        if remote == self.peer_id:
            raise HandshakeFailed(f"{remote} has our own identity: is its file in use twice?")
        if not self._membership.admits(remote):
            raise HandshakeFailed(f"{remote} is not on our allow-list")
