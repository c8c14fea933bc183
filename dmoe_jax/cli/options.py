"""Flags that nodes and trainers must agree on."""

from dataclasses import dataclass
from typing import Any

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

    def make_expert(self) -> Any:
        """The `dmoe_jax.experts.base.Expert` that these flags describe (its type would import JAX here).

        Raises:
          UsageError: for sizes that do not fit.
        """
        from dmoe_jax.experts import make_expert

        try:
            return make_expert(
                "transformer_xl",
                d_model=self.d_model,
                num_heads=self.num_heads,
                d_ff=self.d_ff,
                seq_len=self.seq_len,
                mem_len=self.mem_len,
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
