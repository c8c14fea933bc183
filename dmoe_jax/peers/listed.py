"""Peers listed in a file that processes share: `file:PATH` among those to join through.

A process that others join through writes its contact there. It may not be there yet, since a shared file system shows
it late; and whoever is listed may be gone, since a scheduler has started it again elsewhere. So the file is read again
until somebody answers, and every half minute as long as a peer is in its swarm.
"""

import errno
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from dmoe_net.dht.node import DhtNode
from dmoe_net.identity import Address, Contact

_log = logging.getLogger(__name__)

PREFIX = "file:"

MAX_LISTED = 64
"""Most peers that a file may list: all are asked at once."""

_MAX_BYTES = 65_536

_FOLLOW_PERIOD_S = 30.0
"""Seconds between two looks of a peer that has joined: half of the DHT's own period of rejoining."""

_LATE = (errno.ENOENT, errno.ESTALE)
"""Errors of a file that may come, or has just been replaced on another machine."""


@dataclass(frozen=True, slots=True)
class PeersFile:
    """A file of peers to join through, HOST:PORT or PEERID@HOST:PORT a line; `#` begins a comment."""

    path: Path

    def __str__(self) -> str:
        return f"{PREFIX}{self.path}"


Named = Contact | Address | PeersFile
"""A peer to join through, or a file that lists some."""


class NobodyListed(Exception):
    """A file lists nobody yet; the message says why."""


class PeersFileError(ValueError):
    """A file of peers is none, or has a line that names no peer; the message names both."""


def parse_peer(text: str) -> Contact | Address:
    """Read PEERID@HOST:PORT or HOST:PORT. Raises ValueError for anything else."""
    return Contact.parse(text) if "@" in text else Address.parse(text)


def read_peers(file: PeersFile) -> tuple[Contact | Address, ...]:
    """The peers that a file lists now, each once.

    Raises:
      NobodyListed: it is not there, or lists nobody, or its only line is cut off: somebody may be about to write it.
      PeersFileError: it is no such file.
    """
    try:
        # Not a pipe, which would block, nor a device, which may have no end.
        if not file.path.is_file() and file.path.exists():
            raise PeersFileError(f"{file}: expected a file of peers, a line each; it is no regular file")
        with file.path.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise PeersFileError(f"{file}: expected at most {_MAX_BYTES:,} bytes, and {MAX_LISTED} peers")
        text = data.decode()
    except OSError as error:
        if error.errno in _LATE:
            raise NobodyListed(f"there is no {file.path}") from error
        raise PeersFileError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PeersFileError(f"{file}: expected text, got {error.object[error.start : error.end]!r}") from error
    found = _peers_in(text, file)
    if not found:
        raise NobodyListed(f"{file.path} lists nobody")
    if len(found) > MAX_LISTED:
        raise PeersFileError(f"{file}: expected at most {MAX_LISTED} peers, got {len(found)}")
    return found


def _peers_in(text: str, file: PeersFile) -> tuple[Contact | Address, ...]:
    found: dict[Contact | Address, None] = {}
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        words = line.partition("#")[0].strip()
        try:
            if words:
                found[parse_peer(words)] = None
        except ValueError as error:
            if line.endswith("\n"):
                raise PeersFileError(f"{file}, line {number}: {error}") from error
            # Whoever writes it line by line has not come to the end of this one.
    return tuple(found)


def peers_now(named: Sequence[Named]) -> tuple[Contact | Address, ...]:
    """The peers that are named, those of files as these are now.

    Raises:
      NobodyListed: there is none, and a file may list some later. PeersFileError: as `read_peers`.
    """
    found: dict[Contact | Address, None] = {}
    late: list[NobodyListed] = []
    for each in named:
        try:
            found |= dict.fromkeys(read_peers(each) if isinstance(each, PeersFile) else (each,))
        except NobodyListed as error:
            late.append(error)
    if late and not found:
        raise NobodyListed("; ".join(map(str, late)))
    return tuple(found)


async def keep_following(named: Sequence[Named], dht: DhtNode) -> None:
    """Have a node that has joined rejoin, for ever, through those whom the files list by then."""
    told = ""
    while True:
        await trio.sleep(_FOLLOW_PERIOD_S)
        try:
            # In a thread: a file server that hangs must not stop this peer.
            dht.rejoin_through(await trio.to_thread.run_sync(peers_now, named, abandon_on_cancel=True))
        except NobodyListed:
            pass  # the last ones are tried further on
        except PeersFileError as error:
            if str(error) != told:
                told = str(error)
                _log.warning("%s; going on with those whom it listed before", error)
