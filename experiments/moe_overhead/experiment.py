"""The claim and its bar, around the measurement: check, measure, summarise, draw."""

from matplotlib.figure import Figure

from dmoe_jax.routing.check import check_router
from dmoe_jax.routing.registry import make_router
from dmoe_jax.runs.style import GREY, KILLED, VALID, dress, end_labels
from experiments.bench import Experiment, Run
from experiments.moe_overhead.measurement import Overhead, Round, measure_overhead
from experiments.moe_overhead.settings import OverheadSettings
from experiments.results import Bar, Result
from experiments.transformer_xl.presets import PRESETS

BAR = Bar(name="moe_overhead", bound=1.3)
"""A dense layer of equal FLOPs may be this much faster."""
_SIZES = ("tokens_per_step", "dense_flops", "moe_flops")


def check(settings: OverheadSettings) -> None:
    """Try the router on the preset's grid, before anything is compiled."""
    preset = PRESETS["dmoe", settings.size]
    check_router(make_router(settings.router, preset.grid_size), preset.grid_size, preset.d_model)


def measure(run: Run[OverheadSettings]) -> None:
    """Time both models, and log each round."""
    settings = run.settings
    rounds, steps = (3, 5) if settings.quick else (settings.rounds, settings.steps_per_round)

    def on_round(so_far: Overhead) -> None:
        number, last = len(so_far.rounds), so_far.rounds[-1]
        sizes = {name: getattr(so_far, name) for name in _SIZES}
        run.log("round", step=number, dense_s=last.dense_s, moe_s=last.moe_s, ratio=last.ratio, **sizes)
        run.say(
            f"round {number}/{rounds}: {1e3 * last.moe_s:.1f} ms with mixtures, {1e3 * last.dense_s:.1f} ms with "
            f"dense layers, ratio {last.ratio:.2f}"
        )

    run.say("compiling")
    measure_overhead(
        size=settings.size,
        router=settings.router,
        batch_size=settings.batch_size,
        compute_dtype="bfloat16" if settings.bf16 else "float32",
        rounds=rounds,
        steps_per_round=steps,
        seed=settings.seed,
        on_round=on_round,
    )


def summarise(run: Run[OverheadSettings]) -> Result | None:
    """Take medians over the rounds; None where none is finished."""
    records = run.records("round")
    if not records:
        return None
    rounds = tuple(Round(dense_s=record["dense_s"], moe_s=record["moe_s"]) for record in records)
    measured = Overhead(rounds=rounds, **{name: records[-1][name] for name in _SIZES})
    return Result(
        title="What a mixture costs on one device",
        summary="Tokens a second in training: the same model with a dense layer of equal FLOPs, over the mixture.",
        figures={
            "moe_overhead": measured.ratio,
            "bar": BAR.bound,
            "moe_tokens_per_s": measured.moe_tokens_per_s,
            "dense_tokens_per_s": measured.dense_tokens_per_s,
            "moe_layer_flops_per_sequence": measured.moe_flops,
            "dense_layer_flops_per_sequence": measured.dense_flops,
            "size": run.settings.size,
            "rounds": len(rounds),
        },
        bars=(BAR,),
    )


def draw(run: Run[OverheadSettings], result: Result) -> Figure:
    """Draw the ratio of each round."""
    del result
    ratios = [record["ratio"] for record in run.records("round")]
    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axes = figure.add_subplot()
    numbers = range(1, len(ratios) + 1)
    axes.bar(numbers, ratios, color=VALID, width=0.6)
    for height, colour in ((1.0, GREY), (BAR.bound, KILLED)):
        axes.axhline(height, color=colour, linestyle="--", linewidth=1.2)
    axes.set_xticks(list(numbers))
    axes.set_ylim(0, 1.15 * max(BAR.bound, *ratios))
    dress(axes, "Tokens a second: a dense layer of equal FLOPs over the mixture", "round")
    end_labels(axes, [(1.0, "as fast", GREY), (BAR.bound, f"bar {BAR.bound}", KILLED)])
    return figure


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Ratio of tokens a second, dense over mixture, in each round",
    check=check,
)
