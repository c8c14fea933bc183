"""The arithmetic of measurements that take turns, and of one of the experiments that consist of them."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from dmoe_jax.runs.run_folder import RunFolder
from dmoe_net.averaging.reduction.reducer import mean_into
from experiments.allreduce_speed.measurement import expected_digest
from experiments.allreduce_speed.member import digest_of, vector_of
from experiments.allreduce_speed.settings import SpeedSettings
from experiments.bench import Run
from experiments.rounds import SLICE, Ratio, measure_rounds, round_figures

RATIO = Ratio("speed_ratio", "speed", "ours", "theirs", ">=", 0.5)


def record(number: int, name: str, speed: float) -> dict[str, Any]:
    return {"round": number, "name": name, "speed": speed}


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
    assert RATIO.bar.verdict(figures["speed_ratio"]) == "missed"


def test_every_other_round_goes_backwards(tmp_path: Path) -> None:
    """So that what drifts does not always favour the same side; the warm-up is round 0."""
    run = Run(settings=SpeedSettings(), folder=RunFolder.create(tmp_path, {}), console=Console(quiet=True))
    measurements = [lambda: {"ours": {"speed": 1.0}}, lambda: {"theirs": {"speed": 1.0}}]
    measure_rounds(run, measurements, [RATIO], rounds=2)
    assert [record["name"] for record in run.records(SLICE)] == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert [record["round"] for record in run.records(SLICE)] == [0, 0, 1, 1, 2, 2]


def test_expected_digest_is_that_of_our_mean() -> None:
    """To the last bit that of what a reducer computes; another seed is another mean."""
    vectors = [vector_of(index, 1003, 5) for index in range(3)]
    mean = np.empty(1003, np.float32)
    mean_into(mean, vectors, [1.0] * 3)
    assert expected_digest(3, 1003, 5) == digest_of(mean)
    assert expected_digest(3, 1003, 6) != digest_of(mean)
