"""Run the steps, each command as a process in the folder of its step, and keep what they found."""

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.text import Text

from dmoe_jax.runs.endings import fail
from dmoe_jax.runs.report import ReportTable, format_value
from dmoe_jax.runs.run_folder import CONFIG, RunFolder
from dmoe_jax.training.saving import prepare_run
from experiments.bench import Experiment, Run
from experiments.children import END_GRACE_S, is_resumable, prepare_folder, run_child
from experiments.gpu.planning import Progress, flags_of, next_step, outcome_of, progress_of
from experiments.gpu.settings import GpuSettings
from experiments.gpu.steps import STEPS, Step
from experiments.results import Result

_STATUS_NO_GPU = 2


def check(settings: GpuSettings, steps: Sequence[Step]) -> None:
    """Print the list and end, if that is asked; else see that there is a GPU.

    Raises:
      SystemExit: with status 0 after the list, 2 without a GPU. ValueError, OSError: the folder is of something else.
    """
    _prepared(settings)
    if settings.list:
        records = RunFolder(settings.folder).metrics()
        attempts = [record for record in records if record["kind"] == "attempt"]
        print(_listing(settings, _chosen(settings, steps), attempts))
        sys.exit(0)
    if not settings.anyway and (platform := _platform()) == "cpu":
        fail(
            f"JAX finds no GPU here, its device is a {platform}; --anyway runs all the same",
            status=_STATUS_NO_GPU,
            prog="gpu",
        )


def _platform() -> str:
    """What JAX computes on. In a process of its own: whoever asks keeps memory of the GPU."""
    command = [sys.executable, "-c", "import jax; print(jax.devices()[0].platform)"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"JAX does not start: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}")
    return done.stdout.split()[-1]


def _prepared(settings: GpuSettings, name: str = "gpu") -> Any:
    return prepare_run(settings.folder, {"experiment": name, "quick": settings.quick}, name=name, resume=True)


def open_folder(settings: GpuSettings, name: str) -> RunFolder:
    """Make the folder of all steps, or go on there.

    Raises:
      ValueError, OSError: as of `prepare_run`.
    """
    folder: RunFolder = _prepared(settings, name).begin()
    return folder


def _chosen(settings: GpuSettings, steps: Sequence[Step]) -> list[Step]:
    return [step for step in steps if not settings.only or step.name in settings.only]


def _progress(steps: Sequence[Step], attempts: Sequence[Mapping[str, Any]]) -> dict[str, Progress]:
    return {step.name: progress_of(step, attempts) for step in steps}


def measure(run: Run[GpuSettings], steps: Sequence[Step]) -> None:
    """Run one command of the next step, or with --all one after the other until no step is left that can go on.

    Raises:
      KeyboardInterrupt: after the running command has ended.
    """
    run.log("call")
    given_up: set[str] = set()
    while True:
        progress = _progress(steps, run.records("attempt"))
        step = next_step(_chosen(run.settings, steps), progress, given_up)
        if step is None:
            run.say("no step is left that can go on")
            return
        outcome = _attempt(run, step, progress)
        if outcome != "unfinished":
            given_up.add(step.name)
        if not run.settings.all:
            return


def _attempt(run: Run[GpuSettings], step: Step, progress: Mapping[str, Progress]) -> str:
    """Run one command of a step, and log what came of it."""
    settings, out = run.settings, run.folder.path / step.name
    began = time.perf_counter()
    found: dict[str, Any] = {"outcome": "interrupted"}
    try:
        before = _last_headline(out)
        words = [f"experiments.{step.experiment}", *_flags(settings, step, progress, out)]
        run.say(f"{step.name}: python -m {' '.join(words)}")
        where = prepare_folder(step.experiment, out)
        limit_s = 60 * settings.minutes - END_GRACE_S - 5
        ended = run_child([*words, "--json", *where], limit_s=limit_s)
        outcome, reason = outcome_of(
            ended, made_progress=is_resumable(step.experiment) and _last_headline(out) != before
        )
        found = {"outcome": outcome, "reason": reason, "headline": ended.headline}
    except ValueError as error:
        found = {"outcome": "failed", "reason": str(error)}
    finally:
        run.log("attempt", step=step.name, **found, wall_s=time.perf_counter() - began)
    run.say(f"{step.name}: {found['outcome']}" + (f": {found['reason']}" if found["reason"] else ""))
    return str(found["outcome"])


def _flags(settings: GpuSettings, step: Step, progress: Mapping[str, Progress], out: Path) -> list[str]:
    return flags_of(
        step,
        minutes=settings.minutes,
        is_quick=settings.quick,
        timing=progress[step.timed_by].headline if step.timed_by else None,
        begun=RunFolder(out).config()["settings"] if (out / CONFIG).exists() else None,
    )


def _last_headline(out: Path) -> Mapping[str, Any] | None:
    """What a step's folder has come to so far."""
    headlines = [record for record in RunFolder(out).metrics() if record["kind"] == "headline"]
    return headlines[-1] if headlines else None


def summarise(run: Run[GpuSettings], steps: Sequence[Step]) -> Result | None:
    """Say how far each step is, and what the finished ones found."""
    chosen = _chosen(run.settings, steps)
    attempts = run.records("attempt")
    progress = _progress(steps, attempts)
    left = [step.name for step in chosen if not progress[step.name].is_finished]
    following = next_step(chosen, progress)
    records = run.folder.metrics()
    last_call = max((place for place, record in enumerate(records) if record["kind"] == "call"), default=0)
    failures = [
        f"{record['step']}: {record['reason']}"
        for record in records[last_call:]
        if record["kind"] == "attempt" and record.get("reason")
    ]
    return Result(
        title="What waits for a GPU",
        figures={
            "steps": len(chosen),
            "finished": [step.name for step in chosen if progress[step.name].is_finished],
            "left": left,
            "next": None if following is None else following.name,
            "minutes": sum(each.minutes for each in progress.values()),
            "figures": {name: each.headline for name, each in progress.items() if each.headline is not None},
        },
        shown={"finished": len(chosen) - len(left), "left": ", ".join(left) or "none"},
        printed=[Text(_listing(run.settings, chosen, attempts))],
        tables=[_table(chosen, progress), *_figure_tables(chosen, progress)],
        failure="; ".join(failures),
    )


def _state(each: Progress) -> str:
    if each.is_finished:
        return "finished"
    if not each.commands:
        return "waits"
    return f"begun{f', {each.strikes} failed: {each.reason}' if each.strikes else ''}"


def _listing(settings: GpuSettings, steps: Sequence[Step], attempts: Sequence[Mapping[str, Any]]) -> str:
    """The steps with their states, two lines each."""
    lines = [f"What waits for a GPU, in commands of at most {settings.minutes:g} minutes, in {settings.folder}:"]
    for number, step in enumerate(steps, start=1):
        each = progress_of(step, attempts)
        state = f"{_state(each)}, {each.minutes:.1f} min so far" if each.commands else _state(each)
        lines.append(f"{number:3}. {step.name} ({state}; takes: {step.about}): {step.purpose}")
        lines.append(" ".join([f"     python -m experiments.{step.experiment}", *step.flags]))
    return "\n".join(lines)


def _table(steps: Sequence[Step], progress: Mapping[str, Progress]) -> ReportTable:
    rows = []
    for step in steps:
        each = progress[step.name]
        name = f"[{step.name}]({step.name}/report.md)" if each.commands else step.name
        rows.append((name, _state(each), each.commands, each.minutes, step.purpose))
    return ReportTable(title="Steps", head=("step", "state", "commands", "minutes", "what for"), rows=rows)


def _figure_tables(steps: Sequence[Step], progress: Mapping[str, Progress]) -> list[ReportTable]:
    """A table for each step that has figures."""
    tables = []
    for step in steps:
        headline = progress[step.name].headline
        if headline is not None:
            rows = [(f"`{name}`", format_value(value)) for name, value in headline.items()]
            tables.append(ReportTable(title=step.name, head=("figure", "value"), rows=rows))
    return tables


def gpu_experiment(steps: Sequence[Step]) -> Experiment[GpuSettings]:
    """The experiment over these steps."""
    return Experiment(
        measure=partial(measure, steps=steps),
        summarise=partial(summarise, steps=steps),
        check=partial(check, steps=steps),
        open_folder=open_folder,
    )


EXPERIMENT = gpu_experiment(STEPS)
