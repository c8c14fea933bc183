"""Sweeps: what is kept, what is begun again, who computes what, and how they end."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dmoe_jax.runs.run_folder import RunFolder
from experiments import engines
from experiments.bench import Run, run_experiment
from experiments.compare_routers.settings import CompareRoutersSettings
from experiments.emulation import trials
from experiments.emulation.settings import TrialSettings
from experiments.emulation.trials import Trial, train_missing
from experiments.processes import HelperFailed
from experiments.sweep import ATTEMPTS, Answer, Engine, Task, completed, compute


def tasks_of(call: Callable[[str], object], *keys: str) -> list[Task]:
    return [Task(key=key, call=partial(call, key)) for key in keys]


class LosesSome:
    """Computes tasks, but for so many times at first those of some names: their worker is gone then."""

    def __init__(self, **times: int) -> None:
        self.left = Counter(times)

    def __call__(self, task: Task) -> Answer:
        if self.left[task.key] > 0:
            self.left[task.key] -= 1
            raise HelperFailed("a helper process ended too early")
        return compute(task)


def test_every_task_is_computed_once() -> None:
    """Each comes with its value, and no more than the engine takes at a time are handed to it."""
    most, running, lock = [0], [0], threading.Lock()

    def count(key: str) -> str:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        with lock:
            running[0] -= 1
        return key.upper()

    with ThreadPoolExecutor(8) as executor:
        engine = Engine(executor=executor, at_once=2)
        found = [(task.key, value) for task, value in completed(engine, tasks_of(count, *"abcdefg"), print)]
    assert sorted(found) == [(key, key.upper()) for key in "abcdefg"]
    assert 1 <= most[0] <= 2


def test_what_a_lost_worker_computed_is_begun_again() -> None:
    """It is told each time; the other tasks do not wait for it."""
    told: list[str] = []
    with ThreadPoolExecutor(1) as executor:
        engine = Engine(executor=executor, run=LosesSome(b=2), lost=(HelperFailed,))
        found = [task.key for task, _ in completed(engine, tasks_of(str, "a", "b", "c"), told.append)]
    assert found == ["a", "c", "b"]
    reason = "a helper process ended too early"
    assert told == [f"b was lost and is begun again, attempt {number} of {ATTEMPTS}: {reason}" for number in (2, 3)]


def test_attempts_are_bounded() -> None:
    """After the last one the others are still computed; then the sweep ends with those that were given up."""
    found: list[str] = []
    with ThreadPoolExecutor(1) as executor:
        run = LosesSome(a=99)
        engine = Engine(executor=executor, run=run, lost=(HelperFailed,))
        with pytest.raises(HelperFailed, match=rf"a was lost {ATTEMPTS} times: a helper process ended"):
            found.extend(task.key for task, _ in completed(engine, tasks_of(str, "a", "b"), lambda _: None))
    assert found == ["b"]
    assert run.left["a"] == 99 - ATTEMPTS


def test_an_executor_that_begins_tasks_again_counts_too() -> None:
    """Dask begins them again itself: what it gives up after as many times is not begun any more."""
    told: list[str] = []
    with ThreadPoolExecutor(1) as executor:
        engine = Engine(executor=executor, run=LosesSome(a=1), lost=(HelperFailed,), begun=Counter(a=ATTEMPTS))
        with pytest.raises(HelperFailed, match="a was lost 3 times"):
            list(completed(engine, tasks_of(str, "a"), told.append))
    assert told == []


def test_a_task_that_fails_ends_the_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    """Its error would come again wherever it runs: the line says which task, and where it ran is the traceback."""

    def fail(key: str) -> None:
        raise ZeroDivisionError("in the third step\nand more")

    failed = pytest.raises(HelperFailed, match=r"^a: ZeroDivisionError: in the third step$")
    with ThreadPoolExecutor(1) as executor, failed:
        list(completed(Engine(executor=executor), tasks_of(fail, "a"), print))
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_ends_a_sweep() -> None:
    """Whatever is computed at that time; what waits is never begun."""
    begun: list[str] = []
    is_over = threading.Event()

    def interrupt(key: str) -> None:
        begun.append(key)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        is_over.wait(60)

    with ThreadPoolExecutor(1) as executor:
        try:
            with pytest.raises(KeyboardInterrupt):
                list(completed(Engine(executor=executor, at_once=1), tasks_of(interrupt, "a", "b"), print))
        finally:
            is_over.set()
    assert begun == ["a"]


def trial(label: str, *, seed: int) -> Trial:
    return Trial(label=label, seed=seed, problem="mnist", sizes={}, num_trainers=1, num_updates=1)


def test_finished_trials_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted sweep has a record of each that has ended; gone on with, it trains the others alone."""
    trained: list[str] = []

    def train(one: Trial) -> dict[str, Any]:
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(str(one))
        return {"points": [{"step": 1, "loss": float(one.seed)}]}

    @contextmanager
    def open_engine(run: Run[Any], num_tasks: int, *, num_jobs: int | None) -> Iterator[Engine]:
        assert num_tasks == 6 - len(trained)
        with ThreadPoolExecutor(1) as executor:
            yield Engine(executor=executor, at_once=1)

    monkeypatch.setattr(trials, "open_engine", open_engine)
    monkeypatch.setattr(trials, "run_trial", train)
    settings = TrialSettings(seeds=3)
    folder = RunFolder.create(tmp_path / "run", settings, name="test")
    run = Run(settings=settings, folder=folder, console=Console(quiet=True))
    wanted = [trial(label, seed=seed) for label in ("a", "b") for seed in range(3)]
    with pytest.raises(KeyboardInterrupt):
        train_missing(run, wanted)
    assert [record["seed"] for record in run.records("trial")] == [0, 1]
    monkeypatch.setattr(trials, "run_trial", lambda one: trained.append(str(one)) or {"points": [{"loss": 0.0}]})
    train_missing(run, wanted)
    train_missing(run, wanted)
    assert trained == list(map(str, wanted))
    assert [(record["label"], record["seed"]) for record in run.records("trial")] == [
        (one.label, one.seed) for one in wanted
    ]


class FakeHelpers:
    """In the place of `open_helpers` and `ask`: helpers are numbers, and calls are computed by the asking thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = 0
        self.go_on = threading.Event()
        self.lost: set[str] = set()
        self.asked: list[tuple[int, str]] = []
        self.settings: list[Mapping[str, Any]] = []
        monkeypatch.setattr(engines, "open_helpers", self._open)
        monkeypatch.setattr(engines, "ask", self._ask)

    @contextmanager
    def _open(self, module: str, settings: Sequence[Mapping[str, Any]], **_: Any) -> Iterator[list[int]]:
        first, self.opened = self.opened, self.opened + len(settings)
        self.settings += settings
        yield list(range(first, self.opened))

    def _ask(self, helper: int, call: Any) -> Any:
        self.go_on.wait(60)
        (task,) = call.args
        self.asked.append((helper, task.key))
        if task.key in self.lost:
            self.lost.remove(task.key)
            raise HelperFailed("it was killed")
        return call()


def test_a_helper_prefers_the_kin_of_what_it_has_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same program first, of the same seed if there is one; then the same seed; else the first in order."""
    helpers = FakeHelpers(monkeypatch)
    kin = {"a0": ("a", 0), "b0": ("b", 0), "b1": ("b", 1), "a1": ("a", 1), "a0 too": ("a", 0)}
    with engines.Helpers([{}]) as executor:
        futures = [executor.submit(compute, Task(key=key, call=str, kin=own)) for key, own in kin.items()]
        helpers.go_on.set()
        assert [future.result(60) for future in futures] == [{"value": ""}] * 5
    assert [key for _, key in helpers.asked] == ["a0", "a0 too", "a1", "b1", "b0"]


def test_another_helper_takes_the_place_of_one_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that it had is lost; those that waited are computed."""
    helpers = FakeHelpers(monkeypatch)
    helpers.go_on.set()
    helpers.lost.add("a")
    with engines.Helpers([{}]) as executor:
        first = executor.submit(compute, Task(key="a", call=str))
        with pytest.raises(HelperFailed, match="it was killed"):
            first.result(60)
        assert executor.submit(compute, Task(key="b", call=str)).result(60) == {"value": ""}
    assert helpers.asked == [(0, "a"), (1, "b")]


def test_helpers_have_the_working_folder_of_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths, such as those of routers and run folders, lead from there."""
    helpers = FakeHelpers(monkeypatch)
    monkeypatch.chdir(tmp_path)
    settings = CompareRoutersSettings(jobs=2)
    run = Run(settings=settings, folder=RunFolder(tmp_path), console=Console(quiet=True))
    with engines.open_engine(run, 2):
        assert [each["folder"] for each in helpers.settings] == [str(tmp_path)] * 2


@pytest.mark.slow
def test_a_helper_works_in_the_folder_that_it_is_told(tmp_path: Path) -> None:
    """One that is missing on a worker's machine leaves it where it is."""
    task = Task(key="where", call=os.getcwd)
    assert engines.compute_in_helper(task, {"folder": str(tmp_path)}) == {"value": str(tmp_path)}
    root = str(Path(__file__).parents[2])
    assert engines.compute_in_helper(task, {"folder": str(tmp_path / "none")}) == {"value": root}


@pytest.mark.parametrize("on", ["moon", "here:8786", "slurm:cluster", "dask:", ""])
def test_an_unknown_engine_is_one_line(on: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_experiment(CompareRoutersSettings, args=["--on", on])
    assert ended.value.code == 2
    expected = "--on must be here, slurm, dask, dask:ADDRESS, ray or ray:ADDRESS, got"
    assert expected in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("on", "extra"), [("slurm", "slurm"), ("dask:host:8786", "dask"), ("ray", "ray")])
def test_a_missing_package_is_named(on: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what installs it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"--on {extra} needs the package .*: pip install 'dmoe_jax\[{extra}\]'"):
        CompareRoutersSettings(on=on)
