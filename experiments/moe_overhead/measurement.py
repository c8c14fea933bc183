"""Steps of both models in turns, in one process, each timed alone.

They take turns at every step: where other work comes and goes, it slows both.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import numpy as np

from dmoe_jax.data.batches import Batch, SegmentStream
from dmoe_jax.data.wikitext2 import VOCAB_SIZE
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.trunk import step_keys
from dmoe_jax.recipe import make_optimizer
from dmoe_jax.routing.base import Router
from dmoe_jax.routing.registry import make_router
from dmoe_jax.types import PyTree
from experiments.moe_overhead.wide_layer import layer_flops, wide_optimizer, wide_state, wide_step
from experiments.transformer_xl.local import local_dmoe_state
from experiments.transformer_xl.local_steps import dmoe_step
from experiments.transformer_xl.names import Size
from experiments.transformer_xl.presets import PRESETS, Preset, expert_recipe, model_config, trunk_recipe

_NO_DROPOUT: dict[str, Any] = dict.fromkeys(
    ("dropout", "attention_dropout", "position_dropout", "embedding_dropout", "input_dropout", "output_dropout"), 0.0
)

_STEPS_OF_A_RUN = 10_000
"""For the schedules of the optimisers alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A few steps of each model."""

    dense_s: float
    """Median seconds of a step with dense layers."""
    moe_s: float
    """Median seconds of a step with mixtures."""

    @property
    def ratio(self) -> float:
        """Tokens a second with dense layers over those with mixtures."""
        return self.moe_s / self.dense_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What was measured; all figures are medians over the rounds."""

    rounds: tuple[Round, ...]
    """In order."""
    tokens_per_step: int
    """Target tokens of one step."""
    dense_flops: int
    """Operations of one dense layer's forward pass over one sequence."""
    moe_flops: int
    """Operations of the experts that a sequence goes to."""

    @property
    def ratio(self) -> float:
        """Of tokens a second, dense layers over mixtures."""
        return median(one.ratio for one in self.rounds)

    @property
    def dense_tokens_per_s(self) -> float:
        """With dense layers."""
        return self.tokens_per_step / median(one.dense_s for one in self.rounds)

    @property
    def moe_tokens_per_s(self) -> float:
        """With mixtures."""
        return self.tokens_per_step / median(one.moe_s for one in self.rounds)


def measure_overhead(
    *,
    size: Size,
    router: str = "product_key",
    batch_size: int | None = None,
    compute_dtype: str = "float32",
    rounds: int,
    steps_per_round: int,
    seed: int,
    on_round: Callable[[Overhead], None] = lambda _: None,
) -> Overhead:
    """Time training steps of the preset's mixture, and of the same model with a dense layer for each mixture.

    Same text, batch, trunk and kind of optimiser. Dropout is left out on both sides: what is measured is the mixture.

    Args:
      size: of the preset.
      router: its specification.
      batch_size: sequences of a step; None: the preset's.
      compute_dtype: "float32" or "bfloat16".
      rounds: this often, with a ratio of its own each.
      steps_per_round: of each model, in turns; who is first, in turns, too.
      seed: of parameters and text.
      on_round: called after each round with what was measured so far.

    Raises:
      ValueError: an unknown router, or one that does not keep to its contract.
    """
    preset = dataclasses.replace(PRESETS["dmoe", size], **_NO_DROPOUT)
    config = model_config(preset, VOCAB_SIZE, compute_dtype=compute_dtype)
    assert config.is_mixture
    rows = batch_size or preset.batch_size
    moe, dense = _models(preset, config, make_router(router, config.grid_size), rows, seed)
    stream = SegmentStream(_text(rows * config.seq_len, seed), batch_size=rows, seq_len=config.seq_len, seed=seed)
    batches = [next(stream) for _ in range(steps_per_round)]
    for batch in batches[:1] * 2:  # the first compiles
        for model in (moe, dense):
            model.step(batch)
    sizes = {"seq_len": config.seq_len, "mem_len": config.mem_len, "d_model": config.d_model}
    heads, d_ff, k = config.layer.num_heads, config.layer.d_ff, config.k_best
    d_head = config.d_model // heads
    measured = Overhead(
        rounds=(),
        tokens_per_step=rows * config.seq_len,
        dense_flops=layer_flops(**sizes, num_heads=k * heads, d_head=d_head, d_ff=k * d_ff),
        moe_flops=k * layer_flops(**sizes, num_heads=heads, d_head=d_head, d_ff=d_ff),
    )
    for _ in range(rounds):
        measured = dataclasses.replace(measured, rounds=(*measured.rounds, _in_turns(moe, dense, batches)))
        on_round(measured)
    return measured


def _models(
    preset: Preset, config: TransformerXLConfig, router: Router, rows: int, seed: int
) -> tuple["_Timed", "_Timed"]:
    """The model with mixtures and the one with dense layers."""
    optimizer = make_optimizer(trunk_recipe(preset, _STEPS_OF_A_RUN))
    expert_optimizer = make_optimizer(expert_recipe(preset, _STEPS_OF_A_RUN))
    train_moe = dmoe_step(config, router, optimizer, expert_optimizer)

    def step_moe(state: PyTree, batch: Batch, step: int) -> tuple[PyTree, PyTree]:
        keys = step_keys(num_layers=config.num_layers, batch=rows, seed=seed, trainer=0, step=step)
        return train_moe(state, batch, keys)

    both = wide_optimizer(config, optimizer, expert_optimizer)
    train_dense = wide_step(config, both)
    return (
        _Timed(step_moe, local_dmoe_state(config, router, optimizer, expert_optimizer, batch_size=rows, seed=seed)),
        _Timed(lambda state, batch, _: train_dense(state, batch), wide_state(jax.random.key(seed), config, both, rows)),
    )


class _Timed:
    """A model that is trained step by step."""

    def __init__(self, step: Callable[[PyTree, Batch, int], tuple[PyTree, PyTree]], state: PyTree) -> None:
        self._step = step
        self._state = state
        self._done = 0

    def step(self, batch: Batch) -> float:
        """Make the next step. Returns its seconds."""
        started = time.perf_counter()
        self._state, report = self._step(self._state, batch, self._done)
        jax.block_until_ready((self._state, report))
        self._done += 1
        return time.perf_counter() - started


def _in_turns(moe: _Timed, dense: _Timed, batches: list[Batch]) -> Round:
    """A step of each model for each batch; every other batch the other one is first."""
    seconds: dict[_Timed, list[float]] = {moe: [], dense: []}
    for number, batch in enumerate(batches):
        for model in (dense, moe) if number % 2 else (moe, dense):
            seconds[model].append(model.step(batch))
    return Round(dense_s=float(np.median(seconds[dense])), moe_s=float(np.median(seconds[moe])))


def _text(num_tokens: int, seed: int) -> np.ndarray:
    """Words drawn by Zipf's law, so that the adaptive softmax has about the work that it has on real text."""
    weights = 1 / (np.arange(VOCAB_SIZE) + 2.7)
    count = 20 * num_tokens + 1
    return np.random.default_rng(seed).choice(VOCAB_SIZE, count, p=weights / weights.sum()).astype(np.int32)
