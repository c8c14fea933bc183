"""`--metrics-port`, `--trace` and `--tracker`: what each command shows of itself while it runs and when it ends."""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from rich.console import Console

from dmoe_jax.cli.local_view import LocalView, TrainerWatch
from dmoe_jax.cli.train import TrainCommand
from dmoe_jax.cli.training import run_training
from dmoe_jax.cli.up import UpCommand
from dmoe_jax.cli.watching import watching
from dmoe_jax.metrics.monitor import Monitor
from dmoe_jax.peers.security import Plain
from dmoe_jax.runs.processes import open_local_swarm
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.swarm.swarm import Swarm
from dmoe_net.identity import Address
from tests.dmoe_jax.http_client import fetch, figures_of, scrape
from tests.dmoe_jax.training_rig import command, outcome, parsed, served_swarm, text_of_few_words


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return text_of_few_words(tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["dht", "--metrics-port", "70000"], "--metrics-port must be 0 to 65535, got 70000"),
        (["node", "--metrics-host", "0.0.0.0"], "--metrics-host would have no effect without --metrics-port"),
        (["train", "--join", "127.0.0.1:1", "--tracker", "excel"], "invalid choice 'excel'"),
        (["train", "--join", "127.0.0.1:1", "--trace", "/tmp"], "--trace names the file to write, /tmp is a folder"),
        (["dht", "--metrics-port", "0", "--metrics-host", "192.0.2.1"], "--metrics-port: cannot listen on 192.0.2.1:0"),
    ],
)
def test_flags_that_cannot_be_meant(args: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, before anything begins."""
    status, error = outcome(args, capsys)
    assert status in (1, 2)
    assert error.startswith("dmoe")
    assert line in error
    assert len(error.splitlines()) == 1


@pytest.mark.slow
async def test_processes_show_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A DHT peer and a node, as `dmoe up` starts them; it lists where they are, and says what is not ready.

    The port of one of them is refused to another process.
    """
    up = parsed(UpCommand, metrics_port=0, insecure_loopback=True)
    async with open_local_swarm(tmp_path, network_flags=[*up.network_flags(), *up.metrics_flags()]) as swarm:
        shown = LocalView(Console(), swarm, {"trainer0": TrainerWatch(tmp_path)}, 10)
        assert shown.why_not_ready() == "no node runs"
        dht = await swarm.start("dht", ["dht"])
        flags = ["--expert", "feedforward", "--d-model", "8", "--experts", "ffn.[0:2]", "--warm-up-rows", "2"]
        node = await swarm.launch("node0", ["node", "--join", dht.contact, *flags])
        assert shown.why_not_ready() == "not serving yet: node0"
        assert await fetch(Address.parse(dht.metrics), "/readyz") == (200, b"ready\n")
        await until(lambda: bool(node.metrics))
        first = await fetch(Address.parse(node.metrics), "/readyz")
        await node.ready()
        assert shown.why_not_ready() == ""
        assert first[0] == 503
        assert await fetch(Address.parse(node.metrics), "/readyz") == (200, b"ready\n")
        found = await scrape(Address.parse(node.metrics))
        assert found["dmoe_node_updates_total"] == {(("uid", "ffn.0"),): 0, (("uid", "ffn.1"),): 0}
        assert found["dmoe_node_serving"] == {(): 1}
        assert sum(found["dmoe_network_connections"].values()) >= 1, "either end may have dialled the one that stays"
        assert found["dmoe_dht_peers"] == {(): 1}

        targets = json.loads(shown.targets())
        assert targets == [
            {"targets": [dht.metrics], "labels": {"process": "dht", "command": "dht"}},
            {"targets": [node.metrics], "labels": {"process": "node0", "command": "node"}},
        ]
        figures = figures_of(shown.families())
        states = {tuple(value for _, value in labels): count for labels, count in figures["dmoe_up_processes"].items()}
        assert states == {("dht", "serving"): 1, ("node", "serving"): 1}
        assert figures["dmoe_up_trainer_step"] == {(("process", "trainer0"),): 0}

        port = dht.metrics.rpartition(":")[2]
        status, error = await trio.to_thread.run_sync(outcome_elsewhere, ["dht", "--metrics-port", port])
        assert (status, len(error.splitlines())) == (2, 1)
        assert f"--metrics-port: cannot listen on {dht.metrics}: " in error
        node.process.kill()
        await node.process.wait()
        assert len(json.loads(shown.targets())) == 1
        assert shown.why_not_ready() == "no node runs"


async def until(is_so: Callable[[], bool]) -> None:
    """Look again and again; what never comes ends in the test's own time-out."""
    while True:
        if is_so():
            return
        await trio.sleep(0.05)


def outcome_elsewhere(args: list[str]) -> tuple[int, str]:
    """Exit status and standard error of a `dmoe` process."""
    done = subprocess.run(
        [sys.executable, "-m", "dmoe_jax.cli", *args], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr


async def run(settings: TrainCommand, swarm: Swarm, monitor: Monitor) -> dict[str, Any]:
    return await run_training(settings, settings.prepared(), swarm, monitor)


@pytest.mark.slow
async def test_a_run_shows_its_figures_and_writes_its_trace(text: str, tmp_path: Path) -> None:
    """A scraper's figures agree with the headline; the trace has every call and step, and the node as their host."""
    monitor = Monitor("train")
    async with served_swarm() as (served, swarm):
        settings = command(tmp_path / "run", text, steps=4, eval_every=4, trace=tmp_path / "trace.json")
        assert monitor.why_not_ready() == "starting"
        headline = await run(settings, swarm, monitor)
        found = figures_of(monitor.families())
        updates = sum(backend.update_count for backend in served.backends.values())
        node = served.node.recorder
    assert monitor.why_not_ready() == ""
    assert found["dmoe_train_steps_total"] == {(): 4}
    assert found["dmoe_train_items_total"] == {(("unit", "tokens"),): headline["training_tokens"]}
    assert found["dmoe_train_step_seconds_count"] == {(): 4}
    assert found["dmoe_train_calls_answered_total"] == {(): headline["calls_ok"]}
    calls = {labels[0][1]: count for labels, count in found["dmoe_train_call_seconds_count"].items()}
    assert sum(calls.values()) == headline["calls_ok"]
    assert sum(found["dmoe_train_expert_samples_total"].values()) == 4 * 2 * 2  # steps, sequences, experts of each
    assert found["dmoe_train_loss"][()] > 0
    # Every answered call is one that the node answered; each batch of backward calls is an update.
    answered: Counter[tuple[str, str]] = Counter()
    for (_, kind, how), count in node.calls.items():
        answered[kind, how] += count
    assert answered == {("forward", "ok"): calls["forward"], ("backward", "ok"): calls["backward"]}
    assert node.device_s["backward"].count == updates
    assert node.staleness.count == calls["backward"]

    trace = json.loads((tmp_path / "trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert sum(event["name"] == "step" for event in events) == 4
    assert len(events) == 4 + headline["calls_ok"]
    hosts = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
    assert len(hosts) == 2
    assert re.fullmatch(r"[0-9a-f]{8} at 127\.0\.0\.1:\d+", hosts[1])


async def test_a_trace_is_written_also_after_ctrl_c(text: str, tmp_path: Path) -> None:
    """With what was done so far."""
    settings = command(tmp_path / "run", text, steps=10_000, eval_every=10_000, trace=tmp_path / "trace.json")
    monitor = Monitor("train")
    async with served_swarm() as (_, swarm), trio.open_nursery() as nursery:
        nursery.start_soon(run, settings, swarm, monitor)
        await until(lambda: figures_of(monitor.families()).get("dmoe_train_steps_total", {}).get((), 0) >= 3)
        nursery.cancel_scope.cancel()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "step" for event in events) >= 3


async def test_a_collaboration_shows_the_whole_swarm(text: str, tmp_path: Path) -> None:
    """Alone with a batch of two micro-batches: two steps of the swarm, its target, and who takes part."""
    monitor = Monitor("train")
    settings = command(tmp_path / "run", text, steps=2, eval_every=2, target_batch_size=16, average_window_s=0.5)
    async with served_swarm() as (_, swarm):
        headline = await run(settings, swarm, monitor)
        found = figures_of(monitor.families())
    assert found["dmoe_collaboration_target_samples"] == {(): 16}
    assert found["dmoe_collaboration_global_step"] == {(): 2}
    assert found["dmoe_collaboration_steps_alone_total"] == {(): 2}
    assert sum(found["dmoe_collaboration_peers"].values()) == 1
    assert found["dmoe_collaboration_samples_total"] == {(): headline["samples_used"]}
    assert found["dmoe_train_averages_total"] == {(("outcome", "ok"),): 2}
    assert found["dmoe_train_average_seconds_count"] == {(): 2}


async def test_a_trace_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """And ends nothing: the run it belongs to is done."""
    said: list[str] = []
    async with open_swarm(security=Plain(), seed=0) as swarm:
        with watching(swarm, Monitor("train"), tmp_path, said.append):
            pass
    assert len(said) == 1
    assert said[0].startswith(f"--trace: cannot write {tmp_path}: ")


def test_a_tracker_that_is_not_installed_is_told_before_the_swarm_is_joined(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens at that address, which would be told later."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("DMOE_XLA_CACHE", "")
    status, error = outcome(["train", "--join", "127.0.0.1:1", "--tracker", "wandb"], capsys)
    assert (status, len(error.splitlines())) == (2, 1)
    assert "tracker wandb needs the package wandb" in error
    assert "pip install wandb" in error


@pytest.mark.slow
async def test_a_whole_swarm_is_found_through_one_port(text: str, tmp_path: Path) -> None:
    """`dmoe up` with metrics: its /targets leads to every process; afterwards there are a trace and event files."""
    out = tmp_path / "run"
    train = f"--tracker tensorboard --trace {tmp_path / 'trace.json'} --eval-tokens 64 --final-eval-tokens 64"
    words = ["up", "--nodes", "1", "--grid-size", "2", "2", "--num-layers", "1", "--d-model", "8", "--steps", "400"]
    words += ["--seq-len", "4", "--mem-len", "4", "--d-ff", "8", "--num-heads", "2", "--data", text, "--out", str(out)]
    command_line = [sys.executable, "-m", "dmoe_jax.cli", *words, f"--train-flags={train}", "--metrics-port", "0"]
    async with trio.open_nursery() as nursery:
        log = tmp_path / "up.log"
        with log.open("wb") as output:
            up = await trio.lowlevel.open_process(command_line, stdout=output, stderr=output)
        nursery.start_soon(up.wait)
        await until(lambda: up.poll() is not None or "metrics at" in log.read_text())
        found = re.search(r"metrics at http://(\S+)/metrics", log.read_text())
        assert found is not None, log.read_text()
        address, steps = Address.parse(found[1]), 0.0
        while not steps:
            assert up.poll() is None, log.read_text()
            await trio.sleep(0.1)
            _, body = await fetch(address, "/targets")
            targets = {each["labels"]["process"]: each["targets"][0] for each in json.loads(body)}
            if "trainer0" in targets:
                figures = await scrape(Address.parse(targets["trainer0"]))
                steps = figures.get("dmoe_train_steps_total", {}).get((), 0)
        assert set(targets) == {"dht", "node0", "trainer0"}
        assert await fetch(address, "/readyz") == (200, b"ready\n")
        node = await scrape(Address.parse(targets["node0"]))
        assert sum(node["dmoe_node_updates_total"].values()) > 0
        assert node["dmoe_node_device_busy_seconds_total"][()] > 0
    assert up.returncode == 0, log.read_text()
    assert any((out / "tensorboard").iterdir())
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["events_kept"] > 400
