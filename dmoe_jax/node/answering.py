"""Forward and backward calls at a node: from a request to its jobs, and from their outcomes to the answer.

Theory of operation. A call is checked and becomes jobs while its frame is read, one for each expert that it asks, and
costs no task (`net.rpc.taskless`). Jobs that are done say so to the calls that want them; when the device's turn is
over one task hands out all that is new: the answer when nothing is missing, and to callers that take parts what is
ready ahead of the rest, when it has waited a moment for it. Each frame costs both ends as much as a small batch.

A repeated backward request finds the job of the first one and trains nothing a second time (`dmoe_jax.node.replay`).
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping

import trio

from dmoe_jax.expert_calls import BACKWARD, FORWARD, Answer, answer_of
from dmoe_jax.experts.base import Expert
from dmoe_jax.metrics.node import NodeRecorder
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.job import Job
from dmoe_jax.node.queue import QueueFull
from dmoe_jax.node.replay import ReplayCache, learnt_before, name_of
from dmoe_jax.node.requests import ExpertRequest, parse_request
from dmoe_jax.node.runner import BatchRunner
from net.errors import CallFailed, CallRefused, PeerBusy, RemoteFailure
from net.identity import PeerId
from net.rpc.base import Reply, Request
from net.rpc.taskless import Answer as Respond
from net.rpc.taskless import GiveUp, TasklessHandler
from net.wire.compression import Compression

logger = logging.getLogger(__name__)

_HOLD_S = 0.01
"""What is ready waits so long for the rest of its call: a few turns of small batches, less than a wide network takes.
Parts that take longer do not hold up the others."""


class Answering:
    """Answers forward and backward calls.

    Args:
      experts: which may be asked, by uid; a mapping that may change.
      backends: their states, and those of experts that are being given up.
      runner: computes.
      max_rows: of one part of a request.
      recorder: is told of every part and what became of it.
    """

    def __init__(
        self,
        experts: Mapping[str, Expert],
        backends: Mapping[str, ExpertBackend],
        runner: BatchRunner,
        *,
        max_rows: int,
        recorder: NodeRecorder,
    ) -> None:
        self.handlers = {
            FORWARD: TasklessHandler(functools.partial(self._begin, backward=False)),
            BACKWARD: TasklessHandler(functools.partial(self._begin, backward=True)),
        }
        """The RPC methods, see `dmoe_jax.expert_calls`."""
        self.counts = {"forward": 0, "backward": 0, "busy": 0, "replayed": 0}
        """Jobs by kind, and parts that were turned away or known."""
        self.is_leaving = False
        """Refuse what was not asked before."""
        self._experts = experts
        self._backends = backends
        self._runner = runner
        self._max_rows = max_rows
        self._recorder = recorder
        self._replays: ReplayCache[Job] = ReplayCache(is_finished=lambda job: job.is_done)
        self._calls: set[_Call] = set()  # accepted and not yet answered
        self._news: dict[_Call, None] = {}  # of these, those with jobs that are done
        self._held: dict[_Call, float] = {}  # of these, those with parts that are ready, and until when they wait
        self._has_news = trio.Event()
        self._answered_all = trio.Event()  # set, and replaced, when there is none left

    async def run(self) -> None:
        """Hand out what is done, for ever."""
        while True:
            with trio.move_on_at(next(iter(self._held.values()), math.inf)):
                await self._has_news.wait()
            self._has_news = trio.Event()
            news, self._news = self._news, {}
            now = trio.current_time()
            for call in news | {call: None for call, until in self._held.items() if until <= now}:
                try:
                    self._tell(call)
                except Exception:  # one call's trouble is not the others'
                    logger.exception("a %s call could not be answered", call.kind)
                    self._give_up(call)
                    call.respond(RemoteFailure("the node could not answer; its log says why"))

    async def answer_accepted(self) -> None:
        """Return when every call that was accepted is answered, or given up by its caller."""
        while self._calls:
            await self._answered_all.wait()

    def _begin(self, request: Request, respond: Respond, *, backward: bool) -> GiveUp:
        """Put the parts of a request into the queue. What is given up leaves it, but for what somebody else wants.

        Raises:
          CallRefused: the request as a whole does not fit.
        """
        kind = "backward" if backward else "forward"
        try:
            parsed, compression = parse_request(request, self._experts, max_rows=self._max_rows, backward=backward)
        except CallRefused:
            self._recorder.does_not_fit(kind)
            raise
        call = _Call(kind, compression=compression, respond=respond, send_partial=request.send_partial, note=self._note)
        for number, part in enumerate(parsed):
            if isinstance(part, CallRefused):
                self._recorder.does_not_fit(kind)
                call.ready.append((number, part))
                continue
            try:
                call.jobs[number] = self._job_of(part, request.peer_id)
            except CallFailed as error:
                self._recorder.ended(kind, part.uid, error)
                call.ready.append((number, error))
        for job in call.jobs.values():
            if not job.is_done:
                job.waiters.append(call.has_news)
        self._calls.add(call)
        self._tell(call)
        if call in self._held:
            self._has_news.set()  # for `run`, which does not know yet that there is somebody to wait for
        return functools.partial(self._give_up, call)

    def _note(self, call: "_Call") -> None:
        """A job of this call is done."""
        self._news[call] = None
        self._has_news.set()

    def _tell(self, call: "_Call") -> None:
        """Send what is ready: all of it if nothing is missing, else to who takes parts, if the rest is late."""
        if call not in self._calls:
            return  # it was given up meanwhile
        for number in [number for number, job in call.jobs.items() if job.is_done]:
            job = call.jobs.pop(number)
            outcome = job.outcome()
            self._recorder.ended(call.kind, job.uid, outcome if isinstance(outcome, CallFailed) else None)
            call.ready.append((number, outcome))
        if not call.jobs:
            self._forget(call)
            call.respond(answer_of(call.ready, call.compression))
        elif call.ready and call.send_partial is not None:
            now = trio.current_time()
            if self._held.setdefault(call, now + _HOLD_S) > now:
                return
            del self._held[call]
            if call.send_partial(answer_of(call.ready, call.compression)):
                call.ready = []

    def _give_up(self, call: "_Call") -> None:
        """Nobody waits for this call any more."""
        self._forget(call)
        for job in call.jobs.values():
            self._recorder.given_up(call.kind, job.uid)
            if job.is_done:
                continue
            job.waiters.remove(call.has_news)
            if not job.waiters and self._runner.withdraw(job) and job.replay_key is not None:
                self._replays.forget(job.replay_key)

    def _forget(self, call: "_Call") -> None:
        self._calls.discard(call)
        self._news.pop(call, None)
        self._held.pop(call, None)
        if not self._calls:
            self._answered_all.set()
            self._answered_all = trio.Event()

    def _job_of(self, part: ExpertRequest, peer_id: PeerId) -> Job:
        """The job that computes this part: a new one, or that of the same part if it was asked before.

        Raises:
          CallRefused: the node is leaving, or the expert has learnt from the request, whose answer is gone.
          PeerBusy: too much waits; half of it will be done when it is asked to retry.
        """
        replay_key = None if part.request_id is None else name_of(peer_id.raw, part.uid, part.request_id)
        if replay_key is not None and (known := self._replays.find(replay_key)) is not None:
            self.counts["replayed"] += 1
            return known
        if replay_key in self._backends[part.uid].learnt_from:
            self.counts["replayed"] += 1
            raise learnt_before(part.uid)
        if self.is_leaving:
            raise CallRefused("this node is leaving the swarm")
        job = Job(part, replay_key)
        try:
            self._runner.submit(job)
        except QueueFull as full:
            self.counts["busy"] += 1
            raise PeerBusy(f"the node is busy: {full}", retry_after_s=full.waiting_s / 2) from full
        self.counts[job.kind] += 1
        if replay_key is not None:
            self._replays.remember(replay_key, job, nbytes=sum(array.nbytes for array in part.inputs))
        return job


class _Call:
    """A call on its way.

    Attributes:
      kind: "forward" or "backward".
      compression: of the tensors in the answer.
      respond: gives the answer.
      send_partial: as of `net.rpc.base.Request`. The request itself is not kept: its tensors are the jobs'.
      note: is told of this call when one of its jobs is done.
      jobs: parts that wait, by their number in the request.
      ready: outcomes that the caller does not have yet.
    """

    __slots__ = ("compression", "jobs", "kind", "note", "ready", "respond", "send_partial")

    def __init__(
        self,
        kind: str,
        *,
        compression: Compression,
        respond: Respond,
        send_partial: Callable[[Reply], bool] | None,
        note: Callable[["_Call"], None],
    ) -> None:
        self.kind = kind
        self.compression = compression
        self.respond = respond
        self.send_partial = send_partial
        self.note = note
        self.jobs: dict[int, Job] = {}
        self.ready: list[tuple[int, Answer | CallFailed]] = []

    def has_news(self) -> None:
        """One of the jobs is done."""
        self.note(self)
