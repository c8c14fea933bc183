"""Throughput over latency: ceilings by hand, virtual time against them, and what a run reports."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from dmoe_jax.runs.run_folder import RunFolder
from experiments.bench import Run
from experiments.throughput_vs_latency.__main__ import main
from experiments.throughput_vs_latency.analysis import compute_ceiling, lag_ceiling, short_delays
from experiments.throughput_vs_latency.costs import CostTable
from experiments.throughput_vs_latency.measurement import summarise
from experiments.throughput_vs_latency.settings import (
    CLOUD,
    SIZES,
    Block,
    Delay,
    LatencySettings,
    Load,
    Place,
    Size,
)
from experiments.throughput_vs_latency.stack import Throughput, measure_virtual

BLOCK = Block(name="feedforward", batch_rows=4, d_model=8)
TRANSFORMER = Block(name="transformer", batch_rows=2, d_model=8, num_heads=2, d_ff=8, seq_len=4)
COSTS = CostTable({"forward": {4: 0.01, 8: 0.016}, "backward": {4: 0.03, 8: 0.06}})
LOAD = Load(place=Place(layers=4, servers=2), trainers=1, delay=Delay(0.0), passes="forward", joined=2, calls=16)


@pytest.mark.parametrize(("delay", "std_s"), [(Delay(0.05), 0.05), (CLOUD, 0.0324), (Delay(0.05, 0.0), 0.0)])
def test_delays_have_the_mean_and_deviation_that_they_name(delay: Delay, std_s: float) -> None:
    """The mean of 20,000 draws is right to five standard errors; an exponential's deviation is its mean."""
    rng = random.Random(0)
    draws = np.array([delay.draw_s(rng) for _ in range(20_000)])
    assert draws.mean() == pytest.approx(delay.mean_s, abs=5 * std_s / 20_000**0.5 + 1e-12)
    assert draws.std() == pytest.approx(std_s, rel=0.05, abs=1e-12)
    assert draws.min() > 0


def test_costs_are_of_the_size_that_a_batch_is_padded_to() -> None:
    """Work that is in no table is free; more rows than were measured are a mistake."""
    assert COSTS("forward", 4) == 0.01
    assert COSTS("forward", 5) == COSTS("forward", 8) == 0.016
    assert COSTS("make_backends", 4) == 0.0
    assert COSTS.least_row_s("forward") == 0.002
    assert COSTS.least_row_s("backward") == 0.0075
    with pytest.raises(ValueError, match=r"9 rows backward.*at most 8"):
        COSTS("backward", 9)
    doubled = CostTable(
        {name: {rows: 3 * cost for rows, cost in sizes.items()} for name, sizes in COSTS.seconds.items()}
    )
    assert COSTS.mean(doubled)("backward", 8) == pytest.approx(0.12)


def test_costs_under_load() -> None:
    """Means where batches were timed; what was not is as much slower as what was. No kind at all: as alone."""
    loaded = COSTS.under_load({"forward": {4: [0.01, 0.03, 0.02]}, "make_backends": {0: [5.0]}})
    assert loaded.seconds == {"forward": {4: 0.02, 8: pytest.approx(0.032)}, "backward": COSTS.seconds["backward"]}


def test_ceilings_by_hand() -> None:
    """Three batches of 4 rows through 4 layers of 50 ms: 60 rows/s. Two devices, 4 layers of 2 ms a row: 250 rows/s."""
    load = replace(LOAD, trainers=3, delay=Delay(0.05))
    assert lag_ceiling(load, 4) == pytest.approx(60)
    assert lag_ceiling(replace(load, passes="training"), 4) == pytest.approx(30)
    assert lag_ceiling(replace(load, delay=Delay(0.0)), 4) == float("inf")
    assert compute_ceiling(load, COSTS) == pytest.approx(2 / (4 * 0.002))
    assert compute_ceiling(replace(load, passes="training"), COSTS) == pytest.approx(2 / (4 * 0.0095))
    shared = replace(load, place=load.place._replace(shared_device=True))
    assert compute_ceiling(shared, COSTS) == pytest.approx(1 / (4 * 0.002))


def virtual(load: Load, costs: CostTable = COSTS, *, seed: int = 0) -> Throughput:
    """Throughput of one load in virtual time."""
    found: list[Throughput] = []
    measure_virtual(BLOCK, [("asynchronous", load)], costs, lambda *done: found.append(done[-1]), seed=seed)
    return found[0]


def test_one_batch_in_flight_takes_the_sum_of_its_costs() -> None:
    """Forward 4 x 10 ms, with backward 4 x 40 ms; a round trip of 5 ms comes on top of each call."""
    assert virtual(LOAD).samples_per_s == pytest.approx(4 / 0.04)
    training = replace(LOAD, passes="training")
    assert virtual(training).samples_per_s == pytest.approx(4 / 0.16)
    far = replace(LOAD, place=LOAD.place._replace(round_trip_s=0.005))
    assert virtual(far).samples_per_s == pytest.approx(4 / 0.06)


def test_trainers_reach_the_lag_ceiling_when_computing_is_free() -> None:
    """With the same delay for every call nothing is left to chance."""
    free = CostTable({"forward": {4: 0.0, 8: 0.0}, "backward": {4: 0.0, 8: 0.0}})
    load = replace(LOAD, trainers=5, delay=Delay(0.1, 0.0), calls=100)
    assert virtual(load, free).samples_per_s == pytest.approx(lag_ceiling(load, 4))


@pytest.mark.slow
def test_trainers_reach_the_compute_ceiling_where_delays_are_short() -> None:
    """24 trainers, 5 ms of delay: both devices are always busy, mostly with two requests at once."""
    load = replace(LOAD, trainers=24, delay=Delay(0.005), calls=480)
    found = virtual(load)
    assert 0.9 * compute_ceiling(load, COSTS) < found.samples_per_s < 1.03 * compute_ceiling(load, COSTS)
    assert found.requests_per_batch > 1.5
    alone = virtual(replace(load, joined=1), CostTable({"forward": {4: 0.01}, "backward": {4: 0.03}}))
    assert alone.requests_per_batch == pytest.approx(1.0, rel=0.01)
    assert alone.samples_per_s == pytest.approx(2 * 4 / (4 * 0.01), rel=0.05)
    shared = replace(load, place=load.place._replace(shared_device=True))
    assert virtual(shared).samples_per_s == pytest.approx(found.samples_per_s / 2, rel=0.1)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_throughput() -> None:
    """To the last bit; another seed draws other delays."""
    load = replace(LOAD, trainers=3, delay=Delay(0.05), passes="training", calls=48)
    assert virtual(load) == virtual(load)
    assert virtual(load).samples_per_s != virtual(load, seed=1).samples_per_s


def test_bars_and_ratios_of_records_by_hand(tmp_path: Path) -> None:
    """Kept is the least share over short delays alone, ratios are seed by seed, the worst median decides agreement."""
    settings = LatencySettings(delays=3)
    run = Run(settings=settings, folder=RunFolder.create(tmp_path, {}), console=Console(quiet=True))
    assert summarise(run) is None
    # Lag ceilings at 0.1 and 0.2 s: 64 * 256 / (16 * delay) = 10,240 and 5,120 rows/s. Four servers and 16 layers whose
    # rows cost so much have a compute ceiling of 4,000 rows/s; twice as much lies between these.
    row_s = 4 / (16 * 4000)
    costs = CostTable({"forward": {256: 256 * row_s}, "backward": {256: 256 * row_s}})
    assert short_delays(settings, "feedforward", "forward", costs) == [0.1]
    run.log("costs", block="feedforward", seconds=costs.seconds)
    point = {"block": "feedforward", "passes": "forward", "requests_per_batch": 1.0}
    for repeat in range(2):
        for delay_s, asynchronous, alone in ((0.0, 4000.0, 1000.0), (0.1, 3800.0, 150.0), (0.2, 3000.0, 80.0)):
            shared = {**point, "delay_s": delay_s, "cloud": False, "repeat": repeat}
            run.log("point", **shared, method="asynchronous", samples_per_s=asynchronous + 20 * repeat)
            run.log("point", **shared, method="model_parallel", samples_per_s=alone)
        shared = {**point, "delay_s": CLOUD.mean_s, "cloud": True, "repeat": repeat}
        run.log("point", **shared, method="asynchronous", samples_per_s=3000.0)
        run.log("point", **shared, method="model_parallel", samples_per_s=100.0 * (1 + repeat))
    twin = {"block": "feedforward", "passes": "forward", "method": "asynchronous", "delay_s": 0.1, "round_trip_s": 0.0}
    # Medians of three rounds: 1.1 forward, where one round was spoilt, and 0.75 in training.
    for virtual_per_s in (110.0, 109.0, 190.0):
        run.log("agreement", **twin, virtual_per_s=virtual_per_s, real_per_s=100.0)
        run.log("agreement", **(twin | {"passes": "training"}), virtual_per_s=75.0, real_per_s=100.0)
    result = summarise(run)
    assert result is not None
    assert result.figures["kept"] == pytest.approx(3810 / 4010)
    assert result.figures["ratio_ffn"] == pytest.approx((30 + 15) / 2)
    assert (result.figures["ratio_ffn_min"], result.figures["ratio_ffn_max"]) == (15, 30)
    assert "ratio_transformer" not in result.figures
    assert result.figures["agreement"] == pytest.approx(0.25)
    assert result.missed_bars == ["agreement"]


@pytest.mark.slow
def test_tiny_run_measures_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both kinds of block in virtual time, and one on real nodes over TCP, where delays decide the throughput."""
    monkeypatch.setitem(SIZES, "laptop", Size(layers=4, blocks={"feedforward": BLOCK, "transformer": TRANSFORMER}))
    out = tmp_path / "run"
    flags = ["--quick", "--trainers", "2", "--servers", "2", "--delays", "2", "--repeats", "2", "--json"]
    main(args=[*flags, "--out", str(out)])
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert headline["ratio_ffn_min"] <= headline["ratio_ffn"] <= headline["ratio_ffn_max"]
    # Blocks of microseconds: two trainers in flight bring at most twice the throughput of one.
    assert 1.0 < headline["ratio_transformer"] < 2.5
    # No delay is short beside such blocks, so the bar has nothing to judge and is missed.
    assert headline["kept"] is None
    assert "kept" in headline["missed_bars"]
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    # Kinds of block, methods, two delays and the three regions, passes, repeats.
    assert len([record for record in records if record["kind"] == "point"]) == 2 * 2 * (2 + 1) * 2 * 2
    twins = [record for record in records if record["kind"] == "agreement"]
    assert len(twins) == 2 * 2
    for twin in twins:
        trainers = 8 if twin["method"] == "asynchronous" else 1
        assert 0 < twin["real_per_s"] < 1.6 * trainers * BLOCK.batch_rows / (8 * twin["delay_s"])
    assert {"figure.png", "report.md"} <= {path.name for path in out.iterdir()}
    assert "41 [M~]" in (out / "report.md").read_text()
