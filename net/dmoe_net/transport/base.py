"""The interface of every network: links that carry frames, listeners that accept links, a transport that makes both.

Nothing above this module knows which network it runs on. All methods that are async are trio checkpoints unless they
say otherwise, and raise only errors of `dmoe_net.errors` (besides `trio.Cancelled`).
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from dmoe_net.identity import Address, PeerId
from dmoe_net.wire.frames import Frame, Part
from dmoe_net.wire.sinks import Sinks


class Link(Protocol):
    """An ordered, reliable, two-way connection that carries frames in parts. One task sends, one receives."""

    @property
    def remote_address(self) -> Address:
        """The address dialled, or for an accepted link its origin (at whose port the peer does not listen)."""

    @property
    def remote_peer_id(self) -> PeerId | None:
        """The peer at the other end, as the handshake proved it; None before that, and on plain TCP."""

    @property
    def num_moved(self) -> int:
        """Bytes received, and bytes sent as far as they show that the other end takes them: while it grows, that end
        lives."""

    @property
    def num_received(self) -> int:
        """Bytes received, with encryption and headers."""

    @property
    def num_sent(self) -> int:
        """Bytes sent, as the network took them over."""

    @property
    def sinks(self) -> Sinks:
        """Memory that callers offer for the tensors of answers. The link may receive them there, and need not."""

    @property
    def when_heard(self) -> Callable[[Callable[[], None]], bool] | None:
        """None, or a function that has its argument called once `receive` has something to return or raise, unless a
        task waits there by then. It returns False, and nothing is called, if `receive` has something now."""

    async def handshake(self) -> None:
        """Finish the handshake of an accepted link, before anything else is done with it; a dialled one has finished
        it. If cancelled, `abort` the link.

        Raises:
          ConnectionLost: the link went down meanwhile.
          HandshakeFailed: the other end is not admitted, or does not speak our protocol.
        """

    async def send(self, *parts: Part) -> None:
        """Send parts of frames in order, in as few writes as the network allows.

        Returns once the network took them over, without a checkpoint if it takes them at once. The frames' tensors must
        not change before. If cancelled, a part may have left incompletely: only `abort` is left to do.

        Raises:
          ConnectionLost: the link is down.
          trio.BusyResourceError: another task is sending, or has failed or was cancelled while it did.
        """

    async def receive(self) -> Frame | None:
        """The next frame, or None once the peer has closed the link between two frames. Without a checkpoint if a frame
        is at hand already. If cancelled, nothing is lost.

        Raises:
          ConnectionLost: the link went down, or ended inside a frame.
          HandshakeFailed: the end that was dialled refuses us; in TLS 1.3 nothing tells us sooner.
          RemoteProtocolError: the bytes are not made of frames; the link is of no further use.
        """

    async def aclose(self) -> None:
        """Close; what `send` took over still leaves. Idempotent. Closes even if cancelled."""

    def abort(self) -> None:
        """Close at once and drop what has not left. Idempotent, does not wait."""


class Listener(Protocol):
    """The accepting side."""

    @property
    def address(self) -> Address:
        """The address that peers dial, with the port that the system chose for port 0."""

    async def accept(self) -> Link:
        """The next link that a peer dialled, its handshake still to be finished. If cancelled, no link is lost.

        Raises:
          ListenFailed: the listener is closed or broken.
        """

    async def aclose(self) -> None:
        """Stop listening. Idempotent; links already accepted live on."""


@runtime_checkable
class Transport(Protocol):
    """One peer's access to a network: plain TCP, an encrypted one, a simulated one."""

    @property
    def peer_id(self) -> PeerId | None:
        """The peer that this network proves us to be; None where it proves nothing (plain TCP)."""

    async def dial(self, address: Address, *, peer_id: PeerId | None = None) -> Link:
        """Connect. Waits as long as the caller lets it; if cancelled, nothing is left open.

        Args:
          peer_id: the peer that must answer, on a network that can tell; None for anybody.

        Raises:
          DialFailed: nobody listens there, it cannot be reached, somebody else answers, or the handshake failed; the
            message is one line.
        """

    async def listen(self, address: Address) -> Listener:
        """Listen at `address`; port 0 lets the network choose.

        Raises:
          ListenFailed: the address is taken, not ours, or not allowed; the message names it.
        """
