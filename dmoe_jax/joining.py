"""Finding a swarm: whom to join through, and making sure who answers there."""

import logging
from collections.abc import Sequence

import trio

from net.errors import CallFailed, DialFailed, HandshakeFailed, NetError, PeerUnavailable, RemoteProtocolError
from net.identity import Address, Contact
from net.rpc.base import Caller
from net.rpc.service import PING

_log = logging.getLogger(__name__)

Target = str | Contact | Address
"""A peer to join through: HOST:PORT is whoever answers there, PEERID@HOST:PORT that peer alone."""

_ANSWER_TIMEOUT_S = 5.0
"""How long a peer to join through may take to answer, with connecting. Across the world it takes a second; the rest is
for a busy one."""

_GRACE_S = 0.5
"""How long the others may take once one has answered; the DHT waits as long in the same place."""


class WrongPeer(DialFailed):
    """Another peer answers where one was named."""


def parse_targets(targets: Target | Sequence[Target]) -> tuple[Contact | Address, ...]:
    """Peers to join through, each as HOST:PORT, PEERID@HOST:PORT, or parsed already.

    Raises:
      ValueError: naming the text that is neither.
    """
    several = [targets] if isinstance(targets, str | Contact | Address) else targets
    return tuple(_parse(target) if isinstance(target, str) else target for target in several)


def _parse(text: str) -> Contact | Address:
    return Contact.parse(text) if "@" in text else Address.parse(text)


async def find_entrances(
    caller: Caller, targets: Sequence[Contact | Address], *, terms: str, is_plain: bool = False
) -> tuple[Contact | Address, ...]:
    """Ask everybody to join through at once; wait for every answer, but only half a second after the first.

    Args:
      caller: places the calls.
      targets: whom to ask.
      terms: how we knock at the swarm's door, for messages, such as "over TLS without a secret".
      is_plain: without encryption a peer cannot say that this is what is wrong.

    Returns:
      whom to hand to the DHT. One that was named with its peer is among them only if that peer has answered
      there; of the others, those that are down too, for the DHT tries them again later.

    Raises:
      WrongPeer: another peer answers where one was named.
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
        raise WrongPeer(f"{impostors[0]} (a peer restarted without --identity is another peer)")
    if others and not answered:
        reasons = "; ".join(dict.fromkeys(str(failure) for failure in failures.values()))
        is_about_trust = is_plain or any(map(_is_about_trust, failures.values()))
        raise DialFailed(f"cannot join the swarm{f' {terms}' if is_about_trust else ''}: {reasons}")
    for failure in filter(_is_about_trust, failures.values()):
        _log.warning("not joined through all peers: %s", failure)
    return tuple(target for target in others if target in answered or isinstance(target, Address))


def _is_ourselves(caller: Caller, target: Contact | Address) -> bool:
    """Whether the target is this peer: all peers of a swarm may be started with one list."""
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
