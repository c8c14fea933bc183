"""One direction of a simulated link: how a part gets from one host to the other.

A part waits for the window, which lets it go while what is under way or unread at the receiver stays below
`RECEIVE_BUFFER_BYTES`, and what is under way below what a slow line carries in a second; then it passes the sender's
uplink, takes its latency, and passes the receiver's downlink. Each step is a method, called by the step before or by
the agenda. The window opens the moment that the receiver reads, where TCP takes half a round trip to say so.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import trio

from dmoe_net.chance import uniform
from dmoe_net.transport.sim.agenda import Agenda
from dmoe_net.transport.sim.events import Reachability
from dmoe_net.transport.sim.links import Constant, LatencyModel, Loss, SimHost
from dmoe_net.wire.frames import Frame

SEND_BUFFER_BYTES = 512 * 1024
"""Bytes held back by a flow before its sender has to wait: about a socket's buffer, and one part of a large frame."""

RECEIVE_BUFFER_BYTES = 4 * 2**20
"""Most bytes under way to one end of a link or unread there: the size to which Linux lets TCP's buffer grow."""

_QUEUE_S = 0.25
"""Seconds of traffic that a flow has waiting on a slow line: about the queue of a home router, at whose end TCP slows
down. The buffers above are the bounds on fast lines."""
_LEAST_QUEUE_BYTES = 64 * 1024
_UNDER_WAY_S = 1.0
"""Seconds of traffic that a flow has on its way over a slow line, round trip and queue."""
_LEAST_UNDER_WAY_BYTES = 3 * 2**19
"""Two parts of a large frame and some, for a part is never cut: with one the line would stand idle in between."""

_LOOPBACK_S = 1e-4
"""Within a host: half of a measured round trip. Not zero, so that time passes for a task that tries again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """Agenda, losses and reachability, which all flows of a simulation share."""

    agenda: Agenda
    loss: Loss
    reachability: Reachability = field(default_factory=Reachability)


@dataclass(frozen=True, slots=True)
class Syn:
    """Asks for a connection."""


@dataclass(frozen=True, slots=True)
class SynAck:
    """The connection is there."""


@dataclass(frozen=True, slots=True)
class Fin:
    """The sender has closed the link."""

    at_boundary: bool


@dataclass(frozen=True, slots=True)
class Reset:
    """The link is gone."""

    reason: str


Payload = Frame | Syn | SynAck | Fin | Reset | None
"""Content of a part: a frame that it completes, a signal, or nothing that could be delivered yet."""


class FlowEnd(Protocol):
    """Interface that a flow needs of the end to which it leads."""

    def deliver(self, nbytes: int, payload: Payload) -> None:
        """Take what arrived."""

    def break_off(self, reason: str) -> None:
        """End the link at both ends."""


class Flow:
    """One direction of a link, as the head of this file explains.

    All its queues are bounded by the two buffers, except for signals, of which a link has a handful."""

    __slots__ = (
        "_destination", "_fin", "_held", "_is_dead", "_is_loopback", "_key", "_last_arrival", "_medium",
        "_num_buffered", "_num_in_transit", "_num_under_way", "_on_uplink", "_sequence", "_source", "_target",
        "_waiting", "model",
    )  # fmt: skip

    def __init__(
        self,
        medium: Medium,
        *,
        source: SimHost,
        destination: SimHost,
        key: bytes,
        model: LatencyModel,
        target: FlowEnd,
    ) -> None:
        self.model = model
        self._medium = medium
        self._source = source
        self._destination = destination
        self._is_loopback = source is destination
        self._key = key
        self._sequence = 0
        self._target = target
        self._last_arrival = 0.0
        # Made when needed: an empty deque takes 600 bytes, and most links are idle.
        self._waiting: deque[tuple[int, Payload]] | None = None  # for the window
        self._on_uplink: deque[tuple[float, int]] | None = None  # when it will have passed, bytes
        self._held: deque[tuple[int, Payload]] | None = None  # arrived while the hosts could not reach each other
        self._num_buffered = 0  # bytes waiting for the window or on the uplink
        self._num_under_way = 0  # bytes let through the window, and not received yet
        self._num_in_transit = 0  # bytes of these that have not arrived yet
        self._fin: Fin | None = None  # to be sent after what waits
        self._is_dead = False

    @property
    def is_finished(self) -> bool:
        """Nothing waits for the window any more."""
        return self._waiting is None

    def has_room(self) -> bool:
        """Return True if less than `SEND_BUFFER_BYTES` is held back; on a slow line, less than its queue."""
        most = min(max(self._source.up.bandwidth_bps / 8 * _QUEUE_S, _LEAST_QUEUE_BYTES), SEND_BUFFER_BYTES)
        if self._num_buffered >= most:
            self._count_passed()
        return self._num_buffered < most

    def _has_window_for(self, nbytes: int) -> bool:
        """Return True if a part of `nbytes` bytes may be under way beside those that are."""
        slower_bps = min(self._source.up.bandwidth_bps, self._destination.down.bandwidth_bps)
        most = max(slower_bps / 8 * _UNDER_WAY_S, _LEAST_UNDER_WAY_BYTES)
        return self._num_under_way + nbytes <= RECEIVE_BUFFER_BYTES and self._num_in_transit + nbytes <= most

    def when_passed(self, action: Callable[[], None]) -> None:
        """Do `action` once the uplink has taken another part; nothing if it has none to take."""
        if self._on_uplink:
            self._medium.agenda.at(self._on_uplink[0][0], action)

    def put(self, nbytes: int, payload: Payload) -> None:
        """Send a part of a frame. Callers look at `has_room` first."""
        if self._waiting is None and self._has_window_for(nbytes):
            self.transmit(nbytes, payload)
            return
        if self._waiting is None:
            self._waiting = deque()
        self._waiting.append((nbytes, payload))
        self._num_buffered += nbytes

    def finish(self, fin: Fin) -> None:
        """Send `fin` after everything that waits."""
        if self._waiting is None:
            self.transmit(0, fin)
        else:
            self._fin = fin

    def free(self, nbytes: int) -> None:
        """So much has been received: open the window."""
        self._num_under_way -= nbytes
        self._let_go()

    def _let_go(self) -> None:
        """Send of what waits as much as the window allows."""
        while self._waiting and self._has_window_for(self._waiting[0][0]):
            waiting_nbytes, payload = self._waiting.popleft()
            self._num_buffered -= waiting_nbytes
            self.transmit(waiting_nbytes, payload)
        if self._waiting is not None and not self._waiting:
            self._waiting = None
            if self._fin is not None:
                self.transmit(0, self._fin)

    def drop(self) -> None:
        """Forget what waits for the window."""
        self._waiting = self._fin = None

    def die(self) -> None:
        """The source went down: nothing will be sent again that does not get through."""
        self.drop()
        self._held = None
        self._is_dead = True

    def resume(self) -> None:
        """The hosts can reach each other again: what was held goes on, one latency from now."""
        if self._held is not None:
            self._medium.agenda.at(trio.current_time() + self._latency_s(), self._take_held)

    def transmit(self, nbytes: int, payload: Payload) -> None:
        """Put a part on the uplink, past the window, and its arrival on the agenda."""
        medium, now = self._medium, trio.current_time()
        self._num_under_way += nbytes
        self._num_in_transit += nbytes
        leaves = now if self._is_loopback else self._source.up.take(now, nbytes)
        if leaves > now and nbytes:
            if self._on_uplink is None:
                self._on_uplink = deque()
            self._count_passed()
            self._on_uplink.append((leaves, nbytes))
            self._num_buffered += nbytes
        sequence, latency_s = self._sequence, self._latency_s()
        arrives = leaves + latency_s
        if medium.loss.probability and not self._is_loopback:
            num_losses = medium.loss.num_losses(self._key, sequence)
            arrives += medium.loss.delay_s(latency_s, num_losses)
            if num_losses > medium.loss.max_retransmits:
                reason = f"a part was lost {num_losses} times in a row"
                medium.agenda.at(max(arrives, self._last_arrival), self._target.break_off, reason)
        # In order, also when this part's latency happens to be shorter.
        self._last_arrival = max(arrives, self._last_arrival)
        medium.agenda.at(self._last_arrival, self._arrive, nbytes, payload)

    def _count_passed(self) -> None:
        """Take those off the account that the uplink has passed meanwhile."""
        while self._on_uplink and self._medium.agenda.has_come(self._on_uplink[0][0]):
            self._num_buffered -= self._on_uplink.popleft()[1]

    def _latency_s(self) -> float:
        if self._is_loopback:
            return _LOOPBACK_S
        sequence, model = self._sequence, self.model
        self._sequence += 1
        # Most large simulations have constant latencies, and drawing is a third of a part's cost.
        sample_s = model.seconds if type(model) is Constant else model.sample_s(uniform(self._key, sequence, 0))
        return sample_s + self._source.extra_latency_s + self._destination.extra_latency_s

    def _is_connected(self) -> bool:
        reachability = self._medium.reachability
        return reachability.is_whole or reachability.between(self._source.name, self._destination.name)

    def _arrive(self, nbytes: int, payload: Payload) -> None:
        if self._held is None and self._is_connected():
            self._enter(nbytes, payload)
        elif not self._is_dead:
            if self._held is None:
                self._held = deque()
            self._held.append((nbytes, payload))

    def _take_held(self) -> None:
        if self._held is not None and self._is_connected():
            held, self._held = self._held, None
            for nbytes, payload in held:
                self._enter(nbytes, payload)

    def _enter(self, nbytes: int, payload: Payload) -> None:
        """Pass the downlink. It is taken now and not when the part left, for others may have arrived meanwhile."""
        now = trio.current_time()
        passed = now if self._is_loopback else self._destination.down.take(now, nbytes)
        if passed > now:
            self._medium.agenda.at(passed, self._deliver, nbytes, payload)
        else:
            self._deliver(nbytes, payload)

    def _deliver(self, nbytes: int, payload: Payload) -> None:
        self._num_in_transit -= nbytes
        self._target.deliver(nbytes, payload)
        if self._waiting:
            self._let_go()
