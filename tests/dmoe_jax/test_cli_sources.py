"""Flags out of the environment and files: who is stronger, what is refused, and what runs no code."""

import json
from pathlib import Path
from typing import Any

import pytest

from dmoe_jax.cli.sources import Given, gather
from dmoe_jax.cli.train import TrainCommand
from dmoe_jax.cli.up import UpCommand
from dmoe_jax.runs.command_line import parse_command_line
from dmoe_jax.runs.run_folder import plain
from tests.dmoe_jax.training_rig import outcome, parsed

JOIN = ["--join", "127.0.0.1:1"]


def train(given: Given) -> TrainCommand:
    command: TrainCommand = parse_command_line(TrainCommand, prog="dmoe train", args=given.words)
    return command


def refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    status, error = outcome(args, capsys)
    assert status == 2
    return error


def test_what_is_typed_goes_before_the_environment_and_that_before_a_file(tmp_path: Path) -> None:
    """A file's tables are of no account. DMOE_DATA is a folder and no flag."""
    file = tmp_path / "run.toml"
    file.write_text(
        'steps = 7\nk_best = 2\naverage_by_samples = false\n[model]\ngrid_size = [2, 2]\nrouter = "switch"\nseed = 4\n'
    )
    environ = {"DMOE_STEPS": "9", "DMOE_K_BEST": "3", "DMOE_GRID_SIZE": "2 3", "DMOE_DATA": "/data", "DMOE_SEED": ""}
    typed = [*JOIN, "--config", str(file), "--k_best=1", "--router", "hash"]
    command = train(gather(TrainCommand, typed, environ, name="train"))
    assert (command.calls.k_best, command.language.router) == (1, "hash")
    assert (command.run_length.steps, command.language.grid_size) == (9, (2, 3))
    assert (command.averaging.average_by_samples, command.data.seed, command.data.data) == (False, 4, "auto")
    by_variable = gather(TrainCommand, JOIN, {"DMOE_CONFIG": str(file)}, name="train")
    assert train(by_variable).run_length.steps == 7


def test_a_switch_has_a_word_for_an_answer() -> None:
    """A word answers yes or no; an answer that is the default adds no flag."""
    for answer, saves in (("no", False), ("0", False), ("True", True)):
        given = gather(UpCommand, [], {"DMOE_SAVE_EXPERTS": answer}, name="up")
        command: UpCommand = parse_command_line(UpCommand, prog="dmoe up", args=given.words)
        assert command.swarm.save_experts is saves


def test_a_runs_own_config_is_such_a_file(tmp_path: Path) -> None:
    """All that was not as by default, but for whom the run joined; infinity, which JSON lacks, too."""
    options = parsed(
        TrainCommand, join=("far:1",), d_model=64, grid_size=(2, 3), grad_clip="inf", json=True, route="token"
    )
    (tmp_path / "config.json").write_text(json.dumps({"settings": plain(options.settings())}))
    given = gather(TrainCommand, [*JOIN, "--config", str(tmp_path / "config.json")], {}, name="train")
    command = train(given)
    assert (command.join, command.report.json) == (("127.0.0.1:1",), False)
    assert (command.language, command.optimizer) == (options.language, options.optimizer)
    command.check()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("stepz = 3", "run.toml: dmoe train has no setting stepz; did you mean steps?"),
        ("steps = true", "run.toml: steps must have a value, got True"),
        ("steps = [1, 2]", "run.toml: steps must be one value, got [1, 2]"),
        ('steps = "x"', "run.toml: steps: Error parsing --steps"),
        ("json = 3", "run.toml: json must be true or false, got 3"),
        ("k_min = 9", "run.toml: k_min: --k-min must not exceed --k-best, got 9 and 4"),
        ("steps =", "run.toml is no file of flags: Invalid value"),
        (None, "cannot read run.toml: No such file or directory"),
    ],
)
def test_a_file_that_will_not_do_gets_one_line(
    text: str | None, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the file and the key."""
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("run.toml").write_text(text)
    error = refused(["train", *JOIN, "--config", "run.toml"], capsys)
    assert line in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("variable", "value", "line"),
    [
        ("DMOE_STEPS", "many", "DMOE_STEPS: Error parsing --steps"),
        ("DMOE_K_MIN", "9", "DMOE_K_MIN: --k-min must not exceed --k-best"),
        ("DMOE_JSON", "maybe", "DMOE_JSON must be true or false, got 'maybe'"),
    ],
)
def test_a_variable_that_will_not_do_gets_one_line(
    variable: str, value: str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert line in refused(["train", *JOIN], capsys)


def test_a_file_runs_no_code_by_itself(tmp_path: Path) -> None:
    """Code that a file names runs only if the user names it too, where variables count as well, or trusts the file."""
    file = tmp_path / "run.toml"
    file.write_text('model = "mine.py:model"')

    def given(*more: str, **environ: str) -> Any:
        return gather(TrainCommand, [*JOIN, "--config", str(file), *more], environ, name="train")

    with pytest.raises(ValueError, match=r"out of .*mine\.py, .*name mine\.py:model again, or give --trust-run"):
        given().check_code(is_trusted=False, can_trust=True)
    with pytest.raises(ValueError, match=r"name mine\.py:model again$"):
        given().check_code(is_trusted=False, can_trust=False)
    given().check_code(is_trusted=True, can_trust=True)
    given("--model", "mine.py:model").check_code(is_trusted=False, can_trust=True)
    given(DMOE_MODEL="other.py:model").check_code(is_trusted=False, can_trust=True)
