"""Several batches in one turn of the device: which of them share a program, and what becomes of each.

The way to the device's thread and back costs about as much as a small batch. So a turn takes as many batches, of
different experts, as are worth it: XLA begins them all, and only then the thread waits for the first.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dmoe_jax.node.backend import ExpertBackend, ExpertGroup, Outcome
from dmoe_jax.node.batch import Batch, warm_bucket_of
from dmoe_jax.node.job import Job
from net.types import Array

Jobs = Sequence[Job]
"""Of one batch, so all of one expert; at least one."""
Backends = Mapping[str, ExpertBackend]
"""The experts by uid."""

_FEW_ROWS = 16
"""Up to so many, what a batch costs is mostly the optimiser's step."""
_MOST_PADDING, _MOST_PADDING_OF_FEW = 2, 4
"""A batch is filled up to at most so many times its bucket."""


class Done(NamedTuple):
    """What became of a batch of a turn.

    Attributes:
      jobs: of the batch.
      outcome: its arrays, or why there are none.
      seconds: its share of the turn.
    """

    jobs: Jobs
    outcome: Outcome | Exception
    seconds: float


def run_turn(programs: Sequence[Sequence[Jobs]], backends: Backends, clock: Callable[[], float]) -> list[Done]:
    """Begin all programs, then wait for one after the other. What one of them raises concerns its batches alone.

    The seconds of a program, by `clock`, are those from the end of the one before it: their sum is that of the turn.

    Args:
      programs: the batches of each, see `sharing_programs`.
      backends: the experts.
      clock: seconds.
    """
    before = clock()

    def begin(batches: Sequence[Jobs]) -> Callable[[], list[Outcome]]:
        asked = [(backend_of(jobs, backends), joined(jobs)) for jobs in batches]
        return asked[0][0].group.begin(asked)

    begun = [_tried(begin, batches) for batches in programs]
    done: list[Done] = []
    for batches, wait in zip(programs, begun, strict=True):
        outcomes = wait if isinstance(wait, Exception) else _tried(wait)
        now = clock()
        share_s = (now - before) / len(batches)
        for number, jobs in enumerate(batches):
            done.append(Done(jobs, outcomes if isinstance(outcomes, Exception) else outcomes[number], share_s))
        before = now
    return done


def sharing_programs(turn: Sequence[Jobs], backends: Backends) -> list[list[Jobs]]:
    """The batches of a turn, those together that share a program: of one group of experts and one kind of call.

    Those of the most rows first, the others filled up to their bucket. The program of the first batch is the first.
    """
    kinds: dict[Hashable, list[tuple[int, int]]] = {}  # (bucket, position) of each batch
    for position, jobs in enumerate(turn):
        backend, (_, *kind) = backend_of(jobs, backends), jobs[0].key
        bucket = warm_bucket_of(rows_of(jobs), backend.programs)
        kinds.setdefault((id(backend.group), *kind), []).append((bucket, position))
    programs: list[list[int]] = []
    for batches in kinds.values():
        group = backend_of(turn[batches[0][1]], backends).group
        batches.sort(key=lambda batch: -batch[0])
        while batches:
            taken = batches[: _fitting([bucket for bucket, _ in batches], group)]
            del batches[: len(taken)]
            programs.append(sorted(position for _, position in taken))
    return [[turn[position] for position in program] for program in sorted(programs)]


def _fitting(buckets: Sequence[int], group: ExpertGroup) -> int:
    """The number of batches, of which the first has the most rows, that a program takes."""
    first = buckets[0]
    least = first // (_MOST_PADDING_OF_FEW if first <= _FEW_ROWS else _MOST_PADDING)
    return min(max(1, group.programs.most_together(first)), sum(bucket >= least for bucket in buckets))


def backend_of(jobs: Jobs, backends: Backends) -> ExpertBackend:
    """Their expert."""
    return backends[jobs[0].uid]


def rows_of(jobs: Jobs) -> int:
    """Rows of all of them."""
    return sum(job.rows for job in jobs)


def joined(jobs: Jobs) -> Batch:
    """The rows of all jobs."""
    inputs = tuple(below_one_another(arrays) for arrays in zip(*(job.inputs for job in jobs), strict=True))
    grads = [job.output_grads for job in jobs if job.output_grads is not None]
    keys = [job.keys for job in jobs if job.keys is not None]
    return Batch(
        inputs=inputs,
        output_grads=below_one_another(grads) if grads else None,
        keys=below_one_another(keys) if keys else None,
        # Not how stale they are: until the device has time for them, other batches may step the expert.
        seen=np.repeat([job.seen for job in jobs], [job.rows for job in jobs]),
        # By which an expert remembers that it has learnt from these requests.
        requests={job.replay_key: job.arrived_at for job in jobs if job.replay_key is not None},
    )


def below_one_another(arrays: Sequence[Array]) -> Array:
    """The requests' rows in one array; a single request is used as it came, without a copy."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _tried(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns, or the exception that it raised."""
    try:
        return function(*arguments)
    except Exception as error:
        return error
