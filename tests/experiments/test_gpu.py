"""What waits for a GPU: which step comes next, with which flags, and real commands one after the other."""

import importlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dmoe_jax.runs.command_line import parse_command_line
from experiments.bench import UnseededSettings, run_experiment
from experiments.children import Ended, is_resumable
from experiments.gpu.__main__ import main
from experiments.gpu.measurement import gpu_experiment
from experiments.gpu.planning import Progress, flags_of, next_step, outcome_of, progress_of
from experiments.gpu.settings import GpuSettings
from experiments.gpu.steps import STEPS, Step

TIME = Step(name="time", experiment="transformer_xl", purpose="time it", about="", stops=True)
TRAIN = Step(name="train", experiment="transformer_xl", purpose="", about="", stops=True, timed_by="time")
COST = Step(name="cost", experiment="layer_cost", flags=("--loops", "2"), purpose="", about="")
THREE = (TIME, TRAIN, COST)


def progress(**states: Progress) -> dict[str, Progress]:
    return {step.name: Progress() for step in THREE} | states


def name_of_next(given_up: tuple[str, ...] = (), **states: Progress) -> str | None:
    step = next_step(THREE, progress(**states), given_up)
    return None if step is None else step.name


def test_next_step_is_the_first_that_is_not_finished() -> None:
    done = Progress(is_finished=True)
    assert name_of_next() == "time"
    assert name_of_next(time=done) == "train"
    assert name_of_next(time=done, train=done) == "cost"
    assert name_of_next(time=done, train=done, cost=done) is None


def test_training_waits_for_its_timing_and_failures_let_others_go_first() -> None:
    """Until all the others have failed as often."""
    failed = Progress(commands=1, strikes=1)
    assert name_of_next(time=failed) == "cost"
    assert name_of_next(time=failed, cost=failed) == "time"
    assert name_of_next(("time", "cost")) is None


def test_progress_sums_up_the_attempts_at_a_step() -> None:
    attempts = [
        {"step": "cost", "outcome": "cut", "wall_s": 60.0, "headline": None, "reason": "too long"},
        {"step": "time", "outcome": "finished", "wall_s": 6.0, "headline": {"a": 1}, "reason": ""},
        {"step": "cost", "outcome": "interrupted", "wall_s": 30.0},
    ]
    assert progress_of(COST, attempts) == Progress(commands=2, strikes=1, minutes=1.5)
    assert progress_of(TIME, attempts) == Progress(is_finished=True, commands=1, minutes=0.1, headline={"a": 1})


def timing(longest: int) -> dict[str, Any]:
    return {"timing": {"base": {"longest_eval_every": longest}}}


def test_pauses_are_as_often_as_the_timing_says_and_stay() -> None:
    """Four fifths of the longest stretch, at most the preset's 2,500 updates; a training goes on as it was begun."""
    flags = partial(flags_of, TRAIN, minutes=10, is_quick=False)
    assert flags(timing=timing(1000)) == ["--stop-after", "9", "--eval-every", "800"]
    assert flags(timing=timing(90_000)) == ["--stop-after", "9", "--eval-every", "2500"]
    assert flags(timing=timing(90_000), begun={"eval_every": 800}) == ["--stop-after", "9", "--eval-every", "800"]
    with pytest.raises(ValueError, match="train: not one update fits into a command of 10 minutes"):
        flags(timing=timing(1))


def test_other_steps_have_their_own_flags() -> None:
    assert flags_of(COST, minutes=5, is_quick=True) == ["--loops", "2", "--quick"]
    assert flags_of(TIME, minutes=5, is_quick=False) == ["--stop-after", "4"]


@pytest.mark.parametrize(
    ("fields", "made_progress", "outcome"),
    [
        ({}, False, "finished"),
        ({"headline": {"runs": 2, "runs_finished": 2}}, False, "finished"),
        ({"headline": {"runs": 2, "runs_finished": 1}}, False, "unfinished"),
        ({"status": 1, "last_line": "no space"}, True, "failed"),
        ({"status": 130}, True, "interrupted"),
        ({"status": 130, "was_cut": True}, True, "unfinished"),
        ({"status": 130, "was_cut": True}, False, "cut"),
    ],
)
def test_outcome_of_a_command(fields: dict[str, Any], made_progress: bool, outcome: str) -> None:
    ended = Ended(**{"status": 0, "headline": None, "last_line": "", "was_cut": False} | fields)
    assert outcome_of(ended, made_progress=made_progress)[0] == outcome


def test_steps_have_names_of_their_own_and_come_after_their_timings() -> None:
    names = [step.name for step in STEPS]
    assert len(set(names)) == len(names)
    for place, step in enumerate(STEPS):
        assert not step.timed_by or step.timed_by in names[:place]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_experiment_of_a_step_takes_its_flags(step: Step) -> None:
    """Read by the experiment's own settings, the last class of their module."""
    module = importlib.import_module(f"experiments.{step.experiment}.settings")
    own = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    settings_class = [each for each in own if issubclass(each, UnseededSettings)][-1]
    flags = flags_of(step, minutes=10, is_quick=True)
    settings = parse_command_line(settings_class, prog="step", args=[*flags, "--json", "--out", "run"])
    assert settings.quick
    assert is_resumable(step.experiment) or not step.stops


def test_list_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(args=["--list", "--out", str(tmp_path / "run")])
    printed = capsys.readouterr().out
    assert all(step.name in printed and step.purpose in printed for step in STEPS)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (("--only", "figure7"), 2, "--only has names out of time_base"),
        (("--minutes", "1"), 2, "--minutes must be at least 2, got 1"),
    ],
)
def test_wrong_flag_is_one_line(
    flags: tuple[str, ...], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=str(status)):
        main(args=list(flags))
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


def test_folder_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(SystemExit, match="1"):
        main(args=["--out", str(tmp_path), "--anyway"])
    assert str(tmp_path) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_machine_without_a_gpu_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX itself is asked."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(SystemExit, match="2"):
        main(args=["--out", str(tmp_path / "run")])
    assert "JAX finds no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


_TINY = ("--model", "small", "--where", "local", "--batch-size", "2", "--data", "embedded", "--quick")
REAL = (
    Step(name="time", experiment="transformer_xl", flags=(*_TINY, "--timing", "2"), purpose="", about="", stops=True),
    Step(name="wrong", experiment="transformer_xl", flags=("--steps", "0"), purpose="", about=""),
    Step(
        name="train",
        experiment="transformer_xl",
        flags=(*_TINY, "--steps", "8", "--eval-every", "2"),
        purpose="",
        about="",
        stops=True,
    ),
)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_real_steps_run_in_turn_and_only_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One command a call, or all; what fails does not stop them and makes the status 1."""
    run = partial(run_experiment, GpuSettings, gpu_experiment(REAL), name="gpu", uses_jax=False)
    flags = ["--anyway", "--out", str(tmp_path), "--json"]
    assert run(args=flags)["finished"] == ["time"]
    assert json.loads(capsys.readouterr().out)["figures"]["time"]["timing"]["small"]["updates_per_s"] > 0
    with pytest.raises(SystemExit, match="1"):
        run(args=[*flags, "--all"])
    printed = capsys.readouterr()
    headline = json.loads(printed.out.splitlines()[-1])
    assert headline["finished"] == ["time", "train"]
    assert headline["left"] == ["wrong"]
    assert "--steps must be at least 1, got 0" in printed.err.splitlines()[-1]
    assert headline["figures"]["train"]["runs_finished"] == 1
    assert (tmp_path / "train" / "figure.png").exists()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "attempt"] == ["time", "wrong", "train"]
