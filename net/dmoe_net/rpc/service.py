"""One peer's end of its connections: its greeting, and handlers by name, with bounds on the calls that run at once."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import trio

from dmoe_net.errors import CallFailed, CallRefused, ConnectionLost, PeerBusy, RemoteFailure
from dmoe_net.identity import Address
from dmoe_net.rpc.base import Body, Handler, Reply, Request
from dmoe_net.rpc.faults import FaultInjector
from dmoe_net.wire.codec import decode_untrusted, encode
from dmoe_net.wire.messages import MAX_METHOD_CHARACTERS, Hello
from dmoe_net.wire.sinks import put_into
from dmoe_net.wire.tensors import Outgoing, Tensor, as_received

_log = logging.getLogger(__name__)

PING = "rpc.ping"
"""Method of every peer: answers `{}` to anything."""

LANES = "rpc.lanes"
"""Method of every peer: answers `{"most": number}`, the lanes that it accepts (`dmoe_net.rpc.lanes`)."""

MAX_LANES = 16
"""Lanes that a peer accepts from one other: 10 Gb/s at 100 ms need about as many, of 4 MiB each way."""


@dataclass(slots=True, kw_only=True, eq=False)
class Method:
    """A method that is served, or was until it was removed; calls that were admitted go on."""

    name: str
    handler: Handler
    max_concurrent: int = 64
    num_running: int = 0

    async def answer(self, request: Request) -> Reply:
        """Return the handler's reply. Raises TypeError if the handler returned something else."""
        reply = await self.handler(request)
        if not isinstance(reply, Reply):
            raise TypeError(f"a handler must return a Reply, got {type(reply).__name__}")
        return reply

    @contextmanager
    def serving(self, caller: object) -> Iterator[None]:
        """Guard the serving of an admitted call, whose place is free afterwards. Anything but a `CallFailed` goes into
        our log and comes out as a `RemoteFailure`."""
        failure = f"the handler of {self.name!r} failed; the log of the peer says why"
        try:
            yield
        except CallFailed:
            raise
        except Exception as exc:
            _log.exception("serving %r to %s failed", self.name, caller)
            raise RemoteFailure(failure) from exc
        except BaseExceptionGroup as group:
            # The handler failed while it was being cancelled.
            cancelled, failed = group.split(trio.Cancelled)
            if failed is not None:
                _log.exception("serving %r to %s failed", self.name, caller)
            if cancelled is not None:
                raise cancelled from None
            raise RemoteFailure(failure) from failed
        finally:
            self.num_running -= 1


async def _ping(_: Request) -> Reply:
    return Reply()


async def _lanes(_: Request) -> Reply:
    return Reply(body={"most": MAX_LANES})


class Service:
    """One for each peer, shared by all its connections."""

    def __init__(self, hello: Hello, address: Address | None, faults: FaultInjector | None) -> None:
        self.hello = hello
        self.address = address
        self.faults = faults
        self._methods = {PING: Method(name=PING, handler=_ping), LANES: Method(name=LANES, handler=_lanes)}
        self._own_calls: dict[trio.CancelScope, None] = {}
        self.turned_away: Counter[str] = Counter()
        """Calls that were not admitted, by reason: "busy" or "unknown method"."""

    def add(self, method: str, handler: Handler, *, max_concurrent: int) -> None:
        if not 1 <= len(method) <= MAX_METHOD_CHARACTERS:
            raise ValueError(f"a method's name has 1 to {MAX_METHOD_CHARACTERS} characters, got {method!r}")
        if method in self._methods:
            raise ValueError(f"method {method!r} has a handler already")
        if max_concurrent < 1:
            raise ValueError(f"max_concurrent must be at least 1, got {max_concurrent}")
        self._methods[method] = Method(name=method, handler=handler, max_concurrent=max_concurrent)

    def remove(self, method: str) -> None:
        if method not in self._methods or method in (PING, LANES):
            raise ValueError(f"method {method!r} has no handler to remove")
        del self._methods[method]

    def admit(self, method: str) -> Method:
        """Take one of the method's places for a call; `Method.serving` gives it back."""
        entry = self._methods.get(method)
        if entry is None:
            self.turned_away["unknown method"] += 1
            raise CallRefused(f"unknown method {method!r}")
        if entry.num_running >= entry.max_concurrent:
            self.turned_away["busy"] += 1
            raise PeerBusy(f"{entry.max_concurrent} calls of {method!r} are running already")
        entry.num_running += 1
        return entry

    async def call_itself(
        self,
        method: str,
        body: Body,
        tensors: Sequence[Outgoing],
        on_partial: Callable[[Reply], None] | None = None,
        into: Tensor | None = None,
    ) -> Reply:
        """Serve a call of this peer to itself, as `Caller.call` does: a trainer and its experts may live in one
        process. Nothing in the request or the reply is shared between both ends."""

        def send_partial(reply: Reply) -> bool:
            assert on_partial is not None
            on_partial(_received(reply))
            return True

        request = Request(
            method=method,
            body=_copied(body),
            tensors=tuple(map(as_received, tensors)),
            peer_id=self.hello.peer_id,
            peer_address=self.address,
            send_partial=None if on_partial is None else send_partial,
        )
        entry = self.admit(method)
        with trio.CancelScope() as scope, entry.serving("this peer itself"):
            self._own_calls[scope] = None
            try:
                reply = _received(await entry.answer(request))
            finally:
                del self._own_calls[scope]
            return reply if into is None else replace(reply, tensors=put_into(into, reply.tensors))
        raise ConnectionLost("this peer was closed")

    def close(self) -> None:
        """End the calls of this peer to itself, which no connection ends."""
        for scope in self._own_calls:
            scope.cancel()


def _received(reply: Reply) -> Reply:
    """A reply as it comes out of a connection."""
    return Reply(body=_copied(reply.body), tensors=tuple(map(as_received, reply.tensors)))


def _copied(body: Body) -> Body:
    """A body as it comes out of a connection: nothing shared, and nothing in it that could not travel."""
    copied: Body = decode_untrusted(encode(dict(body)))
    return copied
