"""Adaptive softmax (Grave et al. 2017) with tied embeddings, for words ordered by frequency.

The head scores the `cutoffs[0]` most frequent words and one token for each *tail cluster*; cluster i holds
the words cutoffs[i], ..., cutoffs[i+1]-1 (the last one ends with the vocabulary). With div_val = 1, as in
Transformer-XL's WikiText recipe, every word's output vector is its row of the embedding table:

    log p(w) = log p_head(w)                                   for w in the head
    log p(w) = log p_head(cluster i) + log p_i(w | cluster i)  for w in cluster i

This is an exact, normalised distribution; it merely has another shape than one softmax.

A cluster's large product is made only for the tokens whose target falls into it. How many they are is known at run time
only, while XLA wants static shapes: tokens are ordered by cluster, and the number of rows is rounded up to one of a few
*buckets*, each a branch of one `lax.switch`, in half the time of a loop over chunks. Differentiating a switch would
store the intermediate results of every branch, used or not, so the derivative is written by hand: it recomputes the
chosen branch and differentiates that.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Num

SMALLEST_BUCKET = 16
"""Rows of the smallest branch. Below this the time is that of reading the table, whatever the rows."""


def check_cutoffs(cutoffs: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """The cutoffs; none at all means one plain softmax. Raises ValueError unless they ascend within 1..vocab_size-1."""
    edges = (0, *cutoffs, vocab_size)
    if any(low >= high for low, high in itertools.pairwise(edges)):
        raise ValueError(f"cutoffs must ascend strictly between 0 and {vocab_size} (the vocabulary), got {cutoffs}")
    return tuple(cutoffs)


def unigram_biases(
    counts: Num[np.ndarray, " vocab"], cutoffs: tuple[int, ...]
) -> tuple[Float[Array, " vocab"], Float[Array, " n_tail"]]:
    """Biases (bias, cluster_b) under which a model that knows nothing else predicts word frequencies.

    With hidden states of zero, `adaptive_softmax_loss` of word w is then -log((counts[w] + 1) / sum(counts + 1)).

    Args:
      counts: number of each word in the training text.
      cutoffs: first word of each tail cluster, ascending.
    """
    edges = (0, *check_cutoffs(cutoffs, counts.shape[0]), counts.shape[0])
    smoothed = counts.astype(np.float64) + 1
    totals = np.array([smoothed[low:high].sum() for low, high in itertools.pairwise(edges)])
    # The head's words and the cluster tokens share one softmax; each tail has its own.
    normalisers = np.concatenate([[totals.sum()], totals[1:]])
    bias = np.log(smoothed) - np.log(np.repeat(normalisers, np.diff(edges)))
    return jnp.asarray(bias, jnp.float32), jnp.asarray(np.log(totals[1:] / totals.sum()), jnp.float32)


def adaptive_softmax_loss(
    table: Float[Array, "vocab d_model"],
    bias: Float[Array, " vocab"],
    cluster_w: Float[Array, "n_tail d_model"],
    cluster_b: Float[Array, " n_tail"],
    hidden: Float[Array, "n d_model"],
    targets: Int[Array, " n"],
    *,
    cutoffs: tuple[int, ...],
) -> Float[Array, " n"]:
    """Negative log-probability of each target, in nats; see the equations at the head of this file.

    Reverse-mode differentiable in everything but the targets.

    Args:
      table: the embedding table; row w is the output vector of word w. bias: of each word.
      cluster_w, cluster_b: output vectors and biases of the cluster tokens, one for each cutoff.
      hidden: final hidden states.
      targets: words, each in 0..vocab-1 (not checked: they are data).
      cutoffs: first word of each tail cluster, ascending; () for a plain softmax over the vocabulary.

    Raises:
      ValueError: if the cutoffs do not ascend within the vocabulary, or do not match cluster_w.
    """
    head_logits = _head_logits(table, bias, cluster_w, cluster_b, hidden, cutoffs)
    if not cutoffs:
        return optax.softmax_cross_entropy_with_integer_labels(head_logits, targets)
    # 0 for a word of the head, i + 1 for one of tail cluster i.
    cluster = jnp.searchsorted(jnp.asarray(cutoffs, targets.dtype), targets, side="right")
    head_targets = jnp.where(cluster == 0, targets, cutoffs[0] + cluster - 1)
    nll = optax.softmax_cross_entropy_with_integer_labels(head_logits, head_targets)
    return nll + _tails_nll(table, bias, hidden, targets, cluster, cutoffs)


def adaptive_softmax_log_probs(
    table: Float[Array, "vocab d_model"],
    bias: Float[Array, " vocab"],
    cluster_w: Float[Array, "n_tail d_model"],
    cluster_b: Float[Array, " n_tail"],
    hidden: Float[Array, "n d_model"],
    *,
    cutoffs: tuple[int, ...],
) -> Float[Array, "n vocab"]:
    """Log-probability of every word, in nats: the whole distribution of which `adaptive_softmax_loss` reads one word.

    Args: as of `adaptive_softmax_loss`. Raises ValueError as it does.
    """
    head = jax.nn.log_softmax(_head_logits(table, bias, cluster_w, cluster_b, hidden, cutoffs))
    edges = itertools.pairwise((*cutoffs, table.shape[0]) if cutoffs else ())
    tails = [jax.nn.log_softmax(hidden @ table[low:high].T + bias[low:high]) for low, high in edges]
    first = cutoffs[0] if cutoffs else table.shape[0]
    within = [head[:, first + number, None] + tail for number, tail in enumerate(tails)]
    return jnp.concatenate([head[:, :first], *within], axis=-1)


def _head_logits(
    table: Array, bias: Array, cluster_w: Array, cluster_b: Array, hidden: Array, cutoffs: tuple[int, ...]
) -> Float[Array, "n head"]:
    """Logits of the head's words and of the cluster tokens behind them; without cutoffs those of all words."""
    check_cutoffs(cutoffs, table.shape[0])
    if len(cutoffs) != cluster_w.shape[0]:
        raise ValueError(f"cutoffs {cutoffs} need {len(cutoffs)} cluster tokens, got {cluster_w.shape[0]}")
    if not cutoffs:
        return hidden @ table.T + bias
    words = hidden @ table[: cutoffs[0]].T + bias[: cutoffs[0]]
    return jnp.concatenate([words, hidden @ cluster_w.T + cluster_b], axis=-1)


def _tails_nll(
    table: Float[Array, "vocab d_model"],
    bias: Float[Array, " vocab"],
    hidden: Float[Array, "n d_model"],
    targets: Int[Array, " n"],
    cluster: Int[Array, " n"],
    cutoffs: tuple[int, ...],
) -> Float[Array, " n"]:
    """-log p_i(w | cluster i) for the words of tail clusters, 0 for those of the head."""
    n = targets.shape[0]
    order = jnp.argsort(cluster)
    # n rows of padding: a bucket that begins at any token then stays inside, and no slice is silently moved back.
    sorted_hidden = jnp.pad(hidden[order], ((0, n), (0, 0)))
    sorted_targets = jnp.pad(targets[order], (0, n))
    total = jnp.zeros(2 * n, hidden.dtype)
    for number, (low, high) in enumerate(itertools.pairwise((*cutoffs, table.shape[0])), start=1):
        start, count = jnp.sum(cluster < number), jnp.sum(cluster == number)
        # Rows of other clusters may lie inside the bucket; their words are clipped here and masked there.
        words = jnp.clip(sorted_targets - low, 0, high - low - 1)
        total = total + _cluster_nll(table[low:high], bias[low:high], sorted_hidden, words, start, count)
    return total[jnp.argsort(order)]


def _bucket_nll(
    rows: int,
    table: Float[Array, "words d_model"],
    bias: Float[Array, " words"],
    hidden: Float[Array, "padded d_model"],
    words: Int[Array, " padded"],
    start: Int[Array, ""],
    count: Int[Array, ""],
) -> Float[Array, " padded"]:
    """The cluster's loss computed on `rows` >= count rows from `start`; 0 outside the first `count` of them."""
    nll = jnp.zeros(hidden.shape[0], hidden.dtype)
    if rows == 0:
        return nll
    own_hidden = jax.lax.dynamic_slice_in_dim(hidden, start, rows)
    own_words = jax.lax.dynamic_slice_in_dim(words, start, rows)
    own_nll = optax.softmax_cross_entropy_with_integer_labels(own_hidden @ table.T + bias, own_words)
    own_nll = jnp.where(jnp.arange(rows) < count, own_nll, 0)
    return jax.lax.dynamic_update_slice_in_dim(nll, own_nll, start, 0)


def _bucket_grads(rows: int, *operands: Array) -> tuple[Array, ...]:
    """Gradients of `_bucket_nll` with respect to table, bias and hidden, by recomputing it.

    The last of the operands is the gradient of its result; the others are its own.
    """
    table, bias, hidden, *rest, nll_grads = operands
    _, pull_back = jax.vjp(lambda *args: _bucket_nll(rows, *args, *rest), table, bias, hidden)
    grads: tuple[Array, ...] = pull_back(nll_grads)
    return grads


def _switch(branch: Callable[..., Any], *operands: Array) -> Any:
    """Run `branch` on the operands of `_bucket_nll`, for the smallest bucket that holds `count` rows."""
    _, _, hidden, _, _, count, *_ = operands
    rows = hidden.shape[0] // 2  # without the padding
    powers = itertools.takewhile(lambda size: size < rows, (SMALLEST_BUCKET << power for power in itertools.count()))
    buckets = (0, *powers, rows)
    chosen = jnp.searchsorted(jnp.asarray(buckets), count)
    return jax.lax.switch(chosen, [functools.partial(branch, rows) for rows in buckets], *operands)


@jax.custom_vjp
def _cluster_nll(*operands: Array) -> Float[Array, " padded"]:
    """`_bucket_nll` in the bucket that fits."""
    nll: Array = _switch(_bucket_nll, *operands)
    return nll


def _cluster_nll_fwd(*operands: Array) -> tuple[Float[Array, " padded"], tuple[Array, ...]]:
    # Only the arguments are kept, so that a caller who wants the gradient alone pays for no forward at all.
    return _cluster_nll(*operands), operands


def _cluster_nll_bwd(operands: tuple[Array, ...], nll_grads: Float[Array, " padded"]) -> tuple[Any, ...]:
    return (*_switch(_bucket_grads, *operands, nll_grads), None, None, None)


_cluster_nll.defvjp(_cluster_nll_fwd, _cluster_nll_bwd)
