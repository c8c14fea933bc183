"""The demonstration and `dmoe up`: figures counted right, every flag arrives, every line true, nothing left behind."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from rich.console import Console

from dmoe_jax.cli import main
from dmoe_jax.cli.demo import DemoCommand
from dmoe_jax.cli.local_view import LocalView, TrainerWatch, headline_of, show_headline
from dmoe_jax.cli.node import NodeCommand
from dmoe_jax.cli.train import TrainCommand
from dmoe_jax.cli.up import UpCommand
from dmoe_jax.machine.disk import hold_folder
from dmoe_jax.machine.environment import SECRET_VARIABLE
from dmoe_jax.runs.command_line import parse_command_line
from dmoe_jax.runs.endings import EXIT_AGAIN, UsageError
from dmoe_jax.runs.processes import open_local_swarm
from dmoe_jax.runs.run_folder import append_metric
from tests.dmoe_jax.training_rig import parsed


def test_failures_are_counted_from_the_kill_on() -> None:
    """30 of 40 calls failed before the kill do not count; of 60 + 20 after it, 20 did."""
    metrics = [
        {"kind": "calls", "step": 1, "ok": 0, "failed": 0},
        {"kind": "calls", "step": 10, "ok": 10, "failed": 30},
        {"kind": "event", "name": "node_killed", "step": 10},
        {"kind": "calls", "step": 20, "ok": 70, "failed": 50},
        {"kind": "headline", "validation_perplexity": 500.0},
    ]
    headline = headline_of(metrics)
    assert headline["validation_perplexity"] == 500.0
    assert (headline["calls_after_kill"], headline["failed_calls_after_kill"]) == (80, 20)
    assert headline["failed_share_after_kill"] == 0.25


def demonstrated(**flags: Any) -> UpCommand:
    """The swarm of a demonstration."""
    return parsed(DemoCommand, **flags)._up()


def node_of(up: UpCommand, index: int = 0) -> Any:
    """A node as it reads the flags that it is given."""
    flags = [*up.saving_flags(index), *([] if up.swarm.claim is None else ["--of", "a.0"]), *up.flags_of_nodes()]
    return parse_command_line(NodeCommand, prog="node", args=flags)


def trainer_of(up: UpCommand, index: int = 0) -> Any:
    """A trainer as it reads the flags that it is given."""
    return parse_command_line(TrainCommand, prog="train", args=["--join", "a:1", *up.flags_of_trainer(index)])


def test_up_gives_each_node_a_folder_for_its_experts(tmp_path: Path) -> None:
    """Beside the run folder, one for each node; what an earlier run left there would be taken up, and is refused."""
    up = parsed(UpCommand, out=tmp_path / "run", save_experts=True)
    up.check()
    assert node_of(up, 1).saving.checkpoint_dir == tmp_path / "run.nodes" / "node1"
    (tmp_path / "run.nodes" / "node0").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"run\.nodes is not"):
        up.check()


def test_nodes_of_up_claim_and_share_a_folder(tmp_path: Path) -> None:
    """Each may take any expert, and finds what another has saved. Own patterns are claimed as they are."""
    up = parsed(UpCommand, out=tmp_path / "run", save_experts=True, claim=20)
    up.check()
    assert up.hands() == [["layer0.[0:4].[0:4]", "layer1.[0:4].[0:4]"]] * 2
    for node in (node_of(up, 0), node_of(up, 1)):
        assert (node.hand.claim, node.hand.of, node.hand.experts) == (20, ("a.0",), ())
        assert node.saving.checkpoint_dir == tmp_path / "run.nodes" / "shared"
    assert parsed(UpCommand, claim=4, experts=("ffn.[0:4]",), nodes=3).hands() == [["ffn.[0:4]"]] * 3


def test_up_hands_its_flags_to_nodes_and_trainers(tmp_path: Path) -> None:
    """Every expert has one home; shapes, kinds, seeds and further flags arrive; several trainers average."""
    line = "--nodes 3 --trainers 2 --num-layers 1 --grid-size 2 4 --d-model 64 --steps 40 --seed 7 --average-every 5"
    words = [*line.split(), "--announce", "localhost", "--out", str(tmp_path / "run")]
    words += ["--node-flags=--grad-clip 2", "--train-flags=--num-trainers 3 --k-best 2"]
    up: UpCommand = parse_command_line(UpCommand, prog="dmoe up", args=words)
    up.check()
    assert sorted(uid for hand in up.hands() for uid in hand) == [f"layer0.{i}.{j}" for i in range(2) for j in range(4)]
    node = node_of(up)
    assert (node.kind.expert.d_model, node.seed, node.learning.recipe.grad_clip) == (64, 7, 2.0)
    assert node.listen.announce == "localhost"
    for index, train in enumerate((trainer_of(up, 0), trainer_of(up, 1))):
        assert (train.language.layer.d_model, train.run_length.steps) == (64, 40)
        assert (train.data.seed, train.data.data_seed, train.data.num_trainers) == (7, 7 + index, 3)
        assert (train.language.num_layers, train.language.grid_size, train.calls.k_best) == (1, (2, 4), 2)
        assert (train.averaging.average_every, train.averaging.meeting.side) == (5, 2)
        assert train.listening.announce == "localhost"


@pytest.mark.parametrize(
    ("flags", "route", "router", "rows"),
    [
        ({}, "token", "balanced", 64),
        ({"route": "sequence"}, "sequence", "product_key", 4),
        ({"router": "switch+balanced"}, "token", "switch+balanced", 64),
    ],
)
def test_nodes_and_trainers_route_the_same(
    flags: dict[str, str], route: str, router: str, rows: int, tmp_path: Path
) -> None:
    """The demonstration's wish reaches both; the experts of tokens are compiled for many rows."""
    up = demonstrated(out=tmp_path, **flags)
    node, train = node_of(up), trainer_of(up)
    assert (node.kind.route, train.language.route, train.language.router) == (route, route, router)
    assert node.serving.warm_up_rows == rows
    assert ([spec.shape for spec in node.kind.make().inputs] == [(node.kind.expert.d_model,)]) == (route == "token")


def test_up_serves_what_an_own_model_needs(tmp_path: Path) -> None:
    """Own kinds, own optimisers and own patterns reach the nodes; the model reaches the trainer."""
    own = {"expert": "a.py:expert", "optimizer": "a.py:adam", "model": "a.py:model"}
    up = parsed(UpCommand, nodes=2, experts=("ffn.[0:4]",), out=tmp_path, **own)
    node = node_of(up)
    assert up.hands() == [["ffn.0", "ffn.2"], ["ffn.1", "ffn.3"]]
    assert (node.kind.kind, node.learning.optimizer) == ("a.py:expert", "a.py:adam")
    assert (node.devices.xla_threads or 0) >= 2, "they may call the host"
    assert trainer_of(up).model == "a.py:model"
    assert "--num-layers" not in up.flags_of_trainer(0)


@pytest.mark.parametrize(
    ("command", "flags", "line"),
    [
        (UpCommand, {"nodes": 0}, "--nodes must be at least 1, got 0"),
        (UpCommand, {"nodes": 33}, "--nodes 33 is more than there are experts: 32"),
        (UpCommand, {"claim": 0}, "--claim must be at least 1, got 0"),
        (UpCommand, {"claim": 15}, "--nodes 2 with --claim 15 leave 2 of 32 experts unserved"),
        (UpCommand, {"experts": ("a",)}, r"--experts: expected a grid pattern .* got 'a'"),
        (UpCommand, {"grid_size": ()}, "--grid-size must be positive integers"),
        (UpCommand, {"announce": "host:1"}, "--announce must be a host name"),
        (UpCommand, {"train_flags": "'"}, "--train-flags: No closing quotation"),
        (DemoCommand, {"num_nodes": 2}, "--num-nodes must be at least 3, got 2"),
        (DemoCommand, {"steps": 9}, "--steps must be at least 10, got 9"),
        (DemoCommand, {"kill_trainer": True, "num_processes": 1}, "--kill-trainer needs --num-processes"),
    ],
)
def test_what_cannot_be_meant_is_refused(command: Any, flags: dict[str, Any], line: str) -> None:
    """Before a process is started, in a sentence that names the flag."""
    with pytest.raises(UsageError, match=line):
        parsed(command, **flags).run()


def test_a_run_goes_into_a_new_or_empty_folder(tmp_path: Path) -> None:
    """A folder with something in it, or a file, is refused by name."""
    (tmp_path / "file").touch()
    parsed(UpCommand, out=tmp_path / "new").check()
    (tmp_path / "new.trainer1").mkdir()
    (tmp_path / "new.trainer1" / "metrics.jsonl").touch()
    for out, used in ((".", "."), ("file", "file"), ("new", "new.trainer1")):
        with pytest.raises(UsageError, match=f"--out must be a new or empty folder, {tmp_path / used} is not"):
            parsed(UpCommand, out=tmp_path / out, trainers=2).check()


def test_the_demonstration_is_a_swarm_of_up() -> None:
    """Its own flags arrive at the processes; trainers beside the first one evaluate less."""
    up = demonstrated(quick=True, freeze_experts=True, num_trainers=3, seed=5, insecure_loopback=True)
    up.check()
    assert (len(up.hands()), up.swarm.trainers, up.network.flags_for_others()) == (4, 2, " --insecure-loopback")
    node, train = node_of(up), trainer_of(up)
    assert (node.learning.recipe.freeze_experts, node.serving.warm_up_rows, node.seed) == (True, 64, 5)
    assert (train.data.num_trainers, train.run_length.eval_tokens, train.run_length.steps) == (3, 8192, 100)
    other = parsed(UpCommand, trainers=2).flags_of_trainer(1)
    assert other[other.index("--eval-tokens") + 1] == "1024"


def test_a_trainers_figures_are_read_while_they_are_written(tmp_path: Path) -> None:
    """Only whole lines count, each once; steps of asynchronous trainers may arrive out of order."""
    watch, metrics = TrainerWatch(tmp_path), tmp_path / "metrics.jsonl"
    watch.look()
    assert watch.step == 0
    append_metric(metrics, kind="train", step=2, loss=4.0, items=100, time_s=1.0)
    append_metric(metrics, kind="train", step=1, loss=2.0, items=100, time_s=2.0)
    for part, failed in (('{"kind":"calls","ok":9,"fai', 0), ('led":3}\n', 3), ("", 3)):
        with metrics.open("a") as file:
            file.write(part)
        watch.look()
        assert watch.figures(50) == f"step 2/50  loss 3.900  100 items/s  {failed} failed calls"


def test_what_an_earlier_trainer_left_is_shown_when_the_new_one_writes(tmp_path: Path) -> None:
    """Until then it has not come so far, though the folder has."""
    metrics = tmp_path / "metrics.jsonl"
    append_metric(metrics, kind="train", step=152, loss=4.0, items=100, time_s=1.0)
    watch = TrainerWatch(tmp_path)
    for _ in range(2):
        watch.look()
        assert (watch.step, watch.time_s) == (0, 0.0)
    append_metric(metrics, kind="event", name="resumed", detail="with the same settings")
    watch.look()
    assert watch.step == 152
    append_metric(metrics, kind="train", step=153, loss=4.0, items=100, time_s=2.0)
    watch.look()
    assert watch.figures(600) == "step 153/600  loss 4.000  100 items/s  0 failed calls"


def test_the_last_table_is_written_as_the_report_is(tmp_path: Path) -> None:
    """A dash for what is not known, yes and no, thousands apart."""
    screen = io.StringIO()
    headline = {"virtual_s": None, "complete": True, "tokens": 12345, "loss": 2.34567, "failures": {}}
    show_headline(Console(file=screen, width=100), tmp_path, headline, title="A model")
    rows = re.findall(r"^│ (.+?) +│ (.+?) +│$", screen.getvalue(), re.MULTILINE)
    assert dict(rows) == {
        "virtual s": "–",
        "complete": "yes",
        "tokens": "12,345",
        "loss": "2.346",
        "failures": "none",
    }


async def test_every_process_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start, address, metrics and end of each are shown: as lines in a log, as a table on a terminal."""
    monkeypatch.setenv(SECRET_VARIABLE, str(tmp_path / "of the user's real swarm"))
    screens = {is_terminal: io.StringIO() for is_terminal in (False, True)}
    async with (
        open_local_swarm(tmp_path, network_flags=["--insecure-loopback", "--metrics-port", "0"]) as swarm,
        trio.open_nursery() as nursery,
    ):
        for is_terminal, screen in screens.items():
            view = LocalView(Console(file=screen, force_terminal=is_terminal, width=120), swarm, {}, 10)
            nursery.start_soon(view.run)
        peer = await swarm.start("dht", ["dht"])
        lost = await swarm.launch("node0", ["node", "--experts", "nonsense"])
        assert view.why_not_ready() == "not serving yet: node0"
        await lost.settled.wait()
        await trio.sleep(0.3)
        assert view.why_not_ready() == "no node runs"
        (target,) = json.loads(view.targets())
        assert target == {"targets": [peer.metrics], "labels": {"process": "dht", "command": "dht"}}
        await swarm.end_in_order()
        await trio.sleep(0.3)
        nursery.cancel_scope.cancel()
    for is_terminal, screen in screens.items():
        for line in (f"serves at {peer.address}", "ended with status 2", "stopped"):
            assert line in screen.getvalue()
        assert ("0 of 1 nodes serve" in screen.getvalue()) is is_terminal


def processes_of(marker: str) -> list[int]:
    """Processes whose environment carries the marker: the demonstration and all that it started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if marker.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def start_demo(out: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "TEST_MARKER": str(out), "DMOE_DATA": ""}
    command = [sys.executable, "-m", "dmoe_jax.cli", "demo", "--quick", "--json", "--data", "embedded"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, "--out", str(out)], cwd=Path(__file__).parents[2], env=environment, **pipes)


@pytest.mark.slow
def test_quick_demo_learns_survives_and_leaves_nothing(tmp_path: Path) -> None:
    """The short run beats the unigram model although a node dies, and every process is gone."""
    out = tmp_path / "run"
    demo = start_demo(out)
    stdout, stderr = demo.communicate(timeout=280)
    assert demo.returncode == 0, stderr
    headline = json.loads(stdout.splitlines()[-1])
    assert headline["perplexity_over_unigram"] < 1.0
    assert headline["killed_at_step"] >= 50
    assert headline["failed_share_after_kill"] <= 0.15
    assert {"config.json", "metrics.jsonl", "figure.png", "report.md"} <= {path.name for path in out.iterdir()}
    assert processes_of(str(out)) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_demo_leaves_no_process(tmp_path: Path, how: signal.Signals) -> None:
    """Ctrl-C ends everything in order; even SIGKILL of the demonstration orphans nobody."""
    out = tmp_path / "run"
    demo = start_demo(out)
    next(line for line in demo.stderr if "trainer0: step " in line)  # all are up, and there is something to report
    assert len(processes_of(str(out))) >= 6
    demo.send_signal(how)
    demo.communicate(timeout=100)
    assert demo.returncode == (130 if how is signal.SIGINT else -signal.SIGKILL)
    # Orphans end when they notice that standard input closed.
    deadline = time.monotonic() + 60
    while processes_of(str(out)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of(str(out)) == []
    if how is signal.SIGINT:
        assert (out / "report.md").exists()  # the trainers ended before the nodes, and in order


@pytest.mark.skipif(sys.platform == "win32", reason="nobody is kept out there")
def test_one_swarm_at_a_time_runs_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second is told who runs the first, and starts nothing."""
    with hold_folder(tmp_path / "up.logs", "swarm"), pytest.raises(SystemExit) as exit_:
        main(["up", "--out", str(tmp_path / "up"), "--trainers", "1"])
    assert exit_.value.code == EXIT_AGAIN
    assert f"the swarm in {tmp_path / 'up.logs'} is under way: process {os.getpid()} on" in capsys.readouterr().err
    assert not (tmp_path / "up.logs" / "up.json").exists()
