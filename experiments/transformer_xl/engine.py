"""What the driver asks of a model in training, wherever it trains: on this device, or in a simulated swarm."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dmoe_jax.model import Evaluation
from dmoe_jax.trainer import StepRecord
from dmoe_jax.types import PyTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Running totals of a model in training, since its first step."""

    tokens: int = 0
    """Target tokens trained on."""
    staleness: int = 0
    """Sum over steps of the trunk updates that others made meanwhile."""
    calls_ok: int = 0
    """Expert calls that were answered in time."""
    calls_failed: int = 0
    """Expert calls that were not."""
    steps_lost: int = 0
    """Steps given up."""
    virtual_s: float | None = None
    """Seconds of virtual time; None for a model that is not simulated."""
    load: Mapping[str, int] = field(default_factory=dict)
    """uid ("layer0.3.1") -> samples sent to this expert in training. Empty for a dense model."""


@runtime_checkable
class Engine(Protocol):
    """A model in training. All that surrounds it, the run folder and resuming, is the driver's."""

    @property
    def name(self) -> str:
        """What figures and messages call the model."""

    @property
    def step(self) -> int:
        """Trunk updates so far."""

    def advance(self, num_steps: int, on_step: Callable[[StepRecord], None]) -> None:
        """Make exactly `num_steps` further updates; blocks.

        A run is a row of such calls; each may lay down what is not in `state` (links, calls under way) at its end, so
        that a run resumed between two of them goes on as if it had never stopped.

        Args:
          on_step: called after each update, in order; an engine may be ahead of what it reports.

        Raises:
          FloatingPointError: a loss is not finite; the message names the model and the step. RouterError: the router's
            scores are the cause. NetError: the swarm cannot carry it. After any of these, or a KeyboardInterrupt, the
            engine is unusable, and a run goes on from its last checkpoint.
        """

    def evaluate(
        self, ids: np.ndarray, *, max_tokens: int | None, on_batch: Callable[[], None] = lambda: None
    ) -> Evaluation:
        """Perplexity of a text. Changes nothing, and gives the same every time.

        Args:
          ids: the text.
          max_tokens: evaluate about so many of its words, from evenly spaced places; None for all.
          on_batch: called after each batch, to show progress.
        """

    def state(self) -> PyTree:
        """Arrays that decide what follows: parameters, optimiser states, memories. Valid until the next `advance`."""

    def facts(self) -> dict[str, Any]:
        """What JSON can hold of the rest: counters, places in the text, totals."""

    def load(self, state: PyTree, facts: Mapping[str, Any]) -> None:
        """Go on from what `state` and `facts` returned in a run with the same settings."""

    def totals(self) -> Totals:
        """Running totals."""
