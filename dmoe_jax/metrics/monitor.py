"""Pages of a process for scrapers and probes, over HTTP/1.1: `/metrics`, `/healthz`, `/readyz`.

A command opens its monitor before it joins a swarm or compiles, so that probes are answered from the beginning, and
then tells it what there is to show. The server knows GET and HEAD, one request a connection, and of a request its
first line. A client costs at most a task, 8 KiB and some seconds.
"""

import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from importlib import metadata
from types import MappingProxyType
from typing import NamedTuple

import trio
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, ProcessCollector, generate_latest
from prometheus_client.registry import Collector

from dmoe_jax.metrics.families import Family, labelled
from dmoe_net.errors import ListenFailed
from dmoe_net.identity import Address
from dmoe_net.nursery import background_nursery

_log = logging.getLogger(__name__)

MAX_CLIENTS = 16
"""Number of clients at once; further ones are turned away. A scraper and a few probes need one each."""
MAX_HEADER_BYTES = 8192
"""Longest request line and headers together."""
REQUEST_S = 5.0
"""Seconds within which a request must have come."""
ANSWER_S = 10.0
"""Seconds within which the answer must have been taken."""

_DRAIN_BYTES = 1 << 16
"""Bytes that are read of a client that goes on sending after its answer, which might be lost if we closed at once."""
_DRAIN_S = 1.0

_END = b"\r\n\r\n"
_REQUEST_LINE = re.compile(rb"([A-Z]+) ([!-~]+) HTTP/1\.[01]\r\n")

Source = Callable[[], Iterable[Family]]
"""Makes families of what is counted now; called on the event loop, at every scrape."""


class Monitor(Collector):
    """The figures that a process shows. Made by `open_monitor`."""

    def __init__(self, command: str) -> None:
        self.address: Address | None = None
        """Address where they are shown; None: nowhere."""
        self.why_not_ready: Callable[[], str] = lambda: "starting"
        """Called by `/readyz`; says in a few words why this process does not do its work yet; empty: it does."""
        try:
            version = metadata.version("dmoe_jax")
        except metadata.PackageNotFoundError:  # run from its sources
            version = ""
        about = {"command": command, "version": version}
        self._about = labelled("gauge", "dmoe_build_info", "1; which command of which version this is.", [(about, 1)])
        self._sources: list[Source] = []

    def show(self, source: Source) -> None:
        """Show these families, too, from now on."""
        self._sources.append(source)

    def families(self) -> list[Family]:
        """Return everything there is to show now."""
        return [self._about, *(family for source in self._sources for family in source())]

    def collect(self) -> Iterable[Family]:
        """Return the families and the system's figures of this process, to `prometheus_client` in a worker thread."""
        return [*trio.from_thread.run_sync(self.families), *ProcessCollector(registry=None).collect()]


class Answer(NamedTuple):
    """A page as it is now."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"


Page = Callable[[], Awaitable[Answer]]
"""Makes a page when it is asked for. An error in it is answered with status 500 and logged."""


@asynccontextmanager
async def open_monitor(
    address: Address | None, *, command: str, more: Mapping[str, Callable[[], bytes]] = MappingProxyType({})
) -> AsyncIterator[Monitor]:
    """A monitor that is served while the block runs.

    Args:
      address: to listen at, with port 0 for one that the system chooses; None: nothing listens.
      command: name of this process's command, a label.
      more: further pages, by path; they are JSON.

    Raises:
      ListenFailed: the port is taken, or the address is not this machine's.
    """
    monitor = Monitor(command)
    if address is None:
        yield monitor
        return

    async def metrics() -> Answer:
        # Writing takes a microsecond a line or more; a node of many experts has thousands of lines.
        body = await trio.to_thread.run_sync(generate_latest, monitor)
        return Answer(body, content_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def healthz() -> Answer:
        return Answer(b"ok\n")  # whoever reads this knows that the loop runs

    async def readyz() -> Answer:
        why_not = monitor.why_not_ready()
        return Answer(f"{why_not}\n".encode(), HTTPStatus.SERVICE_UNAVAILABLE) if why_not else Answer(b"ready\n")

    async def further(make: Callable[[], bytes]) -> Answer:
        return Answer(make(), content_type="application/json")

    pages: dict[str, Page] = {"/metrics": metrics, "/healthz": healthz, "/readyz": readyz}
    pages |= {path: partial(further, make) for path, make in more.items()}
    async with open_http_server(address, pages) as monitor.address:
        yield monitor


@asynccontextmanager
async def open_http_server(address: Address, pages: Mapping[str, Page]) -> AsyncIterator[Address]:
    """Serve pages, by path such as "/metrics", while the block runs; yields the address with the port chosen.

    Raises:
      ListenFailed: the port is taken, or the address is not this machine's. The message names it.
    """
    try:
        listeners = await trio.open_tcp_listeners(address.port, host=address.host)
    except (OSError, ValueError, OverflowError) as error:
        raise ListenFailed(f"cannot listen on {address}: {getattr(error, 'strerror', None) or error}") from error
    places = trio.Semaphore(MAX_CLIENTS)

    async def serve(stream: trio.SocketStream) -> None:
        try:
            places.acquire_nowait()
        except trio.WouldBlock:
            return
        try:
            await _serve_client(stream, pages)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # it has gone
        except Exception:
            _log.exception("serving a client of %s failed", address)
        finally:
            places.release()

    async with background_nursery() as nursery:
        await nursery.start(trio.serve_listeners, serve, listeners)
        host, port = listeners[0].socket.getsockname()[:2]
        yield Address(host, port)


async def _serve_client(stream: trio.SocketStream, pages: Mapping[str, Page]) -> None:
    """Answer one request and close; a client that is too slow, or none, is left without a word."""
    request = b""
    with trio.move_on_after(REQUEST_S) as waiting:
        while _END not in request and len(request) <= MAX_HEADER_BYTES:
            data = await stream.receive_some(4096)
            if not data:
                return
            request += data
    if waiting.cancelled_caught:
        return
    answer = await _answer_untrusted(request, pages)
    head = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Connection: close",
        *(["Allow: GET, HEAD"] if answer.status is HTTPStatus.METHOD_NOT_ALLOWED else []),
    ]
    body = b"" if request.startswith(b"HEAD ") else answer.body
    with trio.move_on_after(ANSWER_S):
        await stream.send_all("\r\n".join(head).encode() + _END + body)
        await stream.send_eof()
        left = _DRAIN_BYTES
        with trio.move_on_after(_DRAIN_S):
            while left > 0 and (data := await stream.receive_some(4096)):
                left -= len(data)


async def _answer_untrusted(request: bytes, pages: Mapping[str, Page]) -> Answer:
    line = _REQUEST_LINE.match(request)
    if line is None or _END not in request:
        is_long = len(request) > MAX_HEADER_BYTES
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE if is_long else HTTPStatus.BAD_REQUEST
        return Answer(b"expected an HTTP/1.1 request\n", status)
    method, target = line.groups()
    if method not in (b"GET", b"HEAD"):
        return Answer(b"expected GET or HEAD\n", HTTPStatus.METHOD_NOT_ALLOWED)
    page = pages.get(target.partition(b"?")[0].decode())
    if page is None:
        return Answer(b"there is no such page\n", HTTPStatus.NOT_FOUND)
    try:
        return await page()
    except Exception:
        _log.exception("the page %r could not be made", target)
        return Answer(b"the page could not be made; see the log\n", HTTPStatus.INTERNAL_SERVER_ERROR)
