"""Flags that nodes and trainers must agree on."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from dmoe_jax.cli.common import UsageError


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Shape of one Transformer-XL layer. Nodes and trainers of a swarm must use the same."""

    d_model: int = 128
    """Width of the hidden states."""
    num_heads: int = 4
    """Attention heads; they divide d_model."""
    d_ff: int = 512
    """Width of the feed-forward part."""
    seq_len: int = 32
    """Tokens of one segment of text."""
    mem_len: int = 32
    """Hidden states of earlier segments that a layer attends to."""
    dropout: float = 0.0
    """Locked dropout inside an expert: one mask per sequence and feature, the same at every position."""
    attention_dropout: float = 0.0
    """Dropout of attention probabilities."""
    position_dropout: float = 0.0
    """Locked dropout of the positional encodings. Nodes and trainers may differ in a rate, but not in whether all three
    are 0: only then do experts take no keys."""
    clamp_len: int | None = None
    """Distances above it count as this one; None for no such limit."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of an expert's matrix products; parameters, normalisations and what travels stay float32."""

    def make_expert(self) -> Any:
        """The `dmoe_jax.experts.base.Expert` that these flags describe (its type would import JAX here).

        Raises:
          UsageError: for sizes that do not fit.
        """
        from dmoe_jax.experts import make_expert

        try:
            return make_expert("transformer_xl", **asdict(self))
        except ValueError as error:
            raise UsageError(str(error)) from error
