"""A short run of what a remote layer costs, with a node in a process of its own."""

from pathlib import Path

import pytest

from experiments.bench import run_experiment
from experiments.layer_cost.measurement import EXPERIMENT
from experiments.layer_cost.settings import LayerCostSettings


@pytest.mark.slow
def test_each_way_makes_its_steps(tmp_path: Path) -> None:
    """Three ways with two widths; the headline has what the layer costs over the recording."""
    args = ["--quick", "--out", str(tmp_path / "run")]
    headline = run_experiment(LayerCostSettings, EXPERIMENT, name="layer_cost", uses_jax=False, args=args)
    for width in (64, 256):
        assert headline[f"local_ms_{width}"] > 0
        ratio = headline[f"in_jit_ms_{width}"] / headline[f"autodiff_ms_{width}"]
        assert headline[f"in_jit_over_autodiff_{width}"] == pytest.approx(ratio)
