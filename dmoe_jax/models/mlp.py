"""The feed-forward classifier of Learning@home (section 4.2): Dense, DMoE layers, LayerNorm, Dense.

It is cut as `models.transformer_xl` is; every row is routed by itself.

    hidden = embed(trunk["embed"], x)
    for each layer:
        scores = gate(trunk["gates"][layer], hidden);  hidden = mixture of the k_best experts
    loss, accuracy = loss_head(trunk["head"], hidden, labels)
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from dmoe_jax.arrays import PyTree, wide
from dmoe_jax.autodiff import Recording
from dmoe_jax.checks import check_positive
from dmoe_jax.experts.base import Expert
from dmoe_jax.experts.dropout import KeyData, wrap_key
from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.machine.remembered import remembered
from dmoe_jax.mixture.soft import init_soft_gate, slot_router, soft_segments
from dmoe_jax.model import Model, Outcome
from dmoe_jax.models.layers import (
    ForwardAux,
    Mixture,
    MixtureMaker,
    Segments,
    dmoe_layer,
    init_layers,
    layer_mixtures,
    total_loss,
)
from dmoe_jax.routing.base import Router, Scores, check_grid_size, score
from dmoe_jax.routing.check import check_router


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig:
    """Sizes of the model. The router is given beside it."""

    input_dim: int
    """Features of a sample; 784 for MNIST."""
    num_classes: int
    """Classes to tell apart."""
    d_model: int
    """Width of the hidden states; 512 in the paper."""
    num_layers: int
    """DMoE layers; 4 in the paper."""
    grid_size: tuple[int, ...]
    """Extents of each layer's grid of experts."""
    k_best: int
    """Experts that each sample goes to; 4 in the paper."""
    expansion: int = 4
    """Hidden width of an expert as a multiple of d_model."""
    slots_per_expert: int = 0
    """0: samples are routed. Else the layers are Soft MoE, whose router is `soft_router` and which mixes the samples of
    a batch; see `dmoe_jax.mixture.soft`."""
    dtype: str = "float32"
    """Type of parameters, activations and samples: "float32", or "float64" where JAX has it enabled."""

    def __post_init__(self) -> None:
        check_positive(input_dim=self.input_dim, num_classes=self.num_classes)
        check_positive(num_layers=self.num_layers, k_best=self.k_best)
        object.__setattr__(self, "grid_size", check_grid_size(self.grid_size))
        if self.k_best > math.prod(self.grid_size):
            raise ValueError(f"k_best is at most the number of cells of grid {self.grid_size}, got {self.k_best}")
        if self.slots_per_expert < 0 or (self.slots_per_expert and self.k_best != 1):
            raise ValueError(
                "slots_per_expert is at least 0, and k_best is 1 where there are slots, since a slot has one expert; "
                f"got {self.slots_per_expert} and {self.k_best}"
            )
        self.expert()

    def soft_router(self) -> Router:
        """The router of a model with slots, which takes each to its expert."""
        return slot_router(self.grid_size, slots_per_expert=self.slots_per_expert)

    def check(self, router: Router) -> None:
        """Raise ValueError unless this router fits the model."""
        check_router(router, self.grid_size)
        is_soft = self.slots_per_expert > 0
        fits = router is self.soft_router() if is_soft else router.name != "slots"
        if not fits:
            needed = "the router config.soft_router()" if is_soft else "a router that chooses"
            raise ValueError(
                f"a model with slots_per_expert {self.slots_per_expert} needs {needed}, got {router.name!r}"
            )

    def expert(self) -> Expert:
        """The network of every expert of this model."""
        return feedforward(d_model=self.d_model, expansion=self.expansion, dtype=self.dtype)


class Batch(NamedTuple):
    """Labelled samples.

    Attributes:
      x: [batch, input_dim].
      labels: [batch], classes.
    """

    x: Float[Array, "batch input_dim"]
    labels: Int[Array, " batch"]


class _Head(nn.Module):
    num_classes: int
    dtype: str

    @nn.compact
    def __call__(self, hidden: Float[Array, "batch d_model"]) -> Float[Array, "batch num_classes"]:
        normed = nn.LayerNorm(param_dtype=self.dtype)(hidden)
        return nn.Dense(self.num_classes, param_dtype=self.dtype)(normed)


def _ends(config: MLPConfig) -> tuple[nn.Dense, _Head]:
    """The modules before and after the mixtures."""
    return nn.Dense(config.d_model, param_dtype=config.dtype), _Head(config.num_classes, config.dtype)


def init_trunk(key: PRNGKeyArray, config: MLPConfig, router: Router) -> dict[str, PyTree]:
    """Parameters of everything but the experts: {"embed": ..., "gates": [one for each layer], "head": ...}."""
    config.check(router)
    embed_key, head_key, gate_key = jax.random.split(key, 3)
    embed_module, head_module = _ends(config)

    def init_gate(key: PRNGKeyArray) -> PyTree:
        if config.slots_per_expert:
            made = init_soft_gate(key, config.d_model, config.slots_per_expert * math.prod(config.grid_size))
        else:
            made = router.init(key, config.d_model)
        floating = functools.partial(jnp.issubdtype, arg2=jnp.floating)
        return jax.tree.map(lambda leaf: leaf.astype(config.dtype) if floating(leaf.dtype) else leaf, made)

    return {
        "embed": embed_module.init(embed_key, jnp.zeros((1, config.input_dim)))["params"],
        "gates": [init_gate(k) for k in jax.random.split(gate_key, config.num_layers)],
        "head": head_module.init(head_key, jnp.zeros((1, config.d_model)))["params"],
    }


def init_experts(key: PRNGKeyArray, config: MLPConfig) -> tuple[PyTree, ...]:
    """Stacked expert parameters of each layer."""
    return init_layers(key, config.expert(), config.grid_size, config.num_layers)


@remembered(16)
def segments(config: MLPConfig, router: Router) -> Segments:
    """The trunk's functions for this configuration and router; equal arguments return the same objects."""
    embed_module, head_module = _ends(config)

    def embed(params: PyTree, x: Float[Array, "batch input_dim"]) -> Float[Array, "batch d_model"]:
        return cast(Array, embed_module.apply({"params": params}, x))

    def gate(params: PyTree, hidden: Float[Array, "batch d_model"], key: KeyData | None = None) -> Scores:
        return score(router, params, hidden, key=None if key is None else wrap_key(key))

    def loss_head(
        params: PyTree, hidden: Float[Array, "batch d_model"], labels: Int[Array, " batch"]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        logits = wide(cast(Array, head_module.apply({"params": params}, hidden)))
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(nll), jnp.mean(logits.argmax(-1) == labels)

    return Segments(embed, gate, loss_head)


def local_forward(
    trunk: PyTree, experts: Sequence[PyTree], config: MLPConfig, router: Router, batch: Batch
) -> tuple[Float[Array, ""], ForwardAux]:
    """(loss in nats, aux) of the whole model on one machine, in evaluation: pure, to be jitted by the caller, where the
    configuration and the router are static, and differentiated."""
    parts, expert = segments(config, router), config.expert()
    soft = soft_segments(expert, router)
    hidden = parts.embed(trunk["embed"], batch.x)
    layers = []
    for params, gate in zip(experts, trunk["gates"], strict=True):
        mix = functools.partial(dmoe_layer, expert, params, router, config.k_best)
        if config.slots_per_expert:
            slots = soft.dispatch(gate, hidden)
            outputs, aux = mix(slots.scores, None, slots.inputs)
            hidden = soft.spread(hidden, slots, outputs)
        else:
            hidden, aux = mix(parts.gate(gate, hidden), None, hidden)
        layers.append(aux)
    nll, _ = parts.loss_head(trunk["head"], hidden, batch.labels)
    return total_loss(nll, [layer.aux_loss for layer in layers]), ForwardAux(nll, tuple(layers))


class MLP(Model[Batch, tuple[()]]):
    """The classifier with remote mixtures, one a layer, as a trainer takes it. Batches are `Batch`es.

    Args:
      mixtures: one for each layer: `await mixture(run, scores, hidden) -> (hidden, auxiliary loss)`.

    Raises:
      ValueError: there are not as many mixtures as layers, or the router is for another grid.
    """

    name = "DMoE MLP"

    def __init__(self, config: MLPConfig, router: Router, mixtures: Sequence[Mixture]) -> None:
        if len(mixtures) != config.num_layers:
            raise ValueError(f"expected {config.num_layers} mixtures, one a layer, got {len(mixtures)}")
        config.check(router)
        self.config = config
        self.router = router
        self.mixtures = tuple(mixtures)
        self._segments = segments(config, router)
        self._soft = soft_segments(config.expert(), router)

    @classmethod
    def on(cls, swarm: MixtureMaker, config: MLPConfig, router: Router, **options: Any) -> "MLP":
        """The model over the experts `layer0...`, `layer1...` of a swarm; for options such as `k_min` see
        `Swarm.mixture`."""
        mixtures = layer_mixtures(swarm, config.expert(), router, config.num_layers, k_best=config.k_best, **options)
        return cls(config, router, mixtures)

    def init(self, key: PRNGKeyArray) -> PyTree:
        return init_trunk(key, self.config, self.router)

    def keys(self, batch: Batch, *, seed: int, trainer: int, step: int) -> UInt32[np.ndarray, "layers 2"]:
        del batch
        words = np.random.SeedSequence(seed, spawn_key=(trainer, step)).generate_state(2 * self.config.num_layers)
        return words.reshape(self.config.num_layers, 2)

    async def forward(
        self,
        run: Recording,
        params: PyTree,
        batch: Batch,
        state: tuple[()],
        keys: UInt32[np.ndarray, "layers 2"] | None,
    ) -> Outcome:
        embed, gate, loss_head = self._segments
        hidden = run(embed, params["embed"], batch.x)
        aux_losses = []
        for layer, mixture in enumerate(self.mixtures):
            if self.config.slots_per_expert:
                slots = run(self._soft.dispatch, params["gates"][layer], hidden)
                outputs, aux_loss = await mixture(run, slots.scores, slots.inputs)
                hidden = run(self._soft.spread, hidden, slots, outputs)
            else:
                scores = run(gate, params["gates"][layer], hidden, None if keys is None else keys[layer])
                hidden, aux_loss = await mixture(run, scores, hidden)
            aux_losses.append(aux_loss)
        nll, accuracy = run(loss_head, params["head"], hidden, batch.labels)
        return Outcome(
            loss=run(total_loss, nll, aux_losses),
            reported=nll,
            items=int(batch.labels.shape[0]),
            metrics={"accuracy": accuracy},
        )
