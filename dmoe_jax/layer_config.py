"""Sizes and rates of one Transformer-XL layer, of an expert or of a dense model, and the recipe that trains it.

Declared once, for the library, the command line and the experiments. Nothing here imports JAX: `dmoe --help` reads it.
"""

import math
from dataclasses import dataclass
from typing import Literal

from dmoe_jax.checks import check_positive, check_rates

Route = Literal["sequence", "token"]
"""Part of the data that is sent to experts of its own. A sequence: experts are whole layers (Learning@home). A token:
experts are the feed-forward networks, and attention stays with the trainer (Shazeer et al. 2017, GShard, Switch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """Shape of one Transformer-XL layer. Nodes and trainers of a swarm must use the same.

    Parameters do not depend on lengths, rates or types.
    """

    d_model: int = 128
    """Width of the hidden states; even, and a multiple of num_heads."""
    num_heads: int = 4
    """Attention heads; they divide d_model."""
    d_ff: int = 512
    """Width of the feed-forward part."""
    seq_len: int = 32
    """Tokens of one segment of text."""
    mem_len: int = 32
    """Hidden states of earlier segments that a layer attends to."""
    dropout: float = 0.0
    """Locked dropout inside a layer: one mask per sequence and feature, the same at every position."""
    attention_dropout: float = 0.0
    """Dropout of attention probabilities."""
    position_dropout: float = 0.0
    """Locked dropout of the positional encodings. Nodes and trainers may differ in a rate, but not in whether all three
    are 0: only then do experts take no keys."""
    clamp_len: int | None = None
    """Distances above it count as this one; None for no such limit."""
    same_length: bool = False
    """Every position sees exactly mem_len keys, itself included, and not all that there are."""
    compute_dtype: str = "float32"
    """Type of matrix products, float32 or bfloat16; parameters and normalisations stay float32, and what travels does
    unless it is compressed."""

    def __post_init__(self) -> None:
        sizes = ("d_model", "num_heads", "d_ff", "seq_len", "mem_len")
        check_positive(**{name: getattr(self, name) for name in sizes})
        if self.d_model % self.num_heads or self.d_model % 2:
            raise ValueError(f"d_model must be even and a multiple of num_heads ({self.num_heads}), got {self.d_model}")
        if self.clamp_len is not None:
            check_positive(clamp_len=self.clamp_len)
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"compute_dtype must be one of float32, bfloat16, got {self.compute_dtype!r}")
        check_rates(**{name: getattr(self, name) for name in ("dropout", "attention_dropout", "position_dropout")})

    @property
    def drops(self) -> bool:
        """True if anything is dropped inside the layer, so that it takes keys."""
        return bool(self.dropout or self.attention_dropout or self.position_dropout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Recipe of training. The defaults are for 16 layers of width 400 on WikiText-2."""

    learning_rate: float = 3.5e-4
    """Peak step size."""
    warmup_steps: int = 3000
    """Updates in which it rises from 0, linearly; at most a quarter of all of them."""
    total_steps: int | None = 125_000
    """Updates after which the cosine has brought it down to 0. None: it stays at its peak."""
    weight_decay: float = 1.2e-6
    """L2 penalty on the parameters: they times this are added to their gradient, before Adam."""
    floor: float = 0.0
    """End of the cosine, as a share of the peak; 0 to 1."""
    grad_clip: float = 0.25
    """Bound on the norm of the gradient, before the decay; infinite for none."""
    staleness_power: float = 0.5
    """An update is divided by (1 + s) to this power, s being the updates of others since the parameters were read that
    it belongs to, and stale ones get no momentum; 0: plain Adam. With many trainers it wants a larger learning rate, of
    the trunk and of the experts: four times that of one trainer is a good guess for 32."""

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.warmup_steps}")
        if self.total_steps is not None and self.total_steps < 1:
            raise ValueError(f"total_steps must be at least 1, or None, got {self.total_steps}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must be from 0 to 1, got {self.floor}")
        if not self.grad_clip > 0:
            raise ValueError(f"grad_clip must be positive, got {self.grad_clip}")
        if not 0 <= self.staleness_power < math.inf:
            raise ValueError(f"staleness_power must be finite and not negative, got {self.staleness_power}")
