"""Helpers and children of a measurement: whatever ends them leaves no process, and tiny runs have all their figures."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from experiments.processes import HelperFailed, HelperProcess, open_helpers, run_child

ROOT = Path(__file__).parents[2]
TRANSPORT = ("transport_speed", "--slice-s", "0.02", "--tensor-mib", "0.5")
ALLREDUCE = ("allreduce_speed", "--mib", "0.4")
CHILD = """
import json, signal, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("progress", file=sys.stderr, flush=True)
if "wait" in sys.argv:
    time.sleep(60)
if "fail" in sys.argv:
    sys.exit("the disk is full\\n")
print("a line for readers")
print(json.dumps({"figure": 1}))
"""
HELPER = """
from experiments.processes import orders, run_helper, say

async def main(number):
    say(number=number)
    async for order in orders():
        say(**order)

run_helper(main)
"""
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules `child` and `helper`, as small as can be, which processes find."""
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "helper.py").write_text(HELPER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def test_a_childs_headline_is_its_last_line_and_its_errors_pass_through(capfd: pytest.CaptureFixture[str]) -> None:
    """Standard output is kept, standard error is shown; the last line of one that failed says why."""
    assert run_child(["child"]) == (0, {"figure": 1}, "")
    assert capfd.readouterr() == ("", "progress\n")
    assert run_child(["child", "fail"]) == (1, None, "the disk is full")


@pytest.mark.parametrize("words", [["wait"], ["wait", "stubborn"]])
def test_interrupt_ends_the_child(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is left when the interrupt arrives at the caller; one that does not end is killed."""
    monkeypatch.setattr("experiments.processes.CHILD_GRACE_S", 0.2)
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(1.0, signal.pthread_kill, (main, signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_child(["child", *words])
    assert time.monotonic() - began < 30


def test_helpers_answer_orders() -> None:
    """Each has its own settings."""
    with open_helpers("helper", [{"number": 1}, {"number": 2}]) as helpers:
        assert [helper.hello for helper in helpers] == [{"number": 1}, {"number": 2}]
        assert helpers[1].ask(order="go") == {"order": "go"}


def test_helper_that_does_not_start() -> None:
    """It said why on standard error, which is ours, too."""
    with pytest.raises(HelperFailed, match="ended too early"), open_helpers("experiments.no_such_module", [{}]):
        pass


def test_a_helper_that_was_killed() -> None:
    """It could not say why: the system kills so when memory runs out."""
    program = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    killed = pytest.raises(HelperFailed, match="ended too early: it was killed, perhaps for want of memory")
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process, killed:
        HelperProcess(process).hear()


def test_settings_are_read_without_jax() -> None:
    """`--help` and a wrong flag are answered at once, for every experiment on the bench."""
    modules = [f"experiments.{path.parent.name}.settings" for path in sorted(ROOT.glob("experiments/*/settings.py"))]
    assert {"experiments.sim_scale.settings", "experiments.transport_speed.settings"} <= set(modules)
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


def headline_of_run(out: Path, *command: str, timeout_s: float = 110) -> dict[str, Any]:
    """Run to the end; all files are there and no process is left."""
    run = start(out, *command)
    stdout, stderr = run.communicate(timeout=timeout_s)
    assert run.returncode == 0, stderr
    assert {"config.json", "metrics.jsonl", "report.md"} <= {path.name for path in out.iterdir()}
    assert processes_of(str(out)) == []
    headline: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    return headline


@pytest.mark.parametrize(("command", "ratios"), [(TRANSPORT, 7), (ALLREDUCE, 2)])
def test_tiny_run(tmp_path: Path, command: tuple[str, ...], ratios: int) -> None:
    """All ratios are there."""
    headline = headline_of_run(tmp_path / "run", *command, "--rounds", "1")
    names = [name for name in headline if f"{name}_min" in headline]
    assert len(names) == ratios
    for name in names:
        assert 0 < headline[f"{name}_min"] <= headline[name] <= headline[f"{name}_max"]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize(("command", "processes"), [(TRANSPORT, 1 + 1), ((*ALLREDUCE, "--peers", "2"), 1 + 4 * 2)])
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
