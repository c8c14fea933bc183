"""`dmoe runs`, `dmoe runs compare` and `dmoe runs clean`: the run folders on this machine."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from dmoe_jax.cli.leftovers import find_leftovers, remove
from dmoe_jax.cli.run_list import OF_A_TEXT, ComparedRuns, ListedRun, compare_runs, list_runs, size_text
from dmoe_jax.machine.disk import FolderInUse
from dmoe_jax.runs.endings import CommandFailed, UsageError, mistakes_in_one_line
from dmoe_jax.runs.report import format_value
from dmoe_jax.runs.speech import say, shown

RunsFolder = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(name="folder", metavar="[FOLDER]")]
_DEFAULT = Path("runs")


@dataclass(frozen=True, kw_only=True)
class RunsCommand:
    """List the run folders in a folder, by the time at which they were begun, with state and main figure.

    The figure is the last evaluation's, or the last step's before there was one. The size includes what dmoe up has
    beside a run: its logs, and its nodes' experts.
    """

    root: RunsFolder = _DEFAULT
    """Folder with run folders, or a run folder."""
    json: bool = False
    """Print one JSON object a run instead of a table."""

    def run(self) -> int:
        with mistakes_in_one_line():
            runs = list_runs(_checked(self.root))
        if self.json:
            for run in runs:
                say(json.dumps(asdict(run)))
        elif not runs:
            say(f"no run folder in {self.root}")
        else:
            _print(_list_table(runs))
        return 0


@dataclass(frozen=True, kw_only=True)
class CompareRunsCommand:
    """Show several runs side by side: the settings that differ, and the final figures."""

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN RUN [RUN ...]")] = ()
    """Run folders."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def run(self) -> int:
        if len(self.runs) < 2:
            raise UsageError(f"expected two run folders or more to compare, got {len(self.runs)}")
        with mistakes_in_one_line():
            found = compare_runs([_checked(run) for run in self.runs])
        if self.json:
            say(json.dumps(asdict(found)))
            return 0
        if found.settings:
            _print(_side_by_side("settings that differ", found.runs, found.settings))
        else:
            say("all settings are the same")
        _print(_side_by_side("final figures", found.runs, found.figures, found))
        for mark, measure in dict(zip(found.marks, found.measures, strict=True)).items():
            if mark:
                say(shown(f"({mark}) over {measure or 'a text that the run does not name'}", one_line=True))
        if any(found.marks):
            say("Perplexities and losses with different letters do not compare; bits per byte do, over one text.")
        return 0


@dataclass(frozen=True, kw_only=True)
class CleanRunsCommand:
    """Remove what runs have left behind that came to nothing, after asking.

    These are run folders without a single step, empty ones, logs and experts of a dmoe up without either, and
    checkpoints of unfinished runs that were half written when their process was killed. Nothing is removed that is
    complete, that a process uses, or that holds anything else.
    """

    root: RunsFolder = _DEFAULT
    """Folder with run folders, or a run folder."""
    yes: bool = False
    """Remove without asking. Needed where there is no terminal to ask at."""

    def run(self) -> int:
        with mistakes_in_one_line():
            leftovers = find_leftovers(_checked(self.root))
        if not leftovers:
            say(f"nothing to clean up in {self.root}")
            return 0
        for each in leftovers:
            say(shown(f"{each.path}: {each.why}, {size_text(each.size_bytes)}", one_line=True))
        total = size_text(sum(each.size_bytes for each in leftovers))
        if not (self.yes or _is_wanted(f"Remove these {len(leftovers)}, {total}? [y/N] ")):
            say("nothing was removed")
            return 0
        removed, failed = 0, []
        for each in reversed(leftovers):
            try:
                removed += remove(each)
            except FolderInUse as error:  # taken up since it was listed
                say(shown(f"left alone: {error}", one_line=True))
            except OSError as error:
                failed.append(f"{each.path} ({error.strerror or error})")
        say(f"removed {removed} of {len(leftovers)}")
        if failed:
            raise CommandFailed(f"could not remove {', '.join(failed)}")
        return 0


def _checked(root: Path) -> Path:
    """The folder, by a path that ends in its name; raises ValueError if it is none, or has none."""
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}; give the folder that has the run folders")
    named = root if root.name not in ("", "..") else root.resolve()
    if not named.name:
        raise ValueError(f"expected the folder that has the run folders, got {root}")
    return named


def _is_wanted(question: str) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError("nobody can be asked, since standard input is no terminal: --yes removes these")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _list_table(runs: Sequence[ListedRun]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    table.add_column("run", overflow="fold")
    for name in ("command", "begun", "steps", "state", "figure", "size"):
        table.add_column(name, justify="right" if name in ("steps", "size") else "left", no_wrap=name != "state")
    for run in runs:
        begun = datetime.fromisoformat(run.begun).strftime("%Y-%m-%d %H:%M")
        figure = f"{run.figure} {format_value(run.value)}" if run.figure else ""
        steps = "" if run.steps is None else f"{run.steps:,}"
        words = (run.name, run.command, begun, steps, run.state_text, figure, size_text(run.size_bytes))
        table.add_row(*(shown(word, one_line=True) for word in words))
    return table


def _side_by_side(
    title: str, runs: Sequence[str], rows: Mapping[str, Sequence[Any]], found: ComparedRuns | None = None
) -> Table:
    """The rows as a table; the figures of `found` with the letters of what they are over."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    table.add_column("", overflow="fold")
    for run in runs:
        table.add_column(shown(run, one_line=True), overflow="fold")
    for name, values in rows.items():
        words = [*map(format_value, values)]
        if found is not None and OF_A_TEXT.search(name):
            known = zip(words, values, found.marks, strict=True)
            words = [f"{word} ({mark})" if mark and value is not None else word for word, value, mark in known]
        table.add_row(*(shown(word, one_line=True) for word in (name, *words)))
    return table


def _print(table: Table) -> None:
    """Print a table; where nobody sees it at once, without a width that would cut it."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200
    console.print(table)
