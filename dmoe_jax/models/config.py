"""Sizes of a Transformer-XL language model, dense or a mixture in every layer."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

from dmoe_jax.checks import check_positive, check_rates
from dmoe_jax.experts.base import Expert
from dmoe_jax.experts.transformer_xl import layer_expert
from dmoe_jax.layer_config import LayerConfig, Route
from dmoe_jax.models.adaptive_softmax import check_cutoffs
from dmoe_jax.routing.base import check_grid_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerXLConfig:
    """Sizes of the model. The router is given beside it: swapping it is one line."""

    vocab_size: int
    """Words; id 0 the most frequent."""
    num_layers: int
    """Layers, each a mixture of experts unless the model is dense."""
    layer: LayerConfig = field(default_factory=LayerConfig)
    """Every layer, or every expert of a mixture: of its feed-forward part alone where tokens are routed. Its `dropout`
    also acts, each element by itself, behind the last."""
    grid_size: tuple[int, ...] = ()
    """Extents of each layer's grid of experts; () for a dense model."""
    k_best: int = 0
    """Experts that each sequence, or token, goes to; 4 in the paper, 0 for a dense model."""
    route: Route = "sequence"
    """Unit that has experts of its own in a mixture: a whole sequence, or each token. All positions are routed, also
    those of an evaluation's padding."""
    cutoffs: tuple[int, ...] = ()
    """First word of each tail cluster of the adaptive softmax; () for a plain softmax."""
    embedding_dropout: float = 0.0
    """Rate at which words lose their whole embedding, at all their places but the first of a segment; the softmax keeps
    it (dropoute)."""
    input_dropout: float = 0.0
    """Rate of the locked dropout on word vectors (dropouti)."""
    output_dropout: float = 0.0
    """Rate of the locked dropout before the softmax (dropouto)."""

    def __post_init__(self) -> None:
        check_positive(vocab_size=self.vocab_size, num_layers=self.num_layers)
        # Tuples, whatever sequence was given: a configuration is a key of caches.
        object.__setattr__(self, "cutoffs", check_cutoffs(tuple(self.cutoffs), self.vocab_size))
        object.__setattr__(self, "grid_size", check_grid_size(self.grid_size) if self.grid_size else ())
        if self.is_mixture:
            check_positive(k_best=self.k_best)
        if self.k_best > math.prod(self.grid_size) * self.is_mixture:
            raise ValueError(f"k_best is at most the number of cells of grid {self.grid_size}, got {self.k_best}")
        if self.route not in get_args(Route):
            raise ValueError(f"route must be one of {', '.join(get_args(Route))}, got {self.route!r}")
        if self.routes_tokens and not self.is_mixture:
            raise ValueError("route='token' needs a grid of experts, got a dense model")
        check_rates(
            embedding_dropout=self.embedding_dropout,
            input_dropout=self.input_dropout,
            output_dropout=self.output_dropout,
        )

    @property
    def is_mixture(self) -> bool:
        """True if its layers are mixtures of experts."""
        return bool(self.grid_size)

    @property
    def routes_tokens(self) -> bool:
        """True if each token has experts of its own, and not each sequence."""
        return self.route == "token"

    def samples(self, sequences: int) -> int:
        """Number of samples that so many sequences of a training batch are to a mixture."""
        return sequences * (self.seq_len if self.routes_tokens else 1)

    @property
    def d_model(self) -> int:
        """Width of the hidden states and of the embedding."""
        return self.layer.d_model

    @property
    def seq_len(self) -> int:
        """Positions in a segment."""
        return self.layer.seq_len

    @property
    def mem_len(self) -> int:
        """Memory slots of a layer."""
        return self.layer.mem_len

    def replace(self, **changes: Any) -> "TransformerXLConfig":
        """A copy with other values; those that are fields of the layer go to the layer.

        Raises:
          ValueError: they do not fit each other. TypeError: there is no such field.
        """
        names = {each.name for each in fields(LayerConfig)}
        inner = {name: changes.pop(name) for name in names & set(changes)}
        return replace(self, layer=replace(changes.pop("layer", self.layer), **inner), **changes)

    def expert(self) -> Expert:
        """The network of every expert of this model."""
        return layer_expert(self.layer, self.route)
