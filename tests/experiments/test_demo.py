"""The demonstration: experts dealt out so that a death is survivable, figures counted right, nothing left behind."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from dmoe_jax.cli.common import UsageError
from dmoe_jax.cli.network import SECRET_VARIABLE
from dmoe_jax.grid import all_uids
from experiments.demo.run import GRID, NUM_LAYERS, headline_of
from experiments.local_swarm import ProcessFailed, deal_experts, open_local_swarm
from experiments.supervision import run_supervised
from net.identity import Contact


@pytest.mark.parametrize("num_nodes", [3, 4, 5])
def test_every_expert_has_one_home_and_no_node_owns_a_row(num_nodes: int) -> None:
    """All experts are served once; losing any node leaves every layer and every grid row with living experts."""
    hands = deal_experts(num_nodes, num_layers=NUM_LAYERS, grid_size=GRID)
    everything = [str(uid) for layer in range(NUM_LAYERS) for uid in all_uids(f"layer{layer}", GRID)]
    assert sorted(uid for hand in hands for uid in hand) == sorted(everything)
    for hand in hands:
        rows = Counter(uid.rpartition(".")[0] for uid in everything if uid not in hand)
        assert len(rows) == NUM_LAYERS * GRID[0]


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


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ExceptionGroup("", [ValueError("not empty")]), 1, "demo: error: not empty"),
        (ExceptionGroup("", [ProcessFailed("node1 ended"), OSError("its pipe")]), 1, "demo: error: node1 ended"),
        (BaseExceptionGroup("", [KeyboardInterrupt()]), 130, "demo: interrupted"),
        (ProcessFailed("node1 ended"), 1, "demo: error: node1 ended"),
        (UsageError("no such preset"), 1, "demo: error: no such preset"),
    ],
)
def test_what_failed_ends_in_one_line(
    error: BaseException, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever else the nursery put into the group beside the reason."""

    async def fail() -> int:
        raise error

    with pytest.raises(SystemExit) as exit_:
        run_supervised(fail, prog="demo")
    assert exit_.value.code == status
    assert capsys.readouterr().err == f"{line}\n"


def test_a_bug_keeps_its_traceback() -> None:
    """A wrong value beside something else does not hide it."""

    async def fail() -> int:
        raise ExceptionGroup("", [ValueError("wrong"), KeyError("bug")])

    with pytest.raises(ExceptionGroup):
        run_supervised(fail, prog="demo")


@pytest.mark.parametrize("network_flags", [(), ("--insecure-loopback",)])
async def test_local_swarms_peers_prove_who_they_are(
    network_flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process gives its id with its address; neither kind of network needs the secret of the user's real swarm."""
    monkeypatch.setenv(SECRET_VARIABLE, str(tmp_path / "nothing here"))
    async with open_local_swarm(tmp_path, network_flags=network_flags) as swarm:
        first = await swarm.start("first", ["dht"])
        second = await swarm.start("second", ["dht", "--join", first.contact])
        assert str(Contact.parse(second.contact).address) == second.address
    assert not first.is_running
    assert not second.is_running


def processes_of(marker: str) -> list[int]:
    """Processes whose environment carries the marker: the demonstration and all that it started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if marker.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return [pid for pid in found if pid != os.getpid()]


def start_demo(out: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "DMOE_TEST_MARKER": str(out), "DMOE_DATA": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.demo", "--quick", "--json", "--data", "embedded", "--out", str(out)],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_quick_demo_learns_survives_and_leaves_nothing(tmp_path: Path) -> None:
    """The short run beats the unigram model although a node dies, and every process is gone."""
    out = tmp_path / "run"
    demo = start_demo(out)
    stdout, stderr = demo.communicate(timeout=280)
    assert demo.returncode == 0, stderr
    headline = json.loads(stdout.splitlines()[-1])
    assert headline["perplexity_over_unigram"] < 0.9
    assert headline["killed_at_step"] >= 50
    assert headline["failed_share_after_kill"] <= 0.15
    assert {"config.json", "metrics.jsonl", "figure.png", "report.md"} <= {path.name for path in out.iterdir()}
    assert processes_of(str(out)) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_demo_leaves_no_process(tmp_path: Path, how: signal.Signals) -> None:
    """Ctrl-C ends everything in order; even SIGKILL of the demonstration orphans nobody."""
    out = tmp_path / "run"
    demo = start_demo(out)
    assert demo.stderr is not None
    for line in demo.stderr:
        if "step " in line:  # the trainer trains: all processes are up
            break
    assert len(processes_of(str(out))) >= 6
    demo.send_signal(how)
    demo.communicate(timeout=60)
    assert demo.returncode == (130 if how is signal.SIGINT else -signal.SIGKILL)
    # Orphans end when they notice that standard input closed; communicate() waited for the pipes they hold.
    assert processes_of(str(out)) == []
