"""A run's trace, in virtual time; and experiment trackers: TensorBoard's files, stand-ins for servers, and bad ones."""

import itertools
import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

import dmoe_net
from dmoe_jax.machine.device import CostModel, InlineDevice
from dmoe_jax.metrics.trace import MAX_EVENTS, Trace
from dmoe_jax.metrics.trackers import MAX_WAITING, Tracker, TrackerName, tracking
from dmoe_jax.mixture.statistics import CallRecord
from dmoe_jax.models.mlp import MLP, Batch, MLPConfig
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.runs.run_folder import RunFolder, read_metrics
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.trainer import StepSpan
from dmoe_net.identity import Address, Contact, PeerId

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
        self.init = lambda **options: self.note("init", options)
        self.log = lambda values: self.note("log", dict(values))
        self.finish = lambda: self.note("finish", threading.current_thread() is threading.main_thread())

    def note(self, name: str, value: Any) -> None:
        self.calls.append((name, value))
        if name in self.fails:
            raise ConnectionError(f"{name} on purpose")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_with_a_server_get_every_record(name: TrackerName, tmp_path: Path, monkeypatch: Any) -> None:
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


@pytest.mark.parametrize("fails", [("init",), ("log", "finish")])
def test_a_tracker_that_raises_ends_nothing(fails: Any, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """Its first error is shown, and how many there were; the run folder has everything."""
    monkeypatch.setitem(sys.modules, "wandb", FakeModule("wandb", fails=fails))
    folder = write_run("wandb", tmp_path / "run")
    assert len(read_metrics(folder.metrics_path)) == 5
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"tracker wandb failed, training goes on: ConnectionError: {fails[0]} on purpose",
        "tracker wandb failed 5 times, and dropped 0 records",
    ]


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
    caplog.clear()
    hang.set()
    tracker.close()
    assert "did not end" not in caplog.text


FIRST, SECOND = (Contact(PeerId(bytes([index]) * 32), Address(f"10.0.0.{index}", 1)) for index in (1, 2))


def call(contact: Contact, began: float, ended: float, outcome: str = "ok") -> CallRecord:
    return CallRecord("expert.forward", "ffn.0.1", contact, 4, outcome, began, ended)


def written(trace: Trace, folder: Path) -> dict[str, Any]:
    """The trace as a viewer reads it from a file."""
    trace.write(folder / "new" / "trace.json")
    found: dict[str, Any] = json.loads((folder / "new" / "trace.json").read_text())
    return found


def happened(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_hosts_have_tracks_and_calls_at_once_have_lanes(tmp_path: Path) -> None:
    """The second call to the first host overlaps the first, and has a new lane; the third begins as the first ends."""
    trace = Trace(100.0)
    for began, ended in ((101.0, 101.5), (101.25, 102.0), (101.5, 103.0)):
        trace.add(call(FIRST, began, ended))
    trace.add(call(SECOND, 101.25, 101.75, "timeout"))
    trace.add(StepSpan(trainer=1, began=100.5, ended=103.25, outcome="ok"))
    found = written(trace, tmp_path)
    names = {event["pid"]: event["args"]["name"] for event in found["traceEvents"] if event["ph"] == "M"}
    assert list(names.values()) == ["trainers", "01010101 at 10.0.0.1:1", "02020202 at 10.0.0.2:1"]
    rows = [(names[each["pid"]][:8], each["tid"], each["ts"], each["dur"], each["cat"]) for each in happened(found)]
    assert rows == [
        ("trainers", 1, 0.5e6, 2.75e6, "ok"),
        ("01010101", 0, 1.0e6, 0.5e6, "ok"),
        ("02020202", 0, 1.25e6, 0.5e6, "failed"),
        ("01010101", 1, 1.25e6, 0.75e6, "ok"),
        ("01010101", 0, 1.5e6, 1.5e6, "ok"),
    ]
    details = {"uid": "ffn.0.1", "kind": "forward", "rows": 4, "outcome": "timeout"}
    assert [each["args"] for each in happened(found) if each["cat"] == "failed"] == [details]
    assert found["otherData"] == {"events_kept": 5, "events_dropped": 0}


def test_the_latest_events_are_kept() -> None:
    trace = Trace(0.0)
    for index in range(MAX_EVENTS + 2):
        trace.add(call(FIRST, float(index), index + 0.5))
    assert trace.dropped == 2
    began = [event["ts"] for event in itertools.islice(trace.events(), 4) if event["ph"] == "X"]
    assert began == [2e6, 3e6]


async def simulated() -> tuple[Trace, int]:
    """A node whose batches take half a second, and a trainer that makes three steps; the trace, and answered calls."""
    config = MLPConfig(input_dim=4, num_classes=2, d_model=4, num_layers=1, grid_size=(2,), k_best=2)
    rng = np.random.default_rng(0)
    x, labels = jnp.asarray(rng.normal(size=(6, 4)), jnp.float32), jnp.asarray(rng.integers(0, 2, 6), jnp.int32)
    device = InlineDevice(CostModel(call_s=0.5))
    async with (
        dmoe_net.simulate(latency=dmoe_net.Constant(0.05)) as network,
        open_swarm(network=network, host="node", seed=0, device=device) as first,
    ):
        await first.serve({"layer0.[0:2]": config.expert()}, optimizer=optax.sgd(0.1))
        async with open_swarm(first.contact, network=network, host="trainer", seed=1) as swarm:
            model = MLP.on(swarm, config, product_key((2,)))
            trainers = swarm.trainer(model, optax.sgd(0.1), itertools.repeat(Batch(x, labels)))
            trace = Trace(trio.current_time())
            swarm.watch_calls(trace.add)
            trainers.trainers[0].on_span = trace.add
            await trainers.run(3)
            return trace, swarm.statistics.ok


@pytest.mark.slow
def test_a_simulated_run_is_traced_in_virtual_time(tmp_path: Path) -> None:
    """Each step asks two experts forward and backward of one device: 0.5 s for each batch and 0.1 s for the way."""
    trace, answered = dmoe_net.run(simulated)
    events = happened(written(trace, tmp_path))
    calls, steps = ([each for each in events if (each["name"] == "step") == wanted] for wanted in (False, True))
    assert len(calls) == answered == 12
    assert [each["args"]["kind"] for each in calls[:4]] == ["forward"] * 2 + ["backward"] * 2
    assert {each["args"]["uid"] for each in calls} == {"layer0.0", "layer0.1"}
    assert {each["args"]["rows"] for each in calls} == {6}
    # The second of two waits for the first: they overlap, in lanes of their own.
    assert {each["tid"] for each in calls} == {0, 1}
    assert sorted(each["dur"] for each in calls[:2]) == [pytest.approx(0.6e6, abs=1e4), pytest.approx(1.1e6, abs=1e4)]
    # Before its first call the trainer asks the DHT who serves the layer, which takes a round trip.
    assert [each["dur"] for each in steps] == [pytest.approx(seconds * 1e6, abs=3e4) for seconds in (2.3, 2.2, 2.2)]
    assert steps[1]["ts"] == pytest.approx(steps[0]["ts"] + steps[0]["dur"], abs=1.0)
