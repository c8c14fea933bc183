"""The dense baseline under the asynchrony of `simulated`: as many trainers share the whole model.

Each applies its gradient an exponential delay after it has read the parameters that it is for. Nothing of theirs fails,
since a dense model places no calls.
"""

import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import trio

from dmoe_jax.data.batches import Batch
from dmoe_jax.device import InlineDevice
from dmoe_jax.models import dense_transformer_xl as dense
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.trunk import Memory, StepKeys, forget, step_keys
from dmoe_jax.trainer import StepRecord, all_finite
from dmoe_jax.training.engine import OnLost, OnStep
from dmoe_jax.trunk import SharedTrunk
from dmoe_jax.types import PyTree
from experiments.transformer_xl.setup import Setup
from experiments.transformer_xl.stretches import Setting, SimulatedEngine


class SimulatedDense(SimulatedEngine):
    """A dense Transformer-XL trained by asynchronous trainers in virtual time. An `Engine`."""

    def __init__(self, setup: Setup, setting: Setting) -> None:
        params = dense.init(jax.random.key(setup.seed), setup.config, word_counts=setup.word_counts)
        super().__init__(setup, setting, SharedTrunk(params, setup.optimizer, InlineDevice()))
        self._loss_and_grads = _dense_gradient(setup.config)

    async def stretch(self, last_step: int, on_step: OnStep, on_lost: OnLost) -> None:
        async def live(index: int) -> None:
            while self.trunk.claim(last_step):
                try:
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
        self.counters.virtual_s += trio.current_time() - started

    async def _step(self, index: int) -> StepRecord:
        """Read the parameters, wait, and apply the gradient to what they have become."""
        stream, delay_s, seed = self.streams[index], self.setting.delay_s, self.setup.seed
        position = stream.position
        keys = step_keys(
            num_layers=self.setup.config.num_layers,
            batch=stream.batch_size,
            seed=seed,
            trainer=index,
            step=position,
        )
        batch = next(stream)
        read_at = self.trunk.step
        (loss, memory), grads = self._loss_and_grads(self.trunk.params, batch, self.memories[index], keys)
        if not all_finite(loss, grads):
            raise FloatingPointError(f"trainer {index}: loss {float(loss)} or its gradient is not finite")
        rng = random.Random(repr((seed, index, position)))
        await trio.sleep(rng.expovariate(1 / delay_s) if delay_s else 0.0)
        step = await self.trunk.apply(grads)
        self.memories[index] = memory
        return StepRecord(
            step=step,
            trainer=index,
            loss=float(loss),
            items=int(batch.targets.size),
            staleness=step - 1 - read_at,
        )

    def params(self) -> PyTree:
        return self.trunk.params


@functools.cache
def _dense_gradient(config: TransformerXLConfig) -> Any:
    """The compiled (params, batch, memory, keys) -> ((loss, next memory), gradients)."""

    def loss(params: PyTree, batch: Batch, memory: Memory, keys: StepKeys) -> tuple[Any, Memory]:
        memory = forget(memory, jnp.asarray(batch.is_first))
        nll, memory = dense.forward(params, config, batch, memory, keys=keys)
        return jnp.mean(nll), memory

    return jax.jit(jax.value_and_grad(loss, has_aux=True))
