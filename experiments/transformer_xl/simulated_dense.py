"""The dense baseline under the asynchrony of `simulated`: as many trainers share the whole model.

Each applies its gradient an exponential delay after it has read the parameters that it is for. Nothing of theirs fails,
since a dense model places no calls.
"""

import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import trio

from dmoe_jax.data.batches import Batch
from dmoe_jax.device import InlineDevice
from dmoe_jax.model import Evaluation
from dmoe_jax.models import dense_transformer_xl as dense
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.trunk import Memory, StepKeys, empty_memory, forget, step_keys
from dmoe_jax.trainer import StepRecord, all_finite
from dmoe_jax.trunk import SharedTrunk
from dmoe_jax.types import PyTree
from experiments.transformer_xl.engine import Totals
from experiments.transformer_xl.evaluation import EvaluationConfig, dense_evaluator
from experiments.transformer_xl.stretches import Setting, Stretches
from net.transport.sim import run


class SimulatedDense:
    """A dense Transformer-XL trained by asynchronous trainers in virtual time. An `Engine`.

    Args: as of `SimulatedDmoe`; `config` is that of the dense model.
    """

    def __init__(
        self,
        *,
        name: str,
        config: TransformerXLConfig,
        ids: np.ndarray,
        word_counts: np.ndarray | None,
        optimizer: optax.GradientTransformation,
        setting: Setting,
        evaluation: EvaluationConfig,
        seed: int,
    ) -> None:
        self.name = name
        self._config = config
        self._run = Stretches(name=name, ids=ids, seq_len=config.seq_len, setting=setting, seed=seed)
        params = dense.init(jax.random.key(seed), config, word_counts=word_counts)
        self._trunk = SharedTrunk(params, optimizer, InlineDevice())
        self._memories: list[Memory] = [empty_memory(config, setting.batch_size) for _ in range(setting.num_trainers)]
        self._loss_and_grads = _dense_gradient(config)
        self._evaluate = dense_evaluator(config, evaluation)

    @property
    def step(self) -> int:
        """Updates so far."""
        return self._trunk.step

    def advance(self, num_steps: int, on_step: Callable[[StepRecord], None]) -> None:
        """See `Engine.advance`."""
        run(self._stretch, self.step + num_steps, on_step, seed=self._run.seed_of(self.step))

    async def _stretch(self, last_step: int, on_step: Callable[[StepRecord], None]) -> None:
        async def live(index: int) -> None:
            while self._trunk.claim(last_step):
                try:
                    record = await self._step(index)
                except FloatingPointError as error:
                    self._run.lost(index, error)
                else:
                    self._run.took(record)
                    on_step(record)
                finally:
                    self._trunk.release()

        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for index in range(self._run.setting.num_trainers):
                nursery.start_soon(live, index)
        self._run.counters.virtual_s += trio.current_time() - started

    async def _step(self, index: int) -> StepRecord:
        """Read the parameters, wait, and apply the gradient to what they have become."""
        stream, delay_s = self._run.streams[index], self._run.setting.delay_s
        place = (self._run.seed, index, stream.position)
        keys = step_keys(
            num_layers=self._config.num_layers, batch=stream.batch_size, seed=place[0], trainer=index, step=place[2]
        )
        batch = next(stream)
        read_at = self._trunk.step
        (loss, memory), grads = self._loss_and_grads(self._trunk.params, batch, self._memories[index], keys)
        if not all_finite(loss, grads):
            raise FloatingPointError(f"trainer {index}: loss {float(loss)} or its gradient is not finite")
        await trio.sleep(random.Random(repr(place)).expovariate(1 / delay_s) if delay_s else 0.0)
        step = await self._trunk.apply(grads)
        self._memories[index] = memory
        return StepRecord(
            step=step,
            trainer=index,
            loss=float(loss),
            items=int(batch.targets.size),
            staleness=step - 1 - read_at,
        )

    def evaluate(
        self, ids: np.ndarray, *, max_tokens: int | None, on_batch: Callable[[], None] = lambda: None
    ) -> Evaluation:
        """See `Engine.evaluate`."""
        return self._evaluate(self._trunk.params, ids, max_tokens=max_tokens, on_batch=on_batch)

    def state(self) -> PyTree:
        """See `Engine.state`."""
        return {"trunk": self._trunk.state, "memories": tuple(self._memories)}

    def facts(self) -> dict[str, Any]:
        """See `Engine.facts`."""
        return {**self._run.facts(), "step": self.step}

    def load(self, state: PyTree, facts: Mapping[str, Any]) -> None:
        """See `Engine.load`."""
        self._run.load(facts)
        self._trunk.restore(facts["step"], state["trunk"])
        self._memories = [jax.tree.map(jnp.asarray, memory) for memory in state["memories"]]

    def totals(self) -> Totals:
        """See `Engine.totals`."""
        counters = self._run.counters
        return Totals(
            tokens=counters.tokens,
            staleness=counters.staleness,
            calls_ok=0,
            calls_failed=0,
            steps_lost=counters.steps_lost,
            virtual_s=counters.virtual_s,
            load={},
        )


@functools.cache
def _dense_gradient(config: TransformerXLConfig) -> Any:
    """The compiled (params, batch, memory, keys) -> ((loss, next memory), gradients)."""

    def loss(params: PyTree, batch: Batch, memory: Memory, keys: StepKeys) -> tuple[Any, Memory]:
        memory = forget(memory, jnp.asarray(batch.is_first))
        nll, memory = dense.forward(params, config, batch, memory, keys=keys)
        return jnp.mean(nll), memory

    return jax.jit(jax.value_and_grad(loss, has_aux=True))
