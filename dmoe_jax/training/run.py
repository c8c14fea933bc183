"""From an engine to a run: train, evaluate, save, report. The same for every engine.

A run that *pauses* is a row of stretches of `eval_every` updates with an evaluation and a checkpoint after each.
Whatever ends it early (Ctrl-C, a power cut, a loss of NaN), it goes on from its last pause, and then gives bit for bit
what it would have given without the break. Otherwise evaluations and checkpoints run *beside* the training, which never
waits for them; this needs an engine that runs under trio. The figures of the end, over whole texts, are no part of the
curve.
"""

from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import trio

from dmoe_jax.disk import CheckpointError
from dmoe_jax.trainer import StepRecord
from dmoe_jax.training.engine import Engine
from dmoe_jax.training.ledger import Ledger, Records
from dmoe_jax.training.plan import Plan
from dmoe_jax.training.progress import TrainingProgress
from dmoe_jax.training.saving import PreparedRun
from dmoe_jax.training.task import Task
from net.errors import NetError

T = TypeVar("T")

_CALLS_PERIOD_S = 1.0
"""Seconds between two records of the totals of calls, beside the training."""

_LOAD_PERIOD_S = 10.0
"""Seconds between two records of the load of every expert, which are long lines."""


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
      plan: the plan of a run that is resumed, if it pauses, as it was.
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
        state = Ledger(engine, run, plan, task, progress, facts, records, on_end)
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


def train_without_waiting(run: Coroutine[Any, Any, T]) -> T:
    """Drive a coroutine that never waits, such as `train` with an engine on this device, without an event loop."""
    try:
        run.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    run.close()
    raise RuntimeError(f"{run} waits for an event loop: run it under trio")


async def _train_pausing(run: Ledger) -> None:
    engine, plan = run.engine, run.plan
    while engine.step < plan.steps:
        num_steps = min(plan.eval_every - engine.step % plan.eval_every, plan.steps - engine.step)
        with run.watch:
            await engine.advance(num_steps, run.on_step, run.on_lost)
        run.log_calls()
        run.log_balance()
        await run.evaluate_first()
        run.save_here()


async def _train_beside(run: Ledger) -> None:
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


async def _log_regularly(run: Ledger) -> None:
    load_at = trio.current_time()
    while True:
        run.log_calls()
        if trio.current_time() - load_at >= _LOAD_PERIOD_S:
            load_at = trio.current_time()
            run.log_load()
        await trio.sleep(_CALLS_PERIOD_S)


class _Beside:
    """Evaluations, one at a time, and checkpoints while the training goes on."""

    def __init__(self, run: Ledger, nursery: trio.Nursery) -> None:
        self._run = run
        self._nursery = nursery
        self._evaluating = False
        self._saving = trio.Lock()

    def on_step(self, record: StepRecord) -> None:
        run, plan = self._run, self._run.plan
        run.on_step(record)
        if record.step >= plan.steps:
            return
        if record.step % plan.eval_every == 0 and run.task.splits:
            if self._evaluating:
                run.event("evaluation_left_out", f"that of step {record.step}: the one before is not done yet")
            else:
                self._evaluating = True
                self._nursery.start_soon(self._evaluate)
        if plan.checkpoint_every and record.step % plan.checkpoint_every == 0:
            self._nursery.start_soon(self._save)

    async def _evaluate(self) -> None:
        try:
            await self._run.evaluate_first()
        except NetError as error:
            self._run.event("evaluation_lost", str(error))
        finally:
            self._evaluating = False

    async def _save(self) -> None:
        """Write a checkpoint. If cancelled, it is written or absent, never half."""
        async with self._saving:
            step, state = await self._run.engine.snapshot()
            facts = self._run.checkpoint_facts()
            with self._run.saving():
                await trio.to_thread.run_sync(self._run.checkpoints.save, step, state, facts)
