"""Protection of a swarm's links, and this peer's identity on them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dmoe_net.identity import PeerId
from dmoe_net.key_files import hold_identity, load_allow_list, load_swarm_secret
from dmoe_net.keys import OPEN_SWARM, Identity, Membership
from dmoe_net.transport.base import Transport
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.transport.tls import TlsTransport


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """TLS 1.3: every link is encrypted, and both ends prove who they are."""

    identity: Identity | str | Path | None = None
    """This peer's private key, or the file that holds it (made if missing; one process at a time). None: a fresh key,
    so that the peer has another id after a restart."""
    secret: bytes | str | Path | None = None
    """Secret that all peers of the swarm share, or its file. None: the swarm is open to everybody."""
    allowed: frozenset[PeerId] | str | Path | None = None
    """The only peers to talk to, or a file with a peer id a line. None: all who know the secret."""

    @property
    def is_open(self) -> bool:
        """True if everybody may join who finds us."""
        return self.secret is None and self.allowed is None

    @property
    def terms(self) -> str:
        """Terms on which this peer joins, for messages."""
        if self.secret is None:
            return "over TLS without a secret"
        return f"over TLS with {'a secret' if isinstance(self.secret, bytes) else f'the secret in {self.secret}'}"

    @contextmanager
    def open(self) -> Iterator[tuple[Transport, Identity, bytes]]:
        """Open the transport, and yield it with this peer's key and the swarm's tag. Holds the key's file for the
        block.

        Raises:
          IdentityError: a file cannot be used; the message names it.
        """
        with ExitStack() as stack:
            identity = Identity.generate() if self.identity is None else self.identity
            if not isinstance(identity, Identity):
                identity = stack.enter_context(hold_identity(identity))
            secret = load_swarm_secret(self.secret) if isinstance(self.secret, str | Path) else self.secret or b""
            allowed = load_allow_list(self.allowed) if isinstance(self.allowed, str | Path) else self.allowed
            membership = Membership(secret=secret, allowed=allowed)
            yield TlsTransport(identity, membership=membership), identity, membership.tag


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Plain TCP without encryption or proof, on one machine only. All peers of the swarm must use it."""

    @property
    def is_open(self) -> bool:
        """True: everybody may join."""
        return True

    @property
    def terms(self) -> str:
        """Terms on which this peer joins, for messages."""
        return "over plain TCP"

    @contextmanager
    def open(self) -> Iterator[tuple[Transport, Identity, bytes]]:
        """Yield the transport, a key made for this process, and the tag of an open swarm."""
        yield TcpTransport(), Identity.generate(), OPEN_SWARM


Security = Tls | Plain
