"""Pieces of runs, timed as the runs will be trained: so many at once, each in a process with its share of the cores."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import trio

from dmoe_jax.data.corpora import load_corpus
from dmoe_jax.runs.command_line import parse_command_line
from dmoe_jax.runs.endings import UsageError, one_line
from dmoe_jax.runs.setting_up import set_up_jax
from dmoe_jax.trainer import first_leaf
from experiments.compare_routers.budget import Cost, time_piece
from experiments.processes import HelperFailed, open_helpers, orders, run_helper, say
from experiments.transformer_xl.settings import NAME, TransformerXLSettings
from experiments.transformer_xl.side_by_side import shares_of_cores
from experiments.transformer_xl.training import FAILURES
from experiments.transformer_xl.trainings import Training


def time_pieces(
    trainings: Mapping[str, Training], *, data: str, num_jobs: int, note: Callable[[str, Cost], object]
) -> dict[str, Cost]:
    """Time a short piece of each run, `num_jobs` of them at once.

    Args:
      trainings: by the name under which `note` hears of them.
      data: their corpus, as `--data` asks for it.

    Raises:
      UsageError: a router or its settings will not do, or the time cannot be taken.
    """
    names, costs = list(trainings), dict[str, Cost]()
    try:
        settings = [{"cores": cores, "data": data} for cores in shares_of_cores(min(num_jobs, len(names)))]
        with open_helpers("experiments.compare_routers.pieces", settings) as helpers:
            for first in range(0, len(names), len(helpers)):
                asked = list(zip(helpers, names[first : first + len(helpers)], strict=False))
                for helper, name in asked:
                    helper.tell(label=trainings[name].label, flags=trainings[name].settings.flags("out", "resume"))
                for helper, name in asked:
                    answer = helper.hear()
                    if "error" in answer:
                        raise UsageError(answer["error"])
                    costs[name] = Cost(**answer)
                    note(name, costs[name])
    except HelperFailed as error:
        raise UsageError(str(error)) from error
    return costs


async def _answer(*, cores: Sequence[int], data: str) -> None:
    """A helper's whole life."""
    if cores:
        os.sched_setaffinity(0, cores)
    set_up_jax()
    corpus = load_corpus(source=data)
    say()
    async for order in orders():
        settings: TransformerXLSettings = parse_command_line(TransformerXLSettings, prog=NAME, args=order["flags"])
        training = Training(label=order["label"], settings=settings)
        try:
            # In a thread: a simulated swarm has an event loop of its own.
            say(**asdict(await trio.to_thread.run_sync(time_piece, training, corpus)))
        except (*FAILURES, ValueError, ExceptionGroup) as error:
            say(error=f"{training.label}: {one_line(first_leaf(error))}")


if __name__ == "__main__":
    run_helper(_answer)
