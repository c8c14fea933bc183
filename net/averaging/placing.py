"""Calls of a group's members to each other, which a busy moment at its beginning must not end."""

from collections.abc import Awaitable, Callable

import trio

from net.errors import DialFailed, PeerBusy
from net.rpc.base import Reply

_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Before a call that the other has not had is placed again. When a group begins all of its members dial each other at
once, and of two connections that meet one goes; and whoever has just been too busy may not be for long."""


async def placed(call: Callable[[], Awaitable[Reply]]) -> Reply:
    """Place a call, and a few times more if the other has not had it. The last failure is raised."""
    for pause_s in _PAUSES_S:
        try:
            return await call()
        except (DialFailed, PeerBusy):
            await trio.sleep(pause_s)
    return await call()
