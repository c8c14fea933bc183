"""The report of the papers' figures: what it says of children that finish, fail and are interrupted."""

import json
import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dmoe_jax.runs.run_folder import RunFolder
from experiments import bench
from experiments.bench import ResumableSettings, run_experiment
from experiments.paper.figures_of_papers import PAPER_FIGURES, TAGS, look_up
from experiments.paper.report import Child, write_paper_report
from experiments.paper.settings import EXPERIMENTS, PaperSettings
from experiments.results import MISSED_BARS


def child(name: str, headline: Mapping[str, Any], **fields: Any) -> Child:
    return Child(name, "finished", headline, bars=(), failure="", wall_s=60.0)._replace(**fields)


def write(path: Path, *children: Child) -> tuple[str, str]:
    """report.md and timing.md."""
    settings = PaperSettings(quick=True)
    report, timing, *_ = write_paper_report(RunFolder.create(path, settings, resume=True), children, settings)
    return report.read_text(), timing.read_text()


def test_look_up_finds_entries_of_maps_and_of_lists() -> None:
    """An item of a list is the first that has the values; what is not there is None."""
    headline = {
        "a": {"b": 3},
        "table": [{"n": 1, "p": 0.0, "x": 4}, {"n": 1, "p": 0.5, "x": 5}, {"n": 1, "p": 0.5, "x": 6}],
    }
    assert look_up(headline, "a/b") == 3
    assert look_up(headline, "table/n=1,p=0.5/x") == 5
    assert look_up(headline, "a/c") is None
    assert look_up(headline, "table/n=2/x") is None
    assert look_up(headline, "a/b/c") is None


def test_every_paper_figure_belongs_to_an_experiment_and_says_how_sure_it_is() -> None:
    """A value has a source and a tag that is explained; keys of an experiment are different ones."""
    assert PAPER_FIGURES.keys() == EXPERIMENTS.keys()
    for figures in PAPER_FIGURES.values():
        assert len({figure.key for figure in figures}) == len(figures)
        for figure in figures:
            assert figure.tag in TAGS or (figure.tag == "" and figure.paper is None)
            assert bool(figure.source) == bool(figure.tag)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_that_resume_are_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are begun anew, and would not know the flag."""
    begun: list[type] = []
    monkeypatch.setattr(bench, "run_experiment", begun.append)
    runpy.run_module(f"experiments.{name}", run_name="__main__")
    assert EXPERIMENTS[name].resumes == issubclass(begun[0], ResumableSettings)


def test_ours_stands_beside_the_papers_with_its_interval(tmp_path: Path) -> None:
    """Figures that were not measured are named; figures that no paper has follow."""
    models = {
        "dmoe": {"validation_perplexity": 290.04, "validation_perplexity_interval": [280.0, 300.5], "steps": 8000}
    }
    report, _ = write(tmp_path / "run", child("transformer_xl", {"models": models, MISSED_BARS: []}))
    assert re.search(
        r"\| final validation perplexity, dmoe \| 290 \(280 to 300.5\) \| not found \| .*\[NF\] \|", report
    )
    assert "- final validation perplexity, small (`models/small/validation_perplexity`)" in report
    assert "| `models.dmoe.steps` | 8,000 |" in report
    assert "All bars were met." in report
    assert "    python -m experiments.transformer_xl --quick\n" in report


def test_report_repeats_where_only_durations_differ(tmp_path: Path) -> None:
    """A timing has two digits in the report and all of them in timing.md, which has durations and the machine."""
    bars = ({"name": "emulator_speedup", "bar": ">= 15", "verdict": "met"},)
    first, second = (
        child("emulation", {"emulator_speedup": speedup, "wall_s": wall_s, MISSED_BARS: []}, bars=bars, wall_s=wall_s)
        for speedup, wall_s in ((16.24, 90.0), (15.82, 93.5))
    )
    reports, timings = zip(write(tmp_path / "a", first), write(tmp_path / "b", second), strict=True)
    assert reports[0] == reports[1]
    assert "| `emulator_speedup` | 16 (timing) | >= 15 | met |" in reports[0]
    assert "16.24" in timings[0]
    assert "15.82" in timings[1]
    assert "wall_s" not in reports[0]


def test_failed_and_interrupted_children_are_shown_as_such(tmp_path: Path) -> None:
    """With the reason; a picture of an earlier run goes."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "staleness.png").write_bytes(b"old")
    failed = child("staleness", {}, outcome="failed", failure="the disk is full")
    report, _ = write(tmp_path / "run", failed, child("emulation", {}, outcome="interrupted"))
    assert "**Failed**: the disk is full" in report
    assert "**Interrupted**." in report
    assert "staleness.png" not in report
    assert not (tmp_path / "run" / "staleness.png").exists()


@pytest.mark.slow
def test_report_over_real_experiments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that works and one that does not exist: the first is in the report, and a resumed run leaves it as it is."""
    missing = "no_such_experiment"
    monkeypatch.setitem(EXPERIMENTS, missing, EXPERIMENTS["emulation"])  # type: ignore[index]
    out, copy = tmp_path / "run", tmp_path / "copy"
    flags = ["--quick", "--only", "moshpit_averaging", missing, "--out", str(out), "--copy-to", str(copy), "--json"]
    with pytest.raises(SystemExit, match="1"):
        run_experiment(PaperSettings, uses_jax=False, args=flags)
    printed = capsys.readouterr()
    assert printed.err.endswith(f"1 of 2 experiments did not finish: {missing}\n")
    headline = json.loads(printed.out.splitlines()[-1])
    assert headline["finished"] == ["moshpit_averaging"]
    report = (out / "report.md").read_text()
    assert re.search(r"\| Moshpit, 1024 peers on 32\^2, p = 0: rounds to 1e-9 \| 2 \| 2 \|", report)
    assert f"No module named experiments.{missing}" in report
    assert (out / "moshpit_averaging.png").exists()
    assert not copy.exists()
    with pytest.raises(SystemExit, match="2"):
        run_experiment(
            PaperSettings, uses_jax=False, args=[*flags, "--resume", "--seed", "1"]
        )  # another seed is another report
    assert "was begun with seed 0" in capsys.readouterr().err
    again = run_experiment(
        PaperSettings,
        uses_jax=False,
        args=["--quick", "--only", "moshpit_averaging", "--out", str(out), "--resume", "--copy-to", str(copy)],
    )
    assert "finished before" in capsys.readouterr().out
    assert again["finished"] == ["moshpit_averaging"]
    assert {path.name for path in copy.iterdir()} == {"report.md", "timing.md", "moshpit_averaging.png"}
