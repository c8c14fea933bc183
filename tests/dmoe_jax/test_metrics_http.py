"""The pages for scrapers and probes, over loopback: what they say, and what rude clients can do to them."""

import functools
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from dmoe_jax.metrics import monitor as monitors
from dmoe_jax.metrics.families import Histogram, Summary, by_label, counter, gauge, histogram, labelled
from dmoe_jax.metrics.http_server import (
    ANSWER_S,
    MAX_CLIENTS,
    MAX_HEADER_BYTES,
    REQUEST_S,
    Answer,
    Request,
    Send,
    open_http_server,
)
from dmoe_jax.metrics.process import peer_families
from dmoe_jax.peers.peer import PeerConfig, open_peer
from dmoe_jax.peers.security import Plain
from dmoe_net.errors import ListenFailed
from dmoe_net.identity import Address
from dmoe_net.rpc.base import Reply
from dmoe_net.rpc.base import Request as Call
from tests.dmoe_jax.http_client import ask, fetch, figures_of, parsed

ANY_PORT = Address("127.0.0.1", 0)


@asynccontextmanager
async def server() -> AsyncIterator[Address]:
    async def page(request: Request) -> Answer:
        return Answer(b"hello\n")

    async def broken(request: Request) -> Answer:
        raise ZeroDivisionError("on purpose")

    async def told(request: Request) -> Answer:
        headers = {name: value for name, value in request.headers.items() if name.startswith("x-")}
        return Answer(repr((request.method, request.path, dict(request.query), headers, request.body)).encode())

    async def counted(request: Request) -> Answer:
        async def stream(send: Send) -> None:
            for number in range(3):
                await send(f"{number}\n".encode())
                await send(b"")  # would be taken for the end

        return Answer(stream, headers=[("X-Kind", "numbers")])

    pages = {"/page": page, "/broken": broken, "POST /told": told, "/told": told, "/counted": counted}
    async with open_http_server(ANY_PORT, pages, max_body_bytes=10) as address:
        yield address


TOLD = b"POST /told?a=1&a=%41&b= HTTP/1.1\r\nHost: x\r\nX-One:  1 \r\nx-one: 2\r\n"
HEARD = repr(("POST", "/told", {"a": "A", "b": ""}, {"x-one": "1, 2"}, b"0123456789")).encode()
NO_BODY = b"expected a body with a Content-Length\n"


NO_REQUEST = b"expected an HTTP/1.1 request\n"


@pytest.mark.parametrize(
    ("request_", "status", "body"),
    [
        (b"GET /page HTTP/1.1\r\nHost: x\r\n\r\n", 200, b"hello\n"),
        (b"GET /page?name=1 HTTP/1.0\r\n\r\n", 200, b"hello\n"),
        (b"HEAD /page HTTP/1.1\r\nHost: x\r\n\r\n", 200, b""),
        (b"GET /other HTTP/1.1\r\nHost: x\r\n\r\n", 404, b"there is no such page\n"),
        (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400, NO_REQUEST),
        (b"POST /page HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", 405, b"expected GET or HEAD\n"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, NO_REQUEST),
        (b"GET /page HTTP/2.0\r\n\r\n", 400, NO_REQUEST),
        (b"GET /page\r\n\r\n", 400, NO_REQUEST),
        (b"GET /page HTTP/1.1\r\nX: " + b"a" * (2 * MAX_HEADER_BYTES), 431, NO_REQUEST),
        (b"GET /page HTTP/1.1\r\nHost : x\r\n\r\n", 400, NO_REQUEST),
        (b"GET /page HTTP/1.1\r\nHost: x\ny: z\r\n\r\n", 400, NO_REQUEST),
        (b"GET /page HTTP/1.1\r\nX: 1\r\n folded\r\n\r\n", 400, NO_REQUEST),
        (b"GET /told?" + b"a&" * 65 + b" HTTP/1.1\r\n\r\n", 400, NO_REQUEST),
        (b"PUT /told HTTP/1.1\r\n\r\n", 405, b"expected GET or HEAD or POST\n"),
        (b"POST /other HTTP/1.1\r\n\r\n", 404, b"there is no such page\n"),
        (TOLD + b"Content-Length: 10\r\n\r\n0123456789 and more", 200, HEARD),
        (TOLD + b"Content-Length: 11\r\n\r\n", 413, b"expected a body of at most 10 bytes\n"),
        (TOLD + b"\r\n", 411, NO_BODY),
        (TOLD + b"Content-Length: -1\r\n\r\n", 411, NO_BODY),
        (TOLD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 411, NO_BODY),
        (b"GET /counted HTTP/1.1\r\n\r\n", 200, b"2\r\n0\n\r\n2\r\n1\n\r\n2\r\n2\n\r\n0\r\n\r\n"),
        (b"GET /counted HTTP/1.0\r\n\r\n", 200, b"0\n1\n2\n"),
        (b"HEAD /counted HTTP/1.1\r\n\r\n", 200, b""),
        (b"GET /broken HTTP/1.1\r\nHost: x\r\n\r\n", 500, b"the page could not be made; see the log\n"),
    ],
)
async def test_every_request_gets_its_answer(request_: bytes, status: int, body: bytes, caplog: Any) -> None:
    """Also those that are none, and one of a page that cannot be made, which is logged; the server lives on."""
    async with server() as address:
        assert await ask(address, request_) == (status, body)
        assert await fetch(address, "/page") == (200, b"hello\n")
    assert ("on purpose" in caplog.text) == (status == 500)


async def test_a_port_in_use_is_refused() -> None:
    """With the address in the message; so is an address of another machine."""
    async with server() as address:
        with pytest.raises(ListenFailed, match=rf"cannot listen on {address}: .*in use"):
            async with open_http_server(address, {}):
                pass
    with pytest.raises(ListenFailed, match=r"cannot listen on 192\.0\.2\.1:0: "):
        async with open_http_server(Address("192.0.2.1", 0), {}):
            pass


async def test_silent_clients_hold_nobody_up_and_are_not_kept(autojump_clock: trio.testing.MockClock) -> None:
    """One says nothing, one half of its request, one leaves in the middle; all are rid of after five seconds."""
    async with server() as address:
        silent, half, gone = [await trio.open_tcp_stream(address.host, address.port) for _ in range(3)]
        await half.send_all(b"GET /page HTT")
        await gone.send_all(b"GET")
        await gone.aclose()
        assert await fetch(address, "/page") == (200, b"hello\n")
        began = trio.current_time()
        assert await silent.receive_some(100) == b""
        assert await half.receive_some(100) == b""
        assert trio.current_time() - began <= REQUEST_S
        await silent.aclose()
        await half.aclose()


async def test_a_body_may_come_late_and_be_asked_for() -> None:
    """A client that waits for leave to send its body gets it; one that leaves in the middle gets nothing."""
    async with server() as address:
        for is_whole in (True, False):
            async with await trio.open_tcp_stream(address.host, address.port) as stream:
                await stream.send_all(TOLD + b"Content-Length: 10\r\nExpect: 100-continue\r\n\r\n")
                assert await stream.receive_some() == b"HTTP/1.1 100 Continue\r\n\r\n"
                await stream.send_all(b"01234")
                if is_whole:
                    await stream.send_all(b"56789")
                else:
                    await stream.send_eof()
                answer = b"".join([data async for data in stream])
            assert answer.endswith(HEARD) == is_whole
            assert bool(answer) == is_whole


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_stream_ends_with_its_client(autojump_clock: trio.testing.MockClock, leaves: bool) -> None:
    """At once when the client leaves; after ten seconds when it is there and takes nothing. What waits is cancelled."""
    began, ended = trio.Event(), trio.Event()

    async def page(request: Request) -> Answer:
        async def stream(send: Send) -> None:
            try:
                began.set()
                if leaves:
                    await trio.sleep_forever()
                while True:
                    await send(bytes(1 << 20))
            finally:
                ended.set()

        return Answer(stream)

    async with open_http_server(ANY_PORT, {"/page": page}) as address:
        stream = await trio.open_tcp_stream(address.host, address.port)
        await stream.send_all(b"GET /page HTTP/1.1\r\n\r\n")
        await began.wait()
        then = trio.current_time()
        if leaves:
            await stream.aclose()
        await ended.wait()
        assert trio.current_time() - then == (0 if leaves else ANSWER_S)
        await stream.aclose()


async def test_a_stream_that_fails_is_not_taken_for_whole(caplog: Any) -> None:
    """Its last chunk is missing, its error is in the log, and the server lives on."""

    async def page(request: Request) -> Answer:
        async def stream(send: Send) -> None:
            await send(b"begun")
            raise ZeroDivisionError("on purpose")

        return Answer(stream)

    async with open_http_server(ANY_PORT, {"/page": page}) as address:
        for _ in range(2):
            assert await fetch(address, "/page") == (200, b"5\r\nbegun\r\n")
    assert caplog.text.count("on purpose") >= 2


async def test_a_page_that_fails_as_the_server_ends_is_logged(caplog: Any) -> None:
    """It would come out of the server's block beside what has ended it, and a command would not end in order."""
    asked = trio.Event()

    async def page(request: Request) -> Answer:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                asked.set()
                await trio.sleep_forever()
            finally:
                raise ZeroDivisionError("on purpose")

    async with trio.open_nursery() as nursery, open_http_server(ANY_PORT, {"/page": page}) as address:
        nursery.start_soon(fetch, address, "/page")
        await asked.wait()
    assert "on purpose" in caplog.text


async def test_no_more_clients_than_there_are_places() -> None:
    """The next ones are told to come again, at once; when one leaves there is room again."""
    async with server() as address:
        others = [await trio.open_tcp_stream(address.host, address.port) for _ in range(MAX_CLIENTS)]
        await trio.testing.wait_all_tasks_blocked(0.01)  # accepted
        for _ in range(MAX_CLIENTS + 1):  # those that were told leave their places
            assert await fetch(address, "/page") == (503, b"clients at once are at most 16: ask again\n")
        for other in others:
            await other.aclose()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert await fetch(address, "/page") == (200, b"hello\n")


async def test_families_come_back_as_they_were() -> None:
    """Each kind, with labels that need escapes; cumulative buckets, their bounds included, the last one without any."""
    values = Histogram((0.5, 2.0))
    for value in (0.5, 1.0, 1.5, 30.0, math.nan):
        values.observe(value)
    awkward = 'a "b"\\c\nd'
    families = [
        counter("dmoe_a_total", "A.", 3),
        gauge("dmoe_b", "B, with a \\ and\na line.", math.nan),
        gauge("dmoe_unknown", "Not known now.", None),
        by_label("gauge", "dmoe_c", "C.", "uid", {awkward: 2.5}),
        histogram("dmoe_d_seconds", "D.", values),
        labelled("summary", "dmoe_e", "E.", [({"kind": "x"}, Summary(count=2, total=7.0))]),
    ]
    async with monitors.open_monitor(ANY_PORT, command="test") as monitor:
        assert monitor.address is not None
        monitor.show(lambda: families)
        _, text = await fetch(monitor.address, "/metrics")
    found = parsed(text)
    assert found["dmoe_a_total"] == {(): 3.0}
    assert math.isnan(found["dmoe_b"][()])
    assert found["dmoe_c"] == {(("uid", awkward),): 2.5}
    buckets = {labels[0][1]: count for labels, count in found["dmoe_d_seconds_bucket"].items()}
    assert buckets == {"0.5": 1, "2.0": 3, "+Inf": 4}
    assert (found["dmoe_d_seconds_sum"], found["dmoe_d_seconds_count"]) == ({(): 33.0}, {(): 4.0})
    assert found["dmoe_e_sum"] == {(("kind", "x"),): 7.0}
    types = {"# TYPE dmoe_a_total counter", "# TYPE dmoe_d_seconds histogram", "# TYPE dmoe_unknown gauge"}
    assert types | {"# HELP dmoe_b B, with a \\\\ and\\na line."} <= {*text.decode().splitlines()}


async def test_a_monitor_answers_scrapes_and_probes() -> None:
    """Figures as they are at the scrape; ready only when the process says so."""
    served = 0
    async with monitors.open_monitor(ANY_PORT, command="test", more={"/targets": lambda: b"[]"}) as monitor:
        assert monitor.address is not None
        monitor.show(lambda: [counter("dmoe_served_total", "Served.", served)])
        assert await fetch(monitor.address, "/healthz") == (200, b"ok\n")
        assert await fetch(monitor.address, "/readyz") == (503, b"starting\n")
        assert await fetch(monitor.address, "/targets") == (200, b"[]")
        monitor.why_not_ready = lambda: ""
        assert await fetch(monitor.address, "/readyz") == (200, b"ready\n")
        for served in (1, 2):
            status, text = await fetch(monitor.address, "/metrics")
            found = parsed(text)
            assert (status, found["dmoe_served_total"]) == (200, {(): served})
    assert [dict(labels)["command"] for labels in found["dmoe_build_info"]] == ["test"]
    assert found["process_resident_memory_bytes"][()] > 1e6


async def test_a_peer_shows_its_connections_and_its_dht() -> None:
    """Two peers, one joined through the other, a call under way and a record stored."""
    started, let_go = trio.Event(), trio.Event()

    async def stuck(request: Call) -> Reply:
        started.set()
        await let_go.wait()
        return Reply()

    async with (
        open_peer((), PeerConfig(security=Plain(), listen="127.0.0.1:0", seed=1)) as first,
        open_peer(first.contact, PeerConfig(security=Plain(), listen=None, seed=2)) as second,
        trio.open_nursery() as nursery,
    ):
        await first.dht.store("key", 1, life_s=60)
        first.rpc.add_handler("stuck", stuck)
        call = functools.partial(second.rpc.call, first.rpc.address, "stuck", {}, [np.zeros(1000)], timeout_s=60)
        nursery.start_soon(call)
        await started.wait()
        shown = [figures_of(peer_families(each)) for each in (first, second)]
        let_go.set()
    calls = [each["dmoe_network_calls_in_flight"] for each in shown]
    served, placed = ({labels[0][1]: count for labels, count in each.items()} for each in calls)
    assert (served, placed) == ({"placed": 0, "served": 1}, {"placed": 1, "served": 0})
    assert shown[0]["dmoe_network_connections"] == {(("direction", "incoming"),): 1, (("direction", "outgoing"),): 0}
    assert shown[0]["dmoe_network_received_bytes_total"][()] == shown[1]["dmoe_network_sent_bytes_total"][()] > 8000
    assert shown[0]["dmoe_dht_records"] == {(): 1}
    assert shown[1]["dmoe_dht_peers"] == {(): 1}
    [who] = shown[0]["dmoe_peer_info"]
    assert dict(who) == {"peer_id": str(first.rpc.peer_id), "address": str(first.rpc.address)}
