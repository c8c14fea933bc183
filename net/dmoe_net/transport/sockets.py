"""Sockets of plain and encrypted links: connecting, listening, accepting, and a stream of bytes.

Unlike `trio.SocketStream`, a stream here receives by `recv_into` straight into memory of the caller's (measured: 0.72
of a blocking socket's rate, against 0.37), and all that one `recv` brought is used before the next one (with coalesced
writes, 2.5 times the small calls per second).
"""

import errno
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

import trio

from dmoe_net.errors import ConnectionLost, DialFailed, ListenFailed
from dmoe_net.identity import Address
from dmoe_net.transport.base import Link
from dmoe_net.wire.frames import Part

_log = logging.getLogger(__name__)

BATCH_BYTES = 512 * 1024
"""Handed to the network in one go, about: the system call then costs little beside the copy or the cipher. It is also
the most that the system may hold unsent, where it can be told so: the rest waits here, where a small call overtakes
it."""

_JOIN_BYTES = 16 * 1024
"""Neighbouring pieces below this are copied together, which costs about as much as one more piece; larger ones are
sent from where they lie. One TLS record holds no more."""

_TURN_BYTES = 2**20
"""Received from one connection, or sent on it, before other tasks get a turn: up to a millisecond's work. With a
quarter of it an all-reduce over plain TCP took 6 % more processor time."""

MAX_PIECES = 64
"""Pieces in one system call: well below every system's limit (POSIX promises 16, all that matter have 1024)."""

_BACKLOG = 128  # connections that the kernel holds until they are accepted: Linux's own long-standing default

_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
"""`accept` failed for want of descriptors or memory: wait for some, as `trio.serve_listeners` does."""

_ACCEPT_RETRY_S = 0.1
_LINGER_ZERO = struct.pack("ii", 1, 0)  # struct linger: on, 0 s; closing then resets the connection
_CAN_GATHER = hasattr(socket.socket, "sendmsg") and hasattr(socket.socket, "recvmsg_into")  # not on Windows


class ByteStream:
    """A connected socket: bytes in, bytes out, errors as ours. One task sends, one receives.

    Args:
      sock: connected; the stream takes it over.
      remote_address: the other end's name in messages.
    """

    def __init__(self, sock: trio.socket.SocketType, remote_address: Address) -> None:
        # Writes are gathered in `batches`; each should leave at once.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # Linux and macOS
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, BATCH_BYTES)
        # Trio's `recv_into` lets other tasks run between filling the buffer and returning. Here nothing runs in
        # between, and that is why all links of a transport can share one buffer for what they receive encrypted.
        self._sock = socket.socket(fileno=sock.detach())
        self._sock.setblocking(False)
        self.is_sending = False
        """True while a task sends, and for ever once one has failed or was cancelled: part of it may have left."""
        self._turn_bytes = self._sent_turn_bytes = 0  # received and sent since others had a turn
        self.num_moved = 0
        """Bytes received so far, and sent after the system's buffer had been full."""
        self.num_received = self.num_sent = 0
        """Bytes so far, as they came from the system and as it took them."""
        self.remote_address = remote_address

    @property
    def is_closed(self) -> bool:
        """Closed on this side."""
        return self._sock.fileno() < 0

    async def send(self, batches: Iterable[Sequence[bytes | memoryview]]) -> None:
        """Send batches of pieces, none of which is empty, in as few system calls as it takes. No checkpoint while the
        system takes them at once, but one for every `_TURN_BYTES` at least.

        Raises:
          trio.BusyResourceError: `is_sending`.
          ConnectionLost: the connection is down or closed.
        """
        if self.is_sending:
            raise trio.BusyResourceError("another task sends on this link, or was cancelled while it did")
        self.is_sending = True
        for batch in batches:
            await self._send_all(batch)
        self.is_sending = False

    async def _send_all(self, pieces: Sequence[bytes | memoryview]) -> None:
        left = pieces if _CAN_GATHER else [b"".join(pieces)]
        was_full = False  # the system's buffer; then there is room again only if the other end takes something
        try:
            while left:
                if self._sent_turn_bytes >= _TURN_BYTES:
                    self._sent_turn_bytes = 0
                    await trio.lowlevel.checkpoint()
                try:
                    sent = self._sock.sendmsg(left) if len(left) > 1 else self._sock.send(left[0])
                except BlockingIOError:
                    self._sent_turn_bytes = 0
                    await trio.lowlevel.wait_writable(self._sock)
                    was_full = True
                    continue
                self._sent_turn_bytes += sent
                self.num_sent += sent
                if was_full:
                    self.num_moved += sent
                left = _rest(left, sent)
        except (OSError, trio.ClosedResourceError) as exc:
            raise self._lost(exc) from exc

    def send_now(self, data: bytes) -> None:
        """Send as much as the socket takes at once: a last word to a peer that is not worth waiting for."""
        with suppress(OSError):
            self.num_sent += self._sock.send(data)

    async def receive_into(self, buffers: Callable[[], tuple[memoryview, ...]]) -> int:
        """Fill buffers, one after the other, with the bytes that are there, or that come first; return their number, 0
        once the peer has ended its side. Checkpoints are those of `send`.

        Args:
          buffers: called when there may be something to read. No other task runs between that and the return: memory
            that is withdrawn while this waits is not written to.

        Raises:
          ConnectionLost: the connection is down, or was closed, perhaps meanwhile.
        """
        try:
            while True:
                if self._turn_bytes < _TURN_BYTES:
                    try:
                        nbytes = self._recv(buffers())
                    except BlockingIOError:
                        pass
                    else:
                        self._turn_bytes += nbytes
                        self.num_moved += nbytes
                        self.num_received += nbytes
                        return nbytes
                self._turn_bytes = 0
                if self.is_closed:
                    raise trio.ClosedResourceError("it was closed on this side")
                await trio.lowlevel.wait_readable(self._sock)
        except (OSError, trio.ClosedResourceError) as exc:
            raise self._lost(exc) from exc

    def _recv(self, buffers: tuple[memoryview, ...]) -> int:
        if len(buffers) == 1 or not _CAN_GATHER:
            return self._sock.recv_into(buffers[0])
        return self._sock.recvmsg_into(buffers)[0]

    def close(self) -> None:
        """Close; what was sent still leaves. Idempotent; wakes the tasks that wait here."""
        if not self.is_closed:
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()

    def reset(self) -> None:
        """Close and drop what has not left. Idempotent; wakes the tasks that wait here."""
        if not self.is_closed:
            # Also leaves no TIME_WAIT behind for a peer that is thrown out again and again.
            with suppress(OSError):  # macOS refuses options of a connection that is down
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
            self.close()

    def _lost(self, exc: Exception) -> ConnectionLost:
        why = "it was closed on this side" if self.is_closed else reason(exc)
        return ConnectionLost(f"connection to {self.remote_address} lost: {why}")


def batches(parts: Iterable[Part]) -> Iterator[list[bytes | memoryview]]:
    """The parts' bytes, about `BATCH_BYTES` at a time (at most twice that): small pieces joined, large ones cut."""
    batch: list[bytes | memoryview] = []
    small: list[bytes | memoryview] = []
    nbytes = 0
    for part in parts:
        for piece in part.pieces:
            if not len(piece):
                continue
            if len(piece) < _JOIN_BYTES:
                small.append(piece)
                nbytes += len(piece)
            else:
                if small:
                    batch.append(b"".join(small))
                    small = []
                for start in range(0, len(piece), BATCH_BYTES):
                    cut = piece if len(piece) <= BATCH_BYTES else memoryview(piece)[start : start + BATCH_BYTES]
                    batch.append(cut)
                    nbytes += len(cut)
                    if nbytes >= BATCH_BYTES:
                        yield batch
                        batch, nbytes = [], 0
            if nbytes >= BATCH_BYTES or len(batch) >= MAX_PIECES:
                yield [*batch, b"".join(small)] if small else batch
                batch, small, nbytes = [], [], 0
    if nbytes:
        yield [*batch, b"".join(small)] if small else batch


async def connect(address: Address) -> ByteStream:
    """Connect to the first of a host name's addresses that answers; the next is tried beside an address that has not
    answered within a quarter of a second (RFC 8305). If cancelled, nothing is left open.

    Raises:
      DialFailed: none does; one line says why.
    """
    try:
        stream = await trio.open_tcp_stream(address.host, address.port)
        return ByteStream(stream.socket, address)
    except (socket.gaierror, ValueError) as exc:  # ValueError: not a name that IDNA can express, or a NUL in it
        raise DialFailed(f"cannot resolve {address}: {reason(exc)}") from exc
    except OSError as exc:
        causes = exc.__cause__.exceptions if isinstance(exc.__cause__, ExceptionGroup) else [exc]
        raise DialFailed(f"cannot connect to {address}: {'; '.join(dict.fromkeys(map(reason, causes)))}") from exc


async def listen(address: Address, make_link: Callable[[ByteStream], Link]) -> "SocketListener":
    """Listen at an address, or at the first of a host name's addresses.

    Raises:
      ListenFailed: the address is taken, not ours, or no address.
    """
    try:
        found = await trio.socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, sockaddr = found[0]
        sock = trio.socket.socket(family, kind, protocol)
    except (OSError, ValueError) as exc:
        raise ListenFailed(f"cannot listen at {address}: {reason(exc)}") from exc
    try:
        if os.name == "posix":  # elsewhere the option would let two processes share a port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await sock.bind(sockaddr)
        sock.listen(_BACKLOG)
    except OSError as exc:
        sock.close()
        raise ListenFailed(f"cannot listen at {address}: {reason(exc)}") from exc
    except BaseException:
        sock.close()
        raise
    return SocketListener(sock, Address(address.host, sock.getsockname()[1]), make_link)


class SocketListener:
    """A listening socket as a `dmoe_net.transport.base.Listener`; `make_link` makes a link of each connection."""

    def __init__(self, sock: trio.socket.SocketType, address: Address, make_link: Callable[[ByteStream], Link]) -> None:
        self._sock = sock
        self.address = address
        self._make_link = make_link

    async def accept(self) -> Link:
        while True:
            try:
                accepted, remote = await self._sock.accept()
            except trio.ClosedResourceError as exc:
                raise ListenFailed(f"no longer listening at {self.address}") from exc
            except OSError as exc:
                if exc.errno in _OUT_OF_RESOURCES:
                    _log.error("cannot accept at %s: %s; trying again", self.address, reason(exc))
                    await trio.sleep(_ACCEPT_RETRY_S)
                elif exc.errno != errno.ECONNABORTED:  # that one: the peer gave up in the queue
                    raise ListenFailed(f"cannot accept at {self.address}: {reason(exc)}") from exc
                continue
            try:
                stream = ByteStream(accepted, Address(_plain_host(remote[0]), remote[1]))
            except OSError:  # reset between accept and setsockopt: not the listener's trouble
                accepted.close()
            else:
                return self._make_link(stream)

    async def aclose(self) -> None:
        self._sock.close()
        await trio.lowlevel.checkpoint()


def reason(exc: BaseException) -> str:
    """One line for people."""
    if isinstance(exc, OSError) and not isinstance(exc, socket.gaierror) and exc.errno:
        return os.strerror(exc.errno)  # trio's own text repeats the address
    return (getattr(exc, "strerror", None) or str(exc) or type(exc).__name__).splitlines()[0]


def _plain_host(host: str) -> str:
    """An IPv4 peer of an IPv6 socket by its IPv4 address, which peers without IPv6 can dial too."""
    if host.startswith("::ffff:"):
        mapped = ipaddress.IPv6Address(host).ipv4_mapped
        return host if mapped is None else str(mapped)
    return host


def _rest(pieces: Sequence[bytes | memoryview], sent: int) -> Sequence[bytes | memoryview]:
    """The rest of the pieces after their first `sent` bytes."""
    for index, piece in enumerate(pieces):
        if sent < len(piece):
            return [memoryview(piece)[sent:], *pieces[index + 1 :]]
        sent -= len(piece)
    return []
