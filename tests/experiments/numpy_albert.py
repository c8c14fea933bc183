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


def attend(params: Any, vectors: list[np.ndarray], query_place: int) -> np.ndarray:
    """Projected output of attention, all heads together, for the position `query_place`, over all positions."""
    num_heads, d_head = params["query"]["bias"].shape
    result = params["output"]["bias"].copy()
    for h in range(num_heads):

        def project(name: str, vector: np.ndarray, h: int = h) -> np.ndarray:
            return vector @ params[name]["kernel"][:, h] + params[name]["bias"][h]

        query = project("query", vectors[query_place])
        scores = np.array([query @ project("key", vector) for vector in vectors]) / math.sqrt(d_head)
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        head = sum(weight * project("value", vector) for weight, vector in zip(weights, vectors, strict=True))
        result += head @ params["output"]["kernel"][h]
    return result


def layer(params: Any, vectors: list[np.ndarray]) -> list[np.ndarray]:
    """One layer over one sample."""
    outputs = []
    for place, vector in enumerate(vectors):
        attention = layer_norm(vector + attend(params, vectors, place), params["attention_norm"])
        fed = dense(gelu(dense(attention, params["ff_in"])), params["ff_out"])
        outputs.append(layer_norm(attention + fed, params["ff_norm"]))
    return outputs


def forward(
    params: Any, tokens: np.ndarray, segments: np.ndarray, positions: np.ndarray, *, num_layers: int
) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the masked words [masked, vocab] and of the order [2], of one sample."""
    embed = params["embed"]
    vectors = []
    for place, (token, segment) in enumerate(zip(tokens, segments, strict=True)):
        vector = embed["words"]["embedding"][token] + embed["positions"]["embedding"][place]
        vector = vector + embed["segments"]["embedding"][segment]
        vectors.append(dense(layer_norm(vector, embed["norm"]), embed["project"]))
    for _ in range(num_layers):
        vectors = layer(params["layer"], vectors)
    head = params["masked_head"]
    words = [
        embed["words"]["embedding"] @ layer_norm(gelu(dense(vectors[place], head["dense"])), head["norm"])
        + head["bias"]
        for place in positions
    ]
    order = dense(np.tanh(dense(vectors[0], params["order_head"]["pool"])), params["order_head"]["classify"])
    return np.array(words), order


def log_likelihood(logits: np.ndarray, index: int) -> float:
    """log softmax of one row of logits at `index`."""
    shifted = logits - logits.max()
    return float(shifted[index] - math.log(np.exp(shifted).sum()))
