"""Several batches in one turn of the device.

The way to the device's thread and back costs about as much as a small batch. So a turn takes as many batches, of
different experts, as are worth it: XLA begins them all, and only then the thread waits for the first. How long a batch
takes is known from those of its size before it; one of an unknown size ends its turn.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dmoe_jax.node.backend import Batch, ExpertBackend, begin_together, stack_of
from dmoe_jax.node.job import Job
from dmoe_jax.node.strategies.grouping import Piece, grouped
from dmoe_jax.node.strategies.store import warm_bucket_of
from net.types import Array

Jobs = Sequence[Job]
"""Of one batch, so all of one expert; at least one."""
Backends = Mapping[str, ExpertBackend]
"""The experts by uid."""

_NEWEST = 0.2
"""Weight of the newest time in the mean: of the last five, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of the batches that shared a program.

    Attributes:
      results: of each batch, its arrays or why its update was rejected; none if the program failed.
      error: why it failed; None: it did not.
      seconds: its share of the turn.
    """

    results: Sequence[Any] = ()
    error: Exception | None = None
    seconds: float


def run_turn(groups: Sequence[Sequence[Jobs]], backends: Backends, clock: Callable[[], float]) -> list[Outcome]:
    """Begin all programs, then wait for one after the other. What one of them raises concerns that one alone.

    The seconds of a program, by `clock`, are those from the end of the one before it: their sum is that of the turn.

    Args:
      groups: the batches that share a program.
      backends: the experts.
      clock: seconds.
    """
    before = clock()
    begun = [_tried(lambda group=group: _begin(group, backends)) for group in groups]
    outcomes = []
    for each in begun:
        results = each if isinstance(each, Exception) else _tried(each)
        now = clock()
        if isinstance(results, Exception):
            outcomes.append(Outcome(error=results, seconds=now - before))
        else:
            outcomes.append(Outcome(results=results, seconds=now - before))
        before = now
    return outcomes


class BatchTimes:
    """Seconds that batches take, by what decides it: a mean in which older ones fade."""

    def __init__(self) -> None:
        self._seconds: dict[Hashable, float] = {}

    def expected_s(self, kind: Hashable) -> float:
        """Seconds that a batch of this kind will take; infinite if there was none."""
        return self._seconds.get(kind, math.inf)

    def note(self, kind: Hashable, seconds: float) -> None:
        """A batch of this kind took so long."""
        before = self._seconds.get(kind, seconds)
        self._seconds[kind] = before + _NEWEST * (seconds - before)


def groups_of(turn: Sequence[Jobs], backends: Backends) -> list[list[Jobs]]:
    """The batches of a turn, those together that share a program: of one stack and one kind of call."""
    pieces = []
    for jobs in turn:
        backend, (_, *kind) = backend_of(jobs, backends), jobs[0].key
        stack = stack_of(backend)
        key = None if stack is None else (id(stack), *kind)
        pieces.append(Piece(key, warm_bucket_of(rows_of(jobs), backend.programs)))

    def most_together(position: int, bucket: int) -> int:
        stack = stack_of(backend_of(turn[position], backends))
        return 1 if stack is None else stack.most_together(bucket)

    return [[turn[position] for position in group] for group in grouped(pieces, most_together)]


def backend_of(jobs: Jobs, backends: Backends) -> ExpertBackend:
    """Their expert."""
    return backends[jobs[0].request.uid]


def rows_of(jobs: Jobs) -> int:
    """Rows of all of them."""
    return sum(job.rows for job in jobs)


def joined(jobs: Jobs) -> Batch:
    """The rows of all jobs."""
    parts = [job.request for job in jobs]
    inputs = tuple(below_one_another(arrays) for arrays in zip(*(part.inputs for part in parts), strict=True))
    grads = [part.output_grads for part in parts if part.output_grads is not None]
    keys = [part.keys for part in parts if part.keys is not None]
    return Batch(
        inputs=inputs,
        output_grads=below_one_another(grads) if grads else None,
        keys=below_one_another(keys) if keys else None,
        # Not how stale they are: until the device has time for them, other batches may step the expert.
        seen=np.repeat([part.seen for part in parts], [part.rows for part in parts]),
        # By which an expert remembers that it has learnt from these requests.
        requests={job.replay_key: job.arrived_at for job in jobs if job.replay_key is not None},
    )


def below_one_another(arrays: Sequence[Array]) -> Array:
    """The requests' rows in one array; a single request is used as it came, without a copy."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _begin(group: Sequence[Jobs], backends: Backends) -> Callable[[], Sequence[tuple[Array, ...] | Exception]]:
    return begin_together([(backend_of(jobs, backends), joined(jobs)) for jobs in group])


def _tried(function: Callable[[], Any]) -> Any:
    """What a function returns, or the exception that it raised."""
    try:
        return function()
    except Exception as error:
        return error
