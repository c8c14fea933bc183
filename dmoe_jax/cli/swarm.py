"""Joining a swarm: this process's peer and DHT node, and making sure who is at the addresses to join through."""

import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from dmoe_jax.cli.common import UsageError
from dmoe_jax.cli.network import ListenOptions, NetworkOptions
from net.clock import SwarmClock
from net.dht.node import DhtNode, open_dht_node
from net.errors import CallFailed, DialFailed, HandshakeFailed, NetError, PeerUnavailable, RemoteProtocolError
from net.identity import Address, Contact
from net.rpc.base import Caller
from net.rpc.faults import FaultInjector
from net.rpc.peer import RpcPeer, open_rpc_peer
from net.rpc.service import PING

_log = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 5.0
"""For a peer to join through to answer, with connecting. Across the world it takes a second; the rest is for a busy
one."""

_GRACE_S = 0.5
"""For the others once one has answered; as long as the DHT waits in the same place."""


@dataclass(frozen=True, slots=True)
class SwarmPeer:
    """This process's place in a swarm."""

    rpc: RpcPeer
    """Places and serves calls."""
    dht: DhtNode
    """Finds things."""
    clock: SwarmClock
    """The swarm's time."""


def parse_targets(texts: Sequence[str]) -> list[Contact | Address]:
    """Peers to join through from the command line, as HOST:PORT or PEERID@HOST:PORT.

    Raises:
      UsageError: naming the text that is neither.
    """
    try:
        return [Contact.parse(text) if "@" in text else Address.parse(text) for text in texts]
    except ValueError as error:
        raise UsageError(f"--join: {error}") from error


@asynccontextmanager
async def join_swarm(
    network: NetworkOptions,
    *,
    join: Sequence[str],
    listen: ListenOptions | None = None,
    faults: FaultInjector | None = None,
) -> AsyncIterator[SwarmPeer]:
    """Open this process's peer and DHT node, and join the swarm.

    Args:
      network: who we are and which swarm it is.
      join: peers to join through, see `parse_targets`; none starts a new swarm.
      listen: where to be called; None is client mode.
      faults: what is to go wrong with our answers, on purpose.

    Raises:
      UsageError: for a text or file that will not do, and when another peer is where one was named.
      NetError: when the port is taken, or nobody answers.
    """
    targets = parse_targets(join)
    rng = random.SystemRandom()
    with network.open_transport() as (transport, peer_id):
        async with open_rpc_peer(
            transport,
            peer_id=peer_id,
            listen=None if listen is None else listen.address,
            announce=None if listen is None else listen.announce,
            faults=faults,
        ) as rpc:
            if listen is not None and network.is_open and not listen.is_loopback:
                _log.warning("without --swarm-secret-file everybody who reaches %s may join this swarm", rpc.address)
            initial_peers = await find_entrances(rpc, targets, network)
            clock = SwarmClock.wall()
            async with open_dht_node(
                rpc, clock=clock, rng=rng, initial_peers=initial_peers, client_mode=listen is None
            ) as dht:
                yield SwarmPeer(rpc, dht, clock)


async def find_entrances(
    caller: Caller, targets: Sequence[Contact | Address], network: NetworkOptions
) -> tuple[Contact | Address, ...]:
    """Ask everybody to join through at once; wait for every answer, but only half a second after the first.

    Returns:
      whom to hand to the DHT. One that was named with its peer is among them only if that peer has answered
      there; of the others, those that are down too, for the DHT tries them again later.

    Raises:
      UsageError: another peer answers where one was named.
      DialFailed: there are targets besides ourselves, and nobody answers; the message says why of each.
    """
    others = [target for target in dict.fromkeys(targets) if not _is_ourselves(caller, target)]
    answered: set[Contact | Address] = set()
    failures: dict[Contact | Address, NetError] = {}
    impostors: list[NetError] = []

    async def ask(target: Contact | Address, scope: trio.CancelScope) -> None:
        deadline = trio.current_time() + _ANSWER_TIMEOUT_S
        failure = await _why_no_answer(caller, target, deadline)
        # Not there, or somebody else there? Only the first is forgiven.
        if failure and isinstance(target, Contact) and not await _why_no_answer(caller, target.address, deadline):
            # Once more: it may be the right one, which has only just come up.
            failure = await _why_no_answer(caller, target, deadline)
            if failure:
                impostors.append(failure)
                scope.cancel()
        if failure:
            failures[target] = failure
        else:
            answered.add(target)
            scope.deadline = min(scope.deadline, trio.current_time() + _GRACE_S)

    async with trio.open_nursery() as nursery:
        for target in others:
            nursery.start_soon(ask, target, nursery.cancel_scope)
    if impostors:
        raise UsageError(f"{impostors[0]} (a peer restarted without --identity is another peer)")
    if others and not answered:
        reasons = "; ".join(dict.fromkeys(str(failure) for failure in failures.values()))
        # Peers that do not encrypt cannot say that this is what is wrong.
        is_about_trust = network.insecure_loopback or any(map(_is_about_trust, failures.values()))
        raise DialFailed(f"cannot join the swarm{f' {network.terms}' if is_about_trust else ''}: {reasons}")
    for failure in filter(_is_about_trust, failures.values()):
        _log.warning("not joined through all peers: %s", failure)
    return tuple(target for target in others if target in answered or isinstance(target, Address))


def _is_ourselves(caller: Caller, target: Contact | Address) -> bool:
    """So that all peers of a swarm may be started with one list."""
    if isinstance(target, Contact):
        return target.peer_id == caller.peer_id
    return target == caller.address


async def _why_no_answer(caller: Caller, target: Contact | Address, deadline: float) -> NetError | None:
    """None if the target answers anything at all, else what went wrong."""
    try:
        await caller.call(target, PING, {}, timeout_s=deadline - trio.current_time())
    except (PeerUnavailable, RemoteProtocolError) as error:
        return error
    except CallFailed:
        pass  # busy, but there
    return None


def _is_about_trust(error: BaseException | None) -> bool:
    """Whether somebody is there, and it came to nothing because of who is who."""
    while error is not None and not isinstance(error, HandshakeFailed):
        error = error.__cause__
    return error is not None


def join_line(command: str, network: NetworkOptions, rpc: RpcPeer) -> str:
    """The line to paste on another terminal, or another machine: how to join through this peer."""
    assert rpc.address is not None  # only who listens can be joined
    peer = Contact(rpc.peer_id, rpc.address).full
    return f"Join it with:  dmoe {command} --join {peer}{network.flags_for_others()}"
