"""Finding a swarm: peers to join through, and making sure that it is they who answer."""

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

import trio

from dmoe_jax.peers.listed import PREFIX, Named, NobodyListed, PeersFile, parse_peer, peers_now
from dmoe_net.errors import (
    CallFailed,
    DialFailed,
    HandshakeFailed,
    NetError,
    PeerUnavailable,
    RemoteProtocolError,
    seconds_of,
)
from dmoe_net.identity import Address, Contact
from dmoe_net.rpc.base import Caller
from dmoe_net.rpc.service import PING

_log = logging.getLogger(__name__)

Target = str | Contact | Address
"""A peer to join through: HOST:PORT is whoever answers there, PEERID@HOST:PORT that peer alone. `file:PATH` is a file
that lists such peers, a line each."""

LISTED_WAIT_S = 300.0
"""Seconds for somebody in a file to answer, with the wait for the file: the job of whoever writes it may have to wait
for a machine."""

_LOOK_PERIOD_S = 1.0
"""Seconds between two looks at a file."""

_ANSWER_TIMEOUT_S = 5.0
"""Seconds for a peer to answer, with connecting. Across the world it takes one; the rest is for a busy peer."""

_GRACE_S = 0.5
"""Seconds for the others once one has answered; the DHT waits as long in the same place."""


class NotAdmitted(DialFailed):
    """Somebody is there, and it came to nothing because of who is who. Time does not heal it."""


class WrongPeer(NotAdmitted):
    """Another peer answers where one was named."""


def parse_targets(targets: Target | Sequence[Target]) -> tuple[Named, ...]:
    """Parse peers to join through, and names of files of them. Raises ValueError naming the text that is no form."""

    def parse(text: str) -> Named:
        path = text.strip().removeprefix(PREFIX)
        if path == text.strip():
            return parse_peer(text)
        if not path:
            raise ValueError(f"expected a file of peers as {PREFIX}PATH, got {text!r}")
        return PeersFile(Path(path).expanduser())  # no shell does it behind a colon

    several = [targets] if isinstance(targets, str | Contact | Address) else targets
    return tuple(parse(target) if isinstance(target, str) else target for target in several)


async def await_peers(named: Sequence[Named], *, until: float) -> tuple[Contact | Address, ...]:
    """The peers that are named, as soon as their files list somebody.

    Raises:
      DialFailed: they list nobody until then. PeersFileError: as `read_peers`.
    """
    if not any(isinstance(each, PeersFile) for each in named):
        return peers_now(named)
    told = False
    while True:
        try:
            # In a thread: a file server that hangs must not stop what else this process does.
            return await trio.to_thread.run_sync(peers_now, named, abandon_on_cancel=True)
        except NobodyListed as error:
            left_s = until - trio.current_time()
            if left_s <= 0:
                raise DialFailed(f"nobody to join through: {error}") from error
            if not told:
                _log.warning("nobody to join through yet: %s; waiting, for at most %s", error, seconds_of(left_s))
            told = True
        await trio.sleep(_LOOK_PERIOD_S)


async def find_named_entrances(
    caller: Caller, named: Sequence[Named], *, until: float, terms: str, is_plain: bool = False
) -> tuple[Contact | Address, ...]:
    """Ask everybody who is named, as `find_entrances`; where nobody answers read the files again and ask again.

    Raises:
      WrongPeer, PeersFileError: as `find_entrances` and `read_peers`.
      DialFailed: nobody answers, until then if there are files; the message says why of each.
    """
    outright = tuple(each for each in named if not isinstance(each, PeersFile))
    files = [str(each) for each in named if isinstance(each, PeersFile)]
    told = False
    while True:
        peers = await await_peers(named, until=until)
        listed = {*peers} - {*outright}
        try:
            return await find_entrances(caller, peers, terms=terms, is_plain=is_plain, listed=listed)
        except WrongPeer:
            raise
        except DialFailed as error:
            left_s = until - trio.current_time()
            if not files or left_s <= 0:
                raise
            if not told:
                again = f"reading {' and '.join(files)} again, for at most {seconds_of(left_s)}"
                _log.warning("%s; %s", error, again)
            told = True
        await trio.sleep(_LOOK_PERIOD_S)


async def find_entrances(
    caller: Caller,
    targets: Sequence[Contact | Address],
    *,
    terms: str,
    is_plain: bool = False,
    listed: Collection[Contact | Address] = (),
) -> tuple[Contact | Address, ...]:
    """Ask everybody to join through at once; wait for every answer, but only half a second after the first.

    Args:
      terms: terms on which we join, for messages, such as "over TLS without a secret".
      is_plain: without encryption a peer cannot say that this is what is wrong.
      listed: those of the targets whom only a file names, which may be old: where another peer answers in the place of
        one, that one counts as gone.

    Returns: entrances for the DHT, those that are down too: it tries them again later.

    Raises:
      WrongPeer: another peer answers where one was named.
      NotAdmitted, DialFailed: there are targets besides ourselves, and nobody answers; the message says why of each.
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
            if failure and target in listed:
                failure = DialFailed(f"another peer is there now: {failure}")
            elif failure:
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
        is_about_trust = any(map(_is_about_trust, failures.values()))
        line = f"cannot join the swarm{f' {terms}' if is_plain or is_about_trust else ''}: {reasons}"
        raise (NotAdmitted if is_about_trust else DialFailed)(line)
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
