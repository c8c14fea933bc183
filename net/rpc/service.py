"""The methods that a peer serves: handlers by name, and how many calls of each may run at once."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from net.errors import CallFailed, CallRefused, PeerBusy, RemoteFailure
from net.rpc.base import Handler, Reply, Request
from net.wire.messages import MAX_METHOD_CHARACTERS

_log = logging.getLogger(__name__)

PING = "rpc.ping"
"""Served by every peer: answers `{}` to anything. It tells whether a peer lives, and how far it is."""

_MAX_CONCURRENT_PINGS = 64


@dataclass(slots=True, kw_only=True, eq=False)
class Method:
    """A method that is served, or was until it was removed; calls that were admitted go on."""

    handler: Handler
    max_concurrent: int
    num_running: int = 0


async def _ping(_: Request) -> Reply:
    return Reply()


class Service:
    """Handlers by method name, with their bounds. One for each peer, shared by all its connections."""

    def __init__(self) -> None:
        self._methods = {PING: Method(handler=_ping, max_concurrent=_MAX_CONCURRENT_PINGS)}

    def add(self, method: str, handler: Handler, *, max_concurrent: int) -> None:
        """Serve `method` with `handler`, see `Caller.add_handler`.

        Raises:
          ValueError: the method has a handler already, or an argument is out of range.
        """
        if not 1 <= len(method) <= MAX_METHOD_CHARACTERS:
            raise ValueError(f"a method's name has 1 to {MAX_METHOD_CHARACTERS} characters, got {method!r}")
        if method in self._methods:
            raise ValueError(f"method {method!r} has a handler already")
        if max_concurrent < 1:
            raise ValueError(f"max_concurrent must be at least 1, got {max_concurrent}")
        self._methods[method] = Method(handler=handler, max_concurrent=max_concurrent)

    def remove(self, method: str) -> None:
        """Serve `method` no more, see `Caller.remove_handler`.

        Raises:
          ValueError: it has no handler.
        """
        if method not in self._methods or method == PING:
            raise ValueError(f"method {method!r} has no handler to remove")
        del self._methods[method]

    def admit(self, method: str) -> Method:
        """Take one of the method's places, before a task is started for the call; `release` gives it back.

        Raises:
          CallRefused: there is no such method.
          PeerBusy: its places are taken.
        """
        entry = self._methods.get(method)
        if entry is None:
            raise CallRefused(f"unknown method {method!r}")
        if entry.num_running >= entry.max_concurrent:
            raise PeerBusy(f"{entry.max_concurrent} calls of {method!r} are running already")
        entry.num_running += 1
        return entry

    def release(self, method: Method) -> None:
        """Give back what `admit` took."""
        method.num_running -= 1

    async def run(self, method: Method, request: Request) -> Reply:
        """Run the handler; its exceptions come out as they are. `admit` must have taken a place for it.

        Raises:
          TypeError: the handler returned something else than a `Reply`.
        """
        reply = await method.handler(request)
        if not isinstance(reply, Reply):
            raise TypeError(f"a handler must return a Reply, got {type(reply).__name__}")
        return reply


@contextmanager
def reported(method: str, caller: str) -> Iterator[None]:
    """Around the serving of a call: what a handler raises is for our log, and only that it failed for the caller.

    Raises:
      CallFailed: the handler's own words for its caller as they are, or `RemoteFailure` for anything else.
    """
    failure = f"the handler of {method!r} failed; the log of the peer says why"
    try:
        yield
    except CallFailed:
        raise
    except Exception as exc:
        _log.exception("serving %r to %s failed", method, caller)
        raise RemoteFailure(failure) from exc
    except BaseExceptionGroup as group:
        # The handler failed while it was being cancelled: its trouble is logged here, the rest goes on its way.
        cancelled, failed = group.split(trio.Cancelled)
        if failed is not None:
            _log.exception("serving %r to %s failed", method, caller)
        if cancelled is not None:
            raise cancelled from None
        raise RemoteFailure(failure) from failed
