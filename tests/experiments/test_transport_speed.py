"""The transport measurement: its arithmetic, and that it ends with all its figures and no process left."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.transport_speed.ratios import FIGURES, Figure, Slice, headline_of, percentile, ratios_of_rounds
from experiments.transport_speed.stopwatch import Pace

FIGURE = Figure(name="speed", quantity="calls_per_s", ours="ours", baseline="theirs", bar=0.5)


def record(number: int, name: str, value: float) -> dict[str, Any]:
    """A slice of which all quantities are the same."""
    quantities = ("gigabytes_per_s", "cpu_s_per_gigabyte", "calls_per_s", "p99_ms")
    return {"kind": "slice", "round": number, "name": name, **dict.fromkeys(quantities, value)}


def test_percentile_is_the_nearest_rank() -> None:
    """Of 1 to 200, 198 are at most 198; a single sample is every percentile; the order does not matter."""
    samples = [float(value) for value in range(200, 0, -1)]
    assert percentile(samples, 99) == 198.0
    assert percentile(samples, 50) == 100.0
    assert percentile(samples, 100) == 200.0
    assert percentile([7.0], 1) == 7.0


@pytest.mark.parametrize(("samples", "percent"), [([], 50.0), ([1.0], 0.0), ([1.0], 100.5)])
def test_percentile_of_nothing_is_refused(samples: list[float], percent: float) -> None:
    """There is no percentile of no samples, and none beyond 100."""
    with pytest.raises(ValueError, match="percentage"):
        percentile(samples, percent)


def test_ratios_are_of_pairs_of_one_round() -> None:
    """Rounds are divided one by one, whatever their order; the warm-up and a round with one side only do not count."""
    slices = [
        record(0, "ours", 99.0),
        record(0, "theirs", 1.0),
        record(1, "ours", 3.0),
        record(1, "theirs", 10.0),
        record(2, "theirs", 4.0),
        record(2, "ours", 2.0),
        record(3, "ours", 5.0),
        record(2, "something_else", 8.0),
    ]
    assert ratios_of_rounds(FIGURE, slices) == [0.3, 0.5]


def test_headline_is_the_median_of_ratios_not_the_ratio_of_medians() -> None:
    """Ours 1, 20, 300 over 10, 100, 1000: ratios 0.1, 0.2, 0.3; the warm-up would have been the greatest."""
    names = {name for figure in FIGURES for name in (figure.ours, figure.baseline)}
    baselines = {figure.baseline for figure in FIGURES}
    slices = [
        record(number, name, theirs if name in baselines else ours)
        for number, (ours, theirs) in enumerate([(9.0, 1.0), (1.0, 10.0), (20.0, 100.0), (300.0, 1000.0)])
        for name in sorted(names)
    ]
    headline = headline_of(slices)
    assert headline["tls_ratio"] == 0.2
    assert (headline["tls_ratio_min"], headline["tls_ratio_max"]) == (0.1, 0.3)
    assert headline["rpc_tls_send_gigabytes_per_s"] == 20.0
    assert headline["blocking_tls_send_gigabytes_per_s"] == 100.0
    # An upper bound is met from below.
    assert headline["missed_bars"] == [figure.name for figure in FIGURES if not figure.is_upper_bound]


def test_a_bar_is_met_from_its_side() -> None:
    """Exactly the bar meets it, whichever side is the good one."""
    latency = Figure(name="p99", quantity="p99_ms", ours="ours", baseline="theirs", bar=20.0, is_upper_bound=True)
    assert FIGURE.is_met_by(0.5)
    assert not FIGURE.is_met_by(0.49)
    assert latency.is_met_by(20.0)
    assert not latency.is_met_by(20.1)


def test_record_of_a_slice() -> None:
    """4 transfers of half a gigabyte in 2 s are 1 GB/s; 3 s of processor time of both ends are 1.5 s for each GB."""
    transfers = Slice(calls=4, nbytes=2 * 10**9, wall_s=2.0, client_cpu_s=1.0, server_cpu_s=2.0)
    assert transfers.record() == {
        "calls": 4,
        "wall_s": 2.0,
        "calls_per_s": 2.0,
        "client_cpu_s": 1.0,
        "server_cpu_s": 2.0,
        "gigabytes_per_s": 1.0,
        "cpu_s_per_gigabyte": 1.5,
    }
    calls = Slice(calls=2, nbytes=0, wall_s=1.0, client_cpu_s=0.0, server_cpu_s=0.0, latencies_s=(0.25, 0.5))
    assert calls.record()["p50_ms"] == 250.0
    assert calls.record()["p99_ms"] == 500.0
    assert "gigabytes_per_s" not in calls.record()


def test_pace_waits_for_calls_but_not_for_ever() -> None:
    """A slice ends with its time and its calls, and at five times its time whatever is missing."""
    pace = Pace(slice_s=1.0, min_calls=10, warm_up_calls=0)
    assert pace.goes_on(0.9, 100)
    assert not pace.goes_on(1.0, 10)
    assert pace.goes_on(4.9, 9)
    assert not pace.goes_on(5.0, 9)


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


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.transport_speed", "--json", "--out", str(out), *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "DMOE_TEST_MARKER": str(out)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_tiny_run_reports_every_figure_and_leaves_nothing(tmp_path: Path) -> None:
    """All ratios, what they are made of and the files are there; the servers are gone."""
    out = tmp_path / "run"
    sizes = ("--rounds", "1", "--slice-s", "0.02", "--tensor-mib", "0.5", "--callers", "4", "--latency-calls", "20")
    run = start(out, *sizes)
    stdout, stderr = run.communicate(timeout=100)
    assert run.returncode == 0, stderr
    headline = json.loads(stdout.splitlines()[-1])
    for figure in FIGURES:
        assert headline[f"{figure.name}_min"] <= headline[figure.name] <= headline[f"{figure.name}_max"]
        assert headline[figure.name] > 0
    for name in ("rpc_tls_send", "rpc_plain_receive", "blocking_tls_receive", "blocking_plain_send"):
        assert headline[f"{name}_gigabytes_per_s"] > 0
        assert headline[f"{name}_cpu_s_per_gigabyte"] > 0
    for name in ("rpc_tls_calls", "rpc_plain_calls", "blocking_calls"):
        assert headline[f"{name}_calls_per_s"] > 0
    assert headline["rpc_tls_one_caller_p50_ms"] <= headline["rpc_tls_one_caller_p99_ms"]
    assert {"config.json", "metrics.jsonl", "figure.png", "report.md"} <= {path.name for path in out.iterdir()}
    assert processes_of(str(out)) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_run_leaves_no_process(tmp_path: Path, how: signal.Signals) -> None:
    """Ctrl-C ends both servers in order; even SIGKILL of the measurement orphans nobody."""
    out = tmp_path / "run"
    run = start(out, "--rounds", "100", "--slice-s", "0.05", "--tensor-mib", "0.5", "--latency-calls", "20")
    assert run.stderr is not None
    for line in run.stderr:
        if "round 0" in line:  # both servers serve
            break
    assert len(processes_of(str(out))) == 3
    run.send_signal(how)
    # The servers hold this process's standard error: it closes with the last of them.
    run.communicate(timeout=30)
    assert run.returncode == (130 if how is signal.SIGINT else -signal.SIGKILL)
    assert processes_of(str(out)) == []
