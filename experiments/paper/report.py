"""report.md, which repeats byte for byte where the figures do, and timing.md, which has all that does not."""

import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dmoe_jax.machine.cores import usable_cores
from dmoe_jax.runs.report import format_value, markdown_table
from dmoe_jax.runs.run_folder import FIGURE, REPORT, RunFolder, flat
from experiments.paper.figures_of_papers import PAPER_FIGURES, TAGS, PaperFigure, look_up
from experiments.paper.settings import EXPERIMENTS, PaperExperiment
from experiments.results import MISSED_BARS

TIMING = "timing.md"

Outcome = Literal["finished", "failed", "interrupted", "not run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """Outcome of one of the experiments."""

    name: str
    """Name of the experiment."""
    outcome: Outcome
    """State that the experiment reached."""
    headline: Mapping[str, Any]
    """Its figures; empty if it did not come to its end."""
    bars: Sequence[Mapping[str, Any]]
    """Name, bar as text, and whether it was met; of each figure that has one."""
    failure: str
    """Why it failed; else empty."""
    wall_s: float
    """Seconds that it took, over all commands since it was last begun anew."""


def write_paper_report(
    folder: RunFolder, children: Sequence[Child], commands: Mapping[str, str], *, is_quick: bool, seed: int
) -> list[Path]:
    """Write report.md and timing.md, with the children's pictures beside them.

    Args:
      folder: the run; each child's folder lies in it under the child's name.
      children: in the order of the report.
      commands: by name, what to type to get a child's figures again.
      is_quick: whether the children's runs were quick.
      seed: of all of them.

    Returns:
      All files that were written.
    """
    pictures = []
    for child in children:
        picture = folder.path / f"{child.name}.png"
        if child.outcome == "finished" and (folder.path / child.name / FIGURE).exists():
            shutil.copyfile(folder.path / child.name / FIGURE, picture)
            pictures.append(picture)
        else:
            picture.unlink(missing_ok=True)  # of a run before
    parts = list(_opening(children, is_quick=is_quick, seed=seed))
    for child in children:
        parts += _section(child, commands[child.name], has_picture=folder.path / f"{child.name}.png" in pictures)
    report = folder.write_text(REPORT, "\n\n".join(parts) + "\n")
    timing = folder.write_text(TIMING, "\n\n".join(_timing(folder, children, is_quick=is_quick)) + "\n")
    return [report, timing, *pictures]


def _opening(children: Sequence[Child], *, is_quick: bool, seed: int) -> Iterator[str]:
    yield "# The papers' figures, and ours"
    scale = "the quick run of each experiment, which shows that it works and little more" if is_quick else "the default"
    yield (
        f"Seed {seed}; the scale is {scale}. Papers: Learning@home (arXiv 2002.04013), Moshpit SGD (2103.03239). Their "
        "models are larger and ran on GPUs, so that shapes and ratios are what can be compared. The same seed gives "
        "the same report, but for figures marked *timing*, which have two digits. Durations and the machine are in "
        f"[{TIMING}]({TIMING})."
    )
    yield "How sure the papers' figures are:"
    yield markdown_table(("tag", "meaning"), [(f"[{tag}]", meaning) for tag, meaning in TAGS.items()])
    rows = [
        (f"[{child.name}](#{child.name})", EXPERIMENTS[child.name].figure, child.outcome, _missed(child))
        for child in children
    ]
    yield markdown_table(("experiment", "figure", "outcome", "missed bars"), rows)


def _missed(child: Child) -> str:
    if child.outcome != "finished":
        return "–"
    return ", ".join(child.headline.get(MISSED_BARS, ())) or "none"


def _section(child: Child, command: str, *, has_picture: bool) -> Iterator[str]:
    experiment = EXPERIMENTS[child.name]
    yield f"## {child.name}"
    kind = "Question" if experiment.claim.endswith("?") else "Claim"
    yield f"*{experiment.figure[0].upper()}{experiment.figure[1:]}.* {kind}: {experiment.claim}"
    if child.outcome != "finished":
        yield f"**{child.outcome.capitalize()}**" + (f": {child.failure}" if child.failure else ".")
    if has_picture:
        yield f"![{experiment.figure}]({child.name}.png)"
    if child.headline:
        yield from _comparison(child, experiment)
        yield from _bars(child, experiment)
        yield from _other_figures(child, experiment)
    yield f"    {command}"


def _comparison(child: Child, experiment: PaperExperiment) -> Iterator[str]:
    """Ours beside the papers', and what was not measured."""
    rows, absent = [], []
    for figure in PAPER_FIGURES.get(child.name, ()):
        ours = _ours(child.headline, figure.key, experiment)
        if ours is None:
            absent.append(figure)
        else:
            tag = f"[{figure.tag}]" if figure.tag else ""
            rows.append((figure.quantity, ours, _paper_value(figure), f"{figure.source} {tag}".strip()))
    if rows:
        yield markdown_table(("quantity", "ours", "the paper's", "source and confidence of the paper's"), rows)
    if absent:
        yield f"<details><summary>Not measured in this run: {len(absent)} of these</summary>"
        yield "\n".join(f"- {figure.quantity} (`{figure.key}`)" for figure in absent)
        yield "</details>"


def _paper_value(figure: PaperFigure) -> str:
    if figure.paper is None:
        return "not found" if figure.tag == "NF" else "–"
    return format_value(figure.paper)


def _ours(headline: Mapping[str, Any], key: str, experiment: PaperExperiment) -> str | None:
    """The figure as text, with its interval or its least and greatest where the headline has them."""
    value = look_up(headline, key)
    if value is None:
        return None
    if experiment.is_timing(key):
        return f"{_two_digits(value)} (timing)"
    ends = look_up(headline, f"{key}_interval") or (look_up(headline, f"{key}_min"), look_up(headline, f"{key}_max"))
    if isinstance(ends, list | tuple) and None not in ends:
        return f"{format_value(value)} ({' to '.join(map(format_value, ends))})"
    return format_value(value)


def _two_digits(value: object) -> str:
    return format_value(float(f"{value:.2g}") if isinstance(value, float) else value)


def _bars(child: Child, experiment: PaperExperiment) -> Iterator[str]:
    rows = [
        (f"`{bar['name']}`", _ours(child.headline, bar["name"], experiment), bar["bar"], bar["met"])
        for bar in child.bars
    ]
    if rows:
        yield markdown_table(("bar", "ours", "must be", "met"), rows)
    if MISSED_BARS not in child.headline:
        yield "This experiment has no bars."
    else:
        named = {bar["name"] for bar in child.bars}
        others = [missed for missed in child.headline[MISSED_BARS] if missed not in named]
        if others:
            yield "Missed: " + "; ".join(others) + "."
        elif not rows:
            yield "All bars were met."


def _other_figures(child: Child, experiment: PaperExperiment) -> Iterator[str]:
    shown = {figure.key.replace("/", ".") for figure in PAPER_FIGURES.get(child.name, ())}
    shown |= {f"{key}_{end}" for key in shown for end in ("interval", "min", "max")} | {MISSED_BARS}
    rows = [
        (f"`{name}`", value)
        for name, value in _figures(child.headline)
        if name not in shown and not experiment.is_timing(name)
    ]
    if rows:
        yield "<details><summary>All other figures of the run</summary>"
        yield markdown_table(("figure", "value"), rows)
        yield "</details>"


def _figures(headline: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Figures that fit into a cell, by dotted name."""
    for name, value in flat(headline).items():
        if not (isinstance(value, list) and any(isinstance(item, list | Mapping) for item in value)):
            yield name, value


def _timing(folder: RunFolder, children: Sequence[Child], *, is_quick: bool) -> Iterator[str]:
    """All that differs from run to run."""
    config = folder.config()
    yield "# How long the papers' figures took, and where"
    versions = ", ".join(f"{name} {version}" for name, version in config["versions"].items())
    cores = usable_cores()
    yield markdown_table(
        ("machine", ""),
        [
            ("processor", f"{_cpu_model()}, {cores} cores for this process"),
            ("system", config["platform"]["system"]),
            ("versions", versions),
            ("commit", config["commit"] or "not a checkout"),
            ("started", config["started"]),
        ],
    )
    allotted = [EXPERIMENTS[child.name].quick_minutes if is_quick else None for child in children]
    rows: list[tuple[object, ...]] = [
        (child.name, child.outcome, child.wall_s / 60, minutes)
        for child, minutes in zip(children, allotted, strict=True)
    ]
    total = sum(minutes for minutes in allotted if minutes is not None) if is_quick else None
    rows.append(("all", "", sum(child.wall_s for child in children) / 60, total))
    yield markdown_table(("experiment", "outcome", "minutes", "allotted on two idle cores"), rows)
    timings = [
        (child.name, f"`{name}`", value)
        for child in children
        for name, value in _figures(child.headline)
        if EXPERIMENTS[child.name].is_timing(name)
    ]
    if timings:
        yield markdown_table(("experiment", "timing", "value"), timings)


def _cpu_model() -> str:
    """Return the name that the system gives its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
