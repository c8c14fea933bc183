"""The three models of Learning@home's language modelling experiment, in the paper's size and in one for two cores.

In both sizes a layer of `base` has the parameters of four layers of `small`, and `dmoe` sends every sequence to four
experts of each layer, each of them a layer of `small`. So `dmoe` costs about what `base` costs, at the width of
`small`: 18 % more FLOPs in the full size and 36 % in the tiny one, since attention grows with the width and not with
its square. A layer has sixteen experts in the full size and eight in the tiny one, whose runs are too short for sixteen
to learn their part.

The full size is the recipe with which Transformer-XL reaches a test perplexity of 63.4 on WikiText-2 (T. Dettmers'
`replicate_wt2.sh`); `small` and `dmoe` train under the settings of `base`, as in the paper. It departs in two points
without effect: the cosine begins after the warm-up (see `recipe`), and clusters of words beyond the vocabulary are left
out.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax

from dmoe_jax.layer_config import LayerConfig
from dmoe_jax.models import dense_transformer_xl as dense
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.trunk import init_embed_and_head
from dmoe_jax.recipe import Recipe
from dmoe_jax.routing.base import Router
from experiments.transformer_xl.evaluation import EvaluationConfig
from experiments.transformer_xl.names import Model, Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model and how it is trained."""

    model: Model
    """Which of the three."""
    num_layers: int
    """Layers, each a mixture in `dmoe`."""
    d_model: int
    """Width of the hidden states."""
    num_heads: int
    """Attention heads of a layer or an expert."""
    d_ff: int
    """Width of the feed-forward network of a layer or an expert."""
    seq_len: int
    """Positions in a segment."""
    mem_len: int
    """Memory slots."""
    grid_size: tuple[int, ...] = ()
    """Extents of each layer's grid of experts; () for a dense model."""
    k_best: int = 0
    """Experts of each sequence; 0 for a dense model."""
    cutoffs: tuple[int, ...] = ()
    """First word of each tail cluster of the adaptive softmax; those beyond the vocabulary are left out."""
    dropout: float = 0.0
    """Rates of dropout, as in `TransformerXLConfig`."""
    attention_dropout: float = 0.0
    """Of the attention weights."""
    position_dropout: float = 0.0
    """Of the positional encodings."""
    embedding_dropout: float = 0.0
    """Of whole words."""
    input_dropout: float = 0.0
    """Of the word vectors."""
    output_dropout: float = 0.0
    """Before the softmax."""
    unigram_biases: bool = False
    """Whether output biases start at the words' frequencies instead of 0."""
    batch_size: int = 32
    """Sequences of one update on one device. (A simulated trainer has one sequence, and there are 32 of them.)"""
    steps: int = 125_000
    """Updates of a whole run on one device."""
    simulated_steps: int = 125_000
    """Updates of a whole run of simulated trainers, each of fewer sequences."""
    pauses: int = 50
    """Pauses of a run for evaluation and checkpoint, in equal steps."""
    learning_rate: float = 3.5e-4
    """Peak step size of a dense model, or of the trunk."""
    warmup_steps: int = 3000
    """Updates until then, at most a quarter of the run."""
    weight_decay: float = 1.2e-6
    """L2, of all parameters."""
    grad_clip: float = 0.25
    """Bound on the norm of the gradient of a dense model, or of the trunk."""
    expert_learning_rate: float = 3.5e-4
    """Peak step size of an expert."""
    expert_warmup_steps: int = 3000
    """Updates of an expert until then."""
    expert_decays: bool = True
    """Whether an expert's step size follows a cosine to 0 as that of the trunk, or stays, as on a volunteer's node that
    knows of no end."""
    expert_grad_clip: float = 0.25
    """Bound on the norm of an expert's gradient."""
    evaluation: EvaluationConfig
    """How validation and test text are read."""

    @property
    def experts_per_layer(self) -> int:
        """Cells of the grid; 0 for a dense model."""
        return math.prod(self.grid_size) if self.grid_size else 0


def _full(model: Model, **sizes: Any) -> Preset:
    return Preset(
        model=model,
        num_layers=16,
        num_heads=10,
        seq_len=150,
        mem_len=150,
        cutoffs=(20_000, 40_000, 200_000),
        dropout=0.2,
        attention_dropout=0.2,
        position_dropout=0.6,
        embedding_dropout=0.2,
        input_dropout=0.6,
        output_dropout=0.5,
        evaluation=EvaluationConfig(batch_size=10, seq_len=150, mem_len=150),
        **sizes,
    )


def _tiny(model: Model, **sizes: Any) -> Preset:
    return Preset(
        model=model,
        num_layers=2,
        num_heads=4,
        seq_len=128,
        mem_len=128,
        cutoffs=(2000, 10_000),
        unigram_biases=True,
        steps=1000,
        simulated_steps=8000,
        pauses=10,
        warmup_steps=200,
        weight_decay=0.0,
        expert_learning_rate=8e-4,
        expert_warmup_steps=200,
        evaluation=EvaluationConfig(batch_size=10, seq_len=128, mem_len=128),
        **sizes,
    )


_EXPERTS = {"grid_size": (4, 4), "k_best": 4}
_TINY_EXPERTS = {"grid_size": (2, 4), "k_best": 4}
_FULL_SMALL, _FULL_BASE = {"d_model": 200, "d_ff": 450}, {"d_model": 400, "d_ff": 900}
# Step sizes are the best of a few tried for each (README): with 32 stale trainers they matter.
_TINY_SMALL = {"d_model": 64, "d_ff": 144, "learning_rate": 8e-4}
_TINY_BASE = {"d_model": 128, "d_ff": 288, "learning_rate": 4e-4}
_TINY_DMOE = {"d_model": 64, "d_ff": 144, "learning_rate": 1e-3}

PRESETS: dict[tuple[Model, Size], Preset] = {
    ("dmoe", "full"): _full("dmoe", **_FULL_SMALL, **_EXPERTS),
    ("small", "full"): _full("small", **_FULL_SMALL),
    ("base", "full"): _full("base", **_FULL_BASE),
    ("dmoe", "tiny"): _tiny("dmoe", **_TINY_DMOE, **_TINY_EXPERTS),
    ("small", "tiny"): _tiny("small", **_TINY_SMALL),
    ("base", "tiny"): _tiny("base", **_TINY_BASE),
}
"""(model, size) -> preset. Change one with `dataclasses.replace`."""


def model_config(preset: Preset, vocab_size: int, *, compute_dtype: str = "float32") -> TransformerXLConfig:
    """The configuration of the preset's model over this vocabulary."""
    return TransformerXLConfig(
        vocab_size=vocab_size,
        num_layers=preset.num_layers,
        layer=LayerConfig(
            d_model=preset.d_model,
            num_heads=preset.num_heads,
            d_ff=preset.d_ff,
            seq_len=preset.seq_len,
            mem_len=preset.mem_len,
            dropout=preset.dropout,
            attention_dropout=preset.attention_dropout,
            position_dropout=preset.position_dropout,
            compute_dtype=compute_dtype,
        ),
        grid_size=preset.grid_size,
        k_best=preset.k_best,
        cutoffs=tuple(cutoff for cutoff in preset.cutoffs if cutoff < vocab_size),
        embedding_dropout=preset.embedding_dropout,
        input_dropout=preset.input_dropout,
        output_dropout=preset.output_dropout,
    )


def trunk_recipe(preset: Preset, steps: int) -> Recipe:
    """How a dense model, or the trunk of a mixture, is trained in a run of `steps` updates."""
    return Recipe(
        learning_rate=preset.learning_rate,
        warmup_steps=preset.warmup_steps,
        total_steps=steps,
        weight_decay=preset.weight_decay,
        grad_clip=preset.grad_clip,
    )


def expert_recipe(preset: Preset, steps: int) -> Recipe:
    """How an expert is trained in a run of `steps` updates of the trunk.

    It takes at most one for each of those, and its cosine counts its own: a popular expert is nearly at rest in the
    end, while one that is seldom asked still learns. (A cosine over an even share of the samples rests too early.)
    """
    return Recipe(
        learning_rate=preset.expert_learning_rate,
        warmup_steps=preset.expert_warmup_steps,
        total_steps=steps if preset.expert_decays else None,
        weight_decay=preset.weight_decay,
        grad_clip=preset.expert_grad_clip,
    )


def count_parameters(config: TransformerXLConfig, router: Router | None = None) -> int:
    """Numbers that a model learns: of all its experts, for a mixture with this router. Computes none of them.

    Raises:
      ValueError: a mixture without a router.
    """
    key = jax.random.key(0)

    def init() -> Any:
        if not config.is_mixture:
            return dense.init(key, config)
        if router is None:
            raise ValueError("a mixture needs its router to be counted")
        # Not `txl.init_trunk`, which tries the router: here nothing is computed.
        embed_and_head = init_embed_and_head(key, key, config)
        gates = [router.init(key, config.d_model) for _ in range(config.num_layers)]
        return embed_and_head, gates, txl.init_experts(key, config)

    shapes = jax.eval_shape(init)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
