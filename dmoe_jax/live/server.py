"""The page and its stream of events, as pages of a small HTTP server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from importlib.resources import files

import trio

from dmoe_jax.live.feeds import Feed
from dmoe_jax.metrics.http_server import Answer, Page, Request, Send, open_http_server, refusal_of_strangers
from dmoe_net.identity import Address

MAX_VIEWERS = 8
"""Most browsers that are sent events at once; further ones are told so."""

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

_POLICY = "; ".join(
    [
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "connect", "img")),
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors")),
        "require-trusted-types-for 'script'",
    ]
)
_HEADERS = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
"""Nothing from elsewhere, nothing inline, no text ever taken for markup, and in no other page's frame."""


@asynccontextmanager
async def serve_page(address: Address, feed: Feed) -> AsyncIterator[Address]:
    """Serve the page of a feed while the block runs; yields the address with the port chosen.

    Raises:
      ListenFailed: the port is taken, or the address is not this machine's.
    """
    pages: dict[str, Page] = {}
    for file in (files("dmoe_jax.live") / "page").iterdir():
        if content_type := _TYPES.get(file.name.rpartition(".")[2]):
            pages[f"/{file.name}"] = partial(_file, content_type, file.read_bytes())
    pages["/"] = pages.pop("/index.html")
    pages["/events"] = partial(_events, feed, trio.Semaphore(MAX_VIEWERS))
    guarded: dict[str, Page] = {path: partial(_guarded, page, address.host) for path, page in pages.items()}
    async with open_http_server(address, guarded) as bound:
        yield bound


async def _file(content_type: str, data: bytes, request: Request) -> Answer:
    return Answer(data, content_type=f"{content_type}; charset=utf-8")


async def _events(feed: Feed, viewers: trio.Semaphore, request: Request) -> Answer:
    if not viewers.value:
        return Answer(f"{MAX_VIEWERS} browsers watch already\n".encode(), HTTPStatus.SERVICE_UNAVAILABLE)

    async def stream(send: Send) -> None:
        async with viewers:
            await feed.follow(send)

    return Answer(stream, content_type="text/event-stream; charset=utf-8")


async def _guarded(page: Page, host: str, request: Request) -> Answer:
    """Answer a request that is meant for this server, and tell the browser what the page may do."""
    answer = refusal_of_strangers(request, host) or await page(request)
    return answer._replace(headers=[*answer.headers, *_HEADERS])
