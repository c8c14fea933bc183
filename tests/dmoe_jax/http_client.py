"""A client of one request, for the tests of what processes show."""

import json
from collections.abc import Iterable
from typing import Any

import trio
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from dmoe_net.identity import Address

Figures = dict[str, dict[tuple[tuple[str, str], ...], float]]
"""Sample name -> labels -> value."""


async def ask(address: Address, request: bytes, *, ends: bool = False) -> tuple[int, bytes]:
    """Send these bytes, and that nothing more comes if it `ends`; (status, body), status 0 if there is no answer."""
    stream = await trio.open_tcp_stream(address.host, address.port)
    async with stream:
        data = b""
        try:
            await stream.send_all(request)
            if ends:
                await stream.send_eof()
            async for some in stream:
                data += some
        except trio.BrokenResourceError:  # closed while we sent
            pass
    head, _, body = data.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body


async def fetch(address: Address, path: str) -> tuple[int, bytes]:
    """GET a page: (status, body)."""
    return await ask(address, f"GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())


async def next_events(stream: trio.SocketStream, count: int) -> list[dict[str, Any]]:
    """The next events of a stream in chunks, of which each is one send of the server; comments are passed over."""
    found: list[dict[str, Any]] = []
    buffer = b""
    while len(found) < count:
        buffer += await stream.receive_some()
        *whole, buffer = buffer.split(b"\n\n")
        lines = [line for each in whole for line in each.split(b"\n") if line.startswith(b"data: ")]
        found += [json.loads(line.removeprefix(b"data: ")) for line in lines]
    return found


def figures_of(families: Iterable[Metric]) -> Figures:
    found: Figures = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def parsed(text: bytes) -> Figures:
    """The figures as Prometheus' own client reads the text."""
    return figures_of(text_string_to_metric_families(text.decode()))


async def scrape(address: Address) -> Figures:
    """A process's metrics, as `parsed`."""
    status, text = await fetch(address, "/metrics")
    assert status == 200, text
    return parsed(text)
