"""How a peer finds out what its line carries, without being told.

    averaging.PREFIX.line   {wanted} and any tensors    -> {} and so many bytes

Theory of operation. An all-reduce and the download of a state tell something by the way: the line has carried their
bytes in their time. But in a group with equal shares all members move as much in the same time, that of the slowest:
whoever waits for others looks as slow as they are, and would for ever, since shares follow what is known. So a peer
also asks a few of those whom it has met to take and to give some bytes, all at once and for nothing else: first a few,
then four times as many, until they take a third of a second or come to 16 MiB, or to a vector. It does so after a
round, at a moment of its own, and again every five minutes; what it finds is the least that its line carries between it
and them together. It does so less often where averages are rare: what measuring moves is a quarter at most of what
averages have moved since the last time.

In a collaboration, where all average together step after step, a peer measures in its turn
(`dmoe_net.averaging.line.turns`) and in the time in which nobody averages. What is found is thrown away when something
else was under way meanwhile: an averaging that begins ends the measurement at once, and so does another peer that
measures against this one; and where round trips are longer than they have been nothing is measured.
"""

import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import trio

from dmoe_net.averaging.grouping.group import Group, Role
from dmoe_net.averaging.line.meter import Answer, LineMeter, rate_of
from dmoe_net.averaging.line.turns import MEASURING_S, has_time, wait_of
from dmoe_net.averaging.speeds import Speeds
from dmoe_net.dht.calls import PEER_ERRORS
from dmoe_net.errors import CallRefused, RemoteProtocolError
from dmoe_net.identity import Contact
from dmoe_net.rpc.base import Caller, Reply, Request
from dmoe_net.types import Array
from dmoe_net.wire.fields import integer
from dmoe_net.wire.tensors import plain

MAX_PEERS = 8
"""Peers asked at once: together they should be as fast as this one."""

PERIOD_S = 300.0
"""Seconds from one measurement to the next. Several fall into the meter's memory; each keeps the line busy for two or
three seconds, a hundredth of that time, and a fast one for less."""

# A direction comes to a third more than the last step.
_FIRST_BYTES, _MOST_BYTES, _PIECE_BYTES = 2**18, 2**24, 2**16
_WORTH = 4.0
"""Bytes of averages since the last measurement, over its own: with fewer it is not worth another one."""
_MAX_CALLS = 256
"""Served at once: all pieces of one who measures against this peer alone. None of them takes time here."""

_LONG_ENOUGH_S = 1 / 3
_TIMEOUT_S = 10.0
_SPREAD_S = 20.0
"""Members of a group end a round together, and measure one after the other rather than all at once."""

_IN_USE, _IN_USE_S = 2.0, 0.05
"""A line is in use if a round trip takes longer than so many times the shortest of late, and so many seconds."""

_WANTED = integer(0, _PIECE_BYTES)


class LineMonitor:
    """Measures this peer's line, and lets others measure theirs against it. Make one for each caller and prefix.

    Args:
      caller: places and serves the calls.
      prefix: what is averaged.
      known: what need not be measured.
      rng: chooses whom to ask, and when. None: chance of this peer's own, but the same in every run.
      vector_bytes: of what is averaged; a measurement moves little more.

    Raises:
      ValueError: the caller has such a method already.
    """

    def __init__(
        self,
        caller: Caller,
        *,
        prefix: str,
        known: Speeds,
        rng: random.Random | None = None,
        vector_bytes: int = _MOST_BYTES,
    ) -> None:
        self._caller = caller
        self._method = f"averaging.{prefix}.line"
        self._known = known
        self._rng = rng or random.Random(caller.peer_id.raw)
        self._meter = LineMeter()
        self._due = -math.inf
        self._most_bytes = min(max(vector_bytes, _FIRST_BYTES), _MOST_BYTES)
        self._spent = 0.0  # bytes each way of the last measurement that was not broken off
        self._spending = 0.0  # and of the one that is under way
        self._averaged = 0.0  # and of averages since then
        self._bytes = np.zeros(_PIECE_BYTES, np.uint8)
        self._turn = trio.CancelScope()  # of the measurement in this peer's turn, or the wait for it
        self._is_measuring = False
        self.outcomes: Counter[str] = Counter()
        """What became of the measurements in this peer's turn."""
        caller.add_handler(self._method, self._serve, max_concurrent=_MAX_CALLS)

    def close(self) -> None:
        """Serve no more calls, and measure no more in turn."""
        self._turn.cancel()
        self._caller.remove_handler(self._method)

    def speeds(self) -> Speeds:
        """What is known, and what was found out of the rest."""
        return self._known.or_else(self._meter.speeds(trio.current_time()))

    def carried(self, *, up_bytes: float = 0.0, down_bytes: float = 0.0, seconds: float) -> None:
        """So much has passed the line in this time, which may have been spent on other things, too."""
        if seconds > 0:
            self._meter.carried(up=up_bytes / seconds, down=down_bytes / seconds, now=trio.current_time())

    def averaged(self, nbytes: float) -> None:
        """So many bytes were moved each way to average."""
        self._averaged += nbytes

    def is_due(self) -> bool:
        """Whether it is time for a measurement. Whoever is told so makes it: the next is due later."""
        if not self._is_due():
            return False
        self._due = trio.current_time() + PERIOD_S
        return True

    def _is_due(self) -> bool:
        is_known = self._known.up is not None and self._known.down is not None
        is_worth = self._averaged >= _WORTH * self._spent
        return not is_known and is_worth and trio.current_time() >= self._due

    def measure_if_due(self, group: Group, nursery: trio.Nursery) -> None:
        """If it is time, measure against the other members of a group, in `nursery`."""
        others = [each for each in group.members if each.peer_id != self._caller.peer_id]
        contacts = [each.contact for each in others if each.role is not Role.CLIENT]
        if contacts and self.is_due():
            nursery.start_soon(self.measure_soon, contacts)

    async def measure_soon(self, peers: Sequence[Contact]) -> None:
        """Measure in a moment, which differs from peer to peer."""
        await trio.sleep(self._rng.uniform(0.0, _SPREAD_S))
        await self.measure(peers)

    def measure_in_turn(self, group: Group, step: int, nursery: trio.Nursery, quiet_s: Callable[[], float]) -> None:
        """If it is time, measure against the other members of a group in this peer's turn, in `nursery`.

        To be called when the group has settled an averaging. The next one must be told of by `disturb`.

        Args:
          step: number of what was averaged, the same in all members.
          quiet_s: seconds for which nobody will average, as far as is foretold; asked when the turn comes.
        """
        others = [each for each in group.members if each.peer_id != self._caller.peer_id]
        contacts = [each.contact for each in others if each.role is not Role.CLIENT]
        wait_s = wait_of(group.index(self._caller.peer_id), step=step, num_members=len(group.members))
        self._turn.cancel()
        if contacts and self._is_due():
            self._turn = trio.CancelScope()
            nursery.start_soon(self._take_turn, contacts, self._turn, wait_s, quiet_s)

    def disturb(self, why: str) -> None:
        """Something else takes of the line from now on: nothing is measured beside it."""
        if self._is_measuring:
            self.outcomes[why] += 1
        self._turn.cancel()

    async def _take_turn(
        self, peers: Sequence[Contact], turn: trio.CancelScope, wait_s: float, quiet_s: Callable[[], float]
    ) -> None:
        with turn:
            await trio.sleep(wait_s)
            if not has_time(quiet_s()):
                return
            self._is_measuring = True
            try:
                with trio.move_on_after(MEASURING_S) as in_time:
                    is_found = await self.measure(peers, only_if_idle=True)
            finally:
                self._is_measuring = False
            if in_time.cancelled_caught:
                self.outcomes["it took too long"] += 1
            elif is_found:
                self.outcomes["measured"] += 1
                self._due = trio.current_time() + PERIOD_S
            else:
                self.outcomes["nobody answered, or the line was in use"] += 1

    async def measure(self, peers: Sequence[Contact], *, only_if_idle: bool = False) -> bool:
        """Exchange some bytes with a few of these peers. If nobody answers nothing is learnt, nor if it is cancelled.

        Args:
          only_if_idle: learn nothing if round trips show that the lines are in use, as by somebody who takes a state.

        Returns: whether something was learnt.
        """
        chosen = self._rng.sample(list(peers), min(MAX_PEERS, len(peers)))
        found = await self._all(chosen, self._ask_for_nothing)
        # Once more: the first calls may have had to dial.
        found = await self._all([peer for peer, _ in found], self._ask_for_nothing)
        least = {peer: self._caller.bulk.path(peer.peer_id).round_trip_s for peer, _ in found}
        is_idle = all(now_s <= _IN_USE * (least[peer] or now_s) + _IN_USE_S for peer, now_s in found)
        if not found or (only_if_idle and not is_idle):
            return False
        # With a round trip that is too long, because something else was on its way, the line would look too fast.
        found = [(peer, min(now_s, least[peer] or now_s)) for peer, now_s in found]
        self._spending = 0.0
        up, down = await self._rate(found, is_up=True), await self._rate(found, is_up=False)
        self._spent, self._averaged = self._spending, 0.0
        self._meter.carried(up=up, down=down, now=trio.current_time())
        return up is not None or down is not None

    async def _ask_for_nothing(self, peer: Contact) -> None:
        """A round trip without any load; it fails where the peer averages something else."""
        await self._caller.call(peer, self._method, {"wanted": 0}, timeout_s=_TIMEOUT_S)

    async def _rate(self, found: Sequence[tuple[Contact, float]], *, is_up: bool) -> float | None:
        """Bytes a second in one direction, to or from peers whose round trips are known."""
        round_trips = {peer.peer_id: seconds for peer, seconds in found}
        nbytes, rate = _FIRST_BYTES, None
        while True:
            num_pieces = -(-nbytes // (_PIECE_BYTES * len(found)))
            piece = self._bytes[: nbytes // (num_pieces * len(found))]
            body, tensors = ({"wanted": 0}, (piece,)) if is_up else ({"wanted": piece.size}, ())

            async def exchange(
                peer: Contact, body: dict[str, int] = body, tensors: tuple[Array, ...] = tensors, size: int = piece.size
            ) -> None:
                reply = await self._caller.call(peer, self._method, body, tensors, timeout_s=_TIMEOUT_S)
                if not is_up and [plain(tensor).nbytes for tensor in reply.tensors] != [size]:
                    raise RemoteProtocolError(f"expected {size} bytes")

            placed = [peer for peer, _ in found for _ in range(num_pieces)]
            self._spending += nbytes / 2  # in each of two directions
            answered = await self._all(placed, exchange)
            answers = [Answer(after_s, piece.size, round_trips[peer.peer_id]) for peer, after_s in answered]
            newest = rate_of(answers, num_placed=len(placed))
            if newest is None:
                return rate
            rate, longest = newest, max(answer.after_s - answer.round_trip_s for answer in answers)
            if longest >= _LONG_ENOUGH_S or nbytes >= self._most_bytes:
                return rate
            nbytes = min(4 * nbytes, self._most_bytes)

    async def _all(
        self, peers: Sequence[Contact], call: Callable[[Contact], Awaitable[object]]
    ) -> list[tuple[Contact, float]]:
        """Make all calls at once: those that were answered, and after how many seconds."""
        began, answered = trio.current_time(), list[tuple[Contact, float]]()

        async def one(peer: Contact) -> None:
            try:
                await call(peer)
            except PEER_ERRORS:
                return
            answered.append((peer, trio.current_time() - began))

        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(one, peer)
        return answered

    async def _serve(self, request: Request) -> Reply:
        try:
            wanted = _WANTED.of_untrusted(request.body, "wanted")
        except RemoteProtocolError as error:
            raise CallRefused(str(error)) from error
        if self._is_measuring and (wanted or request.tensors):
            self.disturb("another peer measured")
        return Reply(tensors=(self._bytes[:wanted],) if wanted else ())
