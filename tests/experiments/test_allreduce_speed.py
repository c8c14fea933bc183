"""The all-reduce measurement: its arithmetic, and that it ends with all its figures and no process left."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.allreduce_speed.ratios import FIGURES, NETWORKS, SIDES, headline_of, record_of
from experiments.allreduce_speed.vectors import digest_of, expected_digest, vector_of


def slices(walls: dict[str, list[float]], grown_bytes: int) -> list[dict[str, Any]]:
    """A run's records from the wall times of each name, round by round."""
    return [
        {"kind": "slice", "round": number, "name": name, "wall_s": wall_s, "cpu_s": 1.0}
        | ({"grown_bytes": grown_bytes} if name.startswith("rpc") else {})
        for name, times in walls.items()
        for number, wall_s in enumerate(times)
    ]


def test_headline_is_made_of_ratios_of_one_round() -> None:
    """Ratios 2, 3, 10 have the median 3; the warm-up does not count; 24 bytes for a vector of 10 are 2.4 times it."""
    walls = {name: [1.0, 1.0, 1.0, 1.0] for name in ("blocking_tls", "blocking_plain", "rpc_plain")}
    headline = headline_of(slices(walls | {"rpc_tls": [99.0, 10.0, 2.0, 3.0]}, 24), vector_bytes=10)
    assert headline["allreduce_tls_ratio"] == 3.0
    assert (headline["allreduce_tls_ratio_min"], headline["allreduce_tls_ratio_max"]) == (2.0, 10.0)
    assert headline["allreduce_plain_ratio"] == 1.0
    assert headline["memory_ratio"] == 2.4
    assert headline["missed_bars"] == []
    assert headline["rpc_tls_wall_s"] == 3.0


def test_missed_bars_are_named() -> None:
    """One in time, one in memory."""
    walls = {name: [1.0, 1.0] for name in ("blocking_tls", "blocking_plain", "rpc_tls")}
    headline = headline_of(slices(walls | {"rpc_plain": [1.0, 4.1]}, 26), vector_bytes=10)
    assert headline["missed_bars"] == ["allreduce_plain_ratio", "memory_ratio"]


def test_record_of_an_exchange() -> None:
    """From the first start to the last end; processor time of all, memory of the greediest."""
    answers = [
        {"started": 1.0, "ended": 3.0, "cpu_s": 0.5, "grown_bytes": 7},
        {"started": 0.5, "ended": 2.0, "cpu_s": 0.25, "grown_bytes": 9},
    ]
    assert record_of(answers) == {"wall_s": 2.5, "cpu_s": 0.75, "grown_bytes": 9}


def test_expected_digest_is_that_of_the_mean() -> None:
    """Pieces and whole vectors are the same draws, across the boundary of a piece."""
    size = 2**20 + 3
    vectors = [vector_of(index, size, 5) for index in range(3)]
    mean = ((vectors[0] + vectors[1]) + vectors[2]) / np.float32(3)
    assert expected_digest(3, size, 5) == digest_of(mean)
    assert expected_digest(3, size, 6) != digest_of(mean)


def start(out: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.allreduce_speed", "--json", "--out", str(out), *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "DMOE_TEST_MARKER": str(out)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


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
def test_tiny_run_reports_every_figure_and_leaves_nothing(tmp_path: Path) -> None:
    """All ratios, what they are made of and the files are there; the members are gone. A vector that three members
    cannot share evenly."""
    out = tmp_path / "run"
    run = start(out, "--rounds", "2", "--peers", "3", "--mib", "0.4", "--chunk-kib", "64")
    stdout, stderr = run.communicate(timeout=100)
    assert run.returncode == 0, stderr
    headline = json.loads(stdout.splitlines()[-1])
    for figure in FIGURES:
        assert 0 < headline[f"{figure.name}_min"] <= headline[figure.name] <= headline[f"{figure.name}_max"]
    for side in SIDES:
        for network in NETWORKS:
            assert headline[f"{side}_{network}_wall_s"] > 0
    assert headline["memory_ratio"] > 2  # the vector and its average, at least
    assert {"config.json", "metrics.jsonl", "figure.png", "report.md"} <= {path.name for path in out.iterdir()}
    assert processes_of(str(out)) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_run_leaves_no_process(tmp_path: Path, how: signal.Signals) -> None:
    """Ctrl-C ends all members in order; even SIGKILL of the measurement orphans nobody."""
    out = tmp_path / "run"
    run = start(out, "--rounds", "10000", "--peers", "2", "--mib", "0.1")
    assert run.stderr is not None
    for line in run.stderr:
        if "round 0" in line:  # all members are at work
            break
    assert len(processes_of(str(out))) == 1 + 4 * 2
    run.send_signal(how)
    # The members hold this process's standard error: it closes with the last of them.
    run.communicate(timeout=30)
    assert run.returncode == (130 if how is signal.SIGINT else -signal.SIGKILL)
    assert processes_of(str(out)) == []
