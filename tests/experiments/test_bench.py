"""The bench under all experiments: its flags, files, bars, and how it ends."""

import csv
import io
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from dmoe_jax.machine.disk import HOLDER
from dmoe_jax.runs.endings import UsageError
from experiments.bench import Experiment, ResumableSettings, Run, Settings, run_experiment
from experiments.results import Bar, Result, finals_of
from tests.dmoe_jax.test_disk import no_locks


@dataclass(frozen=True, kw_only=True)
class DiceSettings(ResumableSettings, Settings):
    """Throw dice."""

    throws: int = 3
    """Number of throws."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "throws")


DiceRun = Run[DiceSettings]


class DiceError(Exception):
    """Error that a run of the dice may raise."""


def throw(run: DiceRun) -> None:
    for number in range(run.settings.throws):
        run.log("throw", pips=run.settings.seed + number)


def summarise(run: DiceRun) -> Result | None:
    pips = [record["pips"] for record in run.records("throw")]
    if not pips:
        return None
    figures = {"mean": sum(pips) / len(pips), "mean_min": min(pips), "mean_max": max(pips), "nothing": float("nan")}
    return Result(title="Dice", figures=figures, bars=[Bar(name="mean", bound=3.5)])


DICE = Experiment(
    measure=throw,
    summarise=summarise,
    draw=lambda run, result: Figure(figsize=(2, 2)),
    figure_text="Pips of each throw",
)


def run_dice(*args: str, experiment: Experiment[DiceSettings] = DICE) -> dict[str, Any]:
    return run_experiment(DiceSettings, experiment, name="dice", uses_jax=False, args=list(args))


def end_of_dice(*args: str, experiment: Experiment[DiceSettings] = DICE) -> Any:
    """The exit status of a run that does not return."""
    with pytest.raises(SystemExit) as exit_:
        run_dice(*args, experiment=experiment)
    return exit_.value.code


def measuring(then: Callable[[], Any]) -> Experiment[DiceSettings]:
    """Throw as often as asked, then do something else."""

    def measure(run: DiceRun) -> None:
        throw(run)
        then()

    return replace(DICE, measure=measure)


def test_run_leaves_all_files_and_ends_with_one_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2, 3, 4 have the mean 3, and the bar lies between them; a figure that is not a number is null in JSON."""
    headline = run_dice("--out", str(tmp_path / "run"), "--seed", "2", "--json")
    printed = capsys.readouterr()
    expected: dict[str, Any] = {"mean": 3.0, "mean_min": 2, "mean_max": 4, "nothing": None, "missed_bars": []}
    expected["bars_not_decided"] = ["mean"]
    assert json.loads(printed.out) == headline == expected
    assert "3 (2 to 4)" in printed.err
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "figure.png",
        "report.md",
    }
    report = (tmp_path / "run" / "report.md").read_text()
    assert "| mean | 3 (2 to 4) |" in report
    assert "| mean | 3 | <= 3.5 | not decided |" in report
    assert "![Pips of each throw](figure.png)" in report


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--throw", "3"), "--throw"),
        (("--throws", "0"), "--throws must be at least 1, got 0"),
        (("--seed", "-1"), "--seed must be at least 0, got -1"),
        (("--resume",), "--resume needs --out"),
    ],
)
def test_wrong_flag_is_one_line(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The checks of all the settings' base classes count."""
    assert end_of_dice(*flags) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


def test_folder_that_is_in_use_is_refused_unless_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its records stay; with --resume they count."""
    out = ("--out", str(tmp_path / "run"), "--throws", "1")
    run_dice(*out, "--seed", "4")
    assert end_of_dice(*out) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert run_dice(*out, "--seed", "8", "--resume")["mean"] == 6.0


def test_resume_needs_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty folder is a mistake in --out, and stays empty."""
    assert end_of_dice("--resume", "--out", str(tmp_path)) == 2
    assert capsys.readouterr().err.startswith(f"dice: error: {tmp_path} is not a run that could be resumed")
    assert list(tmp_path.iterdir()) == []


@no_locks
def test_one_process_at_a_time_measures_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another one that would go on there is refused in one line, and has written nothing."""
    out = ("--out", str(tmp_path / "run"), "--throws", "1")

    def come_too() -> None:
        before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
        assert end_of_dice(*out, "--resume") == 75
        assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before

    run_dice(*out, experiment=measuring(come_too))
    assert f"run is under way: process {os.getpid()} on " in capsys.readouterr().err
    assert not (tmp_path / "run" / HOLDER).exists()


def test_runs_of_a_comparison_become_a_table(tmp_path: Path) -> None:
    """A header and a row for each run, as RFC 4180 has it; figures come by name, and what a run lacks is empty."""
    runs = {
        'a "b", c': {0: {"seed": 0, "loss": 0.1, "failures": {"late": 2}, "points": [1]}, 1: {"loss": float("nan")}},
        "d\ne": {0: {"label": "other", "accuracy": np.float32(0.5), "complete": True}},
    }
    experiment = replace(DICE, summarise=lambda run: Result(title="Dice", figures={"mean": 3.0}, runs=runs))
    run_dice("--out", str(tmp_path / "run"), experiment=experiment)
    data = (tmp_path / "run" / "results.csv").read_bytes().decode()
    assert data == (
        "label,seed,loss,failures.late,accuracy,complete\r\n"
        '"a ""b"", c",0,0.1,2,,\r\n'
        '"a ""b"", c",1,,,,\r\n'
        '"d\ne",0,,,0.5,True\r\n'
    )
    rows = list(csv.DictReader(io.StringIO(data, newline="")))
    assert [row["label"] for row in rows] == ['a "b", c', 'a "b", c', "d\ne"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")) == []


def test_runs_are_found_in_records() -> None:
    """By the fields that make a label and by the seed; a run that was repeated counts once."""
    records = [
        {"kind": "result", "method": "a", "peers": 4, "seed": 0, "loss": 1.0},
        {"kind": "result", "method": "a", "peers": 4, "seed": 1, "loss": 2.0},
        {"kind": "result", "method": "a", "peers": 4, "seed": 0, "loss": 3.0},
    ]
    found = finals_of(records, "method", "peers")
    assert {label: {seed: run["loss"] for seed, run in seeds.items()} for label, seeds in found.items()} == {
        "a, 4": {0: 3.0, 1: 2.0}
    }
    assert found["a, 4"][1] == records[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_leaves_a_report_of_what_there_is(
    tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status is Ctrl-C's and there is no JSON line; the handlers are as before."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    experiment = measuring(lambda: os.kill(os.getpid(), number))
    assert end_of_dice("--out", str(tmp_path / "run"), "--json", experiment=experiment) == 130
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.endswith("dice: interrupted; --resume goes on\n")
    report = (tmp_path / "run" / "report.md").read_text()
    assert "| mean | 1 (0 to 2) |" in report
    assert "| ended early | interrupted |" in report
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def raising(error: BaseException) -> Callable[[], None]:
    def throw_error() -> None:
        raise error

    return throw_error


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("expected", DiceError("a die fell down")),
        ("expected", ExceptionGroup("", [ExceptionGroup("", [DiceError("a die fell down")])])),
        ("causes", ExceptionGroup("", [KeyError("a consequence"), DiceError("a die fell down")])),
        ("expected", UsageError("a die fell down")),
    ],
)
def test_expected_error_is_one_line_beside_a_report(
    tmp_path: Path, kind: str, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also out of nurseries' groups; a cause explains what else came."""
    experiment = replace(measuring(raising(error)), **{kind: (DiceError,)})
    assert end_of_dice("--out", str(tmp_path / "run"), experiment=experiment) == getattr(error, "status", 1)
    assert capsys.readouterr().err == "dice: error: a die fell down\n"
    assert (tmp_path / "run" / "report.md").exists()


@pytest.mark.parametrize("error", [DiceError("not announced"), ExceptionGroup("", [DiceError(), KeyError("a bug")])])
def test_bug_is_raised_as_it_is(tmp_path: Path, error: Exception) -> None:
    """Nothing hides a bug, not even an expected error beside it; the handlers are as before."""
    before = signal.getsignal(signal.SIGTERM)
    expected = (DiceError,) if isinstance(error, ExceptionGroup) else ()
    with pytest.raises(type(error)) as raised:
        run_dice("--out", str(tmp_path / "run"), experiment=replace(measuring(raising(error)), expected=expected))
    assert raised.value is error
    assert signal.getsignal(signal.SIGTERM) == before


def test_bar_is_met_from_its_side() -> None:
    """Exactly the bar meets it, whichever side is the good one; what is not known does not."""
    most, least = Bar(name="p99", bound=20.0), Bar(name="rate", bound=0.5, comparison=">=")
    for bar, value, verdict in (
        (most, 20.0, "met"),
        (most, 20.1, "missed"),
        (least, 0.5, "met"),
        (least, 0.49, "missed"),
        (most, None, "missed"),
        (least, float("nan"), "missed"),
    ):
        assert bar.verdict(value) == verdict
    assert Result(title="", figures={}, bars=[most]).missed_bars == ["p99"]


@pytest.mark.parametrize("spread", [{"p99_interval": (18.0, 21.0)}, {"p99_min": 18.0, "p99_max": 21.0}])
def test_bar_that_an_interval_crosses_is_not_decided(spread: dict[str, Any]) -> None:
    """It is neither met nor missed; an interval that ends at the bar decides."""
    bar = Bar(name="p99", bound=20.0)
    result = Result(title="", figures={"p99": 19.0, **spread}, bars=[bar])
    assert result.headline["bars_not_decided"] == ["p99"]
    assert result.missed_bars == []
    assert [bar.verdict(19.0, (18.0, 20.0)), bar.verdict(21.0, (20.0, 22.0))] == ["met", "missed"]


@dataclass(frozen=True, kw_only=True)
class KeptSettings(ResumableSettings):
    """Throw a die, and go on with it."""

    throws: int = 3
    """Number of throws."""
    thrower: str = "hand"
    """Name of the thrower, or a Python file."""


def test_a_resumed_run_has_the_flags_that_it_was_begun_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that are given now come last. A Python file that only the folder names is not run."""
    seen: list[tuple[int, str]] = []
    kept = Experiment[KeptSettings](
        measure=lambda run: seen.append((run.settings.throws, run.settings.thrower)),
        summarise=lambda run: Result(title="Dice", figures={}),
    )

    def go(*flags: str) -> None:
        run_experiment(KeptSettings, kept, name="dice", uses_jax=False, args=["--out", str(tmp_path), *flags])

    go("--throws", "5", "--thrower", "my.py:arm")
    with pytest.raises(SystemExit):
        go("--resume")
    assert f"the run in {tmp_path} would run code out of {Path('my.py').absolute()}" in capsys.readouterr().err
    go("--resume", "--thrower", "my.py:arm")
    go("--resume", "--thrower", "my.py:arm", "--throws", "6")
    assert seen == [(5, "my.py:arm"), (5, "my.py:arm"), (6, "my.py:arm")]
