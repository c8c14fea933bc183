"""A tiny run of the overlap measurement: real nodes, real TCP, every call late."""

import json
from pathlib import Path

import pytest

from experiments.bench import run_experiment
from experiments.overlap.measurement import EXPERIMENT
from experiments.overlap.settings import OverlapSettings


@pytest.mark.slow
def test_three_trainers_wait_at_the_same_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A round waits at least once for each layer there and back, and far less than three steps one after the other."""
    flags = ["--trainers", "3", "--num-layers", "1", "--delay-s", "2", "--steps", "2", "--json"]
    headline = run_experiment(
        OverlapSettings, EXPERIMENT, name="overlap", uses_jax=False, args=[*flags, "--out", str(tmp_path / "run")]
    )
    assert json.loads(capsys.readouterr().out) == headline
    assert headline["critical_path_s"] == 4.0
    assert headline["rounds"] == 2
    assert 1.0 <= headline["overlap_ratio"] < 2.5
    assert (tmp_path / "run" / "figure.png").exists()
