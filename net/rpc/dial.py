"""A connection that is being made, for all who wait for it."""

import trio

from net.errors import DialFailed
from net.identity import Address, Contact, PeerId
from net.rpc.connection import Connection


class Dial:
    """A connection being made to `target`, and how many callers wait for it."""

    def __init__(self, target: Contact | Address) -> None:
        self.target = target
        self.expected: PeerId | None = target.peer_id if isinstance(target, Contact) else None
        self.scope = trio.CancelScope()
        self.done = trio.Event()
        self.num_waiting = 0
        self.is_connected = False
        self.connection: Connection | None = None
        self.error: DialFailed | None = None
