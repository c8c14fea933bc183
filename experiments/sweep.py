"""Sweeps: many trainings, seeds by settings, through an executor of `concurrent.futures` wherever it computes them.

What a training finds is a function of its settings and its seed. The sweeping process alone keeps what they return; a
training that keeps a run folder of its own goes on in it.
"""

import traceback
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field
from typing import Any

from dmoe_jax.runs.endings import one_line
from experiments.processes import HelperFailed

Kin = tuple[Hashable, ...]

ATTEMPTS = 3
"""Times that a training is begun which is lost with its worker each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One training.

    Attributes:
      key: its name, which no other of the sweep has.
      call: computes it; can be pickled.
      kin: what it shares with others, the dearest first, such as a compiled program: better computed by one process.
    """

    key: str
    call: Callable[[], Any]
    kin: Kin = ()


Answer = dict[str, Any]
"""Outcome of a task: its "value"; "failure", a line of text; or "lost", a line that says how its process ended."""


def compute(task: Task) -> Answer:
    """Compute a task in this process. What it raises is shown here, where its traceback is."""
    try:
        return {"value": task.call()}
    except Exception as error:
        traceback.print_exc()
        return {"failure": f"{type(error).__name__}: {one_line(error)}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An executor that computes tasks.

    Attributes:
      executor: takes `run` with a task.
      run: returns the answer.
      lost: errors of a future whose worker is gone.
      at_once: tasks that the executor is handed at a time; None for all.
      begun: task -> how often it was begun, of an executor that itself begins tasks again.
    """

    executor: Executor
    run: Callable[[Task], Answer] = compute
    lost: tuple[type[BaseException], ...] = ()
    at_once: int | None = None
    begun: Counter[str] = field(default_factory=Counter)


def completed(engine: Engine, tasks: Iterable[Task], tell: Callable[[str], object]) -> Iterator[tuple[Task, Any]]:
    """Compute tasks; yield each with its value as it ends. Those lost with a worker are begun again, and it is told.

    Raises:
      HelperFailed: at once for a task that failed; after all others for those that were lost `ATTEMPTS` times.
    """
    waiting, running, given_up = deque(tasks), dict[Future[Answer], Task](), list[str]()
    attempts = Counter[str]()
    while waiting or running:
        while waiting and (engine.at_once is None or len(running) < engine.at_once):
            task = waiting.popleft()
            attempts[task.key] += 1
            running[engine.executor.submit(engine.run, task)] = task
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            task = running.pop(future)
            try:
                found = future.result()
            except engine.lost as error:
                found = {"lost": one_line(error)}
            if "value" in found:
                yield task, found["value"]
            elif "failure" in found:
                raise HelperFailed(f"{task.key}: {found['failure']}")
            elif (number := max(attempts[task.key], engine.begun[task.key])) < ATTEMPTS:
                tell(f"{task.key} was lost and is begun again, attempt {number + 1} of {ATTEMPTS}: {found['lost']}")
                waiting.append(task)
            else:
                given_up.append(f"{task.key} was lost {number} times: {found['lost']}")
    if given_up:
        raise HelperFailed("; ".join(given_up))
