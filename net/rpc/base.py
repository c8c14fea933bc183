"""What a call is: the terms in which everything above the RPC layer speaks.

A call names a method and carries a *body* (a small CBOR map) and *tensors* (arrays, sent as raw buffers beside it). A
handler answers with a `Reply` or raises a `CallFailed` (`CallRefused`, `PeerBusy`, `RemoteFailure`), which reaches
the caller with its message. To a caller who takes *partials* it may send parts of the answer as they become ready,
ahead of the reply. Anything else that it raises is logged on its side and reaches the caller as a
`RemoteFailure` that says no more than that.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from net.errors import CallFailed, CallRefused, PeerBusy, RemoteFailure, RemoteProtocolError
from net.identity import Address, Contact, PeerId
from net.peer_health import PeerHealth
from net.rpc.bulk import BulkTraffic
from net.wire.fields import Field
from net.wire.messages import ErrorKind
from net.wire.tensors import Outgoing, Tensor

Body = Mapping[str, Any]
"""A CBOR map with string keys; values are None, bool, int, float, str, bytes, lists and maps of these."""


CALL_ERRORS: Mapping[ErrorKind, type[CallFailed]] = {
    ErrorKind.REFUSED: CallRefused,
    ErrorKind.BUSY: PeerBusy,
    ErrorKind.FAILURE: RemoteFailure,
}
"""What a call raises whose answer is an error of this kind."""


def kind_of(error: CallFailed) -> ErrorKind:
    """The kind of error on the wire."""
    return next(kind for kind, error_type in CALL_ERRORS.items() if isinstance(error, error_type))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A call as its handler sees it.

    Attributes:
      method: name under which the handler is registered.
      body: the small arguments. From the network: check every field before using it.
      tensors: the large arguments, read-only, each 64-byte aligned in a buffer of its own that nobody writes
        again.
      peer_id: who calls.
      peer_address: where the caller listens, or None for a caller in client mode.
      send_partial: sends part of the answer ahead of it, and says whether that was possible: if not, as while an
        earlier part waits to leave, say it later or in the reply. None if the caller takes no parts.
    """

    method: str
    body: Body
    tensors: tuple[Tensor, ...]
    peer_id: PeerId
    peer_address: Address | None
    send_partial: "Callable[[Reply], bool] | None" = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer to a call: a small body and the large results.

    A handler may wrap tensors in `net.wire.compression.Compressed`; the caller gets plain arrays.
    """

    body: Body = field(default_factory=dict)
    tensors: tuple[Outgoing, ...] = ()


Handler = Callable[[Request], Awaitable[Reply]]
"""Serves one call, in a task of its own that is cancelled when the caller gives up or its deadline passes."""


@runtime_checkable
class Caller(Protocol):
    """Whatever can place calls: `net.rpc.peer.RpcPeer`, or a direct-call fake in unit tests."""

    @property
    def peer_id(self) -> PeerId:
        """Who this process is."""
        ...

    @property
    def address(self) -> Address | None:
        """Where this process listens; None in client mode."""
        ...

    @property
    def bulk(self) -> BulkTraffic:
        """What this process knows of the ways to its peers, and the memory that bulk may take."""
        ...

    @property
    def health(self) -> PeerHealth:
        """Who does not answer, by trio's clock: what was dialled, and each peer's services, as `(peer_id, "dht")`."""
        ...

    def moved_bytes(self, peer_id: PeerId) -> int:
        """Bytes that have come from a peer, and gone there as far as that shows, over the connections there are now.

        While it changes, the peer lives; see `Link.num_moved`."""
        ...

    def add_handler(self, method: str, handler: Handler, *, max_concurrent: int = 64) -> None:
        """Serve `method` with `handler`.

        At most `max_concurrent` calls of it run at once; further ones are answered `PeerBusy` at once, so that a
        flood costs the flooder and not this process's memory.
        """
        ...

    def remove_handler(self, method: str) -> None:
        """Serve `method` no more: further calls are refused as unknown, those that run already go on."""
        ...

    async def call(
        self,
        target: Contact | Address | PeerId,
        method: str,
        body: Body,
        tensors: Sequence[Outgoing] = (),
        *,
        timeout_s: float,
        bulk_bytes: int = 0,
        on_partial: Callable[[Reply], None] | None = None,
        into: Tensor | None = None,
    ) -> Reply:
        """Call `method` at `target` and wait for the answer.

        A `Contact` is called on any connection with that peer, and dialling it checks that it is who answers; an
        `Address` is whoever answers there, for joining a swarm; a `PeerId` is called on a connection that there is,
        for peers that cannot be dialled: without one it is a `DialFailed`. The deadline travels with the call, and the
        handler is cancelled when it passes. Cancelling this function cancels the handler too (best effort: a message is
        sent, nobody waits for it).

        `bulk_bytes` above 0 marks one of many calls that carry much: the larger of what it and its answer carry. Such
        calls may take connections of their own (`net.rpc.lanes`), and so arrive in another order than they left in.

        With `on_partial` the call takes partials: it is called, in the caller's task, with each part of the answer that
        comes ahead of the reply, also of a call that then fails.

        `into` is an array for the answer, writable and C-contiguous. If the reply is one tensor of its dtype and shape,
        the array holds it, received straight from the network where that can be, and the reply's tensor is a read-only
        view of it. Any other reply is as it would be without. While the call is under way anything may be written
        there, also if it then fails; once it has ended, in whatever way, nothing more.

        Raises:
          PeerUnavailable: `DialFailed`, `PeerTimeout` or `ConnectionLost`.
          CallFailed: `CallRefused`, `PeerBusy` or `RemoteFailure`, with the peer's message.
          RemoteProtocolError: the peer's answer broke the rules; the connection is dropped.
          LocalProtocolError: the call itself cannot be sent (too large, or not CBOR).
          ValueError: nothing can be received into `into`.
        """
        ...


def read_request(request: Request, **fields: Field[Any]) -> list[Any]:
    """The fields of a request's body, in their order.

    Raises:
      CallRefused: one of them is something else; the caller is told which.
    """
    try:
        return [field.of_untrusted(request.body, name) for name, field in fields.items()]
    except RemoteProtocolError as error:
        raise CallRefused(str(error)) from error


@contextmanager
def handlers(caller: Caller, served: Mapping[str, Handler], *, max_concurrent: int = 64) -> Iterator[None]:
    """Serve the methods as long as the block lasts; afterwards their names are free again.

    Calls that run at its end go on. If one of the methods cannot be served, none is.

    Args:
      served: handlers by the name of their method.
      max_concurrent: how many calls run at once, of each method.

    Raises:
      ValueError: one of the methods has a handler already, or `max_concurrent` is below 1.
    """
    with ExitStack() as stack:
        for method, handler in served.items():
            caller.add_handler(method, handler, max_concurrent=max_concurrent)
            stack.callback(caller.remove_handler, method)
        yield
