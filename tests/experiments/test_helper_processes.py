"""Experiments of several processes: tiny runs have all their figures, and whatever ends them leaves no process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.allreduce_speed.measurement import NETWORKS, SIDES
from experiments.processes import HelperFailed, HelperProcess, open_helpers

ROOT = Path(__file__).parents[2]
TRANSPORT = ("transport_speed", "--slice-s", "0.02", "--tensor-mib", "0.5", "--callers", "4", "--latency-calls", "20")
ALLREDUCE = ("allreduce_speed", "--mib", "0.4", "--chunk-kib", "64")


@pytest.mark.parametrize(
    ("module", "settings"),
    [("experiments.transport_speed.server", {"side": "neither"}), ("experiments.no_such_module", {})],
)
def test_helper_that_does_not_start(module: str, settings: dict[str, str]) -> None:
    """It said why on standard error, which is ours, too."""
    with pytest.raises(HelperFailed, match="ended too early"), open_helpers(module, [settings]):
        pass


def test_a_helper_that_was_killed() -> None:
    """It could not say why: the system kills so when memory runs out."""
    program = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    killed = pytest.raises(HelperFailed, match="ended too early: it was killed, perhaps for want of memory")
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process, killed:
        HelperProcess(process).hear()


def test_a_second_interruption_leaves_no_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while we wait for a helper that still works."""
    helpers: list[subprocess.Popen[str]] = []
    wait = subprocess.Popen.wait

    def interrupted(self: "subprocess.Popen[str]", timeout: float | None = None) -> int:
        helpers.append(self)
        if timeout is not None:
            raise KeyboardInterrupt
        return wait(self)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    sizes = {"small_bytes": 1, "tensor_bytes": 1}
    server = {"side": "rpc", "certificate": "", "seed": 0, **sizes}
    with pytest.raises(KeyboardInterrupt), open_helpers("experiments.transport_speed.server", [server]):
        assert helpers == []
    assert helpers[0].returncode is not None


def test_settings_are_read_without_jax() -> None:
    """`--help` and a wrong flag are answered at once, for every experiment on the bench."""
    modules = [f"experiments.{path.parent.name}.settings" for path in sorted(ROOT.glob("experiments/*/settings.py"))]
    assert {"experiments.overlap.settings", "experiments.transport_speed.settings"} <= set(modules)
    program = f"import sys, {', '.join(modules)}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def processes_of(marker: str) -> list[int]:
    """Processes whose environment carries the marker: the measurement and all that it started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if marker.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return [pid for pid in found if pid != os.getpid()]


def start(out: Path, name: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", f"experiments.{name}", "--json", "--out", str(out), *arguments],
        cwd=ROOT,
        env={**os.environ, "TEST_MARKER": str(out)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def headline_of_run(out: Path, *command: str, limit_s: float = 110) -> dict[str, Any]:
    """Run to the end; all files are there and no process is left."""
    run = start(out, *command)
    stdout, stderr = run.communicate(timeout=limit_s)
    assert run.returncode == 0, stderr
    assert {"config.json", "metrics.jsonl", "figure.png", "report.md"} <= {path.name for path in out.iterdir()}
    assert processes_of(str(out)) == []
    headline: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    return headline


@pytest.mark.slow
def test_tiny_run_of_transport_speed(tmp_path: Path) -> None:
    """All ratios and what they are made of are there."""
    headline = headline_of_run(tmp_path / "run", *TRANSPORT, "--rounds", "1")
    ratios = [name for name in headline if name.endswith("_ratio")]
    assert len(ratios) == 7
    for name in ratios:
        assert 0 < headline[f"{name}_min"] <= headline[name] <= headline[f"{name}_max"]
    for side in ("rpc", "blocking"):
        for transfer in ("tls_send", "tls_receive", "plain_send", "plain_receive"):
            assert headline[f"{side}_{transfer}_gigabytes_per_s"] > 0
            assert headline[f"{side}_{transfer}_cpu_s_per_gigabyte"] > 0
        assert headline[f"{side}_server_peak_growth_mib"] >= 0
    for name in ("rpc_tls_calls", "rpc_plain_calls", "blocking_calls"):
        assert headline[f"{name}_calls_per_s"] > 0
    assert headline["rpc_tls_one_caller_p50_ms"] <= headline["rpc_tls_one_caller_p99_ms"]


@pytest.mark.slow
def test_tiny_run_of_allreduce_speed(tmp_path: Path) -> None:
    """A vector that three members cannot share evenly."""
    headline = headline_of_run(tmp_path / "run", *ALLREDUCE, "--peers", "3", "--rounds", "2")
    for network in NETWORKS:
        name = f"allreduce_{network}_ratio"
        assert 0 < headline[f"{name}_min"] <= headline[name] <= headline[f"{name}_max"]
        assert all(headline[f"{side}_{network}_wall_s"] > 0 for side in SIDES)
    assert headline["memory_ratio"] > 2  # the vector and its average, at least


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize(("command", "processes"), [(TRANSPORT, 1 + 2), ((*ALLREDUCE, "--peers", "2"), 1 + 4 * 2)])
def test_interrupted_run_leaves_no_process(
    tmp_path: Path, command: tuple[str, ...], processes: int, how: signal.Signals
) -> None:
    """An end from outside leaves a report of the rounds so far; even SIGKILL of the measurement orphans nobody."""
    out = tmp_path / "run"
    run = start(out, *command, "--rounds", "9999")
    assert run.stderr is not None
    for line in run.stderr:
        if "round 1" in line:  # all helpers are at work
            break
    assert len(processes_of(str(out))) == processes
    run.send_signal(how)
    # The helpers hold this process's standard error: it closes with the last of them.
    run.communicate(timeout=60)
    assert run.returncode == (130 if how is signal.SIGTERM else -signal.SIGKILL)
    assert (out / "report.md").exists() == (how is signal.SIGTERM)
    assert processes_of(str(out)) == []
