"""The three models of Learning@home's language modelling experiment, in the paper's size and in one for two cores.

In both sizes a layer of `base` has the parameters of four layers of `small`, and `dmoe` sends every sequence to four
experts of each layer, each of them a layer of `small`. So `dmoe` costs about what `base` costs, at the width of
`small`: 18 % more FLOPs in the full size and 36 % in the tiny one, since attention grows with the width and not with
its square. A layer has sixteen experts in the full size and eight in the tiny one, whose runs are too short for more.

The full size is the recipe with which Transformer-XL reaches a test perplexity of 63.4 on WikiText-2 (T. Dettmers'
`replicate_wt2.sh`), for all three models, as in the paper. It departs in two points without effect: the cosine begins
after the warm-up (see `optim.recipe`), and clusters of words beyond the vocabulary are left out.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from dmoe_jax.models import LayerConfig, TransformerXLConfig
from dmoe_jax.optim import Recipe
from experiments.transformer_xl.settings import Model, Size, TrainingSettings

ON_THIS_DEVICE = TrainingSettings(where="local")

_LARGEST_VOCABULARY = 267_735
"""That of WikiText-103, for which the authors chose their clusters of words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model and how it is trained."""

    model: Model
    """Model, one of the three."""
    config: TransformerXLConfig
    """Its sizes, over a vocabulary that is larger than that of any text; see `model_config`."""
    recipe: Recipe = field(default_factory=Recipe)
    """Recipe of a dense model, or of the trunk; `total_steps` are those of the run."""
    expert_recipe: Recipe = field(default_factory=Recipe)
    """Recipe of each expert; `total_steps` are those of the run.

    An expert takes at most one update for each of the trunk, and its cosine counts its own: a popular expert is nearly
    at rest in the end, while one that is seldom asked still learns. (A cosine over an even share of the samples rests
    too early.) On a node of a swarm, which knows of no end of the run, its step size stays.
    """
    unigram_biases: bool = False
    """True if output biases start at the words' frequencies instead of 0."""
    batch_size: int = 32
    """Sequences of one update on one device. (A slow trainer has one sequence, and there are 32 of them.)"""
    steps: int = 125_000
    """Updates of a whole run on one device."""
    simulated_steps: int = 125_000
    """Updates of a whole run of slow trainers, each of fewer sequences."""
    pauses: int = 50
    """Pauses of a run for evaluation and checkpoint, in equal steps."""
    stale_factor: float = 1.0
    """Factor of its step sizes where 32 asynchronous trainers share the model, and a stale update is divided by the
    root of its staleness."""


_FULL = Preset(
    model="base",
    config=TransformerXLConfig(
        vocab_size=_LARGEST_VOCABULARY,
        num_layers=16,
        layer=LayerConfig(
            d_model=400,
            num_heads=10,
            d_ff=900,
            seq_len=150,
            mem_len=150,
            dropout=0.2,
            attention_dropout=0.2,
            position_dropout=0.6,
        ),
        cutoffs=(20_000, 40_000, 200_000),
        embedding_dropout=0.2,
        input_dropout=0.6,
        output_dropout=0.5,
    ),
)

# The step sizes of one trainer were tried by hand, not equally often; `--search` tries equally many for each model.
_TINY = Preset(
    model="base",
    config=TransformerXLConfig(
        vocab_size=_LARGEST_VOCABULARY,
        num_layers=2,
        layer=LayerConfig(d_model=128, num_heads=4, d_ff=288, seq_len=128, mem_len=128),
        cutoffs=(2000, 10_000),
    ),
    recipe=Recipe(learning_rate=4e-4, warmup_steps=200, weight_decay=0.0),
    expert_recipe=Recipe(learning_rate=8e-4, warmup_steps=200, weight_decay=0.0),
    unigram_biases=True,
    steps=1000,
    simulated_steps=8000,
    pauses=10,
    stale_factor=4.0,  # `--search`, 2,000 updates, one seed, of 0.5, 1, 2, 4 and 8: the best for all three models
)


def _other(preset: Preset, model: Model, *, learning_rate: float | None = None, **sizes: Any) -> Preset:
    recipe = replace(preset.recipe, learning_rate=learning_rate or preset.recipe.learning_rate)
    return replace(preset, model=model, recipe=recipe, config=preset.config.replace(**sizes))


PRESETS: dict[tuple[Model, Size], Preset] = {
    ("base", "full"): _FULL,
    ("small", "full"): _other(_FULL, "small", d_model=200, d_ff=450),
    ("dmoe", "full"): _other(_FULL, "dmoe", d_model=200, d_ff=450, grid_size=(4, 4), k_best=4),
    ("base", "tiny"): _TINY,
    ("small", "tiny"): _other(_TINY, "small", d_model=64, d_ff=144, learning_rate=8e-4),
    ("dmoe", "tiny"): _other(_TINY, "dmoe", d_model=64, d_ff=144, learning_rate=1e-3, grid_size=(2, 4), k_best=4),
}
"""(model, size) -> preset. Change one with `dataclasses.replace`."""


def sized_preset(settings: TrainingSettings, model: Model) -> Preset:
    """The preset of a model, with as many experts in a mixture as the settings say. Raises ValueError if there are not
    so many."""
    preset = PRESETS[model, settings.size]
    if not preset.config.is_mixture:
        return preset
    grid_size, k_best = settings.grid_size or preset.config.grid_size, settings.k_best or preset.config.k_best
    return replace(preset, config=replace(preset.config, grid_size=grid_size, k_best=k_best))


def chosen_preset(settings: TrainingSettings, model: Model) -> Preset:
    """The same with step sizes for who trains it, times what the settings say. Raises as `sized_preset`."""
    preset = sized_preset(settings, model)
    is_stale = settings.is_asynchronous and settings.staleness_power > 0 and settings.concurrency != 1
    factor = settings.step_size * (preset.stale_factor if is_stale else 1.0)
    trunk, experts = (
        replace(recipe, learning_rate=factor * recipe.learning_rate, staleness_power=settings.staleness_power)
        for recipe in (preset.recipe, preset.expert_recipe)
    )
    return replace(preset, recipe=trunk, expert_recipe=experts)


def model_config(preset: Preset, vocab_size: int, settings: TrainingSettings = ON_THIS_DEVICE) -> TransformerXLConfig:
    """The configuration of the preset's model over this vocabulary, without clusters of words beyond it.

    Precision and routed unit are those of the settings; a dense model routes nothing.
    """
    return preset.config.replace(
        vocab_size=vocab_size,
        cutoffs=tuple(cutoff for cutoff in preset.config.cutoffs if cutoff < vocab_size),
        compute_dtype="bfloat16" if settings.bf16 else "float32",
        route=settings.route if preset.config.is_mixture else "sequence",
    )
