"""What one program is given and returns, and the numbers of rows for which there are programs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from dmoe_jax.types import PyTree
from net.types import Array

State = tuple[PyTree, PyTree]
"""Parameters and optimiser state, of one expert or of all experts of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one expert is to compute at once."""

    inputs: tuple[Array, ...]
    """As the expert specifies them, each [rows, ...]."""
    output_grads: Array | None = None
    """[rows, ...]; None: a forward pass."""
    keys: Array | None = None
    """uint32 [rows, 2], a dropout key for each row; None: evaluation."""
    seen: Array | None = None
    """int64 [rows], the update count at each row's forward, at least 0. The optimiser is told the rows' mean staleness;
    counts beyond today's, of an expert that was restored since, have none. None: nothing is stale."""
    requests: Mapping[bytes, float] = field(default_factory=dict)
    """Names of the requests in a backward pass, and when they came, by one clock for all."""

    @property
    def rows(self) -> int:
        """Their number."""
        return self.inputs[0].shape[0]


class Work(NamedTuple):
    """A batch for one expert of a group.

    Attributes:
      position: which expert; each at most once in a program.
      batch: of all in a program forward passes, or of all backward ones; all have dropout keys, or none has.
      staleness: for the optimiser.
    """

    position: int
    batch: Batch
    staleness: float = 0.0


class Result(NamedTuple):
    """What became of a batch.

    Attributes:
      arrays: the output, or the gradients of the differentiable inputs; each [rows, ...].
      finite: bool [2], of a backward pass: the update, and the gradients. If one is not, the expert is as it was.
    """

    arrays: tuple[Array, ...]
    finite: Array | None = None


@runtime_checkable
class Programs(Protocol):
    """The compiled programs of a group of experts of one kind. They hold no state: equal groups may share them."""

    size: int
    """Experts of a group."""
    nbytes: int
    """Bytes of the state of one of them, all parts together."""
    least_rows: int
    """For fewer rows than these no program is worth its memory."""
    at_once: bool
    """True if what a program does takes about as long for many experts as for one."""
    warm: set[int]
    """Numbers of rows for which they are compiled."""
    kind: int
    """Equal where the compiled programs are the same."""

    @property
    def calls_host(self) -> bool:
        """True if one of those that are compiled calls the host: see `dmoe_jax.node.host_calls`."""
        ...

    def most_together(self, rows: int) -> int:
        """The most experts of a program for so many rows of each."""
        ...

    def compile(self, bucket: int) -> None:
        """Compile for batches of so many rows, from shapes; may run beside the device."""
        ...

    def begin(self, state: State, work: Sequence[Work]) -> tuple[State, Callable[[], list[Result]]]:
        """Have XLA begin batches; the new state, for what is begun next, and what waits for the results.

        The state that is given is lost where updates are made."""
        ...

    def read(self, state: State, index: int) -> State:
        """The state of one expert, valid until the next update."""
        ...

    def write(self, state: State, index: int, saved: State) -> State:
        """The state with that of one expert replaced by a saved one, laid out over devices as the present one is."""
        ...


def bucket_of(rows: int, parts: int = 1) -> int:
    """Programs are compiled for these numbers of rows: the next power of two, of rows in each of so many parts."""
    if rows < 1:
        raise ValueError(f"a batch has at least one row, got {rows}")
    return parts << (math.ceil(rows / parts) - 1).bit_length()


def buckets_up_to(max_rows: int, parts: int = 1) -> tuple[int, ...]:
    """Every bucket that batches of 1..max_rows rows can fall into, ascending."""
    return tuple(parts << power for power in range((bucket_of(max_rows, parts) // parts).bit_length()))


def warm_bucket_of(rows: int, programs: Programs, parts: int = 1) -> int:
    """Rows of the program that so many are computed by: the smallest that is compiled; if none is, their bucket."""
    warm = (bucket for bucket in tuple(programs.warm) if bucket >= rows)
    return min(warm, default=bucket_of(rows, parts))
