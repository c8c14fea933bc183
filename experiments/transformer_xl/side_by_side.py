"""Several runs at once: a process for each, with its share of the cores.

A simulated run keeps one core busy and hardly two, so that two of them side by side on two cores take little longer
than the slower one. What a run computes does not depend on what runs beside it.

The standard input of a child stays open: when it closes, its parent is gone, and the child ends as it would after
Ctrl-C, with a report and a checkpoint to go on from. It has a session of its own, for Ctrl-C in a terminal should reach
it once, from its parent.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import trio
from rich.console import Console

from dmoe_jax.data.corpora import Corpus, load_corpus
from dmoe_jax.runs.command_line import parse_command_line
from dmoe_jax.runs.endings import EXIT_INTERRUPTED, UsageError
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.runs.setting_up import set_up_jax
from dmoe_jax.training.prepared_run import finished_headline
from experiments.bench import Run
from experiments.exits import one_line_errors, run_until_signal
from experiments.transformer_xl.settings import NAME, TransformerXLSettings
from experiments.transformer_xl.training import FAILURES, carry_out
from experiments.transformer_xl.trainings import Training

_ENDING_S = 120.0
"""Seconds that an interrupted child may take for its report; a stretch cannot be left before its current step."""


def run_folder(training: Training) -> RunFolder:
    """The run folder of a training."""
    assert training.settings.out is not None
    return RunFolder(training.settings.out)


def train_all(run: Run[Any], corpus: Corpus, trainings: Sequence[Training], *, num_jobs: int) -> None:
    """Train these, several at a time if there are so many jobs.

    Raises:
      UsageError: for a folder, checkpoint or setting that will not do. KeyboardInterrupt.
    """
    waiting = []
    for training in trainings:
        if finished_headline(run_folder(training)) is None:
            waiting.append(training)
        else:
            carry_out(training, corpus)  # sees that it was trained under these settings, and leaves it as it is
    num_jobs = min(num_jobs, len(waiting))
    if num_jobs > 1:
        side_by_side = partial(train_side_by_side, waiting, run.console, num_jobs=num_jobs)
        run_until_signal(side_by_side, prog=NAME)
        return
    for training in waiting:
        carry_out(training, corpus)


async def train_side_by_side(trainings: Iterable[Training], console: Console, *, num_jobs: int) -> None:
    """Train these, `num_jobs` at a time and in order.

    If cancelled, the children write their reports first.

    Raises:
      UsageError: a child failed; its last line. The others have been interrupted. KeyboardInterrupt: a child was.
    """
    waiting = list(trainings)

    async def work(cores: tuple[int, ...]) -> None:
        while waiting:
            await _train(waiting.pop(0), cores, console)

    async with trio.open_nursery() as nursery:
        for cores in shares_of_cores(num_jobs):
            nursery.start_soon(work, cores)


def shares_of_cores(jobs: int) -> list[tuple[int, ...]]:
    """The cores that this process may use, dealt out; nothing where the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return [()] * jobs
    cores = sorted(os.sched_getaffinity(0))
    return [tuple(cores[index::jobs]) for index in range(jobs)]


async def _train(training: Training, cores: tuple[int, ...], console: Console) -> None:
    """Train in a child, and show the child's lines under the run's label and seed."""
    label, settings = training.label, training.settings
    job = json.dumps(
        {
            "label": label,
            "may_fail": training.may_fail,
            "keeps_checkpoints": training.keeps_checkpoints,
            "cores": cores,
        }
    )
    child = partial(
        trio.run_process,
        [sys.executable, "-m", "experiments.transformer_xl.side_by_side", job, *settings.flags()],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        check=False,
        start_new_session=True,
        deliver_cancel=_interrupt,
    )
    last_line, rest = "", b""
    async with trio.open_nursery() as nursery:
        process: trio.Process = await nursery.start(child)
        assert process.stderr is not None
        with trio.CancelScope(shield=True):  # until it has ended, however it ends
            async for data in process.stderr:
                *lines, rest = (rest + data).split(b"\n")
                for last_line in filter(None, (line.decode(errors="replace").strip() for line in lines)):
                    console.print(f"[bold]{label}[/], seed {settings.seed}: ", end="", highlight=False)
                    console.print(last_line.removeprefix(f"{label}: "), highlight=False, markup=False, soft_wrap=True)
    if process.returncode == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if process.returncode:
        said = last_line.removeprefix(f"{NAME}: error: ")
        raise UsageError(said or f"{label} ended with status {process.returncode}")


async def _interrupt(process: trio.Process) -> None:
    # Not SIGINT, which a process that was started in the background of a script ignores, and its children too.
    process.terminate()
    await trio.sleep(_ENDING_S)
    process.kill()


def _interrupt_at_end_of_input() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _main() -> None:
    """A child's whole life."""
    job = json.loads(sys.argv[1])
    settings: TransformerXLSettings = parse_command_line(TransformerXLSettings, prog=NAME, args=sys.argv[2:])
    threading.Thread(target=_interrupt_at_end_of_input, daemon=True).start()
    if job["cores"]:
        os.sched_setaffinity(0, job["cores"])
    with one_line_errors(NAME, expected=FAILURES):
        set_up_jax()
        training = Training(
            label=job["label"],
            settings=settings,
            may_fail=job["may_fail"],
            keeps_checkpoints=job["keeps_checkpoints"],
        )
        carry_out(training, load_corpus(source=settings.data))


if __name__ == "__main__":
    _main()
