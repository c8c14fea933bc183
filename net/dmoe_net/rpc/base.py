"""The terms of a call, in which everything above the RPC layer speaks.

A call names a method and carries a *body* (a small CBOR map) and *tensors* (arrays, sent as raw buffers beside it). A
handler answers with a `Reply` or raises a `CallFailed`, which reaches the caller with its message; anything else that
it raises is logged on its side and reaches the caller as a bare `RemoteFailure`. To a caller who takes *partials* it
may send parts of the answer ahead of the reply.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from dmoe_net.errors import CallFailed, CallRefused, PeerBusy, RemoteFailure, RemoteProtocolError
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.peer_health import PeerHealth
from dmoe_net.rpc.bulk import BulkTraffic
from dmoe_net.wire.fields import Field
from dmoe_net.wire.messages import ErrorKind
from dmoe_net.wire.tensors import Outgoing, Tensor

Body = Mapping[str, Any]
"""A CBOR map with string keys; values are None, bool, int, float, str, bytes, lists and maps of these."""

CALL_ERRORS: Mapping[ErrorKind, type[CallFailed]] = {
    ErrorKind.REFUSED: CallRefused,
    ErrorKind.BUSY: PeerBusy,
    ErrorKind.FAILURE: RemoteFailure,
}
"""Kind of an answer that is an error -> the error that the call raises."""


def kind_of(error: CallFailed) -> ErrorKind:
    """The kind of error on the wire."""
    return next(kind for kind, error_type in CALL_ERRORS.items() if isinstance(error, error_type))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A call as its handler sees it.

    Attributes:
      method: name under which the handler is registered.
      body: the small arguments. From the network: check every field before using it.
      tensors: the large arguments, read-only, each 64-byte aligned in a buffer of its own.
      peer_id: who calls.
      peer_address: where the caller listens, or None for a caller in client mode.
      send_partial: sends part of the answer ahead of it; False while that is not possible, as when an earlier part
        waits to leave. None if the caller takes no parts.
    """

    method: str
    body: Body
    tensors: tuple[Tensor, ...]
    peer_id: PeerId
    peer_address: Address | None
    send_partial: "Callable[[Reply], bool] | None" = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer to a call. A handler may wrap tensors in `Compressed`; the caller gets plain arrays."""

    body: Body = field(default_factory=dict)
    tensors: tuple[Outgoing, ...] = ()


Handler = Callable[[Request], Awaitable[Reply]]
"""Serves one call, in a task of its own that is cancelled when the caller gives up or its deadline passes."""


@runtime_checkable
class Caller(Protocol):
    """A process that serves and places calls: `dmoe_net.rpc.peer.RpcPeer`, or a direct-call fake in unit tests."""

    @property
    def peer_id(self) -> PeerId:
        """The name of this process."""

    @property
    def address(self) -> Address | None:
        """The address at which this process listens; None in client mode."""

    @property
    def bulk(self) -> BulkTraffic:
        """Rates and round trips of the paths to peers, as bulk calls found them, and the memory that bulk may take."""

    @property
    def health(self) -> PeerHealth:
        """Failures by trio's clock, of every dial's target and of each peer's services, as `(peer_id, "dht")`."""

    def moved_bytes(self, peer_id: PeerId) -> int:
        """Sum of `Link.num_moved` over the connections with a peer: while it changes, the peer lives."""

    async def written(self, peer_id: PeerId) -> None:
        """Wait until all that waits to be sent to a peer has been handed to the network, or no connection is left.

        For a caller whose event loop is about to stand still while the peer needs an answer.
        """

    def is_reached(self, contact: Contact) -> bool:
        """True if the peer answered at its address when that was dialled, and a connection with it is still open. One
        that called us answers on its own connection, whatever it says of its address."""

    async def reach(self, contact: Contact, *, timeout_s: float) -> None:
        """Dial a peer at its address, even if it has a connection with us, unless `is_reached`.

        Raises:
          PeerUnavailable: nobody answers there in time, or another peer does.
        """

    def add_handler(self, method: str, handler: Handler, *, max_concurrent: int = 64) -> None:
        """Serve `method` with `handler`, at most `max_concurrent` calls at once; further ones are `PeerBusy`.

        Raises:
          ValueError: the method has a handler already, or an argument is out of range.
        """

    def remove_handler(self, method: str) -> None:
        """Serve `method` no more: further calls are refused as unknown, those that run already go on.

        Raises:
          ValueError: the method has no handler.
        """

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
        """Call `method` at `target` and wait for the answer. Cancelling this cancels the handler too (best effort).

        Args:
          target: a `Contact` is called on any connection with that peer, and dialling it checks who answers; an
            `Address` is whoever answers there, for joining a swarm; a `PeerId` is called on an open connection only,
            and without one it is a `DialFailed`.
          tensors: sent from where they lie: until this returns, and a moment longer if it is cancelled, nobody may
            write to them.
          timeout_s: covers dialling too, at most `MAX_TIMEOUT_S`. The deadline travels with the call, and the handler
            is cancelled when it passes.
          bulk_bytes: above 0 for one of many calls that carry much: the bytes of the call or of its answer, whichever
            is more. These calls may take connections of their own (`dmoe_net.rpc.lanes`), and arrive in another order.
          on_partial: called, in the caller's task, with each part of the answer that comes ahead of the reply, also of
            a call that then fails. None: the call takes no parts.
          into: an array for the answer, writable and C-contiguous. If the reply is one tensor of its dtype and shape,
            the array holds it, received straight from the network where that can be, and the reply's tensor is a
            read-only view of it. Any other reply is as without. Until the call has ended anything may be written there.

        Raises:
          PeerUnavailable: `DialFailed`, `PeerTimeout` or `ConnectionLost`.
          CallFailed: `CallRefused`, `PeerBusy` or `RemoteFailure`, with the peer's message.
          RemoteProtocolError: the peer's answer broke the rules; the connection is dropped.
          LocalProtocolError: the call itself cannot be sent (too large, or not CBOR).
          ValueError: `timeout_s` is no number or too long, or nothing can be received into `into`.
        """


def read_request(request: Request, **fields: Field[Any]) -> list[Any]:
    """The fields of a request's body, in their order; CallRefused names one that is something else."""
    try:
        return [field.of_untrusted(request.body, name) for name, field in fields.items()]
    except RemoteProtocolError as error:
        raise CallRefused(str(error)) from error


@contextmanager
def handlers(caller: Caller, served: Mapping[str, Handler], *, max_concurrent: int = 64) -> Iterator[None]:
    """Serve methods, handlers by name, as long as the block lasts, as `Caller.add_handler` does. Calls that run at its
    end go on. If one of the methods cannot be served, none is.

    Raises:
      ValueError: as of `Caller.add_handler`.
    """
    added = list[str]()
    try:
        for method, handler in served.items():
            caller.add_handler(method, handler, max_concurrent=max_concurrent)
            added.append(method)
        yield
    finally:
        for method in added:
            caller.remove_handler(method)
