"""A run in virtual time as a chain of *stretches*, each a simulation of its own.

A stretch begins and ends with nobody at work: between two the model can be evaluated and saved. Every run pauses at the
same steps, so one that was interrupted and resumed from such a pause repeats the one that was not, bit for bit.
Trainers keep their memory of the text across a pause; staleness begins at zero again and grows to its mean within as
many updates as there are trainers.
"""

import abc
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax.checkpoints import host_copy
from dmoe_jax.model import Evaluation
from dmoe_jax.models.trunk import Memory, empty_memory
from dmoe_jax.trainer import StepRecord
from dmoe_jax.training.engine import OnBatch, OnLost, OnStep, Totals
from dmoe_jax.trunk import SharedTrunk
from dmoe_jax.types import PyTree
from experiments.transformer_xl.setup import Setup
from net.errors import NoQuorum
from net.rpc.faults import Fault, FaultPlan
from net.transport.sim import run

_MAX_LOST_IN_A_ROW = 200
"""Steps lost one after the other, all trainers together, after which a run cannot be helped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The paper's: 32 trainers of batch 1, 1000 ms of mean delay, 10 % of the calls failing."""

    num_trainers: int = 32
    """Asynchronous trainers."""
    batch_size: int = 1
    """Sequences of each."""
    delay_s: float = 1.0
    """Mean of the exponential delay: of each expert call, and of each step of a dense model. Virtual seconds."""
    failure_rate: float = 0.1
    """Share of expert calls that are never answered."""
    num_nodes: int = 8
    """Hosts that share the experts."""
    grace_s: float = 5.0
    """How long a trainer waits for the other experts after the first has answered, virtual seconds: so long that hardly
    a call is lost but those that fail (1 in 150)."""
    timeout_s: float = 30.0
    """After which a call is given up, virtual seconds."""

    def __post_init__(self) -> None:
        if min(self.num_trainers, self.batch_size, self.num_nodes) < 1:
            raise ValueError(f"expected at least one trainer, row and node, got {self}")
        if not (self.delay_s >= 0 and 0 <= self.failure_rate < 1):
            raise ValueError(f"expected delay_s >= 0 and 0 <= failure_rate < 1, got {self}")

    def faults(self, seed: int) -> FaultPlan:
        """What happens to the expert calls."""
        rates = {Fault.LATE: 1 - self.failure_rate, Fault.HANG: self.failure_rate}
        return FaultPlan(rates=rates, late_mean_s=self.delay_s, methods=("expert.",), seed=seed)


@dataclass(slots=True)
class Counters:
    """Running totals of a simulated run."""

    items: int = 0
    staleness: int = 0
    steps_lost: int = 0
    virtual_s: float = 0.0


class SimulatedEngine(abc.ABC):
    """What engines in virtual time share: streams, trainers' memories, counters, and a run's stretches.

    Args:
      setup: the model, its text and its optimisers.
      setting: delays, failures and numbers.
      trunk: the parameters that all trainers share.
    """

    def __init__(self, setup: Setup, setting: Setting, trunk: SharedTrunk) -> None:
        num = setting.num_trainers
        self.setup = setup
        self.setting = setting
        self.trunk = trunk
        self.counters = Counters()
        self.streams = [setup.stream(setting.batch_size, shard=index, num_shards=num) for index in range(num)]
        self.memories: list[Memory] = [empty_memory(setup.config, setting.batch_size) for _ in range(num)]
        self._lost_in_a_row = 0

    @property
    def name(self) -> str:
        return self.setup.title

    @property
    def step(self) -> int:
        return self.trunk.step

    @property
    def layers(self) -> Mapping[str, tuple[str, ...]]:
        return self.setup.layers

    @property
    def stretch_seed(self) -> int:
        """Seed of the stretch that begins at this step."""
        return int(np.random.SeedSequence([self.setup.seed, self.step]).generate_state(1)[0])

    async def advance(self, num_steps: int, on_step: OnStep, on_lost: OnLost) -> None:
        """Simulate a stretch of so many updates.

        Raises:
          NoQuorum: so many steps were lost in a row that nothing will come of it.
        """

        def count_step(record: StepRecord) -> None:
            self._lost_in_a_row = 0
            self.counters.items += record.items
            self.counters.staleness += record.staleness
            on_step(record)

        def count_lost(trainer: int, error: Exception) -> None:
            self.counters.steps_lost += 1
            self._lost_in_a_row += 1
            on_lost(trainer, error)
            if self._lost_in_a_row > _MAX_LOST_IN_A_ROW:
                raise NoQuorum(
                    f"{self.name}: {self._lost_in_a_row} steps lost in a row, the last one by trainer {trainer}: "
                    f"{error}"
                ) from error

        self._lost_in_a_row = 0
        run(self.stretch, self.step + num_steps, count_step, count_lost, seed=self.stretch_seed)

    @abc.abstractmethod
    async def stretch(self, last_step: int, on_step: OnStep, on_lost: OnLost) -> None:
        """Train up to this step, in virtual time."""

    @abc.abstractmethod
    def params(self) -> PyTree:
        """What the setup's evaluator takes."""

    async def evaluate(self, split: str, *, max_items: int | None, on_batch: OnBatch) -> Evaluation:
        """Evaluate on this machine, with every expert alive."""
        return self.setup.evaluator(self.params(), self.setup.text(split), max_tokens=max_items, on_batch=on_batch)

    def state(self) -> PyTree:
        return {"trunk": self.trunk.state, "memories": tuple(self.memories)}

    async def snapshot(self) -> tuple[int, PyTree]:
        return self.step, host_copy(self.state())

    def facts(self) -> dict[str, Any]:
        return {"positions": [stream.position for stream in self.streams], "counters": asdict(self.counters)}

    def load(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        self.trunk.restore(step, state["trunk"])
        self.memories = [jax.tree.map(jnp.asarray, memory) for memory in state["memories"]]
        for stream, position in zip(self.streams, facts["positions"], strict=True):
            stream.seek(position)
        self.counters = Counters(**facts["counters"])

    def totals(self) -> Totals:
        return Totals(**asdict(self.counters))
