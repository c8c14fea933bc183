"""The experiment on wide-area lines: its ideal, its shares, and a tiny run."""

from pathlib import Path

import pytest
from rich.console import Console

from dmoe_jax.runs.run_folder import RunFolder
from experiments.bench import Run
from experiments.wan.averaging import all_reduce_times, ideal_s
from experiments.wan.measurement import EXPERIMENT, measure
from experiments.wan.settings import GIGABIT, Line, WanSettings
from experiments.wan.states import download_times


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
    """Of both parts, with a picture."""
    settings = WanSettings(quick=True, mib=2, rounds=1, state_mib=4, peers=2, donors=2)
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


@pytest.mark.parametrize("changes", [{"peers": 1}, {"mib": 0}, {"donors": 9}, {"parts": ()}])
def test_settings_that_cannot_be(changes: dict[str, object]) -> None:
    """The message names the flag."""
    with pytest.raises(ValueError, match="--" + next(iter(changes))):
        WanSettings(**changes)  # type: ignore[arg-type]
