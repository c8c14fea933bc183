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
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import trio

from dmoe_jax.directory import ExpertDirectory, expert_target, host_target
from dmoe_jax.expert_calls import (
    BACKWARD,
    MAX_PAIRS,
    Answer,
    ExpertCall,
    Outcome,
    TooManyRows,
    is_finite,
    outcomes_of_untrusted,
    request_of,
)
from dmoe_jax.experts.base import TensorSpec
from dmoe_jax.mixture.capacity import CallTimes
from dmoe_jax.mixture.config import MixtureConfig
from dmoe_jax.mixture.quorum import Quorum
from dmoe_jax.mixture.statistics import BAD_ANSWER, LATE, NOT_FINITE, CallRecord, CallStatistics, reason_of
from net.errors import CallFailed, ConnectionLost, NetError, PeerBusy, RemoteProtocolError
from net.identity import Contact, PeerId
from net.rpc.base import Caller, Reply
from net.types import Array

logger = logging.getLogger(__name__)

_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.1, 1.0
"""Before a call is placed again that a node had no room for: the first time, and after many times."""

REQUEST_BYTES = 512 * 1024
"""Calls of one node travel together up to this size: one part on the wire. A node begins when it has a whole request,
so larger ones would keep it waiting for the line."""


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

    def slowness(self, hosts: Iterable[PeerId]) -> dict[PeerId, float]:
        """The time that each of these hosts, of those called of late, takes for our calls, over the median of all."""
        return self._times.slowness(hosts, trio.current_time())

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
    ) -> list[tuple[ExpertCall, Answer] | None]:
        """Run all calls at once. Return, in order, each answer with the call that it is an answer to, at the node that
        gave it; None where there is none.

        Calls of one node travel together, see `dmoe_jax.expert_calls`, and yet each is answered, and given up, by
        itself. What of a backward request is not answered when a connection breaks is asked once more with the same
        ids.

        Args:
          method: `FORWARD` or `BACKWARD`.
          inputs: the batch, each [batch, ...].
          output_grads: for `BACKWARD`, gradients of the experts' outputs, [batch, slots, ...].
          replies: what each answer must carry, for each row.
          config: how long to wait, and how tensors travel.
          common: what each request says beside its parts.

        An answer of another shape, or with NaN or infinity in it, is none: it counts neither for the quorum nor for the
        expert. If cancelled, every call is cancelled, at the nodes too. Never raises for what a peer did.
        """
        now, is_backward = trio.current_time(), method == BACKWARD
        begun = [replace(call, id=secrets.token_bytes(16), began=now) for call in calls]
        placed = [self._elsewhere_if_gone(call) if is_backward else call for call in begun]
        layer = _LayerCalls(
            caller=self,
            method=method,
            inputs=inputs,
            output_grads=output_grads,
            replies=replies,
            config=config,
            common=common,
            quorum=Quorum([call.rows for call in calls], num_samples=len(inputs[0]), k_min=config.k_min),
            left=dict(enumerate(placed)),
            answers=[None] * len(calls),
        )
        requests = grouped(placed, row_bytes=row_bytes_of(inputs, output_grads), most=config.max_parts)
        with layer.scope:
            await together([functools.partial(layer.place, indices) for indices in requests])
        for call in layer.left.values():
            text = f"expert {call.uid} at {call.contact} was given up {config.grace_s:g} s after the others"
            self.statistics.note_failure(LATE, text)
            self.has_ended(method, call, LATE)
            self.directory.health.late(host_target(call.contact), trio.current_time())
        return layer.answers

    def moved(self, call: ExpertCall, other: Contact) -> ExpertCall:
        """The call, asked of another node from now on."""
        self.statistics.moved += 1
        return replace(call, contact=other, seen=None, began=trio.current_time())

    def _elsewhere_if_gone(self, call: ExpertCall) -> ExpertCall:
        """The call; at another node, if there is one, where its own has failed just now."""
        is_gone = not self.directory.answers(call.uid, call.contact)
        other = self.directory.another(call.uid, call.contact) if is_gone else None
        return call if other is None else self.moved(call, other)

    def was_answered(self, method: str, call: ExpertCall) -> None:
        """Note that a call was answered as it should be."""
        self.statistics.ok += 1
        self.statistics.host[call.uid] = call.contact
        self.directory.health.succeeded(expert_target(call.contact, call.uid))
        self.has_ended(method, call, "ok")

    def has_failed(self, method: str, call: ExpertCall, failure: "_Failure") -> None:
        """Note that a call brought nothing."""
        self.statistics.note_failure(failure.reason, f"expert {call.uid} at {call.contact}: {failure.text}")
        if failure.blame:
            self.directory.avoid(call.uid, call.contact, failure.reason)
        self.has_ended(method, call, failure.reason)

    def has_ended(self, method: str, call: ExpertCall, outcome: str) -> None:
        """Note when and how a call has ended."""
        now = trio.current_time()
        if self.on_call is not None:
            self.on_call(
                CallRecord(
                    method=method,
                    uid=call.uid,
                    contact=call.contact,
                    rows=len(call.rows),
                    outcome=outcome,
                    began=call.began,
                    ended=now,
                )
            )
        self._times.note(method, call.contact.peer_id, now - call.began, now)


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a call brought nothing: one of `REASONS`, a sentence, and whether the expert is to blame for it."""

    reason: str
    text: str
    blame: bool = False


@dataclass(slots=True, kw_only=True)
class _LayerCalls:
    """The calls of one layer, under way; each by its place among them. See `ExpertCaller.fan_out`."""

    caller: ExpertCaller
    method: str
    inputs: Sequence[Array]
    output_grads: Array | None
    replies: Sequence[TensorSpec]
    config: MixtureConfig
    common: Mapping[str, Any]
    quorum: Quorum
    left: dict[int, ExpertCall]
    """Calls that have not come to their end; each does once, or is given up."""
    answers: list[tuple[ExpertCall, Answer] | None]
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Ends with the grace time."""

    async def place(self, indices: Sequence[int]) -> None:
        """Place a request for these calls, finish each, and ask for those that failed elsewhere, once."""
        directory = self.caller.directory
        deadline = trio.current_time() + self.config.timeout_s
        elsewhere: dict[Contact, list[int]] = {}
        for index, failure in await self._ask(indices, deadline, may_move=True):
            call, is_over = self.left[index], trio.current_time() >= deadline
            other = None if is_over else directory.another(call.uid, call.contact)
            if other is None:
                self._finish(index, failure)
                continue
            logger.debug("expert %s at %s: %s; asked of %s", call.uid, call.contact, failure.text, other)
            if failure.blame:
                directory.avoid(call.uid, call.contact, failure.reason)
            self.left[index] = self.caller.moved(call, other)
            elsewhere.setdefault(other, []).append(index)

        async def ask(moved: Sequence[int]) -> None:
            for index, failure in await self._ask(moved, deadline, may_move=False):
                self._finish(index, failure)

        await together([functools.partial(ask, moved) for moved in elsewhere.values()])

    def _finish(self, index: int, outcome: Answer | _Failure) -> None:
        """Note that a call has come to its end."""
        call = self.left.pop(index)
        if isinstance(outcome, Answer) and (fault := fault_in(outcome, self.replies, rows=len(call.rows))):
            outcome = _Failure(*fault, blame=True)
        if isinstance(outcome, Answer):
            self.answers[index] = (call, outcome)
            self.caller.was_answered(self.method, call)
        else:
            self.caller.has_failed(self.method, call, outcome)
        self.quorum.note(index, answered=isinstance(outcome, Answer))
        if self.scope.deadline == math.inf and self.quorum.reached:
            self.scope.deadline = trio.current_time() + self.config.grace_s

    async def _ask(self, indices: Sequence[int], deadline: float, *, may_move: bool) -> list[tuple[int, _Failure]]:
        """Place a request for calls of one node, finish those that were answered, and return the others, with the
        reasons.

        Calls for which the node has no room yet are asked again when it says, if there is time until then; or, with
        `may_move`, returned if another node serves their expert and is not busy. A node that has no room for the whole
        request does not say when: it is asked again after 0.1, 0.2, 0.4, 0.8 seconds, and then every second.
        """
        waiting = dict.fromkeys(indices)
        contact, rpc = self.left[indices[0]].contact, self.caller.rpc
        lost: list[tuple[int, _Failure]] = []
        may_retry, pause_s = self.method == BACKWARD, _LEAST_PAUSE_S
        again_at: dict[int, float] = {}
        asked: Sequence[int] = ()

        def comes_again(index: int, after_s: float) -> bool:
            """True if a call for which the node has no room is asked of it once more; `again_at` then says when."""
            at, directory = trio.current_time() + after_s, self.caller.directory
            directory.busy(contact, after_s)
            is_better_off = may_move and directory.another(self.left[index].uid, contact) is not None
            if at >= deadline or is_better_off:
                return False
            again_at[index] = at
            return True

        def take(reply: Reply) -> None:
            rows = {
                number: len(self.left[index].rows)
                for number, index in enumerate(asked)
                if index in waiting and index not in again_at
            }
            for number, outcome in _outcomes(reply, rows):
                index = asked[number]
                after_s = outcome.retry_after_s if isinstance(outcome, PeerBusy) else None
                if after_s is not None and comes_again(index, after_s):
                    continue
                del waiting[index]
                if isinstance(outcome, TooManyRows):
                    self.caller.takes_rows(contact, outcome.max_rows)
                if isinstance(outcome, CallFailed):
                    lost.append((index, _failure_of(outcome)))
                else:
                    self._finish(index, outcome)

        while waiting:
            asked = tuple(waiting)
            again_at.clear()
            calls = [self.left[index] for index in asked]
            body, tensors = request_of(calls, self.inputs, self.output_grads, self.common, self.config.compression)
            timeout_s = deadline - trio.current_time()
            try:
                take(await rpc.call(contact, self.method, body, tensors, timeout_s=timeout_s, on_partial=take))
                failure = _Failure(BAD_ANSWER, "the answer says nothing of this expert", blame=True)
            except ConnectionLost as error:
                if may_retry:
                    may_retry = False
                    continue
                failure = _Failure(reason_of(error), str(error))
            except PeerBusy as error:  # none of its parts was looked at, and so there is no word when to come back
                failure = _failure_of(error)
                for index in waiting:
                    comes_again(index, pause_s)
                pause_s = min(2 * pause_s, _MOST_PAUSE_S)
            except NetError as error:
                failure = _failure_of(error)
            for index in [index for index in waiting if index not in again_at]:
                del waiting[index]
                lost.append((index, failure))
            if again_at:
                self.caller.statistics.asked_again += len(again_at)
                await trio.sleep_until(max(again_at.values()))
        return lost


def grouped(calls: Sequence[ExpertCall], *, row_bytes: int, most: int) -> list[list[int]]:
    """Return which calls travel together: indices, in the calls' order.

    Those of one node do, but at most `most` of them, and not more than `REQUEST_BYTES`, unless one has more by itself.
    """
    groups: list[list[int]] = []
    open_groups: dict[Contact, tuple[list[int], int]] = {}  # by node: the last one, and its bytes
    for index, call in enumerate(calls):
        nbytes = len(call.rows) * row_bytes
        group, filled = open_groups.get(call.contact, ([], 0))
        if not group or len(group) >= most or filled + nbytes > REQUEST_BYTES:
            group, filled = [], 0
            groups.append(group)
        group.append(index)
        open_groups[call.contact] = group, filled + nbytes
    return groups


def row_bytes_of(inputs: Sequence[Array], output_grads: Array | None) -> int:
    """Bytes of a row of a call, before compression."""
    own = 0 if output_grads is None else output_grads.nbytes // max(1, math.prod(output_grads.shape[:2]))
    return own + sum(array.nbytes // max(1, len(array)) for array in inputs)


async def together(functions: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Run them at once; a single one needs no task of its own."""
    if len(functions) == 1:
        await functions[0]()
        return
    async with trio.open_nursery() as nursery:
        for function in functions:
            nursery.start_soon(function)


class _BadAnswer(RemoteProtocolError):
    """An answer that is none to what was asked."""


def _outcomes(reply: Reply, rows: Mapping[int, int]) -> list[tuple[int, Outcome]]:
    """The outcomes of the parts of which a reply speaks, see `outcomes_of_untrusted`.

    Raises:
      _BadAnswer: it is none to what was asked.
    """
    try:
        return outcomes_of_untrusted(reply, rows)
    except RemoteProtocolError as error:
        raise _BadAnswer(str(error)) from error


def _failure_of(error: NetError) -> _Failure:
    # Busy, or made for smaller calls, is no fault, and RPC knows the hosts that do not answer; refusing, or talking
    # nonsense, concerns the expert.
    is_experts_own = isinstance(error, CallFailed | _BadAnswer) and not isinstance(error, PeerBusy | TooManyRows)
    return _Failure(reason_of(error), str(error), blame=is_experts_own)


def fault_in(answer: Answer, specs: Sequence[TensorSpec], *, rows: int) -> tuple[str, str] | None:
    """Reason and sentence of what is wrong with an answer; None if each tensor is as its own specification says."""
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
