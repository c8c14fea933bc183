"""The arithmetic of `experiments.node_speed`, and a short run of it from end to end."""

from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from dmoe_jax.runs.run_folder import RunFolder
from experiments.bench import Run
from experiments.node_speed.measurement import MEMORY, NodeAndCallers, hivemind_python, summarise
from experiments.node_speed.node import hivemind_ffn
from experiments.node_speed.settings import SINGLE_ROWS, SpeedSettings
from experiments.rounds import SLICE
from tests.experiments.test_helper_processes import headline_of_run


@pytest.mark.slow
def test_expert_is_hiveminds_ffn() -> None:
    """Against the formula in float64: LayerNorm(x + W2 gelu(W1 x + b1) + b2), with tanh in the GELU."""
    expert = hivemind_ffn(8)
    params = expert.init(jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(3, 8))
    first, second = (jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params[f"Dense_{i}"]) for i in (0, 1))
    hidden = x @ first["kernel"] + first["bias"]
    hidden = 0.5 * hidden * (1 + np.tanh(0.7978845608 * hidden * (1 + 0.044715 * hidden**2)))
    out = x + hidden @ second["kernel"] + second["bias"]
    out = (out - out.mean(axis=1, keepdims=True)) / np.sqrt(out.var(axis=1, keepdims=True) + 1e-12)
    np.testing.assert_allclose(expert.apply(params, x.astype(np.float32)), out, rtol=1e-4, atol=1e-5)


class Node:
    """A node on which bare calls of 2 rows take 1 s, and of 3 rows 3 s."""

    def ask(self, *, do: str, rows: int, for_s: float) -> dict[str, float]:
        assert (do, for_s) == ("bare", 1.5)
        return {"call_s": {2: 1.0, 3: 3.0}[rows]}


def test_bare_calls_between_two_numbers_of_rows() -> None:
    """Those of 2.5 rows take 2 s, so that there are 1.25 samples a second."""
    own = NodeAndCallers(case=SINGLE_ROWS, node=Node(), callers=())  # type: ignore[arg-type]
    assert own.bare(2.5, 3.0) == {"rows": 2.5, "samples_per_s": pytest.approx(1.25)}


@pytest.mark.parametrize("status", [0, 1])
def test_an_interpreter_without_hivemind_is_refused_at_once(status: int, tmp_path: Path) -> None:
    """Before the first round, which would be lost; one that has it is taken."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexit {status}\n")
    python.chmod(0o755)
    settings = SpeedSettings(hivemind=python)
    if status:
        with pytest.raises(ValueError, match="--hivemind must be a Python interpreter with hivemind and torch, got "):
            hivemind_python(settings)
    else:
        assert str(hivemind_python(settings)) == str(python)


def test_bars_without_and_with_hivemind(tmp_path: Path) -> None:
    """Without it its figures are null and not judged; what else was not measured misses its bar: 0.5 is less than 0.6.
    With it 50 / 2 is more than 15; the worst node counts for memory, the compilations of both."""
    settings = SpeedSettings(parts=("calls", "memory"))
    run = Run(settings=settings, folder=RunFolder.create(tmp_path / "run", settings), console=Console(quiet=True))
    assert summarise(run) is None
    for name, rate in (("many_experts", 50.0), ("many_experts_bare", 100.0)):
        run.log(SLICE, round=1, name=name, samples_per_s=rate)
    result = summarise(run)
    assert result is not None
    assert result.figures["device_ratio_many_experts"] == 0.5
    assert result.figures["hivemind_ratio_many_experts"] is None
    missed = ["device_ratio_large_requests", "device_ratio_many_experts", "device_ratio_single_rows", "batching_gain"]
    assert result.missed_bars == [*missed, "memory_ratio", "compilations_while_serving"]

    for name, rate in (("many_experts_beside_hivemind", 50.0), ("many_experts_hivemind", 2.0)):
        run.log(SLICE, round=1, name=name, samples_per_s=rate)
    for ratio, compilations in ((0.9, 0), (1.1, 2)):
        run.log(MEMORY, ratio=ratio, compilations=compilations)
    result = summarise(run)
    assert result is not None
    assert result.figures["hivemind_ratio_many_experts"] == 25.0
    assert (result.figures["memory_ratio"], result.figures["compilations_while_serving"]) == (1.1, 2)
    missed += ["hivemind_ratio_large_requests", "hivemind_ratio_wide_expert"]
    assert result.missed_bars == [*missed, "memory_ratio", "compilations_while_serving"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_short_run_of_node_speed(tmp_path: Path) -> None:
    """The figures of the node and bare calls are there; nothing was compiled under load, and no process is left."""
    command = ("node_speed", "--quick", "--parts", "calls", "memory", "--rounds", "1")
    headline = headline_of_run(tmp_path / "run", *command, timeout_s=1150)
    for name in ("device_ratio_large_requests", "device_ratio_many_experts", "device_ratio_single_rows"):
        assert headline[name] > 0
    assert headline["single_rows_unbatched_mean_batch"] == 1
    assert headline["single_rows_mean_batch"] >= 1
    assert headline["compilations_while_serving"] == 0
    assert headline["memory_ratio"] > 0
