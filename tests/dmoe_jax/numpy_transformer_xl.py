"""Transformer-XL written from its equations (Dai et al. 2019, section 3.3), in float64 with explicit loops.

The oracle of the tests: one query and one key at a time, distances as plain numbers instead of shifted matrices, the
past as a list of all vectors that ever entered a layer instead of a memory of fixed size.
"""

import math
import operator
from collections.abc import Sequence

import jax
import numpy as np


def layers_of(params):
    """The parameters of each layer, first to last, from what `dense.init` made."""
    stacked = params["layers"]
    return [jax.tree.map(operator.itemgetter(i), stacked) for i in range(len(jax.tree.leaves(stacked)[0]))]


def as_float64(tree):
    """The parameters as NumPy arrays in double precision."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def sinusoid(distance: int, d_model: int) -> np.ndarray:
    """R[distance]: sines of distance / 10000^(2i/d), then cosines (Vaswani et al. 2017 with halves side by side)."""
    angles = np.array([distance / 10000 ** (2 * i / d_model) for i in range(d_model // 2)])
    return np.concatenate([np.sin(angles), np.cos(angles)])


def layer_norm(x, params):
    """LayerNorm by its definition, on one vector."""
    x = x - x.mean()
    return x / math.sqrt((x**2).mean() + 1e-5) * params["scale"] + params["bias"]


def attention(params, biases, query_vector, seen: Sequence[tuple[int, np.ndarray]], clamp_len: int | None):
    """Attention output of one query: `seen` are (distance, vector) pairs; terms (a) to (d) of the paper's equation."""
    content_bias, position_bias = biases
    num_heads, d_head = content_bias.shape
    result = np.zeros(len(query_vector))
    for h in range(num_heads):
        query = query_vector @ params["query"]["kernel"][:, h]
        logits, values = [], []
        for distance, vector in seen:
            key = vector @ params["key"]["kernel"][:, h]
            counted = distance if clamp_len is None else min(distance, clamp_len)
            distance_key = sinusoid(counted, len(query_vector)) @ params["position"]["kernel"][:, h]
            content = query @ key + content_bias[h] @ key  # terms (a) and (c)
            position = query @ distance_key + position_bias[h] @ distance_key  # terms (b) and (d)
            logits.append((content + position) / math.sqrt(d_head))
            values.append(vector @ params["value"]["kernel"][:, h])
        weights = np.exp(np.array(logits) - max(logits))
        weights /= weights.sum()
        head = sum(w * v for w, v in zip(weights, values, strict=True))
        result += head @ params["output"]["kernel"][h]
    return result


def layer(params, biases, segment, past, *, mem_len: int, clamp_len: int | None = None, same_length: bool = False):
    """The outputs of one layer for one sample.

    Args:
      params: of the layer; biases: (u, v), each [heads, d_head].
      segment: vectors that enter now. past: all vectors that entered before, oldest first.
      mem_len: how many of the past the segment's first position may see, or with same_length how many vectors any
        position may see, itself included.
    """
    outputs = []
    for t, vector in enumerate(segment):
        timeline = [*past, *segment[: t + 1]]
        reach = mem_len if same_length else mem_len + t + 1
        seen = [(distance, timeline[-1 - distance]) for distance in range(min(reach, len(timeline)))]
        attended = layer_norm(vector + attention(params, biases, vector, seen, clamp_len), params["attention_norm"])
        inner = np.maximum(attended @ params["ff_in"]["kernel"] + params["ff_in"]["bias"], 0)
        outer = inner @ params["ff_out"]["kernel"] + params["ff_out"]["bias"]
        outputs.append(layer_norm(attended + outer, params["ff_norm"]))
    return outputs


def word_nll(table, head, hidden, target: int, cutoffs: Sequence[int]) -> float:
    """-log p(target) under the adaptive softmax, by its definition."""
    logits = table @ hidden + head["bias"]
    clusters = head["cluster_w"] @ hidden + head["cluster_b"]
    edges = [0, *cutoffs, len(table)]
    own = max(i for i, edge in enumerate(edges[:-1]) if edge <= target)
    first = np.concatenate([logits[: edges[1]], clusters])
    chosen = first[target] if own == 0 else clusters[own - 1]
    nll = np.log(np.exp(first).sum()) - chosen
    if own > 0:
        nll += np.log(np.exp(logits[edges[own] : edges[own + 1]]).sum()) - logits[target]
    return nll


def dense_nll(params, config, text) -> np.ndarray:
    """nll of every next word of one text, read in segments of config.seq_len that remember the ones before."""
    params = as_float64(params)
    biases = (params["biases"]["content"], params["biases"]["position"])
    table = params["embed"]["table"]
    pasts: list[list[np.ndarray]] = [[] for _ in range(config.num_layers)]
    clamp_len, same_length = config.layer.clamp_len, config.layer.same_length
    reach = {"mem_len": config.mem_len, "clamp_len": clamp_len, "same_length": same_length}
    losses = []
    for start in range(0, len(text) - 1, config.seq_len):
        words = text[start : start + config.seq_len]
        hidden = [table[word] * math.sqrt(config.d_model) for word in words]
        for own, past in zip(layers_of(params), pasts, strict=True):
            entered = hidden
            hidden = layer(own, biases, entered, past, **reach)
            past.extend(entered)
        targets = text[start + 1 : start + 1 + len(words)]
        for h, target in zip(hidden, targets, strict=True):
            losses.append(word_nll(table, params["head"], h, target, config.cutoffs))
    return np.array(losses)
