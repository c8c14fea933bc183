"""ALBERT written from its equations (Lan et al. 2020, section 3.1; Devlin et al. 2019), in float64 with explicit loops.

The oracle of the tests: one sample, one query, one head at a time. Parameters are those of `init_albert`.
"""

import math
from typing import Any

import numpy as np


def gelu(x: np.ndarray) -> np.ndarray:
    """Hendrycks and Gimpel (2016), the approximation by tanh."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def layer_norm(x: np.ndarray, params: Any) -> np.ndarray:
    """LayerNorm by its definition, on one vector."""
    x = x - x.mean()
    return x / math.sqrt((x**2).mean() + 1e-12) * params["scale"] + params["bias"]


def dense(x: np.ndarray, params: Any) -> np.ndarray:
    return x @ params["kernel"] + params["bias"]


def attend(params: Any, vectors: list[np.ndarray], place: int, num_heads: int) -> np.ndarray:
    """Projected output of attention, all heads together, for the position `place`, over all positions."""
    heads = []
    for own in np.split(np.arange(vectors[0].size), num_heads):
        query = dense(vectors[place], params["query"])[own]
        scores = np.array([query @ dense(vector, params["key"])[own] for vector in vectors]) / math.sqrt(own.size)
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        values = [dense(vector, params["value"])[own] for vector in vectors]
        heads.append(sum(weight * value for weight, value in zip(weights, values, strict=True)))
    return dense(np.concatenate(heads), params["output"])


def layer(params: Any, vectors: list[np.ndarray], num_heads: int) -> list[np.ndarray]:
    """One layer over one sample."""
    outputs = []
    for place, vector in enumerate(vectors):
        attention = layer_norm(vector + attend(params, vectors, place, num_heads), params["attention_norm"])
        fed = dense(gelu(dense(attention, params["ff_in"])), params["ff_out"])
        outputs.append(layer_norm(attention + fed, params["ff_norm"]))
    return outputs


def forward(
    params: Any, tokens: np.ndarray, segments: np.ndarray, positions: np.ndarray, *, num_layers: int, num_heads: int
) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the masked words [masked, vocab] and of the order [2], of one sample."""
    vectors = []
    for place, (token, segment) in enumerate(zip(tokens, segments, strict=True)):
        vector = params["words"][token] + params["positions"][place] + params["segments"][segment]
        vectors.append(dense(layer_norm(vector, params["embedding_norm"]), params["project"]))
    for _ in range(num_layers):
        vectors = layer(params, vectors, num_heads)
    inner = [layer_norm(gelu(dense(vectors[place], params["word_head"])), params["word_norm"]) for place in positions]
    order = dense(np.tanh(dense(vectors[0], params["pool"])), params["order_head"])
    return np.array([params["words"] @ each + params["vocabulary"]["bias"] for each in inner]), order


def log_likelihood(logits: np.ndarray, index: int) -> float:
    """log softmax of one row of logits at `index`."""
    shifted = logits - logits.max()
    return float(shifted[index] - math.log(np.exp(shifted).sum()))
