"""Joining a swarm as a command's flags say, with the user's mistakes in one line. Nothing here imports JAX."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from dmoe_jax.cli.common import UsageError
from dmoe_jax.cli.network import ListenOptions, NetworkOptions
from dmoe_jax.joining import WrongPeer, parse_targets
from dmoe_jax.peer import SwarmPeer, open_peer
from net.identity import Address, Contact
from net.keys import IdentityError


def check_join(texts: Sequence[str]) -> tuple[Contact | Address, ...]:
    """Whom --join names.

    Raises:
      UsageError: naming the text that is no peer.
    """
    try:
        return parse_targets(tuple(texts))
    except ValueError as error:
        raise UsageError(f"--join: {error}") from error


@asynccontextmanager
async def join_swarm(
    network: NetworkOptions, *, join: Sequence[str], listen: ListenOptions | None = None, **options: Any
) -> AsyncIterator[SwarmPeer]:
    """`open_peer` as the flags say.

    Args:
      network: who we are and which swarm it is.
      join: peers to join through; none starts a new swarm.
      listen: where to be called; None is client mode.
      options: further arguments of `open_peer`.

    Raises:
      UsageError: for a text or file that will not do, and when another peer is where one was named.
      NetError: when the port is taken, or nobody answers.
    """
    opened = open_peer(
        check_join(join),
        listen=None if listen is None else listen.address,
        announce=None if listen is None else listen.announce,
        security=network.security(),
        **options,
    )
    is_open = False
    try:
        async with opened as peer:
            is_open = True
            yield peer
    except (IdentityError, WrongPeer) as error:
        if is_open:  # the command's own
            raise
        raise UsageError(str(error)) from error


def join_line(command: str, network: NetworkOptions, peer: SwarmPeer) -> str:
    """The line to paste on another terminal, or another machine: how to join through this peer."""
    return f"Join it with:  dmoe {command} --join {peer.contact}{network.flags_for_others()}"
