"""The light network: calls instead of frames, for studies of ten thousand peers and more.

It has the latencies, hosts and partitions of the simulated network, and places each call as that does: a first call
dials (a round trip, the other's hello, then the call), later ones take one round trip, the frames of one direction of a
link arrive in the order in which they left, idle links are closed. But a call is a function call between two sleeps:
nothing is encoded, there are no links' tasks, no windows, no bandwidth, no loss and no tensors. It is for the DHT and
the directory; what it says of them differs from the full simulation by chance alone.

    network = CallNetwork(seed=1, latency=Exponential(0.05))
    caller = network.caller("node0", identity.peer_id)         # in place of `open_rpc_peer`
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence

import trio

from dmoe_net.errors import (
    CallFailed,
    CallRefused,
    ConnectionLost,
    DialFailed,
    PeerBusy,
    PeerTimeout,
    PeerUnavailable,
    RemoteFailure,
    RemoteProtocolError,
    seconds_of,
)
from dmoe_net.identity import Address, Contact, PeerId, address_of, peer_id_of
from dmoe_net.peer_health import PeerHealth
from dmoe_net.rpc.base import Body, Handler, Reply, Request
from dmoe_net.rpc.bulk import BulkTraffic
from dmoe_net.rpc.connection import IDLE_S
from dmoe_net.rpc.peer import DIAL_PAUSE
from dmoe_net.transport.sim.agenda import Agenda, Waiter
from dmoe_net.transport.sim.events import Heal, HostDown, HostUp, NetworkEvent, Partition
from dmoe_net.transport.sim.links import Latency, model_between
from dmoe_net.wire.codec import encode
from dmoe_net.wire.tensors import Outgoing, Tensor

PORT = 1
"""Port of every caller that listens."""

_TICK_S = 0.001
"""Arrivals are rounded up to multiples of it, as in `simulate`: many share one turn of the event loop."""

_FRAME_BYTES = 32
"""Approximate number of bytes that frame and message add to a body."""


class _Link:
    """Two callers, one of which has dialled the other; both hold it."""

    __slots__ = ("address", "back_at", "dialled", "dialler", "hello_at", "out_at", "ready_at", "used_at")

    def __init__(
        self, dialler: "CallingPeer", dialled: "CallingPeer", address: Address, ready_at: float, hello_at: float
    ) -> None:
        self.dialler, self.dialled, self.address = dialler, dialled, address
        self.ready_at, self.hello_at = ready_at, hello_at
        """Times from which frames of the dialler, and of the other, may leave. To sleep until then would cost a task's
        turn for each dial."""
        self.out_at, self.back_at = hello_at, 0.0
        """Times at which the last frame of the dialler, and of the other, arrives."""
        self.used_at = ready_at

    def far_end(self, caller: "CallingPeer") -> "CallingPeer":
        return self.dialled if caller is self.dialler else self.dialler

    def send(self, sender: "CallingPeer", leaves_at: float, delay_s: float) -> float:
        """Return the time at which a frame arrives: after those that left before it."""
        if sender is self.dialler:
            self.out_at = max(max(leaves_at, self.ready_at) + delay_s, self.out_at)
            return self.out_at
        self.back_at = max(max(leaves_at, self.hello_at) + delay_s, self.back_at)
        return self.back_at


class CallNetwork:
    """Callers that reach each other by address.

    Args:
      seed: of all delays.
      latency: as of `simulate`.
      may_dial: returns True if the first host can dial the second: False for one behind a NAT.
    """

    def __init__(
        self,
        *,
        seed: int,
        latency: Latency,
        may_dial: Callable[[str, str], bool] = lambda source, destination: True,
    ) -> None:
        self.num_calls: Counter[str] = Counter()
        """Calls placed, by method."""
        self.num_dials = 0
        """Dials of calls."""
        self.bulk = BulkTraffic()  # of all callers, for there are no bulk calls
        self._rng = random.Random(f"{seed}/calls")
        self._latency = latency
        self.may_dial = may_dial
        self.counts_bytes = False
        """True to encode each body and add up what would travel."""
        self._callers: dict[Address, CallingPeer] = {}
        self._down: dict[str, bool] = {}  # host -> True if it went silently
        self._groups: dict[str, int] = {}
        self._agenda = Agenda(tick_s=_TICK_S)
        self._keeps_agenda = False

    def caller(self, host: str, peer_id: PeerId, *, listens: bool = True) -> "CallingPeer":
        """A caller on a host of its own; one that does not listen is a client."""
        caller = CallingPeer(self, host, peer_id, Address(host, PORT) if listens else None)
        if (before := self._callers.get(Address(host, PORT))) is not None:
            before.hang_up(tells=True)  # a process that was started again has no links
        if listens:
            self._callers[Address(host, PORT)] = caller
        return caller

    def apply(self, event: NetworkEvent) -> None:
        """Let an event happen now: a partition, its end, or a host that goes down or comes up. Programs are for the
        caller of this to end and begin."""
        match event:
            case Partition(groups=groups):
                self._groups = {host: number for number, group in enumerate(groups, start=1) for host in group}
            case Heal():
                self._groups = {}
            case HostDown(host=host, silent=silent):
                self._down[host] = silent
                if (caller := self._callers.get(Address(host, PORT))) is not None:
                    caller.hang_up(tells=not silent)
            case HostUp(host=host):
                self._down.pop(host, None)
            case _:
                raise ValueError(f"not an event of the light network: {event!r}")

    def delay_s(self, source: str, destination: str) -> float:
        """Draw the latency of one frame, seconds."""
        return model_between(self._latency, source, destination).sample_s(self._rng.random())

    async def sleep_until(self, time_s: float) -> None:
        """Sleep until a time of trio's clock, rounded up to a tick."""
        if not self._keeps_agenda:
            self._keeps_agenda = True
            trio.lowlevel.spawn_system_task(self._agenda.run)
        waiter = Waiter()
        self._agenda.at(time_s, waiter.wake)
        await waiter.wait()

    def at(self, address: Address) -> "CallingPeer | None":
        """The caller that listens at an address, whether it can be reached or not."""
        return self._callers.get(address)

    def is_silent(self, source: str, destination: str) -> bool:
        """True if what one host sends to another is lost without a word."""
        is_cut = self._groups.get(source, 0) != self._groups.get(destination, 0)
        return is_cut or self._down.get(source, False) or self._down.get(destination, False)

    def refuses(self, source: str, destination: str) -> bool:
        """True if a host answers dials by a refusal."""
        return self._down.get(destination) is False or not self.may_dial(source, destination)


class CallingPeer:
    """One peer's end of a `CallNetwork`; implements `dmoe_net.rpc.base.Caller`."""

    def __init__(self, network: CallNetwork, host: str, peer_id: PeerId, address: Address | None) -> None:
        self.peer_id = peer_id
        self.address = address
        self.host = host
        self.health = PeerHealth()
        self.bulk = network.bulk
        self.num_placed = 0
        """Calls of this peer to others."""
        self.sent_bytes = self.received_bytes = 0
        """Bytes of bodies, with what frames add, if the network counts them."""
        self._network = network
        self._handlers: dict[str, Handler] = {}
        self._room: dict[str, int] = {}  # by method: calls that it takes beside those under way
        self._links: dict[PeerId, _Link] = {}
        self._links_at_sweep = 0
        self._dials: dict[Contact | Address, trio.Event] = {}
        self._has_greeted = False

    async def written(self, peer_id: PeerId) -> None:
        """Return at once: a call is no bytes that wait."""
        del peer_id
        await trio.lowlevel.checkpoint()

    def moved_bytes(self, peer_id: PeerId) -> int:
        """Nothing ever: there are no bulk calls."""
        return 0

    def add_handler(self, method: str, handler: Handler, *, max_concurrent: int = 64) -> None:
        if method in self._handlers:
            raise ValueError(f"a handler for {method} is registered already")
        self._handlers[method], self._room[method] = handler, max_concurrent

    def remove_handler(self, method: str) -> None:
        del self._handlers[method]

    def hang_up(self, *, tells: bool) -> None:
        """Forget all links; the other ends too, if they are told."""
        for link in self._links.values():
            if tells:
                link.far_end(self)._links.pop(self.peer_id, None)
        self._links.clear()

    def is_reached(self, contact: Contact) -> bool:
        link = self._reached(contact)
        return link is not None and link.ready_at <= trio.current_time()

    async def reach(self, contact: Contact, *, timeout_s: float) -> None:
        if self.is_reached(contact):
            await trio.lowlevel.checkpoint()
            return
        with trio.move_on_after(timeout_s):
            link = self._reached(contact) or await self._dial(contact)
            await self._network.sleep_until(link.ready_at)
            return
        raise DialFailed(f"cannot connect to {contact} within {seconds_of(timeout_s)}")

    async def call(
        self,
        target: Contact | Address | PeerId,
        method: str,
        body: Body,
        tensors: Sequence[Outgoing] = (),
        *,
        timeout_s: float,
        bulk_bytes: int = 0,
        on_partial: Callable[[Reply], None] | None = None,
        into: Tensor | None = None,
    ) -> Reply:
        """Call a method, see `Caller.call`. ValueError for tensors, which this network does not carry."""
        if tensors or into is not None or on_partial is not None:
            raise ValueError("the light network carries bodies alone")
        self._network.num_calls[method] += 1
        self.num_placed += 1
        started, peer_id = trio.current_time(), peer_id_of(target)
        link = None
        try:
            with trio.move_on_after(timeout_s):
                link = self._link_to(target)
                if link is None:
                    if isinstance(target, PeerId):
                        raise DialFailed(f"there is no connection with {target}")
                    link = await self._dial(target)
                other = link.far_end(self)
                peer_id = other.peer_id
                reply = await self._exchange(link, other, method, body)
                self.health.succeeded((peer_id, method.partition(".")[0]))
                return reply
            if link is None or link.ready_at > trio.current_time():
                raise DialFailed(f"cannot connect to {target} within {seconds_of(timeout_s)}")
            raise PeerTimeout(f"{target} did not answer {method!r} within {seconds_of(timeout_s)}")
        except (PeerUnavailable, RemoteProtocolError) as error:
            if peer_id is not None:
                now, service = trio.current_time(), (peer_id, method.partition(".")[0])
                self.health.failed(service, now, str(error), together_s=now - started)
            raise
        except CallFailed:
            self.health.succeeded((peer_id, method.partition(".")[0]))
            raise

    async def _exchange(self, link: _Link, other: "CallingPeer", method: str, body: Body) -> Reply:
        """Let a call travel, be served, and its answer travel back."""
        link.used_at = trio.current_time()
        await self._travel(link, other)
        if self.peer_id not in other._links:  # it was started again: its system resets what it does not know
            self._links.pop(other.peer_id, None)
            await other._travel(link, self)
            raise ConnectionLost(f"connection to {other.host} lost: reset by the other end")
        self._count(other, body)
        try:
            reply = await other._serve(method, body, self)
        except CallFailed:
            await other._travel(link, self)
            raise
        await other._travel(link, self)
        other._count(self, reply.body)
        link.used_at = trio.current_time()
        return reply

    async def _travel(self, link: _Link, other: "CallingPeer") -> None:
        """Sleep until a frame to the other end has arrived; for ever if it is lost."""
        if self._network.is_silent(self.host, other.host):
            await trio.sleep_forever()
        delay_s = self._network.delay_s(self.host, other.host)
        await self._network.sleep_until(link.send(self, trio.current_time(), delay_s))

    def _count(self, other: "CallingPeer", body: Body) -> None:
        if self._network.counts_bytes:
            size = len(encode(dict(body))) + _FRAME_BYTES
            self.sent_bytes += size
            other.received_bytes += size

    async def _serve(self, method: str, body: Body, source: "CallingPeer") -> Reply:
        """Run a handler as the RPC layer does: foreign errors become `RemoteFailure`."""
        if (handler := self._handlers.get(method)) is None:
            raise CallRefused(f"unknown method {method}")
        if not self._room[method]:
            raise PeerBusy(f"too many calls of {method}")
        request = Request(method=method, body=body, tensors=(), peer_id=source.peer_id, peer_address=source.address)
        self._room[method] -= 1
        try:
            return await handler(request)
        except CallFailed:
            raise
        except Exception as error:
            raise RemoteFailure(repr(error)) from error
        finally:
            self._room[method] += 1

    def _link_to(self, target: Contact | Address | PeerId) -> _Link | None:
        """The link that takes calls to this peer, or to whoever answered at this address."""
        if isinstance(target, Address):
            other = self._network.at(target)
            return None if other is None else self._reached(Contact(other.peer_id, target))
        return self._link_with(target.peer_id if isinstance(target, Contact) else target)

    def _reached(self, contact: Contact) -> _Link | None:
        """The link on which this peer answered when its address was dialled."""
        link = self._link_with(contact.peer_id)
        return link if link is not None and link.dialler is self and link.address == contact.address else None

    def _link_with(self, peer_id: PeerId) -> _Link | None:
        link = self._links.get(peer_id)
        if link is not None and link.used_at < trio.current_time() - IDLE_S:
            del self._links[peer_id]
            link.far_end(self)._links.pop(self.peer_id, None)
            return None
        return link

    def _close_idle(self) -> None:
        """Forget the links that neither end uses: of ten thousand peers they would take half of the memory."""
        before = trio.current_time() - IDLE_S
        for peer_id, link in list(self._links.items()):
            other = link.far_end(self)
            if max(link.used_at, other._links.get(self.peer_id, link).used_at) < before:
                del self._links[peer_id]
                other._links.pop(self.peer_id, None)
        self._links_at_sweep = len(self._links)

    async def _dial(self, target: Contact | Address) -> _Link:
        """Dial a target, once for all who wait for it.

        Raises:
          DialFailed: nobody listens there, another peer does, or it failed a moment ago.
        """
        address = address_of(target)
        while (waiting := self._dials.get(target)) is not None:
            await waiting.wait()
            other = self._network.at(address)
            if other is not None and (link := self._link_with(other.peer_id)) is not None:
                return link
        for dialled in (address, target):
            if (why_not := self.health.why_not(dialled, trio.current_time(), DIAL_PAUSE)) is not None:
                raise DialFailed(why_not)
        self._dials[target] = trio.Event()
        try:
            link = await self._greet(target, address)
        except DialFailed as error:
            self.health.failed(address, trio.current_time(), str(error))
            raise
        finally:
            self._dials.pop(target).set()
        self.health.succeeded(address)
        return link

    async def _greet(self, target: Contact | Address, address: Address) -> _Link:
        network, other, now = self._network, self._network.at(address), trio.current_time()
        network.num_dials += 1
        if other is None:
            raise DialFailed(f"nobody listens at {address}")
        if network.is_silent(self.host, other.host):
            await trio.sleep_forever()
        accepted_at = now + network.delay_s(self.host, other.host)
        proven_at = accepted_at + network.delay_s(other.host, self.host)
        expected = peer_id_of(target)
        if network.refuses(self.host, other.host):
            await network.sleep_until(proven_at)
            raise DialFailed(f"{address} refuses connections")
        if expected not in (None, other.peer_id) or other is self:
            await network.sleep_until(proven_at)
            raise DialFailed(f"{other.peer_id.short} answers at {address}, not {expected}")
        hello_at = max(proven_at, accepted_at + network.delay_s(other.host, self.host))  # in the order of its frames
        # As in `rpc.peer`: all calls but the first leave when the network has proven who answers.
        ready_at = proven_at if self._has_greeted else hello_at
        own_hello_at = proven_at + network.delay_s(self.host, other.host)
        link = self._links[other.peer_id] = _Link(self, other, address, ready_at, own_hello_at)
        self._has_greeted = True
        if len(self._links) > 2 * self._links_at_sweep + 32:
            self._close_idle()
        # The other end calls us over it too, if it has none of its own; that we listen at our address it does not show.
        other._links.setdefault(self.peer_id, link)
        return link
