"""Forward and backward requests at a node: read strictly, put into the queue as jobs, and answered.

Everything that a trainer sent is checked before it costs a flop. A request that does not fit is refused with a message
that says what was expected, in the words of the expert's own specification, so that the person at the other end can
mend it without reading this code.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict

import numpy as np
import trio

from dmoe_jax.experts.base import Expert, TensorSpec
from dmoe_jax.experts.dropout import row_keys_of_seed
from dmoe_jax.metrics.node import NodeRecorder
from dmoe_jax.mixture.expert_calls import (
    BACKWARD,
    FORWARD,
    MAX_ID_BYTES,
    Outcome,
    RequestPart,
    TooManyRows,
    answer_of,
    is_finite,
    parts_of_untrusted,
)
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.queue import NOT_STALE, Job, QueueFull, RememberedJobs, learnt_before, name_of, one_has_ended
from dmoe_jax.node.runner import BatchRunner
from dmoe_net.errors import CallFailed, CallRefused, PeerBusy, RemoteProtocolError
from dmoe_net.rpc.base import Body, Handler, Reply, Request
from dmoe_net.types import Array
from dmoe_net.wire.compression import COMPRESSIONS, Compression
from dmoe_net.wire.fields import integer, octets, optional
from dmoe_net.wire.versions import CALLS

_SEEN = optional(integer(0, NOT_STALE))
_REQUEST_ID = octets(1, MAX_ID_BYTES)
_SEED = optional(integer(0, 2**63 - 1))

_HOLD_S = 0.01
"""Seconds that a ready outcome waits for the rest of its call: a few turns of small batches, less than a wide network
takes. Each frame costs both ends as much as a small batch, but parts that take longer do not hold up the others."""


class Answering:
    """Answers the calls for experts: for those in `experts`, a mapping that may change; `backends` also has the experts
    that are being given up. A part has at most `max_rows` rows."""

    def __init__(
        self,
        experts: Mapping[str, Expert],
        backends: Mapping[str, ExpertBackend],
        runner: BatchRunner,
        *,
        max_rows: int,
        recorder: NodeRecorder,
    ) -> None:
        self.handlers: Mapping[str, Handler] = {
            "expert.info": self._info,
            FORWARD: functools.partial(self._serve, kind="forward"),
            BACKWARD: functools.partial(self._serve, kind="backward"),
        }
        """The RPC methods for experts, see `dmoe_jax.mixture.expert_calls`."""
        self.counts = {"forward": 0, "backward": 0, "busy": 0, "replayed": 0}
        """Jobs by kind, and parts that were turned away or known."""
        self.is_leaving = False
        """True: refuse what was not asked before."""
        self._experts = experts
        self._backends = backends
        self._runner = runner
        self._max_rows = max_rows
        self._recorder = recorder
        self._remembered = RememberedJobs()
        self._num_calls = 0  # accepted and not yet answered
        self._answered_all = trio.Event()  # set, and replaced, when there is none left

    async def answer_accepted(self) -> None:
        """Return when every call that was accepted is answered, or given up by its caller."""
        while self._num_calls:
            await self._answered_all.wait()

    async def _info(self, request: Request) -> Reply:
        backend = self._backends[uid_of(request.body, self._experts)]
        expert = backend.expert
        *inputs, output = ({**asdict(spec), "shape": list(spec.shape)} for spec in (*expert.inputs, expert.output))
        body = {
            "calls": CALLS,
            "kind": expert.name,
            "inputs": inputs,
            "output": output,
            "takes_key": expert.takes_key,
            "meaning": expert.meaning,
            "updates": backend.update_count,
            "max_rows": self._max_rows,
            "warm_rows": backend.warm_rows,
        }
        return Reply(body=body)

    async def _serve(self, request: Request, *, kind: str) -> Reply:
        self._num_calls += 1
        try:
            return await self._answer(request, kind)
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._answered_all.set()
                self._answered_all = trio.Event()

    async def _answer(self, request: Request, kind: str) -> Reply:
        """Answer a call when nothing is missing, and tell a caller that takes parts what is ready ahead of the rest. If
        it is cancelled its jobs leave the queue, but for those that somebody else wants."""
        jobs, ready, compression = self._begun(request, kind)
        tells_at = math.inf
        try:
            while True:
                for number, job in list(jobs.items()):
                    if job.outcome is not None:
                        error = job.outcome if isinstance(job.outcome, CallFailed) else None
                        self._recorder.ended(kind, job.uid, error)
                        ready.append((number, job.outcome))
                        del jobs[number]
                if not jobs:
                    return answer_of(ready, compression)
                if ready and request.send_partial is not None:
                    now = trio.current_time()
                    tells_at = min(tells_at, now + _HOLD_S)
                    if tells_at <= now:
                        if request.send_partial(answer_of(ready, compression)):
                            ready = []
                        tells_at = math.inf
                with trio.move_on_at(tells_at):
                    await one_has_ended(jobs.values())
        finally:
            for job in jobs.values():
                self._recorder.given_up(kind, job.uid)
                if not job.waiters and self._runner.withdraw(job) and job.replay_key is not None:
                    self._remembered.forget(job.replay_key)

    def _begun(self, request: Request, kind: str) -> tuple[dict[int, Job], list[tuple[int, Outcome]], Compression]:
        """Put the parts of a request into the queue. Return, by the numbers of the parts, their jobs, and the outcomes
        of those without one; and the form in which the answer's tensors shall travel."""
        try:
            parts, compression = jobs_of_untrusted(
                request, self._experts, max_rows=self._max_rows, backward=kind == "backward"
            )
        except CallRefused:
            self._recorder.does_not_fit(kind)
            raise
        jobs: dict[int, Job] = {}
        ready: list[tuple[int, Outcome]] = []
        for number, part in enumerate(parts):
            if isinstance(part, CallRefused):
                self._recorder.does_not_fit(kind)
                ready.append((number, part))
                continue
            try:
                jobs[number] = self._submitted(part)
            except CallFailed as error:
                self._recorder.ended(kind, part.uid, error)
                ready.append((number, error))
        return jobs, ready, compression

    def _submitted(self, job: Job) -> Job:
        """Put a job into the queue and return it, or the job of the same part if it was asked before."""
        replay_key = job.replay_key
        if replay_key is not None and (known := self._remembered.find(replay_key)) is not None:
            self.counts["replayed"] += 1
            return known
        if replay_key in self._backends[job.uid].learnt_from:
            self.counts["replayed"] += 1
            raise learnt_before(job.uid)
        if self.is_leaving:
            raise CallRefused("this node is leaving the swarm")
        try:
            self._runner.submit(job)
        except QueueFull as full:
            self.counts["busy"] += 1
            # When half of what waits will be done.
            raise PeerBusy(f"the node is busy: {full}", retry_after_s=full.waiting_s / 2) from full
        self.counts[job.kind] += 1
        if replay_key is not None:
            self._remembered.remember(replay_key, job)
        return job


def uid_of(body: Body, experts: Mapping[str, Expert]) -> str:
    """The expert that a body names. Raises CallRefused if it names none, or one that this node does not serve."""
    uid = body.get("uid")
    if not isinstance(uid, str):
        raise CallRefused(f"expected the uid of an expert as a string, got {uid!r:.80}")
    if uid not in experts:
        served = ", ".join(list(experts)[:4]) + (", ..." if len(experts) > 4 else "")
        raise CallRefused(f"unknown expert {uid[:80]!r}: this node serves {len(experts)} experts ({served})")
    return uid


def jobs_of_untrusted(
    request: Request, experts: Mapping[str, Expert], *, max_rows: int, backward: bool
) -> tuple[list[Job | CallRefused], Compression]:
    """Check each part of a request against its expert's specification. Return the parts in their order, with what was
    expected in place of one that does not fit, and the form in which the answer's float32 tensors shall travel. Raises
    CallRefused if the request as a whole does not fit."""
    try:
        parts = parts_of_untrusted(request)
        seed = _SEED.of_untrusted(request.body, "dropout_seed")
    except RemoteProtocolError as error:
        raise CallRefused(str(error)) from error
    compression = _compression_of(request.body)
    looks = not all(map(is_finite, request.tensors[1:]))
    jobs: list[Job | CallRefused] = []
    for part in parts:
        try:
            expert = experts[uid_of(part[0], experts)]
            jobs.append(_job_of_untrusted(request, part, expert, seed, max_rows, backward=backward, looks=looks))
        except CallRefused as refused:
            jobs.append(refused)
    return jobs, compression


def _job_of_untrusted(
    request: Request, part: RequestPart, expert: Expert, seed: int | None, max_rows: int, *, backward: bool, looks: bool
) -> Job:
    """The job of a part; with `looks` some number of the whole request is not finite."""
    described, pairs, rows = part
    uid, num_rows = described["uid"], pairs.stop - pairs.start
    who = f"expert {uid}"
    if not 1 <= num_rows <= max_rows:
        message = f"{who}: expected 1 to {max_rows} rows in a part of a request, got {num_rows}"
        raise TooManyRows(message, max_rows=max_rows) if num_rows else CallRefused(message)
    index, *tensors = request.tensors
    names = [f"input {spec.name!r}" for spec in expert.inputs]
    if backward:
        names.append(f"gradient of {expert.output.name}")
    if len(tensors) != len(names):
        listed = f"{len(names)} tensors ({', '.join(names)}) after the index"
        raise CallRefused(f"{who}: expected {listed}, got {len(tensors)}")
    own = []
    for number, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
        if number < len(expert.inputs):
            _check_tensor(who, name, expert.inputs[number], tensor, rows=len(tensors[0]))
            own.append(tensor[rows])
        else:
            _check_tensor(who, name, expert.output, tensor, rows=len(index))
            own.append(tensor[pairs])
    for name, array in zip(names, own, strict=True) if looks else ():
        if not is_finite(array):
            raise CallRefused(f"{who}: expected finite numbers in {name}, got NaN or infinity")
    keys = row_keys_of_seed(seed, num_rows) if seed is not None and expert.takes_key else None
    if not backward:
        return Job(uid=uid, inputs=tuple(own), keys=keys)
    try:
        request_id = _REQUEST_ID.of_untrusted(described, "id")
        seen = _SEEN.of_untrusted(described, "seen")
    except RemoteProtocolError as error:
        raise CallRefused(f"{who}: {error}") from error
    return Job(
        uid=uid,
        inputs=tuple(own[:-1]),
        output_grads=own[-1],
        keys=keys,
        seen=NOT_STALE if seen is None else seen,  # of a peer that does not know of staleness nothing is stale
        replay_key=name_of(request.peer_id.raw, uid, request_id),
    )


def _compression_of(body: Body) -> Compression:
    if "compression" not in body:
        return Compression.NONE
    name = body["compression"]
    if not isinstance(name, str) or name not in COMPRESSIONS:
        raise CallRefused(f"expected a compression among {', '.join(COMPRESSIONS)}, or none at all, got {name!r:.80}")
    return COMPRESSIONS[name]


def _check_tensor(who: str, what: str, spec: TensorSpec, tensor: Array, *, rows: int) -> None:
    if tensor.shape != (rows, *spec.shape) or tensor.dtype != np.dtype(spec.dtype):
        expected = f"{spec.dtype}[{', '.join(map(str, ('rows', *spec.shape)))}] with {rows} rows"
        raise CallRefused(f"{who}: expected {what} as {expected}, got {tensor.dtype}{list(tensor.shape)}")
