"""Peers remembered on disk: who is started again finds its swarm, though nobody whom it was told of is there."""

import logging
import random
from collections.abc import Iterable
from pathlib import Path

import trio

from dmoe_jax.runs.run_folder import replaced_file
from dmoe_net.dht.node import DhtNode
from dmoe_net.identity import Contact

_log = logging.getLogger(__name__)

MAX_REMEMBERED = 64
"""Most peers that are remembered."""

_FILE = "peers.txt"
_PERIOD_S = 60.0


def load_peers(folder: Path) -> tuple[Contact, ...]:
    """The peers that were remembered in a folder; a line that is none is passed over."""
    try:
        lines = (folder / _FILE).read_text().splitlines()[:MAX_REMEMBERED]
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        _log.warning("the peers in %s cannot be read: %s", folder / _FILE, error)
        return ()
    found: list[Contact] = []
    for line in lines:
        try:
            found.append(Contact.parse(line))
        except ValueError as error:
            _log.warning("%s: %s", folder / _FILE, error)
    return tuple(found)


def save_peers(folder: Path, peers: Iterable[Contact]) -> None:
    """Remember peers in a folder, PEERID@HOST:PORT a line, in place of those that were there. OSError if it fails."""
    known = [contact.full for contact in peers]
    # At random: whoever grinds ids that stand first in every table would be all that is remembered.
    lines = random.SystemRandom().sample(known, min(MAX_REMEMBERED, len(known)))
    if not lines:  # whoever knows nobody keeps what it knew
        return
    with replaced_file(folder / _FILE) as temporary:
        temporary.write_text("\n".join(lines) + "\n")


async def keep_remembering(folder: Path, dht: DhtNode) -> None:
    """Remember the peers that a node knows, every minute and when it is cancelled; a full disk is told of once."""
    was_told = False

    def save() -> None:
        nonlocal was_told
        try:
            save_peers(folder, dht.contacts())
        except OSError as error:
            if not was_told:
                _log.warning("peers cannot be remembered in %s: %s", folder, error.strerror)
            was_told = True

    try:
        while True:
            await trio.sleep(_PERIOD_S)
            save()
    finally:
        save()
