"""The arithmetic of `experiments.node_speed`, and short runs of it from end to end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from dmoe_jax.runs.run_folder import RunFolder
from experiments.bench import Run
from experiments.node_speed import measurement
from experiments.node_speed.measurement import MEMORY, NodeAndCallers, node_around_bare, steps_per_s, summarise
from experiments.node_speed.node import hivemind_ffn, memory_ratio
from experiments.node_speed.settings import SINGLE_ROWS, SpeedSettings
from experiments.rounds import SLICE
from tests.experiments.test_helper_processes import processes_of, start

DEVICE = ("device_ratio_large_requests", "device_ratio_many_experts", "device_ratio_single_rows", "batching_gain")


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
    assert hivemind_ffn(8) is expert


class Node:
    """A node that has done 30 more rows in 12 more batches whenever it is asked; bare calls of 2 rows take 1 s there,
    and of 3 rows 3 s."""

    count = 0

    def ask(self, *, do: str, rows: int = 0, for_s: float = 0.0) -> dict[str, float]:
        if do == "bare":
            return {"call_s": {2: 1.0, 3: 3.0}[rows]}
        self.count += 1
        return {"rows": 10 + 30 * self.count, "batches": 4 + 12 * self.count}


def test_bare_calls_between_two_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of 1.5 s have 15 and 30 samples. Bare calls have the first half's mean batch, 30 rows in 12 batches; those
    of 2.5 rows take 2 s, so that there are 1.25 samples a second."""
    samples = {1: 15, 3: 30}

    def slice_of(helpers: object, slice_s: float, *, at_ends: Callable[[], object]) -> int:
        assert slice_s == 1.5
        at_ends()
        ended = samples[node.count]
        at_ends()
        return ended

    monkeypatch.setattr(measurement, "take_slice", slice_of)
    node = Node()
    own = NodeAndCallers(case=SINGLE_ROWS, node=node, callers=())  # type: ignore[arg-type]
    assert node_around_bare(own, 3.0) == {
        "single_rows": {"samples_per_s": 15.0, "mean_batch": 2.5},
        "single_rows_bare": {"samples_per_s": pytest.approx(1.25), "rows": 2.5},
    }


def test_memory_is_judged_beyond_imports() -> None:
    """State of 100 MB may have 1.3 * 100 + 150 = 280 MB."""
    assert memory_ratio(140_000_000, 100_000_000) == pytest.approx(0.5)


def test_steps_of_the_second_half_count() -> None:
    """Steps end at 1, 2, 10, 11, 12 and 14 s: after the fourth there are two more, in 3 s."""
    metrics = [{"kind": "train", "time_s": time_s} for time_s in (1.0, 2.0, 10.0, 11.0, 12.0, 14.0)]
    assert steps_per_s([*metrics, {"kind": "calls"}]) == pytest.approx(2 / 3)


ALONE = {
    "large_requests": 90.0,
    "large_requests_bare": 100.0,
    "many_experts": 50.0,
    "many_experts_bare": 100.0,
    "single_rows": 60.0,
    "single_rows_bare": 100.0,
    "single_rows_unbatched": 10.0,
}
BESIDE_HIVEMIND = {"large_requests": (90.0, 20.0), "many_experts": (50.0, 2.0), "wide_expert": (10.0, 1.0)}


def test_bars_without_and_with_hivemind(tmp_path: Path) -> None:
    """Without it its figures are null and not judged; what else was not measured misses its bar: 0.5 is less than 0.6.
    With it 90 / 20 is less than 5; the worst node counts for memory, the compilations of both."""
    settings = SpeedSettings(parts=("calls", "memory"))
    run = Run(settings=settings, folder=RunFolder.create(tmp_path / "run", settings), console=Console(quiet=True))

    def log(name: str, rate: float) -> None:
        for number in (0, 1):  # the first warms up
            run.log(SLICE, round=number, name=name, samples_per_s=rate if number else 1.0)

    assert summarise(run) is None
    for name, rate in ALONE.items():
        log(name, rate)
    result = summarise(run)
    assert result is not None
    assert [result.figures[name] for name in DEVICE] == [0.9, 0.5, 0.6, 6.0]
    assert all(result.figures[f"hivemind_ratio_{name}"] is None for name in BESIDE_HIVEMIND)
    assert result.missed_bars == ["device_ratio_many_experts", "memory_ratio", "compilations_while_serving"]

    for name, (ours, theirs) in BESIDE_HIVEMIND.items():
        log(f"{name}_beside_hivemind", ours)
        log(f"{name}_hivemind", theirs)
    for ratio, compilations in ((0.9, 0), (1.1, 2)):
        run.log(MEMORY, ratio=ratio, compilations=compilations)
    result = summarise(run)
    assert result is not None
    assert [result.figures[f"hivemind_ratio_{name}"] for name in BESIDE_HIVEMIND] == [4.5, 25.0, 10.0]
    assert (result.figures["memory_ratio"], result.figures["compilations_while_serving"]) == (1.1, 2)
    missed = ["device_ratio_many_experts", "hivemind_ratio_large_requests"]
    assert result.missed_bars == [*missed, "memory_ratio", "compilations_while_serving"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_short_run_of_node_speed(tmp_path: Path) -> None:
    """The figures of the node and bare calls are there; nothing was compiled under load, and no process is left."""
    out = tmp_path / "run"
    process = start(out, "node_speed", "--quick", "--parts", "calls", "memory", "--rounds", "1")
    stdout, stderr = process.communicate(timeout=1150)
    assert process.returncode == 0, stderr
    assert processes_of(str(out)) == []
    headline: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    for name in DEVICE:
        assert 0 < headline[f"{name}_min"] <= headline[name] <= headline[f"{name}_max"]
    assert headline["single_rows_unbatched_mean_batch"] == 1
    assert headline["single_rows_mean_batch"] >= 1
    assert headline["compilations_while_serving"] == 0
    assert headline["memory_ratio"] > 0
