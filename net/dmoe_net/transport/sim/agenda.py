"""Actions of a simulation at their times: one task, one heap, no task and no cancel scope for each delivery."""

import heapq
import math
from collections.abc import Callable
from typing import Any

import trio

_TOLERANCE = 1e-6
"""Fraction of a tick that is ignored. Sums of floats miss the tick they mean by less, and should stay on it."""


class Agenda:
    """Actions in order of (time, number of the entry), whoever entered them.

    Args:
      tick_s: times are rounded up to multiples of it, so that many actions share one turn of the event loop; 0 means
        exact times.
    """

    def __init__(self, *, tick_s: float) -> None:
        self._tick_s = tick_s
        self._actions: dict[float, list[tuple[Callable[..., None], tuple[Any, ...]]]] = {}
        self._times: list[float] = []  # heap of the keys of _actions
        self._scope: trio.CancelScope | None = None  # in which `run` sleeps

    def at(self, time_s: float, action: Callable[..., None], *args: Any) -> None:
        """Enter `action(*args)` for a time of trio's clock; one that has passed already means soon."""
        if self._tick_s:
            time_s = math.ceil(time_s / self._tick_s - _TOLERANCE) * self._tick_s
        actions = self._actions.get(time_s)
        if actions is not None:
            actions.append((action, args))
            return
        self._actions[time_s] = [(action, args)]
        heapq.heappush(self._times, time_s)
        if self._scope is not None and time_s < self._scope.deadline:
            self._scope.deadline = time_s

    def has_come(self, time_s: float) -> bool:
        """Return True if an action entered for `time_s` would run now."""
        return time_s <= trio.current_time() + self._tick_s * _TOLERANCE

    async def run(self) -> None:
        """Carry out actions for ever, all that are due in one go."""
        while True:
            with trio.CancelScope(deadline=self._times[0] if self._times else math.inf) as self._scope:
                await trio.sleep_forever()
            self._scope = None
            now = trio.current_time()
            while self._times and self._times[0] <= now:
                for action, args in self._actions.pop(heapq.heappop(self._times)):
                    action(*args)


class Waiter:
    """A place where one task waits until it is woken, or a callback in place of one. Waking nobody does nothing, so
    conditions are checked first."""

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | Callable[[], None] | None = None

    @property
    def is_waiting(self) -> bool:
        """True if somebody is there."""
        return self._task is not None

    def call(self, callback: Callable[[], None]) -> None:
        """Have the next `wake` call this, unless a task waits here by then."""
        self._task = callback

    async def wait(self) -> None:
        """Wait for `wake`; may also return for no reason.

        Raises:
          trio.BusyResourceError: another task waits here.
        """
        if isinstance(self._task, trio.lowlevel.Task):
            raise trio.BusyResourceError("another task is waiting here")
        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._leave)

    def wake(self) -> None:
        """Let the task go on, or call the callback."""
        task, self._task = self._task, None
        if isinstance(task, trio.lowlevel.Task):
            trio.lowlevel.reschedule(task)
        elif task is not None:
            task()

    def _leave(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED
