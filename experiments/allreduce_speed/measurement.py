"""All-reduce and blocking sockets in turn, round after round, with a process for each member."""

import secrets
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dmoe_jax.runs.style import GREY
from experiments.allreduce_speed.settings import SpeedSettings
from experiments.allreduce_speed.vectors import expected_digest
from experiments.bench import Experiment, Run
from experiments.blocking_sockets import write_certificate
from experiments.panels import draw_ratios
from experiments.processes import HelperFailed, HelperProcess, open_helpers
from experiments.results import Bar, Result
from experiments.rounds import SLICE, Measurement, Ratio, measure_rounds, median_figures, ratio_figures

NETWORKS = ("tls", "plain")
SIDES = ("blocking", "rpc")

RATIOS = (
    Ratio("allreduce_tls_ratio", "wall_s", "rpc_tls", "blocking_tls", "<=", 3.0),
    Ratio("allreduce_plain_ratio", "wall_s", "rpc_plain", "blocking_plain", "<=", 4.0),
)
MEMORY_BAR = Bar(name="memory_ratio", bound=2.5)
"""The most that a member may need, over the vector."""


class WrongAverage(Exception):
    """A member's average is not the mean of all vectors."""


def measure(run: Run[SpeedSettings]) -> None:
    """Measure all rounds, with the members of both sides on both networks."""
    settings = run.settings
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        certificate = Path(folder) / "certificate.pem"
        write_certificate(certificate)
        options = [
            *("--peers", str(settings.peers), "--size", str(settings.size), "--seed", str(settings.seed)),
            *("--certificate", str(certificate)),
            *("--chunk-bytes", str(1024 * settings.chunk_kib), "--window-bytes", str(1024 * settings.window_kib)),
        ]
        expected = expected_digest(settings.peers, settings.size, settings.seed)
        measurements: list[Measurement] = []
        # The two sides of a ratio stand beside each other.
        for side, network in ((side, network) for network in NETWORKS for side in SIDES):
            arguments = [
                ["--side", side, "--network", network, "--index", str(index), *options]
                for index in range(settings.peers)
            ]
            members = stack.enter_context(open_helpers("experiments.allreduce_speed.member", arguments))
            measurements.append(partial(_exchange, f"{side}_{network}", members, expected))
        measure_rounds(run, measurements, RATIOS, rounds=settings.chosen_rounds)


def _exchange(name: str, members: Sequence[HelperProcess], expected: str) -> dict[str, dict[str, float]]:
    """Let all members of one side exchange their vectors.

    Raises:
      WrongAverage: of ours. HelperFailed: a member has ended.
    """
    order = {"group": secrets.token_hex(16), "members": [member.hello["where"] for member in members]}
    for member in members:
        member.tell(**order)
    answers = [member.hear() for member in members]
    if any(answer.get("digest", expected) != expected for answer in answers):
        raise WrongAverage("a member's average is not the mean of all vectors")
    return {name: exchange_record(answers)}


def exchange_record(answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Compute an exchange's quantities.

    Args:
      answers: what each member said: when it `started` and `ended`, its `cpu_s`, and of ours its `grown_bytes`, None
        where the system does not say.
    """
    record = {
        "wall_s": max(answer["ended"] for answer in answers) - min(answer["started"] for answer in answers),
        "cpu_s": sum(answer["cpu_s"] for answer in answers),
    }
    grown = [answer["grown_bytes"] for answer in answers if answer.get("grown_bytes") is not None]
    return record | ({"grown_bytes": max(grown)} if grown else {})


def summarise(run: Run[SpeedSettings]) -> Result | None:
    """Compute the ratios and what they are made of; None before the first round. The warm-up counts for memory."""
    slices = run.records(SLICE)
    ratios = ratio_figures(RATIOS, slices)
    if ratios is None:
        return None
    grown = [record["grown_bytes"] for record in slices if "grown_bytes" in record]
    return Result(
        title="Butterfly all-reduce beside blocking sockets",
        figures={
            "peers": run.settings.peers,
            "mib": run.settings.mib,
            **ratios,
            "memory_ratio": max(grown) / (4 * run.settings.size) if grown else None,
            **median_figures(slices, ("wall_s", "cpu_s")),
        },
        bars=[*(ratio.bar for ratio in RATIOS), MEMORY_BAR],
    )


def draw(run: Run[SpeedSettings], result: Result) -> Figure:
    """Draw each ratio with its rounds beside the bar that it must not exceed; and memory."""
    slices = run.records(SLICE)
    picture = Figure(figsize=(6.6, 3.4), layout="constrained")
    panels = picture.subplots(1, 3)
    for axes, title, ratio in zip(panels[:2], ("Time, encrypted", "Time, plain"), RATIOS, strict=True):
        draw_ratios(axes, title, [("", ratio.of_rounds(slices))], ratio.bar)
    memory_ratio = result.figures["memory_ratio"]
    draw_ratios(panels[2], "Memory", [("", [float("nan") if memory_ratio is None else memory_ratio])], MEMORY_BAR)
    panels[0].set_ylabel("all-reduce over blocking sockets", fontsize=9, color=GREY)
    panels[2].set_ylabel("over the vector", fontsize=9, color=GREY)
    return picture


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Each ratio, round by round, beside its bar",
    expected=(WrongAverage,),
    causes=(HelperFailed,),
)
