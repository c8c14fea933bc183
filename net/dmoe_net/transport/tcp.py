"""Frames over plain TCP, on one machine.

Nothing here is encrypted or authenticated, therefore it listens on loopback addresses only, and nobody at the other
end is known by name. `dmoe_net.transport.tls` is the same with both.
"""

import ipaddress

import trio

from dmoe_net.errors import ConnectionLost, ListenFailed
from dmoe_net.identity import Address, PeerId
from dmoe_net.transport.sockets import MAX_PIECES, ByteStream, SocketListener, batches, connect, listen
from dmoe_net.wire.frame_reader import FrameReader
from dmoe_net.wire.frames import MAX_BODY_BYTES, Frame, Part
from dmoe_net.wire.sinks import Sinks


class TcpLink:
    """A stream of bytes as a `dmoe_net.transport.base.Link`."""

    remote_peer_id: PeerId | None = None  # nothing is proven here
    when_heard = None

    def __init__(self, stream: ByteStream, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._stream = stream
        self.remote_address = stream.remote_address
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
        await trio.lowlevel.checkpoint()

    async def send(self, *parts: Part) -> None:
        # A chunk of a large frame: there is nothing to join or cut.
        is_chunk = len(parts) == 1 and len(parts[0].pieces) <= MAX_PIECES
        await self._stream.send([parts[0].pieces] if is_chunk else batches(parts))

    async def receive(self) -> Frame | None:
        while True:
            frame = self._reader.next_frame_untrusted()
            if frame is not None:
                return frame
            nbytes = await self._stream.receive_into(self._reader.buffers)
            if nbytes == 0:
                if self._reader.at_boundary:
                    return None
                raise ConnectionLost(f"connection to {self.remote_address} ended inside a frame")
            self._reader.received(nbytes)

    async def aclose(self) -> None:
        self._stream.close()
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        self._stream.reset()


class TcpTransport:
    """Plain TCP as a `dmoe_net.transport.base.Transport`. Stateless: one object may serve many peers.

    Args:
      max_body_bytes: frames with larger bodies are refused from the network.
    """

    peer_id: PeerId | None = None  # nothing is proven here

    def __init__(self, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes

    async def dial(self, address: Address, *, peer_id: PeerId | None = None) -> TcpLink:
        """Connect to whoever answers, at the first of a host name's addresses that does."""
        del peer_id
        return self._link(await connect(address))

    async def listen(self, address: Address) -> SocketListener:
        """Listen at a loopback address; `localhost` means 127.0.0.1."""
        return await listen(Address(_loopback_host(address), address.port), self._link)

    def _link(self, stream: ByteStream) -> TcpLink:
        return TcpLink(stream, max_body_bytes=self._max_body_bytes)


def _loopback_host(address: Address) -> str:
    host = "127.0.0.1" if address.host == "localhost" else address.host
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False  # some other name; where it leads may change
    if not is_loopback:
        raise ListenFailed(
            f"cannot listen at {address}: plain TCP is for --insecure-loopback, and listens on loopback only "
            "(127.0.0.0/8, ::1, localhost)"
        )
    return host
