"""A run in virtual time as a chain of *stretches*, each a simulation of its own; and the dense models in it.

A stretch begins and ends with nobody at work: between two the model can be evaluated and saved. Every run pauses at the
same steps, so one that was interrupted and resumed from such a pause repeats the one that was not, bit for bit.
Trainers keep their memory of the text across a pause; staleness begins at zero again and grows to its mean within as
many updates as there are trainers.
"""

import abc
import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import trio

from dmoe_jax.arrays import PyTree
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.trunk import Memory, empty_memory
from dmoe_jax.optim.recipe import make_optimizer
from dmoe_jax.trainer import OnLost, OnStep, StepRecord, all_finite
from dmoe_jax.training.engine import Totals
from dmoe_jax.trunk import SharedTrunk
from dmoe_net.errors import NoQuorum
from dmoe_net.transport.sim import run
from experiments.transformer_xl.setup import Setting, Setup, SetupEngine, dense_loss

_MAX_LOST_IN_A_ROW = 200
"""Steps lost one after the other, all trainers together, after which a run cannot be helped."""


class SimulatedEngine(SetupEngine):
    """Base of the engines in virtual time: streams, trainers' memories, counters, and a run's stretches.

    Args:
      setup: the model, its text and its optimisers.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.setting = setup.setting or Setting()
        self.device = InlineDevice()
        self.trunk = SharedTrunk(setup.init_trunk(), make_optimizer(setup.recipe), self.device)
        num = self.setting.num_trainers
        self.streams = [setup.stream(shard=index, num_shards=num) for index in range(num)]
        self.memories: list[Memory] = [empty_memory(setup.config, setup.rows) for _ in range(num)]
        self.counters: dict[str, Any] = {"items": 0, "staleness": 0, "steps_lost": 0, "virtual_s": 0.0}
        self.turns = trio.CapacityLimiter(self.setting.concurrency or num)
        """Whose holders may be at work; who waits longest comes next."""
        self._lost_in_a_row = 0

    @property
    def step(self) -> int:
        return self.trunk.step

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
            self.counters["items"] += record.items
            self.counters["staleness"] += record.staleness
            on_step(record)

        def count_lost(trainer: int, error: Exception) -> None:
            self.counters["steps_lost"] += 1
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

    def state(self) -> dict[str, PyTree]:
        return {"trunk": self.trunk.state, "memories": tuple(self.memories)}

    def facts(self) -> dict[str, Any]:
        return {"positions": [stream.position for stream in self.streams], "counters": dict(self.counters)}

    def load(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        self.trunk.restore(step, state["trunk"])
        self.memories = [jax.tree.map(jnp.asarray, memory) for memory in state["memories"]]
        for stream, position in zip(self.streams, facts["positions"], strict=True):
            stream.seek(position)
        self.counters = dict(facts["counters"])

    def totals(self) -> Totals:
        return Totals(**self.counters)


class SimulatedDense(SimulatedEngine):
    """The dense baseline: as many trainers as of the mixture share the whole model. An `Engine`.

    Each applies its gradient an exponential delay after it has read the parameters that it is for. Nothing of theirs
    fails, since a dense model places no calls.
    """

    async def stretch(self, last_step: int, on_step: OnStep, on_lost: OnLost) -> None:
        async def live(index: int) -> None:
            while self.trunk.claim(last_step):
                try:
                    async with self.turns:
                        record = await self._step(index)
                except FloatingPointError as error:
                    on_lost(index, error)
                else:
                    on_step(record)
                finally:
                    self.trunk.release()

        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for index in range(self.setting.num_trainers):
                nursery.start_soon(live, index)
        self.counters["virtual_s"] += trio.current_time() - started

    async def _step(self, index: int) -> StepRecord:
        """Read the parameters, wait, and apply the gradient to what they have become."""
        stream, delay_s = self.streams[index], self.setting.delay_s
        position = stream.position
        batch, keys = next(stream), self.setup.step_keys(trainer=index, step=position)
        read_at = self.trunk.step
        gradient = _dense_gradient(self.setup.config)
        (loss, memory), grads = gradient(self.trunk.params, batch, self.memories[index], keys)
        if not all_finite(loss, grads):
            raise FloatingPointError(f"trainer {index}: loss {float(loss)} or its gradient is not finite")
        rng = random.Random(repr((self.setup.seed, index, position)))
        await trio.sleep(rng.expovariate(1 / delay_s) if delay_s else 0.0)
        step = await self.trunk.apply(grads, read_at=read_at)
        self.memories[index] = memory
        items, staleness = int(batch.targets.size), step - 1 - read_at
        return StepRecord(step=step, trainer=index, loss=float(loss), items=items, staleness=staleness)

    def params(self) -> tuple[PyTree, tuple[PyTree, ...]]:
        return self.trunk.params, ()


@functools.cache
def _dense_gradient(config: TransformerXLConfig) -> Callable[..., Any]:
    """The compiled (params, batch, memory, keys) -> ((loss, next memory), gradients)."""

    def loss(params: PyTree, *batch: Any) -> tuple[Any, Memory]:
        return dense_loss(params, config, *batch)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))
