"""Finding a swarm: peers to join through, and making sure that it is they who answer."""

import logging
from collections.abc import Sequence

import trio

from dmoe_net.errors import CallFailed, DialFailed, HandshakeFailed, NetError, PeerUnavailable, RemoteProtocolError
from dmoe_net.identity import Address, Contact
from dmoe_net.rpc.base import Caller
from dmoe_net.rpc.service import PING

_log = logging.getLogger(__name__)

Target = str | Contact | Address
"""A peer to join through: HOST:PORT is whoever answers there, PEERID@HOST:PORT that peer alone."""

_ANSWER_TIMEOUT_S = 5.0
"""Seconds for a peer to answer, with connecting. Across the world it takes one; the rest is for a busy peer."""

_GRACE_S = 0.5
"""Seconds for the others once one has answered; the DHT waits as long in the same place."""


class WrongPeer(DialFailed):
    """Another peer answers where one was named."""


def parse_targets(targets: Target | Sequence[Target]) -> tuple[Contact | Address, ...]:
    """Parse peers to join through. Raises ValueError naming the text that is neither form."""

    def parse(text: str) -> Contact | Address:
        return Contact.parse(text) if "@" in text else Address.parse(text)

    several = [targets] if isinstance(targets, str | Contact | Address) else targets
    return tuple(parse(target) if isinstance(target, str) else target for target in several)


async def find_entrances(
    caller: Caller, targets: Sequence[Contact | Address], *, terms: str, is_plain: bool = False
) -> tuple[Contact | Address, ...]:
    """Ask everybody to join through at once; wait for every answer, but only half a second after the first.

    Args:
      terms: terms on which we join, for messages, such as "over TLS without a secret".
      is_plain: without encryption a peer cannot say that this is what is wrong.

    Returns: entrances for the DHT, those that are down too: it tries them again later.

    Raises:
      WrongPeer: another peer answers where one was named.
      DialFailed: there are targets besides ourselves, and nobody answers; the message says why of each.
    """
    # All peers of a swarm may be started with one list, in which each finds itself.
    ours = (caller.peer_id, caller.address)
    named = {each: each.peer_id if isinstance(each, Contact) else each for each in targets}
    others = [target for target, name in named.items() if name not in ours]
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
    return tuple(others)


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
    """True if somebody is there, and it came to nothing because of who is who."""
    while error is not None and not isinstance(error, HandshakeFailed):
        error = error.__cause__
    return error is not None
