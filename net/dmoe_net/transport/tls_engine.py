"""TLS 1.3 without the network: ciphertext in and out of memory, plaintext in and out of the caller's buffers.

OpenSSL works in records of 16 KiB. Fed through a socket, each costs two system calls to read; here 512 KiB come in at
once, and each record is decrypted into the place where its plaintext belongs.
"""

import os
import ssl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from dmoe_net.errors import ConnectionLost, HandshakeFailed, RemoteProtocolError
from dmoe_net.keys import CertificateChain

_MAX_REPLY_BYTES = 16 * 1024
"""Bound of OpenSSL's own answers, which leave with our next data: some 30 bytes for each request for new keys. No
honest peer asks more than once in millions of records; one that asks on and on would fill our memory."""

REFUSED = "refused us: another swarm secret, or we are not on its allow-list"


def server_context(chain: CertificateChain) -> ssl.SSLContext:
    """The context of all connections that a process accepts."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, chain)
    # Nothing is resumed: every connection proves both ends anew, and a listener says nothing before it has judged.
    context.num_tickets = 0
    return context


def client_context(chain: CertificateChain) -> ssl.SSLContext:
    """The context of all connections that a process dials."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, chain)


def _context(protocol: int, chain: CertificateChain) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)  # bare: no certificates of the system's, no key log
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # peers are keys, wherever they live
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=chain.swarm_certificate)
    with _private_file(chain.pem) as path:
        context.load_cert_chain(path)
    return context


@contextmanager
def _private_file(content: bytes) -> Iterator[str]:
    """A file that only we can read, for the block: `ssl` loads keys from files only. On Linux it never is on disk."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("key")
        path = f"/proc/self/fd/{descriptor}"
        try:
            if os.access(path, os.R_OK):  # not where /proc is not mounted
                os.write(descriptor, content)
                yield path
                return
        finally:
            os.close(descriptor)
    descriptor, path = tempfile.mkstemp()  # mode 600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        yield path
    finally:
        os.unlink(path)


class TlsEngine:
    """One end of one TLS connection. Its owner moves the ciphertext: `feed` what arrived, send `take_ciphertext`.

    Args:
      context: of `server_context` or `client_context`, which decides the role.
      remote: the other end's name in messages.
    """

    def __init__(self, context: ssl.SSLContext, *, remote: str) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._is_client = context.protocol == ssl.PROTOCOL_TLS_CLIENT
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_side=not self._is_client)
        # The type stubs know only the form of `read` that returns bytes.
        self._read_into: Callable[[int, memoryview], int] = self._ssl.read  # type: ignore[assignment]
        self._remote = remote
        self._has_decrypted = False
        self._is_broken = False  # after an error OpenSSL takes nothing more, and would wait for it for ever
        self.is_closed_by_peer = False
        """The peer has said that it sends no more (close_notify)."""

    @property
    def awaits_verdict(self) -> bool:
        """True if we dialled and have heard nothing yet: a TLS 1.3 client finishes its handshake before the server has
        judged it."""
        return self._is_client and not self._has_decrypted

    def handshake(self) -> bool:
        """Take the handshake as far as it goes; True once it is finished, otherwise more must be fed. There may be
        ciphertext to send, after an error too.

        Raises:
          HandshakeFailed: the other end is not of our swarm, or does not speak TLS 1.3.
        """
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLCertVerificationError as exc:
            why = f"it has another swarm secret, or none ({exc.verify_message})"
            raise HandshakeFailed(f"{self._remote} is not of our swarm: {why}") from exc
        except ssl.SSLError as exc:
            raise HandshakeFailed(f"{self._remote} {_explain(exc)}") from exc
        return True

    def peer_certificate(self) -> bytes:
        """The other end's leaf (DER), once the handshake has proven that it holds the key."""
        certificate = self._ssl.getpeercert(binary_form=True)
        assert certificate is not None  # CERT_REQUIRED
        return certificate

    def feed(self, ciphertext: memoryview) -> None:
        """Take in what arrived. The caller bounds it, and calls `decrypt_into` until that returns 0 before the next."""
        self._incoming.write(ciphertext)

    @property
    def num_waiting(self) -> int:
        """Bytes of ciphertext that are to be sent."""
        return self._outgoing.pending

    def take_ciphertext(self) -> bytes:
        """All that is to be sent, perhaps nothing."""
        return self._outgoing.read()

    def encrypt(self, plaintext: bytes | memoryview) -> None:
        """Encrypt, only after the handshake; ConnectionLost if the connection has failed or was closed before. The
        caller takes the ciphertext out before there is too much of it."""
        try:
            self._ssl.write(plaintext)
        except ssl.SSLError as exc:
            raise ConnectionLost(f"connection to {self._remote} lost: {exc.reason}") from exc

    def decrypt_into(self, buffer: memoryview) -> int:
        """Decrypt into the front of `buffer`, as much as there is and fits; return the number of bytes, 0 when more
        must be fed (or never, if `is_closed_by_peer`).

        Raises:
          HandshakeFailed: the server does not admit us.
          ConnectionLost: the peer has given up for another reason.
          RemoteProtocolError: it is no TLS, or was tampered with.
        """
        if self._is_broken:
            raise ConnectionLost(f"connection to {self._remote} lost: its encryption has failed before")
        filled = 0
        try:
            size = len(buffer)
            while filled < size:  # until it wants more: to ask beforehand would take longer than the exception
                nbytes = self._read_into(size - filled, buffer[filled:])
                if nbytes == 0:
                    self.is_closed_by_peer = True
                    break
                filled += nbytes
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.is_closed_by_peer = True
        except ssl.SSLError as exc:
            self._is_broken = True
            if "ALERT" not in (exc.reason or ""):
                raise RemoteProtocolError(f"{self._remote} {_explain(exc)}") from exc
            if self.awaits_verdict:
                raise HandshakeFailed(f"{self._remote} {REFUSED}") from exc
            raise ConnectionLost(f"{self._remote} gave up: {exc.reason}") from exc
        if self._outgoing.pending > _MAX_REPLY_BYTES:
            raise RemoteProtocolError(f"{self._remote} asks for new keys on and on")
        self._has_decrypted = self._has_decrypted or filled > 0
        return filled

    def close(self) -> None:
        """Tell the peer that we send no more (close_notify)."""
        with suppress(ssl.SSLError):  # WANT_READ, or the peer was still sending: what matters has been written
            self._ssl.unwrap()


def _explain(exc: ssl.SSLError) -> str:
    if "ALERT" in (exc.reason or ""):
        return REFUSED
    text = (exc.reason or str(exc)).lower().replace("_", " ")
    # What OpenSSL says of plain frames, or of any other protocol.
    hint = " (is it run with --insecure-loopback?)" if exc.reason == "WRONG_VERSION_NUMBER" else ""
    return f"does not speak our TLS: {text}{hint}"
