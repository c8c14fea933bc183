"""Floating-point operations of the models, counted in their matrix products, a multiplication and an addition as two.

Counted is what a model needs for a word, in a sequence that is computed by itself: the layers that it goes through,
and the adaptive softmax, whose tails are for the share of words that lie in them. Left out are what touches single
numbers, look-ups, the router (less than one in a thousand), the padding of a program, and the forward pass that a
swarm computes once more in its backward call.
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dmoe_jax.data import Corpus
from dmoe_jax.models import LayerConfig, TransformerXLConfig
from dmoe_jax.runs.figure import Metrics
from experiments.run_summary import perplexity_curve

TRAINING_PASSES = 3
"""Forward passes that a training step is worth: the backward pass has two products for each of the forward pass."""


def layer_flops(*, seq_len: int, mem_len: int, d_model: int, num_heads: int, d_head: int, d_ff: int) -> int:
    """Multiplications and additions of one layer's forward pass over one sequence, in its matrix products.

    Without the product of the positional encodings, which is the same for every sequence of a batch.
    """
    keys, inner = mem_len + seq_len, num_heads * d_head
    projections = 2 * (seq_len + keys) * d_model * inner  # q and output, k and v
    attention = 3 * seq_len * keys * inner  # scores by content, by distance, weighted sum
    return 2 * (projections + attention + 2 * seq_len * d_model * d_ff)


def sequence_flops(layer: LayerConfig) -> int:
    """Those of one layer for a sequence by itself, whose positional encodings are projected for it alone."""
    d_model, d_head = layer.d_model, layer.d_model // layer.num_heads
    sizes = {"seq_len": layer.seq_len, "mem_len": layer.mem_len, "d_model": d_model, "d_ff": layer.d_ff}
    positions = 2 * (layer.mem_len + layer.seq_len) * d_model * layer.num_heads * d_head
    return layer_flops(num_heads=layer.num_heads, d_head=d_head, **sizes) + positions


def softmax_flops(config: TransformerXLConfig, words: np.ndarray) -> float:
    """Those of the adaptive softmax for the mean word of a text: every word has the head, some a tail."""
    edges = (0, *config.cutoffs, config.vocab_size)
    head, *tails = (high - low for low, high in itertools.pairwise(edges))
    shares = np.histogram(words, bins=edges)[0][1:] / words.size
    outputs = head + len(tails) + sum(share * tail for share, tail in zip(shares, tails, strict=True))
    return float(2 * config.d_model * outputs)


def forward_flops(config: TransformerXLConfig, corpus: Corpus) -> float:
    """Those of the model's forward pass for a word of the training text."""
    layer, experts = config.layer, config.k_best if config.is_mixture else 1
    of_layer = experts * sequence_flops(layer)
    if config.routes_tokens:  # whose attention is the trunk's: an expert is two products
        of_layer = sequence_flops(layer) + (experts - 1) * 4 * layer.seq_len * layer.d_model * layer.d_ff
    return config.num_layers * of_layer / config.seq_len + softmax_flops(config, corpus.train)


def equal_flops(runs: Mapping[str, Iterable[Metrics]], forward: Mapping[str, float]) -> tuple[float, dict[str, Any]]:
    """Compare all labels after equal training FLOPs: as many as the cheapest run had in the end.

    Between two points of a curve the logarithm of the perplexity is taken to be straight.

    Args:
      runs: label -> metrics of its runs; those without an evaluation are left out.
      forward: label -> FLOPs of a forward pass for a word.

    Returns: (the budget, label -> perplexities of its runs at the budget, None before the first point of a curve).
    """
    curves = {
        label: [np.array(list(curve.values())) for metrics in seeds if (curve := perplexity_curve(metrics))]
        for label, seeds in runs.items()
    }
    per_word = {label: TRAINING_PASSES * flops for label, flops in forward.items()}
    budget = min((per_word[label] * own[-1, 0] for label, seeds in curves.items() for own in seeds), default=0.0)
    found: dict[str, Any] = {}
    for label, seeds in curves.items():
        words = budget / per_word[label]
        found[label] = [
            float(np.exp(np.interp(words, own[:, 0], np.log(own[:, 1])))) if words >= own[0, 0] else None
            for own in seeds
        ]
    return budget, found
