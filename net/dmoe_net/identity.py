"""Peers' names and addresses.

A `PeerId` is the hash of the peer's public key (`dmoe_net.keys`), or drawn at random on a network that proves nothing.
Read as an integer, it is the peer's place in the DHT's key space.
"""

import random
from dataclasses import dataclass
from typing import Self

PEER_ID_BYTES = 32

_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")


@dataclass(frozen=True, slots=True, order=True)
class PeerId:
    """Name of a peer: 32 bytes, printed as 64 hexadecimal digits."""

    raw: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.raw, bytes) or len(self.raw) != PEER_ID_BYTES:
            raise ValueError(f"a peer id is {PEER_ID_BYTES} bytes, got {self.raw!r}")

    def __hash__(self) -> int:
        return hash(self.raw)  # which bytes remember: ids are the keys of most tables

    @classmethod
    def draw(cls, rng: random.Random) -> Self:
        """A random id: from `random.SystemRandom()` on a real node, from a seeded generator in a simulation."""
        return cls(rng.randbytes(PEER_ID_BYTES))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read 64 hexadecimal digits, the form of `str`; ValueError for anything else."""
        # Not `fromhex` alone, which skips white space.
        if len(text) != 2 * PEER_ID_BYTES or not set(text) <= _HEX_DIGITS:
            raise ValueError(f"expected a peer id of {2 * PEER_ID_BYTES} hexadecimal digits, got {text!r}")
        return cls(bytes.fromhex(text))

    @property
    def short(self) -> str:
        """The first eight hexadecimal digits, for a log line."""
        return self.raw.hex()[:8]

    def __str__(self) -> str:
        return self.raw.hex()

    def __repr__(self) -> str:
        return f"PeerId.parse({self.raw.hex()!r})"


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """A host name or IP address, and a port."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise ValueError(f"host must be a non-empty string, got {self.host!r}")
        if not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise ValueError(f"port must be an integer from 0 to 65535, got {self.port!r}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `host:port` (`[host]:port` for IPv6), the form of `str`; ValueError for anything else."""
        host, colon, port = text.strip().rpartition(":")
        if not colon or not port.isascii() or not port.isdigit() or len(port) > 5:
            raise ValueError(f"expected an address as HOST:PORT, got {text!r}")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ValueError(f"expected an IPv6 address as [HOST]:PORT, got {text!r}")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Contact:
    """A peer that can be called: its name, and where it listens."""

    peer_id: PeerId
    address: Address

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `peerid@host:port`, the form of `full`; ValueError for anything else."""
        peer_id, at, address = text.strip().partition("@")
        try:
            if not at:
                raise ValueError("there is no @")
            return cls(PeerId.parse(peer_id), Address.parse(address))
        except ValueError as exc:
            raise ValueError(f"expected a peer as PEERID@HOST:PORT, got {text!r}: {exc}") from exc

    @property
    def full(self) -> str:
        """The whole id and the address, as `parse` reads them."""
        return f"{self.peer_id}@{self.address}"

    def __str__(self) -> str:
        return f"{self.peer_id.short}@{self.address}"


def address_of(target: Contact | Address) -> Address:
    """The address of a contact, or the address itself."""
    return target.address if isinstance(target, Contact) else target


def peer_id_of(target: Contact | Address | PeerId) -> PeerId | None:
    """The peer that is meant; None for whoever answers at an address."""
    return target.peer_id if isinstance(target, Contact) else target if isinstance(target, PeerId) else None
