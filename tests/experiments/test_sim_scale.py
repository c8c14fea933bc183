"""The price of a simulated swarm: the tape, runs that repeat themselves, and a tiny run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import trio

from dmoe_jax import autodiff
from experiments.sim_scale.trainers import recording, replay

ROOT = Path(__file__).parents[2]


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
def test_tiny_run_reports_every_figure(tmp_path: Path) -> None:
    """Few trainers and peers: all figures and files are there."""
    out = tmp_path / "run"
    sizes = ("--trainers", "2", "--peers", "30", "--messages", "610")
    command = [sys.executable, "-m", "experiments.sim_scale", "--quick", "--json", "--out", str(out), *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    headline = json.loads(done.stdout.splitlines()[-1])
    assert headline["reproducible"] is True
    assert headline["messages"] == 600  # ten calls of each peer
    assert headline["messages_per_s"] > 0
    assert headline["trainers_ratio"] == pytest.approx(headline["trainers_wall_s"] / headline["trainers_compute_s"])
    # Two trainers, four samples, two experts each, in four layers: forward and backward from two experts on.
    assert 2 * 2 * 2 * 4 <= headline["trainers_calls"] <= 2 * 8 * 2 * 4
    assert {"config.json", "metrics.jsonl", "report.md"} == {path.name for path in out.iterdir()}
