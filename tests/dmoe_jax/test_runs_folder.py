"""Run folders: never mixed up, never half-written."""

import json
import math
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from dmoe_jax.runs.run_folder import RunFolder, append_metric, plain, read_metrics, replaced_file


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    router: object = math.sqrt


@dataclass(frozen=True)
class Settings:
    steps: int = 10
    grid: tuple[int, ...] = (4, 4)
    out: Path | None = Path("here")
    inner: Inner = field(default_factory=Inner)


def test_config_says_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings as JSON, the versions of what computes, the machine, the command and the time."""
    monkeypatch.setattr("sys.orig_argv", ["/usr/bin/python", "-m", "pytest", "a test"])
    folder = RunFolder.create(tmp_path / "a" / "b", Settings())
    config = json.loads((tmp_path / "a" / "b" / "config.json").read_text())
    assert config == folder.config()
    inner = {"rate": 0.5, "router": "sqrt"}
    assert config["settings"] == {"steps": 10, "grid": [4, 4], "out": "here", "inner": inner}
    assert {"python", "jax", "flax", "optax"} <= config["versions"].keys()
    assert {"system", "machine", "cpu_count"} <= config["platform"].keys()
    assert config["command"] == "python -m pytest 'a test'"
    assert config["started"]


def test_folder_without_a_path_is_named_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that start in the same second get two folders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda pattern: "20250102-030405")
    paths = [RunFolder.create(None, {}, name="demo").path for _ in range(3)]
    assert [str(path) for path in paths] == [f"runs/demo-20250102-030405{end}" for end in ("", "-2", "-3")]


def test_folders_are_not_mixed(tmp_path: Path) -> None:
    """A folder that is not empty and a file are refused by name; an empty folder is fine."""
    RunFolder.create(tmp_path / "run", {})
    with pytest.raises(ValueError, match=r"run is not empty; expected a new or empty folder"):
        RunFolder.create(tmp_path / "run", {})
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file"):
        RunFolder.create(tmp_path / "file", {}, resume=True)
    (tmp_path / "empty").mkdir()
    RunFolder.create(tmp_path / "empty", {})


def test_resume_keeps_the_metrics_and_notes_what_changed(tmp_path: Path) -> None:
    """A line that a killed writer left unfinished is cut off, so that the next one does not continue it."""
    folder = RunFolder.create(tmp_path, Settings())
    folder.log("train", step=1)
    with folder.metrics_path.open("a") as file:
        file.write('{"kind":"train","st')
    assert folder.metrics() == [{"kind": "train", "step": 1}]
    again = RunFolder.create(tmp_path, Settings(steps=20), resume=True)
    again.log("train", step=2)
    train, event, last = again.metrics()
    assert (train["step"], last["step"]) == (1, 2)
    assert event == {"kind": "event", "name": "resumed", "detail": "steps: 10 -> 20"}
    assert again.config()["settings"]["steps"] == 20
    RunFolder.create(tmp_path, Settings(steps=20), resume=True)
    assert again.metrics()[-1]["detail"] == "with the same settings"


def test_metrics_are_one_json_object_a_line(tmp_path: Path) -> None:
    """Numbers that JSON lacks are null, NumPy's are plain numbers, and line feeds stay inside their line."""
    path = tmp_path / "metrics.jsonl"
    append_metric(path, kind="eval", perplexity=math.nan, best=np.float32(1.5), load={"a.0": np.int64(3)})
    append_metric(path, kind="event", name="two\nlines", parts=(1, -math.inf))
    assert path.read_text().count("\n") == 2
    assert read_metrics(path) == [
        {"kind": "eval", "perplexity": None, "best": 1.5, "load": {"a.0": 3}},
        {"kind": "event", "name": "two\nlines", "parts": [1, None]},
    ]


def test_every_cut_of_the_file_can_be_read(tmp_path: Path) -> None:
    """Wherever a kill cuts the file, the lines before it are there."""
    path = tmp_path / "metrics.jsonl"
    for step in range(3):
        append_metric(path, kind="train", step=step)
    data = path.read_bytes()
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        assert [record["step"] for record in read_metrics(path)] == list(range(data[:size].count(b"\n")))


def test_damage_inside_the_file_is_named(tmp_path: Path) -> None:
    """A whole line that is no record is an error with its number, not a silent gap."""
    path = tmp_path / "metrics.jsonl"
    for bad in ("nonsense", "[1]", '{"step": 1}'):
        path.write_text('{"kind":"train"}\n' + bad + '\n{"kind":"train"}\n')
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: expected a JSON object"):
            read_metrics(path)


def test_several_writers_do_not_tear_lines(tmp_path: Path) -> None:
    """Four writers at once: every line is whole, none is lost, and each writer's are in order."""
    path = tmp_path / "metrics.jsonl"

    def write(writer: int) -> None:
        for number in range(50):
            append_metric(path, kind="train", writer=writer, number=number, padding="x" * 500)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = read_metrics(path)
    for writer in range(4):
        assert [record["number"] for record in records if record["writer"] == writer] == list(range(50))


def test_files_are_replaced_at_once(tmp_path: Path) -> None:
    """If writing fails the old content stays and nothing is left behind."""
    folder = RunFolder.create(tmp_path, {})
    assert folder.write_text("report.md", "old") == tmp_path / "report.md"

    def fail() -> None:
        with replaced_file(tmp_path / "report.md") as temporary:
            temporary.write_text("half")
            assert (tmp_path / "report.md").read_text() == "old"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (tmp_path / "report.md").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "report.md"]


def test_plain_values() -> None:
    """Each kind of value that settings hold, by hand."""
    assert plain({1: (1, 2.5), "s": {"b", "a"}, "n": None, "t": True}) == {
        "1": [1, 2.5],
        "s": ["a", "b"],
        "n": None,
        "t": True,
    }
    assert plain(np.arange(3)) == [0, 1, 2]
    assert plain(np.array(np.inf)) is None
    assert plain(np.bool_(True)) is True
    assert plain(Path("a/b")) == "a/b"
    assert plain(Settings) == "Settings"
