"""One search for a group over the network: the shell around `net.averaging.grouping.matchmaking`."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import trio

from net.averaging.grouping.group import Group
from net.averaging.grouping.join_messages import (
    Candidate,
    JoinRequest,
    Reason,
    Refusal,
    candidates_in_untrusted,
    parse_asked_untrusted,
    parse_joined_untrusted,
    request_body,
)
from net.averaging.grouping.matchmaking import AssemblyConfig, Matchmaking
from net.dht.calls import PEER_ERRORS
from net.dht.node import DhtNode
from net.errors import CallFailed, PeerBusy, PeerUnavailable, RemoteProtocolError
from net.identity import PeerId
from net.nursery import background_nursery
from net.rpc.base import Body, Caller
from net.rpc.service import PING

_BUSY = Refusal(reason=Reason.FULL)


class _Waiter:
    """A follower's `join` call, and what it will be answered."""

    def __init__(self) -> None:
        self.is_answered = trio.Event()
        self.answer: Group | Refusal = Refusal(reason=Reason.DISBANDED)

    def give(self, answer: Group | Refusal) -> None:
        """Answer the call."""
        self.answer = answer
        self.is_answered.set()


class GroupSearch:
    """Runs a `Matchmaking`: is declared, reads who else is, asks, follows, and leads.

    Args:
      core: the search itself.
      ask_method, join_method: under which candidates are called.
      declare: brings our declared expiration into the DHT; False if it has to be tried again.
    """

    def __init__(
        self,
        core: Matchmaking,
        *,
        caller: Caller,
        dht: DhtNode,
        config: AssemblyConfig,
        ask_method: str,
        join_method: str,
        declare: Callable[[Matchmaking], Awaitable[bool]],
    ) -> None:
        self.core = core
        self._caller = caller
        self._dht = dht
        self._config = config
        self._ask_method, self._join_method = ask_method, join_method
        self._declare = declare
        self._scope = trio.CancelScope()
        self._waiters: dict[PeerId, _Waiter] = {}  # the followers' calls; bounded as the core's followers are
        self._is_declared = trio.Event()
        self._changed = trio.Event()  # set, and replaced, after whatever the core was told

    async def run(self, deadline: float) -> Group | None:
        """Search until there is a group, or no more time; see `GroupAssembler.find_group`. To be called once."""
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
        return self.core.group

    def consider(self, request: JoinRequest) -> float | Refusal:
        """Whether we would lead this peer, and until when we gather."""
        return self.core.consider(request)

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
            if await self._declare(self.core):
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
            reply = await self._caller.call(candidate.contact, self._ask_method, body, timeout_s=timeout_s)
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
                reply = await self._caller.call(leader.contact, self._join_method, body, timeout_s=timeout_s)
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
