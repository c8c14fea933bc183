"""Throughput over latency: ceilings by hand, virtual time against them, and what a run reports."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from dmoe_jax.runs.run_folder import RunFolder
from experiments.bench import Run, run_experiment
from experiments.throughput_vs_latency import measurement, settings
from experiments.throughput_vs_latency.costs import cost_of, under_load
from experiments.throughput_vs_latency.measurement import EXPERIMENT, compute_ceiling, lag_ceiling, summarise
from experiments.throughput_vs_latency.settings import CLOUD, Block, Delay, LatencySettings, Load
from experiments.throughput_vs_latency.stack import measure_virtual

BLOCK = Block("feedforward", 4, {"d_model": 8})
TRANSFORMER = Block("transformer_xl", 2, {"d_model": 8, "num_heads": 2, "d_ff": 8, "seq_len": 4, "mem_len": 1})
COSTS = {("forward", 4): 0.01, ("forward", 8): 0.016, ("backward", 4): 0.03, ("backward", 8): 0.06}
LOAD = Load(layers=4, servers=2, trainers=1, calls=16)


@pytest.mark.parametrize(("delay", "std_s"), [(Delay(0.05), 0.05), (CLOUD, 0.0324), (Delay(0.05, 0.0), 0.0)])
def test_delays_have_the_mean_and_deviation_that_they_name(delay: Delay, std_s: float) -> None:
    """The mean of 20,000 draws is right to five standard errors; an exponential's deviation is its mean."""
    rng = random.Random(0)
    draws = np.array([delay.draw_s(rng) for _ in range(20_000)])
    assert draws.mean() == pytest.approx(delay.mean_s, abs=5 * std_s / 20_000**0.5 + 1e-12)
    assert draws.std() == pytest.approx(std_s, rel=0.05, abs=1e-12)


def test_costs() -> None:
    """Those of the size that a batch is padded to; work that is in no table is free. Under load they are means where
    batches were timed; what was not is as much slower as what was, and a kind that did not occur as alone."""
    assert cost_of(COSTS, "forward", 5) == cost_of(COSTS, "forward", 8) == 0.016
    assert cost_of(COSTS, "make_backends", 4) == 0.0
    loaded = under_load(COSTS, {("forward", 4): [0.01, 0.03, 0.02], ("make_backends", 0): [5.0]})
    assert loaded == COSTS | {("forward", 4): 0.02, ("forward", 8): pytest.approx(0.032)}


def test_ceilings_by_hand() -> None:
    """Three batches of 4 rows through 4 layers of 50 ms: 60 rows/s. Two devices, 4 layers of 2 ms a row: 250 rows/s."""
    load = replace(LOAD, trainers=3, delay=Delay(0.05))
    assert lag_ceiling(load, 4) == pytest.approx(60)
    assert lag_ceiling(replace(load, passes="training"), 4) == pytest.approx(30)
    assert lag_ceiling(LOAD, 4) is None
    assert compute_ceiling(load, COSTS) == pytest.approx(2 / (4 * 0.002))
    assert compute_ceiling(replace(load, passes="training"), COSTS) == pytest.approx(2 / (4 * 0.0095))


@pytest.mark.slow
def test_one_batch_in_flight_takes_the_sum_of_its_costs() -> None:
    """Forward 4 x 10 ms, with backward 4 x 40 ms; a round trip of 5 ms comes on top of each call."""
    assert measure_virtual([LOAD], BLOCK, COSTS, seed=0) == [pytest.approx(4 / 0.04)]
    assert measure_virtual([replace(LOAD, passes="training")], BLOCK, COSTS, seed=0) == [pytest.approx(4 / 0.16)]
    assert measure_virtual([LOAD], BLOCK, COSTS, seed=0, real_trip_s=0.005) == [pytest.approx(4 / 0.06)]


@pytest.mark.slow
def test_trainers_reach_the_ceilings() -> None:
    """Free computing and equal delays reach the ceiling of the lag, with no chance left; 24 trainers and 5 ms of
    delay reach that of the devices, and half of it with one device for both servers."""
    load = replace(LOAD, trainers=5, delay=Delay(0.1, 0.0), calls=100)
    assert measure_virtual([load], BLOCK, dict.fromkeys(COSTS, 0.0), seed=0) == [pytest.approx(lag_ceiling(load, 4))]
    load = replace(LOAD, trainers=24, delay=Delay(0.005), calls=480)
    (found,) = measure_virtual([load], BLOCK, COSTS, seed=0)
    assert 0.9 * compute_ceiling(load, COSTS) < found < 1.03 * compute_ceiling(load, COSTS)
    assert measure_virtual([load], BLOCK, COSTS, seed=0, real_trip_s=0.0) == [pytest.approx(found / 2, rel=0.1)]


def test_bars_and_ratios_of_records_by_hand(tmp_path: Path) -> None:
    """Kept is the least share over short delays alone, ratios are seed by seed, the worst median decides agreement."""
    run = Run(settings=LatencySettings(), folder=RunFolder.create(tmp_path, {}), console=Console(quiet=True))
    assert summarise(run) is None
    curve = {"block": "feedforward", "passes": "forward", "compute_ceiling": 4000.0}
    for seed in range(2):
        # Twice the compute ceiling lies between the lag ceilings at 0.1 and 0.2 s.
        for delay_s, ours, lag in ((0.0, 4000, None), (0.1, 3800, 10_240), (0.2, 3000, 5120)):
            point = {**curve, "delay_s": delay_s, "cloud": False, "lag_ceiling": lag}
            run.log("point", **point, method="asynchronous", seed=seed, rows_per_s=ours + 20 * seed)
        point = {**curve, "delay_s": CLOUD.mean_s, "cloud": True, "lag_ceiling": 1.0}
        run.log("point", **point, method="asynchronous", seed=seed, rows_per_s=3000.0)
        run.log("point", **point, method="model_parallel", seed=seed, rows_per_s=100.0 * (1 + seed))
    twin = {"block": "feedforward", "method": "asynchronous", "delay_s": 0.1, "real_per_s": 100.0}
    # Medians of three rounds: 1.1 forward, where one round was spoilt, and 0.75 in training.
    for forward in (1.1, 1.09, 1.9):
        run.log("agreement", **twin, passes="forward", virtual_over_real=forward)
        run.log("agreement", **twin, passes="training", virtual_over_real=0.75)
    result = summarise(run)
    assert result is not None
    assert result.figures["kept"] == pytest.approx(3810 / 4010)
    assert result.runs["feedforward, forward, asynchronous, False, 0.1"][1]["rows_per_s"] == 3820
    assert result.figures["ratio_ffn"] == pytest.approx((30 + 15) / 2)
    assert (result.figures["ratio_ffn_min"], result.figures["ratio_ffn_max"]) == (15, 30)
    assert result.figures["agreement"] == pytest.approx(0.25)
    assert result.missed_bars == ["agreement"]


@pytest.mark.slow
def test_tiny_run_measures_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of block in virtual time, and one on real nodes over TCP, where delays decide the throughput."""
    monkeypatch.setattr(settings, "LAYERS", 4)
    monkeypatch.setattr(settings, "TRAINERS", 2)
    monkeypatch.setattr(measurement, "BLOCKS", (BLOCK, TRANSFORMER))
    monkeypatch.setenv("NPROC", "1")  # which the run sets, too
    args = ["--quick", "--out", str(tmp_path / "run")]
    headline = run_experiment(LatencySettings, EXPERIMENT, name="throughput_vs_latency", uses_jax=False, args=args)
    assert headline["ratio_ffn_min"] <= headline["ratio_ffn"] <= headline["ratio_ffn_max"]
    # Blocks of microseconds: two trainers in flight bring at most twice the throughput of one.
    assert 1.0 < headline["ratio_transformer"] < 2.5
    # No delay is short beside such blocks, so the bar has nothing to judge and is missed.
    assert headline["kept"] is None
    assert "kept" in headline["missed_bars"]
    assert headline["agreement"] >= 0
    assert {"figure.png", "report.md"} <= {path.name for path in (tmp_path / "run").iterdir()}
