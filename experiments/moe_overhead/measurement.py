"""Steps of both models in turns, in one process, each timed alone.

They take turns at every step: where other work comes and goes, it slows both. Same text, batch, trunk and kind of
optimiser. Dropout is left out on both sides: what is measured is the mixture.
"""

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from statistics import median
from typing import TypeVar

import jax
import numpy as np
from matplotlib.figure import Figure

from dmoe_jax.data.corpora import Corpus
from dmoe_jax.data.vocabulary import Vocabulary
from dmoe_jax.data.wikitext2 import VOCAB_SIZE
from dmoe_jax.routing.registry import make_router
from dmoe_jax.training.run import train_without_waiting
from experiments.bench import Experiment, Run
from experiments.moe_overhead.one_layer import GRIDS, TOKENS, grid_training, peak_bytes
from experiments.moe_overhead.settings import OverheadSettings
from experiments.moe_overhead.wide_layer import wide_training
from experiments.panels import ratio_figure
from experiments.results import Bar, Result
from experiments.transformer_xl.flops import layer_flops
from experiments.transformer_xl.local import LocalEngine
from experiments.transformer_xl.presets import PRESETS
from experiments.transformer_xl.setup import Setup
from experiments.transformer_xl.training import checked_router

Name = TypeVar("Name", bound=Hashable)

BAR = Bar(name="moe_overhead", bound=1.2)
"""A dense layer of equal FLOPs may be this much faster."""
GRID_BAR = Bar(name="local_grid_cost", bound=1.3)
"""A training step with 64 experts may take this much longer than one with 16, of equal rows."""
MEMORY_BAR = Bar(name="token_memory", bound=2.0)
"""2,048 rows may take this much more memory than 512."""

_GRID_STEPS = 10
"""Steps of one layer for each step of a whole model: they take a millisecond."""
_STEPS_OF_A_RUN = 10_000
"""For the schedules of the optimisers alone."""


def measure(run: Run[OverheadSettings]) -> None:
    """Time the models and the layers, and log each round: the median seconds of a step of each, and their ratio."""
    settings = run.settings
    rounds, steps = (3, 5) if settings.quick else (settings.rounds, settings.steps_per_round)
    memory = [peak_bytes(tokens) for tokens in TOKENS]
    run.log("memory", tokens=TOKENS, bytes=memory, ratio=memory[1] / memory[0])
    run.say("compiling")
    setup = overhead_setup(settings)
    models = {"moe": _mixture(setup), "dense": _dense(setup)}
    few, many = sorted(GRIDS)
    layers = {number: grid_training(number, settings.seed) for number in (many, few)}
    for step in 2 * (*models.values(), *layers.values()):  # the first compiles
        step()
    sizes = _sizes(setup)
    for number in range(1, rounds + 1):
        seconds = _in_turns(models, steps)
        dense_s, moe_s = seconds["dense"], seconds["moe"]
        run.log("round", step=number, dense_s=dense_s, moe_s=moe_s, ratio=moe_s / dense_s, **sizes)
        of_layers = _in_turns(layers, _GRID_STEPS * steps)
        grid_ratio = of_layers[many] / of_layers[few]
        run.log("grid", step=number, few_s=of_layers[few], many_s=of_layers[many], ratio=grid_ratio)
        run.say(
            f"round {number}/{rounds}: {1e3 * moe_s:.1f} ms with mixtures, {1e3 * dense_s:.1f} ms with dense layers, "
            f"ratio {moe_s / dense_s:.2f}; {many} experts over {few}: {grid_ratio:.2f}"
        )


def _in_turns(ways: Mapping[Name, Callable[[], None]], steps: int) -> dict[Name, float]:
    """Median seconds of a step of each way. They take turns at every step, and in turns who goes first."""
    seconds: dict[Name, list[float]] = {name: [] for name in ways}
    for turn in range(steps):
        for name in list(ways) if turn % 2 else reversed(list(ways)):
            started = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - started)
    return {name: median(each) for name, each in seconds.items()}


def overhead_setup(settings: OverheadSettings) -> Setup:
    """The preset's mixture without dropout, over words drawn by Zipf's law.

    So the adaptive softmax has about the work that it has on real text.
    """
    preset = PRESETS["dmoe", settings.size]
    config = replace(
        preset.config,
        layer=replace(preset.config.layer, dropout=0.0, attention_dropout=0.0, position_dropout=0.0),
        embedding_dropout=0.0,
        input_dropout=0.0,
        output_dropout=0.0,
    )
    weights = 1 / (np.arange(VOCAB_SIZE) + 2.7)
    count = 20 * (settings.batch_size or preset.batch_size) * config.seq_len + 1
    words = np.random.default_rng(settings.seed).choice(VOCAB_SIZE, count, p=weights / weights.sum()).astype(np.int32)
    vocabulary = Vocabulary(tuple(map(str, range(VOCAB_SIZE))))
    corpus = Corpus(name="zipf", description="", train=words, valid=words, test=words, vocabulary=vocabulary)
    return Setup(
        preset=replace(preset, config=config, unigram_biases=False),
        corpus=corpus,
        steps=_STEPS_OF_A_RUN,
        seed=settings.seed,
        router=make_router(settings.router, config.grid_size),
        compute_dtype="bfloat16" if settings.bf16 else "float32",
        batch_size=settings.batch_size,
    )


def _mixture(setup: Setup) -> Callable[[], None]:
    """Makes the next step of the model with mixtures."""
    engine = LocalEngine(setup)

    def step() -> None:
        train_without_waiting(engine.advance(1, lambda record: None, lambda trainer, error: None))
        jax.block_until_ready(engine.state())

    return step


def _dense(setup: Setup) -> Callable[[], None]:
    """Makes the next step of the model with a dense layer for each mixture."""
    stream = setup.stream()
    state, train = wide_training(setup)

    def step() -> None:
        nonlocal state
        state, loss = train(state, next(stream))
        jax.block_until_ready((state, loss))

    return step


def _sizes(setup: Setup) -> dict[str, int]:
    """Target tokens of one step, and operations of a forward pass over one sequence: of a dense layer, and of the
    experts that the sequence goes to."""
    layer, k = setup.config.layer, setup.config.k_best
    shape = {"seq_len": layer.seq_len, "mem_len": layer.mem_len, "d_model": layer.d_model}
    shape["d_head"] = layer.d_model // layer.num_heads
    return {
        "tokens_per_step": setup.rows * layer.seq_len,
        "dense_flops": layer_flops(**shape, num_heads=k * layer.num_heads, d_ff=k * layer.d_ff),
        "moe_flops": k * layer_flops(**shape, num_heads=layer.num_heads, d_ff=layer.d_ff),
    }


def summarise(run: Run[OverheadSettings]) -> Result | None:
    """Take medians over the rounds; None where none is finished."""
    rounds = run.records("round")
    if not rounds:
        return None
    medians = {name: median(each[name] for each in rounds) for name in ("ratio", "moe_s", "dense_s")}
    grids, memory = run.records("grid"), run.records("memory")
    last = rounds[-1]
    return Result(
        title="What a mixture costs on one device",
        summary="Time of a training step with mixtures over one with dense layers of equal FLOPs (moe_overhead), of a "
        "layer with 64 experts over one with 16 (local_grid_cost); memory of 2,048 rows over 512 (token_memory).",
        figures={
            "moe_overhead": medians["ratio"],
            "local_grid_cost": median(each["ratio"] for each in grids) if grids else None,
            "token_memory": memory[-1]["ratio"] if memory else None,
            "moe_tokens_per_s": last["tokens_per_step"] / medians["moe_s"],
            "dense_tokens_per_s": last["tokens_per_step"] / medians["dense_s"],
            "moe_layer_flops_per_sequence": last["moe_flops"],
            "dense_layer_flops_per_sequence": last["dense_flops"],
            "size": run.settings.size,
            "rounds": len(rounds),
        },
        bars=(BAR, GRID_BAR, MEMORY_BAR),
    )


def draw(run: Run[OverheadSettings], result: Result) -> Figure:
    """Draw each ratio with its bar, and its rounds as dots."""
    del result
    few, many = sorted(GRIDS)

    def ratios(kind: str) -> list[float]:
        return [record["ratio"] for record in run.records(kind)]

    panels = [
        ("mixture over dense", {"time of a step": ratios("round")}, BAR),
        (f"{many} over {few} experts", {"time of a step": ratios("grid")}, GRID_BAR),
        (f"{TOKENS[1]:,} over {TOKENS[0]} rows", {"peak memory": ratios("memory")}, MEMORY_BAR),
    ]
    return ratio_figure([panel for panel in panels if all(panel[1].values())], first_label="ratio", last_label="")


EXPERIMENT = Experiment[OverheadSettings](
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Ratios of time and memory, each beside its bar, with their rounds",
    check=lambda settings: checked_router(settings.router, PRESETS["dmoe", settings.size].config),
)
