"""The command: measure, draw, report."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmoe_jax.cli.common import fail, parse_command_line, set_up_jax
from experiments.transformer_xl.names import Size

_PROG = "moe_overhead"
_EXIT_INTERRUPTED = 130

BAR = 1.3
"""A dense layer of equal FLOPs may be this much faster."""


@dataclass(frozen=True, kw_only=True)
class OverheadSettings:
    """Measure what a mixture of experts on one device costs beside a dense layer of the same FLOPs."""

    size: Size = "tiny"
    """Preset of experiments.transformer_xl: tiny, or full for a large GPU."""
    router: str = "product_key"
    """A registered name, or my_file.py:my_router."""
    batch_size: int | None = None
    """Sequences of a step. Default: the preset's."""
    bf16: bool = False
    """Multiply matrices of the layers in bfloat16."""
    rounds: int = 9
    """Each has a ratio; the median counts."""
    steps_per_round: int = 10
    """Steps of each model in a round. They take turns at every step."""
    quick: bool = False
    """Three rounds of five steps."""
    seed: int = 0
    """Seed of parameters and text."""
    out: Path | None = None
    """Run folder; must be new or empty. Default: runs/ and the time."""
    json: bool = False
    """Print the headline figures as one JSON object on the last line."""

    def __post_init__(self) -> None:
        for name in ("rounds", "steps_per_round", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.seed < 0:
            raise ValueError(f"--seed must not be negative, got {self.seed}")


def main(args: list[str] | None = None) -> None:
    """Entry point."""
    settings = parse_command_line(OverheadSettings, prog=f"python -m experiments.{_PROG}", args=args)
    set_up_jax()
    try:
        headline = _run(settings)
    except KeyboardInterrupt:
        print(f"{_PROG}: interrupted", file=sys.stderr)
        sys.exit(_EXIT_INTERRUPTED)
    if settings.json:
        print(json.dumps(headline))


def _run(settings: OverheadSettings) -> dict[str, Any]:
    from rich.console import Console

    from dmoe_jax.routing.check import check_router
    from dmoe_jax.routing.registry import make_router
    from dmoe_jax.runs.report import format_value, write_report
    from dmoe_jax.runs.run_folder import FIGURE, RunFolder
    from experiments.moe_overhead.measurement import Round, measure_overhead
    from experiments.transformer_xl.presets import PRESETS

    console = Console(stderr=settings.json)
    try:
        preset = PRESETS["dmoe", settings.size]
        check_router(make_router(settings.router, preset.grid_size), preset.grid_size, preset.d_model)
        folder = RunFolder.create(settings.out, settings, name=_PROG)
    except (ValueError, OSError) as error:
        fail(str(error), prog=_PROG)
    rounds, steps = (3, 5) if settings.quick else (settings.rounds, settings.steps_per_round)
    done: list[Round] = []

    def on_round(one: Round) -> None:
        done.append(one)
        folder.log("round", step=len(done), dense_s=one.dense_s, moe_s=one.moe_s, ratio=one.ratio)
        console.print(
            f"round {len(done)}/{rounds}: {1e3 * one.moe_s:.1f} ms with mixtures, {1e3 * one.dense_s:.1f} ms with "
            f"dense layers, ratio {one.ratio:.2f}"
        )

    console.print("compiling")
    measured = measure_overhead(
        size=settings.size,
        router=settings.router,
        batch_size=settings.batch_size,
        compute_dtype="bfloat16" if settings.bf16 else "float32",
        rounds=rounds,
        steps_per_round=steps,
        seed=settings.seed,
        on_round=on_round,
    )
    headline = _headline(settings, measured)
    _figure([one.ratio for one in done], folder.path / FIGURE)
    write_report(
        folder,
        headline,
        title="What a mixture costs on one device",
        summary="Tokens a second in training: the same model with a dense layer of equal FLOPs, over the mixture.",
        figure_text="Ratio of tokens a second, dense over mixture, in each round",
    )
    for name, value in headline.items():
        console.print(f"{name.replace('_', ' ')}: {format_value(value)}", highlight=False)
    console.print(f"run folder: {folder.path}", highlight=False, soft_wrap=True)
    return headline


def _headline(settings: OverheadSettings, measured: Any) -> dict[str, Any]:
    """What the run came to; `measured` is an `Overhead`."""
    return {
        "moe_overhead": measured.ratio,
        "bar": BAR,
        "missed_bars": ["moe_overhead"] if measured.ratio > BAR else [],
        "moe_tokens_per_s": measured.moe_tokens_per_s,
        "dense_tokens_per_s": measured.dense_tokens_per_s,
        "moe_layer_flops_per_sequence": measured.moe_flops,
        "dense_layer_flops_per_sequence": measured.dense_flops,
        "size": settings.size,
        "rounds": len(measured.rounds),
    }


def _figure(ratios: Sequence[float], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from dmoe_jax.runs.run_folder import replaced_file
    from dmoe_jax.runs.style import GREY, KILLED, VALID, dress, end_labels

    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    numbers = range(1, len(ratios) + 1)
    axes.bar(numbers, ratios, color=VALID, width=0.6)
    axes.axhline(1.0, color=GREY, linestyle="--", linewidth=1.2)
    axes.axhline(BAR, color=KILLED, linestyle="--", linewidth=1.2)
    axes.set_xticks(list(numbers))
    axes.set_ylim(0, 1.15 * max(BAR, *ratios))
    dress(axes, "Tokens a second: a dense layer of equal FLOPs over the mixture", "round")
    end_labels(axes, [(1.0, "as fast", GREY), (BAR, f"bar {BAR}", KILLED)])
    with replaced_file(path) as temporary:
        figure.savefig(temporary, dpi=130)
