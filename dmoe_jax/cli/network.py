"""How a process takes part in a network: who it is, which swarm it belongs to, where it is called."""

import ipaddress
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dmoe_jax.cli.common import UsageError
from dmoe_jax.environment import SECRET_VARIABLE
from dmoe_jax.security import Plain, Security, Tls
from net.identity import Address
from net.wire.messages import is_host

JoinTexts = Annotated[tuple[str, ...], tyro.conf.arg(metavar="PEER [PEER ...]")]
"""Peers to join through, as the command line takes them; `dmoe_jax.cli.swarm.parse_targets` reads them."""

_File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """Who this process is and which swarm it belongs to. Links are encrypted, and both ends prove who they are."""

    identity: _File = None
    """This peer's private key; made if missing. One process at a time. Without it, a fresh identity each time."""
    swarm_secret_file: _File = None
    """The secret that all peers of the swarm share. Default: DMOE_SWARM_SECRET_FILE, else a swarm open to everybody."""
    allow_list: _File = None
    """The only peers to talk to, a peer id a line (see `dmoe identity`). Default: all who know the secret."""
    insecure_loopback: bool = False
    """Plain TCP without encryption or proof, on this machine only. All peers of the swarm must use it."""

    def __post_init__(self) -> None:
        idle = [
            flag
            for flag, file in (
                ("--identity", self.identity),
                ("--swarm-secret-file", self.swarm_secret_file),
                ("--allow-list", self.allow_list),
            )
            if file is not None
        ]
        if self.insecure_loopback and idle:
            raise ValueError(f"--insecure-loopback proves nothing: {' and '.join(idle)} would have no effect")

    @property
    def secret_file(self) -> Path | None:
        """Where the swarm's secret is: the flag, else the environment; None for an open swarm."""
        if self.swarm_secret_file is not None:
            return self.swarm_secret_file
        named = os.environ.get(SECRET_VARIABLE)
        return Path(named) if named else None

    def security(self) -> Security:
        """How links are protected.

        Raises:
          UsageError: plain TCP was asked for where a secret is set.
        """
        if not self.insecure_loopback:
            return Tls(identity=self.identity, secret=self.secret_file, allowed=self.allow_list)
        if self.secret_file is not None:
            # Rather than ignored: somebody meant this machine's peers to be protected.
            raise UsageError(f"--insecure-loopback does not go with {SECRET_VARIABLE}={self.secret_file}: unset it")
        return Plain()

    def flags_for_others(self) -> str:
        """What the peers of the same swarm must give too, as words of a command line, with a space before each."""
        if self.insecure_loopback:
            return " --insecure-loopback"
        return "" if self.secret_file is None else f" --swarm-secret-file {shlex.quote(str(self.secret_file))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Where a process that serves is called."""

    listen: Annotated[str, tyro.conf.arg(metavar="HOST:PORT")] = "127.0.0.1:0"
    """Address to listen on; port 0 lets the system choose. 0.0.0.0 is all of this machine's and needs --announce."""
    announce: Annotated[str | None, tyro.conf.arg(metavar="HOST")] = None
    """Name or address under which others reach this peer, if it is not the one to listen on."""

    def __post_init__(self) -> None:
        address = self.address
        if self.announce is None and _is_ip_address(address.host, "unspecified"):
            raise ValueError(
                f"--listen {self.listen} is every address of this machine: --announce must say under which name or "
                "address others reach it"
            )
        if self.announce is not None and (
            not is_host(self.announce)
            or _is_ip_address(self.announce, "unspecified")
            or any(sign in self.announce for sign in "@[]/ ")
            or (":" in self.announce and not _is_ip_address(self.announce))
        ):
            raise ValueError(f"--announce must be a host name or an address, without a port, got {self.announce!r}")

    @property
    def address(self) -> Address:
        """Where to listen."""
        return Address.parse(self.listen)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return self.address.host == "localhost" or _is_ip_address(self.address.host, "loopback")


def _is_ip_address(host: str, kind: str | None = None) -> bool:
    """Whether the text is an IP address, or one of a kind (`unspecified`, `loopback`)."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return kind is None or bool(getattr(address, f"is_{kind}"))
