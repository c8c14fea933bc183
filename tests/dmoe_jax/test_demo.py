"""The demonstration and `dmoe up`: figures counted right, every line true, nothing left behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dmoe_jax.cli.demo import headline_of


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
        [sys.executable, "-m", "dmoe_jax.cli", "demo", "--quick", "--json", "--data", "embedded", "--out", str(out)],
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
