"""Calling many experts at once and going on without the silent ones.

One `ExpertCall` is one request to one node for the rows of a batch that chose its expert. `fan_out` runs a batch of
them under one deadline and one quorum and returns the answers by call, None for a call that failed or was late.
"""

import logging
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import trio

from dmoe_jax.directory import ExpertDirectory
from dmoe_jax.mixture.quorum import Quorum
from net.errors import ConnectionLost, NetError, PeerUnavailable, RemoteProtocolError
from net.identity import Contact
from net.rpc.base import Body, Caller, Reply
from net.types import Array
from net.wire.compression import Compression
from net.wire.tensors import Outgoing, as_outgoing, plain

logger = logging.getLogger(__name__)


# A peer that is late this many times in a row is treated as one that does not answer. A hung process refuses no
# connection, and the grace time cuts every call to it short before its deadline does.
_LATE_LIMIT = 3

# Peers come and go for months; beyond this many that were late once or twice, the counting starts afresh.
_MAX_LATE_PEERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPolicy:
    """How a mixture speaks with its experts, and how long it waits for them."""

    k_min: int = 1
    """Answers that each sample needs."""
    grace_s: float = 1.0
    """Seconds to wait for stragglers once every sample has `k_min` answers. Infinity waits for all."""
    timeout_s: float = 10.0
    """Seconds after which a call is given up."""
    compression: Compression = Compression.NONE
    """How activations and gradients travel, there and back: float32 ones, with the losses that `net.wire.compression`
    states; those of other types travel as they are."""

    def __post_init__(self) -> None:
        if not isinstance(self.compression, Compression):
            raise ValueError(f"expected a Compression, got {self.compression!r}")
        if self.k_min < 0 or not self.grace_s >= 0 or not self.timeout_s > 0:
            raise ValueError(f"expected k_min >= 0, grace_s >= 0 and timeout_s > 0, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCall:
    """One request to one expert.

    Attributes:
      uid: the expert.
      contact: the node that serves it.
      rows: int64 [n], the samples of the batch that it serves.
    """

    uid: str
    contact: Contact
    rows: Array


@dataclass(slots=True)
class CallStatistics:
    """Running totals of one process's expert calls."""

    ok: int = 0
    """Calls that were answered in time."""
    failed: int = 0
    """Calls refused, lost or timed out."""
    late: int = 0
    """Calls given up in the grace time: slow, perhaps not dead."""
    skipped_samples: int = 0
    """Samples that went through a layer with no expert at all."""
    staleness_total: int = 0
    """Updates that experts took between a forward and its backward, by other trainers, summed over backward calls."""
    staleness_calls: int = 0
    """Backward calls in `staleness_total`."""
    load: dict[str, int] = field(default_factory=dict)
    """Samples sent through each expert in training, by uid."""
    host: dict[str, Contact] = field(default_factory=dict)
    """The node that last answered for each expert. Bounded by the grid, like `load`."""


class ExpertCaller:
    """Places expert calls, keeps the statistics and tells the directory who does not answer.

    Args:
      caller: places the calls.
      directory: is told of failures, so that routing avoids the peer for a while.
      statistics: shared by the mixtures of one process.
    """

    def __init__(self, caller: Caller, directory: ExpertDirectory, statistics: CallStatistics) -> None:
        self._caller = caller
        self._directory = directory
        self.statistics = statistics
        self._late_in_a_row: dict[Contact, int] = {}

    async def fan_out(
        self,
        method: str,
        calls: Sequence[ExpertCall],
        tensors: Sequence[Sequence[Array]],
        *,
        reply_shapes: Sequence[tuple[int, ...]],
        dtype: str,
        num_samples: int,
        policy: CallPolicy,
        retry: bool = False,
    ) -> list[Reply | None]:
        """Run all calls at once; the answers in order, None where there is none.

        Args:
          method: "expert.forward" or "expert.backward".
          calls: the requests. tensors: the arrays of each.
          reply_shapes: of the tensors that each answer must carry, without the rows. dtype: their type.
          num_samples: samples of the batch, for the quorum.
          retry: whether a call whose connection broke is sent once more with the same request id.

        An answer of another shape, or with NaN or infinity in it, is none: it counts neither for the quorum nor for the
        peer. If cancelled, every call is cancelled, at the nodes too. Never raises for what a peer did.
        """

        def fault_in(call: ExpertCall, reply: Reply) -> str | None:
            expected = [((len(call.rows), *shape), np.dtype(dtype)) for shape in reply_shapes]
            tensors = [plain(tensor) for tensor in reply.tensors]
            if [(tensor.shape, tensor.dtype) for tensor in tensors] != expected:
                return "tensors of another shape or type"
            return None if all(np.isfinite(tensor).all() for tensor in tensors) else "NaN or infinity"

        quorum = Quorum([call.rows for call in calls], num_samples=num_samples, k_min=policy.k_min)
        replies: list[Reply | None] = [None] * len(calls)
        finished = [False] * len(calls)

        async def place(index: int) -> None:
            body: dict[str, Any] = {"uid": calls[index].uid, "request_id": secrets.token_bytes(16)}
            if policy.compression is not Compression.NONE:
                body["compression"] = policy.compression.value
            outgoing = [as_outgoing(tensor, policy.compression) for tensor in tensors[index]]
            reply = await self._call(method, calls[index], body, outgoing, policy, fault_in, retry=retry)
            finished[index] = True
            replies[index] = reply
            if reply is None:
                quorum.failed(index)
            else:
                quorum.answered(index)
            if quorum.reached and scope.deadline == math.inf:
                scope.deadline = trio.current_time() + policy.grace_s

        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                for index in range(len(calls)):
                    nursery.start_soon(place, index)
        for call, done in zip(calls, finished, strict=True):
            if not done:
                self._note_late(call)
        return replies

    async def _call(
        self,
        method: str,
        call: ExpertCall,
        body: Body,
        tensors: Sequence[Outgoing],
        policy: CallPolicy,
        fault_in: Callable[[ExpertCall, Reply], str | None],
        *,
        retry: bool,
    ) -> Reply | None:
        attempts = 2 if retry else 1
        for attempt in range(attempts):
            try:
                reply = await self._caller.call(call.contact, method, body, tensors, timeout_s=policy.timeout_s)
            except ConnectionLost as error:
                if attempt + 1 == attempts:
                    self._note_failure(call, error)
            except NetError as error:
                self._note_failure(call, error)
                break
            else:
                fault = fault_in(call, reply)
                if fault is None:
                    self._note_success(call)
                    return reply
                self._note_failure(call, RemoteProtocolError(f"expert {call.uid} answered {fault}"))
                break
        return None

    def _note_success(self, call: ExpertCall) -> None:
        self.statistics.ok += 1
        self.statistics.host[call.uid] = call.contact
        self._late_in_a_row.pop(call.contact, None)
        self._directory.report_success(call.contact)

    def _note_failure(self, call: ExpertCall, error: NetError) -> None:
        self.statistics.failed += 1
        logger.info("call to expert %s at %s failed: %s", call.uid, call.contact, error)
        if isinstance(error, PeerUnavailable | RemoteProtocolError):
            self._directory.report_failure(call.contact)

    def _note_late(self, call: ExpertCall) -> None:
        self.statistics.late += 1
        late = self._late_in_a_row.get(call.contact, 0) + 1
        if late < _LATE_LIMIT:
            if len(self._late_in_a_row) >= _MAX_LATE_PEERS:
                self._late_in_a_row.clear()
            self._late_in_a_row[call.contact] = late
        else:
            self._late_in_a_row.pop(call.contact, None)
            self._directory.report_failure(call.contact)
