"""Several runs at once: in processes, each with its share of the cores.

A simulated run keeps one core busy and hardly two, so that two of them side by side on two cores take little longer
than the slower one. What a run computes does not depend on what runs beside it. The processes end with ours; a run that
was under way then goes on from its last pause.
"""

import os
import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any

import trio

from dmoe_jax.data import Corpus, load_corpus
from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.runs.setting_up import set_up_jax
from dmoe_jax.training.prepared_run import finished_headline
from experiments.bench import Run
from experiments.exits import ending_of, run_until_signal
from experiments.processes import HelperFailed, HelperProcess, open_helpers, orders, run_helper, say
from experiments.results import Finals, finals_of
from experiments.transformer_xl.settings import NAME
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
    run.say(f"{len(waiting)} of {len(trainings)} runs are to be trained")
    if min(num_jobs, len(waiting)) > 1:
        run_until_signal(partial(_train_side_by_side, waiting, num_jobs), prog=NAME)
        return
    for training in waiting:
        carry_out(training, corpus)


async def _train_side_by_side(waiting: list[Training], num_jobs: int) -> None:
    """Train these in order, each helper one after the other.

    Raises:
      UsageError: one of them ended with an error, which this tells; the others have been stopped.
    """

    async def work(helper: HelperProcess) -> None:
        while waiting:
            order = partial(helper.ask, training=pickle.dumps(waiting.pop(0)).hex())
            try:
                answer = await trio.to_thread.run_sync(order, abandon_on_cancel=True)
            except HelperFailed as error:
                raise UsageError(str(error)) from error
            if "error" in answer:
                raise UsageError(answer["error"])

    num_jobs, data = min(num_jobs, len(waiting)), waiting[0].settings.data
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    settings = [{"cores": cores[index::num_jobs], "data": data} for index in range(num_jobs)]
    # Their progress is told in lines: bars would be drawn over each other.
    environment = {"TTY_COMPATIBLE": "0"}
    with open_helpers("experiments.transformer_xl.side_by_side", settings, environment=environment) as helpers:
        async with trio.open_nursery() as nursery:
            for helper in helpers:
                nursery.start_soon(work, helper)


async def _answer(*, cores: Sequence[int], data: str) -> None:
    """A helper's whole life."""
    if cores:
        os.sched_setaffinity(0, cores)
    set_up_jax()
    corpus = load_corpus(source=data)
    say()
    async for order in orders():
        training = pickle.loads(bytes.fromhex(order["training"]))
        try:
            # In a thread: a simulated swarm has an event loop of its own.
            await trio.to_thread.run_sync(carry_out, training, corpus)
        except BaseException as error:
            ending = ending_of(error, expected=FAILURES)
            if ending is None:
                raise
            say(error=ending.message.removeprefix("error: "))
        else:
            say()


if __name__ == "__main__":
    run_helper(_answer)
