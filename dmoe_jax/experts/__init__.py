"""Expert networks: the constructors of experts of one's own (`as_expert`), and the kinds that come with the library."""

import inspect
from collections.abc import Callable
from typing import Any

from dmoe_jax.experts.adapters import as_expert, expert_from_functions, expert_from_linen, expert_from_nnx
from dmoe_jax.experts.base import Expert, TensorSpec
from dmoe_jax.experts.check import ExpertError, check_expert
from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.experts.neuron import neuron
from dmoe_jax.experts.transformer_xl import transformer_xl_layer
from dmoe_jax.layer_config import LayerConfig

__all__ = [
    "EXPERTS",
    "Expert",
    "ExpertError",
    "TensorSpec",
    "as_expert",
    "check_expert",
    "expert_from_functions",
    "expert_from_linen",
    "expert_from_nnx",
    "feedforward",
    "make_expert",
    "neuron",
    "transformer_xl_layer",
]

EXPERTS: dict[str, Callable[..., Expert]] = {
    "feedforward": feedforward,
    "neuron": neuron,
    "transformer_xl": transformer_xl_layer,
}
"""Kind -> factory with keyword-only arguments. The kinds are part of what nodes and trainers agree on."""


def make_expert(kind: str, **config: Any) -> Expert:
    """The expert of this kind and configuration; equal arguments return the same object. Raises ValueError, naming an
    unknown kind, an unknown or missing field, or a value that the factory refuses."""
    if kind not in EXPERTS:
        raise ValueError(f"unknown kind of expert {kind!r}; there are {', '.join(sorted(EXPERTS))}")
    factory = EXPERTS[kind]
    signature = inspect.signature(LayerConfig if factory is transformer_xl_layer else factory)
    try:
        signature.bind(**config)
    except TypeError as error:
        raise ValueError(f"expert {kind!r}: {error}; its fields are {', '.join(signature.parameters)}") from error
    return factory(**config)
