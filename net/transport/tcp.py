"""Frames over plain TCP, on one machine.

Nothing here is encrypted or authenticated, therefore it listens on loopback addresses only. The encrypted transport
has the same shape.

Why sockets and not `trio.SocketStream`: bodies are received by `recv_into` straight into their final aligned buffer
(measured: 0.72 of a blocking socket's rate, against 0.37 for `receive_some` and joining), and all frames that one
`recv` brought are parsed before the next one (with coalesced writes, 2.5 times the small calls per second).
"""

import errno
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Iterable, Iterator

import trio

from net.errors import ConnectionLost, DialFailed, ListenFailed
from net.identity import Address
from net.wire.frames import MAX_BODY_BYTES, EncodedFrame, Frame, FrameReader

_log = logging.getLogger(__name__)

_COALESCE_BYTES = 64 * 1024
"""Pieces below this are copied together into one write; larger ones are sent from where they lie. At this size a copy
(13 us) costs about as much as the system call that it saves."""

_BACKLOG = 128
"""Connections that the kernel holds until they are accepted: Linux's own long-standing default bound."""

_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
"""`accept` failed for want of descriptors or memory: wait for some, as `trio.serve_listeners` does."""

_ACCEPT_RETRY_S = 0.1
_LINGER_ZERO = struct.pack("ii", 1, 0)  # struct linger: on, 0 s; closing then resets the connection


class TcpLink:
    """A connected socket as a `net.transport.base.Link`."""

    def __init__(
        self, sock: trio.socket.SocketType, remote_address: Address, *, max_body_bytes: int = MAX_BODY_BYTES
    ) -> None:
        self._sock = sock
        self._remote_address = remote_address
        self._reader = FrameReader(max_body_bytes=max_body_bytes)
        self._is_sending = False
        self._is_closed = False
        # Writes are coalesced above; what is written should leave at once.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def remote_address(self) -> Address:
        """See `Link.remote_address`."""
        return self._remote_address

    async def send(self, *frames: EncodedFrame) -> None:
        """See `Link.send`. After a failed or cancelled send every later one raises `ConnectionLost`.

        Raises:
          trio.BusyResourceError: another task is sending.
        """
        if self._is_sending:
            raise trio.BusyResourceError("another task sends on this link, or was cancelled while it did")
        self._is_sending = True  # stays so after a failure: the stream may end inside a frame
        try:
            for chunk in _chunks(frames):
                await self._send_chunk(chunk)
        except (OSError, trio.ClosedResourceError) as exc:
            raise ConnectionLost(f"connection to {self._remote_address} lost: {_reason(exc)}") from exc
        self._is_sending = False

    async def _send_chunk(self, chunk: bytes | memoryview) -> None:
        sent = await self._sock.send(chunk)
        if sent < len(chunk):
            view = memoryview(chunk)
            while sent < len(chunk):
                sent += await self._sock.send(view[sent:])

    async def receive(self) -> Frame | None:
        """See `Link.receive`."""
        while True:
            frame = self._reader.next_frame_untrusted()
            if frame is not None:
                return frame
            try:
                nbytes = await self._sock.recv_into(self._reader.buffer())
            except (OSError, trio.ClosedResourceError) as exc:
                raise ConnectionLost(f"connection to {self._remote_address} lost: {_reason(exc)}") from exc
            if nbytes == 0:
                if self._reader.at_boundary:
                    return None
                raise ConnectionLost(f"connection to {self._remote_address} ended inside a frame")
            self._reader.received(nbytes)

    async def aclose(self) -> None:
        """See `Link.aclose`."""
        self._close()
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        """See `Link.abort`."""
        if not self._is_closed:
            # Also leaves no TIME_WAIT behind for a peer that is thrown out again and again.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
            self._close()

    def _close(self) -> None:
        self._is_closed = True
        self._sock.close()


class TcpListener:
    """A listening socket as a `net.transport.base.Listener`."""

    def __init__(self, sock: trio.socket.SocketType, address: Address, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._sock = sock
        self._address = address
        self._max_body_bytes = max_body_bytes

    @property
    def address(self) -> Address:
        """See `Listener.address`."""
        return self._address

    async def accept(self) -> TcpLink:
        """See `Listener.accept`."""
        while True:
            try:
                sock, remote = await self._sock.accept()
            except trio.ClosedResourceError as exc:
                raise ListenFailed(f"no longer listening at {self._address}") from exc
            except OSError as exc:
                if exc.errno in _OUT_OF_RESOURCES:
                    _log.error("cannot accept at %s: %s; trying again", self._address, _reason(exc))
                    await trio.sleep(_ACCEPT_RETRY_S)
                elif exc.errno != errno.ECONNABORTED:  # that one: the peer gave up in the queue
                    raise ListenFailed(f"cannot accept at {self._address}: {_reason(exc)}") from exc
                continue
            try:
                return TcpLink(sock, Address(remote[0], remote[1]), max_body_bytes=self._max_body_bytes)
            except OSError:  # reset between accept and setsockopt: not the listener's trouble
                sock.close()

    async def aclose(self) -> None:
        """See `Listener.aclose`."""
        self._sock.close()
        await trio.lowlevel.checkpoint()


class TcpTransport:
    """Plain TCP as a `net.transport.base.Transport`. Stateless: one object may serve many peers.

    Args:
      max_body_bytes: frames with larger bodies are refused from the network.
    """

    def __init__(self, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes

    async def dial(self, address: Address) -> TcpLink:
        """See `Transport.dial`. A host name's addresses are tried in turn."""
        try:
            found = await trio.socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as exc:  # UnicodeError: not a name that IDNA can express
            raise DialFailed(f"cannot resolve {address}: {_reason(exc)}") from exc
        reasons = []
        for family, kind, protocol, _, sockaddr in found:
            try:
                sock = trio.socket.socket(family, kind, protocol)
            except OSError as exc:  # no descriptors left, or a family that this machine lacks
                reasons.append(_reason(exc))
                continue
            try:
                await sock.connect(sockaddr)
                return TcpLink(sock, address, max_body_bytes=self._max_body_bytes)
            except OSError as exc:
                sock.close()
                reasons.append(_reason(exc))
            except BaseException:
                sock.close()
                raise
        raise DialFailed(f"cannot connect to {address}: {'; '.join(dict.fromkeys(reasons))}")

    async def listen(self, address: Address) -> TcpListener:
        """See `Transport.listen`. Only loopback addresses are allowed; `localhost` means 127.0.0.1."""
        host = _loopback_host(address)
        sock = trio.socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            if os.name == "posix":  # elsewhere the option would let two processes share a port
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            await sock.bind((host, address.port))
            sock.listen(_BACKLOG)
        except OSError as exc:
            sock.close()
            raise ListenFailed(f"cannot listen at {address}: {_reason(exc)}") from exc
        except BaseException:
            sock.close()
            raise
        return TcpListener(sock, Address(host, sock.getsockname()[1]), max_body_bytes=self._max_body_bytes)


def _loopback_host(address: Address) -> str:
    host = "127.0.0.1" if address.host == "localhost" else address.host
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False  # some other name; where it leads may change
    if not is_loopback:
        raise ListenFailed(
            f"cannot listen at {address}: plain TCP listens on loopback only (127.0.0.0/8, ::1, localhost) "
            "until the encrypted transport comes"
        )
    return host


def _chunks(frames: Iterable[EncodedFrame]) -> Iterator[bytes | memoryview]:
    """The frames' bytes as few pieces: small ones joined, large ones as they are."""
    small: list[bytes | memoryview] = []
    small_nbytes = 0
    for frame in frames:
        for piece in (frame.head, *frame.body):
            if len(piece) >= _COALESCE_BYTES:
                if small:
                    yield b"".join(small)
                    small, small_nbytes = [], 0
                yield piece
                continue
            small.append(piece)
            small_nbytes += len(piece)
            if small_nbytes >= _COALESCE_BYTES:
                yield b"".join(small)
                small, small_nbytes = [], 0
    if small:
        yield b"".join(small)


def _reason(exc: BaseException) -> str:
    """One line for people."""
    if isinstance(exc, OSError) and not isinstance(exc, socket.gaierror) and exc.errno:
        return os.strerror(exc.errno)  # trio's own text repeats the address
    return (getattr(exc, "strerror", None) or str(exc) or type(exc).__name__).splitlines()[0]
