"""Which step comes next, with which flags, and what came of a command: pure functions."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dmoe_jax.runs.endings import EXIT_INTERRUPTED
from experiments.children import Ended
from experiments.gpu.steps import Step

Outcome = Literal["finished", "unfinished", "cut", "failed", "interrupted"]
"""Of a command. "unfinished" made progress, and the next one goes on; "cut" ran into its limit without any."""

_PRESET_EVAL_EVERY = 2500
"""Updates between two pauses of a full-size training, unless its timing says that they come too seldom."""
_PAUSE_MARGIN = 0.8
"""Of the longest stretch that fits into a command: a timing is never quite repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a step is."""

    is_finished: bool = False
    """Whether nothing is left to do."""
    commands: int = 0
    """How many were run for it."""
    strikes: int = 0
    """How many of these failed, or were cut without progress."""
    minutes: float = 0.0
    """What they took together."""
    headline: Mapping[str, Any] | None = None
    """What the last of them that had any figures found."""
    reason: str = ""
    """Why the last of them failed or was cut; else empty."""


def progress_of(step: Step, attempts: Sequence[Mapping[str, Any]]) -> Progress:
    """Sum up the attempts at a step; each is a record with `step`, `outcome`, `wall_s`, `headline` and `reason`."""
    own = [attempt for attempt in attempts if attempt["step"] == step.name]
    found = [attempt["headline"] for attempt in own if attempt.get("headline") is not None]
    return Progress(
        is_finished=any(attempt["outcome"] == "finished" for attempt in own),
        commands=len(own),
        strikes=sum(attempt["outcome"] in ("cut", "failed") for attempt in own),
        minutes=sum(attempt["wall_s"] for attempt in own) / 60,
        headline=found[-1] if found else None,
        reason=own[-1].get("reason", "") if own else "",
    )


def next_step(
    steps: Sequence[Step], progress: Mapping[str, Progress], given_up: Collection[str] = frozenset()
) -> Step | None:
    """The step to run: not finished, not given up, and its timing done; the one with the fewest failures first.

    So a step that fails each time does not keep the others from their turn. None: nothing is left that can be run.
    """

    def is_ready(step: Step) -> bool:
        return not step.timed_by or progress[step.timed_by].is_finished

    waiting = [
        step for step in steps if step.name not in given_up and not progress[step.name].is_finished and is_ready(step)
    ]
    return min(waiting, key=lambda step: progress[step.name].strikes, default=None)  # the first of equals


def flags_of(
    step: Step,
    *,
    minutes: float,
    is_quick: bool,
    timing: Mapping[str, Any] | None = None,
    begun: Mapping[str, Any] | None = None,
) -> list[str]:
    """The flags of the next command of a step.

    Args:
      step: what is to be run.
      minutes: limit of the command.
      is_quick: whether it is the step's quick run.
      timing: the headline of the step that timed it, if it has one.
      begun: the settings with which the step was begun before; pauses must stay where they are.

    Raises:
      ValueError: not one update of a training fits into a command.
    """
    flags = [*step.flags, *(["--quick"] if is_quick else [])]
    if step.stops:
        flags += ["--stop-after", f"{minutes - 1:g}"]
    if begun is not None:
        eval_every = begun.get("eval_every") if step.timed_by else None
    else:
        eval_every = None if timing is None or is_quick else _eval_every(step, timing, minutes)
    return flags + ([] if eval_every is None else ["--eval-every", str(eval_every)])


def _eval_every(step: Step, timing: Mapping[str, Any], minutes: float) -> int:
    """Updates between two pauses, so that several stretches or at least one fit into a command."""
    longest = min(plan["longest_eval_every"] for plan in timing["timing"].values())
    if (updates := min(_PRESET_EVAL_EVERY, int(_PAUSE_MARGIN * longest))) < 1:
        raise ValueError(
            f"{step.name}: not one update fits into a command of {minutes:g} minutes; --minutes N allows N"
        )
    return updates


def outcome_of(ended: Ended, *, made_progress: bool) -> tuple[Outcome, str]:
    """What came of a command, and why if it is no good.

    Args:
      ended: how it ended.
      made_progress: whether its figures are others than those of the command before.
    """
    if ended.was_cut:
        return ("unfinished", "") if made_progress else ("cut", "no progress within the limit; --minutes N allows more")
    if ended.status == EXIT_INTERRUPTED:
        return "interrupted", "ended from outside"
    if ended.failure:
        return "failed", ended.failure
    headline = ended.headline or {}
    # Experiments that train over several commands count their runs.
    is_finished = headline.get("runs") == headline.get("runs_finished")
    return ("finished", "") if is_finished else ("unfinished", "")
