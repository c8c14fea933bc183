"""Perplexity of a text: read in segments, memory carried from one to the next, every target counted once."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax.data.batches import Batch, evaluation_segments
from dmoe_jax.model import Evaluation
from dmoe_jax.models import dense_transformer_xl as dense
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.trunk import Memory, empty_memory
from dmoe_jax.routing.base import Router
from dmoe_jax.training.engine import OnBatch
from dmoe_jax.types import PyTree


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """How a text is read for its perplexity; the recipe's values."""

    batch_size: int = 10
    """Rows, each from another place of the text. Its first words lack the memory of what came before them."""
    seq_len: int | None = None
    """Positions of a segment; None: as in training."""
    mem_len: int | None = None
    """Memory slots; None: as in training."""
    clamp_len: int | None = None
    """Largest distance that is told apart, for memories longer than those of training; None: as in training."""
    same_length: bool = False
    """Whether every position sees mem_len keys, wherever in its segment it stands."""

    def of(self, config: TransformerXLConfig) -> TransformerXLConfig:
        """The model's configuration with these lengths."""
        chosen = {
            name: value for name in ("seq_len", "mem_len", "clamp_len") if (value := getattr(self, name)) is not None
        }
        return config.replace(**chosen, same_length=self.same_length or config.layer.same_length)


class Evaluator(Protocol):
    """Evaluates parameters on a text."""

    def __call__(self, params: PyTree, ids: np.ndarray, *, max_tokens: int | None, on_batch: OnBatch) -> Evaluation:
        """The loss over the text, or over `max_tokens` of it in evenly spaced places.

        Raises:
          FloatingPointError: the loss is not a number.
        """
        ...


@functools.cache
def dense_evaluator(config: TransformerXLConfig, evaluation: EvaluationConfig) -> Evaluator:
    """An evaluator of a dense model; `params` as from `dense.init`."""
    own = evaluation.of(config)

    def token_nll(params: PyTree, batch: Batch, memory: Memory) -> tuple[Any, Memory]:
        return dense.forward(params, own, batch, memory)

    return functools.partial(_evaluate, jax.jit(token_nll), own, evaluation.batch_size)


@functools.cache
def dmoe_evaluator(config: TransformerXLConfig, router: Router, evaluation: EvaluationConfig) -> Evaluator:
    """An evaluator of a DMoE model on this machine with all experts alive; `params` are (trunk, stacked experts)."""
    own = evaluation.of(config)

    def token_nll(params: PyTree, batch: Batch, memory: Memory) -> tuple[Any, Memory]:
        trunk, experts = params
        _, aux = txl.local_forward(trunk, experts, own, router, batch, memory)
        return aux.token_nll, aux.memory

    return functools.partial(_evaluate, jax.jit(token_nll), own, evaluation.batch_size)


def _evaluate(
    token_nll: Callable[..., tuple[Any, Memory]],
    config: Any,
    batch_size: int,
    params: PyTree,
    ids: np.ndarray,
    *,
    max_tokens: int | None,
    on_batch: OnBatch,
) -> Evaluation:
    memory = empty_memory(config, batch_size)
    total, counted = 0.0, []
    # A part of the text is the beginning of every row, so that it stands for the whole.
    wanted = ids.size - 1 if max_tokens is None else min(max_tokens, ids.size - 1)
    num_batches = -(-wanted // (batch_size * config.seq_len))
    batches = evaluation_segments(ids, batch_size=batch_size, seq_len=config.seq_len)
    for number, batch in zip(range(1, num_batches + 1), batches, strict=False):
        nll, memory = token_nll(params, batch, memory)
        total += float(np.asarray(jnp.where(batch.mask, nll, 0)).sum(dtype=np.float64))
        counted.append(batch.targets[batch.mask])
        on_batch(number, num_batches)
    targets = np.concatenate(counted)
    if not np.isfinite(total):
        raise FloatingPointError(f"the loss over {targets.size} words is {total / targets.size}")
    return Evaluation(loss=total / targets.size, items=int(targets.size), targets=targets)
