"""Which strategy suits a kind of expert on a device: what rules stacking out, and otherwise what a measurement says."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax.device import threads_that_begin
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.programs import own_copies
from dmoe_jax.node.strategies.buckets import bucket_of
from dmoe_jax.node.strategies.programs import Form
from dmoe_jax.node.strategies.stack import Stack, StackedBatch, StackedStore, form_for, most_in_program, why_not_alike
from dmoe_jax.node.strategies.store import SingleStore, State
from dmoe_jax.node.turns import Program, raise_failed, run_turn

Strategy = Literal["single", "stacked"]

TYPICAL_ROWS = 16
TYPICAL_EXPERTS = 8
"""A turn of a busy node: so many experts, each with a batch of so many rows; fewer if the node has or warms fewer."""
MOST_TRIED_BYTES = 256 << 20
"""Of states that are made to measure with, and freed again. Whose eight experts have more gains nothing by sharing a
program: XLA takes longer for one of them than to start."""
_MARGIN = 0.9
"""Of the time of `single`, which `stacked` must be below: it copies each state out and in, which other work slows."""
_WORTH_S = 5e-3
"""Of a batch of a single expert, beyond which the start of its program is nothing and `stacked` is not tried: it would
have to be compiled."""
_MIN_TURNS, _MAX_TURNS, _ENOUGH_S = 5, 21, 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Medians of a turn of backward passes with updates."""

    experts: int
    """Experts of the turn."""
    rows: int
    """Rows of each one's batch."""
    single_s: float
    """Seconds with a program for each."""
    stacked_s: float | None
    """Seconds with one for all; None: it was not tried, since a batch takes so long that nothing would be gained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How the experts of one kind are run in one place."""

    strategy: Strategy
    """Which."""
    why: str
    """The reason, in a sentence without its stop."""
    measured: Measured | None = None
    """What was measured, if anything."""


def kinds_of(backends: Mapping[str, ExpertBackend]) -> list[list[str]]:
    """The uids of the experts that could share a stack: of one kind, optimiser and place. In the order of the first."""
    kinds: dict[tuple[int, int], list[str]] = {}
    for uid, backend in backends.items():
        kinds.setdefault((backend.place.number, id(backend.programs)), []).append(uid)
    return list(kinds.values())


def why_single(backends: Sequence[ExpertBackend], *, may_adopt: bool) -> str:
    """Why experts of one kind in one place cannot be stacked; empty: they can.

    Args:
      may_adopt: experts come and go while the node serves.
    """
    first = backends[0]
    if first.place.tell is not None:
        return "the node is several processes"
    if first.place.layout is not None and first.place.layout.mesh_shape.num_devices > 1:
        return f"they lie on a mesh, {first.place.layout.mesh_shape}"
    if may_adopt:
        return "experts that a node claims come and go, and a stack cannot grow while it serves"
    if len(backends) == 1:
        return "there is only one of them here"
    return why_not_alike([backend.store.read() for backend in backends if isinstance(backend.store, SingleStore)])


def chosen_by(measured: Measured) -> Choice:
    """The faster one, as far as the difference is more than nothing."""
    turn = f"{measured.experts} experts with {measured.rows} rows each take"
    single = f"{1e3 * measured.single_s:.3g} ms by programs of their own"
    if measured.stacked_s is None:
        why = f"{turn} {single}, beside which starting these is little"
        return Choice(strategy="single", why=why, measured=measured)
    why = f"{turn} {single}, {1e3 * measured.stacked_s:.3g} ms by one program"
    is_faster = measured.stacked_s < _MARGIN * measured.single_s
    return Choice(strategy="stacked" if is_faster else "single", why=why, measured=measured)


def measure(backend: ExpertBackend, *, experts: int, rows: int, clock: Callable[[], float]) -> Measured | None:
    """Time both strategies in turn, on states of their own; blocks.

    Args:
      backend: one expert of the kind, in the place.
      experts, rows: of a turn.
      clock: seconds.

    Returns: None if batches of so many rows are too large to share a program.
    """
    together = most_in_program(backend.expert, experts, bucket_of(rows), form_for(backend.place))
    if together == 1:
        return None
    together = min(together, experts)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), backend.params)
    backend.warm_up_bucket(bucket_of(rows))
    stores = [SingleStore(backend.expert, backend.optimizer, zeros, backend.place) for _ in range(together)]
    specs = (*backend.expert.inputs, backend.expert.output)
    *inputs, grads = (np.zeros((rows, *spec.shape), jnp.dtype(spec.dtype)) for spec in specs)

    singles = [
        Program(partial(store.begin_backward, tuple(inputs), grads, None, 0.0), store.programs.may_overlap)
        for store in stores
    ]
    (times,) = _timed([singles], clock)
    # The least: other processes compile at the same time, and a small expert must not be taken for a large one.
    if min(times) > together * _WORTH_S:
        return Measured(experts=together, rows=rows, single_s=statistics.median(times), stacked_s=None)
    copies: list[State] = [own_copies(store.read()) for store in stores]
    stack = Stack(backend.expert, backend.optimizer, copies, backend.place)
    batches = [StackedBatch(index=i, inputs=tuple(inputs), output_grads=grads) for i in range(together)]

    def begin_stacked() -> Callable[[], Sequence[Any]]:
        finishes = stack.begin_backward(batches)
        return lambda: [finish() for finish in finishes]

    stacked = [Program(begin_stacked, stack.programs.may_overlap)]
    single_s, stacked_s = map(statistics.median, _timed([singles, stacked], clock))
    return Measured(experts=together, rows=rows, single_s=single_s, stacked_s=stacked_s)


def stack_up(backends: Sequence[ExpertBackend], form: Form | None = None) -> None:
    """Move experts into one stack, see `Stack`, while none of their batches runs; blocks."""
    states = [backend.store.take() for backend in backends if isinstance(backend.store, SingleStore)]
    stack = Stack(backends[0].expert, backends[0].optimizer, states, backends[0].place, form=form)
    for index, backend in enumerate(backends):
        backend.store = StackedStore(stack, index)


def _timed(turns: Sequence[Sequence[Program]], clock: Callable[[], float]) -> list[list[float]]:
    """The seconds of each, again and again: they alternate, after one round that does not count, since it compiles."""
    times: list[list[float]] = [[] for _ in turns]
    for turn in turns:
        _take(turn)
    while len(times[0]) < _MIN_TURNS or (len(times[0]) < _MAX_TURNS and sum(map(sum, times)) < _ENOUGH_S):
        for turn, own in zip(turns, times, strict=True):
            started = clock()
            _take(turn)
            own.append(clock() - started)
    return times


def _take(turn: Sequence[Program]) -> None:
    """One turn, as the node will take it."""
    raise_failed(run_turn(turn, lambda: 0.0, threads_that_begin()))  # Nobody asks how long each program took.
