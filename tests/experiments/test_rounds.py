"""The arithmetic of measurements that take turns, and of one of the experiments that consist of them."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from dmoe_jax.runs.run_folder import RunFolder
from dmoe_net.averaging.reduction.reducer import mean_into
from experiments.allreduce_speed import measurement as allreduce
from experiments.allreduce_speed.member import digest_of, vector_of
from experiments.allreduce_speed.settings import SpeedSettings
from experiments.bench import Run
from experiments.rounds import SLICE, Ratio, measure_rounds, round_figures

RATIO = Ratio("speed_ratio", "speed", "ours", "theirs", ">=", 0.5)


def record(number: int, name: str, speed: float) -> dict[str, Any]:
    return {"round": number, "name": name, "speed": speed}


def run_in(folder: Path, settings: SpeedSettings) -> Run[SpeedSettings]:
    return Run(settings=settings, folder=RunFolder.create(folder, settings), console=Console(quiet=True))


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
    assert RATIO.of_rounds(slices) == [0.3, 0.5]
    figures = round_figures(slices, [RATIO], ("speed", "weight"))
    assert figures is not None
    assert figures["rounds"] == 2
    assert figures["ours_speed"] == 3.0
    assert round_figures(slices[:3], [RATIO], ("speed",)) is None


def test_headline_is_the_median_of_ratios_not_the_ratio_of_medians() -> None:
    """1, 20, 300 over 10, 100, 1000: ratios 0.1, 0.2, 0.3. The warm-up would have been the greatest."""
    pairs = [(9.0, 1.0), (1.0, 10.0), (20.0, 100.0), (300.0, 1000.0)]
    slices = [
        record(number, name, speed)
        for number, pair in enumerate(pairs)
        for name, speed in zip(("ours", "theirs"), pair, strict=True)
    ]
    figures = round_figures(slices, [RATIO], ())
    assert figures == {"rounds": 3, "speed_ratio": 0.2, "speed_ratio_min": 0.1, "speed_ratio_max": 0.3}
    assert not RATIO.bar.is_met_by(figures["speed_ratio"])


def test_every_other_round_goes_backwards(tmp_path: Path) -> None:
    """So that what drifts does not always favour the same side; the warm-up is round 0."""

    def measured(name: str) -> Mapping[str, Mapping[str, float]]:
        return {name: {"speed": 1.0}}

    run = run_in(tmp_path / "run", SpeedSettings())
    measure_rounds(run, [lambda: measured("ours"), lambda: measured("theirs")], [RATIO], rounds=2)
    assert [(record["round"], record["name"]) for record in run.records(SLICE)] == [
        (0, "ours"),
        (0, "theirs"),
        (1, "theirs"),
        (1, "ours"),
        (2, "ours"),
        (2, "theirs"),
    ]


def test_record_of_an_exchange() -> None:
    """From the first start to the last end; processor time of all, memory of the greediest, if the system says."""
    answers: list[dict[str, float | None]] = [
        {"started": 1.0, "ended": 3.0, "cpu_s": 0.5, "grown_bytes": 7},
        {"started": 0.5, "ended": 2.0, "cpu_s": 0.25, "grown_bytes": 9},
        {"started": 0.5, "ended": 2.0, "cpu_s": 0.25, "grown_bytes": None},
    ]
    members: list[Any] = [
        SimpleNamespace(hello={"where": ""}, tell=dict, hear=lambda each=each: each) for each in answers
    ]
    assert allreduce.exchange("rpc", members[:2]) == {"rpc": {"wall_s": 2.5, "cpu_s": 0.75, "grown_bytes": 9}}
    assert allreduce.exchange("rpc", members[2:]) == {"rpc": {"wall_s": 1.5, "cpu_s": 0.25}}


@pytest.mark.parametrize(
    ("grown", "ratio", "missed"),
    [(24, 2.4, ["allreduce_plain_ratio"]), (26, 2.6, ["allreduce_plain_ratio", "memory_ratio"])],
)
def test_memory_counts_from_the_warm_up_on(tmp_path: Path, grown: int, ratio: float, missed: list[str]) -> None:
    """24 bytes for a vector of 10 are 2.4 times it; the times of the warm-up do not count, and 4.1 is above 4."""
    settings = SpeedSettings(mib=40 / 2**20)
    run = run_in(tmp_path / "run", settings)
    walls = {"blocking_tls": [1.0, 1.0], "blocking_plain": [1.0, 1.0], "rpc_tls": [99.0, 3.0], "rpc_plain": [1.0, 4.1]}
    for name, times in walls.items():
        for number, wall_s in enumerate(times):
            memory = {"grown_bytes": 4 * grown if number == 0 else 1} if name.startswith("rpc") else {}
            run.log(SLICE, round=number, name=name, wall_s=wall_s, cpu_s=1.0, **memory)
    result = allreduce.summarise(run)
    assert result is not None
    assert result.figures["memory_ratio"] == ratio
    assert result.figures["rpc_tls_wall_s"] == 3.0
    assert result.missed_bars == missed


def test_expected_digest_is_that_of_our_mean() -> None:
    """To the last bit that of what a reducer computes; another seed is another mean."""
    vectors = [vector_of(index, 1003, 5) for index in range(3)]
    mean = np.empty(1003, np.float32)
    mean_into(mean, vectors, [1.0] * 3)
    assert allreduce.expected_digest(3, 1003, 5) == digest_of(mean)
    assert allreduce.expected_digest(3, 1003, 6) != digest_of(mean)
