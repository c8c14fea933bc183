"""A trainable model, as trainers see it. `dmoe_jax.models` holds two; `examples/own_model.py` is one of one's own."""

import abc
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, SupportsInt, TypeVar, cast, runtime_checkable

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from dmoe_jax.arrays import PyTree
from dmoe_jax.autodiff import Recording, Value
from dmoe_jax.mesh.layout import rows_like

Batch = TypeVar("Batch")
State = TypeVar("State")


class Outcome(NamedTuple):
    """Result of `Model.forward`.

    Attributes:
      loss: scalar on the tape that is differentiated, auxiliary losses included.
      state: state that the trainer's next batch begins with, such as a memory of the text; () for nothing.
      reported: scalar that logs and evaluations show; None: the loss.
      items: samples or tokens that the loss is a mean of, for throughput, weights and evaluations.
      metrics: further scalars on the tape by name, means over the items too, such as an accuracy.
    """

    loss: Value
    state: PyTree = ()
    reported: Value | None = None
    items: SupportsInt = 1
    metrics: dict[str, Value] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Figures of an evaluation."""

    loss: float
    """Mean of the reported loss over all samples or tokens."""
    items: int
    """Number of samples or tokens."""
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Further figures by name, such as an accuracy."""
    targets: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32), repr=False)
    """[tokens], the words that were predicted, for baselines over the same words; language models only."""

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite beyond what a float holds."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


class Model(abc.ABC, Generic[Batch, State]):
    """A trainable model of batches and a state between them: `init` and `forward`; the rest has a default."""

    name: str = "model"
    """Name in reports and figures."""
    unit: str = "samples"
    """Unit of `Outcome.items`, for people."""
    meaning: str = ""
    """Meaning of its parameters' numbers beyond names and shapes, a fact a line, such as a hash of the words that the
    rows of an embedding stand for. Averages, states and checkpoints of another meaning are refused."""

    @abc.abstractmethod
    def init(self, key: PRNGKeyArray) -> PyTree:
        """Parameters of everything that is not remote."""

    @abc.abstractmethod
    async def forward(self, run: Recording, params: PyTree, batch: Batch, state: State, keys: PyTree) -> Outcome:
        """The loss of one batch.

        Args:
          run: the recording of this step; `run(function, *args)` is a jitted segment, of a function that is the same
            object in every step.
          params: as `init` made them, each array on the tape.
          state: state that the batch before returned; `initial_state` at first.
          keys: chance of this step, from `keys`; None in evaluation, when nothing may be random.

        Raises:
          NetError: the swarm could not carry it; the trainer drops the step and goes on.
        """

    def initial_state(self, batch: Batch) -> State:
        """The state before a trainer's first batch, or an evaluation's; default: (), of a model that has none."""
        return cast(State, ())

    def keys(self, batch: Batch, *, seed: int, trainer: int, step: int) -> PyTree:
        """Chance of one step: a function of the run's seed, the trainer's number and its step, so that runs repeat.

        Default: key data uint32 [2], which `jax.random.wrap_key_data` makes a key of inside a segment.
        """
        return np.random.SeedSequence([seed, trainer, step]).generate_state(2, np.uint32)

    async def evaluate(
        self, params: PyTree, batches: Iterable[Batch], on_batch: Callable[[], None] = lambda: None
    ) -> Evaluation:
        """The mean loss and metrics over batches in order, nothing random, no expert trained.

        `on_batch` is called after each. Raises NetError if the swarm cannot carry it, ValueError without a batch.
        """
        total, items, metrics, placed = 0.0, 0, dict[str, float](), rows_like(params)
        state: State | None = None
        for batch in map(placed, batches):
            before = self.initial_state(batch) if state is None else state
            run = Recording(differentiate=False)
            outcome = await self.forward(run, jax.tree.map(Value, params), batch, before, None)
            shown = outcome.loss if outcome.reported is None else outcome.reported
            counted = int(outcome.items)
            total += counted * float(shown.value)
            for name, value in (outcome.metrics or {}).items():
                metrics[name] = metrics.get(name, 0.0) + counted * float(value.value)
            items += counted
            state = outcome.state
            on_batch()
        if not items:
            raise ValueError("there is nothing to evaluate: no batch")
        means = {name: value / items for name, value in metrics.items()}
        return Evaluation(loss=total / items, items=items, metrics=means)


AnyModel = Model[Any, Any]
"""A model for code that hands batches and states on without a look at them."""


@runtime_checkable
class Trained(Protocol):
    """A trained model: `dmoe_jax.load_run` makes one."""

    def on(self, swarm: Any) -> Any:
        """The model with the experts of a swarm."""
        ...
