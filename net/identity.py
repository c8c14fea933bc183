"""Who a peer is, and where it listens.

A `PeerId` is 32 bytes. Today they are drawn at random when a process starts; the encrypted transport will derive them
from an Ed25519 public key. The same 256 bits, read as an integer, are the peer's place in the DHT's key space.
"""

import random
from dataclasses import dataclass
from typing import Self

PEER_ID_BYTES = 32


@dataclass(frozen=True, slots=True, order=True)
class PeerId:
    """Name of a peer: 32 bytes, printed as 64 hexadecimal digits."""

    raw: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.raw, bytes) or len(self.raw) != PEER_ID_BYTES:
            raise ValueError(f"a peer id is {PEER_ID_BYTES} bytes, got {self.raw!r}")

    @classmethod
    def draw(cls, rng: random.Random) -> Self:
        """A random id. Pass `random.SystemRandom()` on a real node, a seeded generator in a simulation."""
        return cls(rng.randbytes(PEER_ID_BYTES))

    @property
    def short(self) -> str:
        """The first eight hexadecimal digits: enough for a log line, not for trust."""
        return self.raw.hex()[:8]

    def __str__(self) -> str:
        return self.raw.hex()


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Where a peer listens: a host name or IP address, and a port."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise ValueError(f"host must be a non-empty string, got {self.host!r}")
        if not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise ValueError(f"port must be an integer from 0 to 65535, got {self.port!r}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `host:port` (`[host]:port` for IPv6), the form that `str` prints and the command line takes.

        Raises:
          ValueError: naming the text, when it is anything else.
        """
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
    """A peer that can be called: who it is and where it listens."""

    peer_id: PeerId
    address: Address

    def __str__(self) -> str:
        return f"{self.peer_id.short}@{self.address}"
