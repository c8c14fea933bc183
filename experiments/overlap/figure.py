"""Wall time of each round beside the waits on its critical path."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dmoe_jax.runs.run_folder import replaced_file
from dmoe_jax.runs.style import GREY, KILLED, VALID, dress, end_labels


def overlap_figure(rounds_s: Sequence[float], critical_path_s: float, bar: float, trainers: int, path: Path) -> Path:
    """Draw figure.png.

    Args:
      rounds_s: wall time of each round, seconds.
      critical_path_s: what one trainer alone would wait in a round, seconds.
      bar: the multiple of it that a round may take.
      trainers: trainers in a round.
      path: where the picture goes.
    """
    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    numbers = range(1, len(rounds_s) + 1)
    axes.bar(numbers, rounds_s, color=VALID, width=0.6)
    axes.axhline(critical_path_s, color=GREY, linestyle="--", linewidth=1.2)
    axes.axhline(bar * critical_path_s, color=KILLED, linestyle="--", linewidth=1.2)
    axes.set_xticks(list(numbers))
    axes.set_ylim(0, 1.15 * max(bar * critical_path_s, *rounds_s))
    dress(axes, f"One step of {trainers} trainers that wait for remote experts (seconds)", "round")
    end_labels(
        axes,
        [
            (critical_path_s, f"waits of one step {critical_path_s:.1f} s", GREY),
            (bar * critical_path_s, f"bar {bar * critical_path_s:.1f} s", KILLED),
        ],
    )
    with replaced_file(path) as temporary:
        figure.savefig(temporary, dpi=130)
    return path
