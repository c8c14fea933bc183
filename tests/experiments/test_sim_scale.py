"""The price of a simulated swarm: arithmetic, settings, the tape, and that runs repeat themselves and end cleanly."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import trio
from rich.console import Console

from dmoe_jax import autodiff
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.runs.run_folder import RunFolder, read_metrics
from experiments.bench import Run
from experiments.sim_scale import scenario
from experiments.sim_scale.__main__ import main
from experiments.sim_scale.measurement import EXPERIMENT, scenario_digests
from experiments.sim_scale.messages import measure_messages
from experiments.sim_scale.scenario import ScenarioSettings
from experiments.sim_scale.settings import ScaleSettings
from experiments.sim_scale.trainers import recording, replay

ROOT = Path(__file__).parents[2]
STEP = {"wall_s": 3.0, "compute_s": 2.0, "virtual_s": 30.0, "calls": 7}
EXCHANGE = {"messages": 100, "dials": 16}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"calls_in_a_row": 7}, "calls-in-a-row.*7"),
        ({"calls_in_a_row": 0}, "calls-in-a-row.*0"),
        ({"neighbours": 0}, "neighbours.*0"),
        ({"peers": 8}, "neighbours.*8"),
        ({"messages": 1999}, "messages.*1999"),
        ({"trainers": 0}, "trainers.*0"),
        ({"delay_s": 0.0}, "delay-s.*0"),
        ({"delay_s": float("nan")}, "delay-s.*nan"),
        ({"delay_s": 31.0}, "delay-s.*31"),
        ({"seed": -1}, "seed.*-1"),
    ],
)
def test_settings_are_checked(wrong: dict[str, Any], message: str) -> None:
    """Whatever would fail later fails at once, with its name and value."""
    with pytest.raises(ValueError, match=message):
        ScaleSettings(**wrong)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"seed": -1}])
def test_settings_of_the_scenario_are_checked(wrong: dict[str, Any], tmp_path: Path) -> None:
    """Likewise."""
    with pytest.raises(ValueError, match="steps >= 1 and seed >= 0"):
        ScenarioSettings(out=tmp_path / "metrics.jsonl", **wrong)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--neighbours", "1000"], 2, "neighbours"),
        (["--trainer", "1", "--fast"], 2, "--fast"),
        (["--out", "FULL"], 1, "not empty"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    status: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A wrong value, an unknown flag and a folder that is in use end the command before it starts."""
    (tmp_path / "something").touch()
    with pytest.raises(SystemExit) as exit_:
        main(args=[str(tmp_path) if word == "FULL" else word for word in arguments])
    captured = capsys.readouterr()
    assert exit_.value.code == status
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert not captured.out


def test_scenario_says_where_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, before it simulates anything."""
    monkeypatch.setattr(sys, "argv", ["scenario", "--out", str(tmp_path / "nowhere" / "metrics.jsonl")])
    with pytest.raises(SystemExit) as exit_:
        scenario.main()
    assert exit_.value.code == 1
    assert capsys.readouterr().err.startswith("scenario: error: cannot write")


def run_with(folder: Path, *, walls_s: Sequence[float], exchanges_s: Sequence[float], digests: str) -> Run[Any]:
    """A run whose measurements took these seconds."""
    settings = ScaleSettings()
    run = Run(settings=settings, folder=RunFolder.create(folder, settings), console=Console(file=io.StringIO()))
    run.log("scenario", digests=list(digests))
    for wall_s in exchanges_s:
        run.log("messages", **EXCHANGE, messages_per_s=100 / wall_s)
    for wall_s in walls_s:
        run.log("step", **(STEP | {"wall_s": wall_s}), trainers_ratio=wall_s / 2.0)
    return run


def test_headline_is_of_medians(tmp_path: Path) -> None:
    """Ratios 1.5, 4 and 3 have the median 3; 100 messages in 0.01, 0.1 and 0.02 s are 5000 a second in the middle."""
    run = run_with(tmp_path / "run", walls_s=(3.0, 8.0, 6.0), exchanges_s=(0.01, 0.1, 0.02), digests="aaab")
    result = EXPERIMENT.summarise(run)
    assert result is not None
    assert result.headline["trainers_ratio"] == 3.0
    assert result.headline["messages_per_s"] == pytest.approx(5000.0)
    assert result.headline["trainers_wall_s"] == 6.0
    assert result.headline["reproducible"] is False
    assert result.missed_bars == ["reproducible"]  # exactly the bar meets it


def test_a_run_that_ended_early_says_what_it_has(tmp_path: Path) -> None:
    """One measurement of each is enough for a report; without a step there is none."""
    run = run_with(tmp_path / "one", walls_s=(3.0,), exchanges_s=(0.01,), digests="aa")
    result = EXPERIMENT.summarise(run)
    assert result is not None
    assert result.missed_bars == []
    assert EXPERIMENT.summarise(run_with(tmp_path / "none", walls_s=(), exchanges_s=(0.01,), digests="aa")) is None


def test_messages_are_counted_and_repeat_themselves() -> None:
    """405 messages of 20 peers are ten calls of each; two runs differ in their real time alone."""
    first, second = (measure_messages(peers=20, messages=405, neighbours=3, seed=1) for _ in range(2))
    assert first["messages"] == 400
    assert 20 < first["dials"] <= 60  # at most one for each neighbour: later calls take the connection that is there
    assert first["frames"] >= first["messages"] + first["dials"]
    assert 0.5 < first["virtual_s"] < 60.0
    assert first["messages_per_s"] == 400 / first["wall_s"]
    for name in ("messages", "frames", "dials", "virtual_s"):
        assert first[name] == second[name]
    other = measure_messages(peers=20, messages=405, neighbours=3, seed=2)
    assert other["virtual_s"] != first["virtual_s"]


def test_xla_calls_are_noted_and_made_again_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of segments and experts within the block, with their arguments; afterwards everything is as it was."""
    made: list[tuple[Any, ...]] = []

    def noting(name: str) -> Any:
        def call(*args: Any) -> str:
            made.append((name, *args))
            return name

        return call

    def programs_of(function: str) -> Any:
        return SimpleNamespace(**{name: noting(name) for name in ("run", "run_and_keep", "pull_back")})

    places = [
        (autodiff, "_add"),
        (autodiff, "_add_in_place"),
        (ExpertBackend, "forward"),
        (ExpertBackend, "backward"),
    ]
    for owner, name in places:
        monkeypatch.setattr(owner, name, noting(name))
    places.append((autodiff, "_programs_of"))
    monkeypatch.setattr(autodiff, "_programs_of", programs_of)
    originals = [getattr(owner, name) for owner, name in places]
    expert = object.__new__(ExpertBackend)
    calls: list[Any] = []
    autodiff._programs_of("segment").run("before")
    with recording(calls):
        programs = autodiff._programs_of("segment")
        assert programs.run(1) == "run"
        assert expert.forward([np.ones(2)]) == "forward"
        expert.backward([], 2)
        programs.run_and_keep((), 3)
        programs.pull_back([], [None])
        autodiff._add(2, 3)
        autodiff._add_in_place(4, 5)
    autodiff._programs_of("segment").run("after")
    assert [getattr(owner, name) for owner, name in places] == originals
    recorded = made[1:-1]
    names = ["run", "forward", "backward", "run_and_keep", "pull_back", "_add", "_add_in_place"]
    assert [name for name, *_ in recorded] == names
    made.clear()
    assert replay(calls) >= 0.0
    assert made == recorded


def test_what_a_call_was_given_for_good_is_there_when_it_is_made_again() -> None:
    """A gradient that the sum overwrites."""

    def scaled(scale: Any, x: Any) -> Any:
        return scale * x

    run = autodiff.Recording()
    scale, x = autodiff.Value(jnp.ones(3)), autodiff.Value(jnp.arange(3.0))
    calls: list[Any] = []

    async def step() -> None:
        with recording(calls):
            loss = run(jnp.sum, run(scaled, scale, run(scaled, scale, x)))  # two gradients for one value
            await run.backward(loss)

    trio.run(step)
    assert len(calls) == 7
    assert replay(calls) > 0.0
    assert replay(calls) > 0.0


def test_failed_scenario_is_said_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line of the process that failed; the other one, which would take for ever, is ended."""
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\necho $$ >> {tmp_path}/pids\n"
        '[ "$PYTHONHASHSEED" = 1 ] && { echo first >&2; echo the reason >&2; exit 3; }\nexec sleep 1000\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RuntimeError, match="the scenario failed: the reason"):
        scenario_digests(0, tmp_path, hash_seeds=range(1, 3))
    for pid in (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []:
        assert not Path("/proc", pid).exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_scenario_is_the_same_in_two_processes(tmp_path: Path) -> None:
    """With different hash seeds, through crash, partition and faults of all kinds; another seed is another story."""
    settings = ((0, "1"), (0, "2"), (1, "1"))
    files = [tmp_path / f"{seed}-{hash_seed}.jsonl" for seed, hash_seed in settings]
    with ExitStack() as stack:
        running = []
        for (seed, hash_seed), file in zip(settings, files, strict=True):
            process = subprocess.Popen(
                [sys.executable, "-m", scenario.__name__, "--out", str(file), "--seed", str(seed), "--steps", "30"],
                cwd=ROOT,
                env={**os.environ, "PYTHONHASHSEED": hash_seed},
                stderr=subprocess.DEVNULL,
            )
            running.append(stack.enter_context(process))
            stack.callback(process.kill)
        assert [process.wait(timeout=290) for process in running] == [0, 0, 0]
    first, second, other = (file.read_bytes() for file in files)
    assert first == second
    assert first != other
    records = read_metrics(files[0])
    assert [record["step"] for record in records if record["kind"] == "step"] == list(range(1, 31))
    assert sum(records[-1]["failures"].values()) > 0
    assert records[-1]["virtual_s"] > 9.0  # past the first half of the schedule


@contextmanager
def started(out: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A run of the command in a process of its own, ended with the block whatever happens."""
    with subprocess.Popen(
        [sys.executable, "-m", "experiments.sim_scale", "--quick", "--json", "--out", str(out), *arguments],
        cwd=ROOT,
        env={**os.environ, "TEST_MARKER": str(out)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


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


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_tiny_run_reports_every_figure(tmp_path: Path) -> None:
    """Few trainers and peers: all figures and files are there, and the report says what the picture shows."""
    out = tmp_path / "run"
    sizes = ("--trainers", "2", "--calls-in-a-row", "2", "--peers", "30", "--messages", "600", "--neighbours", "4")
    with started(out, *sizes) as measurement:
        stdout, stderr = measurement.communicate(timeout=190)
    assert measurement.returncode == 0, stderr
    headline = json.loads(stdout.splitlines()[-1])
    assert headline["reproducible"] is True
    assert headline["messages"] == 600
    assert headline["messages_per_s"] > 0
    assert headline["trainers_ratio"] == pytest.approx(headline["trainers_wall_s"] / headline["trainers_compute_s"])
    assert headline["trainers_virtual_s"] > 0.1
    # Two trainers, four samples, two experts each: from two experts to eight are called, forward and backward.
    assert 2 * 2 * 2 <= headline["trainers_calls"] <= 2 * 8 * 2
    expected = {"config.json", "metrics.jsonl", "figure.png", "report.md", "scenario-1.jsonl", "scenario-2.jsonl"}
    assert expected == {path.name for path in out.iterdir()}
    assert "![Time of a step beside its XLA calls" in (out / "report.md").read_text()
    assert processes_of(str(out)) == []


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["a swarm to which", "messages between"])
def test_interrupted_run_leaves_no_process(stage: str, tmp_path: Path) -> None:
    """Ctrl-C ends the processes of the scenario, and a simulation in this one, with one line."""
    out = tmp_path / "run"
    with started(out, "--messages", "1000000") as measurement:
        assert measurement.stderr is not None
        for line in measurement.stderr:
            if stage in line:
                break
        time.sleep(2.0)  # real time: well into it
        assert len(processes_of(str(out))) == (3 if stage.startswith("a swarm") else 1)
        measurement.send_signal(signal.SIGINT)
        _, stderr = measurement.communicate(timeout=30)
    assert measurement.returncode == 130
    assert stderr == "sim_scale: interrupted\n"
    assert processes_of(str(out)) == []
