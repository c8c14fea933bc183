"""What a whole run would take on this device: a few updates timed, and the commands that it can be cut into."""

import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from dmoe_jax.arrays import host_copy
from dmoe_jax.checkpoints import Checkpoints
from dmoe_jax.data.corpora import Corpus
from dmoe_jax.runs.endings import mistakes_in_one_line
from dmoe_jax.runs.report import format_value
from dmoe_jax.training.run import train_without_waiting
from experiments.bench import Run
from experiments.results import Result
from experiments.transformer_xl.settings import Model, TransformerXLSettings
from experiments.transformer_xl.training import ModelEngine, make_engine, make_plan, make_setup

_CALL_MINUTES = 9.0
"""Minutes of a command that is given ten: the rest is for Python's start and the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlan:
    """A run cut into commands, each of which ends at a pause."""

    updates_per_s: float
    """While nothing but training goes on."""
    hours: float
    """Of the whole run, with its pauses, if it were one command."""
    stretch_s: float
    """From one pause to the next, with the evaluation and the checkpoint of one."""
    calls: int
    """Commands that the run takes."""
    longest_eval_every: int
    """Updates between two pauses beyond which a stretch is longer than a command; 0 if no stretch fits."""


def plan_calls(
    *, steps: int, eval_every: int, update_s: float, pause_s: float, start_s: float, minutes: float
) -> CallPlan:
    """Cut a run into commands of so many minutes; each makes one stretch at least.

    Args:
      steps: updates of the run.
      eval_every: updates of a stretch.
      update_s, pause_s: seconds of an update, and of the evaluation and the checkpoint in a pause.
      start_s: seconds before the first update of each command is done: mostly compilation.
    """
    pauses, stretch_s, usable_s = -(-steps // eval_every), eval_every * update_s + pause_s, 60 * minutes - start_s
    return CallPlan(
        updates_per_s=1 / update_s,
        hours=(start_s + steps * update_s + pauses * pause_s) / 3600,
        stretch_s=stretch_s,
        calls=-(-pauses // max(1, math.floor(usable_s / stretch_s))),
        longest_eval_every=max(0, math.floor((usable_s - pause_s) / update_s)),
    )


def time_updates(run: Run[TransformerXLSettings], corpus: Corpus) -> None:
    """Time updates, an evaluation and a checkpoint of each model, and log the plan of its run.

    Raises:
      UsageError: settings that do not fit each other or the text.
    """
    settings = run.settings
    assert settings.timing is not None
    for model in settings.models:
        began = time.perf_counter()
        with mistakes_in_one_line():
            setup = make_setup(settings, corpus, model=model, seed=settings.seed, router=settings.router)
            engine = make_engine(setup)
        plan = make_plan(settings, setup.preset)
        run.say(f"{model}: compiling, then {settings.timing} updates")
        _advance(engine, 1)
        start_s = time.perf_counter() - began
        update_s = _advance(engine, settings.timing) / settings.timing
        pause_s = _pause(engine, plan.eval_items, run.folder.path)
        minutes = settings.stop_after or _CALL_MINUTES
        calls = plan_calls(
            steps=plan.steps,
            eval_every=plan.eval_every,
            update_s=update_s,
            pause_s=pause_s,
            start_s=start_s,
            minutes=minutes,
        )
        run.log("timing", model=model, steps=plan.steps, eval_every=plan.eval_every, minutes=minutes, plan=calls)
        run.say(_sentence(model, calls, plan.steps, plan.eval_every, minutes))


def _advance(engine: ModelEngine, num_steps: int) -> float:
    """Seconds of so many updates."""
    began = time.perf_counter()
    train_without_waiting(engine.advance(num_steps, lambda record: None, lambda trainer, error: None))
    return time.perf_counter() - began


def _pause(engine: ModelEngine, eval_items: int, folder: Path) -> float:
    """Seconds of an evaluation and a checkpoint, once the evaluation is compiled."""

    def evaluate(max_items: int | None) -> None:
        train_without_waiting(engine.evaluate("valid", max_items=max_items, on_batch=lambda done, total: None))

    evaluate(1)
    began = time.perf_counter()
    evaluate(eval_items or None)
    with tempfile.TemporaryDirectory(dir=folder) as path:
        checkpoints = Checkpoints(Path(path))
        checkpoints.save(engine.step, host_copy(engine.state()), {"engine": engine.facts()})
        checkpoints.close()
        return time.perf_counter() - began


def _sentence(model: Model, plan: CallPlan, steps: int, eval_every: int, minutes: float) -> str:
    text = f"{model}: {plan.updates_per_s:.3g} updates/s; {steps:,} updates take {plan.hours:.3g} hours"
    if plan.longest_eval_every >= eval_every:
        return f"{text}, or {plan.calls} calls with --stop-after {minutes:g}"
    fits = f"time it, and then begin, with --eval-every {plan.longest_eval_every} or fewer"
    return (
        f"{text}; from pause to pause they are {plan.stretch_s / 60:.3g} minutes, longer than a call of {minutes:g}: "
        f"{fits if plan.longest_eval_every else 'not one update fits into it'}"
    )


def timing_result(run: Run[TransformerXLSettings]) -> Result:
    """What was timed, model by model."""
    settings, corpus = run.settings, run.records("corpus")[-1]
    plans = {record["model"]: {"steps": record["steps"], **record["plan"]} for record in run.records("timing")}
    shown = {f"{model} {name}": value for model, plan in plans.items() for name, value in plan.items()}
    return Result(
        title=f"Time of Transformer-XL on {corpus['name']}, {settings.size}, on this device",
        figures={"size": settings.size, "corpus": corpus["name"], "bf16": settings.bf16, "timing": plans},
        shown=shown,
        printed=[f"{name.replace('_', ' ')}: {format_value(value)}" for name, value in shown.items()],
        summary=f"{settings.timing} updates of each model after the first. Nothing was trained.",
    )
