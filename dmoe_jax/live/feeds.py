"""Feeds of browsers, as server-sent events: the live state of a swarm, or a timeline of states.

No browser has a queue. One that watches a live swarm is sent the changes since what it was sent last, so that a slow
one gets fewer and larger ones; one that reads a timeline is sent its next lines when it has taken those before.
"""

from collections.abc import Awaitable, Callable, Iterable

import trio

from dmoe_jax.live.events import State, about, line_of, step_of

Send = Callable[[bytes], Awaitable[None]]

KEEP_ALIVE_S = 15.0
"""Seconds of silence after which a comment is sent: what stands between may end a connection that looks idle."""
MAX_PAST = 600
"""Most totals of the past that a browser is given to begin with. If there are more, every second one goes."""
_PIECE = 1 << 16
"""Characters that are sent at once of a timeline, about."""


class LiveFeed:
    """The state of a swarm as it is now; its title names what is watched."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._time_s = 0.0
        self._state: State | None = None
        self._past: list[list[object]] = []
        self._lines: dict[int, str] = {}  # by the identity of the state that a browser has: its line to the newest one
        self._news = trio.Event()

    def publish(self, time_s: float, state: State) -> None:
        """Show a state, which nobody changes any more."""
        self._time_s, self._state, self._lines = time_s, state, {}
        self._past.append([round(time_s, 3), state.get("totals", {})])
        if len(self._past) > MAX_PAST:
            self._past = self._past[::2]
        self._news.set()
        self._news = trio.Event()

    async def follow(self, send: Send) -> None:
        """Send the state, and then its changes, for ever."""
        await send(_event(about(self._title, "live", past=self._past)))
        sent: State | None = None
        while True:
            if self._state is sent:
                await _news_or_comment(self._news, send)
            else:
                line, sent = self._line_from(sent), self._state
                await send(_event(line))

    def _line_from(self, sent: State | None) -> str:
        """The event that brings a browser from one state to the newest; made once for all that have the same."""
        assert self._state is not None  # then it is what has been sent
        if id(sent) not in self._lines:
            self._lines[id(sent)] = step_of(self._time_s, sent, self._state)
        return self._lines[id(sent)]


class Timeline:
    """States of a run or a recording, one after the other; the head is its first event, see `events.about`."""

    def __init__(self, head: str) -> None:
        self._lines = [head]
        self._is_over = False
        self._news = trio.Event()

    def add(self, lines: Iterable[str], *, is_over: bool = False) -> None:
        """Add events; `is_over` if none will follow."""
        self._lines += lines
        self._is_over = is_over
        self._tell()

    def restart(self, head: str) -> None:
        """Begin anew, as a run does that goes on from a checkpoint. Browsers begin anew, too."""
        self._lines, self._is_over = [head], False
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()

    async def follow(self, send: Send) -> None:
        """Send all events so far, and then those that are added, until the timeline is over."""
        lines, sent = self._lines, 0
        while True:
            if lines is not self._lines:
                lines, sent = self._lines, 0
            if sent < len(lines):
                piece, size = [], 0
                while sent < len(lines) and size < _PIECE:
                    piece.append(_event(lines[sent]))
                    sent, size = sent + 1, size + len(piece[-1])
                await send(b"".join(piece))
            elif self._is_over:
                await send(_event(line_of("end", 0.0)))
                return
            else:
                await _news_or_comment(self._news, send)


Feed = LiveFeed | Timeline


async def _news_or_comment(news: trio.Event, send: Send) -> None:
    """Wait for news; say that we are there if none comes for long."""
    with trio.move_on_after(KEEP_ALIVE_S) as waiting:
        await news.wait()
    if waiting.cancelled_caught:
        await send(b": still here\n\n")


def _event(line: str) -> bytes:
    """A line of JSON, which holds no line feed, as a server-sent event."""
    return b"data: " + line.encode() + b"\n\n"
