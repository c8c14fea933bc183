"""report.md, which repeats byte for byte where the figures do, and timing.md, which has all that does not."""

import platform
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dmoe_jax.machine.cores import usable_cores
from dmoe_jax.runs.report import format_value, markdown_table
from dmoe_jax.runs.run_folder import FIGURE, REPORT, RunFolder, flat
from experiments.paper.figures_of_papers import PAPER_FIGURES, TAGS, look_up
from experiments.paper.settings import EXPERIMENTS, PaperSettings, is_timing
from experiments.results import MISSED_BARS, OPEN_BARS

TIMING = "timing.md"


class Child(NamedTuple):
    """Outcome of one of the experiments: finished, failed, interrupted or not run."""

    name: str
    outcome: str
    headline: Mapping[str, Any]  # empty if it did not come to its end
    bars: Sequence[Mapping[str, Any]]  # "name", "bar" as text, and "verdict"
    failure: str  # why it failed; else empty
    wall_s: float  # over all commands since it was last begun anew


def write_paper_report(folder: RunFolder, children: Sequence[Child], settings: PaperSettings) -> list[Path]:
    """Write report.md and timing.md, with the children's pictures beside them; return all these files.

    Args:
      folder: the run; each child's folder lies in it under the child's name.
      children: in the order of the report.
    """
    pictures = {}
    for child in children:
        picture = folder.path / f"{child.name}.png"
        picture.unlink(missing_ok=True)  # of a run before
        if child.outcome == "finished" and (folder.path / child.name / FIGURE).exists():
            shutil.copyfile(folder.path / child.name / FIGURE, picture)
            pictures[child.name] = picture
    parts = list(_opening(children, settings))
    for child in children:
        parts += _section(child, has_picture=child.name in pictures)
        parts.append(f"    python -m {' '.join(settings.command(child.name))}")
    report = folder.write_text(REPORT, "\n\n".join(parts) + "\n")
    timing = folder.write_text(TIMING, "\n\n".join(_timing(folder, children, is_quick=settings.quick)) + "\n")
    return [report, timing, *pictures.values()]


def _opening(children: Sequence[Child], settings: PaperSettings) -> Iterator[str]:
    yield "# The papers' figures, and ours"
    quick = "the quick run of each experiment, which shows that it works and little more"
    yield (
        f"Seed {settings.seed}; the scale is {quick if settings.quick else 'the default'}. Papers: Learning@home "
        "(arXiv 2002.04013), Moshpit SGD (2103.03239). Their models are larger and ran on GPUs, so that shapes and "
        "ratios are what can be compared. The same seed gives the same report, but for figures marked *timing*, which "
        f"have two digits. Durations and the machine are in [{TIMING}]({TIMING})."
    )
    yield "How sure the papers' figures are:"
    yield markdown_table(("tag", "meaning"), [(f"[{tag}]", meaning) for tag, meaning in TAGS.items()])
    rows = []
    for name, outcome, headline, *_ in children:
        judged = [", ".join(headline.get(key, ())) or "none" for key in (MISSED_BARS, OPEN_BARS)]
        row = [f"[{name}](#{name})", EXPERIMENTS[name].figure, outcome]
        rows.append([*row, *(judged if outcome == "finished" else ("–", "–"))])
    yield markdown_table(("experiment", "figure", "outcome", "missed bars", "bars not decided"), rows)


def _section(child: Child, *, has_picture: bool) -> Iterator[str]:
    figure, claim, *_ = EXPERIMENTS[child.name]
    yield f"## {child.name}"
    kind = "Question" if claim.endswith("?") else "Claim"
    yield f"*{figure[0].upper()}{figure[1:]}.* {kind}: {claim}"
    if child.outcome != "finished":
        yield f"**{child.outcome.capitalize()}**" + (f": {child.failure}" if child.failure else ".")
    if has_picture:
        yield f"![{figure}]({child.name}.png)"
    if child.headline:
        yield from _comparison(child)
        yield from _bars(child)
        yield from _other_figures(child)


def _comparison(child: Child) -> Iterator[str]:
    """Ours beside the papers', and what was not measured."""
    rows, absent = [], []
    for quantity, key, paper, source, tag in PAPER_FIGURES.get(child.name, ()):
        ours = _ours(child.headline, key)
        theirs = format_value("not found" if tag == "NF" else paper)
        if ours is None:
            absent.append(f"- {quantity} (`{key}`)")
        else:
            rows.append((quantity, ours, theirs, f"{source} [{tag}]" if tag else ""))
    if rows:
        yield markdown_table(("quantity", "ours", "the paper's", "source and confidence of the paper's"), rows)
    if absent:
        yield f"<details><summary>Not measured in this run: {len(absent)} of these</summary>"
        yield "\n".join(absent)
        yield "</details>"


def _ours(headline: Mapping[str, Any], key: str) -> str | None:
    """The figure as text, with its interval or its least and greatest where the headline has them."""
    value = look_up(headline, key)
    if value is None:
        return None
    if is_timing(key):
        return f"{format_value(float(f'{value:.2g}') if isinstance(value, float) else value)} (timing)"
    ends = look_up(headline, f"{key}_interval") or (look_up(headline, f"{key}_min"), look_up(headline, f"{key}_max"))
    if isinstance(ends, list | tuple) and None not in ends:
        return f"{format_value(value)} ({' to '.join(map(format_value, ends))})"
    return format_value(value)


def _bars(child: Child) -> Iterator[str]:
    rows = [(f"`{bar['name']}`", _ours(child.headline, bar["name"]), bar["bar"], bar["verdict"]) for bar in child.bars]
    if rows:
        yield markdown_table(("bar", "ours", "must be", "verdict"), rows)
    if MISSED_BARS not in child.headline:
        yield "This experiment has no bars."
        return
    named = {bar["name"] for bar in child.bars}
    others = [missed for missed in child.headline[MISSED_BARS] if missed not in named]
    if others:
        yield "Missed: " + "; ".join(others) + "."
    elif not rows:
        yield "All bars were met."


def _other_figures(child: Child) -> Iterator[str]:
    shown = {figure.key.replace("/", ".") for figure in PAPER_FIGURES.get(child.name, ())}
    shown |= {f"{key}_{end}" for key in shown for end in ("interval", "min", "max")} | {MISSED_BARS, OPEN_BARS}
    figures = _figures(child.headline).items()
    rows = [(f"`{name}`", value) for name, value in figures if name not in shown and not is_timing(name)]
    if rows:
        yield "<details><summary>All other figures of the run</summary>"
        yield markdown_table(("figure", "value"), rows)
        yield "</details>"


def _figures(headline: Mapping[str, Any]) -> dict[str, Any]:
    """Figures that fit into a cell, by dotted name."""

    def fits(value: object) -> bool:
        return not (isinstance(value, list) and any(isinstance(item, list | Mapping) for item in value))

    return {name: value for name, value in flat(headline).items() if fits(value)}


def _timing(folder: RunFolder, children: Sequence[Child], *, is_quick: bool) -> Iterator[str]:
    """All that differs from run to run."""
    config = folder.config()
    yield "# How long the papers' figures took, and where"
    machine = [
        ("processor", f"{_processor()}, {usable_cores()} cores for this process"),
        ("system", config["platform"]["system"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in config["versions"].items())),
        ("commit", config["commit"] or "not a checkout"),
        ("started", config["started"]),
    ]
    yield markdown_table(("machine", ""), machine)
    rows: list[tuple[object, ...]] = []
    for child in children:
        allotted = EXPERIMENTS[child.name].quick_minutes if is_quick else None
        rows.append((child.name, child.outcome, child.wall_s / 60, allotted))
    total = sum(EXPERIMENTS[child.name].quick_minutes for child in children) if is_quick else None
    rows.append(("all", "", sum(child.wall_s for child in children) / 60, total))
    yield markdown_table(("experiment", "outcome", "minutes", "allotted on two idle cores"), rows)
    timings = [
        (child.name, f"`{name}`", value)
        for child in children
        for name, value in _figures(child.headline).items()
        if is_timing(name)
    ]
    if timings:
        yield markdown_table(("experiment", "timing", "value"), timings)


def _processor() -> str:
    """Return the name that the system gives its processor."""
    with suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()
