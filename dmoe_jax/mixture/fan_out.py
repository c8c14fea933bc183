"""Calling many experts at once and going on without the silent ones.

One `ExpertCall` asks one expert for the rows of a batch that chose it. `fan_out` runs a batch of them under one
deadline and one quorum and returns the answers by call, None for a call that failed or was late. The calls of one node
travel in one request; their answers come back one by one as they are ready.
"""

import functools
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import trio

from dmoe_jax.directory import ExpertDirectory, host_target
from dmoe_jax.expert_calls import Answer, outcomes_of_untrusted
from dmoe_jax.experts.base import TensorSpec
from dmoe_jax.mixture.capacity import CallTimes
from dmoe_jax.mixture.config import MixtureConfig
from dmoe_jax.mixture.quorum import Quorum
from dmoe_jax.mixture.requests import ExpertCall, LayerRequest, PlacedCall, grouped, row_bytes_of
from dmoe_jax.mixture.statistics import BAD_ANSWER, LATE, NOT_FINITE, CallRecord, CallStatistics, reason_of
from net.errors import CallFailed, ConnectionLost, NetError, PeerBusy, RemoteProtocolError
from net.identity import PeerId
from net.rpc.base import Caller, Reply
from net.types import Array


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
    ) -> list[Answer | None]:
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
          seen: for each call how many updates its expert had taken in the forward pass.
          retry: whether what is not answered when a connection breaks is asked once more with the same ids.

        An answer of another shape, or with NaN or infinity in it, is none: it counts neither for the quorum nor for the
        expert. If cancelled, every call is cancelled, at the nodes too. Never raises for what a peer did.
        """
        quorum = Quorum([call.rows for call in calls], num_samples=len(inputs[0]), k_min=config.k_min)
        answers: list[Answer | None] = [None] * len(calls)
        finished = [False] * len(calls)
        started = trio.current_time()

        def finish(index: int, outcome: Answer | _Failure) -> None:
            """A call has come to its end; each does once, or is given up."""
            call, finished[index] = calls[index], True
            if isinstance(outcome, Answer) and (fault := fault_in(outcome, replies, rows=len(call.rows))):
                outcome = _Failure(*fault, blame=True)
            if isinstance(outcome, Answer):
                answers[index] = outcome
            self._note_outcome(method, call, started, outcome)
            self._note_time(method, call, started)
            quorum.note(index, answered=answers[index] is not None)
            if quorum.reached and scope.deadline == math.inf:
                scope.deadline = trio.current_time() + config.grace_s

        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                for indices in grouped(calls, row_bytes=row_bytes_of(inputs, output_grads), most=config.max_parts):
                    parts = [
                        PlacedCall(calls[index], index, None if seen is None else seen[index], secrets.token_bytes(16))
                        for index in indices
                    ]
                    request = LayerRequest(method, parts, inputs, output_grads, config, common)
                    nursery.start_soon(functools.partial(self._ask, request, finish, retry=retry))
        for call, done in zip(calls, finished, strict=True):
            if not done:
                text = f"expert {call.uid} at {call.contact} was given up {config.grace_s:g} s after the others"
                self.statistics.note_failure(LATE, text)
                self._note_end(method, call, started, LATE)
                self._note_time(method, call, started)
                self.directory.health.late(host_target(call.contact), trio.current_time())
        return answers

    def slowness(self, hosts: Iterable[PeerId]) -> dict[PeerId, float]:
        """How many times as long as the median of these hosts each takes for our calls, of those called of late."""
        return self._times.slowness(hosts, trio.current_time())

    def _note_time(self, method: str, call: ExpertCall, started: float) -> None:
        now = trio.current_time()
        self._times.note(method, call.contact.peer_id, now - started, now)

    def _note_end(self, method: str, call: ExpertCall, began: float, outcome: str) -> None:
        if self.on_call is not None:
            self.on_call(
                CallRecord(
                    method=method,
                    uid=call.uid,
                    contact=call.contact,
                    rows=len(call.rows),
                    outcome=outcome,
                    began=began,
                    ended=trio.current_time(),
                )
            )

    async def _ask(
        self, request: LayerRequest, finish: Callable[[int, "Answer | _Failure"], None], *, retry: bool
    ) -> None:
        """Place a request, and say of each of its parts how it ended.

        Parts for which the node has no room yet are asked again when it says, if there is time until then.
        """
        left = {part.index: part for part in request.parts}
        contact = request.parts[0].call.contact
        deadline = trio.current_time() + request.config.timeout_s
        while left:
            asked, again_at = list(left.values()), dict[int, float]()

            def take(answer: Reply, asked: Sequence[PlacedCall] = asked, again_at: dict[int, float] = again_at) -> None:
                open_parts = {number: part for number, part in enumerate(asked) if part.index in left.keys() - again_at}
                for number, outcome in _outcomes(answer, open_parts):
                    index = open_parts[number].index
                    if isinstance(outcome, PeerBusy) and outcome.retry_after_s is not None:
                        self.directory.busy(contact, outcome.retry_after_s)
                        at = trio.current_time() + outcome.retry_after_s
                        if at < deadline:
                            again_at[index] = at
                            continue
                    del left[index]
                    finish(index, _failure_of(outcome) if isinstance(outcome, CallFailed) else outcome)

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
            except NetError as error:
                failure = _failure_of(error)
            for index in left.keys() - again_at:
                del left[index]
                finish(index, failure)
            if again_at:
                self.statistics.asked_again += len(again_at)
                await trio.sleep_until(max(again_at.values()))

    def _note_outcome(self, method: str, call: ExpertCall, started: float, outcome: "Answer | _Failure") -> None:
        if isinstance(outcome, Answer):
            self.statistics.ok += 1
            self.statistics.host[call.uid] = call.contact
            self.directory.health.succeeded(call.uid)
            self._note_end(method, call, started, "ok")
            return
        self.statistics.note_failure(outcome.reason, f"expert {call.uid} at {call.contact}: {outcome.text}")
        if outcome.blame:
            self.directory.avoid(call.uid, outcome.reason)
        self._note_end(method, call, started, outcome.reason)


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
    # Busy is no fault, and RPC knows the hosts that do not answer; refusing, or talking nonsense, concerns the expert.
    is_experts_own = isinstance(error, CallFailed | _BadAnswer) and not isinstance(error, PeerBusy)
    return _Failure(reason_of(error), str(error), blame=is_experts_own)


def fault_in(answer: Answer, specs: Sequence[TensorSpec], *, rows: int) -> tuple[str, str] | None:
    """What is wrong with an answer, as (reason, sentence); None if each tensor is as its own specification says."""
    tensors = answer.tensors
    expected = [((rows, *spec.shape), np.dtype(spec.dtype)) for spec in specs]
    got = [(tensor.shape, tensor.dtype) for tensor in tensors]
    if got != expected:
        return BAD_ANSWER, f"expected {_listed(expected)} in the answer, got {_listed(got)}"
    if not all(np.isfinite(tensor).all() for tensor in tensors):
        return NOT_FINITE, "the answer holds NaN or infinity"
    return None


def _listed(tensors: Sequence[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in tensors) or "no tensor"
