"""All connections of one peer: which of them a call takes, and which have to go.

One connection for each pair of peers, whoever dialled it. If both dial at the same moment there are two; both ends
prefer the one that the smaller peer id dialled, and part from the other once it is idle. A peer that was started again
(another `instance`) replaces its old connection at once: nobody is at the other end of that one any more. Two processes
with copies of one key look like a peer that is started again and again; an instance that comes back gives them away.

Beside it there may be *lanes* (`net.rpc.lanes`), further connections for bulk, which come and go without it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from net.errors import ConnectionLost, RemoteProtocolError
from net.identity import Address, Contact, PeerId
from net.rpc.connection import Connection
from net.rpc.service import MAX_LANES
from net.wire.messages import Hello

_MAX_RESTARTED = 1024
"""Peers whose last instance is remembered."""

LANE_IDLE_S = 15.0
"""A lane without calls for so long is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcStatistics:
    """A snapshot of a peer's connections, and of what has come and gone over all that it ever had."""

    outgoing: int
    """Open connections that this peer dialled, lanes too."""
    incoming: int
    """Open connections that others dialled, those too that have not said who they are."""
    received_bytes: int
    """As they came over the network, with all that encryption and framing add; since this peer was opened."""
    sent_bytes: int
    """As the network took them over."""
    calls_placed: int
    """Calls of this peer to others that wait for their answer now."""
    calls_served: int
    """Calls of others that are being served now."""
    turned_away: Mapping[str, int]
    """Calls of others that were not admitted since this peer was opened, by reason: "busy" (as many calls of the method
    as may run were running) or "unknown method"."""


class ConnectionTable:
    """The live connections of the peer `peer_id`; `warn` is called with a sentence that its user should read."""

    def __init__(self, peer_id: PeerId, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._peer_id = peer_id
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
        """Whether somebody has dialled us and not said yet who it is."""
        return any(each.remote is None and each.cause is None and not each.is_outgoing for each in self._all)

    def add(self, connection: Connection) -> None:
        """Take in a new connection, whose other end is not known yet."""
        self._all[connection] = None

    def greeted_untrusted(self, connection: Connection, remote: Hello) -> None:
        """Note that the other end of `connection` has said who it is, and keep one connection with it.

        Raises:
          RemoteProtocolError: it is this peer itself, by its key.
        """
        if remote.peer_id == self._peer_id:
            raise RemoteProtocolError("that is this peer itself, or another process with a copy of its key")
        if connection.is_lane or remote.lane:
            self._add_lane(connection, remote)
            return
        if connection.is_outgoing:
            self._peer_at[connection.link.remote_address] = remote.peer_id
        known = self.find(remote.peer_id)
        if known is not None:
            assert known.remote is not None  # it stands in the table by that
            if known.remote.instance != remote.instance:
                self._note_restart(known, connection, remote)
                for old in (known, *self._lanes.get(remote.peer_id, ())):
                    old.end(ConnectionLost("the peer was started again"))
            elif known.is_outgoing != connection.is_outgoing and self._is_preferred(known, remote.peer_id):
                connection.leave()
                return
            else:
                known.leave()
        self._by_peer[remote.peer_id] = connection

    def _note_restart(self, old: Connection, new: Connection, remote: Hello) -> None:
        """Warn, once, of two processes with one key: an instance that was replaced does not come back by itself."""
        assert old.remote is not None
        peer_id, before = remote.peer_id, self._replaced.pop(remote.peer_id, None)
        if before == remote.instance:
            places = " and ".join(str(each.peer_address or each.link.remote_address) for each in (old, new))
            self._warn(
                f"two processes have the same identity {peer_id.short}: at {places}. Each takes the other's "
                "connections, so that calls reach the wrong one; give each a key of its own (--identity)"
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
            lane.leave()  # also one with nobody we know: whoever wants to talk to us comes with a first connection
        lanes.append(lane)

    def remove(self, connection: Connection) -> None:
        """Forget a connection that has ended, but for what went over it."""
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
        # What an address leads to is remembered as long as there is a connection with who answered there: it may be
        # another one, if both had dialled.
        if remote.peer_id not in self._by_peer:
            for address in [address for address, peer_id in self._peer_at.items() if peer_id == remote.peer_id]:
                del self._peer_at[address]

    def statistics(self, *, turned_away: Mapping[str, int]) -> RpcStatistics:
        """A snapshot, with the calls that were not admitted."""
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

    def make_room(self, *, outgoing: bool, most: int) -> bool:
        """Whether there is room for another of at most `most` open connections that we dialled, or that others did.

        If not, the one without calls that was used least recently makes room; False means that all are in use.
        Incoming ones whose other end has not said who it is go first: strangers do not take the places of peers. Then
        go lanes.
        Outgoing ones of that kind stay, for somebody waits for them.
        """
        open_ones = [each for each in self._all if each.is_outgoing == outgoing and each.cause is None]
        if len(open_ones) < most:
            return True
        idle = [each for each in open_ones if each.session.is_idle and (each.remote is not None or not outgoing)]
        longest = min(idle, key=lambda each: (each.remote is not None, not each.is_lane, each.last_used), default=None)
        if longest is not None:
            longest.end(ConnectionLost("closed to make room for another connection"))
        return longest is not None

    def _is_preferred(self, connection: Connection, remote: PeerId) -> bool:
        dialler = self._peer_id if connection.is_outgoing else remote
        return dialler == min(self._peer_id, remote)
