"""Calling many experts at once and going on without the silent ones.

One `ExpertCall` asks one expert for the rows of a batch that chose it. `fan_out` runs a batch of them under one
deadline and one quorum and returns the answers by call, None for a call that failed or was late. The calls of one node
travel in one request; their answers come back one by one as they are ready.

Replicas. Several nodes may serve one expert. A backward goes where its forward went, which knows what it has answered
and how stale a gradient is, as long as that node answers. A call that fails while there is time, and that may be right
elsewhere, is asked of another node once. So may a backward: its gradients are computed from inputs that it brings, and
it makes the copy there learn in place of the one that is gone. What it says that its forward has "seen" stays behind:
that counts the updates of another copy, and there would pass for any staleness or none; without it nothing is stale.

Could both learn from one gradient, because the first had computed it when its line broke? Then it stands once in each
of two copies, and since replicas average, in their mean at its full size once, as if nothing had failed. In one copy it
stands twice only if both averaged between the call and its retry: each knows the ids of what it was asked itself, but
not of what came to it in an average.
"""

import functools
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import trio

from dmoe_jax.directory import ExpertDirectory, expert_target, host_target
from dmoe_jax.expert_calls import MAX_PAIRS, Answer, TooManyRows, is_finite, outcomes_of_untrusted
from dmoe_jax.experts.base import TensorSpec
from dmoe_jax.mixture.capacity import CallTimes
from dmoe_jax.mixture.config import MixtureConfig
from dmoe_jax.mixture.quorum import Quorum
from dmoe_jax.mixture.requests import ExpertCall, LayerRequest, PlacedCall, grouped, row_bytes_of
from dmoe_jax.mixture.statistics import BAD_ANSWER, LATE, NOT_FINITE, CallRecord, CallStatistics, reason_of
from net.errors import CallFailed, ConnectionLost, NetError, PeerBusy, RemoteProtocolError
from net.identity import Contact, PeerId
from net.rpc.base import Caller, Reply
from net.types import Array

logger = logging.getLogger(__name__)

_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.1, 1.0
"""Before a call is placed again that a node had no room for: the first time, and after many times."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, and the call that it is an answer to: at the node that gave it."""

    call: ExpertCall
    answer: Answer


class ExpertCaller:
    """Places expert calls, counts what becomes of them, and records which experts and hosts to avoid for a while.

    RPC itself records hosts that do not answer. What only the caller sees is recorded here: hosts that are late again
    and again, and single experts that refuse, or answer nonsense, on a host that may be as sound as any.

    Args:
      rpc: carries the calls.
      directory: finds the experts; its record of health is the one that is kept.
      statistics: shared by the mixtures of one process.
    """

    def __init__(self, rpc: Caller, directory: ExpertDirectory, statistics: CallStatistics) -> None:
        self.rpc = rpc
        self.directory = directory
        self.statistics = statistics
        self.on_call: Callable[[CallRecord], None] | None = None
        """Called with each call that has ended, answered or not. One that is cancelled has no end."""
        self._times = CallTimes()
        self.least_rows = MAX_PAIRS
        """Fewest rows that any node has said it takes in a call: calls of so many rows are split for none of these."""
        self._most_rows: dict[PeerId, int] = {}

    def takes_rows(self, contact: Contact, most: int) -> None:
        """Note that a node takes at most so many rows in a call."""
        self._most_rows[contact.peer_id] = most
        self.least_rows = min(self.least_rows, most)

    def most_rows(self, contact: Contact, wanted: int) -> int:
        """Most rows of a call of a node, as far as is known; at most as many as are wanted."""
        return min(wanted, self._most_rows.get(contact.peer_id, wanted))

    async def fan_out(
        self,
        method: str,
        calls: Sequence[ExpertCall],
        *,
        inputs: Sequence[Array],
        output_grads: Array | None = None,
        replies: Sequence[TensorSpec],
        config: MixtureConfig,
        common: Mapping[str, Any],
        seen: Sequence[int | None] | None = None,
        retry: bool = False,
    ) -> list[Answered | None]:
        """Run all calls at once; the answers in order, None where there is none.

        Calls of one node travel together, see `dmoe_jax.expert_calls`, and yet each is answered, and given up, by
        itself.

        Args:
          method: `FORWARD` or `BACKWARD`.
          inputs: the batch, each [batch, ...].
          output_grads: for `BACKWARD`, gradients of the experts' outputs, [batch, slots, ...].
          replies: what each answer must carry, for each row.
          config: how long to wait, and how tensors travel.
          common: what each request says beside its parts.
          seen: for each call how many updates its expert had taken in the forward pass, at that very node.
          retry: whether what is not answered when a connection breaks is asked once more with the same ids.

        An answer of another shape, or with NaN or infinity in it, is none: it counts neither for the quorum nor for the
        expert. If cancelled, every call is cancelled, at the nodes too. Never raises for what a peer did.
        """
        quorum = Quorum([call.rows for call in calls], num_samples=len(inputs[0]), k_min=config.k_min)
        answers: list[Answered | None] = [None] * len(calls)
        began = trio.current_time()
        parts = self._placed(calls, seen, began)
        open_parts = dict(enumerate(parts))

        def finish(part: PlacedCall, outcome: Answer | _Failure) -> None:
            """A call has come to its end; each does once, or is given up."""
            call = part.call
            del open_parts[part.index]
            if isinstance(outcome, Answer) and (fault := fault_in(outcome, replies, rows=len(call.rows))):
                outcome = _Failure(*fault, blame=True)
            if isinstance(outcome, Answer):
                answers[part.index] = Answered(call, outcome)
            self._note_outcome(method, part, outcome)
            self._note_time(method, part)
            quorum.note(part.index, answered=answers[part.index] is not None)
            if scope.deadline == math.inf and quorum.reached:
                scope.deadline = trio.current_time() + config.grace_s

        def moves(part: PlacedCall) -> None:
            open_parts[part.index] = part

        placed = [part.call for part in parts]
        requests = [
            LayerRequest(method, [parts[index] for index in indices], inputs, output_grads, config, common)
            for indices in grouped(placed, row_bytes=row_bytes_of(inputs, output_grads), most=config.max_parts)
        ]
        with trio.CancelScope() as scope:
            await together([functools.partial(self._place, each, finish, moves, retry=retry) for each in requests])
        for part in open_parts.values():
            self._note_late(method, part, config.grace_s)
        return answers

    def _note_late(self, method: str, part: PlacedCall, grace_s: float) -> None:
        text = f"expert {part.call.uid} at {part.call.contact} was given up {grace_s:g} s after the others"
        self.statistics.note_failure(LATE, text)
        self._note_end(method, part, LATE)
        self._note_time(method, part)
        self.directory.health.late(host_target(part.call.contact), trio.current_time())

    def _placed(self, calls: Sequence[ExpertCall], seen: Sequence[int | None] | None, now: float) -> list[PlacedCall]:
        """The calls as parts of requests; those whose node failed just now at another one, if there is one."""
        parts = []
        for index, call in enumerate(calls):
            part = PlacedCall(call, index, None if seen is None else seen[index], secrets.token_bytes(16), now)
            is_gone = seen is not None and not self.directory.answers(call.uid, call.contact)
            other = self.directory.another(call.uid, call.contact) if is_gone else None
            parts.append(part if other is None else self._moved(part, other))
        return parts

    def _moved(self, part: PlacedCall, other: Contact) -> PlacedCall:
        self.statistics.moved += 1
        return replace(part, call=replace(part.call, contact=other), seen=None, began=trio.current_time())

    def slowness(self, hosts: Iterable[PeerId]) -> dict[PeerId, float]:
        """How many times as long as the median of these hosts each takes for our calls, of those called of late."""
        return self._times.slowness(hosts, trio.current_time())

    def _note_time(self, method: str, part: PlacedCall) -> None:
        now = trio.current_time()
        self._times.note(method, part.call.contact.peer_id, now - part.began, now)

    def _note_end(self, method: str, part: PlacedCall, outcome: str) -> None:
        call = part.call
        if self.on_call is not None:
            self.on_call(
                CallRecord(
                    method=method,
                    uid=call.uid,
                    contact=call.contact,
                    rows=len(call.rows),
                    outcome=outcome,
                    began=part.began,
                    ended=trio.current_time(),
                )
            )

    async def _place(
        self,
        request: LayerRequest,
        finish: Callable[[PlacedCall, "Answer | _Failure"], None],
        moves: Callable[[PlacedCall], None],
        *,
        retry: bool,
    ) -> None:
        """Place a request, say of each of its parts how it ended, and ask for those that failed elsewhere, once."""
        deadline = trio.current_time() + request.config.timeout_s
        elsewhere: dict[Contact, list[PlacedCall]] = {}
        for part, failure in await self._ask(request, finish, deadline, retry=retry, may_move=True):
            call, is_over = part.call, trio.current_time() >= deadline
            other = None if is_over else self.directory.another(call.uid, call.contact)
            if other is None:
                finish(part, failure)
                continue
            logger.debug("expert %s at %s: %s; asked of %s", call.uid, call.contact, failure.text, other)
            if failure.blame:
                self.directory.avoid(call.uid, call.contact, failure.reason)
            moved = self._moved(part, other)
            moves(moved)
            elsewhere.setdefault(other, []).append(moved)

        async def ask(parts: Sequence[PlacedCall]) -> None:
            again = replace(request, parts=parts)
            for part, failure in await self._ask(again, finish, deadline, retry=retry, may_move=False):
                finish(part, failure)

        await together([functools.partial(ask, parts) for parts in elsewhere.values()])

    async def _ask(
        self,
        request: LayerRequest,
        finish: Callable[[PlacedCall, "Answer | _Failure"], None],
        deadline: float,
        *,
        retry: bool,
        may_move: bool,
    ) -> list[tuple[PlacedCall, "_Failure"]]:
        """Place a request, say of each of its parts how it was answered, and return those that were not, with the
        reasons.

        Parts for which the node has no room yet are asked again when it says, if there is time until then; or, with
        `may_move`, returned if another node serves their expert and is not busy. A node that has no room for the whole
        call does not say when: it is asked again after 0.1, 0.2, 0.4, 0.8 seconds, and then every second.
        """
        left = {part.index: part for part in request.parts}
        contact = request.parts[0].call.contact
        lost: list[tuple[PlacedCall, _Failure]] = []
        pause_s = _LEAST_PAUSE_S
        comes_again = functools.partial(self._comes_again, deadline=deadline, may_move=may_move)
        while left:
            asked, again_at = list(left.values()), dict[int, float]()

            def take(
                answer: Reply,
                asked: Sequence[PlacedCall] = asked,
                again_at: dict[int, float] = again_at,
                lost: list[tuple[PlacedCall, _Failure]] = lost,
            ) -> None:
                open_parts = {number: part for number, part in enumerate(asked) if part.index in left.keys() - again_at}
                for number, outcome in _outcomes(answer, open_parts):
                    part = open_parts[number]
                    after_s = outcome.retry_after_s if isinstance(outcome, PeerBusy) else None
                    if after_s is not None and comes_again(part, after_s, again_at):
                        continue
                    del left[part.index]
                    if isinstance(outcome, TooManyRows):
                        self.takes_rows(contact, outcome.max_rows)
                    if isinstance(outcome, CallFailed):
                        lost.append((part, _failure_of(outcome)))
                    else:
                        finish(part, outcome)

            body, tensors = request.encoded(asked)
            try:
                timeout_s = deadline - trio.current_time()
                take(await self.rpc.call(contact, request.method, body, tensors, timeout_s=timeout_s, on_partial=take))
                failure = _Failure(BAD_ANSWER, "the answer says nothing of this expert", blame=True)
            except ConnectionLost as error:
                if retry:
                    retry = False
                    continue
                failure = _Failure(reason_of(error), str(error))
            except PeerBusy as error:  # none of its parts was looked at, and so there is no word when to come back
                failure = _failure_of(error)
                for part in left.values():
                    comes_again(part, pause_s, again_at)
                pause_s = min(2 * pause_s, _MOST_PAUSE_S)
            except NetError as error:
                failure = _failure_of(error)
            lost += [(left.pop(index), failure) for index in left.keys() - again_at]
            if again_at:
                self.statistics.asked_again += len(again_at)
                await trio.sleep_until(max(again_at.values()))
        return lost

    def _comes_again(
        self,
        part: PlacedCall,
        retry_after_s: float,
        again_at: dict[int, float],
        *,
        deadline: float,
        may_move: bool,
    ) -> bool:
        """Whether a part for which its node has no room is asked of it once more; `again_at` then says when."""
        call, at = part.call, trio.current_time() + retry_after_s
        self.directory.busy(call.contact, retry_after_s)
        is_better_off = may_move and self.directory.another(call.uid, call.contact) is not None
        if at >= deadline or is_better_off:
            return False
        again_at[part.index] = at
        return True

    def _note_outcome(self, method: str, part: PlacedCall, outcome: "Answer | _Failure") -> None:
        call = part.call
        if isinstance(outcome, Answer):
            self.statistics.ok += 1
            self.statistics.host[call.uid] = call.contact
            self.directory.health.succeeded(expert_target(call.contact, call.uid))
            self._note_end(method, part, "ok")
            return
        self.statistics.note_failure(outcome.reason, f"expert {call.uid} at {call.contact}: {outcome.text}")
        if outcome.blame:
            self.directory.avoid(call.uid, call.contact, outcome.reason)
        self._note_end(method, part, outcome.reason)


async def together(functions: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Run them at once; a single one needs no task of its own."""
    if len(functions) == 1:
        await functions[0]()
        return
    async with trio.open_nursery() as nursery:
        for function in functions:
            nursery.start_soon(function)


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a call brought nothing: one of `REASONS`, a sentence, and whether the expert is to blame for it."""

    reason: str
    text: str
    blame: bool = False


class _BadAnswer(RemoteProtocolError):
    """An answer that is none to what was asked."""


def _outcomes(answer: Reply, parts: Mapping[int, PlacedCall]) -> list[tuple[int, Answer | CallFailed]]:
    """What an answer says of these parts, by number.

    Raises:
      _BadAnswer: it is none to what was asked.
    """
    try:
        return outcomes_of_untrusted(answer, {number: len(part.call.rows) for number, part in parts.items()})
    except RemoteProtocolError as error:
        raise _BadAnswer(str(error)) from error


def _failure_of(error: NetError) -> _Failure:
    # Busy, or made for smaller calls, is no fault, and RPC knows the hosts that do not answer; refusing, or talking
    # nonsense, concerns the expert.
    is_experts_own = isinstance(error, CallFailed | _BadAnswer) and not isinstance(error, PeerBusy | TooManyRows)
    return _Failure(reason_of(error), str(error), blame=is_experts_own)


def fault_in(answer: Answer, specs: Sequence[TensorSpec], *, rows: int) -> tuple[str, str] | None:
    """What is wrong with an answer, as (reason, sentence); None if each tensor is as its own specification says."""
    tensors = answer.tensors
    expected = [((rows, *spec.shape), np.dtype(spec.dtype)) for spec in specs]
    got = [(tensor.shape, tensor.dtype) for tensor in tensors]
    if got != expected:
        return BAD_ANSWER, f"expected {_listed(expected)} in the answer, got {_listed(got)}"
    if not all(map(is_finite, tensors)):
        return NOT_FINITE, "the answer holds NaN or infinity"
    return None


def _listed(tensors: Sequence[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in tensors) or "no tensor"
