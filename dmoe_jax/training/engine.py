"""A model in training, as the run loop sees it: on this device, over a swarm, or simulated."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from dmoe_jax.arrays import PyTree
from dmoe_jax.model import Evaluation
from dmoe_jax.trainer import OnLost, OnStep

OnBatch = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Running totals of a model in training, since its first step."""

    items: int = 0
    """Tokens or samples trained on."""
    staleness: int = 0
    """Sum over steps of the trunk updates that others made meanwhile."""
    steps_lost: int = 0
    """Steps given up."""
    calls_ok: int = 0
    """Expert calls that were answered in time."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Reason ("timeout", "late") -> expert calls that failed for it."""
    load: Mapping[str, int] = field(default_factory=dict)
    """uid ("layer0.3.1") -> samples sent to this expert in training. Empty for a dense model."""
    peers: Mapping[str, str] = field(default_factory=dict)
    """uid -> address of the node that last answered for this expert."""
    figures: Mapping[str, float | int | None] = field(default_factory=dict)
    """Further figures of the engine for the headline, by name."""
    virtual_s: float | None = None
    """Seconds of virtual time; None for a model that is not simulated."""

    @property
    def calls_failed(self) -> int:
        """Expert calls that brought no answer in time, for whatever reason."""
        return sum(self.failures.values())


@runtime_checkable
class Engine(Protocol):
    """A model in training. If it waits for nothing, `autodiff.without_waiting` drives it without an event loop."""

    @property
    def name(self) -> str:
        """Name of the model in figures and messages."""

    @property
    def step(self) -> int:
        """Trunk updates so far."""

    @property
    def layers(self) -> Mapping[str, tuple[str, ...]]:
        """Layer ("layer0") -> uids of its experts. Empty for a dense model."""

    async def advance(self, num_steps: int, on_step: OnStep, on_lost: OnLost) -> None:
        """Make exactly `num_steps` further updates; tell `on_step` of each in order, `on_lost` of those given up.

        At its end it may lay down what is not in `state` (links, calls under way): a run that pauses is a row of calls,
        and may be resumed between any two.

        Raises:
          FloatingPointError: a loss is not finite; the message names the model and the step. RouterError: the router's
            scores are the cause. NetError: the swarm cannot carry it.
        """

    async def evaluate(self, split: str, *, max_items: int | None, on_batch: OnBatch) -> Evaluation:
        """Evaluate the parameters as they are now, on "valid" or "test".

        Args:
          max_items: about so many tokens or samples, which stand for the whole; None for all.
          on_batch: told the batches done and, where that is known, their number.

        Raises:
          NetError: the swarm cannot carry it.
        """

    def state(self) -> PyTree:
        """Arrays that decide what follows: parameters, optimiser states, memories. Valid until the next update."""

    async def snapshot(self) -> tuple[int, PyTree]:
        """The step, and a copy of the state after it on the host, taken between two updates."""

    def facts(self) -> dict[str, Any]:
        """The rest of the state, in JSON: counters, places in the data, totals."""

    def load(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        """Go on from a step's `state` and `facts`, which an engine with the same settings returned."""

    def totals(self) -> Totals: ...
