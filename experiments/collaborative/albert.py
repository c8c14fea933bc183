"""ALBERT (Lan et al. 2020): a small BERT, trained on masked words and on the order of two segments.

    config = AlbertConfig(vocab_size=text.vocab_size, max_len=128)
    params = init_albert(key, config)
    loss, metrics = albert_loss(params, config, text.batch(range(16)))

Theory of operation. Two things make it small (section 3.1). The embedding is *factorised*: words have vectors of width
E, which one matrix takes to the layers' width H. And all layers *share* their parameters: there is one layer, applied
num_layers times. With post-LN, as in BERT (Devlin et al. 2019):

    e = LayerNorm(word + position + segment)                         [batch, seq, E]
    h_0 = W e + b                                                    [batch, seq, H]
    a_n = LayerNorm(h_n + Attention(h_n));  h_n+1 = LayerNorm(a_n + W_2 gelu(W_1 a_n))
    masked words:    logits = table LayerNorm(gelu(W_m h_N)) + bias     of the masked positions; the table is that of e
    sentence order:  logits = W_o tanh(W_p h_N[CLS])                    index 1: swapped

The matrices of attention, feed-forward network and heads have biases, too; gelu is its approximation by tanh.

The loss is the mean over samples of (mean negative log-likelihood of the sample's masked words + that of its order).
Every sample has equally many masked words (`masked_text`), so the gradient of a large batch is the mean of those of its
parts, weighted by their samples. Nothing is dropped, as in the second version of the authors' models.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jaxtyping import Array, Float, Int, PRNGKeyArray

from dmoe_jax.arrays import PyTree
from dmoe_jax.checks import check_positive
from experiments.collaborative.masked_text import MaskedBatch

NUM_SEGMENTS = 2

_EPSILON = 1e-12
"""Epsilon of every LayerNorm, as in BERT."""

_INIT = nn.initializers.truncated_normal(0.02)
"""Weights and embeddings, as in BERT; biases start at 0, LayerNorm gains at 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlbertConfig:
    """Sizes of the model. The defaults are tiny."""

    vocab_size: int
    """Words and special tokens; see `MaskedText.vocab_size`."""
    embedding_dim: int = 32
    """E, width of the word vectors; 128 in the paper."""
    d_model: int = 64
    """H, width of the hidden states; a multiple of num_heads."""
    num_layers: int = 4
    """Number of times that the layer is applied."""
    num_heads: int = 4
    """Attention heads; they divide d_model."""
    d_ff: int = 256
    """Width of the feed-forward part; 4 d_model in the paper."""
    max_len: int = 128
    """Positions that have an embedding; samples may be shorter."""

    def __post_init__(self) -> None:
        check_positive(
            vocab_size=self.vocab_size,
            embedding_dim=self.embedding_dim,
            d_model=self.d_model,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            d_ff=self.d_ff,
            max_len=self.max_len,
        )
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model must be a multiple of num_heads ({self.num_heads}), got {self.d_model}")


class AlbertMetrics(NamedTuple):
    """Metrics that `albert_loss` returns beside the loss, means over the batch's samples.

    Attributes:
      mlm_loss: negative log-likelihood of the masked words, nats.
      mlm_accuracy: share of the masked words whose own logit is the largest.
      sop_loss: negative log-likelihood of the order, nats; log 2 for a guess.
      sop_accuracy: share of the samples whose order was told.
    """

    mlm_loss: Float[Array, ""]
    mlm_accuracy: Float[Array, ""]
    sop_loss: Float[Array, ""]
    sop_accuracy: Float[Array, ""]


class AlbertLayer(nn.Module):
    """Multi-head attention, then a GELU feed-forward network; both post-LN. The one layer of the model."""

    config: AlbertConfig

    @nn.compact
    def __call__(self, hidden: Float[Array, "batch seq d_model"]) -> Float[Array, "batch seq d_model"]:
        """The layer's output for each position; every position sees all of them."""
        config = self.config
        heads = (config.num_heads, config.d_model // config.num_heads)

        def project(name: str) -> Array:
            return cast(Array, nn.DenseGeneral(heads, kernel_init=_INIT, name=name)(hidden))

        attended = jax.nn.dot_product_attention(project("query"), project("key"), project("value"))
        output = nn.DenseGeneral(config.d_model, axis=(-2, -1), kernel_init=_INIT, name="output")(attended)
        attention = _norm("attention_norm", hidden + output)
        inner = nn.gelu(nn.Dense(config.d_ff, kernel_init=_INIT, name="ff_in")(attention))
        return _norm("ff_norm", attention + nn.Dense(config.d_model, kernel_init=_INIT, name="ff_out")(inner))


class _Embedding(nn.Module):
    config: AlbertConfig

    @nn.compact
    def __call__(
        self, tokens: Int[Array, "batch seq"], segments: Int[Array, "batch seq"]
    ) -> Float[Array, "batch seq d_model"]:
        config = self.config
        places = jnp.arange(tokens.shape[1])
        vectors = (
            _embed("words", config.vocab_size, config.embedding_dim)(tokens)
            + _embed("positions", config.max_len, config.embedding_dim)(places)[None]
            + _embed("segments", NUM_SEGMENTS, config.embedding_dim)(segments)
        )
        return cast(Array, nn.Dense(config.d_model, kernel_init=_INIT, name="project")(_norm("norm", vectors)))


class _MaskedHead(nn.Module):
    config: AlbertConfig

    @nn.compact
    def __call__(
        self, hidden: Float[Array, "batch masked d_model"], table: Float[Array, "vocab embedding_dim"]
    ) -> Float[Array, "batch masked vocab"]:
        inner = nn.gelu(nn.Dense(self.config.embedding_dim, kernel_init=_INIT, name="dense")(hidden))
        bias = self.param("bias", nn.initializers.zeros, (self.config.vocab_size,))
        return _norm("norm", inner) @ table.T + bias


class _OrderHead(nn.Module):
    config: AlbertConfig

    @nn.compact
    def __call__(self, first: Float[Array, "batch d_model"]) -> Float[Array, "batch 2"]:
        pooled = nn.tanh(nn.Dense(self.config.d_model, kernel_init=_INIT, name="pool")(first))
        return cast(Array, nn.Dense(2, kernel_init=_INIT, name="classify")(pooled))


def _norm(name: str, x: Array) -> Array:
    return cast(Array, nn.LayerNorm(epsilon=_EPSILON, name=name)(x))


def _embed(name: str, rows: int, width: int) -> nn.Embed:
    return nn.Embed(rows, width, embedding_init=_INIT, name=name)


@functools.partial(jax.jit, static_argnums=1)
def init_albert(key: PRNGKeyArray, config: AlbertConfig) -> dict[str, PyTree]:
    """Parameters: {"embed", "layer", "masked_head", "order_head"}; there is one layer, whatever num_layers."""
    embed_key, layer_key, masked_key, order_key = jax.random.split(key, 4)
    # Parameters do not depend on the lengths, so one position suffices to make them.
    token, hidden = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1, config.d_model))
    table = jnp.zeros((config.vocab_size, config.embedding_dim))
    return {
        "embed": _Embedding(config).init(embed_key, token, token)["params"],
        "layer": AlbertLayer(config).init(layer_key, hidden)["params"],
        "masked_head": _MaskedHead(config).init(masked_key, hidden, table)["params"],
        "order_head": _OrderHead(config).init(order_key, hidden[:, 0])["params"],
    }


def encode(
    params: PyTree,
    config: AlbertConfig,
    tokens: Int[Array, "batch seq"] | Int[np.ndarray, "batch seq"],
    segments: Int[Array, "batch seq"] | Int[np.ndarray, "batch seq"],
) -> Float[Array, "batch seq d_model"]:
    """The last hidden states. Pure, to be jitted by the caller.

    Args:
      params: what `init_albert` made.
      config: static under jit.
      tokens: what is read, without padding.
      segments: 0 or 1, which segment each token belongs to.

    Raises:
      ValueError: there are more tokens than positions with an embedding.
    """
    if tokens.shape[1] > config.max_len:
        raise ValueError(f"a sample must have at most max_len ({config.max_len}) tokens, got {tokens.shape[1]}")
    layer = AlbertLayer(config)
    # A batch comes from the host as NumPy.
    read = jnp.asarray(tokens), jnp.asarray(segments)
    embedded = cast(Array, _Embedding(config).apply({"params": params["embed"]}, *read))

    # A loop and not num_layers copies: it compiles once, and the gradients of the shared layer are summed in it.
    def apply_layer(hidden: Array, _: None) -> tuple[Array, None]:
        return cast(Array, layer.apply({"params": params["layer"]}, hidden)), None

    hidden, _ = jax.lax.scan(apply_layer, embedded, None, length=config.num_layers)
    return hidden


def albert_logits(
    params: PyTree, config: AlbertConfig, batch: MaskedBatch
) -> tuple[Float[Array, "batch masked vocab"], Float[Array, "batch 2"]]:
    """Logits of each masked word, and of the order. Arguments and errors are those of `albert_loss`."""
    hidden = encode(params, config, batch.tokens, batch.segments)
    masked = jnp.take_along_axis(hidden, jnp.asarray(batch.positions)[:, :, None], axis=1)
    table = params["embed"]["words"]["embedding"]
    words = _MaskedHead(config).apply({"params": params["masked_head"]}, masked, table)
    order = _OrderHead(config).apply({"params": params["order_head"]}, hidden[:, 0])
    return cast(Array, words), cast(Array, order)


def albert_loss(params: PyTree, config: AlbertConfig, batch: MaskedBatch) -> tuple[Float[Array, ""], AlbertMetrics]:
    """Masked words plus sentence order, nats, a mean over samples. Pure, to be jitted and differentiated by the caller.

    Args:
      params: what `init_albert` made.
      config: static under jit.
      batch: samples, as `MaskedText.batch` gives them.

    Returns: (mlm_loss + sop_loss, what they are).

    Raises:
      ValueError: the samples are longer than config.max_len.
    """
    words, order = albert_logits(params, config, batch)
    targets, swapped = jnp.asarray(batch.targets), jnp.asarray(batch.swapped)
    mlm_loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(words, targets))
    sop_loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(order, swapped))
    metrics = AlbertMetrics(
        mlm_loss=mlm_loss,
        mlm_accuracy=jnp.mean(words.argmax(-1) == targets),
        sop_loss=sop_loss,
        sop_accuracy=jnp.mean(order.argmax(-1) == swapped),
    )
    return mlm_loss + sop_loss, metrics
