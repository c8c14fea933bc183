"""The runs of a sweep: each trains in a folder of its own, several of them at once.

A simulated run keeps one core busy and hardly two, so that two of them side by side on two cores take little longer
than the slower one. What a run computes does not depend on what runs beside it. One that was interrupted goes on from
its last pause.
"""

import functools
import platform
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dmoe_jax.data import Corpus, load_corpus
from dmoe_jax.runs.endings import CommandFailed, UsageError
from dmoe_jax.runs.run_folder import CONFIG, RunFolder
from dmoe_jax.training.prepared_run import finished_headline
from experiments.bench import Run
from experiments.engines import open_engine
from experiments.exits import ending_of
from experiments.processes import HelperFailed
from experiments.results import Finals, finals_of
from experiments.sweep import Task, completed
from experiments.transformer_xl.training import FAILURES, carry_out
from experiments.transformer_xl.trainings import Training


def run_folder(training: Training) -> RunFolder:
    """The run folder of a training."""
    assert training.settings.out is not None
    return RunFolder(training.settings.out)


def final_figures(trainings: Sequence[Training]) -> Finals:
    """Label -> seed -> the headline of its run, of those that were trained to their end."""
    ended = ((each, finished_headline(run_folder(each))) for each in trainings)
    rows = ({**line, "label": each.label, "seed": each.settings.seed} for each, line in ended if line is not None)
    return finals_of(rows, "label")


def train_all(run: Run[Any], corpus: Corpus, trainings: Sequence[Training]) -> None:
    """Train these, several at a time if the settings say so.

    Raises:
      UsageError: for a folder, checkpoint or setting that will not do. CommandFailed: one of them ended with an error,
        which this tells; the others have been stopped. KeyboardInterrupt.
    """
    waiting = []
    for training in trainings:
        if finished_headline(run_folder(training)) is None:
            waiting.append(training)
        else:
            carry_out(training, corpus)  # sees that it was trained under these settings, and leaves it as it is
    run.say(f"{len(waiting)} of {len(trainings)} runs are to be trained")
    if run.settings.on == "here" and min(run.settings.num_jobs, len(trainings)) == 1:
        for training in waiting:
            carry_out(training, corpus)
    elif waiting:
        _train_side_by_side(run, waiting)


def _train_side_by_side(run: Run[Any], waiting: Sequence[Training]) -> None:
    """Train these in order. Raises CommandFailed as `train_all`."""
    folder = run.folder.path
    tasks = [
        Task(key=str(run_folder(each).path.relative_to(folder)), call=partial(_carry_out, each, folder.absolute()))
        for each in waiting
    ]
    try:
        with open_engine(run, len(tasks)) as engine:
            for number, (task, failure) in enumerate(completed(engine, tasks, run.say), start=1):
                if failure:
                    raise CommandFailed(failure)
                run.say(f"{task.key} has ended; {len(tasks) - number} are left")
    except HelperFailed as error:
        raise CommandFailed(str(error)) from error


def _carry_out(training: Training, folder: Path) -> str:
    """Train, or go on, in a worker's process; return why it failed, "" if it did not.

    Args:
      folder: of the sweep, which all workers have to see.
    """
    try:
        if not (folder / CONFIG).exists():
            raise UsageError(f"{platform.node()} does not see {folder}: let --out name a folder that all workers see")
        settings = replace(training.settings, out=run_folder(training).path.absolute())
        assert settings.out is not None
        if not settings.resume and settings.out.exists():
            shutil.rmtree(settings.out)  # a lost worker's: from its last pause it would tell other figures of the load
        carry_out(replace(training, settings=settings), _corpus(settings.data))
    except BaseException as error:
        ending = ending_of(error, expected=FAILURES)
        if ending is None:
            raise
        return ending.message.removeprefix("error: ")
    return ""


@functools.cache
def _corpus(source: str) -> Corpus:
    return load_corpus(source=source)
