"""What every network offers: links that carry frames, listeners that accept links, a transport that makes both.

Nothing above this module knows which network it runs on. All methods that are async are trio checkpoints unless they
say otherwise, and raise only errors of `net.errors` (besides `trio.Cancelled`).
"""

from typing import Protocol, runtime_checkable

from net.identity import Address, PeerId
from net.wire.frames import Frame, Part
from net.wire.sinks import Sinks


class Link(Protocol):
    """An ordered, reliable, two-way connection that carries frames in parts. One task sends, one receives."""

    @property
    def remote_address(self) -> Address:
        """The address dialled, or for an accepted link where it comes from (its port is not where the peer
        listens)."""
        ...

    @property
    def remote_peer_id(self) -> PeerId | None:
        """Who is at the other end, as the handshake proved it; None before that, and on a network that proves
        nothing (plain TCP)."""
        ...

    @property
    def num_moved(self) -> int:
        """Bytes received so far, and sent as far as that shows that the other end takes them: while it grows, the
        other end lives."""
        ...

    @property
    def num_received(self) -> int:
        """Bytes received so far, as they came over the network: with encryption, headers and all."""
        ...

    @property
    def num_sent(self) -> int:
        """Bytes sent so far, as the network took them over."""
        ...

    @property
    def sinks(self) -> Sinks:
        """Where callers offer memory for the tensors of the answers that come over this link. It may be received there,
        and need not."""
        ...

    async def handshake(self) -> None:
        """Finish the handshake of an accepted link, before anything else is done with it. On a dialled link, and on a
        network without a handshake, nothing is left to do. If cancelled, `abort` the link.

        Raises:
          ConnectionLost: the link went down meanwhile.
          HandshakeFailed: the other end is not admitted, or does not speak our protocol.
        """
        ...

    async def send(self, *parts: Part) -> None:
        """Send parts of frames in order, in as few writes as the network allows.

        Returns once the network took them over, not once they arrived; waits while it takes no more (back-pressure).
        May return without a checkpoint when it takes them at once.
        The frames' tensors must not change before. If cancelled, a part may have left incompletely: nothing more
        can be sent, and `abort` is the only sensible thing left to do.

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
          HandshakeFailed: nothing has come yet, and the end that was dialled refuses us: a dialling end learns that no
            sooner in TLS 1.3.
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
        """The next link that a peer dialled, its handshake still to be finished. If cancelled, no link is lost.

        Raises:
          ListenFailed: the listener is closed or broken.
        """
        ...

    async def aclose(self) -> None:
        """Stop listening. Idempotent; links already accepted live on."""
        ...


@runtime_checkable
class Transport(Protocol):
    """One peer's access to a network: plain TCP, an encrypted one, a simulated one."""

    @property
    def peer_id(self) -> PeerId | None:
        """Whom this network proves us to be; None where it proves nothing (plain TCP)."""
        ...

    async def dial(self, address: Address, *, peer_id: PeerId | None = None) -> Link:
        """Connect. Waits as long as the caller lets it; if cancelled, nothing is left open.

        Args:
          peer_id: who must be there, on a network that can tell; None takes whoever answers.

        Raises:
          DialFailed: nobody listens there, it cannot be reached, somebody else answers, or the handshake failed; the
            message is one line.
        """
        ...

    async def listen(self, address: Address) -> Listener:
        """Listen at `address`; port 0 lets the network choose.

        Raises:
          ListenFailed: the address is taken, not ours, or not allowed; the message names it.
        """
        ...
