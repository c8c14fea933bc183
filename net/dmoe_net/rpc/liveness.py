"""Waiting for an answer as long as the peer gives signs of life.

Where lines are slow or busy, an answer waits behind everything else that the peer sends. The sign of life is that bytes
move, in either direction and of whatever call (`Caller.moved_bytes`).
"""

import trio

from dmoe_net.errors import PeerTimeout
from dmoe_net.identity import Contact, PeerId
from dmoe_net.nursery import background_nursery
from dmoe_net.rpc.base import Body, Caller, Reply
from dmoe_net.rpc.service import PING

_LOOKS = 4  # at the bytes, within the silence that is too long
_LONGEST_PING_S = 600.0


async def call_living(
    caller: Caller, target: Contact | PeerId, method: str, body: Body, *, silence_s: float, timeout_s: float
) -> Reply:
    """Call, and wait for the answer until nothing has moved between us and the peer for `silence_s`, but for at most
    `timeout_s`.

    Raises:
      PeerTimeout: silence, or the time is over. And as of `Caller.call`.
    """
    reply: Reply | None = None
    peer_id = target if isinstance(target, PeerId) else target.peer_id

    async def watch(scope: trio.CancelScope) -> None:
        num_moved, since = caller.moved_bytes(peer_id), trio.current_time()
        while trio.current_time() - since < silence_s:
            await trio.sleep(silence_s / _LOOKS)
            if (now := caller.moved_bytes(peer_id)) != num_moved:
                num_moved, since = now, trio.current_time()
        scope.cancel()

    with trio.CancelScope() as scope:
        async with background_nursery() as nursery:
            nursery.start_soon(watch, scope)
            reply = await caller.call(target, method, body, timeout_s=timeout_s)
    if reply is None:
        raise PeerTimeout(f"{target} was silent for {silence_s:g} s and did not answer {method!r}")
    return reply


async def ping(caller: Caller, target: Contact | PeerId, *, silence_s: float) -> None:
    """Return once the peer has shown that it lives.

    Raises:
      PeerUnavailable: it does not. CallFailed, RemoteProtocolError: it does, in its way.
    """
    await call_living(caller, target, PING, {}, silence_s=silence_s, timeout_s=_LONGEST_PING_S)
