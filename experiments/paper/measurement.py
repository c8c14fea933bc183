"""Run the experiments one after the other, each as a process in a folder of its own, and gather what they found."""

import dataclasses
import time
from pathlib import Path
from typing import Any, get_args

from rich.table import Table

from dmoe_jax.runs.endings import EXIT_INTERRUPTED
from dmoe_jax.runs.report import format_value
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.training.prepared_run import prepare_run
from experiments.bench import Experiment, Run
from experiments.children import prepare_folder, run_child
from experiments.paper.report import Child, Outcome, write_paper_report
from experiments.paper.settings import QUICK_MINUTES, PaperSettings
from experiments.results import MISSED_BARS, Bar, Result


def open_folder(settings: PaperSettings, name: str) -> RunFolder:
    """Open the folder of the report; one that was begun at another scale or with another seed is refused.

    Raises:
      ValueError, OSError: as of `prepare_run`.
    """
    fields = dataclasses.asdict(settings)
    decisive = {"experiment": name} | {key: fields[key] for key in ("quick", "seed", "only")}
    return prepare_run(settings.out, decisive, name=name, resume=settings.resume, may_differ=("only",)).begin()


def measure(run: Run[PaperSettings]) -> None:
    """Run the experiments that have not finished. One that fails does not stop the others.

    Raises:
      KeyboardInterrupt: after the running one has ended.
    """
    names, began = run.settings.names, time.perf_counter()
    for number, name in enumerate(names, start=1):
        progress = f"[{number}/{len(names)}] {name}"
        if child_of(run, name).outcome == "finished":
            run.say(f"{progress}: finished before")
            continue
        run.say(f"{progress}, after {(time.perf_counter() - began) / 60:.1f} min: {command_of(run.settings, name)}")
        _run_one(run, name)
        child = child_of(run, name)
        failure = f": {child.failure}" if child.failure else ""
        run.say(f"{progress} {child.outcome} in {child.wall_s / 60:.1f} min{failure}")


def _run_one(run: Run[PaperSettings], name: str) -> None:
    words = prepare_folder(name, child_path(run, name))
    began = time.perf_counter()
    outcome: dict[str, Any] = {"outcome": "interrupted"}
    try:
        ended = run_child([f"experiments.{name}", *run.settings.flags(name), "--json", *words])
        if ended.status != EXIT_INTERRUPTED:  # else somebody else ended it
            outcome = {"outcome": "failed" if ended.status else "finished", "failure": ended.failure}
            outcome |= {} if ended.headline is None else {"headline": ended.headline}
    finally:
        wall_s = time.perf_counter() - began
        run.log("child", name=name, **outcome, went_on="--resume" in words, wall_s=wall_s)


def command_of(settings: PaperSettings, name: str) -> str:
    """Return the command that gives an experiment's figures again."""
    return " ".join(["python", "-m", f"experiments.{name}", *settings.flags(name)])


def child_path(run: Run[PaperSettings], name: str) -> Path:
    """The run folder of an experiment."""
    return run.folder.path / name


def child_of(run: Run[PaperSettings], name: str) -> Child:
    """Return the outcome of an experiment so far."""
    records = [record for record in run.records("child") if record["name"] == name]
    wall_s = 0.0
    for record in reversed(records):
        wall_s += record["wall_s"]
        if not record["went_on"]:
            break
    last: dict[str, Any] = records[-1] if records else {"outcome": "not run"}
    bars = [record["bars"] for record in RunFolder(child_path(run, name)).metrics() if record["kind"] == "bars"]
    return Child(
        name=name,
        outcome=last["outcome"],
        headline=last.get("headline", {}),
        bars=bars[-1] if bars and last["outcome"] == "finished" else (),
        failure=last.get("failure", ""),
        wall_s=wall_s,
    )


def summarise(run: Run[PaperSettings]) -> Result | None:
    """Say which experiments finished, and which bars they missed; None before the first has ended."""
    settings = run.settings
    children = [child_of(run, name) for name in settings.names]
    if not any(child.wall_s for child in children):
        return None
    by_outcome = {
        outcome: [child.name for child in children if child.outcome == outcome] for outcome in get_args(Outcome)
    }
    minutes = sum(child.wall_s for child in children) / 60
    is_timed = settings.quick and not settings.only and len(by_outcome["finished"]) == len(children)
    printed = Table(
        "experiment", "outcome", "minutes", "missed bars", title="The papers' figures", title_justify="left"
    )
    for child in children:
        missed = ", ".join(child.headline.get(MISSED_BARS, ())) or "none"
        printed.add_row(child.name, child.outcome, format_value(child.wall_s / 60), missed)
    failed = by_outcome["failed"] + by_outcome["interrupted"]
    return Result(
        title="The papers' figures",
        figures={
            **{outcome.replace(" ", "_"): names for outcome, names in by_outcome.items()},
            "minutes": minutes,
            "figures": {child.name: child.headline for child in children},
        },
        bars=[Bar(name="minutes", bound=QUICK_MINUTES)] if is_timed else [],
        missed=[f"{child.name}: {bar}" for child in children for bar in child.headline.get(MISSED_BARS, ())],
        printed=[printed],
        failure=f"{len(failed)} of {len(children)} experiments did not finish: {', '.join(failed)}" if failed else "",
    )


def write_report(run: Run[PaperSettings], result: Result) -> None:
    """Write report.md, timing.md and the pictures, and copy them if that is asked and nothing is missing."""
    settings = run.settings
    children = [child_of(run, name) for name in settings.names]
    commands = {child.name: command_of(settings, child.name) for child in children}
    files = write_paper_report(run.folder, children, commands, is_quick=settings.quick, seed=settings.seed)
    if settings.copy_to is None:
        return
    if any(child.outcome != "finished" for child in children):
        run.say(f"nothing is copied to {settings.copy_to}: some experiments have not finished")
        return
    settings.copy_to.mkdir(parents=True, exist_ok=True)
    for file in files:
        (settings.copy_to / file.name).write_bytes(file.read_bytes())


EXPERIMENT = Experiment(measure=measure, summarise=summarise, open_folder=open_folder, write_report=write_report)
