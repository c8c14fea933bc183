"""All connections of one peer: which of them a call takes, and which have to go.

One connection for each pair of peers, whoever dialled it. If both dial at the same moment there are two; both ends
prefer the one that the smaller peer id dialled, and part from the other once it is idle. A peer that was started again
(another `instance`) replaces its old connection at once. Two processes with copies of one key look like a peer that is
started again and again; an instance that comes back gives them away.

Beside it there may be *lanes* (`dmoe_net.rpc.lanes`), further connections for bulk, which come and go without it.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import trio

from dmoe_net.errors import ConnectionLost, RemoteProtocolError
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.rpc.connection import Connection
from dmoe_net.rpc.service import MAX_LANES
from dmoe_net.wire.messages import Hello

_log = logging.getLogger(__name__)

CHECK_PERIOD_S = 5.0
"""Seconds between two looks at all connections."""

LANE_IDLE_S = 15.0
"""Seconds without calls after which a lane is closed."""

_MAX_RESTARTED = 1024
"""Peers whose last instance is remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcStatistics:
    """A snapshot of a peer's connections, and of the traffic since it was opened."""

    outgoing: int
    """Open connections that this peer dialled, lanes too."""
    incoming: int
    """Open connections that others dialled."""
    received_bytes: int
    """Bytes as they came over the network, with all that encryption and framing add."""
    sent_bytes: int
    """Bytes as the network took them over."""
    calls_placed: int
    """Calls of this peer to others that wait for their answer now."""
    calls_served: int
    """Calls of others that are being served now."""
    turned_away: Mapping[str, int]
    """Calls of others that were not admitted, by reason: "busy" (too many of the method ran) or "unknown method"."""


class ConnectionTable:
    """The live connections of one peer: at most `max_outgoing` that it dialled, `max_incoming` that others did."""

    def __init__(self, peer_id: PeerId, nursery: trio.Nursery, *, max_outgoing: int, max_incoming: int) -> None:
        self.max_outgoing = max_outgoing
        self.news = trio.Event()
        """Set, and replaced by another, when a first connection has said who it is, and when any has ended."""
        self.has_greeted = False
        """True once somebody of our version has said who it is."""
        self._max_incoming = max_incoming
        self._peer_id = peer_id
        self._nursery = nursery
        self._all: dict[Connection, None] = {}  # in the order in which they came; a set's order would be chance
        self._by_peer: dict[PeerId, Connection] = {}
        self._lanes: dict[PeerId, list[Connection]] = {}
        self._received_bytes = self._sent_bytes = 0  # over connections that have ended
        self._peer_at: dict[Address, PeerId] = {}  # of connections that we dialled
        self._replaced: dict[PeerId, bytes] = {}  # the instance before the present one; empty: warned of

    def __iter__(self) -> Iterator[Connection]:
        return iter(tuple(self._all))

    def find(self, target: Contact | Address | PeerId) -> Connection | None:
        """The connection that takes calls to this peer, or to whoever answered at this address."""
        if isinstance(target, Contact):
            target = target.peer_id
        peer_id = self._peer_at.get(target) if isinstance(target, Address) else target
        connection = None if peer_id is None else self._by_peer.get(peer_id)
        return connection if connection is not None and connection.takes_calls else None

    def is_reached(self, contact: Contact) -> bool:
        """True if the peer answered at its address when we dialled it, and a connection with it is open."""
        return self._peer_at.get(contact.address) == contact.peer_id

    def lanes(self, peer_id: PeerId) -> list[Connection]:
        """The lanes with this peer that take calls, whoever dialled them, in the order in which they came."""
        return [lane for lane in self._lanes.get(peer_id, ()) if lane.takes_calls]

    def all_with(self, peer_id: PeerId) -> Iterator[Connection]:
        """The connection with this peer and its lanes, those too that take no calls any more."""
        if (first := self._by_peer.get(peer_id)) is not None:
            yield first
        yield from self._lanes.get(peer_id, ())

    @property
    def has_strangers(self) -> bool:
        """True if somebody has dialled us and not said yet who it is."""
        return any(each.remote is None and each.cause is None and not each.is_outgoing for each in self._all)

    def add(self, connection: Connection) -> None:
        """Take in a new connection, whose other end is not known yet."""
        self._all[connection] = None

    def start(self, connection: Connection) -> None:
        """Run a connection in a task of its own."""
        self._nursery.start_soon(self.run, connection)

    async def run(self, connection: Connection) -> None:
        """Run a connection until it rests, or ends and is forgotten, but for its traffic."""
        try:
            await connection.run()
        finally:
            if not connection.rests:
                self._remove(connection)
                self._tell_news()

    def close(self) -> None:
        """End the connections that rest; the others end with their tasks."""
        for connection in self:
            if connection.rests:
                connection.end(ConnectionLost("this peer was closed"))

    async def look_after(self) -> None:
        """Close idle connections and notice dead ones, for ever: one timer for each peer."""
        while True:
            await trio.sleep(CHECK_PERIOD_S)
            now = trio.current_time()
            for connection in self:
                connection.check(now)

    def greeted_untrusted(self, connection: Connection, remote: Hello) -> None:
        """Note that the other end of `connection` has said who it is, and keep one connection with it."""
        if remote.peer_id == self._peer_id:
            raise RemoteProtocolError("that is this peer itself, or another process with a copy of its key")
        self.has_greeted = True
        if connection.is_lane or remote.lane:
            self._add_lane(connection, remote)
        else:
            self._add_first(connection, remote)
            self._tell_news()

    def _add_first(self, connection: Connection, remote: Hello) -> None:
        if connection.is_outgoing:
            self._peer_at[connection.link.remote_address] = remote.peer_id
        known = self.find(remote.peer_id)
        if known is not None:
            assert known.remote is not None  # it stands in the table by that
            if known.remote.instance != remote.instance:
                self._note_restart(known, connection, remote)
                for old in (known, *self._lanes.get(remote.peer_id, ())):
                    old.end(ConnectionLost("the peer was started again"))
            elif known.is_outgoing != connection.is_outgoing and known.is_outgoing == (self._peer_id < remote.peer_id):
                connection.leave()  # the smaller peer id has dialled the other one
                return
            else:
                known.leave()
        self._by_peer[remote.peer_id] = connection

    def _note_restart(self, old: Connection, new: Connection, remote: Hello) -> None:
        """Warn, once, of two processes with one key: only then an instance that was replaced comes back."""
        assert old.remote is not None
        peer_id, before = remote.peer_id, self._replaced.pop(remote.peer_id, None)
        if before == remote.instance:
            places = " and ".join(str(each.peer_address or each.link.remote_address) for each in (old, new))
            _log.warning(
                "two processes have the same identity %s: at %s. Each takes the other's connections, so that calls "
                "reach the wrong one; give each a key of its own (--identity)",
                peer_id.short,
                places,
            )
        self._replaced[peer_id] = b"" if before in (b"", remote.instance) else old.remote.instance
        if len(self._replaced) > _MAX_RESTARTED:
            del self._replaced[next(iter(self._replaced))]

    def _add_lane(self, lane: Connection, remote: Hello) -> None:
        lane.is_lane = True
        lane.idle_s = LANE_IDLE_S
        first, lanes = self._by_peer.get(remote.peer_id), self._lanes.setdefault(remote.peer_id, [])
        num_like_it = sum(each.is_outgoing == lane.is_outgoing for each in lanes)
        if (
            num_like_it >= MAX_LANES
            or first is None
            or first.remote is None
            or first.remote.instance != remote.instance
        ):
            lane.leave()  # also one of a peer that has no first connection with us
        lanes.append(lane)

    def _remove(self, connection: Connection) -> None:
        self._all.pop(connection, None)
        self._received_bytes += connection.link.num_received
        self._sent_bytes += connection.link.num_sent
        remote = connection.remote
        if remote is None:
            return
        if connection.is_lane:
            lanes = self._lanes[remote.peer_id]
            lanes.remove(connection)
            if not lanes:
                del self._lanes[remote.peer_id]
            return
        if self._by_peer.get(remote.peer_id) is connection:
            del self._by_peer[remote.peer_id]
        # An address is remembered as long as there is a connection with the peer that answered there: it may be
        # another connection, if both had dialled.
        if remote.peer_id not in self._by_peer:
            for address in [address for address, peer_id in self._peer_at.items() if peer_id == remote.peer_id]:
                del self._peer_at[address]

    def statistics(self, *, turned_away: Mapping[str, int]) -> RpcStatistics:
        """A snapshot."""
        outgoing = sum(each.is_outgoing for each in self._all)
        return RpcStatistics(
            outgoing=outgoing,
            incoming=len(self._all) - outgoing,
            received_bytes=self._received_bytes + sum(each.link.num_received for each in self._all),
            sent_bytes=self._sent_bytes + sum(each.link.num_sent for each in self._all),
            calls_placed=sum(each.session.num_placed for each in self._all),
            calls_served=sum(each.session.num_running for each in self._all),
            turned_away=dict(turned_away),
        )

    def has_room_for_a_lane(self) -> bool:
        """True if we may dial another lane: half of the places are for first connections."""
        return 2 * sum(each.is_outgoing for each in self._all) < self.max_outgoing

    def make_room(self, *, outgoing: bool, num_dials: int = 0) -> bool:
        """Make room for one more connection that we dial, or that others do; False if all are in use.

        The one without calls that was used least recently is ended: incoming ones of strangers first, then lanes.
        Outgoing ones that have not been greeted stay, for somebody waits for them.

        Args:
          num_dials: connections that are being dialled, which take places too.
        """
        most = self.max_outgoing - num_dials if outgoing else self._max_incoming
        open_ones = [each for each in self._all if each.is_outgoing == outgoing and each.cause is None]
        if len(open_ones) < most:
            return True
        idle = [each for each in open_ones if each.session.is_idle and (each.remote is not None or not outgoing)]
        longest = min(idle, key=lambda each: (each.remote is not None, not each.is_lane, each.last_used), default=None)
        if longest is not None:
            longest.end(ConnectionLost("closed to make room for another connection"))
        return longest is not None

    def _tell_news(self) -> None:
        self.news.set()
        self.news = trio.Event()
