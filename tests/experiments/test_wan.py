"""The experiment on wide-area lines: its ideal, its shares, and a tiny run."""

from pathlib import Path

import pytest
from rich.console import Console

from dmoe_jax.runs.run_folder import RunFolder
from experiments.bench import Run
from experiments.wan.averaging import all_reduce_times, ideal_s
from experiments.wan.kill import play_kills
from experiments.wan.measurement import EXPERIMENT, measure
from experiments.wan.settings import GIGABIT, Line, WanSettings
from experiments.wan.states import download_times
from experiments.wan.tokens import traffic_of


def test_the_ideal_of_a_hand_derived_case() -> None:
    """256 MiB among four: 1.5 vectors each way, 3.221 Gbit, and 0.1 s."""
    assert ideal_s(GIGABIT, peers=4, nbytes=256 * 2**20) == pytest.approx(1.5 * 8 * 2**28 / 1e9 + 0.1)
    assert GIGABIT.name == "1g_100ms"
    assert Line(gbps=0.1, round_trip_ms=10.0).name == "100m_10ms"


def test_the_same_seed_gives_the_same_times_and_none_beats_the_ideal() -> None:
    """8 MiB among three; but for half of the round trip, which the mean's way back may share with others' values."""
    line = Line(gbps=1.0, round_trip_ms=20.0)
    one, two = (
        all_reduce_times(line, peers=3, nbytes=8 * 2**20, rounds=3, budget_bytes=2**26, seed=1) for _ in range(2)
    )
    assert one == two
    assert min(one.seconds) > ideal_s(line, peers=3, nbytes=8 * 2**20) - 0.01


def test_a_download_takes_its_line_at_least() -> None:
    """16 MiB at 1 Gb/s are 0.134 s."""
    download = download_times(
        donors=2, nbytes=16 * 2**20, up_gbps=1.0, down_gbps=1.0, round_trip_ms=10.0, budget_bytes=2**26, seed=0
    )
    assert 8 * 2**24 / 1e9 < download.seconds < 1.0


def test_a_tiny_run_has_every_figure(tmp_path: Path) -> None:
    """Both parts that are about shares of the line have their figures, and a picture."""
    settings = WanSettings(quick=True, parts=("allreduce", "state"), mib=2, rounds=1, state_mib=4, peers=2, donors=2)
    folder = RunFolder.create(tmp_path / "run", settings, name="wan")
    run = Run(settings=settings, folder=folder, console=Console(quiet=True))
    assert EXPERIMENT.summarise(run) is None
    measure(run)
    result = EXPERIMENT.summarise(run)
    assert result is not None
    for bar in result.bars:
        assert 0 < result.figures[bar.name] < 5
    assert {bar.name for bar in result.bars} == {
        "wan_share_10g_100ms", "wan_share_1g_100ms", "state_share", "donors_gain",
    }  # fmt: skip
    assert EXPERIMENT.draw is not None
    assert EXPERIMENT.draw(run, result) is not None


CHURN = [
    {"per_minute": rate, "goodput": goodput, "failures": rate, "samples_per_s": 9.0, "median_step_s": 1.0}
    | {"longest_step_s": 2.0, "chains_apart": 0, "steps": 3, "seed": seed}
    for rate, seed, goodput in ((0, 0, 1.0), (4, 0, 0.95), (4, 1, 0.91))
]
KILLS = [
    {"round_trip_ms": trip, "silent": silent, "seconds": seconds, "chains_apart": 0}
    for trip, silent, seconds in ((20.0, False, [2.0, 4.0]), (20.0, True, [6.0]), (400.0, False, [5.0]))
]
TOKENS = [
    {"method": method, "num_params": size, "batch": 1024, "nbytes": nbytes, "tokens": 100.0, "averages": 1}
    for size in (10, 20)
    for method, nbytes in (
        ("gradients", 100 * size),
        ("pseudo-gradients", 2 * size),
        ("parameters", 10 * size),
        ("sparse pseudo-gradients", size),
    )
]
LOOP = [
    {"period_s": 1.0, "turn": turn, "steps_per_s": fast, "steps_per_s_alone": 10.0, "averages": 4}
    for turn, fast in enumerate((9.0, 8.0))
]


def test_figures_of_hand_made_records(tmp_path: Path) -> None:
    """Means over seeds, the longest of kills, bytes a token of the largest model, mean ratios; all in one report."""
    settings = WanSettings(parts=("churn", "kill", "tokens", "loop"))
    folder = RunFolder.create(tmp_path / "run", settings, name="wan")
    run = Run(settings=settings, folder=folder, console=Console(quiet=True))
    for name, records in (("churn", CHURN), ("kill", KILLS), ("tokens", TOKENS), ("loop", LOOP)):
        for record in records:
            run.log(name, **record)
    result = EXPERIMENT.summarise(run)
    assert result is not None
    expected = {
        "churn_goodput_4": 0.93,
        "churn_goodput_4_min": 0.91,
        "kill_next_step_s": 5.0,
        "kill_next_step_median_s": 4.0,
        "unplug_next_step_s": 6.0,
        "bytes_per_token_gradients": 20.0,
        "bytes_per_token_pseudo_gradients": 0.4,
        "bytes_per_token_sparse_pseudo_gradients": 0.2,
        "loop_ratio_1s": 0.85,
    }
    assert {name: result.figures[name] for name in expected} == pytest.approx(expected)
    assert {bar.name for bar in result.bars} == {"churn_goodput_4", "kill_next_step_s"}
    assert result.missed_bars == []
    assert [len(table.rows) for table in result.tables] == [2, 3, 2, 1]
    assert EXPERIMENT.draw is not None
    assert EXPERIMENT.draw(run, result) is not None


@pytest.mark.slow
def test_traffic_is_counted_and_repeats() -> None:
    """Eight hosts average 4 KiB: more than what the vectors alone take, 2 * 7/8 of 4 KiB for each of them, twice."""
    one, two = (traffic_of("parameters", num_params=1024, batch=8 * 512, seed=3) for _ in range(2))
    assert one == two
    assert one.nbytes > 2 * 8 * 2 * 7 / 8 * 4096
    assert one.tokens == pytest.approx(2 * 10 * 8 * 512, rel=0.3)


@pytest.mark.slow
def test_a_kill_costs_seconds() -> None:
    """One, in the middle of an averaging; the next step comes, and nobody has other parameters."""
    played = play_kills(round_trip_ms=20.0, kills=1, silent=False, seed=0)
    assert len(played.recovered_s) == 1
    assert 0.0 < played.recovered_s[0] < 10.0
    assert played.chains_apart == 0
