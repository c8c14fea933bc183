"""Engines of sweeps: processes of this machine, and the clusters of Slurm, Dask and Ray, each an extra of its own.

On a cluster, too, every task is computed in a helper, a process of its own: it has its threads and its memory to
itself, and is gone with the worker that started it.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from dmoe_jax.machine.cores import usable_cores
from dmoe_jax.machine.xla_threads import VARIABLE, xla_threads
from dmoe_jax.runs.endings import mistakes_in_one_line
from experiments.bench import Run, SweepSettings
from experiments.processes import HelperFailed, HelperProcess, open_helpers
from experiments.sweep import Answer, Engine, Kin, Task, compute
from experiments.worker import MODULE, ask

_ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "TTY_COMPATIBLE": "0"}
"""Environment of helpers. For glibc: large arrays lie in pages of 2 MB where the system has them. A training of 256
experts takes three quarters of the time so, one of 4,096 half. Progress is told in lines: bars would be drawn over each
other."""

_POLL_S, _POLLS_GONE = 5.0, 3
"""Seconds between two looks at Slurm's queue, and looks that miss a job without a result until it counts as lost: a
file that another machine wrote may come late."""

_MINUTES = 240
"""Time limit of a Slurm job where SBATCH_TIMELIMIT names none; submitit must have one."""


@contextmanager
def open_engine(run: Run[Any], num_tasks: int, *, num_jobs: int | None = None) -> Iterator[Engine]:
    """Open the engine that the settings name, for so many tasks; what it computes ends with the block.

    Args:
      num_jobs: tasks at a time; None: as the settings say.

    Raises:
      UsageError: it cannot be reached. HelperFailed: a process of this machine did not start.
    """
    settings: SweepSettings = run.settings
    name, _, address = settings.on.partition(":")
    jobs = num_jobs or settings.num_jobs
    # The last bits of a result depend on the number of threads: not on who is free, or on how many tasks are left.
    own = max(usable_cores() // jobs, 1) if name == "here" else 1
    threads = xla_threads() if os.environ.get(VARIABLE) else own
    helper = {"command": sys.orig_argv, "folder": os.getcwd(), "threads": threads}
    options: dict[str, Any] = {"run": partial(compute_in_helper, helper=helper), "at_once": jobs}
    with ExitStack() as stack:
        with mistakes_in_one_line():
            if name == "here":
                jobs = min(jobs, num_tasks)
                helpers = Helpers([{**helper, "number": number, "jobs": jobs} for number in range(jobs)])
                engine = Engine(executor=stack.enter_context(helpers), lost=(HelperFailed,))
            elif name == "slurm":
                submitted = SlurmJobs(run.folder.path.absolute() / "slurm", cpus_per_task=threads)
                engine = Engine(executor=stack.enter_context(submitted), lost=(HelperFailed,), **options)
            elif name == "dask":
                engine = stack.enter_context(_open_dask(address or None, run.say, **options))
            else:
                from ray.exceptions import NodeDiedError, OutOfMemoryError, WorkerCrashedError

                lost = (NodeDiedError, OutOfMemoryError, WorkerCrashedError)
                calls = RayCalls(address or None, num_cpus=threads)
                engine = Engine(executor=stack.enter_context(calls), lost=lost, **options)
        yield engine


def compute_in_helper(task: Task, helper: Mapping[str, object]) -> Answer:
    """Compute a task in a helper of its own with these settings."""
    try:
        with open_helpers(MODULE, [helper], environment=_ENVIRONMENT) as (process,):
            return ask(process, partial(compute, task))
    except HelperFailed as error:
        return {"lost": str(error)}


class Helpers(Executor):
    """Processes of this machine, each with its share of the cores. One that has computed a task takes its kin first.

    Args:
      settings: of each helper.

    Raises:
      HelperFailed: one of them did not start. A call whose helper has ended has it, too; then there is another one.
    """

    def __init__(self, settings: Sequence[Mapping[str, object]]) -> None:
        self._settings, self._lock, self._stack, self._is_open = settings, Lock(), ExitStack(), True
        self._helpers = dict(enumerate(self._start(settings)))
        self._idle, self._last = list(range(len(settings))), dict[int, Kin]()
        self._waiting: list[tuple[Future[Any], Callable[[], Any], Kin]] = []
        self._threads = ThreadPoolExecutor(len(settings))

    def _start(self, settings: Sequence[Mapping[str, object]]) -> list[HelperProcess]:
        return self._stack.enter_context(open_helpers(MODULE, settings, environment=_ENVIRONMENT))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        kin = next((each.kin for each in args if isinstance(each, Task)), ())
        with self._lock:
            self._waiting.append((future, partial(fn, *args, **kwargs), kin))
        self._threads.submit(self._compute_next)
        return future

    def _compute_next(self) -> None:
        with self._lock:
            number = self._idle.pop()
            future, call, self._last[number] = self._waiting.pop(self._dearest(number))
        try:
            future.set_result(ask(self._helper(number), call))
        except Exception as error:
            self._helpers.pop(number, None)
            future.set_exception(error)
        with self._lock:
            self._idle.append(number)

    def _helper(self, number: int) -> HelperProcess:
        with self._lock:
            if not self._is_open:
                raise HelperFailed("the sweep is over")
            if number not in self._helpers:
                (self._helpers[number],) = self._start([self._settings[number]])
            return self._helpers[number]

    def _dearest(self, number: int) -> int:
        """Place of a call that shares most with the last one of a helper; else of one that shares nothing with those of
        the others; else of the first."""
        own, begun = self._last.get(number), {kin[:1] for kin in self._last.values()}

        def distance(place: int) -> tuple[bool, ...]:
            kin = self._waiting[place][2]
            return own is None or kin[:1] != own[:1], kin[:1] in begun, own is None or kin[1:] != own[1:]

        return min(range(len(self._waiting)), key=distance)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes at once, whatever they do."""
        with self._lock:
            self._is_open = False
            self._stack.close()
        self._threads.shutdown(cancel_futures=True)


class SlurmJobs(Executor):
    """Jobs of Slurm, which submitit submits.

    The queue tells which are lost: submitit would ask the accounting, which not every cluster keeps.
    """

    def __init__(self, folder: Path, *, cpus_per_task: object) -> None:
        from submitit import SlurmExecutor

        self._cluster = SlurmExecutor(folder)
        self._cluster.update_parameters(
            job_name="dmoe-sweep", time=_MINUTES, cpus_per_task=cpus_per_task, use_srun=False
        )
        self._jobs, self._closed = dict[Any, Future[Any]](), Event()
        self._watcher = Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs[self._cluster.submit(fn, *args, **kwargs)] = future
        return future

    def _watch(self) -> None:
        gone = Counter[str]()
        while not self._closed.wait(_POLL_S):
            words = ["squeue", "--me", "--noheader", "--format=%A"]
            queue = subprocess.run(words, capture_output=True, text=True, check=False)
            for job, future in list(self._jobs.items()):
                is_here = job.job_id in queue.stdout.split() or queue.returncode != 0
                gone[job.job_id] = 0 if is_here else gone[job.job_id] + 1
                try:
                    if job.paths.result_pickle.exists():
                        future.set_result(job.result())
                    elif gone[job.job_id] == _POLLS_GONE:
                        raise HelperFailed(f"job {job.job_id} ended without a result, see {job.paths.stderr}")
                    else:
                        continue
                except Exception as error:
                    future.set_exception(error)
                del self._jobs[job]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel the jobs that have not ended."""
        self._closed.set()
        self._watcher.join()
        for job in self._jobs:
            job.cancel(check=False)


@contextmanager
def _open_dask(
    address: str | None, tell: Callable[[str], object], *, run: Callable[[Task], Answer], at_once: int
) -> Iterator[Engine]:
    """Dask's cluster at an address; None for the one that its own configuration names, else for one on this machine.

    Dask itself begins again what is lost with a worker, some times. So each beginning is counted.
    """
    from distributed import Client, KilledWorker

    begun = Counter[str]()

    def count(event: tuple[float, str]) -> None:
        begun[event[1]] += 1
        if begun[event[1]] > 1:
            tell(f"{event[1]} is begun again: its worker was lost")

    with Client(address) as client:
        client.subscribe_topic(topic := f"dmoe-{client.id}", count)
        yield Engine(
            executor=client.get_executor(pure=False),
            run=partial(_begin_in_dask, topic=topic, run=run),
            lost=(KilledWorker,),
            at_once=at_once,
            begun=begun,
        )


def _begin_in_dask(task: Task, topic: str, run: Callable[[Task], Answer]) -> Answer:
    from distributed import get_worker

    get_worker().log_event(topic, task.key)
    return run(task)


class RayCalls(Executor):
    """Calls on the cluster of Ray at an address, None for one on this machine, as futures of this form."""

    def __init__(self, address: str | None, *, num_cpus: object) -> None:
        import ray

        ray.init(address=address)
        self._remote = ray.remote(max_retries=0, num_cpus=num_cpus)(lambda call: call())

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = self._remote.remote(partial(fn, *args, **kwargs)).future()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, which ends our calls."""
        import ray

        ray.shutdown()
