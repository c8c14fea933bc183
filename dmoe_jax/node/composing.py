"""What a turn of the device consists of: which batches share a program, and how the programs are begun."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from dmoe_jax.device import TwoSteps, one_at_a_time
from dmoe_jax.node.backend import Batch, ExpertBackend, begin_together, stack_of
from dmoe_jax.node.job import Job
from dmoe_jax.node.strategies.grouping import Piece, grouped
from dmoe_jax.node.strategies.store import warm_bucket_of
from dmoe_jax.node.turns import Outcome, Program, begin_turn, run_turn
from net.types import Array

T = TypeVar("T")

Jobs = Sequence[Job]
"""Of one batch, so all of one expert; at least one."""
Backends = Mapping[str, ExpertBackend]
"""The experts by uid."""


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


def turn_of(
    groups: Sequence[Sequence[Jobs]],
    backends: Backends,
    expected_s: Callable[[Sequence[Jobs]], float],
    *,
    clock: Callable[[], float],
    threads: int,
) -> Callable[[], list[Outcome]]:
    """What carries out a turn, to be given to a device; an outcome for each group.

    Args:
      groups: the batches that share a program.
      expected_s: says how long batches will take together, seconds.
      clock, threads: as of `run_turn`.
    """
    programs = [
        Program(functools.partial(_begin, group, backends), _may_overlap(group[0], backends), expected_s(group))
        for group in groups
    ]

    def whole_turn() -> list[Outcome]:
        return run_turn(programs, clock, threads)

    turn = [jobs for group in groups for jobs in group]
    if calls_host(turn, backends):
        return functools.partial(one_at_a_time, whole_turn)
    # Other programs may have to be begun by several threads, or wait before they begin.
    if all(stack_of(backend_of(jobs, backends)) is not None for jobs in turn):
        return TwoSteps(functools.partial(begin_turn, programs, clock))
    return whole_turn


def safely(function: Callable[..., T], jobs: Jobs, backends: Backends) -> Callable[..., T]:
    """The function that carries out a batch, or what has it wait until it may; of the same name, which costs go by."""
    if not calls_host([jobs], backends):
        return function
    return functools.update_wrapper(functools.partial(one_at_a_time, function), function)


def calls_host(turn: Sequence[Jobs], backends: Backends) -> bool:
    """Whether a program of these batches does, as far as is known."""
    return any(backend_of(jobs, backends).programs.calls_host for jobs in turn)


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


def _begin(group: Sequence[Jobs], backends: Backends) -> Callable[[], Sequence[tuple[Array, ...] | Exception]]:
    """Have XLA begin batches that share a program, or one that has its own."""
    return begin_together([(backend_of(jobs, backends), joined(jobs)) for jobs in group])


def _may_overlap(jobs: Jobs, backends: Backends) -> bool:
    """Whether the program of this batch may run at the same time as others."""
    backend = backend_of(jobs, backends)
    # What is not compiled yet may turn out to call the host; and several processes begin in one order.
    return bool(backend.programs.warm) and backend.programs.may_overlap and backend.place.tell is None
