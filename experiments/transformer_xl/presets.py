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

from dataclasses import dataclass, field, replace
from typing import Any

from dmoe_jax.layer_config import LayerConfig, Recipe, Route
from dmoe_jax.models.config import TransformerXLConfig
from experiments.transformer_xl.settings import Model, Size, TrainingSettings

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
    too early.) On a node, which knows of no end of the run, its step size stays.
    """
    unigram_biases: bool = False
    """True if output biases start at the words' frequencies instead of 0."""
    batch_size: int = 32
    """Sequences of one update on one device. (A simulated trainer has one sequence, and there are 32 of them.)"""
    eval_batch_size: int = 10
    """Rows in which a text is evaluated, each from another place of it. Their first words lack the memory of what came
    before them."""
    steps: int = 125_000
    """Updates of a whole run on one device."""
    simulated_steps: int = 125_000
    """Updates of a whole run of simulated trainers, each of fewer sequences."""
    pauses: int = 50
    """Pauses of a run for evaluation and checkpoint, in equal steps."""
    step_size_source: str = "the published recipe, which is that of base"
    """Source of its step sizes, for the report."""
    stale_factor: float = 1.0
    """Factor of its step sizes where 32 asynchronous trainers share the model, and a stale update is divided by
    the root of its staleness."""

    def scaled(self, factor: float) -> "Preset":
        """The preset with its step sizes times a factor."""
        recipes = [
            replace(recipe, learning_rate=factor * recipe.learning_rate) for recipe in (self.recipe, self.expert_recipe)
        ]
        return replace(self, recipe=recipes[0], expert_recipe=recipes[1])


def _full(model: Model, *, d_model: int, d_ff: int, **experts: Any) -> Preset:
    layer = LayerConfig(
        d_model=d_model,
        num_heads=10,
        d_ff=d_ff,
        seq_len=150,
        mem_len=150,
        dropout=0.2,
        attention_dropout=0.2,
        position_dropout=0.6,
    )
    config = TransformerXLConfig(
        vocab_size=_LARGEST_VOCABULARY,
        num_layers=16,
        layer=layer,
        cutoffs=(20_000, 40_000, 200_000),
        embedding_dropout=0.2,
        input_dropout=0.6,
        output_dropout=0.5,
        **experts,
    )
    return Preset(model=model, config=config)


def _tiny(model: Model, *, d_model: int, d_ff: int, learning_rate: float, source: str, **experts: Any) -> Preset:
    layer = LayerConfig(d_model=d_model, num_heads=4, d_ff=d_ff, seq_len=128, mem_len=128)
    recipe = Recipe(learning_rate=learning_rate, warmup_steps=200, weight_decay=0.0)
    return Preset(
        model=model,
        config=TransformerXLConfig(
            vocab_size=_LARGEST_VOCABULARY, num_layers=2, layer=layer, cutoffs=(2000, 10_000), **experts
        ),
        recipe=recipe,
        expert_recipe=replace(recipe, learning_rate=8e-4),
        unigram_biases=True,
        steps=1000,
        simulated_steps=8000,
        pauses=10,
        step_size_source=source,
        stale_factor=4.0,  # `--search`, 2,000 updates, one seed, of 0.5, 1, 2, 4 and 8: the best for all three models
    )


PRESETS: dict[tuple[Model, Size], Preset] = {
    ("dmoe", "full"): _full("dmoe", d_model=200, d_ff=450, grid_size=(4, 4), k_best=4),
    ("small", "full"): _full("small", d_model=200, d_ff=450),
    ("base", "full"): _full("base", d_model=400, d_ff=900),
    # With many stale trainers step sizes matter. These were tried by hand, with 32 whose updates were not divided by
    # anything; `--search` tries equally many of each.
    ("dmoe", "tiny"): _tiny(
        "dmoe",
        d_model=64,
        d_ff=144,
        learning_rate=1e-3,
        source="the better of two tried by hand (7e-4 and 6e-4, 1e-3 and 8e-4), one seed",
        grid_size=(2, 4),
        k_best=4,
    ),
    ("small", "tiny"): _tiny(
        "small",
        d_model=64,
        d_ff=144,
        learning_rate=8e-4,
        source="the best of four tried by hand (4e-4, 6e-4, 8e-4, 1e-3), one seed",
    ),
    ("base", "tiny"): _tiny(
        "base",
        d_model=128,
        d_ff=288,
        learning_rate=4e-4,
        source="4e-4; 2.5e-4 and 8e-4, tried by hand with one seed and stopped early, learnt more slowly",
    ),
}
"""(model, size) -> preset. Change one with `dataclasses.replace`."""


def sized_preset(settings: TrainingSettings, model: Model) -> Preset:
    """The preset of a model, with as many experts in a mixture as the settings say.

    Raises:
      ValueError: more experts are asked for than there are.
    """
    preset = PRESETS[model, settings.size]
    changes: dict[str, Any] = {"grid_size": settings.grid_size or None, "k_best": settings.k_best}
    changes = {name: value for name, value in changes.items() if value is not None and preset.config.is_mixture}
    return replace(preset, config=replace(preset.config, **changes)) if changes else preset


def chosen_preset(settings: TrainingSettings, model: Model) -> Preset:
    """The same with step sizes for who trains it, times what the settings say. Raises as `sized_preset`."""
    preset = sized_preset(settings, model)
    is_stale = settings.is_asynchronous and settings.staleness_power > 0 and settings.concurrency != 1
    factor = preset.stale_factor if is_stale else 1.0
    if factor != 1:
        found = f"{factor:g} times those without staleness, the best of five in a search: one seed, 2,000 updates each"
        preset = replace(preset, step_size_source=found)
    return preset.scaled(factor * settings.step_size)


def model_config(
    preset: Preset, vocab_size: int, *, compute_dtype: str = "float32", route: Route = "sequence"
) -> TransformerXLConfig:
    """The configuration of the preset's model over this vocabulary, without clusters of words beyond it.

    A dense model routes nothing, whatever `route` says.
    """
    return replace(
        preset.config,
        vocab_size=vocab_size,
        cutoffs=tuple(cutoff for cutoff in preset.config.cutoffs if cutoff < vocab_size),
        layer=replace(preset.config.layer, compute_dtype=compute_dtype),
        route=route if preset.config.is_mixture else "sequence",
    )
