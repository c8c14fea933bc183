"""Experiment trackers: TensorBoard's own files read again, stand-ins for those that need a server, and bad ones."""

import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from dmoe_jax.metrics.trackers import MAX_WAITING, Tracker, TrackerName, tracking
from dmoe_jax.runs.run_folder import RunFolder, read_metrics

SETTINGS = {"steps": 3, "language.router": "product_key"}


def write_run(name: TrackerName | None, path: Path) -> RunFolder:
    """A run of two steps and what else a run writes down."""
    with tracking(name, project="swarm", settings=SETTINGS) as open_sink:
        folder = RunFolder.create(path, SETTINGS, open_sink=open_sink)
        folder.log("train", step=1, time_s=0.5, trainer=0, loss=2.5)
        folder.log("train", step=2, time_s=1.0, trainer=1, loss=float("nan"))
        folder.log("calls", step=2, time_s=1.0, ok=7, failures={"timeout": 2})
        folder.log("experts", step=2, load={"ffn.0": 3})
        folder.log("event", step=2, time_s=1.5, name="average_lost", detail="nobody was met")
    return folder


def events_of(folder: Path) -> Iterator[Event]:
    """The events in a folder's one file: records of length, checksum, data and checksum."""
    [file] = folder.iterdir()
    data = file.read_bytes()
    while data:
        length = int.from_bytes(data[:8], "little")
        body = data[12 : 12 + length]
        assert int.from_bytes(data[12 + length : 16 + length], "little") == masked_crc32c(body)
        event = Event()
        event.ParseFromString(body)
        yield event
        data = data[16 + length :]


def test_tensorboard_has_the_curves(tmp_path: Path) -> None:
    """Written by its own writer and read as its own events; what is no number is no point."""
    folder = write_run("tensorboard", tmp_path / "run")
    numbers, texts = {}, {}
    for event in events_of(folder.path / "tensorboard"):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                numbers[value.tag, event.step] = value.simple_value
            else:
                texts[value.tag.removesuffix("/text_summary"), event.step] = value.tensor.string_val[0].decode()
    assert numbers == {
        ("train/trainer", 1): 0.0,
        ("train/loss", 1): 2.5,
        ("train/trainer", 2): 1.0,
        ("calls/ok", 2): 7.0,
        ("calls/failures/timeout", 2): 2.0,
    }
    assert texts["event/detail", 2] == "nobody was met"
    assert "language.router: product_key" in texts["settings", 0]
    assert len(read_metrics(folder.metrics_path)) == 5


class FakeModule(ModuleType):
    """Stand-in for wandb and trackio, with the functions that both have; it notes each call."""

    def __init__(self, name: str, *, fails: tuple[str, ...] = ()) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, Any]] = []
        self.fails = fails

    def _note(self, name: str, value: Any) -> None:
        self.calls.append((name, value))
        if name in self.fails:
            raise ConnectionError(f"{name} on purpose")

    def init(self, **options: Any) -> None:
        self._note("init", options)

    def log(self, values: Mapping[str, Any]) -> None:
        self._note("log", dict(values))

    def finish(self) -> None:
        self._note("finish", threading.current_thread() is threading.main_thread())


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_with_a_server_get_every_record(
    name: TrackerName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened once, with the settings and the folder's name; closed by the thread that opened it."""
    module = FakeModule(name)
    monkeypatch.setitem(sys.modules, name, module)
    folder = write_run(name, tmp_path / "run")
    (opened, options), *logged, ended = module.calls
    expected: dict[str, Any] = {"project": "swarm", "name": "run", "config": SETTINGS}
    assert (opened, options) == ("init", expected | ({"dir": str(folder.path)} if name == "wandb" else {}))
    assert [values for _, values in logged] == [
        {"step": 1, "time_s": 0.5, "train/trainer": 0, "train/loss": 2.5},
        {"step": 2, "time_s": 1.0, "train/trainer": 1},
        {"step": 2, "time_s": 1.0, "calls/ok": 7, "calls/failures/timeout": 2},
        {"step": 2, "time_s": 1.5, "event/name": "average_lost", "event/detail": "nobody was met"},
    ]
    assert ended == ("finish", False)


@pytest.mark.parametrize(("fails", "count"), [(("init",), 5), (("log", "finish"), 5)])
def test_a_tracker_that_raises_ends_nothing(
    fails: tuple[str, ...],
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its first error is shown, and how many there were; the run folder has everything."""
    module = FakeModule("wandb", fails=fails)
    monkeypatch.setitem(sys.modules, "wandb", module)
    folder = write_run("wandb", tmp_path / "run")
    assert len(read_metrics(folder.metrics_path)) == 5
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"tracker wandb failed, training goes on: ConnectionError: {fails[0]} on purpose",
        f"tracker wandb failed {count} times, and dropped 0 records",
    ]


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to type."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with (
        pytest.raises(ValueError, match=r"tracker wandb needs the package wandb \(.*\): pip install wandb"),
        tracking("wandb", project="swarm", settings={}),
    ):
        pass


def test_a_tracker_that_hangs_is_left_to_itself(caplog: pytest.LogCaptureFixture) -> None:
    """Records wait up to a bound, and the end of the run for so long only."""
    hang = threading.Event()

    def never() -> Any:
        hang.wait()
        raise RuntimeError("let go")

    tracker = Tracker("slow", never)
    for step in range(MAX_WAITING + 5):
        tracker.log("train", {"step": step})
    assert tracker.dropped == 5
    tracker.close(0.01)
    assert "did not end within 0.01 s" in caplog.text
    hang.set()
    tracker.close()
    assert not tracker._thread.is_alive()
