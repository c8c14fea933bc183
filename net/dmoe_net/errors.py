"""The one error tree of the network: `NetError` is everything that a peer or a wire can cause.

Foreign errors (`OSError`, `trio.BrokenResourceError`, `cbor2.CBORDecodeError`, ...) are mapped onto it once, where they
enter, with `raise ... from`.
"""

import errno


class NetError(Exception):
    """Anything that went wrong between peers."""


class LocalProtocolError(NetError):
    """This process broke the rules (a header too large, a tensor of an unknown dtype): a bug on this side."""


class RemoteProtocolError(NetError):
    """The peer's bytes broke the rules. The link that carried them is dropped; other peers are not affected."""


class ListenFailed(NetError):
    """An address could not be listened on: taken, not ours, or not allowed (see `dmoe_net.transport.tcp`)."""

    @property
    def is_taken(self) -> bool:
        """True if another process listens there, which may end."""
        return isinstance(self.__cause__, OSError) and self.__cause__.errno == errno.EADDRINUSE


class PeerUnavailable(NetError):
    """The peer did not answer. Another peer may."""


class DialFailed(PeerUnavailable):
    """No connection could be made: nobody listens there, or the handshake did not finish."""


class HandshakeFailed(PeerUnavailable):
    """A link came up, but its other end is not who it should be, is not admitted, or speaks another protocol."""


class VersionMismatch(HandshakeFailed):
    """The other end speaks another version of the protocol; the message names both."""


class PeerTimeout(PeerUnavailable):
    """The call's deadline passed. The peer may or may not have carried it out."""


class ConnectionLost(PeerUnavailable):
    """The connection ended while the call was under way. The peer may or may not have carried it out."""


class CallFailed(NetError):
    """The peer answered, with an error: it is alive, and the same call will likely fail again."""


class CallRefused(CallFailed):
    """The request was wrong (unknown method or expert, wrong shape or dtype). The message says what was expected."""


class PeerBusy(CallFailed):
    """The peer's bounded queue is full. The call was not carried out; it may be tried again later or elsewhere.

    Args:
      retry_after_s: seconds until the peer expects to have room; None if it does not say.
    """

    def __init__(self, message: str = "", *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RemoteFailure(CallFailed):
    """The peer's handler crashed. Details stay in the peer's log."""


class NoQuorum(NetError):
    """Too few peers answered for the result to mean anything (fewer than `k_min` experts, no expert of a layer)."""


def seconds_of(duration_s: float) -> str:
    """A duration in seconds for a message: 9.99973 is "10 s"."""
    return f"{float(f'{duration_s:.3g}'):g} s"
