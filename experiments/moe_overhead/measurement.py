"""Steps of both models in turns, in one process, each timed alone.

They take turns at every step: where other work comes and goes, it slows both. Same text, batch, trunk and kind of
optimiser. Dropout is left out on both sides: what is measured is the mixture.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import jax
import numpy as np
from matplotlib.figure import Figure

from dmoe_jax.data.corpora import Corpus
from dmoe_jax.data.vocabulary import Vocabulary
from dmoe_jax.data.wikitext2 import VOCAB_SIZE
from dmoe_jax.routing.registry import make_router
from dmoe_jax.training.run import train_without_waiting
from experiments.bench import Experiment, Run
from experiments.moe_overhead.settings import OverheadSettings
from experiments.moe_overhead.wide_layer import wide_training
from experiments.panels import draw_rounds
from experiments.results import Bar, Result
from experiments.transformer_xl.flops import layer_flops
from experiments.transformer_xl.local import LocalEngine
from experiments.transformer_xl.presets import PRESETS
from experiments.transformer_xl.setup import Setup
from experiments.transformer_xl.training import checked_router

BAR = Bar(name="moe_overhead", bound=1.3)
"""A dense layer of equal FLOPs may be this much faster."""

_STEPS_OF_A_RUN = 10_000
"""For the schedules of the optimisers alone."""


def measure(run: Run[OverheadSettings]) -> None:
    """Time both models, and log each round: the median seconds of a step of each, and their ratio."""
    settings = run.settings
    rounds, steps = (3, 5) if settings.quick else (settings.rounds, settings.steps_per_round)
    run.say("compiling")
    setup = overhead_setup(settings)
    models = {"moe": _mixture(setup), "dense": _dense(setup)}
    for step in (*models.values(), *models.values()):  # the first compiles
        step()
    sizes = _sizes(setup)
    for number in range(1, rounds + 1):
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for turn in range(steps):
            for name in ("dense", "moe") if turn % 2 else ("moe", "dense"):
                started = time.perf_counter()
                models[name]()
                seconds[name].append(time.perf_counter() - started)
        dense_s, moe_s = median(seconds["dense"]), median(seconds["moe"])
        run.log("round", step=number, dense_s=dense_s, moe_s=moe_s, ratio=moe_s / dense_s, **sizes)
        run.say(
            f"round {number}/{rounds}: {1e3 * moe_s:.1f} ms with mixtures, {1e3 * dense_s:.1f} ms with dense layers, "
            f"ratio {moe_s / dense_s:.2f}"
        )


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
    last = rounds[-1]
    return Result(
        title="What a mixture costs on one device",
        summary="Tokens a second in training: the same model with a dense layer of equal FLOPs, over the mixture.",
        figures={
            "moe_overhead": medians["ratio"],
            "bar": BAR.bound,
            "moe_tokens_per_s": last["tokens_per_step"] / medians["moe_s"],
            "dense_tokens_per_s": last["tokens_per_step"] / medians["dense_s"],
            "moe_layer_flops_per_sequence": last["moe_flops"],
            "dense_layer_flops_per_sequence": last["dense_flops"],
            "size": run.settings.size,
            "rounds": len(rounds),
        },
        bars=(BAR,),
    )


def draw(run: Run[OverheadSettings], result: Result) -> Figure:
    """Draw the ratio of each round."""
    del result
    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    draw_rounds(
        figure.add_subplot(),
        "Tokens a second: a dense layer of equal FLOPs over the mixture",
        [record["ratio"] for record in run.records("round")],
        reference=(1.0, "as fast"),
        bar=(BAR.bound, f"bar {BAR.bound}"),
    )
    return figure


EXPERIMENT = Experiment[OverheadSettings](
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Ratio of tokens a second, dense over mixture, in each round",
    check=lambda settings: checked_router(settings.router, settings.size),
)
