"""Run the experiments one after the other, each as a process in a folder of its own, and gather what they found."""

import shutil
import time
from typing import Any

from dmoe_jax.runs.endings import EXIT_INTERRUPTED
from dmoe_jax.runs.run_folder import CONFIG, RunFolder
from experiments.bench import Experiment, Run
from experiments.paper.report import Child, write_paper_report
from experiments.paper.settings import EXPERIMENTS, QUICK_MINUTES, PaperSettings
from experiments.processes import run_child
from experiments.results import MISSED_BARS, Bar, Result


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
        command = " ".join(run.settings.command(name))
        run.say(f"{progress}, after {(time.perf_counter() - began) / 60:.1f} min: python -m {command}")
        _run_one(run, name)
        child = child_of(run, name)
        failure = f": {child.failure}" if child.failure else ""
        run.say(f"{progress} {child.outcome} in {child.wall_s / 60:.1f} min{failure}")


def _run_one(run: Run[PaperSettings], name: str) -> None:
    """Run an experiment to its end: it goes on with what it has left in its folder, or begins anew."""
    out = run.folder.path / name
    goes_on = EXPERIMENTS[name].resumes and (out / CONFIG).exists()
    if out.exists() and not goes_on:
        shutil.rmtree(out)
    words = [*run.settings.command(name), "--json", "--out", str(out), *(["--resume"] if goes_on else [])]
    began = time.perf_counter()
    outcome: dict[str, Any] = {"outcome": "interrupted"}
    try:
        status, headline, failure = run_child(words)
        if status != EXIT_INTERRUPTED:  # else somebody else ended it
            outcome = {"outcome": "failed" if status else "finished", "failure": failure}
            outcome |= {} if headline is None else {"headline": headline}
    finally:
        run.log("child", name=name, **outcome, went_on=goes_on, wall_s=time.perf_counter() - began)


def child_of(run: Run[PaperSettings], name: str) -> Child:
    """Return the outcome of an experiment so far."""
    records = [record for record in run.records("child") if record["name"] == name]
    wall_s = 0.0
    for record in reversed(records):
        wall_s += record["wall_s"]
        if not record["went_on"]:
            break
    last: dict[str, Any] = records[-1] if records else {"outcome": "not run"}
    bars = [record["bars"] for record in RunFolder(run.folder.path / name).metrics() if record["kind"] == "bars"]
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
    outcomes = ("finished", "failed", "interrupted", "not run")
    named = {each: [child.name for child in children if child.outcome == each] for each in outcomes}
    is_timed = settings.quick and not settings.only and len(named["finished"]) == len(children)
    failed = named["failed"] + named["interrupted"]
    missed = [f"{child.name}: {bar}" for child in children for bar in child.headline.get(MISSED_BARS, ())]
    figures: dict[str, Any] = {outcome.replace(" ", "_"): names for outcome, names in named.items()}
    figures["minutes"] = sum(child.wall_s for child in children) / 60
    return Result(
        title="The papers' figures",
        figures=figures | {"figures": {child.name: child.headline for child in children}},
        bars=[Bar(name="minutes", bound=QUICK_MINUTES)] if is_timed else [],
        missed=missed,
        shown=figures | {MISSED_BARS: "; ".join(missed) or "none"},
        failure=f"{len(failed)} of {len(children)} experiments did not finish: {', '.join(failed)}" if failed else "",
    )


def write_report(run: Run[PaperSettings], result: Result) -> None:
    """Write report.md, timing.md and the pictures, and copy them if that is asked and nothing is missing."""
    settings = run.settings
    children = [child_of(run, name) for name in settings.names]
    files = write_paper_report(run.folder, children, settings)
    if settings.copy_to is None:
        return
    if any(child.outcome != "finished" for child in children):
        run.say(f"nothing is copied to {settings.copy_to}: some experiments have not finished")
        return
    settings.copy_to.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copy(file, settings.copy_to)


EXPERIMENT = Experiment(measure=measure, summarise=summarise, write_report=write_report)
