"""Transformer-XL whose layers are mixtures of experts (Learning@home, section 4.3), cut where the network cuts it.

Each layer is a DMoE layer; each expert is a whole Transformer-XL layer, so that routing is per sequence. What stays
with the trainer is the *trunk*: the tied embedding, a gate for each layer, and the head. A step is a chain of pure
functions, the *segments*, joined by calls to experts that may live elsewhere:

    hidden = embed(trunk["embed"], tokens, key)
    for each layer:
        scores = gate(trunk["gates"][layer], hidden, memory[layer], ids, key)    routing features, then the router
        (select k_best live experts; call them on `expert_inputs`; mix their outputs)
        memory[layer] = next_memory(memory[layer], hidden)                       what *entered* this layer
        hidden = the mixture
    loss = loss_head(trunk["embed"], trunk["head"], hidden, targets, key)

`segments` makes them; `local_forward` is the same model in one jit. Shapes: tokens and targets [batch, seq], hidden
[batch, seq, d_model], memory [batch, mem, d_model]. Positions are relative and live in the experts: the trunk has
none. Each `key` is key data of the step (see `models.trunk`), or None in evaluation. `ids` are the words at the first
positions: what a sequence *is* to a router that hashes.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num, PRNGKeyArray

from dmoe_jax.autodiff import Recording, Value
from dmoe_jax.data.batches import Batch
from dmoe_jax.experts.dropout import KeyData, RowKeys, wrap_key
from dmoe_jax.model import Evaluation, Model, Outcome
from dmoe_jax.models import trunk as trunk_parts
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.layers import (
    ForwardAux,
    LayerAux,
    Mixture,
    MixtureMaker,
    dmoe_layer,
    init_layers,
    layer_mixtures,
    total_loss,
    total_of,
)
from dmoe_jax.models.trunk import (
    LayerMemory,
    Memory,
    StepKeys,
    TrunkDropout,
    init_embed_and_head,
    next_memory,
)
from dmoe_jax.routing.base import Router, Scores, score
from dmoe_jax.routing.check import check_router
from dmoe_jax.types import PyTree


class Segments(NamedTuple):
    """The trunk's pure functions, stable objects: equal (config, router) share them and their compiled code.

    Attributes:
      embed: (embed_params, tokens, key=None) -> hidden.
      gate: (gate_params, hidden, memory: LayerMemory, ids=None, key=None) -> scores.
      next_memory: (memory: LayerMemory, hidden) -> LayerMemory.
      loss_head: (embed_params, head_params, hidden, targets, key=None) -> mean nll, nats.
      token_nll: (embed_params, head_params, hidden, targets, key=None) -> nll [batch, seq], nats; for evaluation.
    """

    embed: Callable[..., Float[Array, "batch seq d_model"]]
    gate: Callable[..., Scores]
    next_memory: Callable[..., LayerMemory]
    loss_head: Callable[..., Float[Array, ""]]
    token_nll: Callable[..., Float[Array, "batch seq"]]


def init_trunk(
    key: PRNGKeyArray,
    config: TransformerXLConfig,
    router: Router,
    *,
    word_counts: Num[np.ndarray, " vocab"] | None = None,
) -> dict[str, PyTree]:
    """Parameters of everything but the experts: {"embed": ..., "gates": [one for each layer], "head": ...}.

    Weights are N(0, 0.02), the authors' recipe; gates are the router's business. Output biases are 0 as theirs, or,
    given `word_counts` (of the training text), those of a unigram model: see `unigram_biases`.

    Raises:
      ValueError: if the router is for another grid, or word_counts has not one number for each word.
    """
    check_router(router, config.grid_size, config.d_model)
    embed_key, head_key, gate_key = jax.random.split(key, 3)
    embed_params, head_params = init_embed_and_head(
        embed_key,
        head_key,
        vocab_size=config.vocab_size,
        d_model=config.d_model,
        cutoffs=config.cutoffs,
        word_counts=word_counts,
    )
    gates = [router.init(k, config.d_model) for k in jax.random.split(gate_key, config.num_layers)]
    return {"embed": embed_params, "gates": gates, "head": head_params}


def init_experts(key: PRNGKeyArray, config: TransformerXLConfig) -> tuple[PyTree, ...]:
    """Stacked expert parameters of each layer."""
    return init_layers(key, config.expert(), config.grid_size, config.num_layers)


def routing_features(
    hidden: Float[Array, "batch seq d_model"],
    memory: Float[Array, "batch mem d_model"],
    memory_mask: Bool[Array, "batch mem"],
) -> Float[Array, "batch d_model"]:
    """What a sequence is routed by: the mean of its filled memory slots and its FIRST position. Causal.

    A sequence has one set of mixture weights for all its positions. A mean over the whole segment would therefore let
    the words to be predicted reach their own prediction through the weights, and perplexity would look better than
    the model is. The first position and the past are all that every position may know. No gradient flows into the
    memory.
    """
    past = jnp.where(memory_mask[..., None], jax.lax.stop_gradient(memory), 0)
    total = jnp.sum(past, axis=1) + hidden[:, 0]
    count = 1 + jnp.sum(memory_mask, axis=1, keepdims=True)
    return total / count.astype(total.dtype)


def segments(config: TransformerXLConfig, router: Router) -> Segments:
    """The trunk's functions for this configuration and router; equal arguments return the same objects.

    Raises:
      ValueError: if the router is for another grid.
    """
    check_router(router, config.grid_size)
    return _segments(config.cutoffs, config.trunk_dropout, router)


@functools.cache
def _segments(cutoffs: tuple[int, ...], rates: TrunkDropout, router: Router) -> Segments:
    def embed(
        params: PyTree, tokens: Int[Array, "batch seq"], key: KeyData | None = None
    ) -> Float[Array, "batch seq d_model"]:
        return trunk_parts.embed(params, tokens, key, rates)

    def gate(
        params: PyTree,
        hidden: Float[Array, "batch seq d_model"],
        memory: LayerMemory,
        ids: Int[Array, " batch"] | None = None,
        key: KeyData | None = None,
    ) -> Scores:
        features = routing_features(hidden, memory.states, memory.mask)
        return score(router, params, features, key=None if key is None else wrap_key(key), ids=ids)

    def token_nll(
        embed_params: PyTree,
        head_params: PyTree,
        hidden: Float[Array, "batch seq d_model"],
        targets: Int[Array, "batch seq"],
        key: KeyData | None = None,
    ) -> Float[Array, "batch seq"]:
        return trunk_parts.token_nll(embed_params, head_params, hidden, targets, key, rates=rates, cutoffs=cutoffs)

    def loss_head(
        embed_params: PyTree,
        head_params: PyTree,
        hidden: Float[Array, "batch seq d_model"],
        targets: Int[Array, "batch seq"],
        key: KeyData | None = None,
    ) -> Float[Array, ""]:
        return jnp.mean(token_nll(embed_params, head_params, hidden, targets, key))

    return Segments(embed, gate, next_memory, loss_head, token_nll)


def expert_inputs(
    config: TransformerXLConfig, hidden: Any, memory: LayerMemory, dropout_key: RowKeys | None = None
) -> tuple[Any, ...]:
    """The inputs of a layer's experts, as many as `config.expert().inputs`.

    Args:
      config: says whether its experts drop anything, and so have a key among their inputs.
      hidden: [batch, seq, d_model], an array or a value on the tape.
      memory: of this layer.
      dropout_key: key data of each sample; None in evaluation.
    """
    inputs = (hidden, memory.states, memory.mask)
    if len(config.expert().inputs) == len(inputs):
        return inputs
    return (*inputs, np.zeros((hidden.shape[0], 2), np.uint32) if dropout_key is None else dropout_key)


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
      trunk: from `init_trunk`.
      experts: stacked parameters of each layer, from `init_experts`.
      config: sizes; static under jit, as is the router.
      router: the router of every layer.
      batch: tokens and targets.
      memory: from `empty_memory` or the previous step's aux.
      alive: bool [num_layers, *grid_size], which experts may be chosen; None for all.
      keys: chance of this step, see `step_keys`; None: evaluation.

    Returns: (loss in nats, aux); aux.memory is the memory for the next segment.
    """
    token_nll, layers, memory = local_token_nll(trunk, experts, config, router, batch, memory, alive=alive, keys=keys)
    nll = jnp.mean(token_nll)
    return total_loss(nll, layers), ForwardAux(nll, layers, memory)


def local_token_nll(
    trunk: PyTree,
    experts: Sequence[PyTree],
    config: TransformerXLConfig,
    router: Router,
    batch: Batch,
    memory: Memory,
    *,
    alive: Bool[Array, "..."] | None = None,
    keys: StepKeys | None = None,
) -> tuple[Float[Array, "batch seq"], tuple[LayerAux, ...], Memory]:
    """Negative log-likelihood of each target, what each layer did, and the memory for the next segment.

    Args: as of `local_forward`. For evaluation the lengths of `config` and `memory` need not be those of training.
    """
    parts = segments(config, router)
    expert = config.expert()
    # A batch comes from the host as NumPy.
    tokens, targets = jnp.asarray(batch.tokens), jnp.asarray(batch.targets)
    hidden = parts.embed(trunk["embed"], tokens, None if keys is None else keys.embed)
    layers, memories = [], []
    for i in range(config.num_layers):
        gate_key, expert_keys = (None, None) if keys is None else (keys.gates[i], keys.experts[i])
        scores = parts.gate(trunk["gates"][i], hidden, memory[i], tokens[:, 0], gate_key)
        inputs = (jnp.asarray(part) for part in expert_inputs(config, hidden, memory[i], expert_keys))
        layer_alive = None if alive is None else alive[i]
        mixed, aux = dmoe_layer(expert, experts[i], router, config.k_best, scores, layer_alive, *inputs)
        memories.append(parts.next_memory(memory[i], hidden))
        layers.append(aux)
        hidden = mixed
    head_key = None if keys is None else keys.head
    nll = parts.token_nll(trunk["embed"], trunk["head"], hidden, targets, head_key)
    return nll, tuple(layers), tuple(memories)


class TransformerXL(Model):
    """The language model with remote mixtures, one a layer, as a trainer takes it. Batches are `SegmentStream`'s.

    Args:
      config: sizes of the model, a mixture.
      router: of every layer.
      mixtures: one for each layer: `await mixture(run, scores, *inputs) -> (hidden, auxiliary loss)`.
      word_counts: of the training text, for the initial output biases; None: zeros.

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
    ) -> None:
        if len(mixtures) != config.num_layers:
            raise ValueError(f"expected {config.num_layers} mixtures, one a layer, got {len(mixtures)}")
        self.config = config
        self.router = router
        self.mixtures = tuple(mixtures)
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
        """The model over the experts `layer0...`, `layer1...` of a swarm.

        Args:
          swarm: makes the mixtures, a `dmoe_jax.Swarm`.
          word_counts: as of the class.
          options: of each mixture, such as `k_min`; see `Swarm.mixture`.
        """
        mixtures = layer_mixtures(swarm, config.expert(), router, config.num_layers, k_best=config.k_best, **options)
        return cls(config, router, mixtures, word_counts=word_counts)

    def init(self, key: PRNGKeyArray) -> PyTree:
        return init_trunk(key, self.config, self.router, word_counts=self._word_counts)

    def initial_state(self, batch: Batch) -> Memory:
        return trunk_parts.empty_memory(self.config, batch.tokens.shape[0])

    def keys(self, batch: Batch, *, seed: int, trainer: int, step: int) -> StepKeys:
        rows = batch.tokens.shape[0]
        return trunk_parts.step_keys(
            num_layers=self.config.num_layers, batch=rows, seed=seed, trainer=trainer, step=step
        )

    async def forward(
        self, run: Recording, params: PyTree, batch: Batch, state: Memory, keys: StepKeys | None
    ) -> Outcome:
        hidden, penalties, memory = await self._hidden(run, params, batch, state, keys)
        head_key = None if keys is None else keys.head
        nll = run(self._segments.loss_head, params["embed"], params["head"], hidden, batch.targets, head_key)
        return Outcome(loss=run(total_of, nll, penalties), state=memory, reported=nll, items=int(batch.targets.size))

    async def _hidden(
        self, run: Recording, params: PyTree, batch: Batch, memory: Memory, keys: StepKeys | None
    ) -> tuple[Value, list[Value], Memory]:
        """The last layer's hidden states, the routers' auxiliary losses, and the memory for the next segment."""
        hidden = run(self._segments.embed, params["embed"], batch.tokens, None if keys is None else keys.embed)
        if batch.is_first.any():
            memory = trunk_parts.forget(memory, jnp.asarray(batch.is_first))
        memories, penalties = [], []
        for layer, mixture in enumerate(self.mixtures):
            gate_key, dropout_key = (None, None) if keys is None else (keys.gates[layer], keys.experts[layer])
            ids = batch.tokens[:, 0]
            scores = run(self._segments.gate, params["gates"][layer], hidden, memory[layer], ids, gate_key)
            # Off the tape: memory is a constant to the gradient, in this segment of text and in the next.
            memories.append(_jitted_next_memory(memory[layer], hidden.value))
            inputs = expert_inputs(self.config, hidden, memory[layer], dropout_key)
            hidden, penalty = await mixture(run, scores, *inputs)
            penalties.append(penalty)
        return hidden, penalties, tuple(memories)

    async def evaluate(
        self, params: PyTree, batches: Iterable[Batch], on_batch: Callable[[], None] = lambda: None
    ) -> Evaluation:
        """Loss over `evaluation_segments` of a text: targets outside a batch's mask do not count."""
        memory: Memory | None = None
        total, counted = 0.0, []
        for batch in batches:
            memory = memory if memory is not None else self.initial_state(batch)
            run = Recording(differentiate=False)
            hidden, _, memory = await self._hidden(run, params, batch, memory, None)
            nll = run(self._segments.token_nll, params["embed"], params["head"], hidden, batch.targets, None)
            total += float(np.asarray(nll.value)[batch.mask].sum(dtype=np.float64))
            counted.append(batch.targets[batch.mask])
            on_batch()
        targets = np.concatenate(counted) if counted else np.zeros(0, np.int32)
        if not targets.size:
            raise ValueError("there is nothing to evaluate: the text has no target")
        return Evaluation(loss=total / targets.size, items=int(targets.size), targets=targets)


_jitted_next_memory = jax.jit(next_memory)
