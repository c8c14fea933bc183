"""`dmoe runs`, `compare` and `clean`: what is shown of run folders, and what may be removed."""

import builtins
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from dmoe_jax.cli import main, run_list
from dmoe_jax.cli.leftovers import find_leftovers, remove
from dmoe_jax.cli.run_list import command_of, ending_of, list_runs, main_figure
from dmoe_jax.machine.disk import FolderInUse, hold_folder
from dmoe_jax.runs.run_folder import RunFolder
from tests.dmoe_jax.test_disk import HOLD, no_locks

Record = dict[str, Any]

STEPS: list[Record] = [{"kind": "train", "step": step, "loss": 6.0 - step} for step in (1, 2, 3)]
EVALUATION: Record = {"kind": "eval", "split": "valid", "loss": 5.0, "perplexity": 148.4}
COMPLETE: Record = {"kind": "headline", "complete": True, "validation_perplexity": 148.4, "failures": {"late": 2}}
INTERRUPTED: Record = {"kind": "event", "name": "interrupted", "detail": "at step 3"}
FAILED: Record = {"kind": "event", "name": "failed", "detail": "NaN; at step 3"}
ENDED_EARLY: Record = {"kind": "event", "name": "ended_early", "detail": "interrupted"}
RESUMED: Record = {"kind": "event", "name": "resumed", "detail": "with the same settings"}
TASK: Record = {"kind": "task", "name": "my.txt", "unit": "tokens"}


def make_run(path: Path, *records: Record, started: str = "2026-11-01T10:00:00+0000", **settings: Any) -> RunFolder:
    """A run folder as a command leaves it, begun at that time."""
    folder = RunFolder.create(path, {"steps": 3} | settings)
    config = folder.config() | {"started": started, "command": "dmoe train --join PEER"}
    folder.write_text("config.json", json.dumps(config))
    for record in records:
        folder.log(record["kind"], **{name: value for name, value in record.items() if name != "kind"})
    return folder


def touch(root: Path, *paths: str) -> None:
    """Empty files, with the folders in which they lie; a path that ends in a slash is an empty folder."""
    for path in (root / each for each in paths if not each.endswith("/")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for each in paths:
        if each.endswith("/"):
            (root / each).mkdir(parents=True, exist_ok=True)


def said(args: Iterable[str], capsys: pytest.CaptureFixture[str], *, status: int = 0) -> str:
    """Output of `dmoe ARGS`: its standard output, or its standard error if it fails."""
    with pytest.raises(SystemExit) as exit_:
        main([*args])
    printed = capsys.readouterr()
    assert int(exit_.value.code or 0) == status, printed
    return printed.out if status == 0 else printed.err


@no_locks
def test_runs_are_listed_by_their_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with its state, its last step and its main figure; runs of an experiment below it, nothing else."""
    make_run(tmp_path / "done", *STEPS, EVALUATION, COMPLETE, started="2026-11-03T10:00:00+0000")
    make_run(tmp_path / "stopped", *STEPS, INTERRUPTED, started="2026-11-01T10:00:00+0000")
    make_run(tmp_path / "broken", *STEPS, FAILED, started="2026-11-02T10:00:00+0100")
    make_run(tmp_path / "damaged").metrics_path.write_text("nonsense\n")
    experiment = make_run(tmp_path / "all", {"kind": "headline", "mean": 3.0}, started="2026-11-04T10:00:00+0000")
    make_run(experiment.path / "search" / "x2" / "seed1", TASK, started="2026-11-05T10:00:00+0000")
    make_run(experiment.path / "checkpoints" / "no")
    touch(tmp_path, "notes.txt", ".hidden/config.json", "other/config.json")
    (tmp_path / "other" / "config.json").write_text('{"d_model": 8}')
    (tmp_path / "link").symlink_to(tmp_path / "done")
    with hold_folder(tmp_path / "stopped", "run"):
        lines = said(["runs", str(tmp_path), "--json"], capsys).splitlines()
    runs = {run["name"]: run for run in map(json.loads, lines)}
    assert list(runs) == ["damaged", "stopped", "broken", "done", "all", "all/search/x2/seed1"]
    states = ["unreadable", "running", "failed", "complete", "complete", "interrupted"]
    assert [run["state"] for run in runs.values()] == states
    assert [run["steps"] for run in runs.values()] == [None, 3, 3, 3, None, None]
    assert (runs["done"]["figure"], runs["done"]["value"]) == ("perplexity", 148.4)
    assert (runs["stopped"]["figure"], runs["stopped"]["value"]) == ("loss", 3.0)
    assert (runs["all"]["figure"], runs["all"]["value"]) == ("", None)
    assert runs["done"]["size_bytes"] == sum(path.stat().st_size for path in (tmp_path / "done").iterdir())
    assert {run["command"] for run in runs.values()} == {"dmoe train"}
    table = said(["runs", str(tmp_path)], capsys)
    assert [line.split()[0] for line in table.splitlines()[2:]] == list(runs)
    assert "interrupted at step 3" in table
    assert "perplexity 148.4" in table


def test_what_vanishes_while_it_is_listed_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run beside which a checkpoint is renamed, and a run that is removed: each just as it is looked at."""
    make_run(tmp_path / "live", *STEPS)
    make_run(tmp_path / "removed", *STEPS)
    touch(tmp_path, "live/checkpoints/.unfinished-50.x/state/a", "live/checkpoints/40/state/b")
    scanned, begun = os.scandir, run_list._begun

    def scandir(path: Any) -> Any:
        if str(path).endswith(".unfinished-50.x"):
            shutil.rmtree(path)
        return scanned(path)

    def _begun(path: Path, config: Any) -> str:
        if path.name == "removed":
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return begun(path, config)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(run_list, "_begun", _begun)
    (live,) = list_runs(tmp_path)
    assert (live.name, live.steps) == ("live", 3)
    assert live.size_bytes == sum(file.stat().st_size for file in (tmp_path / "live").iterdir() if file.is_file())


def test_one_run_and_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run folder is listed itself; a folder without any run is no mistake, none at all is; the default is runs/."""
    make_run(tmp_path / "a[bold]", *STEPS)
    assert "a[bold]" in said(["runs", str(tmp_path / "a[bold]")], capsys)
    touch(tmp_path, "empty/")
    assert said(["runs", str(tmp_path / "empty")], capsys) == f"no run folder in {tmp_path / 'empty'}\n"
    monkeypatch.chdir(tmp_path / "a[bold]")
    for dots, name in ((".", "a[bold] "), ("..", "a[bold] "), ("../../" + tmp_path.name, "a[bold] ")):
        assert name in said(["runs", dots], capsys)
        assert said(["runs", "clean", dots], capsys).startswith("nothing to clean up in ")
    assert "got /" in said(["runs", "clean", "/"], capsys, status=2)
    monkeypatch.chdir(tmp_path)
    line = "dmoe: error: there is no folder runs; give the folder that has the run folders\n"
    assert said(["runs"], capsys, status=2) == said(["runs", "clean"], capsys, status=2) == line


@pytest.mark.parametrize(
    ("records", "ending"),
    [
        ([*STEPS], "interrupted"),
        ([*STEPS, COMPLETE], "complete"),
        ([*STEPS, INTERRUPTED, COMPLETE | {"complete": False}], "interrupted"),
        ([*STEPS, FAILED, COMPLETE | {"complete": False}], "failed"),
        ([*STEPS, FAILED, RESUMED, *STEPS, COMPLETE], "complete"),
        ([*STEPS, FAILED, RESUMED, *STEPS], "interrupted"),
        ([*STEPS, COMPLETE, RESUMED], "interrupted"),
        ([{"kind": "headline"}], "complete"),
        ([ENDED_EARLY, {"kind": "headline"}], "interrupted"),
        ([ENDED_EARLY | {"detail": "error: no port"}, {"kind": "headline"}], "failed"),
        ([ENDED_EARLY, {"kind": "headline"}, RESUMED, {"kind": "headline"}], "complete"),
    ],
)
def test_the_end_of_a_run_is_told_by_its_records(records: list[Record], ending: str) -> None:
    """The headline of an experiment does not say whether it is complete; that of a run that ended early does."""
    assert ending_of(records) == ending


def test_the_last_evaluation_stands_for_a_run() -> None:
    """The figure of the validation text, however it came; a run that went on has an older final one."""
    final = {"kind": "final_eval", "split": "valid", "loss": 5.2, "perplexity": 181.3}
    test = {"kind": "final_eval", "split": "test", "loss": 5.3, "perplexity": 200.3}
    assert main_figure([*STEPS, EVALUATION, final, test]) == ("perplexity", 181.3)
    assert main_figure([*STEPS, final, EVALUATION]) == ("perplexity", 148.4)
    assert main_figure([{"kind": "eval", "split": "valid", "loss": None}, *STEPS]) == ("loss", 3.0)
    assert main_figure([{"kind": "train", "step": 1, "loss": None}]) == ("", None)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("dmoe train --join PEER", "dmoe train"),
        ("python -m dmoe_jax.cli train --join PEER --seed 0", "dmoe train"),
        ("python -m experiments.compare_routers --quick", "compare_routers"),
        ("python -m experiments.transformer_xl.side_by_side", "transformer_xl"),
        ("python mine/loop.py --fast", "loop.py"),
        ("python -m 'half", "python"),
        ("", ""),
    ],
)
def test_commands_are_named(line: str, command: str, tmp_path: Path) -> None:
    """By what was typed; a trainer process of `dmoe up` by that, which its logs tell."""
    assert command_of(tmp_path / "run", {"command": line}) == command
    touch(tmp_path, "run.logs/up.json")
    up = "dmoe up" if command == "dmoe train" else command
    assert command_of(tmp_path / "run", {"command": line}) == up
    assert command_of(tmp_path / "run.trainer2", {"command": line}) == up


def test_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings that differ, nested ones too, and all final figures; a run without an end has what there is."""
    make_run(tmp_path / "a", *STEPS, EVALUATION, COMPLETE, expert={"d_model": 8}, router="switch", out="a")
    make_run(tmp_path / "b", *STEPS, INTERRUPTED, expert={"d_model": 16}, router="switch", out="b", extra=[1, 2])
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    found = json.loads(said(["runs", "compare", a, b, "--json"], capsys))
    assert found["runs"] == [a, b]
    assert found["settings"] == {"expert.d_model": [8, 16], "extra": [None, [1, 2]]}
    assert found["figures"] == {
        "state": ["complete", "interrupted at step 3"],
        "steps": [3, 3],
        "perplexity": [148.4, None],
        "loss": [None, 3.0],
        "validation_perplexity": [148.4, None],
        "failures.late": [2, None],
    }
    table = said(["runs", "compare", a, b], capsys)
    assert "settings that differ" in table
    assert [line.split() for line in table.splitlines() if "d_model" in line] == [["expert.d_model", "8", "16"]]
    assert "all settings are the same" in said(["runs", "compare", a, a], capsys)
    touch(tmp_path, "empty/")
    assert "empty is no run folder" in said(["runs", "compare", a, str(tmp_path / "empty")], capsys, status=2)


def measured(name: str, meaning: str, items: int) -> list[Record]:
    """Records of a run over a text, whose evaluation ends with a perplexity of 100."""
    final = {"kind": "final_eval", "split": "valid", "loss": 4.6, "perplexity": 100.0, "items": items}
    end = {"kind": "headline", "complete": True, "validation_perplexity": 100.0, "validation_bits_per_byte": 2.0}
    return [TASK | {"name": name, "meaning": meaning}, *STEPS, final, end]


WORDS, PIECES = "vocabulary: 33,278 words, 5c31", "vocabulary: 8,000 pieces, 97d8"
TWO: list[tuple[tuple[str, str, int], str]] = [
    (("my.txt", PIECES, 50), "my.txt, 8,000 pieces, 97d8, 50 pieces evaluated"),
    (("your.txt", WORDS, 50), "your.txt, 33,278 words, 5c31, 50 words evaluated"),
    (("my.txt", WORDS.replace("5c31", "0000"), 50), "my.txt, 33,278 words, 0000, 50 words evaluated"),
    (("my.txt", WORDS, 16_384), "my.txt, 33,278 words, 5c31, 16,384 words evaluated"),
    (("my.txt", WORDS, 50), ""),
]


@pytest.mark.parametrize(("other", "measure"), TWO)
def test_perplexities_that_do_not_compare_are_told_apart(
    other: tuple[str, str, int], measure: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By other texts, words, pieces, or so many of them; those that do compare have no letter."""
    make_run(tmp_path / "a", *measured("my.txt", WORDS, 50))
    make_run(tmp_path / "b", *measured(*other))
    words = ["runs", "compare", str(tmp_path / "a"), str(tmp_path / "b")]
    lines = said(words, capsys).splitlines()
    shown = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
    marked = ["100", "(a)", "100", "(b)"] if measure else ["100", "100"]
    assert shown["validation_perplexity"] == shown["perplexity"] == marked
    assert shown["validation_bits_per_byte"] == ["2", "2"]
    below = [line for line in lines if line.startswith("(")]
    own = "my.txt, 33,278 words, 5c31, 50 words evaluated"
    assert below == ([f"(a) over {own}", f"(b) over {measure}"] if measure else [])
    assert json.loads(said([*words, "--json"], capsys))["measures"] == [own, measure or own]


def test_whom_a_process_joined_is_no_setting_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A contact is as wide as a terminal, and decides nothing about a run's results."""
    contact = "12D3KooWKd4rVGb1qTWNdGu4rHpuXvQcGTZzW2A9yMJmPpEEkYvD@192.0.2.17:41234"
    for name in ("a", "b"):
        network = {"join": [f"{name}{contact}"], "network": {"swarm": name}, "listening": {"listen": name}}
        make_run(tmp_path / name, *STEPS, **network, router=name)
    found = json.loads(said(["runs", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"], capsys))
    assert found["settings"] == {"router": ["a", "b"]}


def zoo(root: Path) -> None:
    """Folders of every kind: those that `LEFTOVERS` names, and others that are to stay."""
    make_run(root / "complete", *STEPS, COMPLETE)
    make_run(root / "interrupted", *STEPS, INTERRUPTED)
    make_run(root / "measured", {"kind": "slice", "round": 0})
    make_run(root / "damaged").metrics_path.write_text("nonsense\n")
    make_run(root / "stepless", TASK, EVALUATION, FAILED, COMPLETE | {"complete": False})
    make_run(root / "with-notes", TASK)
    make_run(root / "only-records-lost")
    make_run(root / "up1", TASK)
    make_run(root / "up1.trainer1")
    make_run(root / "up2", TASK)
    make_run(root / "up3", *STEPS, INTERRUPTED)
    make_run(root / "comparison", {"kind": "routers"}, ENDED_EARLY, {"kind": "headline"})
    make_run(root / "comparison" / "search" / "x1", TASK)
    make_run(root / "half", {"kind": "corpus"})
    make_run(root / "half" / "trained" / "seed0", *STEPS)
    make_run(root / "half" / "begun" / "seed0")
    make_run(root / "whole", {"kind": "headline"})
    make_run(root / "whole" / "failed-seed0", FAILED)
    half_written = ("checkpoints/.unfinished-8.abc/state/", "checkpoints/.old-2/", ".room", ".report.123.md")
    for run in ("complete", "interrupted"):
        touch(root / run, *half_written, "checkpoints/4/state/", "checkpoints/set-aside-3/")
    touch(
        root,
        *(
            "stepless/checkpoints/0/",
            "stepless/.in-use",
            "stepless/report.md",
            "stepless/tensorboard/events.out.tfevents.1",
        ),
        *("with-notes/notes.md", "only-records-lost/checkpoints/200/state/"),
        *("up1.logs/up.json", "up1.logs/dht.log", "up1.logs/node0.log", "up1.nodes/node0/layer0.0.1/.in-use"),
        *("up1.nodes/node0/layer0.0.1/0/state/", "up2.nodes/shared/layer0.0.1/0/state/"),
        *("up2.logs/up.json", "up2.nodes/shared/layer0.0.1/40/state/"),
        *("up3.logs/up.json", "up3.nodes/node1/layer0.0.1/.unfinished-9.x/", "up3.nodes/node1/layer0.0.1/8/"),
        *("up4.logs/up.json", "up4.logs/dht.log", "up5.logs/up.json", "up5.logs/mine.log", "other.logs/web.log"),
        *("my.nodes/a/b/.old-1/", "train-20261101-100000/", "demo-20261101-100000-2/", "empty/", "killed/.in-use"),
        *("checkpoints/.unfinished-1.x/", "2025.01/", "2025.01/a.txt", ".git/train-20261101-100000/"),
    )
    # What users keep under names that look like ours.
    for run in ("copied", "pictured", "noted", "tracked"):
        make_run(root / run, TASK)
    touch(
        root,
        *("interrupted/checkpoints/100.keep/", "interrupted/checkpoints/100.best-model/", "interrupted/.notes.1.json"),
        *("copied/checkpoints/100.keep/state/x", "pictured/inspection/notes.md", "noted/checkpoints/notes.txt"),
        *("tracked/tensorboard/precious/x", "web.logs/node1.log", "data-20240101-120000-mine/"),
    )
    (root / "linked").symlink_to(root / "stepless")
    for name in ("train-20261101-100000", "demo-20261101-100000-2", "data-20240101-120000-mine"):
        os.utime(root / name, (1e9, 1e9))
    touch(root, "train-20261130-100000/")  # just made, perhaps by a command that is about to hold it


LEFTOVERS = {
    "comparison": "a run without a step",
    "demo-20261101-100000-2": "empty",
    "half/begun/seed0": "a run without a step",
    "interrupted/.report.123.md": "half written when its process was killed",
    "interrupted/.room": "half written when its process was killed",
    "interrupted/checkpoints/.old-2": "half written when its process was killed",
    "interrupted/checkpoints/.unfinished-8.abc": "half written when its process was killed",
    "killed": "empty",
    "stepless": "a run without a step",
    "train-20261101-100000": "empty",
    "up1": "a run without a step",
    "up1.logs": "of a start that came to nothing",
    "up1.nodes": "of a start that came to nothing",
    "up1.trainer1": "a run without a step",
    "up3.nodes/node1/layer0.0.1/.unfinished-9.x": "half written when its process was killed",
    "up4.logs": "of a start that came to nothing",
}


def files_in(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs that are complete, trained, measured or damaged stay whole; so does what is not ours, or has such in it."""
    zoo(tmp_path)
    assert {str(each.path.relative_to(tmp_path)): each.why for each in find_leftovers(tmp_path)} == LEFTOVERS
    before = files_in(tmp_path)
    printed = said(["runs", "clean", str(tmp_path), "--yes"], capsys).splitlines()
    assert printed[0].startswith(f"{tmp_path / 'comparison'}: a run without a step, ")
    assert printed[-1] == f"removed {len(LEFTOVERS)} of {len(LEFTOVERS)}"
    gone = {name for name in before if any(name == each or name.startswith(f"{each}/") for each in LEFTOVERS)}
    assert files_in(tmp_path) == before - gone
    assert said(["runs", "clean", str(tmp_path)], capsys) == f"nothing to clean up in {tmp_path}\n"


def test_one_run_is_cleaned_with_what_lies_beside_it(tmp_path: Path) -> None:
    """Its logs and its nodes' experts, and no other run."""
    zoo(tmp_path)
    for name in ("up1", "up2", "up3", "complete", "interrupted"):
        names = [str(each.path.relative_to(tmp_path)) for each in find_leftovers(tmp_path / name)]
        expected = [each for each in LEFTOVERS if each.split("/")[0] in (name, f"{name}.logs", f"{name}.nodes")]
        assert names == expected


@no_locks
def test_what_a_process_holds_is_left_alone(tmp_path: Path) -> None:
    """Be it the run itself, the logs of its `dmoe up`, an expert, or the experiment around it."""
    zoo(tmp_path)
    held = {
        "stepless": {"stepless"},
        "interrupted": {each for each in LEFTOVERS if each.startswith("interrupted")},
        "up1.logs": {"up1", "up1.logs", "up1.nodes", "up1.trainer1"},
        "up1.trainer1": {"up1", "up1.logs", "up1.nodes", "up1.trainer1"},
        "up1.nodes/node0/layer0.0.1": {"up1.nodes"},
        "up3.nodes/node1/layer0.0.1": {"up3.nodes/node1/layer0.0.1/.unfinished-9.x"},
        "half": {"half/begun/seed0"},
        "killed": {"killed"},
    }
    for folder, kept in held.items():
        with hold_folder(tmp_path / folder, "run"):
            found = {str(each.path.relative_to(tmp_path)) for each in find_leftovers(tmp_path)}
        assert LEFTOVERS.keys() - found == kept, folder


@no_locks
def test_another_process_that_holds_a_run_is_seen(tmp_path: Path) -> None:
    """Alive it counts; killed, its mark stays and the run is a leftover."""
    make_run(tmp_path / "run", TASK)
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            assert list_runs(tmp_path)[0].state == "running"
            assert find_leftovers(tmp_path) == []
        finally:
            process.kill()
    assert list_runs(tmp_path)[0].state == "interrupted"
    assert [each.path for each in find_leftovers(tmp_path)] == [tmp_path / "run"]


@no_locks
def test_what_was_taken_up_since_it_was_listed_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Held, it is named; trained meanwhile, it is no leftover any more."""
    folder = make_run(tmp_path / "run", TASK)
    (leftover,) = find_leftovers(tmp_path)
    with hold_folder(folder.path, "run"), pytest.raises(FolderInUse, match=f"process {os.getpid()}"):
        remove(leftover)
    folder.log("train", step=1)
    assert not remove(leftover)
    assert sorted(os.listdir(folder.path)) == ["config.json", "metrics.jsonl"]


def test_a_removal_that_is_interrupted_leaves_a_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its config nobody would know the folder for ours."""
    run = make_run(tmp_path / "run", TASK)
    touch(run.path, "checkpoints/0/state/", "tensorboard/events.out.tfevents.1")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            remove(find_leftovers(tmp_path)[0])
    (leftover,) = find_leftovers(tmp_path)
    assert leftover.path == run.path
    assert remove(leftover)
    assert os.listdir(tmp_path) == []


class Terminal:
    """Standard input with somebody at it."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "is_removed"), [("y", True), ("YES", True), ("", False), ("n", False), (None, False)]
)
def test_the_user_is_asked(
    answer: str | None, is_removed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Nothing goes without a yes; the end of the input is none."""

    def answered(question: str) -> str:
        assert question.startswith("Remove these 1, ")
        assert question.endswith("? [y/N] ")
        if answer is None:
            raise EOFError
        return answer

    make_run(tmp_path / "run", TASK)
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(builtins, "input", answered)
    printed = said(["runs", "clean", str(tmp_path)], capsys)
    assert printed.splitlines()[-1] == ("removed 1 of 1" if is_removed else "nothing was removed")
    assert (tmp_path / "run").exists() is not is_removed


def test_without_a_terminal_yes_is_needed(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that cleans up says so; Ctrl-C at the question is status 130."""
    make_run(tmp_path / "run", TASK)
    monkeypatch.setattr(sys, "stdin", None)
    assert "--yes" in said(["runs", "clean", str(tmp_path)], capsys, status=2)

    def interrupted(question: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(builtins, "input", interrupted)
    said(["runs", "clean", str(tmp_path)], capsys, status=130)
    assert (tmp_path / "run").exists()


def test_what_cannot_be_removed_is_named(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are removed all the same."""
    for name in ("a", "b"):
        make_run(tmp_path / name, TASK)

    def refuse(leftover: Any) -> bool:
        if leftover.path.name == "b":
            raise PermissionError(13, "Permission denied")
        return remove(leftover)

    monkeypatch.setattr("dmoe_jax.cli.runs.remove", refuse)
    printed = said(["runs", "clean", str(tmp_path), "--yes"], capsys, status=1)
    assert printed == f"dmoe: error: could not remove {tmp_path / 'b'} (Permission denied)\n"
    assert os.listdir(tmp_path) == ["b"]


STRANGE: dict[str, str] = {
    "deep config": "[" * 100_000,
    "deep record": '{"kind": "train", "step": ' + "[" * 100_000,
    "steps are text": '{"kind": "train", "step": "abc", "loss": 1}',
    "steps are a list": '{"kind": "train", "step": [1]}',
    "a figure of 400 digits": '{"kind": "eval", "perplexity": 1' + "0" * 400 + "}",
    "a kind that is a list": '{"kind": ["train"]}',
    "begun before all time": "0001-01-01T00:00:00+2359",
    "a terminal's orders": "\x1b]0;pwn\x07\x1b[31m",
}


@pytest.mark.parametrize("case", STRANGE)
def test_a_strange_folder_stops_no_list(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stranger's run among one's own: the others are listed, nothing of it is removed, and the terminal is safe."""
    make_run(tmp_path / "mine", *STEPS, COMPLETE)
    strange = make_run(tmp_path / ("strange\x1b[31m" if case.startswith("a terminal") else "strange"), *STEPS)
    config, metrics = strange.path / "config.json", strange.metrics_path
    if case == "deep config":
        config.write_text(STRANGE[case])
    elif case.startswith(("begun", "a terminal")):
        key = "started" if case.startswith("begun") else "command"
        config.write_text(json.dumps(json.loads(config.read_text()) | {key: STRANGE[case]}))
    else:
        metrics.write_text(metrics.read_text() + STRANGE[case] + "\n")
    before = files_in(tmp_path)
    printed = said(["runs", str(tmp_path)], capsys)
    assert "mine" in printed
    assert "\x1b" not in printed
    said(["runs", "clean", str(tmp_path), "--yes"], capsys)
    assert files_in(tmp_path) == before
