"""ALBERT (Lan et al. 2020): a small BERT, trained on masked words and on the order of two segments.

Two things make it small (section 3.1). The embedding is *factorised*: words have vectors of width E, which one matrix
takes to the layers' width H. And all layers *share* their parameters: there is one layer, applied num_layers times.
With post-LN, as in BERT (Devlin et al. 2019):

    e = LayerNorm(word + position + segment)                         [batch, seq, E]
    h_0 = W e + b                                                    [batch, seq, H]
    a_n = LayerNorm(h_n + Attention(h_n));  h_n+1 = LayerNorm(a_n + W_2 gelu(W_1 a_n))
    masked words:    logits = words LayerNorm(gelu(W_m h_N)) + bias     of the masked positions; words as those of e
    segment order:   logits = W_o tanh(W_p h_N[CLS])                    index 1: swapped

The matrices of attention, feed-forward network and heads have biases, too; gelu is its approximation by tanh. Nothing
is dropped, as in the second version of the authors' models.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from dmoe_jax.arrays import PyTree
from experiments.collaborative.masked_text import MaskedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class AlbertConfig:
    """Sizes of the model. The defaults are tiny."""

    vocab_size: int = 1003
    """Words and special tokens."""
    max_len: int = 32
    """Tokens of a sample."""
    embedding_dim: int = 32
    """E, width of the word vectors; 128 in the paper."""
    d_model: int = 32
    """H, width of the hidden states; a multiple of num_heads. The feed-forward part is four times as wide."""
    num_layers: int = 2
    """Number of times that the layer is applied."""
    num_heads: int = 4
    """Attention heads."""


def init_albert(key: PRNGKeyArray, config: AlbertConfig) -> dict[str, PyTree]:
    """Make the parameters, as BERT's: embeddings and matrices small by chance, biases 0, gains of LayerNorms 1."""
    narrow, width = config.embedding_dim, config.d_model
    embeddings = {"words": config.vocab_size, "positions": config.max_len, "segments": 2}
    matrices = {
        "project": (narrow, width),
        **dict.fromkeys(("query", "key", "value", "output", "pool"), (width, width)),
        "ff_in": (width, 4 * width),
        "ff_out": (4 * width, width),
        "word_head": (width, narrow),
        "order_head": (width, 2),
    }
    norms = {"embedding_norm": narrow, "attention_norm": width, "ff_norm": width, "word_norm": narrow}
    keys = iter(jax.random.split(key, len(embeddings) + len(matrices)))

    def drawn(*shape: int) -> Array:
        return 0.02 * jax.random.truncated_normal(next(keys), -2, 2, shape)

    return {
        **{name: drawn(rows, narrow) for name, rows in embeddings.items()},
        **{name: {"kernel": drawn(*shape), "bias": jnp.zeros(shape[1])} for name, shape in matrices.items()},
        **{name: {"scale": jnp.ones(size), "bias": jnp.zeros(size)} for name, size in norms.items()},
        "vocabulary": {"bias": jnp.zeros(config.vocab_size)},
    }


def albert_logits(
    params: PyTree, config: AlbertConfig, batch: MaskedBatch
) -> tuple[Float[Array, "batch masked vocab"], Float[Array, "batch 2"]]:
    """Return the logits of each masked word, and of the order. Pure; `config` is static under jit."""
    tokens, segments, positions = map(jnp.asarray, batch[:3])  # a batch comes from the host as NumPy
    vectors = params["words"][tokens] + params["positions"][: tokens.shape[1]] + params["segments"][segments]

    def layer(hidden: Array, _: None) -> tuple[Array, None]:
        heads = (*hidden.shape[:2], config.num_heads, -1)
        query, key, value = (_dense(params[name], hidden).reshape(heads) for name in ("query", "key", "value"))
        attended = jax.nn.dot_product_attention(query, key, value).reshape(hidden.shape)
        attention = _norm(params["attention_norm"], hidden + _dense(params["output"], attended))
        inner = jax.nn.gelu(_dense(params["ff_in"], attention))
        return _norm(params["ff_norm"], attention + _dense(params["ff_out"], inner)), None

    hidden = _dense(params["project"], _norm(params["embedding_norm"], vectors))
    hidden, _ = jax.lax.scan(layer, hidden, None, length=config.num_layers)
    masked = jnp.take_along_axis(hidden, positions[:, :, None], axis=1)
    inner = _norm(params["word_norm"], jax.nn.gelu(_dense(params["word_head"], masked)))
    words = inner @ params["words"].T + params["vocabulary"]["bias"]
    return words, _dense(params["order_head"], jnp.tanh(_dense(params["pool"], hidden[:, 0])))


def _dense(params: PyTree, x: Array) -> Array:
    return x @ params["kernel"] + params["bias"]


def _norm(params: PyTree, x: Array) -> Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-12) * params["scale"] + params["bias"]


def albert_loss(params: PyTree, config: AlbertConfig, batch: MaskedBatch) -> Float[Array, ""]:
    """Return the loss, nats: masked words plus segment order, each a mean over the samples. Pure, as the logits."""
    words, order = albert_logits(params, config, batch)
    targets, swapped = jnp.asarray(batch.targets), jnp.asarray(batch.swapped)
    mlm_loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(words, targets))
    return mlm_loss + jnp.mean(optax.softmax_cross_entropy_with_integer_labels(order, swapped))
