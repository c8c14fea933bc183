"""More connections with a peer than one, for bulk over long lines.

Linux lets 4 to 6 MiB be under way on one TCP connection: at a round trip of 100 ms it carries 0.3 Gb/s whatever the
line. Once a path's rate times its round trip (`dmoe_net.rpc.bulk`) comes near that, *lanes* are dialled: further
connections with the same peer, one for about each `LANE_BYTES`. Each bulk call of either end takes the lane with the
fewest bytes under way, and the first connection is left to small calls.

The greeting marks a lane, since an unmarked second connection would replace the first. Peers of earlier versions do not
know the mark: therefore each peer is first asked, by `rpc.lanes`, how many lanes it accepts, and theirs is an unknown
method. That call also measures the round trip.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from dmoe_net.errors import CallFailed, DialFailed, HandshakeFailed, NetError
from dmoe_net.identity import Address, PeerId
from dmoe_net.rpc.base import Body, Reply
from dmoe_net.rpc.bulk import BulkTraffic
from dmoe_net.rpc.connection import HELLO_TIMEOUT_S, Connection
from dmoe_net.rpc.connections import ConnectionTable
from dmoe_net.rpc.service import LANES, MAX_LANES, Service
from dmoe_net.transport.base import Link, Transport
from dmoe_net.wire.fields import integer
from dmoe_net.wire.messages import Hello
from dmoe_net.wire.tensors import Outgoing, Tensor

LANE_BYTES = 3 * 2**19
"""Bytes under way in one direction for which there is a lane: less than half of a connection's 4 MiB, because the
calls of the other end may need as much, and because a full connection would not show that another one is wanted."""

MIN_ROUND_TRIP_S = 0.005
"""Below it there are no lanes: one connection carries 6.7 Gb/s there, more than one process of Python does."""

_PROBE_PERIODS_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds between measurements of the round trip, while there are bulk calls. The shortest counts, since a busy process
answers late; hence many at first."""

_PROBE_TIMEOUT_S = 10.0
_FIRST_PROBE_S = 1.0
"""Seconds that bulk calls wait for the first probe. Behind them it would see their queue and not the line."""

_PAUSE_S = 60.0
"""Seconds without dialling after a lane has failed: a router before the peer may let only its own connections pass."""

_DIAL_ROUND_TRIPS = 4
"""Round trips until a lane is there at both ends: for TCP, TLS and the greeting."""

_MOST = integer(0, 2**16)


@dataclass(slots=True)
class _State:
    """Facts about a peer, as long as the first connection with it lives."""

    most: int = 0
    """Lanes that the peer accepts."""
    num_probes: int = 0
    next_probe_at: float = 0.0
    is_probed: trio.Event = field(default_factory=trio.Event)
    """Set when the first probe has come to an end."""
    num_opening: int = 0
    not_before: float = 0.0
    """Time from which lanes may be dialled again."""


class Lanes:
    """Places the bulk calls of one peer, and opens lanes."""

    def __init__(
        self,
        transport: Transport,
        service: Service,
        connections: ConnectionTable,
        bulk: BulkTraffic,
        nursery: trio.Nursery,
    ) -> None:
        self._transport = transport
        self._service = service
        self._connections = connections
        self._bulk = bulk
        self._nursery = nursery
        self._states: weakref.WeakKeyDictionary[Connection, _State] = weakref.WeakKeyDictionary()

    async def call(
        self,
        first: Connection,
        address: Address,
        method: str,
        body: Body,
        tensors: Sequence[Outgoing],
        *,
        deadline: float,
        bulk_bytes: int,
        on_partial: Callable[[Reply], None] | None = None,
        into: Tensor | None = None,
    ) -> Reply:
        """`Connection.call` on the best connection with the peer at the other end of `first`, which small calls take.

        Args:
          address: where the peer can be dialled.
          bulk_bytes: bytes of the call or of its answer, whichever is more.
        """
        assert first.remote is not None  # it would not take calls before the greeting
        state = self._states.setdefault(first, _State())
        peer_id = first.remote.peer_id
        path = self._bulk.path(peer_id)
        if trio.current_time() >= state.next_probe_at:
            state.next_probe_at = trio.current_time() + _PROBE_TIMEOUT_S
            self._nursery.start_soon(self._probe, first, state)
        if not state.is_probed.is_set():
            with trio.move_on_after(_FIRST_PROBE_S):
                await state.is_probed.wait()
            # Meanwhile it may have given way to another one, as when both ends had dialled.
            now_first = self._connections.find(peer_id)
            if now_first is None:
                raise DialFailed(f"the connection with {address} ended before the call was placed")
            first, state = now_first, self._states.setdefault(now_first, state)
        lanes = self._connections.lanes(peer_id)
        connection = min(lanes, key=lambda lane: lane.bulk_bytes, default=first)
        meters = (path, self._bulk.line)
        now = trio.current_time()
        calls = [meter.placed(now) for meter in meters]
        connection.bulk_bytes += bulk_bytes
        try:
            reply = await connection.call(method, body, tensors, deadline=deadline, on_partial=on_partial, into=into)
        except BaseException:
            for meter in meters:
                meter.failed()
            raise
        finally:
            connection.bulk_bytes -= bulk_bytes
        now = trio.current_time()
        for meter, call in zip(meters, calls, strict=True):
            meter.answered(call, bulk_bytes, now)
        self._open_more(first, address, state)
        return reply

    async def _probe(self, first: Connection, state: _State) -> None:
        """Ask how many lanes the peer accepts, and time the answer."""
        assert first.remote is not None
        began = trio.current_time()
        try:
            if not first.takes_calls:  # it has given way since
                return
            with trio.move_on_at(began + _PROBE_TIMEOUT_S) as scope:
                reply = await first.call(LANES, {}, (), deadline=began + _PROBE_TIMEOUT_S)
                state.most = min(MAX_LANES, _MOST.of_untrusted(reply.body, "most"))
            if scope.cancelled_caught:
                return
        except CallFailed:
            state.most = 0  # it is of an earlier version
        except NetError:
            return
        finally:
            state.is_probed.set()
        now = trio.current_time()
        self._bulk.path(first.remote.peer_id).note_round_trip(now - began, now)
        period_s = _PROBE_PERIODS_S[min(state.num_probes, len(_PROBE_PERIODS_S) - 1)]
        state.num_probes += 1
        state.next_probe_at = now + period_s

    def _open_more(self, first: Connection, address: Address, state: _State) -> None:
        assert first.remote is not None
        peer_id = first.remote.peer_id
        path = self._bulk.path(peer_id)
        if not state.most or (path.round_trip_s or 0.0) < MIN_ROUND_TRIP_S or trio.current_time() < state.not_before:
            return
        shares = int(path.under_way_bytes // LANE_BYTES)
        # Powers of two: peers that are about as far then have as many, and each connection gets as much of the line.
        wanted = min(state.most, 1 << shares.bit_length()) if shares else 0
        missing = wanted - len(self._connections.lanes(peer_id)) - state.num_opening
        if missing <= 0:
            return
        # Half of them, and then none until they are there: the other end sees the same need and dials, too.
        state.not_before = trio.current_time() + _DIAL_ROUND_TRIPS * (path.round_trip_s or 0.0)
        for _ in range(-(-missing // 2)):
            if not self._connections.has_room_for_a_lane():
                return
            state.num_opening += 1
            self._nursery.start_soon(self._open, peer_id, address, state)

    async def _open(self, peer_id: PeerId, address: Address, state: _State) -> None:
        """Dial a lane and run it."""
        link: Link | None = None
        is_open = False

        def on_hello(lane: Connection, remote: Hello) -> None:
            nonlocal is_open
            if remote.peer_id != peer_id:
                raise HandshakeFailed(f"{remote.peer_id.short} answers at {address}, not {peer_id}")
            self._connections.greeted_untrusted(lane, remote)
            is_open = True
            state.num_opening -= 1

        with suppress(NetError), trio.move_on_after(HELLO_TIMEOUT_S):
            link = await self._transport.dial(address, peer_id=peer_id)
        if link is not None:
            lane = Connection(link, self._service, on_hello, self._connections.start, is_outgoing=True, is_lane=True)
            self._connections.add(lane)
            await self._connections.run(lane)
        if not is_open:
            state.num_opening -= 1
            state.not_before = trio.current_time() + _PAUSE_S
