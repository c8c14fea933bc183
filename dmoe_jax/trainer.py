"""Asynchronous trainers of one Transformer-XL trunk whose layers are remote mixtures.

Theory of operation. Several trainers run as tasks of one process, each on its own part of the text with its own
memory. A trainer takes the trunk parameters as they are, computes loss and gradients (most of the time it waits for
experts, while the others compute), and applies its gradient to the parameters as they are *then*: between the two,
others may have stepped. That staleness is the price for never waiting for each other (Learning@home section 3.3). The
experts learn in the backward pass, at their own nodes.

A step that fails (no quorum, the swarm unreachable) is dropped and counted, and the trainer goes on with the next
text; memory then restarts from what it was.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import trio

from dmoe_jax.autodiff import Recording, Value, value_and_grad
from dmoe_jax.data.batches import Batch, SegmentStream
from dmoe_jax.mixture.remote import RemoteMixture
from dmoe_jax.model import Evaluation
from dmoe_jax.models.transformer_xl import (
    LayerMemory,
    Memory,
    Segments,
    TransformerXLConfig,
    empty_memory,
    expert_inputs,
    forget,
)
from dmoe_jax.models.trunk import StepKeys, step_keys
from dmoe_jax.trunk import SharedTrunk
from dmoe_jax.types import PyTree
from net.errors import NetError

MAX_NOT_FINITE = 20
"""Steps of one trainer in a row that may come out as NaN or infinity. One bad batch, or an expert that recovers, makes
fewer; parameters that are beyond help would lose steps for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one training step did.

    Attributes:
      step: number of the trunk update, from 1.
      trainer: index of the trainer.
      loss: mean negative log-likelihood of the batch, nats per token.
      items: target tokens in the batch.
      staleness: trunk updates by other trainers between this step's reading and writing of the parameters.
    """

    step: int
    trainer: int
    loss: float
    items: int
    staleness: int


class SwarmModel:
    """The Transformer-XL language model with remote mixtures: forward, training step and evaluation.

    Args:
      config: sizes of the model.
      segments: its jitted parts, see `dmoe_jax.models.transformer_xl`.
      mixtures: one remote mixture a layer.
    """

    def __init__(self, config: TransformerXLConfig, segments: Segments, mixtures: Sequence[RemoteMixture]) -> None:
        if len(mixtures) != config.num_layers:
            raise ValueError(f"expected {config.num_layers} mixtures, one a layer, got {len(mixtures)}")
        self._config = config
        self._segments = segments
        self._mixtures = tuple(mixtures)
        self.loss_and_grads = value_and_grad(self._forward, has_aux=True)
        """async (params, batch, memory, keys) -> ((total, (loss, next memory)), grads); keys None: nothing random."""

    def empty_memory(self, batch_size: int) -> Memory:
        """The memory before the first segment of text."""
        return empty_memory(self._config, batch_size)

    def step_keys(self, stream: SegmentStream, *, seed: int, trainer: int) -> StepKeys:
        """The random keys of the step on the stream's next batch: a step has its own, whatever came before it."""
        return step_keys(
            num_layers=self._config.num_layers,
            batch=stream.batch_size,
            seed=seed,
            trainer=trainer,
            step=stream.position,
        )

    async def _hidden(
        self, run: Recording, params: PyTree, batch: Batch, memory: Memory, keys: StepKeys | None
    ) -> tuple[Value, list[Value], Memory]:
        """The last layer's hidden states, the routers' auxiliary losses, and the memory for the next segment."""
        hidden = run(self._segments.embed, params["embed"], batch.tokens, None if keys is None else keys.embed)
        if batch.is_first.any():
            memory = forget(memory, jnp.asarray(batch.is_first))
        memories, penalties = [], []
        for layer, mixture in enumerate(self._mixtures):
            gate_key, dropout_key = (None, None) if keys is None else (keys.gates[layer], keys.experts[layer])
            ids = batch.tokens[:, 0]
            scores = run(self._segments.gate, params["gates"][layer], hidden, memory[layer], ids, gate_key)
            # Off the tape: memory is a constant to the gradient, in this segment of text and in the next.
            memories.append(_next_memory(self._segments.next_memory, memory[layer], hidden.value))
            inputs = expert_inputs(self._config, hidden, memory[layer], dropout_key)
            hidden, penalty = await mixture(run, scores, *inputs)
            penalties.append(penalty)
        return hidden, penalties, tuple(memories)

    async def _forward(
        self, run: Recording, params: PyTree, batch: Batch, memory: Memory, keys: StepKeys | None
    ) -> tuple[Value, tuple[Value, Memory]]:
        hidden, penalties, memory = await self._hidden(run, params, batch, memory, keys)
        head_key = None if keys is None else keys.head
        loss = run(self._segments.loss_head, params["embed"], params["head"], hidden, batch.targets, head_key)
        return run(_total, loss, penalties), (loss, memory)

    async def evaluate(
        self, params: PyTree, batches: Iterable[Batch], on_batch: Callable[[], None] = lambda: None
    ) -> Evaluation:
        """Loss over consecutive batches, with memory carried from one to the next. Experts are not trained.

        Args:
          params: the trunk's parameters.
          batches: `evaluation_segments` of a text; targets outside a batch's mask do not count.
          on_batch: called after each batch, to show progress.

        Raises:
          NetError: when the swarm cannot carry it. ValueError: when there is nothing to evaluate.
        """
        memory: Memory | None = None
        total, counted = 0.0, []
        for batch in batches:
            memory = memory if memory is not None else self.empty_memory(batch.tokens.shape[0])
            run = Recording(differentiate=False)
            hidden, _, memory = await self._hidden(run, params, batch, memory, None)
            nll = run(self._segments.token_nll, params["embed"], params["head"], hidden, batch.targets, None)
            total += float(np.asarray(nll.value)[batch.mask].sum(dtype=np.float64))
            counted.append(batch.targets[batch.mask])
            on_batch()
        targets = np.concatenate(counted) if counted else np.zeros(0, np.int32)
        if not targets.size:
            raise ValueError("there is nothing to evaluate: the text has no target")
        return Evaluation(loss=total / targets.size, items=targets.size, targets=targets)


class Trainer:
    """One asynchronous trainer: its stream of text and its memory.

    Args:
      index: number of the trainer in its process.
      model: the model, shared. trunk: the parameters, shared.
      stream: this trainer's part of the text.
      seed: of the run. Dropout and the router's noise follow from it, the trainer's number and its place in the text.
    """

    def __init__(
        self, index: int, model: SwarmModel, trunk: SharedTrunk, stream: SegmentStream, *, seed: int = 0
    ) -> None:
        self._index = index
        self._model = model
        self._trunk = trunk
        self._seed = seed
        self.stream = stream
        self.memory: Memory | None = None
        """What this trainer remembers of the text; None before its first step."""

    async def step(self) -> StepRecord:
        """Take one step.

        If cancelled, the trunk is untouched or stepped, never in between; experts may have learnt already.

        Raises:
          NetError: when the swarm could not carry the step; the trainer can go on with the next one.
          FloatingPointError: when the loss or a gradient is not finite; the trunk is untouched.
        """
        keys = self._model.step_keys(self.stream, seed=self._seed, trainer=self._index)
        batch = next(self.stream)
        if self.memory is None:
            self.memory = self._model.empty_memory(batch.tokens.shape[0])
        started_at = self._trunk.step
        (_, (loss, memory)), grads = await self._model.loss_and_grads(self._trunk.params, batch, self.memory, keys)
        if not all_finite(loss, grads):
            raise FloatingPointError(f"trainer {self._index}: loss {float(loss)} or its gradient is not finite")
        step = await self._trunk.apply(grads)
        self.memory = memory
        return StepRecord(
            step=step,
            trainer=self._index,
            loss=float(loss),
            items=int(batch.targets.size),
            staleness=step - 1 - started_at,
        )

    async def run(
        self, num_steps: int, on_step: Callable[[StepRecord], None], on_lost: Callable[[int, Exception], None]
    ) -> None:
        """Step until the trunk has `num_steps` updates, or other trainers are making the last of them.

        Args:
          on_step: called after each step of this trainer. on_lost: called with the trainer and the error of a step
            that was dropped. A trainer that loses steps waits 0.1 s times the losses in a row (5 s at most).

        Raises:
          FloatingPointError: so many steps in a row were not finite that the model is beyond help.
          RouterError: the router's scores are not numbers.
        """
        lost_in_a_row = not_finite_in_a_row = 0
        while self._trunk.claim(num_steps):
            try:
                record = await self.step()
            except (NetError, FloatingPointError) as error:
                not_finite_in_a_row = not_finite_in_a_row + 1 if isinstance(error, FloatingPointError) else 0
                if not_finite_in_a_row > MAX_NOT_FINITE:
                    raise
                on_lost(self._index, error)
                lost_in_a_row += 1
            else:
                on_step(record)
                lost_in_a_row = not_finite_in_a_row = 0
            finally:
                self._trunk.release()
            if lost_in_a_row:
                await trio.sleep(min(5.0, 0.1 * lost_in_a_row))


@jax.jit
def _total(loss: Any, penalties: Sequence[Any]) -> Any:
    return sum(penalties, start=loss)


@jax.jit
def _squared_norm(tree: PyTree) -> Any:
    return optax.tree.norm(tree, squared=True)


@functools.partial(jax.jit, static_argnums=0)
def _next_memory(function: Callable[..., LayerMemory], memory: LayerMemory, hidden: Any) -> LayerMemory:
    return function(memory, hidden)


def all_finite(loss: Any, grads: PyTree) -> bool:
    """Whether a loss and all its gradients are numbers."""
    return bool(np.isfinite(loss) and jnp.isfinite(_squared_norm(grads)))
