"""Transformer-XL whose layers are mixtures of experts (Learning@home, section 4.3), cut where the network cuts it.

Each expert is a whole Transformer-XL layer, so that routing is per sequence. The trainer keeps the *trunk*. A step is a
chain of pure functions, the *segments*, joined by calls to experts that may live elsewhere:

    hidden = embed(trunk["embed"], tokens, key)
    for each layer:
        scores = gate(trunk["gates"][layer], hidden, memory[layer], ids, key)    routing features, then the router
        (select k_best live experts; call them on `expert_inputs`; mix their outputs)
        memory[layer] = next_memory(memory[layer], hidden)                       what *entered* this layer
        hidden = the mixture
    loss = loss_head(trunk["embed"], trunk["head"], hidden, targets, mask, key)

`local_forward` is the same model in one jit. Shapes: tokens, targets and mask [batch, seq], hidden [batch, seq,
d_model], memory [batch, mem, d_model]. Positions are relative and live in the experts. Each `key` is key data of the
step (see `models.trunk`), or None in evaluation. `ids`, for a router that hashes, are the words at the first positions.

With `route="token"` the attention of each layer belongs to the trunk and the experts are feed-forward networks, as in
GShard and Switch. Hidden states are then rows, [batch * seq, d_model], and a layer begins with one more segment:

        hidden = attend(trunk["attention"][layer], hidden, memory[layer], key)
        scores = gate(trunk["gates"][layer], hidden, memory[layer], ids, key)    a token's own state; ids are all words

The router sees each row by itself: nothing that comes later reaches a prediction. (A router that compares the samples
of a batch, such as expert choice, is refused.)
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num, PRNGKeyArray

from dmoe_jax.arrays import PyTree, wide
from dmoe_jax.autodiff import Recording
from dmoe_jax.data.batches import Batch
from dmoe_jax.experts.dropout import KeyData, RowKeys, wrap_key
from dmoe_jax.experts.transformer_xl import TransformerXLAttention
from dmoe_jax.machine.remembered import remembered
from dmoe_jax.model import Evaluation, Model, Outcome
from dmoe_jax.models import trunk as trunk_parts
from dmoe_jax.models.config import TransformerXLConfig
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
from dmoe_jax.models.trunk import LayerMemory, Memory, StepKeys, init_embed_and_head, next_memory
from dmoe_jax.routing.base import Router, Scores, score
from dmoe_jax.routing.check import check_router

Hidden = Float[Array, "batch seq d_model"] | Float[Array, "rows d_model"]
"""Hidden states by sequence, or where tokens are routed in rows of all positions."""


def init_trunk(
    key: PRNGKeyArray,
    config: TransformerXLConfig,
    router: Router,
    *,
    word_counts: Num[np.ndarray, " vocab"] | None = None,
) -> dict[str, PyTree]:
    """Parameters of everything but the experts: {"embed": ..., "gates": [one for each layer], "head": ...}, and where
    tokens are routed also "attention", for each layer. For `word_counts` see `init_embed_and_head`.

    Raises:
      ValueError: the router is for another grid, or not for what is routed, or word_counts is of another vocabulary.
    """
    check_router(router, config.grid_size, config.d_model, in_order=config.routes_tokens)
    return _init_trunk(key, config, router, word_counts)


def trunk_shapes(config: TransformerXLConfig, router: Router) -> dict[str, PyTree]:
    """Shapes and types of what `init_trunk` makes. Nothing is computed, nor is the router checked."""
    return cast(dict[str, PyTree], jax.eval_shape(lambda key: _init_trunk(key, config, router), jax.random.key(0)))


def _init_trunk(
    key: PRNGKeyArray, config: TransformerXLConfig, router: Router, word_counts: Any = None
) -> dict[str, PyTree]:
    embed_key, head_key, gate_key = jax.random.split(key, 3)
    embed_params, head_params = init_embed_and_head(embed_key, head_key, config, word_counts=word_counts)
    gates = [router.init(k, config.d_model) for k in jax.random.split(gate_key, config.num_layers)]
    trunk = {"embed": embed_params, "gates": gates, "head": head_params}
    if config.routes_tokens:
        # Parameters do not depend on the lengths, so one position and one slot suffice to make them.
        sample, filled = jnp.zeros((1, 1, config.d_model)), jnp.ones((1, 1), bool)
        init = jax.jit(lambda own: TransformerXLAttention(config.layer).init(own, sample, sample, filled)["params"])
        keys = jax.random.split(jax.random.fold_in(key, 3), config.num_layers)
        trunk["attention"] = [init(own) for own in keys]
    return trunk


def init_experts(key: PRNGKeyArray, config: TransformerXLConfig) -> tuple[PyTree, ...]:
    """Stacked expert parameters of each layer."""
    return init_layers(key, config.expert(), config.grid_size, config.num_layers)


def routing_features(
    hidden: Float[Array, "batch seq d_model"],
    memory: Float[Array, "batch mem d_model"],
    memory_mask: Bool[Array, "batch mem"],
) -> Float[Array, "batch d_model"]:
    """The mean of a sequence's filled memory slots and its FIRST position, by which it is routed. Causal.

    A sequence has one set of mixture weights for all its positions. A mean over the whole segment would let the words
    to be predicted reach their own prediction through the weights. No gradient flows into the memory.
    """
    past = jnp.where(memory_mask[..., None], jax.lax.stop_gradient(memory), 0)
    total = jnp.sum(past, axis=1) + hidden[:, 0]
    count = 1 + jnp.sum(memory_mask, axis=1, keepdims=True)
    return total / count.astype(total.dtype)


@remembered(16)
def segments(config: TransformerXLConfig, router: Router) -> Segments:
    """The trunk's functions for this configuration and router; equal arguments return the same objects."""

    def embed(params: PyTree, tokens: Int[Array, "batch seq"], key: KeyData | None = None) -> Hidden:
        hidden = trunk_parts.embed(params, tokens, config, key)
        return hidden.reshape(-1, config.d_model) if config.routes_tokens else hidden

    def gate(
        params: PyTree,
        hidden: Hidden,
        memory: LayerMemory,
        ids: Int[Array, " samples"] | None = None,
        key: KeyData | None = None,
    ) -> Scores:
        features = hidden if config.routes_tokens else routing_features(hidden, memory.states, memory.mask)
        return score(router, params, features, key=None if key is None else wrap_key(key), ids=ids)

    def loss_head(
        embed_params: PyTree,
        head_params: PyTree,
        hidden: Hidden,
        targets: Int[Array, "batch seq"],
        mask: Bool[Array, "batch seq"],
        key: KeyData | None = None,
    ) -> Float[Array, ""]:
        hidden = by_sequence(hidden, len(targets))
        return masked_mean(trunk_parts.token_nll(embed_params, head_params, hidden, targets, config, key), mask)

    return Segments(embed, gate, loss_head)


@remembered(16)
def attention_segment(config: TransformerXLConfig) -> Callable[..., Float[Array, "rows d_model"]]:
    """The segment with which a layer begins where tokens are routed: (params, hidden rows, memory, key) -> hidden rows;
    `key` has key data for each sequence."""
    layer = TransformerXLAttention(config.layer)

    def attend(params: PyTree, hidden: Array, memory: LayerMemory, key: RowKeys | None = None) -> Array:
        sequences = by_sequence(hidden, len(memory.mask))
        attended = cast(Array, layer.apply({"params": params}, sequences, memory.states, memory.mask, key))
        return attended.reshape(-1, config.d_model)

    return attend


def by_sequence(hidden: Float[Array, "... d_model"], batch: int) -> Float[Array, "batch seq d_model"]:
    """Hidden states by sequence, from those or from rows of all positions."""
    return hidden.reshape(batch, -1, hidden.shape[-1])


def router_ids(
    config: TransformerXLConfig, tokens: Int[Array, "batch seq"] | Int[np.ndarray, "batch seq"]
) -> Int[Array, " samples"] | Int[np.ndarray, " samples"]:
    """Ids of a mixture's samples, for a router that hashes: a token's word, a sequence's first one."""
    return tokens.reshape(-1) if config.routes_tokens else tokens[:, 0]


def masked_mean(nll: Float[Array, "batch seq"], mask: Bool[Array, "batch seq"]) -> Float[Array, ""]:
    """The mean over the targets that count; 0 if there are none."""
    return jnp.sum(jnp.where(mask, wide(nll), 0)) / jnp.maximum(jnp.sum(mask), 1)


def expert_inputs(
    config: TransformerXLConfig, hidden: Any, memory: LayerMemory, dropout_key: RowKeys | None = None
) -> tuple[Any, ...]:
    """The inputs of a layer's experts, as many as `config.expert().inputs`.

    Args:
      config: if its experts drop anything, they have a key among their inputs.
      hidden: [batch, seq, d_model], an array or a value on the tape; rows [batch * seq, d_model] of tokens.
      memory: this layer's.
      dropout_key: key data of each sequence, which its tokens share; None in evaluation.
    """
    inputs = (hidden,) if config.routes_tokens else (hidden, memory.states, memory.mask)
    if not config.layer.drops:
        return inputs
    if dropout_key is None:
        return (*inputs, np.zeros((hidden.shape[0], 2), np.uint32))
    return (*inputs, dropout_key.repeat(hidden.shape[0] // len(dropout_key), axis=0))


def local_forward(
    trunk: PyTree,
    experts: Sequence[PyTree],
    config: TransformerXLConfig,
    router: Router,
    batch: Batch,
    memory: Memory,
    *,
    alive: Bool[Array, "..."] | None = None,
    keys: StepKeys | None = None,
) -> tuple[Float[Array, ""], ForwardAux]:
    """The whole model on one machine: pure, to be jitted and differentiated by the caller.

    Args:
      trunk, experts: of `init_trunk` and `init_experts`.
      config: sizes; static under jit, as is the router that every layer has. Its lengths need not be those of training.
      memory: of `empty_memory` or the previous step.
      alive: bool [num_layers, *grid_size], True for each expert that may be chosen; None for all.
      keys: chance of this step, see `step_keys`; None: evaluation.

    Returns: (loss in nats, aux); aux.memory is the memory for the next segment.
    """
    parts, expert = segments(config, router), config.expert()
    tokens, targets, mask, _ = map(jnp.asarray, batch)  # it comes from the host as NumPy
    hidden = parts.embed(trunk["embed"], tokens, None if keys is None else keys.embed)
    layers, memories = [], []
    for i in range(config.num_layers):
        gate_key, expert_keys = (None, None) if keys is None else (keys.gates[i], keys.experts[i])
        memories.append(next_memory(memory[i], hidden))
        if config.routes_tokens:
            hidden = attention_segment(config)(trunk["attention"][i], hidden, memory[i], expert_keys)
        scores = parts.gate(trunk["gates"][i], hidden, memory[i], router_ids(config, tokens), gate_key)
        inputs = map(jnp.asarray, expert_inputs(config, hidden, memory[i], expert_keys))
        layer_alive = None if alive is None else alive[i]
        hidden, aux = dmoe_layer(expert, experts[i], router, config.k_best, scores, layer_alive, *inputs)
        layers.append(aux)
    head_key, hidden = None if keys is None else keys.head, by_sequence(hidden, len(tokens))
    token_nll = trunk_parts.token_nll(trunk["embed"], trunk["head"], hidden, targets, config, head_key)
    nll = masked_mean(token_nll, mask)
    aux_losses = [layer.aux_loss for layer in layers]
    return total_loss(nll, aux_losses), ForwardAux(nll, tuple(layers), tuple(memories), token_nll)


class TransformerXL(Model[Batch, Memory]):
    """The language model with remote mixtures, one a layer, as a trainer takes it. Batches are `SegmentStream`'s.

    Args:
      mixtures: one for each layer: `await mixture(run, scores, *inputs) -> (hidden, auxiliary loss)`.
      word_counts: number of each word in training, for the initial output biases; None: they are zeros.
      words: meaning of its words, see `Vocabulary.meaning`; "": as for all others who average with this model.

    Raises:
      ValueError: there are not as many mixtures as layers, or the router is for another grid.
    """

    name = "DMoE Transformer-XL"
    unit = "tokens"

    def __init__(
        self,
        config: TransformerXLConfig,
        router: Router,
        mixtures: Sequence[Mixture],
        *,
        word_counts: Num[np.ndarray, " vocab"] | None = None,
        words: str = "",
    ) -> None:
        if len(mixtures) != config.num_layers:
            raise ValueError(f"expected {config.num_layers} mixtures, one a layer, got {len(mixtures)}")
        check_router(router, config.grid_size)
        self.config = config
        self.router = router
        self.mixtures = tuple(mixtures)
        # Models of equal shapes may differ in these: rows, clusters, gates and heads then stand for other things.
        cutoffs = ", ".join(map(str, config.cutoffs)) or "none"
        facts = [words, f"cutoffs: {cutoffs}", f"router: {router.name}", f"heads: {config.layer.num_heads}"]
        self.meaning = "\n".join(filter(None, facts))
        self._segments = segments(config, router)
        self._word_counts = word_counts

    @classmethod
    def on(
        cls,
        swarm: MixtureMaker,
        config: TransformerXLConfig,
        router: Router,
        *,
        word_counts: Num[np.ndarray, " vocab"] | None = None,
        **options: Any,
    ) -> "TransformerXL":
        """The model over the experts `layer0...`, `layer1...` of a swarm; for options such as `k_min` see
        `Swarm.mixture`."""
        mixtures = layer_mixtures(swarm, config.expert(), router, config.num_layers, k_best=config.k_best, **options)
        return cls(config, router, mixtures, word_counts=word_counts)

    def init(self, key: PRNGKeyArray) -> PyTree:
        return init_trunk(key, self.config, self.router, word_counts=self._word_counts)

    def initial_state(self, batch: Batch) -> Memory:
        return trunk_parts.empty_memory(self.config, batch.tokens.shape[0])

    def keys(self, batch: Batch, *, seed: int, trainer: int, step: int) -> StepKeys:
        layers, rows = self.config.num_layers, batch.tokens.shape[0]
        return trunk_parts.step_keys(num_layers=layers, batch=rows, seed=seed, trainer=trainer, step=step)

    async def forward(
        self, run: Recording, params: PyTree, batch: Batch, state: Memory, keys: StepKeys | None
    ) -> Outcome:
        embed, gate, loss_head = self._segments
        hidden = run(embed, params["embed"], batch.tokens, None if keys is None else keys.embed)
        state = trunk_parts.forget(state, jnp.asarray(batch.is_first))
        ids = router_ids(self.config, batch.tokens)
        memories, aux_losses = [], []
        for i, mixture in enumerate(self.mixtures):
            gate_key, expert_keys = (None, None) if keys is None else (keys.gates[i], keys.experts[i])
            # Off the tape: memory is a constant to the gradient, in this segment of text and in the next.
            memories.append(_jitted_next_memory(state[i], hidden.value))
            if self.config.routes_tokens:
                attend = attention_segment(self.config)
                hidden = run(attend, params["attention"][i], hidden, state[i], expert_keys)
            scores = run(gate, params["gates"][i], hidden, state[i], ids, gate_key)
            hidden, aux_loss = await mixture(run, scores, *expert_inputs(self.config, hidden, state[i], expert_keys))
            aux_losses.append(aux_loss)
        head_key = None if keys is None else keys.head
        nll = run(loss_head, params["embed"], params["head"], hidden, batch.targets, batch.mask, head_key)
        loss = run(total_loss, nll, aux_losses)
        return Outcome(loss=loss, state=tuple(memories), reported=nll, items=batch.mask.sum())

    async def evaluate(
        self, params: PyTree, batches: Iterable[Batch], on_batch: Callable[[], None] = lambda: None
    ) -> Evaluation:
        """Loss over `evaluation_segments` of a text: targets outside a batch's mask do not count."""
        targets: list[np.ndarray] = []

        def noted() -> Iterator[Batch]:
            for batch in batches:
                targets.append(batch.targets[batch.mask])
                yield batch

        evaluation = await super().evaluate(params, noted(), on_batch)
        return dataclasses.replace(evaluation, targets=np.concatenate(targets))


_jitted_next_memory = jax.jit(next_memory)
