"""The price of a simulated swarm: arithmetic, the tape, and that runs repeat themselves and end cleanly."""

import io
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import trio
from rich.console import Console

from dmoe_jax import autodiff
from dmoe_jax.runs.run_folder import RunFolder, read_metrics
from experiments.bench import Run
from experiments.sim_scale.measurement import EXPERIMENT, example_digests
from experiments.sim_scale.messages import measure_messages
from experiments.sim_scale.settings import ScaleSettings
from experiments.sim_scale.trainers import recording, replay

ROOT = Path(__file__).parents[2]
STEP = {"compute_s": 2.0, "virtual_s": 30.0, "calls": 7}
EXCHANGE = {"messages": 100, "dials": 16}


def run_with(folder: Path, *, walls_s: Sequence[float], exchanges_s: Sequence[float], digests: str) -> Run[Any]:
    """A run whose measurements took these seconds."""
    settings = ScaleSettings()
    run = Run(settings=settings, folder=RunFolder.create(folder, settings), console=Console(file=io.StringIO()))
    run.log("scenario", digests=list(digests))
    for wall_s in exchanges_s:
        run.log("messages", **EXCHANGE, messages_per_s=100 / wall_s)
    for wall_s in walls_s:
        run.log("step", **STEP, wall_s=wall_s, trainers_ratio=wall_s / 2.0)
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


def test_messages_are_counted_and_repeat_themselves() -> None:
    """405 messages of 20 peers are ten calls of each; two runs differ in their real time alone."""
    first, second = (measure_messages(peers=20, messages=405, seed=1) for _ in range(2))
    assert first["messages"] == 400
    assert 20 < first["dials"] <= 160  # at most one for each neighbour: later calls take the connection that is there
    assert 0.5 < first["virtual_s"] < 60.0
    assert first["messages_per_s"] == 400 / first["wall_s"]
    for name in ("messages", "dials", "virtual_s"):
        assert first[name] == second[name]
    other = measure_messages(peers=20, messages=405, seed=2)
    assert other["virtual_s"] != first["virtual_s"]


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


@pytest.mark.slow
def test_the_example_is_the_same_in_two_processes(tmp_path: Path) -> None:
    """With different hash seeds, through faults of all kinds; trainers on both sides of the ocean train, whatever
    happens."""
    first, second = example_digests(0, tmp_path, hash_seeds=(1, 2))
    assert first == second
    records = read_metrics(tmp_path / "scenario-1.jsonl")
    steps = [record for record in records if record["kind"] == "step" and math.isfinite(record["loss"])]
    for first_s, last_s in ((0, 20), (20, 30), (30, 40), (40, 50), (50, 60)):
        trainers = [step["trainer"] for step in steps if first_s <= step["virtual_s"] < last_s]
        assert min(map(trainers.count, range(4))) >= 3
    assert records[-1]["kind"] == "network"
    assert records[-1]["virtual_s"] == 60.0


@pytest.mark.slow
def test_tiny_run_reports_every_figure(tmp_path: Path) -> None:
    """Few trainers and peers: all figures and files are there, and the report says what the picture shows."""
    out = tmp_path / "run"
    sizes = ("--trainers", "2", "--peers", "30", "--messages", "600")
    command = [sys.executable, "-m", "experiments.sim_scale", "--quick", "--json", "--out", str(out), *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    headline = json.loads(done.stdout.splitlines()[-1])
    assert headline["reproducible"] is True
    assert headline["messages"] == 600
    assert headline["messages_per_s"] > 0
    assert headline["trainers_ratio"] == pytest.approx(headline["trainers_wall_s"] / headline["trainers_compute_s"])
    assert headline["trainers_virtual_s"] > 0.1
    # Two trainers, four samples, two experts each, in four layers: forward and backward from two experts on.
    assert 2 * 2 * 2 * 4 <= headline["trainers_calls"] <= 2 * 8 * 2 * 4
    expected = {"config.json", "metrics.jsonl", "figure.png", "report.md", "scenario-1.jsonl", "scenario-2.jsonl"}
    assert expected == {path.name for path in out.iterdir()}
    assert "![Time of a step over that of its XLA calls" in (out / "report.md").read_text()
