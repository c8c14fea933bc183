"""Events for browsers: what each is sent, slow ones included, and the server of the page over loopback."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from dmoe_jax.live.events import about, line_of
from dmoe_jax.live.feeds import KEEP_ALIVE_S, MAX_PAST, Feed, LiveFeed, Timeline
from dmoe_jax.live.server import MAX_VIEWERS, serve_page
from dmoe_net.identity import Address
from tests.dmoe_jax.http_client import ask, fetch, next_events
from tests.dmoe_jax.merge_patch import merged

ANY_PORT = Address("127.0.0.1", 0)


class Browser:
    """Takes what a feed sends, when it is let."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.may_take = trio.CapacityLimiter(1)

    async def send(self, data: bytes) -> None:
        async with self.may_take:
            self.texts.append(data)

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = b"".join(self.texts).split(b"\n\n")
        return [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: ")]


@asynccontextmanager
async def following(feed: Feed) -> AsyncIterator[Browser]:
    async with trio.open_nursery() as nursery:
        browser = Browser()
        nursery.start_soon(feed.follow, browser.send)
        await trio.testing.wait_all_tasks_blocked()
        yield browser
        nursery.cancel_scope.cancel()


async def test_a_browser_gets_the_state_and_then_changes(autojump_clock: trio.testing.MockClock) -> None:
    """One that comes later gets the past of the totals; where nothing happens a comment keeps the line open."""
    feed = LiveFeed("swarm 'x'")
    async with following(feed) as first:
        assert [event["what"] for event in first.events] == ["about"]
        feed.publish(1.0, {"totals": {"peers": 1}, "peers": {"a": {}, "b": {"n": 1}}})
        await trio.testing.wait_all_tasks_blocked()
        feed.publish(2.0, {"totals": {"peers": 2}, "peers": {"b": {"n": 2}}})
        async with following(feed) as second:
            patch = {"totals": {"peers": 2}, "peers": {"a": None, "b": {"n": 2}}}
            assert first.events[2] == {"time": 2.0, "what": "changes", "state": patch}
            assert second.events[0]["past"] == [[1.0, {"peers": 1}], [2.0, {"peers": 2}]]
            assert second.events[1] == {
                **{"time": 2.0, "what": "all"},
                "state": {"totals": {"peers": 2}, "peers": {"b": {"n": 2}}},
            }
            await trio.sleep(KEEP_ALIVE_S + 1)
            assert first.texts[-1] == second.texts[-1] == b": still here\n\n"


async def test_a_slow_browser_misses_states_but_no_change() -> None:
    """It holds nothing up, nothing waits for it, and the next thing that it is sent brings it to the newest state."""
    feed = LiveFeed("x")
    async with following(feed) as slow, following(feed) as quick:
        feed.publish(0.0, {"n": {"0": 0}})
        await trio.testing.wait_all_tasks_blocked()
        async with slow.may_take:
            for step in range(1, 1001):
                feed.publish(float(step), {"n": {str(step): step, str(step - 1): step}})
                await trio.testing.wait_all_tasks_blocked()
        await trio.testing.wait_all_tasks_blocked()
        for browser, count in ((quick, 1002), (slow, 4)):
            assert len(browser.events) == count
            state: dict[str, Any] = {}
            for event in browser.events[1:]:
                state = merged(state, event["state"])
            assert state == {"n": {"1000": 1000, "999": 1000}}


async def test_the_past_is_bounded() -> None:
    """However long a swarm is watched; it still begins with the first state."""
    feed = LiveFeed("x")
    for step in range(10 * MAX_PAST):
        feed.publish(float(step), {"totals": {"step": step}})
    async with following(feed) as browser:
        past = browser.events[0]["past"]
        assert MAX_PAST // 2 <= len(past) <= MAX_PAST
        assert past[0] == [0.0, {"step": 0}]


async def test_a_timeline_is_told_from_its_beginning_to_its_end() -> None:
    """Also to somebody who comes in the middle; one that begins anew is told anew; at the end the stream ends."""
    timeline = Timeline(about("x", "recorded"))
    timeline.add([line_of("changes", time, state={"n": time}) for time in (0.0, 1.0, 2.0)])
    async with following(timeline) as browser:
        timeline.add([line_of("changes", 3.0, state={"n": 3})])
        await trio.testing.wait_all_tasks_blocked()
        assert [event["time"] for event in browser.events] == [0, 0, 1, 2, 3]
        timeline.restart(about("y", "recorded"))
        timeline.add([line_of("changes", 7.0, state={})], is_over=True)
        await trio.testing.wait_all_tasks_blocked()
        assert [event["what"] for event in browser.events[5:]] == ["about", "changes", "end"]
        assert len(browser.texts) == 4  # pieces of many events, and the end


@asynccontextmanager
async def page() -> AsyncIterator[tuple[Address, LiveFeed]]:
    feed = LiveFeed("swarm 'x'")
    async with serve_page(ANY_PORT, feed) as address:
        yield address, feed


async def test_the_page_is_complete_and_allows_nothing_else() -> None:
    """Each file that another one names is served; nothing inline, nothing from elsewhere, in no frame."""
    async with page() as (address, _):
        status, html = await fetch(address, "/")
        assert status == 200
        for name in (
            "page.js",
            "page.css",
            "icon.svg",
            "timeline.js",
            "heatmap.js",
            "tables.js",
            "text.js",
            "curve.js",
        ):
            status, data = await fetch(address, f"/{name}")
            assert (status, b"innerHTML" in data, b"http://" in data.replace(b"http://www.w3.org/2000/svg", b"")) == (
                200,
                False,
                False,
            ), name
        assert b"<style" not in html
        assert b"style=" not in html
        assert html.count(b"<script") == html.count(b'<script type="module" src="page.js">') == 1
        assert await fetch(address, "/index.html") == (404, b"there is no such page\n")
        async with await trio.open_tcp_stream(address.host, address.port) as stream:
            await stream.send_all(f"HEAD / HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
            head = b"".join([data async for data in stream]).decode()
    assert "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'" in head
    assert "frame-ancestors 'none'" in head
    assert "Content-Type: text/html; charset=utf-8" in head
    assert "X-Content-Type-Options: nosniff" in head
    assert head.endswith("\r\n\r\n")


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        *(
            ("127.0.0.1:80", True),
            ("localhost:8000", True),
            ("LOCALHOST", True),
            ("[::1]:80", True),
            ("10.1.2.3", True),
        ),
        *(("evil.example:80", False), ("127.0.0.1.evil.example", False), ("", False), ("[::1", False), ("a b", False)),
    ],
)
async def test_sites_elsewhere_cannot_read_it(host: str, is_ours: bool) -> None:
    """A name that is resolved to this machine is refused, since its site would be the page's."""
    async with page() as (address, _):
        status, body = await ask(address, f"GET /icon.svg HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert status == (200 if is_ours else 421)
        assert body.startswith(b"<svg") == is_ours


async def test_events_come_over_http() -> None:
    """As server-sent events, to as many browsers as there are places; a HEAD takes none."""
    async with page() as (address, feed):
        feed.publish(0.0, {"totals": {"step": 1}})
        request = f"GET /events HTTP/1.1\r\nHost: {address}\r\n\r\n".encode()
        assert await ask(address, request.replace(b"GET", b"HEAD")) == (200, b"")
        assert (await ask(address, request.replace(b"GET", b"POST")))[0] == 405
        streams = [await trio.open_tcp_stream(address.host, address.port) for _ in range(MAX_VIEWERS)]
        for stream in streams:
            await stream.send_all(request)
            first, second = await next_events(stream, 2)
            assert (first["what"], first["title"], second["state"]) == ("about", "swarm 'x'", {"totals": {"step": 1}})
        status, text = await ask(address, request)
        assert (status, text) == (503, b"8 browsers watch already\n")
        assert (await fetch(address, "/"))[0] == 200
        feed.publish(1.0, {"totals": {"step": "</script><script>"}})
        for stream in streams:
            [event] = await next_events(stream, 1)
            assert event == {"time": 1.0, "what": "changes", "state": {"totals": {"step": "</script><script>"}}}
        await streams.pop().aclose()
        await trio.testing.wait_all_tasks_blocked(0.01)
        async with await trio.open_tcp_stream(address.host, address.port) as stream:
            await stream.send_all(request)
            assert (await next_events(stream, 2))[1]["what"] == "all"
        for stream in streams:
            await stream.aclose()
