"""Finding groups over the network: the shell around `matchmaking`, which serves, declares, asks, follows and leads."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

import trio

from dmoe_net.averaging.grouping.group import MAX_GROUP_SIZE, Group, Member
from dmoe_net.averaging.grouping.group_key import MoshpitGrid, group_key
from dmoe_net.averaging.grouping.join_messages import (
    Candidate,
    JoinRequest,
    Reason,
    Refusal,
    candidates_in_untrusted,
    declaration_of,
    group_body,
    parse_asked_untrusted,
    parse_joined_untrusted,
    parse_request_untrusted,
    refusal_body,
    request_body,
)
from dmoe_net.averaging.grouping.matchmaking import MAX_WINDOW_S, SOON_S, Answer, AssemblyConfig, Matchmaking
from dmoe_net.dht.calls import PEER_ERRORS
from dmoe_net.dht.entries import MAX_LIFE_S
from dmoe_net.dht.node import DhtNode
from dmoe_net.errors import CallFailed, CallRefused, PeerBusy, PeerUnavailable, RemoteProtocolError
from dmoe_net.identity import Contact, PeerId
from dmoe_net.nursery import background_nursery
from dmoe_net.rpc.base import Caller, Reply, Request
from dmoe_net.rpc.service import PING

_NOT_LOOKING, _BUSY = Refusal(reason=Reason.NOT_LOOKING), Refusal(reason=Reason.FULL)

_PLACES_TO_SPARE = 16
"""Calls of `join` beyond a group's members: of followers whose earlier call, on a lost connection, has not ended."""

_SHORTEST_LIFE_S = 1.0  # of a declaration; a store takes some of it

_RARELY = 4
"""Times as long between two readings of the DHT where those to ask are known without it."""


@dataclass(eq=False)
class Matchmaker:
    """Finds a peer's groups, one after the other; in between it tells others that it does not look for one."""

    caller: Caller
    """Serves `averaging.PREFIX.ask` and `.join`. If it listens nowhere, the matchmaker never leads."""
    dht: DhtNode
    """Network in which peers that look for a group meet."""
    _: KW_ONLY
    prefix: str
    """Name of what is averaged, see `group_key`."""
    grid: MoshpitGrid
    schema: bytes
    """Meaning of the vector, at most 64 bytes. Peers of other schemas are refused."""
    rng: random.Random
    """Draws group ids."""
    config: AssemblyConfig

    def __post_init__(self) -> None:
        self.ask_method, self.join_method = f"averaging.{self.prefix}.ask", f"averaging.{self.prefix}.join"
        self._search: _Search | None = None
        self._last: str | None = None  # key under which the last search was declared
        self.caller.add_handler(self.ask_method, self._serve_ask)
        # At most `side` followers of either kind wait, see `Matchmaking`.
        max_waiting = min(2 * self.grid.side, MAX_GROUP_SIZE) + _PLACES_TO_SPARE
        self.caller.add_handler(self.join_method, self._serve_join, max_concurrent=max_waiting)

    def close(self) -> None:
        self.caller.remove_handler(self.ask_method)
        self.caller.remove_handler(self.join_method)

    async def find_group(
        self,
        me: Member,
        *,
        cell: int,
        round_number: int,
        deadline: float,
        begins_at: float | None = None,
        schema: bytes | None = None,
        hints: Sequence[Contact] = (),
        fewest: Callable[[], int] = lambda: 2,
    ) -> Group | None:
        """Assemble a group with other peers of our cell's group in this round. One search at a time.

        Call `withdraw` while the group is at work: what was declared stands until its window ends, and costs others a
        question each. If cancelled, it is withdrawn (within `withdrawal_timeout_s`) and followers are sent away.

        Args:
          me, deadline, begins_at, fewest: as of `Matchmaking`; `begins_at` at most an hour ahead.
          schema: what the vector means this time; None: as ever.
          hints: peers that are known to look for this group: they are asked beside those in the DHT.

        Returns: the group, the same for all of its members; or None, by the deadline, if there were too few others.
        """
        now = self.dht.clock.now()
        core = Matchmaking(
            me,
            key=group_key(self.prefix, self.grid, cell, round_number),
            schema=self.schema if schema is None else schema,
            side=self.grid.side,
            deadline=deadline,
            config=self.config,
            rng=self.rng,
            now=now,
            begins_at=begins_at,
            fewest=fewest,
        )
        search = self._search = _Search(self, core, hints)
        try:
            await search.run(deadline)
        except BaseException:
            self._search = None
            with trio.move_on_after(self.config.withdrawal_timeout_s, shield=True):
                await self.withdraw()
            raise
        self._search = None
        return core.group

    def postpone(self, begins_at: float) -> None:
        """Let the search that is under way begin later, if it was told when to begin; it may end later too."""
        if self._search is not None:
            self._search.postpone(begins_at)

    async def withdraw(self) -> None:
        """Take back what the last search declared, if others can still see it; nothing while there is a next one."""
        if self._search is not None:
            return
        last, self._last = self._last, None
        if last is not None:
            await self.dht.withdraw(last)

    async def declare(self, core: Matchmaking) -> bool:
        """Bring our declared expiration into the DHT; True once it is there."""
        # Before the store: if that is cancelled half-way, this is what has to be withdrawn.
        self._last = core.key
        declaration = declaration_of(Candidate(contact=core.me.contact, expiration=core.expiration))
        life_s = min(max(core.expiration - self.dht.clock.now(), _SHORTEST_LIFE_S), MAX_LIFE_S)
        return await self.dht.store(core.key, declaration, life_s=life_s) > 0

    async def _serve_ask(self, request: Request) -> Reply:
        wanted = _parse(request)
        answer = _NOT_LOOKING if self._search is None else self._search.consider(wanted)
        return Reply(body=refusal_body(answer) if isinstance(answer, Refusal) else {"expiration": answer})

    async def _serve_join(self, request: Request) -> Reply:
        wanted = _parse(request)
        answer = _NOT_LOOKING if self._search is None else await self._search.lead(wanted)
        return Reply(body=refusal_body(answer) if isinstance(answer, Refusal) else group_body(answer))


class _Search:
    """One search: runs a `Matchmaking`."""

    def __init__(self, matchmaker: Matchmaker, core: Matchmaking, hints: Sequence[Contact]) -> None:
        self._matchmaker = matchmaker
        self._hints = tuple(hints)
        self._asking = trio.Lock()  # one leader at a time is followed
        self.core = core
        self._caller, self._dht, self._config = matchmaker.caller, matchmaker.dht, matchmaker.config
        self._scope = trio.CancelScope()
        # Where the followers' calls wait for their answers; bounded as the core's followers are.
        self._waiting: dict[PeerId, trio.MemorySendChannel[Answer]] = {}
        self._is_declared = trio.Event()
        self._changed = trio.Event()  # set, and replaced, after whatever the core was told

    async def run(self, deadline: float) -> None:
        self._scope.deadline = self._trio_time(deadline)
        try:
            with self._scope:
                async with background_nursery() as nursery:
                    nursery.start_soon(self._keep_time)
                    if self._hints:
                        nursery.start_soon(self._look_at_hints)
                    if not self.core.is_client:
                        nursery.start_soon(self._stay_declared)
                    await self._look()
        finally:
            self.core.stop()
            self.told()

    def postpone(self, begins_at: float) -> None:
        self.core.postpone(begins_at)
        self._scope.deadline = self._trio_time(self.core.search_ends_at)
        self.told()

    def consider(self, request: JoinRequest) -> float | Refusal:
        """Do as `Matchmaking.consider`; a peer that should lead us is asked next."""
        answer = self.core.consider(request)
        if isinstance(answer, Refusal) and answer.reason is Reason.LATER:
            self.told()
        return answer

    async def lead(self, request: JoinRequest) -> Answer:
        """Take a follower; return when it is none any more. If cancelled, it has gone."""
        peer_id = request.member.peer_id
        if (earlier := self._waiting.pop(peer_id, None)) is not None:  # it has lost the connection of its last call
            self.core.leave(peer_id)
            earlier.send_nowait(Refusal(reason=Reason.DISBANDED))
        refusal = self.core.receive(request)
        if refusal is not None:
            return refusal
        answers, answered = trio.open_memory_channel[Answer](1)
        self._waiting[peer_id] = answers
        self.told()
        try:
            return await answered.receive()
        finally:
            if self._waiting.get(peer_id) is answers:
                del self._waiting[peer_id]
                self.core.leave(peer_id)

    def told(self) -> None:
        """Carry out what the core wants done, after whatever it was told."""
        for peer_id, answer in self.core.take_answers().items():
            if (waiting := self._waiting.pop(peer_id, None)) is not None:
                waiting.send_nowait(answer)
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
                self.told()

    async def _stay_declared(self) -> None:
        while True:
            changed, expiration = self._changed, self.core.expiration
            if await self._matchmaker.declare(self.core):
                self._is_declared.set()
                with trio.move_on_after(MAX_LIFE_S / 2):  # a longer window is declared again
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
        period_s = self._config.poll_s * (_RARELY if self._hints else 1)
        if self._hints:
            await trio.sleep(self._config.poll_s)
        while True:
            read_again_at = trio.current_time() + period_s
            declared = candidates_in_untrusted(await self._dht.get(self.core.key))
            async with self._asking:
                await self._follow_one_of(declared, read_again_at)
            await trio.sleep_until(read_again_at)

    async def _look_at_hints(self) -> None:
        """Ask those of whom we know without the DHT, until cancelled: it may be slow where peers have died."""
        while True:
            again_at = trio.current_time() + (SOON_S if self.core.is_timed else self._config.poll_s)
            async with self._asking:
                await self._follow_one_of(self.core.hinted(self._hints), again_at)
            with trio.CancelScope(deadline=again_at):
                while self.core.suggested(self._dht.clock.now()) is None:
                    await self._changed.wait()

    async def _follow_one_of(self, known: Sequence[Candidate], until: float) -> None:
        """Ask whoever of these precedes us, and follow the first that is willing; till there is nobody to ask, or
        nobody was willing by `until`."""
        while batch := self.core.candidates(known, self._dht.clock.now())[: self._config.max_questions]:
            leader = await self._ask(batch)
            if leader is None and trio.current_time() >= until:
                break
            # When it has failed us, what we know comes first: the DHT may be slow now, if peers have died.
            while leader is not None:
                leader = await self._join(leader)

    async def _ask(self, batch: Sequence[Candidate]) -> Candidate | None:
        """The first in rank of several candidates that is willing, without waiting long for silent ones: if one was
        only slow, whoever we follow will find it too, and send us there."""
        request = self.core.request
        waiting = {candidate.contact.peer_id: candidate for candidate in batch}
        willing: list[Candidate] = []

        async def ask(candidate: Candidate, scope: trio.CancelScope) -> None:
            leader = await self._is_willing(candidate, request)
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

    async def _is_willing(self, candidate: Candidate, request: JoinRequest) -> Candidate | None:
        """A candidate with the expiration that it has now, if it would have us."""
        timeout_s, body = self._config.request_timeout_s, request_body(request)
        try:
            reply = await self._caller.call(candidate.contact, self._matchmaker.ask_method, body, timeout_s=timeout_s)
            answer = parse_asked_untrusted(reply.body)
        except PeerBusy:
            answer = _BUSY
        except PEER_ERRORS:
            self.core.on_failed(candidate)
            return None
        if isinstance(answer, Refusal):
            self.core.on_refused(candidate, answer, self._dht.clock.now(), asked=request)
            return None
        leader = Candidate(contact=candidate.contact, expiration=answer)
        if not self.core.precedes_us(leader):  # it should have refused
            self.core.on_failed(candidate)
            return None
        return leader

    async def _join(self, leader: Candidate) -> Candidate | None:
        """Wait for this leader to begin, or to send us away. Returns whom to follow then, if it has found a leader
        itself: that one was willing just now, and need not be asked."""
        body = request_body(replace(self.core.request, window=leader.expiration))
        self.core.follow(leader)
        self.told()
        # Not until the leader's expiration: its clock may differ from ours, and it may be postponed. If we went just
        # before it begins, its group would wait for us. One that has died is noticed by `_watch`.
        last = self.core.search_ends_at + self._config.window_s if self.core.is_timed else leader.expiration
        window_s = max(self._config.window_s, last - self._dht.clock.now())
        timeout_s = min(window_s, MAX_WINDOW_S) + self._config.request_timeout_s
        answer: Answer | None = None
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
        self.told()
        is_sent_on = isinstance(answer, Refusal) and answer.reason is Reason.FOLLOWING
        return self.core.suggested(self._dht.clock.now()) if is_sent_on else None

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
