"""Calling many experts at once and going on without the silent ones.

One `ExpertCall` asks one expert for the rows of a batch that chose it. The calls of one node travel in one request;
their answers come back one by one as they are ready.

Replicas. Several nodes may serve one expert. A backward goes where its forward went, as long as that node answers. A
call that fails while there is time is asked of another node once. So may a backward: its gradients are computed from
inputs that it brings, and the copy there learns in place of the one that is gone, unless it has the gradient already
(`dmoe_jax.placement.learnt`). The updates that its forward has "seen" stay behind, since they are another copy's.
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

from dmoe_jax.directory.directory import ExpertDirectory, expert_target, host_target
from dmoe_jax.experts.base import TensorSpec
from dmoe_jax.mixture.capacity import CallTimes
from dmoe_jax.mixture.config import MixtureConfig
from dmoe_jax.mixture.expert_calls import (
    BACKWARD,
    REMEMBERED_S,
    Answer,
    ExpertCall,
    TooManyRows,
    is_finite,
    outcomes_of_untrusted,
    request_of,
)
from dmoe_jax.mixture.statistics import LATE, OK, BadAnswer, CallRecord, CallStatistics, NotFinite, reason_of
from dmoe_net.errors import CallFailed, ConnectionLost, NetError, PeerBusy, RemoteProtocolError
from dmoe_net.identity import Contact, PeerId
from dmoe_net.rpc.base import Body, Caller, Reply
from dmoe_net.types import Array
from dmoe_net.wire.tensors import Outgoing

logger = logging.getLogger(__name__)

_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.1, 1.0
"""Before a call is placed again that a node had no room for: the first time, and after many times."""

OnCall = Callable[[CallRecord], None]
"""Hears of an expert call that has ended."""

REQUEST_BYTES = 512 * 1024
"""Calls of one node travel together up to this size: one part on the wire. A node begins when it has a whole request,
so larger ones would keep it waiting for the line."""


class ExpertCaller:
    """Places expert calls, counts their outcomes, and records which experts and hosts to avoid for a while.

    RPC itself records hosts that do not answer. Recorded here, in the directory's health, are hosts that are late again
    and again, and single experts that refuse, or answer nonsense, on a host that may be as sound as any.
    """

    def __init__(self, rpc: Caller, directory: ExpertDirectory, statistics: CallStatistics) -> None:
        self.rpc = rpc
        self.directory = directory
        self.statistics = statistics
        self.on_call: OnCall | None = None
        """Called with each call that has ended, answered or not. One that is cancelled has no end."""
        self.most_rows: dict[PeerId, int] = {}
        """Most rows that a node takes in a call, of the nodes that have said so."""
        self._times = CallTimes()

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
        """Run all calls at once, under one deadline and one quorum. Return, in order, each answer with the call that it
        is an answer to, at the node that gave it; None where there is none.

        Each call is answered, and given up, by itself. What of a backward request is not answered when a connection
        breaks is asked once more with the same ids. An answer of another shape, or with NaN or infinity in it, is none:
        it counts neither for the quorum nor for the expert. If cancelled, every call is cancelled, at the nodes too.
        Never raises for what a peer did.

        Args:
          method: `FORWARD` or `BACKWARD`.
          inputs: the batch, each [batch, ...].
          output_grads: for `BACKWARD`, gradients of the experts' outputs, [batch, slots, ...].
          replies: the tensors of each answer, for each row.
          common: the fields of each request beside its parts.
        """
        now = trio.current_time()
        placed = [replace(call, id=secrets.token_bytes(16), began=now) for call in calls]
        if method == BACKWARD:
            placed = [self._elsewhere_if_gone(call) for call in placed]
        layer = _LayerCalls(
            caller=self,
            method=method,
            request=lambda calls: request_of(calls, inputs, output_grads, common, config.compression),
            replies=replies,
            config=config,
            quorum=Quorum([call.rows for call in calls], num_samples=len(inputs[0]), k_min=config.k_min),
            left=dict(enumerate(placed)),
            retry_until=now + (REMEMBERED_S if method == BACKWARD else math.inf),
            answers=[None] * len(calls),
        )
        requests = grouped(placed, row_bytes=_row_bytes(inputs, output_grads), most=config.max_parts)
        with layer.scope:
            await _together([functools.partial(layer.place, indices) for indices in requests])
        for call in layer.left.values():
            text = f"expert {call.uid} at {call.contact} was given up {config.grace_s:g} s after the others"
            self.note_end(method, call, LATE, text)
            self.directory.health.late(host_target(call.contact), trio.current_time())
        return layer.answers

    def moved(self, call: ExpertCall, other: Contact) -> ExpertCall:
        """The call, asked of another node from now on."""
        self.statistics.moved += 1
        return replace(call, contact=other, seen=None, began=trio.current_time())

    def _elsewhere_if_gone(self, call: ExpertCall) -> ExpertCall:
        """The call; at another node, if there is one, where its own has failed just now."""
        if self.directory.answers(call.uid, call.contact):
            return call
        other = self.directory.another(call.uid, call.contact)
        return call if other is None else self.moved(call, other)

    def note_end(self, method: str, call: ExpertCall, outcome: str, text: str = "") -> None:
        """Note that a call has ended: `OK`, or one of `REASONS` and a sentence."""
        now = trio.current_time()
        if outcome == OK:
            self.statistics.ok += 1
            self.statistics.host[call.uid] = call.contact
            self.directory.health.succeeded(expert_target(call.contact, call.uid))
        else:
            self.statistics.note_failure(outcome, text)
        if self.on_call is not None:
            self.on_call(CallRecord(method, call.uid, call.contact, len(call.rows), outcome, call.began, now))
        self._times.note(method, call.contact.peer_id, now - call.began, now)


class Quorum:
    """Counts answers per sample: a batch goes on once every sample has `k_min`, plus a grace time for the stragglers
    (Learning@home, appendix on fault tolerance: `timeout_after_k_min`). `rows_of_call` has for each call the indices of
    the samples that it serves."""

    def __init__(self, rows_of_call: Sequence[Array], *, num_samples: int, k_min: int) -> None:
        self._rows_of_call = rows_of_call
        self._k_min = k_min
        self._answers = np.zeros(num_samples, np.int64)
        self._pending = np.zeros(num_samples, np.int64)
        for rows in rows_of_call:
            self._pending[rows] += 1

    def note(self, call: int, *, answered: bool) -> None:
        """Note that call number `call` brought its answer, or never will."""
        rows = self._rows_of_call[call]
        self._pending[rows] -= 1
        self._answers[rows] += answered

    @property
    def reached(self) -> bool:
        """True if every sample has `k_min` answers or no way to get them any more."""
        waits = (self._answers < self._k_min) & (self._answers + self._pending >= self._k_min)
        return not np.count_nonzero(waits)


@dataclass(slots=True, kw_only=True)
class _LayerCalls:
    """The calls of one layer, under way; each by its place among them. See `ExpertCaller.fan_out`."""

    caller: ExpertCaller
    method: str
    request: Callable[[Sequence[ExpertCall]], tuple[Body, list[Outgoing]]]
    """Body and tensors of a request for calls of one node."""
    replies: Sequence[TensorSpec]
    config: MixtureConfig
    quorum: Quorum
    left: dict[int, ExpertCall]
    """Calls that have not come to their end; each does once, or is given up."""
    retry_until: float
    """Time until which a call that may have been answered is placed again."""
    answers: list[tuple[ExpertCall, Answer] | None]
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Ends with the grace time."""

    async def place(self, indices: Sequence[int]) -> None:
        """Place a request for these calls, finish each, and ask for those that failed elsewhere, once."""
        directory = self.caller.directory
        deadline = trio.current_time() + self.config.timeout_s
        elsewhere: dict[Contact, list[int]] = {}
        for index, error in await self._ask(indices, deadline, may_move=True):
            call, is_over = self.left[index], trio.current_time() >= min(deadline, self.retry_until)
            other = None if is_over else directory.another(call.uid, call.contact)
            if other is None:
                self._finish(index, error)
                continue
            logger.debug("expert %s at %s: %s; asked of %s", call.uid, call.contact, error, other)
            self._blame(call, error)
            self.left[index] = self.caller.moved(call, other)
            elsewhere.setdefault(other, []).append(index)

        async def ask(moved: Sequence[int]) -> None:
            for index, error in await self._ask(moved, deadline, may_move=False):
                self._finish(index, error)

        await _together([functools.partial(ask, moved) for moved in elsewhere.values()])

    def _finish(self, index: int, outcome: Answer | NetError) -> None:
        call = self.left.pop(index)
        if isinstance(outcome, Answer) and (fault := _fault_in(outcome, self.replies, rows=len(call.rows))):
            outcome = fault
        if isinstance(outcome, Answer):
            self.answers[index] = (call, outcome)
            self.caller.note_end(self.method, call, OK)
        else:
            self._blame(call, outcome)
            text = f"expert {call.uid} at {call.contact}: {outcome}"
            self.caller.note_end(self.method, call, reason_of(outcome), text)
        self.quorum.note(index, answered=isinstance(outcome, Answer))
        if self.scope.deadline == math.inf and self.quorum.reached:
            self.scope.deadline = trio.current_time() + self.config.grace_s

    def _blame(self, call: ExpertCall, error: NetError) -> None:
        """Avoid the expert at its node if it is to blame: it refuses, or talks nonsense. To be busy, or made for
        smaller calls, is no fault, and RPC knows the hosts that do not answer."""
        if isinstance(error, CallFailed | BadAnswer | NotFinite) and not isinstance(error, PeerBusy | TooManyRows):
            self.caller.directory.avoid(call.uid, call.contact, reason_of(error))

    async def _ask(self, indices: Sequence[int], deadline: float, *, may_move: bool) -> list[tuple[int, NetError]]:
        """Place a request for calls of one node, finish those that were answered, and return the others, with the
        reasons.

        Calls for which the node has no room yet are asked again when it says, if there is time until then; or, with
        `may_move`, returned if another node serves their expert and is not busy. A node that has no room for the whole
        request does not say when: it is asked again after 0.1, 0.2, 0.4, 0.8 seconds, and then every second.
        """
        waiting = list(indices)
        contact, caller = self.left[indices[0]].contact, self.caller
        lost: list[tuple[int, NetError]] = []
        may_retry, pause_s = self.method == BACKWARD, _LEAST_PAUSE_S
        again_at: dict[int, float] = {}
        asked: list[int] = []

        def comes_again(index: int, after_s: float) -> bool:
            """True if a call for which the node has no room is asked of it once more; `again_at` then says when."""
            at, directory = trio.current_time() + after_s, caller.directory
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
            try:
                outcomes = outcomes_of_untrusted(reply, rows)
            except RemoteProtocolError as error:
                raise BadAnswer(str(error)) from error
            for number, outcome in outcomes:
                index = asked[number]
                after_s = outcome.retry_after_s if isinstance(outcome, PeerBusy) else None
                if after_s is not None and comes_again(index, after_s):
                    continue
                waiting.remove(index)
                if isinstance(outcome, TooManyRows):
                    caller.most_rows[contact.peer_id] = outcome.max_rows
                if isinstance(outcome, Answer):
                    self._finish(index, outcome)
                else:
                    lost.append((index, outcome))

        while waiting:
            asked = waiting.copy()
            again_at.clear()
            body, tensors = self.request([self.left[index] for index in asked])
            timeout_s = deadline - trio.current_time()
            failure: NetError = BadAnswer("the answer says nothing of this expert")
            try:
                take(await caller.rpc.call(contact, self.method, body, tensors, timeout_s=timeout_s, on_partial=take))
            except NetError as error:
                if isinstance(error, ConnectionLost) and may_retry and trio.current_time() < self.retry_until:
                    may_retry = False
                    continue
                failure = error
                if isinstance(error, PeerBusy):  # none of its parts was looked at: there is no word when to come back
                    for index in waiting:
                        comes_again(index, pause_s)
                    pause_s = min(2 * pause_s, _MOST_PAUSE_S)
            lost += [(index, failure) for index in waiting if index not in again_at]
            waiting = [index for index in waiting if index in again_at]
            if again_at:
                caller.statistics.asked_again += len(again_at)
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


def _row_bytes(inputs: Sequence[Array], output_grads: Array | None) -> int:
    """Bytes of a row of a call, before compression."""
    own = 0 if output_grads is None else output_grads.nbytes // max(1, math.prod(output_grads.shape[:2]))
    return own + sum(array.nbytes // max(1, len(array)) for array in inputs)


async def _together(functions: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Run them at once; a single one needs no task of its own."""
    if len(functions) == 1:
        await functions[0]()
        return
    async with trio.open_nursery() as nursery:
        for function in functions:
            nursery.start_soon(function)


def _fault_in(answer: Answer, specs: Sequence[TensorSpec], *, rows: int) -> NetError | None:
    """The fault of an answer; None if each tensor is as its own specification says."""
    expected = [((rows, *spec.shape), np.dtype(spec.dtype)) for spec in specs]
    got = [(tensor.shape, tensor.dtype) for tensor in answer.tensors]
    if got != expected:
        return BadAnswer(f"expected {_listed(expected)} in the answer, got {_listed(got)}")
    return None if all(map(is_finite, answer.tensors)) else NotFinite("the answer holds NaN or infinity")


def _listed(tensors: Sequence[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in tensors) or "no tensor"
