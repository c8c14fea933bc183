"""A tiny run of the overlap measurement: real nodes, real TCP, every call late."""

from pathlib import Path

import pytest

from experiments.bench import run_experiment
from experiments.overlap.measurement import EXPERIMENT
from experiments.overlap.settings import OverlapSettings


@pytest.mark.slow
def test_three_trainers_wait_at_the_same_time(tmp_path: Path) -> None:
    """A round waits at least once for each layer there and back, and far less than three steps one after the other."""
    args = ["--trainers", "3", "--delay-s", "1", "--steps", "2", "--out", str(tmp_path / "run")]
    headline = run_experiment(OverlapSettings, EXPERIMENT, name="overlap", uses_jax=False, args=args)
    assert headline["critical_path_s"] == 4.0
    assert headline["rounds"] == 2
    assert 1.0 <= headline["overlap_ratio"] < 2.5
