"""Mistakes in the flags of `dmoe up`: refused before a process is started, and not kept for the next time."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from rich.console import Console

from dmoe_jax.cli.lifecycle import Stop
from dmoe_jax.cli.sources import Given
from dmoe_jax.cli.train import TrainCommand
from dmoe_jax.cli.up import UpCommand
from dmoe_jax.runs.command_line import parse_command_line
from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.flags import words_of
from dmoe_jax.runs.processes import ProcessFailed
from dmoe_jax.runs.run_folder import RunFolder
from tests.dmoe_jax.training_rig import outcome, parsed


def begun(out: Path, *, trainers: int = 1) -> Path:
    """Folder of the run that `dmoe up` has left, with checkpoints that nobody reads; its up.json is returned."""
    up: UpCommand = parsed(UpCommand, out=out, data="embedded", steps=40, trainers=trainers)
    for index, folder in enumerate(up.folders()):
        words = ["--join", "a:1", "--out", str(folder), *up.flags_of_trainer(index)]
        RunFolder.create(folder, parse_command_line(TrainCommand, prog="train", args=words).settings())
        (folder / "checkpoints" / "40").mkdir(parents=True)
    logs = out.with_name(f"{out.name}.logs")
    logs.mkdir()
    (logs / "up.json").write_text(json.dumps(words_of(up, without=("--out",))))
    return logs / "up.json"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            "--router switch",
            "begun with --router 'product_key' and cannot be resumed with 'switch'; nothing was started",
        ),
        ("--num-layers 3", "begun with --num-layers 2 and cannot be resumed with 3; nothing was started"),
        ("--trainers 2", "--trainers must be 1 as before"),
    ],
)
def test_a_refused_flag_is_forgotten(flags: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on without it afterwards."""
    out = tmp_path / "run"
    kept = begun(out)
    before, files = kept.read_text(), sorted(tmp_path.rglob("*"))
    status, error = outcome(["up", "--resume", "--out", str(out), *flags.split()], capsys)
    assert (status, error.count("\n")) == (2, 1)
    assert line in error
    assert (kept.read_text(), sorted(tmp_path.rglob("*"))) == (before, files)
    words = ["--resume", "--out", str(out), "--steps", "80"]
    parse_command_line(UpCommand, prog="dmoe up", args=words).resumed(Given(typed=words)).check()


@pytest.mark.parametrize(("ended", "is_kept"), [(2, False), (1, True)])
async def test_flags_that_a_process_refuses_are_forgotten(
    ended: int, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a node does that has saved experts of another optimiser; not if it failed otherwise."""

    @asynccontextmanager
    async def open_refused(*args: Any, **flags: Any) -> AsyncIterator[None]:
        async with trio.open_nursery():
            assert "80" in json.loads(kept.read_text())
            raise ProcessFailed("node0 did not start", ended=ended)
        yield

    kept = begun(tmp_path / "run")
    before = kept.read_text()
    monkeypatch.setattr("dmoe_jax.cli.up.open_local_swarm", open_refused)
    up: UpCommand = parsed(UpCommand, out=tmp_path / "run", resume=True, data="embedded", steps=80)
    with trio.CancelScope() as scope, pytest.raises(ExceptionGroup):
        await up.train(Console(), Stop(scope, 1.0), cast(Any, None))
    assert (kept.read_text() != before) is is_kept


def test_every_trainers_folder_is_looked_at(tmp_path: Path) -> None:
    """A lone trainer cannot take the place of two, and two go on only from two checkpoints."""
    out = tmp_path / "run"
    begun(out, trainers=2)

    def resumed(*args: str) -> UpCommand:
        words = ["--resume", "--out", str(out), *args]
        return parse_command_line(UpCommand, prog="dmoe up", args=words).resumed(Given(typed=words))

    resumed().check()
    resumed("--trainers", "3").check()
    with pytest.raises(UsageError, match="--trainers must be at least 2 as before"):
        resumed("--trainers", "1")
    (tmp_path / "run.trainer1" / "checkpoints" / "40").rmdir()
    with pytest.raises(UsageError, match=r"no checkpoint in .*run\.trainer1 .*; nothing was started"):
        resumed().check()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--router", "nofile.py:r"], "--router nofile.py:r: there is no file"),
        (["--router", "mine.py"], "--router must be FILE.py:NAME, got 'mine.py'"),
        (["--router", "swich"], "unknown router 'swich' (did you mean switch?)"),
        (["--router", "switch+balance=a"], "expected a number behind the ="),
        (["--model", "nofile.py:m"], "--model nofile.py:m: there is no file"),
        (["--model", "mine.txt:m"], "--model must be FILE.py:NAME, got 'mine.txt:m'"),
        (["--expert", "nofile.py:e"], "--expert nofile.py:e: there is no file"),
        (["--optimizer", "nofile.py:o"], "--optimizer nofile.py:o: there is no file"),
        (["--trunk-optimizer", "nofile.py:o"], "--trunk-optimizer nofile.py:o: there is no file"),
        (["--train-flags=--optimizer nofile.py:o"], "--optimizer nofile.py:o: there is no file"),
        (["--train-flags=--k-bset 2"], "did you mean --k-best?"),
    ],
)
def test_nothing_starts_for_a_name_of_nothing(
    flags: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a folder left behind."""
    monkeypatch.chdir(tmp_path)
    status, error = outcome(["up", "--data", "embedded", "--out", "run", *flags], capsys)
    assert (status, error.count("\n")) == (2, 1)
    assert line in error
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_let_through(tmp_path: Path) -> None:
    """Files are only looked for: the processes run them."""
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit('run too early')")
    parsed(UpCommand, out=tmp_path / "run", data="embedded", router=f"{file}:r", trunk_optimizer=f"{file}:o").check()
    parsed(UpCommand, out=tmp_path / "run", data="embedded", router="peer+balance=0.1").check()
    own = {"experts": ("ffn.[0:4]",), "expert": f"{file}:e", "optimizer": f"{file}:o"}
    parsed(UpCommand, out=tmp_path / "run", model=f"{file}:m", **own).check()
