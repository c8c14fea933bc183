"""Steps of both models in turns, in one process, each timed alone.

They take turns at every step: where other work comes and goes, it slows both.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
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
from experiments.moe_overhead.wide_layer import layer_flops, wide_state, wide_step
from experiments.transformer_xl.local import local_dmoe_state
from experiments.transformer_xl.local_steps import dmoe_step
from experiments.transformer_xl.names import Size
from experiments.transformer_xl.presets import PRESETS, Preset, expert_recipe, model_config, trunk_recipe

_NO_DROPOUT: dict[str, Any] = dict.fromkeys(
    (
        "dropout",
        "attention_dropout",
        "position_dropout",
        "embedding_dropout",
        "input_dropout",
        "output_dropout",
    ),
    0.0,
)

_STEPS_OF_A_RUN = 10_000
"""For the schedules of the optimisers alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A few steps of each model.

    Attributes:
      dense_s: median seconds of a step with dense layers.
      moe_s: median seconds of a step with mixtures.
    """

    dense_s: float
    moe_s: float

    @property
    def ratio(self) -> float:
        """Tokens a second with dense layers over those with mixtures."""
        return self.moe_s / self.dense_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What was measured.

    Attributes:
      rounds: in order.
      tokens_per_step: target tokens of one step.
      dense_flops: of one dense layer's forward pass over one sequence.
      moe_flops: of the experts that a sequence goes to.
    """

    rounds: tuple[Round, ...]
    tokens_per_step: int
    dense_flops: int
    moe_flops: int

    @property
    def ratio(self) -> float:
        """Median over the rounds."""
        return float(np.median([one.ratio for one in self.rounds]))

    @property
    def dense_tokens_per_s(self) -> float:
        """Median over the rounds."""
        return self.tokens_per_step / float(np.median([one.dense_s for one in self.rounds]))

    @property
    def moe_tokens_per_s(self) -> float:
        """Median over the rounds."""
        return self.tokens_per_step / float(np.median([one.moe_s for one in self.rounds]))


def measure_overhead(
    *,
    size: Size,
    router: str = "product_key",
    batch_size: int | None = None,
    compute_dtype: str = "float32",
    rounds: int,
    steps_per_round: int,
    seed: int,
    on_round: Callable[[Round], None] = lambda _: None,
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
      on_round: called after each round.

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
    done = []
    for _ in range(rounds):
        moe_s, dense_s = _in_turns(moe, dense, batches)
        done.append(Round(dense_s=dense_s, moe_s=moe_s))
        on_round(done[-1])
    sizes = {"seq_len": config.seq_len, "mem_len": config.mem_len, "d_model": config.d_model}
    d_head, k = config.d_model // config.layer.num_heads, config.k_best
    return Overhead(
        rounds=tuple(done),
        tokens_per_step=rows * config.seq_len,
        dense_flops=layer_flops(
            **sizes, num_heads=k * config.layer.num_heads, d_head=d_head, d_ff=k * config.layer.d_ff
        ),
        moe_flops=k * layer_flops(**sizes, num_heads=config.layer.num_heads, d_head=d_head, d_ff=config.layer.d_ff),
    )


def _models(
    preset: Preset, config: TransformerXLConfig, router: Router, rows: int, seed: int
) -> tuple["_Timed", "_Timed"]:
    """The model with mixtures and the one with dense layers."""
    optimizer = make_optimizer(trunk_recipe(preset, _STEPS_OF_A_RUN))
    expert_optimizer = make_optimizer(expert_recipe(preset, _STEPS_OF_A_RUN))
    train_moe = dmoe_step(config, router, optimizer, expert_optimizer)
    train_dense = wide_step(config, optimizer, expert_optimizer)
    moe = _Timed(
        lambda state, batch, step: train_moe(
            state, batch, step_keys(num_layers=config.num_layers, batch=rows, seed=seed, trainer=0, step=step)
        ),
        local_dmoe_state(config, router, optimizer, expert_optimizer, batch_size=rows, seed=seed),
    )
    dense = _Timed(
        lambda state, batch, _: train_dense(state, batch),
        wide_state(jax.random.key(seed), config, optimizer, expert_optimizer, rows),
    )
    return moe, dense


class _Timed:
    """A model that is trained step by step."""

    def __init__(self, step: Callable[[Any, Batch, int], tuple[Any, Any]], state: Any) -> None:
        self._step = step
        self._state = state
        self._done = 0

    def step(self, batch: Batch) -> float:
        """The seconds of the next step."""
        started = time.perf_counter()
        self._state, report = self._step(self._state, batch, self._done)
        jax.block_until_ready((self._state, report))
        self._done += 1
        return time.perf_counter() - started


def _in_turns(moe: "_Timed", dense: "_Timed", batches: list[Batch]) -> tuple[float, float]:
    """Median seconds of a step of each."""
    seconds = []
    for number, batch in enumerate(batches):
        if number % 2:
            dense_s = dense.step(batch)
            moe_s = moe.step(batch)
        else:
            moe_s = moe.step(batch)
            dense_s = dense.step(batch)
        seconds.append((moe_s, dense_s))
    moe_s, dense_s = np.median(seconds, axis=0)
    return float(moe_s), float(dense_s)


def _text(num_tokens: int, seed: int) -> np.ndarray:
    """Words drawn by Zipf's law, so that the adaptive softmax has about the work that it has on real text."""
    weights = 1 / (np.arange(VOCAB_SIZE) + 2.7)
    count = 20 * num_tokens + 1
    return np.random.default_rng(seed).choice(VOCAB_SIZE, count, p=weights / weights.sum()).astype(np.int32)
