"""Calling many experts at once and going on without the silent ones.

One `ExpertCall` is one request to one node for the rows of a batch that chose its expert. `fan_out` runs a batch of
them under one deadline and one quorum and returns the answers by call, None for a call that failed or was late.
"""

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import trio

from dmoe_jax.directory import ExpertDirectory, host_target
from dmoe_jax.experts.base import TensorSpec
from dmoe_jax.mixture.capacity import CallTimes
from dmoe_jax.mixture.config import MixtureConfig
from dmoe_jax.mixture.quorum import Quorum
from dmoe_jax.mixture.statistics import BAD_ANSWER, LATE, NOT_FINITE, CallRecord, CallStatistics, reason_of
from net.errors import CallFailed, ConnectionLost, NetError, PeerBusy
from net.identity import Contact, PeerId
from net.rpc.base import Body, Caller, Reply
from net.types import Array
from net.wire.compression import Compression
from net.wire.tensors import Outgoing, as_outgoing, plain


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCall:
    """One request to one expert.

    Attributes:
      uid: the expert.
      contact: the node that serves it.
      rows: int64 [n], the samples of the batch that it serves.
      slots: int64 [n], in which of its slots each of these samples has the expert.
    """

    uid: str
    contact: Contact
    rows: Array
    slots: Array


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
        tensors: Sequence[Sequence[Array]],
        *,
        replies: Sequence[TensorSpec],
        num_samples: int,
        config: MixtureConfig,
        bodies: Sequence[Mapping[str, Any]],
        retry: bool = False,
    ) -> list[Reply | None]:
        """Run all calls at once; the answers in order, None where there is none.

        Args:
          method: "expert.forward" or "expert.backward".
          calls: the requests. tensors: the arrays of each.
          replies: what each answer must carry, for each row.
          num_samples: samples of the batch, for the quorum.
          config: how long to wait, and how tensors travel.
          bodies: what each request says beside the expert's uid and an id of its own.
          retry: whether a call whose connection broke is sent once more with the same request id.

        An answer of another shape, or with NaN or infinity in it, is none: it counts neither for the quorum nor for the
        expert. If cancelled, every call is cancelled, at the nodes too. Never raises for what a peer did.
        """
        quorum = Quorum([call.rows for call in calls], num_samples=num_samples, k_min=config.k_min)
        answers: list[Reply | None] = [None] * len(calls)
        finished = [False] * len(calls)
        common = {} if config.compression is Compression.NONE else {"compression": config.compression.value}

        started = trio.current_time()

        async def place(index: int) -> None:
            request = {**common, **bodies[index], "uid": calls[index].uid, "request_id": secrets.token_bytes(16)}
            outgoing = [as_outgoing(tensor, config.compression) for tensor in tensors[index]]
            reply = await self._call(
                method, calls[index], request, outgoing, replies, timeout_s=config.timeout_s, attempts=2 if retry else 1
            )
            finished[index] = True
            answers[index] = reply
            self._note_time(method, calls[index], started)
            quorum.note(index, answered=reply is not None)
            if quorum.reached and scope.deadline == math.inf:
                scope.deadline = trio.current_time() + config.grace_s

        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                for index in range(len(calls)):
                    nursery.start_soon(place, index)
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

    async def _call(
        self,
        method: str,
        call: ExpertCall,
        body: Body,
        tensors: Sequence[Outgoing],
        replies: Sequence[TensorSpec],
        *,
        timeout_s: float,
        attempts: int,
    ) -> Reply | None:
        started = trio.current_time()
        for attempt in range(attempts):
            try:
                reply = await self.rpc.call(call.contact, method, body, tensors, timeout_s=timeout_s)
            except ConnectionLost as error:
                if attempt + 1 == attempts:
                    self._note_failure(call, reason_of(error), str(error))
                    self._note_end(method, call, started, reason_of(error))
            except NetError as error:
                # Busy is no fault, and RPC knows the hosts that do not answer; refusing concerns the expert.
                is_experts_own = isinstance(error, CallFailed) and not isinstance(error, PeerBusy)
                self._note_failure(call, reason_of(error), str(error), blame=is_experts_own)
                self._note_end(method, call, started, reason_of(error))
                break
            else:
                if fault := fault_in(reply, replies, rows=len(call.rows)):
                    self._note_failure(call, *fault, blame=True)
                    self._note_end(method, call, started, fault[0])
                    break
                self.statistics.ok += 1
                self._note_end(method, call, started, "ok")
                self.statistics.host[call.uid] = call.contact
                self.directory.health.succeeded(call.uid)
                return reply
        return None

    def _note_failure(self, call: ExpertCall, reason: str, text: str, *, blame: bool = False) -> None:
        self.statistics.note_failure(reason, f"expert {call.uid} at {call.contact}: {text}")
        if blame:
            self.directory.avoid(call.uid, reason)


def fault_in(reply: Reply, specs: Sequence[TensorSpec], *, rows: int) -> tuple[str, str] | None:
    """What is wrong with an answer, as (reason, sentence); None if each tensor is as its own specification says."""
    tensors = [plain(tensor) for tensor in reply.tensors]
    expected = [((rows, *spec.shape), np.dtype(spec.dtype)) for spec in specs]
    got = [(tensor.shape, tensor.dtype) for tensor in tensors]
    if got != expected:
        return BAD_ANSWER, f"expected {_listed(expected)} in the answer, got {_listed(got)}"
    if not all(np.isfinite(tensor).all() for tensor in tensors):
        return NOT_FINITE, "the answer holds NaN or infinity"
    return None


def _listed(tensors: Sequence[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in tensors) or "no tensor"
