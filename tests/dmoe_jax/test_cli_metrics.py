"""`--metrics-port`, `--trace` and `--tracker`: what each command shows of itself while it runs and when it ends."""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from dmoe_jax.cli.training import run_training
from dmoe_jax.cli.watching import watching
from dmoe_jax.metrics.monitor import Monitor
from dmoe_jax.peers.security import Plain
from dmoe_jax.swarm.opening import open_swarm
from dmoe_net.identity import Address
from tests.dmoe_jax.http_client import fetch, figures_of, scrape
from tests.dmoe_jax.test_cli import check_one_line
from tests.dmoe_jax.training_rig import command, served_swarm, text_of_few_words


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return text_of_few_words(tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("dht --metrics-port 70000", "--metrics-port must be 0 to 65535, got 70000"),
        ("node --metrics-host 0.0.0.0", "--metrics-host would have no effect without --metrics-port"),
        ("train --join 127.0.0.1:1 --tracker excel", "invalid choice 'excel'"),
        ("train --join 127.0.0.1:1 --trace /tmp", "--trace names the file to write, /tmp is a folder"),
        ("dht --metrics-port 0 --metrics-host 192.0.2.1", "--metrics-port: cannot listen on 192.0.2.1:0"),
    ],
)
def test_flags_that_cannot_be_meant(args: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, before anything begins."""
    check_one_line(args.split(), 2, f".*{line}", capsys)


async def until(is_so: Callable[[], bool]) -> None:
    """Look again and again; what never comes ends in the test's own time-out."""
    while not is_so():  # noqa: ASYNC110
        await trio.sleep(0.05)


async def run(settings: Any, swarm: Any, monitor: Monitor) -> dict[str, Any]:
    return await run_training(settings, settings.prepared(), swarm, monitor)


@pytest.mark.slow
async def test_a_run_shows_its_figures_and_writes_its_trace(text: str, tmp_path: Path) -> None:
    """A scraper's figures agree with the headline and the node; the trace has every call and step, and their host."""
    monitor = Monitor("train")
    settings = command(tmp_path / "run", text, steps=4, eval_every=4, trace=tmp_path / "trace.json")
    assert monitor.why_not_ready() == "starting"
    async with served_swarm() as (served, swarm):
        headline = await run(settings, swarm, monitor)
        found, node = figures_of(monitor.families()), served.node.recorder
        updates = sum(backend.update_count for backend in served.backends.values())
    assert monitor.why_not_ready() == ""
    assert found["dmoe_train_steps_total"] == found["dmoe_train_step_seconds_count"] == {(): 4}
    assert found["dmoe_train_items_total"] == {(("unit", "tokens"),): headline["training_tokens"]}
    assert found["dmoe_train_calls_answered_total"] == {(): headline["calls_ok"]}
    calls = {labels[0][1]: count for labels, count in found["dmoe_train_call_seconds_count"].items()}
    assert sum(calls.values()) == headline["calls_ok"]
    assert sum(found["dmoe_train_expert_samples_total"].values()) == 4 * 2 * 2  # steps, sequences, experts of each
    assert found["dmoe_train_loss"][()] > 0
    # Every answered call is one that the node answered; each batch of backward calls is an update.
    answered = Counter[tuple[str, str]]()
    for (_, kind, how), count in node.calls.items():
        answered[kind, how] += count
    assert answered == {("forward", "ok"): calls["forward"], ("backward", "ok"): calls["backward"]}
    assert node.device_s["backward"].count == updates
    assert node.staleness.count == calls["backward"]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event["name"] for event in events if event["ph"] == "X"]
    assert (spans.count("step"), len(spans)) == (4, 4 + headline["calls_ok"])
    _, host = (event["args"]["name"] for event in events if event["ph"] == "M")
    assert re.fullmatch(r"[0-9a-f]{8} at 127\.0\.0\.1:\d+", host)


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
    (line,) = said
    assert line.startswith(f"--trace: cannot write {tmp_path}: ")


def test_a_tracker_that_is_not_installed_is_told_before_the_swarm_is_joined(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens at that address, which would be told later."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("DMOE_XLA_CACHE", "")
    words = ["train", "--join", "127.0.0.1:1", "--tracker", "wandb"]
    check_one_line(words, 2, ".*tracker wandb needs the package wandb.*pip install wandb", capsys)


@pytest.mark.slow
async def test_a_whole_swarm_is_found_through_one_port(text: str, tmp_path: Path) -> None:
    """`dmoe up` with metrics: its /targets leads to every process; a trace and event files are left."""
    out = tmp_path / "run"
    train = f"--tracker tensorboard --trace {tmp_path / 'trace.json'} --eval-tokens 64 --final-eval-tokens 64"
    words = ["up", "--nodes", "1", "--grid-size", "2", "2", "--num-layers", "1", "--d-model", "8", "--steps", "400"]
    words += ["--seq-len", "4", "--mem-len", "4", "--d-ff", "8", "--num-heads", "2", "--data", text, "--out", str(out)]
    command_line = [sys.executable, "-m", "dmoe_jax.cli", *words, f"--train-flags={train}", "--metrics-port", "0"]
    async with trio.open_nursery() as nursery:
        with (log := tmp_path / "up.log").open("wb") as output:
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
        states = {tuple(value for _, value in labels) for labels in (await scrape(address))["dmoe_up_processes"]}
        assert {("dht", "serving"), ("node", "serving")} <= states
        assert await fetch(Address.parse(targets["dht"]), "/readyz") == (200, b"ready\n")
        node = await scrape(Address.parse(targets["node0"]))
        assert node["dmoe_node_serving"] == {(): 1}
        assert node["dmoe_dht_peers"][()] >= 1
        assert sum(node["dmoe_node_updates_total"].values()) > 0
        assert node["dmoe_node_device_busy_seconds_total"][()] > 0
    assert up.returncode == 0, log.read_text()
    assert json.loads((tmp_path / "run.logs" / "up.json").read_text())[:2] == ["--nodes", "1"]
    assert any((out / "tensorboard").iterdir())
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["events_kept"] > 400
