"""The ends of simulated links, and where they are kept."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from dmoe_net.errors import ConnectionLost, ListenFailed
from dmoe_net.identity import Address, PeerId
from dmoe_net.transport.sim.agenda import Waiter
from dmoe_net.transport.sim.flow import Fin, Flow, Medium, Payload, Reset, Syn, SynAck
from dmoe_net.transport.sim.frames import CheckedPassage, FramePassage
from dmoe_net.transport.sim.links import Latency, SimHost, model_between, stream_key
from dmoe_net.wire.frames import Frame, Part
from dmoe_net.wire.sinks import Sinks

_TELLING_BYTES = 4096

BACKLOG = 128
"""Links that a listener holds until they are accepted: Linux's own long-standing default bound."""


class SimListener:
    """A place where links come in, as a `dmoe_net.transport.base.Listener`. Made by `SimTransport.listen`."""

    def __init__(self, topology: "Topology", address: Address, peer_id: PeerId) -> None:
        self._topology = topology
        self.address = address
        self.peer_id = peer_id
        self._queue: deque[SimLink] = deque()  # at most BACKLOG
        self._acceptor = Waiter()
        self._is_closed = False

    def offer(self, link: "SimLink") -> bool:
        """Queue a link for `accept`; False if the queue is full."""
        if len(self._queue) >= BACKLOG:
            return False
        self._queue.append(link)
        self._acceptor.wake()
        return True

    async def accept(self) -> "SimLink":
        """The next link.

        Raises:
          trio.BusyResourceError: another task is accepting.
        """
        await trio.lowlevel.checkpoint()
        while not self._is_closed:
            if self._queue:
                return self._queue.popleft()
            await self._acceptor.wait()
        raise ListenFailed(f"no longer listening at {self.address}")

    async def aclose(self) -> None:
        """Stop listening; links that nobody has accepted are reset."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """As `aclose`, without waiting."""
        if not self._is_closed:
            self._is_closed = True
            del self._topology.listeners[self.address]
            while self._queue:
                self._queue.popleft().abort()
            self._acceptor.wake()


@dataclass(slots=True, kw_only=True)
class Topology:
    """State of a simulation: settings, hosts, listeners and links. Bounded by what its author starts.

    Attributes:
      links: the dialled ends of all links that are open at either end, by number.
      links_of: those of them with an end at a host, by its name.
    """

    medium: Medium
    seed: int
    latency: Latency
    check_frames: bool
    hosts: dict[str, SimHost] = field(default_factory=dict)
    listeners: dict[Address, SimListener] = field(default_factory=dict)
    links: dict[int, "SimLink"] = field(default_factory=dict)
    links_of: dict[str, dict[int, "SimLink"]] = field(default_factory=dict)
    num_links: int = 0
    is_closed: bool = False

    def forget(self, number: int) -> None:
        """Drop a link whose ends are both closed; nothing if it is gone."""
        if (link := self.links.pop(number, None)) is not None:
            for name in {link.host.name, link.other.host.name}:
                del self.links_of[name][number]


class SimLink:
    """One end of a simulated link as a `dmoe_net.transport.base.Link`.

    Args:
      number: of the link; its two ends share it.
      own_id: who is at this end; of an accepted end it becomes known when the connection is made.
      remote_address: see `Link.remote_address`.
    """

    __slots__ = (
        "_at_boundary", "_inbox", "_is_closed", "_is_established", "_is_proved", "_is_sending", "_number", "_own_id",
        "_passage", "_receiver", "_sender", "_topology", "cause", "cut_number", "flow", "host", "num_moved",
        "num_received", "num_sent", "other", "remote_address", "sinks",
    )  # fmt: skip

    def __init__(
        self, topology: Topology, number: int, host: SimHost, own_id: PeerId | None, remote_address: Address
    ) -> None:
        self.host = host
        self.other: SimLink
        self.flow: Flow  # both are set by `new_link`
        self.cut_number = 0  # of the change of the network that cut this link; 0: it is not cut
        self._topology = topology
        self._number = number
        self._own_id = own_id
        self.remote_address = remote_address
        self.sinks = Sinks()  # never taken up: frames are handed over, not their bytes
        self._passage = CheckedPassage() if topology.check_frames else FramePassage()
        self._sender = Waiter()
        self._is_sending = False
        self.num_moved = self.num_received = self.num_sent = 0
        self._receiver = Waiter()
        self._inbox: deque[tuple[int, Frame | None]] | None = None  # None instead of empty, see `Flow`
        self._at_boundary: bool | None = None  # where the other end's frames ended; None: they have not
        self._is_established = False
        self._is_proved = own_id is not None
        self._is_closed = False  # by this end's user
        self.cause: str | None = None  # why this end is of no more use; None while it is open

    @property
    def remote_peer_id(self) -> PeerId | None:
        """Id of the peer at the other end, from the network itself; None before the handshake."""
        return self.other._own_id if self._is_proved else None

    def when_heard(self, callback: Callable[[], None]) -> bool:
        if self._inbox or self.cause is not None or self._at_boundary is not None or self._is_closed:
            return False
        self._receiver.call(callback)
        return True

    async def connect(self) -> None:
        """Reach the other host: a round trip, or as long as the network is cut. If cancelled, `abort` the link.

        Raises:
          ConnectionLost: nobody accepts it, or this host went down.
        """
        self.flow.transmit(0, Syn())
        while not self._is_established:
            if self.cause is not None:
                raise self._lost()
            await self._receiver.wait()

    async def handshake(self) -> None:
        """Take no time: the network knows who is who."""
        await trio.lowlevel.checkpoint()
        if self.cause is not None:
            raise self._lost()
        self._is_proved = True

    async def send(self, *parts: Part) -> None:
        """Take the parts over. No checkpoint unless it has to wait: a turn of the event loop would cost more than all
        the rest. After a cancelled send every later one raises `trio.BusyResourceError`.

        Raises:
          trio.BusyResourceError: another task is sending.
        """
        if self._is_sending:
            raise trio.BusyResourceError("another task sends on this link, or was cancelled while it did")
        self._is_sending = True  # stays so if cancelled
        for part in parts:
            while self.cause is None and not self.flow.has_room():
                self.flow.when_passed(self._sender.wake)
                await self._sender.wait()
            if self.cause is None:
                self.flow.put(part.nbytes, self._passage.take(part))
                self.num_sent += part.nbytes
        self._is_sending = False
        if self.cause is not None:
            raise self._lost()

    async def receive(self) -> Frame | None:
        """The next frame, or None at the end.

        Raises:
          trio.BusyResourceError: another task is receiving.
        """
        while not self._is_closed:
            frame = self._next_frame()
            if frame is not None:
                return frame
            if self._at_boundary is None and self.cause is None:
                await self._receiver.wait()
                continue
            await trio.lowlevel.checkpoint()
            if self._at_boundary:
                return None
            if self._at_boundary is not None:
                raise ConnectionLost(f"connection to {self.remote_address} ended inside a frame")
            raise self._lost()
        await trio.lowlevel.checkpoint()
        raise self._lost()

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self.cause is None:
                self.flow.finish(Fin(self._passage.at_boundary))
            self._end("closed at this end")
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        """Close at once; what the uplink has taken counts as having left."""
        if self._is_closed:
            return
        self._is_closed = True
        self.flow.drop()
        if not self._is_established and not self.other._is_established:
            # Still dialling: nothing may be left of it, however long the network stays cut.
            self.other._end("the dial was given up")
        elif self.cause is None:
            self.flow.transmit(0, Reset("reset by the other end"))
        self._end("aborted at this end")

    def crash(self, *, silent: bool) -> None:
        """This end's host went down; `silent`: without a word to the other end."""
        if self._is_established and not silent and self.cause is None:
            self.flow.drop()
            self.flow.transmit(0, Reset(f"{self.host.name} went down"))
        elif self._is_established:
            self.flow.die()
        elif self.cause is None and self._own_id is not None:
            self.abort()
        else:
            return  # somebody's dial is under way to this host, which does not know of it yet
        self._is_closed = True
        self._end(f"{self.host.name} went down")

    def break_off(self, reason: str) -> None:
        """End the link at both ends at once, as when both give up."""
        for end in (self, self.other):
            end.flow.drop()
            end._end(reason)

    def deliver(self, nbytes: int, payload: Payload) -> None:
        """Take what arrived; called by the other end's flow."""
        if not (payload is None or isinstance(payload, Frame)):
            self._take_signal(payload)
            return
        if self.cause is not None:
            self._free(nbytes)
            # The system's answer to data that nobody will read; but first this end's own data have to leave.
            if self._is_closed and self.flow.is_finished and self.other.cause is None:
                self.flow.transmit(0, Reset("closed by the other end"))
            return
        host = self.host
        self.num_moved += nbytes
        self.num_received += nbytes
        if nbytes >= _TELLING_BYTES:  # the sender sees the system's buffer empty itself, but not of a ping
            self.other.num_moved += nbytes
        host.num_parts += 1
        host.num_bytes += nbytes
        if payload is None and self._receiver.is_waiting:  # it waits for frames, but reads what comes meanwhile
            self._free(nbytes)
            return
        if self._inbox is None:
            self._inbox = deque()
        self._inbox.append((nbytes, payload))
        if payload is not None:
            host.num_frames += 1
            self._receiver.wake()

    def _take_signal(self, signal: Syn | SynAck | Fin | Reset) -> None:
        match signal:
            case Syn():
                self._take_syn(0)
            case SynAck():
                self._is_established = True
                self._receiver.wake()
            case Fin(at_boundary=at_boundary):
                self._at_boundary = at_boundary
                self._receiver.wake()
            case Reset(reason=reason):
                self.flow.drop()
                self._end(reason)

    def _take_syn(self, attempt: int) -> None:
        """Be offered to the listener; while its queue is full, the connection is asked for again and again."""
        if self.cause is not None:  # the dial was given up
            return
        listener, loss = self._topology.listeners.get(self.other.remote_address), self._topology.medium.loss
        if listener is None:
            self.flow.transmit(0, Reset("connection refused"))
            self._end("connection refused")
        elif listener.offer(self):
            self._own_id = listener.peer_id
            self._is_established = True
            self.flow.transmit(0, SynAck())
        elif attempt < loss.max_retransmits:
            again = trio.current_time() + loss.retransmit_s * 2**attempt
            self._topology.medium.agenda.at(again, self._take_syn, attempt + 1)
        else:
            self.break_off("connection timed out: too many wait to be accepted there")

    def _next_frame(self) -> Frame | None:
        """Read up to the next frame, which opens the window."""
        inbox = self._inbox
        if inbox is None:
            return None
        frame, num_read = None, 0
        while inbox and frame is None:
            nbytes, frame = inbox.popleft()
            num_read += nbytes
        if not inbox:
            self._inbox = None
        self._free(num_read)
        return frame

    def _free(self, nbytes: int) -> None:
        other = self.other
        other.flow.free(nbytes)
        if other._sender.is_waiting and other.flow.has_room():
            other._sender.wake()

    def _end(self, cause: str) -> None:
        if self.cause is None:
            self.cause = cause
            self._sender.wake()
            self._receiver.wake()
        if self._is_closed:
            self._inbox = None
        if self.other.cause is not None:
            self._topology.forget(self._number)

    def _lost(self) -> ConnectionLost:
        return ConnectionLost(f"connection to {self.remote_address} lost: {self.cause}")


def new_link(topology: Topology, source: SimHost, destination: SimHost, own_id: PeerId, address: Address) -> SimLink:
    """The dialled end of a new link, its other end at `destination`; not connected yet."""
    number = topology.num_links = topology.num_links + 1
    pair_number = source.num_links_to[destination.name] = source.num_links_to.get(destination.name, 0) + 1
    dialled = SimLink(topology, number, source, own_id, address)
    accepted = SimLink(topology, number, destination, None, Address(source.name, next(source.dial_ports)))
    for end, other in ((dialled, accepted), (accepted, dialled)):
        end.other = other
        end.flow = Flow(
            topology.medium,
            source=end.host,
            destination=other.host,
            key=stream_key(topology.seed, source.name, destination.name, pair_number, is_answer=end is accepted),
            model=model_between(topology.latency, end.host.name, other.host.name),
            target=other,
        )
    topology.links[number] = dialled
    for host in (source, destination):
        topology.links_of.setdefault(host.name, {})[number] = dialled
    return dialled
