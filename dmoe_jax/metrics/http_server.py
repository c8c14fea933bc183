"""A small HTTP/1.1 server: pages of a process for scrapers, probes and browsers.

It takes one request a connection. A page answers with a body, or with a stream, which lasts as long as the client takes
what comes. A client costs at most a task, 8 KiB, the body that its page allows, and some seconds; a stream a task until
the client leaves: one that closes its side of the connection has left.
"""

import ipaddress
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import parse_qsl

import trio

from dmoe_net.errors import ListenFailed
from dmoe_net.identity import Address
from dmoe_net.nursery import background_nursery

_log = logging.getLogger(__name__)

MAX_CLIENTS = 16
"""Number of clients at once; further ones are told to come again. A scraper and a few probes need one each."""
MAX_HEADER_BYTES = 8192
"""Longest request line and headers together."""
REQUEST_S = 5.0
"""Seconds within which a request must have come."""
ANSWER_S = 10.0
"""Seconds within which the answer must have been taken; of a stream each piece."""

_DRAIN_BYTES = 1 << 16
"""Bytes that are read of a client that goes on sending after its answer, which might be lost if we closed at once."""
_DRAIN_S = 1.0

_END = b"\r\n\r\n"
_REQUEST_LINE = re.compile(rb"([A-Z]+) ([!-~]+) HTTP/1\.([01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([ -~\t\x80-\xff]*)")
"""One line of a header, RFC 9110 section 5: without the folded lines of older times. Simple, so that no line takes long
to match."""
_MAX_QUERY_FIELDS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request, as a page gets it. All of it is a stranger's."""

    method: str
    """GET, HEAD, or another one that the page is served for."""
    path: str
    """The path as it was asked for: "/metrics"."""
    query: Mapping[str, str]
    """Fields behind the question mark; of those of one name the last."""
    headers: Mapping[str, str]
    """Headers by name in lower case; several of one name are one, with commas."""
    body: bytes = b""
    """Bytes behind the headers; none of GET and HEAD."""
    is_old: bool = False
    """True for HTTP/1.0, which knows no chunks."""


Send = Callable[[bytes], Awaitable[None]]
"""Sends a piece of a stream; returns when the client's side has taken it."""

Stream = Callable[[Send], Awaitable[None]]
"""Sends a body piece by piece, and returns at its end. Cancelled when the client leaves or takes a piece too slowly."""


class Answer(NamedTuple):
    """A page as it is now."""

    body: bytes | Stream
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"
    headers: Sequence[tuple[str, str]] = ()
    """Further headers, of our own words only: a line feed in one would begin the next."""


Page = Callable[[Request], Awaitable[Answer]]
"""Makes a page when it is asked for. An error in it is answered with status 500 and logged."""


class _Site(NamedTuple):
    """Pages, limits and form of errors of a server: see `open_http_server`."""

    pages: Mapping[str, Page]
    max_body_bytes: int
    as_error: Callable[[Answer], Answer]


@asynccontextmanager
async def open_http_server(
    address: Address,
    pages: Mapping[str, Page],
    *,
    max_body_bytes: int = 0,
    max_clients: int = MAX_CLIENTS,
    as_error: Callable[[Answer], Answer] = lambda answer: answer,
) -> AsyncIterator[Address]:
    """Serve pages while the block runs; yields the address with the port chosen.

    Args:
      pages: by path, such as "/metrics", for GET and HEAD; by method and path, such as "POST /tokens", for others.
      max_body_bytes: longest body of a request.
      max_clients: clients at once; as many further ones are told to come again, and those beyond are left.
      as_error: makes of each answer with a status from 400 on, a line of text unless a page made it, what is sent.

    Raises:
      ListenFailed: the port is taken, or the address is not this machine's. The message names it.
    """
    try:
        listeners = await trio.open_tcp_listeners(address.port, host=address.host)
    except (OSError, ValueError, OverflowError) as error:
        raise ListenFailed(f"cannot listen on {address}: {getattr(error, 'strerror', None) or error}") from error
    site = _Site(pages, max_body_bytes, as_error)
    full = Answer(f"clients at once are at most {max_clients}: ask again\n".encode(), HTTPStatus.SERVICE_UNAVAILABLE)
    served, turned_away = trio.Semaphore(max_clients), trio.Semaphore(max_clients)

    async def serve(stream: trio.SocketStream) -> None:
        is_full = not served.value
        places = turned_away if is_full else served
        try:
            places.acquire_nowait()
        except trio.WouldBlock:
            return
        try:
            await (_send(stream, as_error(full)) if is_full else _serve_client(stream, site))
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # it has gone
        except* Exception:  # also beside a Cancelled, as the server ends
            _log.exception("serving a client of %s failed", address)
        finally:
            places.release()

    async with background_nursery() as nursery:
        await nursery.start(trio.serve_listeners, serve, listeners)
        host, port = listeners[0].socket.getsockname()[:2]
        yield Address(host, port)


def refusal_of_strangers(request: Request, host: str) -> Answer | None:
    """The answer to a request that another site's page makes, or that is meant for another server; else None.

    A site elsewhere can have its name resolved to this machine and would then read what we serve: its name, in the Host
    header, is none of ours. A page of another site can send a request without that, and names its site as its origin.

    Args:
      host: at which we serve.
    """
    origin = request.headers.get("origin")
    if not _is_ours(request.headers.get("host", ""), host):
        return Answer(b"expected this server's address in the Host header\n", HTTPStatus.MISDIRECTED_REQUEST)
    if origin is not None and not _is_ours(origin.rpartition("//")[2], host):
        return Answer(b"expected a request of no other site's page\n", HTTPStatus.FORBIDDEN)
    return None


def _is_ours(named: str, host: str) -> bool:
    """True if a Host header names an IP address, localhost, or the host that we serve at."""
    name = named.rpartition(":")[0] if named.rpartition(":")[2].isdigit() else named
    if name.lower() in ("localhost", host.lower()):
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


async def _serve_client(stream: trio.SocketStream, site: _Site) -> None:
    """Answer one request and close; a client that is too slow, or none, is left without a word."""
    with trio.move_on_after(REQUEST_S) as waiting:
        received = await _receive_untrusted(stream, site)
    if waiting.cancelled_caught or received is None:
        return
    if isinstance(received, Answer):
        await _send(stream, site.as_error(received))
        return
    request, page = received
    answer = await (_made(page, request) if request.method in _PLAIN else _made_unless_gone(stream, page, request))
    if answer is None:
        return
    if answer.status >= HTTPStatus.BAD_REQUEST:
        answer = site.as_error(answer)
    if request.method == "HEAD" or isinstance(answer.body, bytes):
        await _send(stream, answer, without_body=request.method == "HEAD")
    else:
        await _send_stream(stream, answer, answer.body, in_chunks=not request.is_old)


async def _receive_untrusted(stream: trio.SocketStream, site: _Site) -> tuple[Request, Page] | Answer | None:
    """Return the request of a client and its page; the answer to one that is none, too long or for no page; None if
    the client leaves."""
    received = b""
    while _END not in received and len(received) <= MAX_HEADER_BYTES:
        data = await stream.receive_some(4096)
        if not data:
            return None
        received += data
    head, end, body = received.partition(_END)
    if len(head) > MAX_HEADER_BYTES or not end:
        return Answer(_NO_REQUEST, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    request = _parse_untrusted(head)
    if request is None:
        return Answer(_NO_REQUEST, HTTPStatus.BAD_REQUEST)
    page = _page_of(request, site.pages)
    if isinstance(page, Answer):
        return page
    if request.method in _PLAIN:
        return request, page
    length = request.headers.get("content-length", "")
    if "transfer-encoding" in request.headers or not re.fullmatch("[0-9]{1,18}", length):
        return Answer(b"expected a body with a Content-Length\n", HTTPStatus.LENGTH_REQUIRED)
    if int(length) > site.max_body_bytes:
        most = f"expected a body of at most {site.max_body_bytes} bytes\n".encode()
        return Answer(most, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    if request.headers.get("expect", "").lower() == "100-continue":
        await stream.send_all(b"HTTP/1.1 100 Continue" + _END)
    while len(body) < int(length):
        data = await stream.receive_some(65536)
        if not data:
            return None
        body += data
    return replace(request, body=body[: int(length)]), page


_PLAIN = ("GET", "HEAD")
_NO_REQUEST = b"expected an HTTP/1.1 request\n"


def _parse_untrusted(head: bytes) -> Request | None:
    """Return what a request's head says, without the empty line at its end; None if it is none."""
    first, *rest = head.split(b"\r\n")
    line, fields = _REQUEST_LINE.fullmatch(first), [_HEADER.fullmatch(each) for each in rest]
    if line is None or None in fields:
        return None
    method, target, minor = (each.decode() for each in line.groups())
    headers: dict[str, str] = {}
    for name, value in (each.groups() for each in fields if each is not None):
        key, text = name.decode().lower(), value.decode("latin-1").strip(" \t")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    path, _, query = target.partition("?")
    try:
        asked = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=_MAX_QUERY_FIELDS))
    except ValueError:
        return None
    return Request(method=method, path=path, query=asked, headers=headers, is_old=minor == "0")


def _page_of(request: Request, pages: Mapping[str, Page]) -> Page | Answer:
    """The page that is asked for; the answer if there is none."""
    page = pages.get(request.path if request.method in _PLAIN else f"{request.method} {request.path}")
    if page is not None:
        return page
    others = [key.partition(" ")[0] for key in pages if key.partition(" ")[2] == request.path]
    methods = [*(_PLAIN if request.path in pages else ()), *others]
    if not methods:
        return Answer(b"there is no such page\n", HTTPStatus.NOT_FOUND)
    expected = f"expected {' or '.join(methods)}\n".encode()
    return Answer(expected, HTTPStatus.METHOD_NOT_ALLOWED, headers=[("Allow", ", ".join(methods))])


async def _made(page: Page, request: Request) -> Answer:
    try:
        return await page(request)
    except Exception:
        _log.exception("the page %r could not be made", request.path)
        return Answer(b"the page could not be made; see the log\n", HTTPStatus.INTERNAL_SERVER_ERROR)


async def _made_unless_gone(stream: trio.SocketStream, page: Page, request: Request) -> Answer | None:
    """The answer to a request that may be long work, which ends when the client leaves; then None."""
    answer = None
    try:
        async with background_nursery() as nursery:
            nursery.start_soon(_until_gone, stream)
            answer = await _made(page, request)
    except* (_Gone, trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    return answer


def _head(answer: Answer, *lines: str) -> bytes:
    """The head of an answer, with the lines on the body's length."""
    first = f"HTTP/1.1 {answer.status.value} {answer.status.phrase}"
    further = [f"{name}: {value}" for name, value in answer.headers]
    return "\r\n".join([first, f"Content-Type: {answer.content_type}", *lines, *further, "Connection: close"]).encode()


async def _send(stream: trio.SocketStream, answer: Answer, *, without_body: bool = False) -> None:
    body = answer.body if isinstance(answer.body, bytes) else b""
    length = [f"Content-Length: {len(body)}"] if isinstance(answer.body, bytes) else []
    with trio.move_on_after(ANSWER_S):
        await stream.send_all(_head(answer, *length) + _END + (b"" if without_body else body))
        await _close(stream)


async def _send_stream(stream: trio.SocketStream, answer: Answer, body: Stream, *, in_chunks: bool) -> None:
    """Send an answer whose body comes piece by piece. One that breaks off lacks its last chunk, so that the client
    knows."""

    async def put(data: bytes) -> None:
        with trio.move_on_after(ANSWER_S) as taking:
            await stream.send_all(data)
        if taking.cancelled_caught:
            raise trio.BrokenResourceError("the client takes nothing")

    async def send(piece: bytes) -> None:
        if piece:
            await put(b"%x\r\n%b\r\n" % (len(piece), piece) if in_chunks else piece)

    is_whole = False
    try:
        async with background_nursery() as nursery:
            await put(_head(answer, *(["Transfer-Encoding: chunked"] if in_chunks else [])) + _END)
            nursery.start_soon(_until_gone, stream)
            await body(send)
            is_whole = True
    except* (_Gone, trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    if is_whole:
        with trio.move_on_after(ANSWER_S):
            await stream.send_all(b"0" + _END if in_chunks else b"")
            await _close(stream)


class _Gone(Exception):
    """The client has left."""


async def _until_gone(stream: trio.SocketStream) -> None:
    """Read what a client sends beside its request, which is nothing, until it leaves."""
    left = _DRAIN_BYTES
    while left > 0 and (data := await stream.receive_some(4096)):
        left -= len(data)
    raise _Gone


async def _close(stream: trio.SocketStream) -> None:
    """End the sending, and read what a client may still send, which might lose the answer if we closed at once."""
    await stream.send_eof()
    with trio.move_on_after(_DRAIN_S), suppress(_Gone):
        await _until_gone(stream)
