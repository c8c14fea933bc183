"""The arithmetic of `experiments.node_speed`, and tiny runs of it from end to end."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from dmoe_jax.runs.run_folder import RunFolder
from experiments.bench import Run
from experiments.node_speed.caller import Tally
from experiments.node_speed.cases import Case, neighbours, rate_between
from experiments.node_speed.demonstration import slice_of_metrics
from experiments.node_speed.expert import hivemind_ffn
from experiments.node_speed.measurement import (
    DEVICE_RATIOS,
    HIVEMIND_RATIOS,
    MEMORY,
    SAVING,
    _node_around_bare,
    memory_record,
    saving_record,
    summarise,
)
from experiments.node_speed.settings import Part, SpeedSettings
from experiments.node_speed.turns import served_record
from experiments.rounds import SLICE
from tests.experiments.test_helper_processes import headline_of_run, processes_of, start

TINY = ("node_speed", "--slice-s", "0.3", "--load-s", "0.5", "--large-mb", "0.5", "--processes", "1")
NODES: tuple[Part, ...] = ("calls", "memory", "saving")


def case_of(**fields: Any) -> Case:
    return Case(**({"name": "case", "experts": 2, "d_model": 8, "rows": 4, "callers": 3} | fields))


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


def test_rate_at_a_mean_between_two_batches() -> None:
    """Calls of 3 rows take 1 s and of 4 rows 3 s: of 3.25 rows 1.5 s, hence 3.25 / 1.5 samples a second."""
    assert neighbours(3.25) == (3, 4)
    assert rate_between(3.25, (1.0, 3.0)) == pytest.approx(3.25 / 1.5)
    assert neighbours(4.0) == (4, 4)
    assert rate_between(4.0, (2.0, 2.0)) == 2.0
    with pytest.raises(ValueError, match=r"at least one row, got a mean of 0\.5"):
        neighbours(0.5)


def test_tally_counts_what_ends_in_the_slice() -> None:
    """The slice counts two of four layer calls, of 2 + 6 and 4 + 1 s; the first ends before it, the last at its end."""
    tally = Tally(begin=10.0, end=20.0)
    for times in ((1.0, 2.0, 9.9), (4.0, 6.0, 12.0), (14.0, 18.0, 19.0), (15.0, 18.0, 20.0)):
        tally.note(8, times)
    assert tally.summary() == {
        "samples": 16,
        "layer_calls": 2,
        "forward_s": 3.0,
        "longest_forward_s": 4.0,
        "backward_s": 3.5,
        "longest_backward_s": 6.0,
    }
    assert Tally(begin=0.0, end=1.0).summary() == {"samples": 0, "layer_calls": 0}


def counters(**values: float) -> dict[str, float]:
    return {"rows": 0, "batches": 0, "busy_s": 0.0, "cpu_s": 0.0, "compilations": 0} | values


def test_record_of_a_slice_of_the_node() -> None:
    """30 of the node's rows in 12 batches within the slice are 2.5 a batch; samples are of all processes."""
    before = counters(rows=10, batches=4, busy_s=1.0, cpu_s=5.0, compilations=7)
    after = counters(rows=40, batches=16, busy_s=2.0, cpu_s=8.0, compilations=8)
    times = {"forward_s": 1.0, "longest_forward_s": 2.0, "backward_s": 1.5, "longest_backward_s": 4.0}
    answers: list[dict[str, Any]] = [
        {"samples": 6, "layer_calls": 3, **times},
        {"samples": 10, "layer_calls": 5, **times, "longest_forward_s": 3.0},
        {"samples": 0, "layer_calls": 0},
    ]
    record = served_record(before, after, answers, 2.0)
    assert record == {
        "samples_per_s": 8.0,
        "layer_calls": 8,
        "busy_share": 0.5,
        "cpu_share": 1.5,
        "samples_per_cpu_s": 8.0 / 1.5,
        "compilations": 1,
        "mean_batch": 2.5,
        **times,
        "longest_forward_s": 3.0,
    }
    nothing = served_record(before, before, answers[2:], 2.0)
    assert not {"mean_batch", "samples_per_cpu_s"} & set(nothing)


class Halves:
    """A node that makes 10 samples a second by half a processor, then 20 by one."""

    def __init__(self) -> None:
        self.case = case_of()
        self.halves = iter([(10.0, 0.5, 2.0), (20.0, 1.0, 3.0)])

    def serve(self, slice_s: float) -> dict[str, float]:
        assert slice_s == 1.5
        return dict(zip(("samples_per_s", "cpu_share", "mean_batch"), next(self.halves), strict=True))

    def bare(self, rows: float, for_s: float) -> dict[str, float]:
        return {"rows": rows, "samples_per_s": for_s}


def test_bare_calls_between_two_halves() -> None:
    """They have the first half's mean batch; rate and processor time are of both."""
    node = Halves()
    name = node.case.name
    assert _node_around_bare(node, 3.0) == {  # type: ignore[arg-type]
        name: {"samples_per_s": 15.0, "cpu_share": 0.75, "mean_batch": 2.0, "samples_per_cpu_s": 20.0},
        f"{name}_bare": {"rows": 2.0, "samples_per_s": 3.0},
    }


def test_memory_is_judged_beyond_imports() -> None:
    """State of 100 MB may have 1.3 * 100 + 150 = 280 MB beyond imports; here it has 140 MB, and had 420 MB."""
    assert memory_record(200_000_000, 100_000_000, (340_000_000, 620_000_000)) == {
        "beyond_bytes": 140_000_000,
        "ratio": pytest.approx(0.5),
        "peak_bytes": 420_000_000,
        "peak_ratio": pytest.approx(1.5),
    }
    assert memory_record(None, 1, (2, 3)) == {}
    assert memory_record(1, 1, None) == {}


def test_wait_during_a_save() -> None:
    """Medians are 1 s forward, 3 s backward: a forward of 4 s waited 3 s, a backward of 5 s only 2 s; a backward by
    itself takes 2 s. Without saves the longest were 1.5 and 3.25 s."""
    quiet = {"forward_s": 1.0, "backward_s": 3.0, "longest_forward_s": 1.5, "longest_backward_s": 3.25}
    during = [{"longest_forward_s": 4.0, "longest_backward_s": 3.5}, {}, {"longest_backward_s": 5.0}]
    record = saving_record(quiet, during, 2.0)
    assert record == {"backward_s": 2.0, "wait_s": 3.0, "ratio": 1.5, "quiet_ratio": 0.25, "slices": 3}
    assert saving_record(quiet, [{"longest_forward_s": 0.5}], 2.0)["wait_s"] == 0.0


@pytest.fixture
def run(tmp_path: Path) -> Run[SpeedSettings]:
    """A run without records."""
    settings = SpeedSettings(parts=NODES)
    return Run(settings=settings, folder=RunFolder.create(tmp_path / "run", settings), console=Console(quiet=True))


RATES: Mapping[str, float] = {
    "large_requests": 90.0,
    "large_requests_bare": 100.0,
    "many_experts": 50.0,
    "many_experts_bare": 100.0,
    "single_rows": 60.0,
    "single_rows_bare": 100.0,
    "single_rows_unbatched": 10.0,
}


def log_rates(run: Run[SpeedSettings], rates: Mapping[str, float]) -> None:
    for name, rate in rates.items():
        run.log(SLICE, round=0, name=name, samples_per_s=1.0)
        run.log(SLICE, round=1, name=name, samples_per_s=rate)


def test_bars_without_hivemind(run: Run[SpeedSettings]) -> None:
    """Its figures are null and not judged; what else was not measured misses its bar. 0.5 is less than 0.6."""
    assert summarise(run) is None
    log_rates(run, RATES)
    result = summarise(run)
    assert result is not None
    assert {ratio.name: result.figures[ratio.name] for ratio in DEVICE_RATIOS} == {
        "device_ratio_large_requests": 0.9,
        "device_ratio_many_experts": 0.5,
        "device_ratio_single_rows": 0.6,
        "batching_gain": 6.0,
    }
    assert all(result.figures[ratio.name] is None for ratio in HIVEMIND_RATIOS)
    missing = ["memory_ratio", "compilations_while_serving", "save_wait_ratio"]
    assert result.missed_bars == ["device_ratio_many_experts", *missing]


def test_bars_with_hivemind(run: Run[SpeedSettings]) -> None:
    """The worst node counts for memory, the compilations of both; 90 / 20 is less than 5."""
    others = {"large_requests_hivemind": 20.0, "many_experts_hivemind": 2.0, "wide_expert_hivemind": 1.0}
    ours = {"large_requests": 90.0, "many_experts": 50.0, "wide_expert": 10.0}
    log_rates(run, {**RATES, **others, **{f"{name}_beside_hivemind": rate for name, rate in ours.items()}})
    for name, ratio, compilations in (("memory_few", 0.9, 0), ("memory_wide", 1.1, 2)):
        sizes = {"state_bytes": 10**6, "beyond_bytes": 2 * 10**6, "peak_ratio": 1.2}
        run.log(MEMORY, name=name, ratio=ratio, compilations=compilations, **sizes)
    run.log(SAVING, ratio=0.5, quiet_ratio=0.25, backward_s=0.1)
    result = summarise(run)
    assert result is not None
    assert result.figures["hivemind_ratio_large_requests"] == 4.5
    assert result.figures["hivemind_ratio_many_experts"] == 25.0
    assert result.figures["hivemind_ratio_wide_expert"] == 10.0
    assert result.figures["memory_ratio"] == 1.1
    assert result.figures["memory_wide_mb"] == 2.0
    assert result.figures["compilations_while_serving"] == 2
    assert result.figures["save_wait_ratio"] == 0.5
    missed = ["device_ratio_many_experts", "hivemind_ratio_large_requests"]
    assert result.missed_bars == [*missed, "memory_ratio", "compilations_while_serving"]


def test_steps_of_the_second_half_count() -> None:
    """Steps end at 1, 2, 10, 11, 12 and 14 s: after the fourth there are two more, in 3 s."""
    metrics: list[dict[str, Any]] = [
        {"kind": "train", "time_s": time_s} for time_s in (1.0, 2.0, 10.0, 11.0, 12.0, 14.0)
    ]
    metrics += [{"kind": "calls", "failed": 1}, {"kind": "calls", "failed": 3}]
    assert slice_of_metrics(metrics) == {"steps_per_s": pytest.approx(2 / 3), "failed": 3}


@pytest.mark.slow
def test_tiny_run_of_node_speed(tmp_path: Path) -> None:
    """All figures are there but those beside hivemind, and nothing was compiled while the nodes served."""
    headline = headline_of_run(tmp_path / "run", *TINY, "--parts", *NODES, "--rounds", "1", limit_s=550)
    for ratio in DEVICE_RATIOS:
        assert 0 < headline[f"{ratio.name}_min"] <= headline[ratio.name] <= headline[f"{ratio.name}_max"]
    assert all(headline[ratio.name] is None for ratio in HIVEMIND_RATIOS)
    assert not {ratio.name for ratio in HIVEMIND_RATIOS} & set(headline["missed_bars"])
    assert headline["single_rows_unbatched_mean_batch"] == 1
    assert headline["single_rows_mean_batch"] >= 1
    assert headline["compilations_while_serving"] == 0
    assert headline["memory_ratio"] > 0
    assert headline["memory_wide_experts_mb"] > headline["memory_wide_experts_state_mb"]
    assert headline["save_wait_ratio"] >= 0


def node_of(marker: str) -> int:
    """The node among the processes with this marker."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_of(marker)}
    (node,) = [pid for pid, command in commands.items() if b"experiments.node_speed.node" in command]
    return node


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whom", "how", "status"),
    [
        ("measurement", signal.SIGTERM, 130),
        ("measurement", signal.SIGKILL, -signal.SIGKILL),
        ("node", signal.SIGKILL, 1),
    ],
)
def test_interrupted_run_leaves_no_process(tmp_path: Path, whom: str, how: signal.Signals, status: int) -> None:
    """Whoever is ended, all others end; a node's death is told in a line."""
    out = tmp_path / "run"
    process = start(out, *TINY, "--rounds", "9999")
    assert process.stderr is not None
    for line in process.stderr:
        if "round 1" in line:
            break
    assert len(processes_of(str(out))) == 3  # the measurement, a node, callers
    os.kill(process.pid if whom == "measurement" else node_of(str(out)), how)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == status, stderr
    if whom == "node":
        assert stderr.splitlines()[-1].startswith("node_speed: error: a helper process ended too early: it was killed")
    assert processes_of(str(out)) == []
