"""A part of a request on its way through a node."""

from collections.abc import Callable

import trio

from dmoe_jax.expert_calls import Answer
from dmoe_jax.node.requests import ExpertRequest
from net.errors import CallFailed
from net.types import Array


class Job:
    """A part of a request on its way through the queue and the device.

    Attributes:
      uid: the expert.
      kind: "forward" or "backward".
      key: jobs of equal keys run together: (uid, kind, whether rows have dropout keys).
      rows: how many it brings.
      expected_s: seconds of the device that they will take, as far as that is known.
      replay_key: names a backward request, who asked it and of which expert; None: it may be asked once only.
      request: what was asked; gone when it is answered, so that a remembered job (replay) keeps its reply alone.
      waiters: of the calls that want the answer, each called when there is one.
      is_done: there is an answer: `results` and the expert's count of `updates`, or an `error`.
      arrived_at: when it came, by trio's clock.
    """

    __slots__ = (
        "arrived_at",
        "error",
        "expected_s",
        "is_done",
        "key",
        "kind",
        "replay_key",
        "request",
        "results",
        "rows",
        "uid",
        "updates",
        "waiters",
    )

    def __init__(self, request: ExpertRequest, replay_key: bytes | None = None) -> None:
        self.request = request
        self.replay_key = replay_key
        self.uid = request.uid
        self.kind = "forward" if request.output_grads is None else "backward"
        self.key = (self.uid, self.kind, request.keys is not None)
        self.rows = request.rows
        self.expected_s = 0.0
        self.waiters: list[Callable[[], None]] = []
        self.arrived_at = trio.current_time()
        self.is_done = False
        self.results: tuple[Array, ...] = ()
        self.updates = 0
        self.error: CallFailed | None = None

    def answer(self, results: tuple[Array, ...], updates: int) -> None:
        """It was computed."""
        if self.replay_key is not None:  # it may be remembered: without what else was computed with it
            results = tuple(map(_own, results))
        self.results, self.updates = results, updates
        self._end()

    def fail(self, error: CallFailed) -> None:
        """It was not, or changed nothing."""
        self.error = error
        self._end()

    def outcome(self) -> Answer | CallFailed:
        """What became of it; of one that is done."""
        return self.error or Answer(updates=self.updates, tensors=self.results)

    def _end(self) -> None:
        self.is_done = True
        del self.request
        waiters, self.waiters = self.waiters, []
        for tell in waiters:
            tell()


def _own(array: Array) -> Array:
    """An array that keeps little more in memory than itself."""
    held = getattr(array.base, "nbytes", array.nbytes)
    return array if held <= 1.25 * array.nbytes else array.copy()
