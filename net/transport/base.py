"""What every network offers: links that carry frames, listeners that accept links, a transport that makes both.

Nothing above this module knows which network it runs on. All methods that are async are trio checkpoints unless they
say otherwise, and raise only errors of `net.errors` (besides `trio.Cancelled`).
"""

from typing import Protocol

from net.identity import Address
from net.wire.frames import EncodedFrame, Frame


class Link(Protocol):
    """An ordered, reliable, two-way connection that carries frames. One task sends, one receives."""

    @property
    def remote_address(self) -> Address:
        """The address dialled, or for an accepted link where it comes from (its port is not where the peer
        listens)."""
        ...

    async def send(self, *frames: EncodedFrame) -> None:
        """Send frames in order, in as few writes as the network allows.

        Returns once the network took them over, not once they arrived; waits while it takes no more (back-pressure).
        The frames' tensors must not change before. If cancelled, a frame may have left in
        part: nothing more can be sent, and `abort` is the only sensible thing left to do.

        Raises:
          ConnectionLost: the link is down.
        """
        ...

    async def receive(self) -> Frame | None:
        """The next frame, or None once the peer has closed the link between two frames.

        May return without a checkpoint when a frame is at hand already. If cancelled, nothing is lost: the next call
        goes on.

        Raises:
          ConnectionLost: the link went down, or ended inside a frame.
          RemoteProtocolError: what arrived is not made of frames; the link is of no further use.
        """
        ...

    async def aclose(self) -> None:
        """Close; what `send` took over still leaves. Idempotent. Closes even if cancelled."""
        ...

    def abort(self) -> None:
        """Close at once and drop what has not left. Idempotent, does not wait."""
        ...


class Listener(Protocol):
    """Where links come in."""

    @property
    def address(self) -> Address:
        """The address that peers dial, with the port that the system chose if port 0 was asked for."""
        ...

    async def accept(self) -> Link:
        """The next link that a peer dialled. If cancelled, no link is lost.

        Raises:
          ListenFailed: the listener is closed or broken.
        """
        ...

    async def aclose(self) -> None:
        """Stop listening. Idempotent; links already accepted live on."""
        ...


class Transport(Protocol):
    """A network: plain TCP, an encrypted one, a simulated one."""

    async def dial(self, address: Address) -> Link:
        """Connect. Waits as long as the caller lets it; if cancelled, nothing is left open.

        Raises:
          DialFailed: nobody listens there, it cannot be reached, or the handshake failed; the message is one
            line.
        """
        ...

    async def listen(self, address: Address) -> Listener:
        """Listen at `address`; port 0 lets the network choose.

        Raises:
          ListenFailed: the address is taken, not ours, or not allowed; the message names it.
        """
        ...
