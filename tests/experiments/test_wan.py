"""The experiment on wide-area lines: its ideal, its shares, and a tiny run."""

from pathlib import Path

import pytest
from rich.console import Console

from dmoe_jax.runs.run_folder import RunFolder
from experiments.bench import Run
from experiments.wan.measurement import EXPERIMENT, measure
from experiments.wan.parts import download_time, ideal_s, play_kills, traffic_of
from experiments.wan.settings import WanSettings


def test_the_ideal_of_a_hand_derived_case() -> None:
    """256 MiB among four: 1.5 vectors each way, 3.221 Gbit, and 0.1 s."""
    assert ideal_s(1.0, 100.0, mib=256) == pytest.approx(1.5 * 8 * 2**28 / 1e9 + 0.1)


def test_a_download_takes_its_line_at_least() -> None:
    """16 MiB at 1 Gb/s are 0.134 s, and a round trip of 0.1 s comes with each question."""
    seconds, _ = download_time(WanSettings(budget_mib=64), donors=2, mib=16, up_gbps=1.0, down_gbps=1.0)
    assert 8 * 2**24 / 1e9 < seconds < 2.0


@pytest.mark.slow
def test_a_tiny_run_has_every_figure(tmp_path: Path) -> None:
    """Both parts that are about shares of the line have their figures, and a picture."""
    settings = WanSettings(quick=True, parts=("allreduce", "state"), mib=1)
    folder = RunFolder.create(tmp_path / "run", settings, name="wan")
    run = Run(settings=settings, folder=folder, console=Console(quiet=True))
    assert EXPERIMENT.summarise(run) is None
    measure(run)
    result = EXPERIMENT.summarise(run)
    assert result is not None
    shares = {bar.name: result.figures[bar.name] for bar in result.bars}
    assert shares.keys() == {"wan_share_10g_100ms", "wan_share_1g_100ms", "state_share", "donors_gain"}
    assert 0 < min(shares.values()) <= max(shares.values()) < 5
    assert EXPERIMENT.draw is not None
    assert EXPERIMENT.draw(run, result) is not None


def test_figures_of_hand_made_records(tmp_path: Path) -> None:
    """Means over seeds, the longest of kills; all in one report."""
    settings = WanSettings(parts=("churn", "kill"))
    folder = RunFolder.create(tmp_path / "run", settings, name="wan")
    run = Run(settings=settings, folder=folder, console=Console(quiet=True))
    for seed, (part, name, x, values) in enumerate(
        (
            ("churn", "churn_goodput_0", 0, [1.0]),
            ("churn", "churn_goodput_4", 4, [0.95]),
            ("churn", "churn_goodput_4", 4, [0.91]),
            ("kill", "kill_next_step_s", 20.0, [2.0, 4.0]),
            ("kill", "unplug_next_step_s", 20.0, [6.0]),
            ("kill", "kill_next_step_s", 400.0, [5.0]),
        )
    ):
        run.log(part, name=name, line="a line", x=x, values=values, seed=seed)
    result = EXPERIMENT.summarise(run)
    assert result is not None
    expected = {
        "churn_goodput_4": 0.93,
        "churn_goodput_4_min": 0.91,
        "kill_next_step_s_max": 5.0,
        "unplug_next_step_s": 6.0,
    }
    assert {name: result.figures[name] for name in expected} == pytest.approx(expected)
    goodputs = {label: {seed: run["goodput"] for seed, run in seeds.items()} for label, seeds in result.runs.items()}
    assert goodputs == {"churn_goodput_0": {0: 1.0}, "churn_goodput_4": {1: 0.95, 2: 0.91}}
    assert {bar.name for bar in result.bars} == {"churn_goodput_4", "kill_next_step_s_max"}
    assert result.missed_bars == []
    assert [len(table.rows) for table in result.tables] == [3, 3]
    assert EXPERIMENT.draw is not None
    assert EXPERIMENT.draw(run, result) is not None


@pytest.mark.slow
def test_traffic_is_counted() -> None:
    """Eight hosts average 4 KiB: more than what the vectors alone take, 2 * 7/8 of 4 KiB for each of them, twice."""
    nbytes, tokens = traffic_of("parameters", num_params=1024, batch=8 * 512, seed=3)
    assert nbytes > 2 * 8 * 2 * 7 / 8 * 4096
    assert tokens == pytest.approx(2 * 10 * 8 * 512, rel=0.3)


@pytest.mark.slow
def test_a_kill_costs_seconds() -> None:
    """One, in the middle of an averaging; the next step comes, and nobody has other parameters."""
    played = play_kills(round_trip_ms=20.0, kills=1, silent=False, seed=0)
    assert len(played.recovered_s) == 1
    assert 0.0 < played.recovered_s[0] < 10.0
    assert played.chains_apart == 0
