"""From an engine to a run: train, evaluate, save, report. The same for every engine.

A run that *pauses* is a row of stretches of `eval_every` updates with an evaluation and a checkpoint after each.
Whatever ends it early (Ctrl-C, a power cut, a loss of NaN), it goes on from its last pause, and then gives bit for bit
what it would have given without the break. Otherwise evaluations and checkpoints run *beside* the training, which never
waits for them; this needs an engine that runs under trio. The figures of the end, over whole texts, are no part of the
curve. Beside the newest checkpoints stays the one whose evaluation had the least loss (`best_step`).
"""

import math
import os
import shlex
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import trio

from dmoe_jax.arrays import PyTree, host_copy
from dmoe_jax.checkpoints import Checkpoints, numbers_in
from dmoe_jax.machine.disk import CheckpointError, reserve
from dmoe_jax.model import Evaluation
from dmoe_jax.runs.report import spoken, write_report
from dmoe_jax.runs.run_folder import FIGURE, REPORT, RunFolder, plain
from dmoe_jax.trainer import StepRecord, first_leaf
from dmoe_jax.training.balance import BalanceLog
from dmoe_jax.training.engine import Engine
from dmoe_jax.training.prepared_run import CHECKPOINT_FOLDER, PreparedRun, best_step, cut_metrics
from dmoe_jax.training.progress import TrainingProgress
from dmoe_jax.training.task import Task
from dmoe_net.errors import NetError

T = TypeVar("T")

Records = Callable[[], Iterable[tuple[str, Mapping[str, object]]]]
"""Further records for the metrics since the last call, as (kind, fields)."""

_ROOM_BYTES = 1 << 19
"""Room on the disk that is held from the beginning of a run, for its figure and report."""

_Taken = tuple[int, PyTree, dict[str, Any]]
"""A step with the state and the facts of its checkpoint."""

_SPLIT_NAMES = {"valid": "validation", "test": "test"}

_CALLS_PERIOD_S = 1.0
"""Seconds between two records of the totals of calls, beside the training."""

_LOAD_PERIOD_S = 10.0
"""Seconds between two records of the load of every expert, which are long lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Length of a run, and all that it does beside training."""

    steps: int
    """Updates of the whole run."""
    eval_every: int
    """Updates between two evaluations; in a run that pauses, between two pauses."""
    eval_items: int = 16_384
    """Tokens or samples of the evaluations on the way and after the last update, the same each time; 0 for all."""
    final_eval_items: int = 0
    """Tokens or samples of the final evaluations, which are no part of the curve; 0 for all."""
    pause: bool = False
    """True if training pauses to be evaluated and saved, and can then be resumed bit for bit; else it goes on."""
    checkpoint_every: int = 0
    """Updates between two checkpoints of a run that does not pause; 0 for one at the end only."""
    max_s: float = math.inf
    """Seconds after which a run that does not pause ends, even if there are steps left."""

    def __post_init__(self) -> None:
        for name in ("steps", "eval_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("eval_items", "final_eval_items", "checkpoint_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.pause and self.max_s < math.inf:
            raise ValueError(f"a run that pauses has no time limit, got max_s {self.max_s}")


async def train(
    engine: Engine,
    run: PreparedRun,
    plan: Plan,
    task: Task,
    progress: TrainingProgress,
    *,
    facts: Mapping[str, object] = MappingProxyType({}),
    records: Records = tuple,
    on_end: Callable[[dict[str, Any]], None] = lambda headline: None,
) -> dict[str, Any]:
    """Train to the end of the plan, from the folder's last checkpoint if it holds one, and return the headline.

    Also when it ends early or is cancelled, the folder has a figure and a report; one that does not pause has a
    checkpoint, too.

    Args:
      engine: at its beginning; it is moved on to the checkpoint here.
      run: from `prepare_run`. Nothing is written to its folder before the checkpoint has been read.
      plan: as it was, if a run that pauses is resumed.
      facts: beginning of the headline, such as the number of parameters.
      records: gives further records for the metrics since the last call.
      on_end: is given the headline, also that of a run that ended early.

    Raises:
      CheckpointError: the folder's checkpoint is of another model; or the last one could not be written, after the
        report. OSError: the folder cannot be written, or is another process's (`FolderInUse`).
      KeyboardInterrupt, FloatingPointError, RouterError, NetError: as the engine raised them, after the report, and
        perhaps in groups.
    """
    with progress, run.held() as run:
        state = _Ledger(engine, run, plan, task, progress, facts, records, on_end)
        try:
            if plan.pause:
                await _train_pausing(state)
            else:
                await _train_beside(state)
                await state.evaluate_first()
            await state.evaluate_finally()
            headline = state.finish(is_complete=True)
        except BaseException as error:
            state.end_early(error)
            raise
        finally:
            state.checkpoints.close()
        if state.unsaved:
            raise CheckpointError(f"{state.unsaved}; the end of the run is not saved, --resume goes on from before it")
        return headline


def training_figure(metrics: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw a run's figure. Raises ModuleNotFoundError without Matplotlib, an extra that takes a second to import."""
    from dmoe_jax.runs import figure

    figure.training_figure(metrics, path, title=title)


class _Stopwatch:
    """Seconds of training: what compiles first in a process, before the first step is done, is not counted."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.items = 0
        self._is_warm = self._is_running = False
        self._since: float | None = None

    def __enter__(self) -> None:
        self._is_running = True
        self._since = time.perf_counter() if self._is_warm else None

    def __exit__(self, *_: object) -> None:
        self.seconds, self._since, self._is_running = self.now(), None, False

    def step(self, items: int) -> None:
        if self._is_warm:
            self.items += items
        else:
            self._is_warm = True
            self._since = time.perf_counter() if self._is_running else None

    def now(self) -> float:
        return self.seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    @property
    def rate(self) -> float | None:
        """Items a second."""
        seconds = self.now()
        return self.items / seconds if seconds > 0 and self.items else None


class _Ledger:
    """A run under way: its parts, its records, and its end. The engine is moved on to its checkpoint first."""

    def __init__(
        self,
        engine: Engine,
        run: PreparedRun,
        plan: Plan,
        task: Task,
        progress: TrainingProgress,
        facts: Mapping[str, object],
        records: Records,
        on_end: Callable[[dict[str, Any]], None],
    ) -> None:
        self.engine, self.plan, self.task, self.progress = engine, plan, task, progress
        self._records, self._on_end = records, on_end
        self._facts = facts
        self.watch = _Stopwatch()
        self._step = self._items = self._staleness = self._lost_before = 0
        self._evaluations: dict[str, Evaluation] = {}
        self._evaluated_at: int | None = None
        self._baseline: Mapping[str, float] = {}
        run.check_meaning(task.meaning)
        self.unsaved = ""
        """Reason that the newest checkpoint could not be written; empty if it was."""
        self._unwritten = 0
        passed_over: list[str] = []
        size = self._restore(run, passed_over.append)
        if run.goes_on and run.path is not None:
            task.keep_in(run.path)  # refused before anything is written
        self.folder: RunFolder = run.begin()
        if not run.goes_on:
            task.keep_in(self.folder.path)
        self._room = self.folder.path / ".room"
        with suppress(OSError):
            reserve(self._room, _ROOM_BYTES)
        (self.folder.path / CHECKPOINT_FOLDER).mkdir(exist_ok=True)
        cut_metrics(self.folder, step=engine.step, size=size)
        # The curve tells which checkpoint is the best: a file that did could be left wrong by a killed process.
        self._curve: list[Mapping[str, Any]] = [each for each in self.folder.metrics() if each["kind"] == "eval"]
        self.checkpoints = Checkpoints(self.folder.path / CHECKPOINT_FOLDER, also_kept=self._best_of)
        self.totals = engine.totals()
        self.balance = BalanceLog(self.log, engine.layers, self.totals)
        self._calls_logged = (0, 0)
        progress.say(f"run folder: {self.folder.path}")
        progress.start_at(engine.step)
        for text in passed_over:
            progress.say(text)
            self.event("checkpoint_unusable", text)
        if engine.step:
            progress.say(f"{engine.name}: continuing from step {engine.step}")
            told = [record for record in self.folder.metrics() if record["kind"] == "baseline"]
            self._baseline = {name: value for name, value in (told or [{}])[-1].items() if name != "kind"}
        else:
            self._write("task", name=task.name, unit=task.unit, meaning=task.meaning)
            self._log_baseline(None)

    def _restore(self, run: PreparedRun, say: Callable[[str], object]) -> int | None:
        """Move the engine on to the last checkpoint, if there is one; return the size for `cut_metrics`."""
        if run.path is None or not run.has_checkpoint:
            return 0
        checkpoints = Checkpoints(run.path / CHECKPOINT_FOLDER, say=say)
        try:
            if checkpoints.latest_step() is None:
                return 0
            step, state, facts = checkpoints.restore_latest(self.engine.state())
        finally:
            checkpoints.close()
        try:
            self.engine.load(step, state, facts["engine"])
            self.watch.seconds, self.watch.items = facts["training_s"], facts["timed_items"]
            size: int | None = facts["metrics_size"]
        except KeyError as error:
            raise CheckpointError(f"checkpoint {step} in {run.path} is of another kind of run: no {error}") from error
        totals = self.engine.totals()
        self._step, self._items, self._staleness = self.engine.step, totals.items, totals.staleness
        self._lost_before = totals.steps_lost
        return size

    def on_step(self, record: StepRecord) -> None:
        self._step = max(self._step, record.step)  # trainers of one trunk may tell of their steps in another order
        self._items += record.items
        self._staleness += record.staleness
        self.watch.step(record.items)
        self.log("train", **asdict(record))
        self.progress.update(record.step, record.loss, self.watch.rate or 0.0, self.totals.failures)

    def on_lost(self, trainer: int, error: Exception) -> None:
        if not self.plan.pause:  # else they are counted, for the pause
            self.event("step_lost", f"trainer {trainer}: {error}")

    def log(self, kind: str, /, **fields: object) -> None:
        self._write(kind, **{"step": self.engine.step, "time_s": self.watch.now(), **fields})

    def _write(self, kind: str, /, **fields: object) -> None:
        """Write a record; one for which the disk has no room is counted, and the run goes on."""
        try:
            self.folder.log(kind, **fields)
        except OSError as error:
            if not self._unwritten:
                self.progress.say(f"metrics.jsonl cannot be written: {error.strerror}; the run goes on without")
            self._unwritten += 1

    def event(self, name: str, detail: str) -> None:
        """Write a record for the report."""
        self.log("event", name=name, detail=detail)

    def log_calls(self) -> None:
        """Write the totals of calls, if there are new ones; in a run that pauses, the steps that were lost too."""
        self.totals = totals = self.engine.totals()
        for kind, fields in self._records():
            self.log(kind, **fields)
        if (now := (totals.calls_ok, totals.calls_failed)) != self._calls_logged:
            self._calls_logged = now
            self.log("calls", ok=now[0], failed=now[1], failures=totals.failures)
        if self.plan.pause and totals.steps_lost > self._lost_before:
            self.event("steps_lost", f"{totals.steps_lost - self._lost_before} since the pause before")
            self._lost_before = totals.steps_lost

    async def evaluate_first(self) -> None:
        """Add a point to the curve: the first split, if there is any, always over the same words or samples."""
        for split in self.task.splits[:1]:
            await self._evaluate(split, self.plan.eval_items, kind="eval")

    async def evaluate_finally(self) -> None:
        """Evaluate all splits, right after the last point of the curve."""
        is_same = self.plan.final_eval_items == self.plan.eval_items
        for split in self.task.splits:
            done = self._evaluations.get(split) if is_same else None
            await self._evaluate(split, self.plan.final_eval_items, kind="final_eval", done=done)

    async def _evaluate(self, split: str, num_items: int, *, kind: str, done: Evaluation | None = None) -> None:
        step, items_seen, name = self.engine.step, self._items, _SPLIT_NAMES.get(split, split)
        if is_new := done is None:
            with self.progress.evaluation(f"{name} data") as on_batch:
                done = await self.engine.evaluate(split, max_items=num_items or None, on_batch=on_batch)
        self._evaluations[split], self._evaluated_at = done, step
        evaluation = done
        self.totals = self.engine.totals()  # its figures may tell of this evaluation
        figures = self.task.figures(evaluation)
        sizes = {"items": evaluation.items, "items_seen": items_seen}
        self.log(kind, step=step, split=split, **figures, **sizes, virtual_s=self.totals.virtual_s)
        if kind == "eval":
            self._curve.append({"kind": kind, "step": step, "split": split, **figures, **sizes})
            self._log_baseline(evaluation)
            if not self.plan.pause:
                self.balance.log(self.totals)
        shown = ", ".join(f"{key} {value:.4g}" for key, value in figures.items() if key != "loss" or len(figures) == 1)
        over = f"over {evaluation.items:,} {spoken(self.task.unit, self.task.meaning)}"
        if kind == "final_eval":
            self.progress.say(f"{self.engine.name}, final, {over}: {name} {shown}")
        elif is_new:
            self.progress.say(f"{self.engine.name}, step {step}: {name} {shown} ({over})")

    def _log_baseline(self, evaluation: Evaluation | None) -> None:
        baseline = self.task.baseline(evaluation)
        if baseline and baseline != self._baseline:
            self._baseline = baseline
            self._write("baseline", **baseline)

    def _best_of(self, steps: Collection[int]) -> Collection[int]:
        best = best_step(self._curve, steps)
        return () if best is None else (best,)

    def is_best(self, step: int) -> bool:
        """True if no checkpoint that is there was evaluated at a lower loss than this step."""
        return step in self._best_of({*numbers_in(self.folder.path / CHECKPOINT_FOLDER), step})

    def checkpoint_facts(self) -> dict[str, Any]:
        return {
            "engine": self.engine.facts(),
            "training_s": self.watch.now(),
            "timed_items": self.watch.items,
            "metrics_size": os.path.getsize(self.folder.metrics_path) if self.plan.pause else None,
        }

    def save_here(self) -> None:
        with self.saving():
            self.checkpoints.save(self.engine.step, host_copy(self.engine.state()), self.checkpoint_facts())

    async def save_snapshot(self) -> None:
        """Do as `save_here`, also for a state that several processes share, which take its copy together."""
        with self.saving():
            self.checkpoints.save(*await self.engine.snapshot(), self.checkpoint_facts())

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Make an event of a checkpoint that cannot be written in the block; the run goes on."""
        try:
            yield
        except (CheckpointError, OSError) as error:
            if not self.unsaved:
                self.progress.say(f"{error}; the run goes on")
            self.unsaved = str(error)
            self.event("checkpoint_lost", self.unsaved)
        else:
            self.unsaved = ""

    def end_early(self, error: BaseException) -> None:
        """Write what ended the run, and its report. Nothing here waits for the network."""
        goes_on = "continue with --resume"
        if self.plan.pause:
            goes_on = f"--resume goes on from step {self.checkpoints.latest_step() or 0}"
        # A nursery may have put Ctrl-C, or a cancellation, into groups.
        if BaseExceptionGroup("", [error]).subgroup((KeyboardInterrupt, trio.Cancelled)) is not None:
            self.event("interrupted", f"at step {self._step}; {goes_on}")
            self.progress.say(f"go on with --resume --out {shlex.quote(str(self.folder.path))}")
        else:
            why = str(first_leaf(error)).strip().partition("\n")[0]
            self.event("failed", f"{why}; at step {self._step}; {goes_on}")
        self.finish(is_complete=False)

    def finish(self, *, is_complete: bool) -> dict[str, Any]:
        """Save a run that does not pause, draw the figure and write the report; return the headline."""
        if not self.plan.pause:
            self.log_calls()
            self.save_here()
        self._room.unlink(missing_ok=True)
        if self._unwritten:
            self.event("records_lost", f"{self._unwritten} records had no room in metrics.jsonl")
        if self.unsaved:
            self.event("end_not_saved", self.unsaved)
        # A run whose end is not saved is not complete.
        headline = {**self._headline(is_complete), "complete": is_complete and not self.unsaved}
        path, title = self.folder.path, f"{self.engine.name} on {self.task.name}"
        with self._writing(path / FIGURE):
            training_figure(self.folder.metrics(), path / FIGURE, title=title)
        with self._writing(path / REPORT):
            write_report(self.folder, headline, title=title, summary=self.task.description)
            self.progress.say(f"report: {path / REPORT}")
        # Last: who finds this record need not look for the others.
        self._write("headline", **headline)
        self._on_end(plain(headline))
        return headline

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.progress.say(f"{path} cannot be written: {error.strerror or error}")
        except ModuleNotFoundError as error:
            self.progress.say(f"{path} is not drawn, since {error.name} is missing: pip install matplotlib")

    def _headline(self, is_complete: bool) -> dict[str, Any]:
        task, totals, unit = self.task, self.totals, self.task.unit
        figures: dict[str, Any] = {}
        for split in task.splits:
            # On the way only the first split is evaluated; the others' figures are of the end.
            found = self._evaluations.get(split) if is_complete or split == task.splits[0] else None
            shown = {task.main: None} if found is None else {**task.figures(found)}
            figures |= {f"{_SPLIT_NAMES.get(split, split)}_{name}": value for name, value in shown.items()}
        first = self._evaluations.get(task.splits[0]) if task.splits else None
        for name, value in task.baseline(first).items():
            figures[name] = value
            if first is not None:
                figures[f"{task.main}_over_{name.partition('_')[0]}"] = task.figures(first)[task.main] / value
        calls = totals.calls_ok + totals.calls_failed
        return {
            **self._facts,
            "corpus": task.name,
            **figures,
            f"evaluated_{unit}": first.items if first is not None else 0,
            "evaluated_step": self._evaluated_at,
            "steps": self._step,
            f"training_{unit}": self._items,
            f"{unit}_per_s": self.watch.rate,
            "training_s": self.watch.now(),
            "virtual_s": totals.virtual_s,
            "mean_trunk_staleness": self._staleness / self._step if self._step else None,
            "calls_ok": totals.calls_ok,
            "calls_failed": totals.calls_failed,
            "failures": dict(totals.failures),
            "failed_call_share": totals.calls_failed / calls if calls else None,
            "steps_lost": totals.steps_lost,
            **self.balance.headline(totals, self.engine.state()),
            **totals.figures,
        }


async def _train_pausing(run: _Ledger) -> None:
    engine, plan = run.engine, run.plan
    while engine.step < plan.steps:
        num_steps = min(plan.eval_every - engine.step % plan.eval_every, plan.steps - engine.step)
        with run.watch:
            await engine.advance(num_steps, run.on_step, run.on_lost)
        run.log_calls()
        run.balance.log(run.totals)
        await run.evaluate_first()
        await run.save_snapshot()


async def _train_beside(run: _Ledger) -> None:
    engine, plan = run.engine, run.plan
    # Compilation blocks this process for seconds. Done while trainers wait for experts, it would make their answers
    # look late; so one evaluation and one step alone come first.
    with run.progress.phase("compiling"):
        await run.evaluate_first()
        if engine.step < plan.steps:
            await engine.advance(1, run.on_step, run.on_lost)
    with trio.move_on_after(plan.max_s) as limit, run.watch:
        async with trio.open_nursery() as background:
            background.start_soon(_log_regularly, run)
            async with trio.open_nursery() as nursery:
                beside = _Beside(run, nursery)
                await engine.advance(max(0, plan.steps - engine.step), beside.on_step, run.on_lost)
            background.cancel_scope.cancel()
    if limit.cancelled_caught:
        run.event("time_limit", f"stopped after {plan.max_s / 60:g} minutes at step {engine.step}")
    run.log_calls()


async def _log_regularly(run: _Ledger) -> None:
    load_at = trio.current_time()
    while True:
        run.log_calls()
        if trio.current_time() - load_at >= _LOAD_PERIOD_S:
            load_at = trio.current_time()
            run.balance.log_load(run.totals)
        await trio.sleep(_CALLS_PERIOD_S)


class _Beside:
    """Evaluations, one at a time, and checkpoints while the training goes on."""

    def __init__(self, run: _Ledger, nursery: trio.Nursery) -> None:
        self._run = run
        self._nursery = nursery
        self._evaluating = False
        self._saving = trio.Lock()

    def on_step(self, record: StepRecord) -> None:
        run, plan = self._run, self._run.plan
        run.on_step(record)
        if record.step >= plan.steps:
            return
        saves = plan.checkpoint_every > 0 and record.step % plan.checkpoint_every == 0
        if record.step % plan.eval_every == 0 and run.task.splits:
            if not self._evaluating:
                self._evaluating = True
                self._nursery.start_soon(self._evaluate, saves)
                return
            run.event("evaluation_left_out", f"that of step {record.step}: the one before is not done yet")
        if saves:
            self._nursery.start_soon(self._write, None)

    async def _evaluate(self, saves: bool) -> None:
        """Evaluate, and save what was evaluated if it is the best so far or a checkpoint is due anyway."""
        run = self._run
        taken: _Taken | None = None
        try:
            # Not while the disk is busy: copies that wait for it would fill the memory.
            if run.plan.checkpoint_every and not self._saving.locked():
                # Nothing comes between this and the evaluation's own look at the parameters.
                taken = await self._taken()
            if saves:
                self._nursery.start_soon(self._write, taken)
            await run.evaluate_first()
        except NetError as error:
            run.event("evaluation_lost", str(error))
            return
        finally:
            self._evaluating = False
        if taken is not None and not saves and run.is_best(taken[0]):
            await self._write(taken)

    async def _taken(self) -> _Taken:
        step, state = await self._run.engine.snapshot()
        return step, state, self._run.checkpoint_facts()

    async def _write(self, taken: _Taken | None) -> None:
        """Write a checkpoint; None: of the state as it is once the disk is free. If cancelled, it is written or absent,
        never half."""
        async with self._saving:
            taken = await self._taken() if taken is None else taken
            with self._run.saving():
                await trio.to_thread.run_sync(self._run.checkpoints.save, *taken)
