"""A server of a few short pages over HTTP/1.1, for scrapers and probes: GET and HEAD, one request a connection.

The protocol is `h11`'s. What a client does costs at most a task, 8 KiB and some seconds: it has `REQUEST_S` for its
whole request and `ANSWER_S` to take the answer, at most `MAX_CLIENTS` are served at once, and further ones are turned
away at once. Nothing that a client sends is more than looked up.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import h11
import trio

from net.errors import ListenFailed
from net.identity import Address
from net.nursery import background_nursery

_log = logging.getLogger(__name__)

MAX_CLIENTS = 16
"""Clients at once. A scraper and a few probes need one each."""
MAX_HEADER_BYTES = 8192
"""Longest request line and headers together."""
REQUEST_S = 5.0
"""Within which a request must have come."""
ANSWER_S = 10.0
"""Within which the answer must have been taken."""

_DRAIN_BYTES = 1 << 16
"""What is read of a client that goes on sending after its answer: closing at once would reset the connection, and the
answer might be lost."""
_DRAIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A page as it is now."""

    body: bytes
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"


Page = Callable[[], Awaitable[Answer]]
"""Makes a page when it is asked for. An error in it is answered with status 500 and logged."""

_NOT_FOUND = Answer(body=b"there is no such page\n", status=404)
_WRONG_METHOD = Answer(body=b"expected GET or HEAD\n", status=405)
_BROKEN = Answer(body=b"the page could not be made; see the log\n", status=500)


@asynccontextmanager
async def open_http_server(address: Address, pages: Mapping[str, Page]) -> AsyncIterator[Address]:
    """Serve pages, by path such as "/metrics", while the block runs; yields where, with the port that was chosen.

    Args:
      address: to listen at; port 0 lets the system choose.

    Raises:
      ListenFailed: the port is taken, or the address is not this machine's. The message names it.
    """
    try:
        listeners = await trio.open_tcp_listeners(address.port, host=address.host)
    except (OSError, ValueError, OverflowError) as error:
        raise ListenFailed(f"cannot listen on {address}: {getattr(error, 'strerror', None) or error}") from error
    num_clients = 0

    async def serve(stream: trio.SocketStream) -> None:
        nonlocal num_clients
        if num_clients >= MAX_CLIENTS:
            return
        num_clients += 1
        try:
            await _serve_client(stream, pages)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # it has gone
        except Exception:
            _log.exception("serving a client of %s failed", address)
        finally:
            num_clients -= 1

    async with background_nursery() as nursery:
        await nursery.start(trio.serve_listeners, serve, listeners)
        host, port = listeners[0].socket.getsockname()[:2]
        yield Address(host, port)


async def _serve_client(stream: trio.SocketStream, pages: Mapping[str, Page]) -> None:
    """Answer one request and close; a client that is too slow, or none, is left without a word."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
    request: h11.Request | None = None
    try:
        with trio.move_on_after(REQUEST_S):
            request = await _request_untrusted(stream, connection)
    except h11.RemoteProtocolError as error:
        answer = Answer(body=b"expected an HTTP/1.1 request\n", status=error.error_status_hint)
    else:
        if request is None:
            return
        answer = await _answer(request, pages)
    with trio.move_on_after(ANSWER_S):
        await stream.send_all(_written(connection, answer, has_body=request is None or request.method != b"HEAD"))
        await stream.send_eof()
        left = _DRAIN_BYTES
        with trio.move_on_after(_DRAIN_S):
            while left > 0 and (data := await stream.receive_some(4096)):
                left -= len(data)


async def _request_untrusted(stream: trio.SocketStream, connection: h11.Connection) -> h11.Request | None:
    """The client's request without its body; None if it closes without one.

    Raises:
      h11.RemoteProtocolError: what it sends is no request, or too long.
    """
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is not h11.NEED_DATA:
            return None
        connection.receive_data(await stream.receive_some(4096))


async def _answer(request: h11.Request, pages: Mapping[str, Page]) -> Answer:
    if request.method not in (b"GET", b"HEAD"):
        return _WRONG_METHOD
    page = pages.get(request.target.partition(b"?")[0].decode("ascii", "replace"))
    if page is None:
        return _NOT_FOUND
    try:
        return await page()
    except Exception:
        _log.exception("the page %r could not be made", request.target)
        return _BROKEN


def _written(connection: h11.Connection, answer: Answer, *, has_body: bool) -> bytes:
    headers = [
        ("Content-Type", answer.content_type),
        ("Content-Length", str(len(answer.body))),
        ("Connection", "close"),
    ]
    if answer.status == 405:
        headers.append(("Allow", "GET, HEAD"))
    data = connection.send(h11.Response(status_code=answer.status, headers=headers)) or b""
    if has_body:
        data += connection.send(h11.Data(data=answer.body)) or b""
    return data + (connection.send(h11.EndOfMessage()) or b"")
