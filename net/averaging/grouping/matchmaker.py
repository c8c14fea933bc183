"""Finding groups over the network: the shell around `matchmaking`, which serves, declares, asks, follows and leads."""

import math
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import trio

from net.averaging.grouping.group import MAX_GROUP_SIZE, Group, Member, Role
from net.averaging.grouping.group_key import MoshpitGrid, group_key
from net.averaging.grouping.join_messages import (
    BANDWIDTHS_BPS,
    MAX_SCHEMA_BYTES,
    WEIGHTS,
    Candidate,
    JoinRequest,
    Reason,
    Refusal,
    accepted_body,
    candidates_in_untrusted,
    declaration_of,
    group_body,
    parse_asked_untrusted,
    parse_joined_untrusted,
    parse_request_untrusted,
    refusal_body,
    request_body,
)
from net.averaging.grouping.matchmaking import AssemblyConfig, Matchmaking
from net.dht.calls import PEER_ERRORS
from net.dht.node import DhtNode
from net.errors import CallFailed, CallRefused, PeerBusy, PeerUnavailable, RemoteProtocolError
from net.identity import PeerId
from net.nursery import background_nursery
from net.rpc.base import Body, Caller, Reply, Request, handlers
from net.rpc.service import PING

_NOT_LOOKING, _BUSY = Refusal(reason=Reason.NOT_LOOKING), Refusal(reason=Reason.FULL)

_PLACES_TO_SPARE = 16
"""Calls of `join` beyond a group's members: of followers whose earlier call, on a lost connection, has not ended."""


class Matchmaker:
    """Finds a peer's groups, one after the other; in between it tells others that it does not look for one.

    Args:
      caller: serves `averaging.PREFIX.ask` and `.join`, for one matchmaker of a prefix at a time. If it listens
        nowhere, the matchmaker never leads.
      dht: where peers that look for a group meet.
      prefix: what is averaged, see `group_key`.
      grid: whose groups are looked for.
      schema: at most 64 bytes that tell what the vector means, such as a hash of names and shapes. Peers of other
        schemas are refused.
      rng: draws group ids.
      config: of all searches.

    Raises:
      ValueError: the schema is too long, the grid has no groups of `min_group_size`, the prefix has a dot, or the
        caller serves it already.
    """

    def __init__(
        self,
        caller: Caller,
        dht: DhtNode,
        *,
        prefix: str,
        grid: MoshpitGrid,
        schema: bytes,
        rng: random.Random,
        config: AssemblyConfig,
    ) -> None:
        if not prefix or "." in prefix:
            raise ValueError(f"a prefix is a name without a dot, got {prefix!r}")
        if len(schema) > MAX_SCHEMA_BYTES:
            raise ValueError(f"a schema has at most {MAX_SCHEMA_BYTES} bytes, got {len(schema)}")
        if grid.side < config.min_group_size:
            raise ValueError(f"a grid of side {grid.side} has no groups of min_group_size {config.min_group_size}")
        self._caller = caller
        self._dht = dht
        self._prefix = prefix
        self._grid = grid
        self._schema = schema
        self._rng = rng
        self._config = config
        self.ask_method, self.join_method = f"averaging.{prefix}.ask", f"averaging.{prefix}.join"
        self._search: _Search | None = None
        # The key under which the last search was declared, and until when.
        self._last: tuple[str, float] | None = None
        # By key, when our last entry ends. Those that have ended are dropped at each search, so there are no more than
        # searches begun within a window.
        self._ends: dict[str, float] = {}
        self._served = ExitStack()
        if caller.address is not None:
            # At most `side` followers of either kind wait, see `Matchmaking`.
            max_waiting = min(2 * grid.side, MAX_GROUP_SIZE) + _PLACES_TO_SPARE
            self._served.enter_context(handlers(caller, {self.ask_method: self._serve_ask}))
            join = {self.join_method: self._serve_join}
            self._served.enter_context(handlers(caller, join, max_concurrent=max_waiting))

    def close(self) -> None:
        """Serve no more calls."""
        self._served.close()

    async def find_group(self, me: Member, *, cell: int, round_number: int, deadline: float) -> Group | None:
        """Assemble a group with other peers of our cell's group in this round.

        What was declared in the DHT stands until its window ends, and costs others a question each; call `withdraw`
        while the group is at work to spare them that. If cancelled, the declaration is withdrawn (this takes up to
        `withdrawal_timeout_s`) and followers are sent away.

        Args:
          me: what the group is to know of us.
          cell, round_number: our place on the grid, and which of its axes; see `MoshpitGrid`.
          deadline: swarm time.

        Returns:
          the group, the same for all of its members; or None, by the deadline, if there were too few others.

        Raises:
          ValueError: `me` is not this peer, or not as a group could use it.
          RuntimeError: another search is under way.
        """
        self._check(me)
        if self._search is not None:
            raise RuntimeError("a matchmaker looks for one group at a time")
        now = self._dht.clock.now()
        if deadline <= now:
            await trio.lowlevel.checkpoint()
            return None
        core = Matchmaking(
            me,
            key=group_key(self._prefix, self._grid, cell, round_number),
            schema=self._schema,
            side=self._grid.side,
            deadline=deadline,
            config=self._config,
            rng=self._rng,
            now=now,
        )
        self._ends = {key: end for key, end in self._ends.items() if end > now}
        search = self._search = _Search(self, core)
        try:
            await search.run(deadline)
        except BaseException:
            self._search = None
            with trio.move_on_after(self._config.withdrawal_timeout_s, shield=True):
                await self.withdraw()
            raise
        self._search = None
        return core.group

    async def withdraw(self) -> None:
        """Take back what the last search declared, if others can still see it; nothing while there is a next one."""
        if self._search is not None:
            return
        last, self._last = self._last, None
        if last is not None and last[1] > self._dht.clock.now():
            await self._store(last[0], None, 0.0)

    async def declare(self, core: Matchmaking) -> bool:
        """Bring our declared expiration into the DHT; whether it is there."""
        # Before the store: if that is cancelled half-way, this is what has to be withdrawn.
        self._last = core.key, core.expiration
        declaration = declaration_of(Candidate(contact=core.me.contact, expiration=core.expiration))
        return await self._store(core.key, declaration, core.expiration)

    async def _store(self, key: str, value: object, expiration: float) -> bool:
        # The DHT takes an entry only if it ends later than the one before it, even if we gather for a shorter time.
        end = max(expiration, math.nextafter(self._ends.get(key, 0.0), math.inf))
        self._ends[key] = end
        return await self._dht.store(key, value, subkey=str(self._caller.peer_id), expiration=end)

    async def _serve_ask(self, request: Request) -> Reply:
        wanted = _parse(request)
        answer = _NOT_LOOKING if self._search is None else self._search.core.consider(wanted)
        return Reply(body=refusal_body(answer) if isinstance(answer, Refusal) else accepted_body(answer))

    async def _serve_join(self, request: Request) -> Reply:
        wanted = _parse(request)
        answer = _NOT_LOOKING if self._search is None else await self._search.lead(wanted)
        return Reply(body=refusal_body(answer) if isinstance(answer, Refusal) else group_body(answer))

    def _check(self, me: Member) -> None:
        low, high = BANDWIDTHS_BPS
        if me.peer_id != self._caller.peer_id:
            raise ValueError(f"expected this peer, {self._caller.peer_id.short}, got {me.peer_id.short}")
        if self._caller.address is None and me.role is not Role.CLIENT:
            raise ValueError(f"a peer in client mode is a {Role.CLIENT}, got {me.role}")
        if not 0 <= me.wanted_slot < self._grid.side:
            raise ValueError(f"slots go from 0 to {self._grid.side - 1}, got {me.wanted_slot}")
        lightest, heaviest = WEIGHTS
        if me.sends and not lightest <= me.weight <= heaviest:
            raise ValueError(f"the weight of a vector is from {lightest:g} to {heaviest:g}, got {me.weight}")
        if me.bandwidth is not None and not low <= me.bandwidth <= high:
            raise ValueError(f"a bandwidth is from {low:g} to {high:g} bytes a second, or None, got {me.bandwidth}")


@dataclass(slots=True, eq=False)
class _Waiter:
    """A follower's `join` call, and what it will be answered."""

    is_answered: trio.Event = field(default_factory=trio.Event)
    answer: Group | Refusal = Refusal(reason=Reason.DISBANDED)  # noqa: RUF009 (frozen)

    def give(self, answer: Group | Refusal) -> None:
        """Answer the call."""
        self.answer = answer
        self.is_answered.set()


class _Search:
    """One search: runs a `Matchmaking`."""

    def __init__(self, matchmaker: Matchmaker, core: Matchmaking) -> None:
        self._matchmaker = matchmaker
        self.core = core
        self._caller, self._dht, self._config = matchmaker._caller, matchmaker._dht, matchmaker._config
        self._scope = trio.CancelScope()
        self._waiters: dict[PeerId, _Waiter] = {}  # the followers' calls; bounded as the core's followers are
        self._is_declared = trio.Event()
        self._changed = trio.Event()  # set, and replaced, after whatever the core was told

    async def run(self, deadline: float) -> None:
        """Search until there is a group, or no more time."""
        self._scope.deadline = self._trio_time(deadline)
        try:
            with self._scope:
                async with background_nursery() as nursery:
                    nursery.start_soon(self._keep_time)
                    if not self.core.is_client:
                        nursery.start_soon(self._stay_declared)
                    await self._look()
        finally:
            self.core.stop()
            self._settle()

    async def lead(self, request: JoinRequest) -> Group | Refusal:
        """Take a follower; returns when it is none any more. If cancelled, it has gone."""
        peer_id = request.member.peer_id
        if (earlier := self._waiters.pop(peer_id, None)) is not None:  # it has lost the connection of its last call
            self.core.leave(peer_id)
            earlier.give(Refusal(reason=Reason.DISBANDED))
        refusal = self.core.receive(request)
        if refusal is not None:
            return refusal
        waiter = self._waiters[peer_id] = _Waiter()
        self._settle()
        try:
            await waiter.is_answered.wait()
        finally:
            if self._waiters.get(peer_id) is waiter:
                del self._waiters[peer_id]
                self.core.leave(peer_id)
        return waiter.answer

    def _settle(self) -> None:
        """Carry out what the core wants done, after whatever it was told."""
        for tell in self.core.take_actions():
            if (waiter := self._waiters.pop(tell.peer_id, None)) is not None:
                waiter.give(tell.answer)
        if self.core.is_over:
            self._scope.cancel()
        self._changed.set()
        self._changed = trio.Event()

    async def _keep_time(self) -> None:
        while True:
            due = self.core.deadline()
            with trio.CancelScope(deadline=math.inf if due is None else self._trio_time(due)) as scope:
                await self._changed.wait()
            if due is not None and scope.cancelled_caught:
                # Not simply the swarm's time, which rounding may put a little before.
                self.core.tick(max(due, self._dht.clock.now()))
                self._settle()

    async def _stay_declared(self) -> None:
        while True:
            changed, expiration = self._changed, self.core.expiration
            if await self._matchmaker.declare(self.core):
                self._is_declared.set()
                while self.core.expiration == expiration:
                    await changed.wait()
                    changed = self._changed
            else:
                await trio.sleep(self._config.poll_s)

    async def _look(self) -> None:
        """Read the key, and ask who precedes us, until cancelled."""
        # Of two peers one must see the other, so be seen before looking. But a store waits for the slowest replica.
        if not self.core.is_client:
            with trio.move_on_after(self._config.poll_s):
                await self._is_declared.wait()
        while True:
            read_again_at = trio.current_time() + self._config.poll_s
            declared = candidates_in_untrusted(await self._dht.get(self.core.key))
            while batch := self.core.candidates(declared, self._dht.clock.now())[: self._config.max_questions]:
                leader = await self._ask(batch)
                if leader is not None:
                    # When it has failed us, what we know comes first: the DHT may be slow now, if peers have died.
                    await self._join(leader)
                elif trio.current_time() >= read_again_at:
                    break
            await trio.sleep_until(read_again_at)

    async def _ask(self, batch: Sequence[Candidate]) -> Candidate | None:
        """Ask several candidates at once; the first in rank that is willing, without waiting long for silent ones.

        A later one in rank will do: if an earlier one was only slow, the later will find it too, and send us there.
        """
        body = request_body(self.core.request)
        waiting = {candidate.contact.peer_id: candidate for candidate in batch}
        willing: list[Candidate] = []

        async def ask(candidate: Candidate, scope: trio.CancelScope) -> None:
            leader = await self._is_willing(candidate, body)
            del waiting[candidate.contact.peer_id]
            if leader is not None:
                willing.append(leader)
            if willing:
                first = min(leader.rank for leader in willing)
                grace_s = self._config.grace_s if any(other.rank < first for other in waiting.values()) else 0.0
                scope.deadline = min(scope.deadline, trio.current_time() + grace_s)

        async with trio.open_nursery() as nursery:
            for candidate in batch:
                nursery.start_soon(ask, candidate, nursery.cancel_scope)
        return min(willing, key=lambda leader: leader.rank, default=None)

    async def _is_willing(self, candidate: Candidate, body: Body) -> Candidate | None:
        """A candidate with the expiration that it has now, if it would have us."""
        timeout_s = self._config.request_timeout_s
        try:
            reply = await self._caller.call(candidate.contact, self._matchmaker.ask_method, body, timeout_s=timeout_s)
            answer = parse_asked_untrusted(reply.body)
        except PeerBusy:
            answer = _BUSY
        except PEER_ERRORS:
            self.core.on_failed(candidate)
            return None
        if isinstance(answer, Refusal):
            self.core.on_refused(candidate, answer, self._dht.clock.now())
            return None
        leader = Candidate(contact=candidate.contact, expiration=answer)
        if not self.core.precedes_us(leader):  # it should have refused
            self.core.on_failed(candidate)
            return None
        return leader

    async def _join(self, leader: Candidate) -> None:
        """Wait for this leader to begin, or to send us away."""
        body = request_body(replace(self.core.request, window=leader.expiration))
        self.core.follow(leader)
        self._settle()
        # Not until the leader's expiration: its clock may differ from ours. One that has died is noticed by `_watch`.
        timeout_s = self._config.window_s + self._config.request_timeout_s
        answer: Group | Refusal | None = None
        try:
            async with background_nursery() as nursery:
                nursery.start_soon(self._watch, leader, nursery.cancel_scope)
                reply = await self._caller.call(leader.contact, self._matchmaker.join_method, body, timeout_s=timeout_s)
                answer = parse_joined_untrusted(reply.body, self.core.request, leader.contact.peer_id)
        except PeerBusy:
            answer = _BUSY
        except PEER_ERRORS:
            pass
        if answer is None:
            self.core.on_failed(leader)
        elif isinstance(answer, Group):
            self.core.on_group(answer)
        else:
            self.core.on_refused(leader, answer, self._dht.clock.now())
        self._settle()

    async def _watch(self, leader: Candidate, scope: trio.CancelScope) -> None:
        """Cancel `scope` when a leader that we follow falls silent: else it would cost us its whole window."""
        while True:
            await trio.sleep(self._config.poll_s)
            try:
                await self._caller.call(leader.contact, PING, {}, timeout_s=self._config.silence_s)
            except PeerUnavailable:
                scope.cancel()
                return
            except (CallFailed, RemoteProtocolError):
                continue  # it lives

    def _trio_time(self, swarm_time: float) -> float:
        return trio.current_time() + swarm_time - self._dht.clock.now()


def _parse(request: Request) -> JoinRequest:
    try:
        return parse_request_untrusted(request.body, request.peer_id)
    except RemoteProtocolError as error:
        raise CallRefused(str(error)) from error
