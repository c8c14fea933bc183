"""Balance: what is counted of a slow node, what is taken from the runs of the cases, and a small run of both parts."""

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from dmoe_jax.routing import balanced, make_router, product_key
from dmoe_jax.runs.run_folder import RunFolder
from experiments.bench import Run
from experiments.routing import measurement
from experiments.routing.__main__ import main
from experiments.routing.measurement import (
    SEQ_LEN,
    Outcome,
    Scene,
    balance_figures,
    balance_table,
    case_trainings,
    cost,
    slow_node_shares,
)
from experiments.routing.settings import BALANCED, CASES, FIRST, LOSSES, PLAIN, RoutingSettings
from experiments.transformer_xl.presets import sized_preset


def run_of(path: Path, **flags: object) -> Run[RoutingSettings]:
    settings = RoutingSettings(**flags)  # type: ignore[arg-type]
    return Run(settings=settings, folder=RunFolder.create(path, {}), console=Console(quiet=True))


def test_shares_are_taken_where_the_bars_say(tmp_path: Path) -> None:
    """Windows of 25 updates, slow from 200 to 400: the fourth window after that, and the last four of the run."""
    run = run_of(tmp_path)
    assert measurement.summarise(run) is None
    shares = np.ones(24)
    shares[8:16], shares[11] = 0.7, 0.2
    shares[16:20], shares[20:] = 0.6, 0.9
    for seed, factor in enumerate((1.0, 0.5)):
        run.log("slow_node", router="balanced", seed=seed, shares=(factor * shares).tolist())
    run.log("slow_node", router="product_key", seed=0, shares=np.full(24, 0.8).tolist())
    result = measurement.summarise(run)
    assert result is not None
    figures = result.figures
    assert figures["before_share"] == pytest.approx(0.75)
    assert (figures["slow_share"], figures["slow_share_min"]) == (pytest.approx(0.15), pytest.approx(0.1))
    assert figures["recovered_share"] == pytest.approx(0.675)
    assert figures["slow_share_product_key"] == pytest.approx(0.8)
    assert result.missed_bars == []
    assert result.headline["bars_not_decided"] == ["recovered_share"]  # 0.9 and 0.45
    assert len(measurement.draw(run, result).axes) == 1


@pytest.mark.slow
def test_a_slow_node_loses_calls_and_gets_them_back() -> None:
    """The code of a real swarm in virtual time."""
    scene = Scene(num_updates=140, slow_from=50, slow_until=90, num_trainers=4, window=10)
    shares = slow_node_shares(balanced(product_key((4, 4))), scene, seed=1)
    assert shares.shape == (14,)
    assert shares[7:9].mean() < 0.5 < 0.75 < shares[:5].mean()
    assert shares[11:].mean() > 0.6


def test_cases_are_made_of_runs_that_can_be_trained(tmp_path: Path) -> None:
    """Each router with one seed before the next seed, at the words that were asked for, in a folder of its own."""
    run = run_of(tmp_path, words=8192, seeds=2, seed=3, data="embedded")
    for name, case in CASES.items():
        found = [training.settings for training in case_trainings(run, name)]
        seeds = (3, 4)[: case.seeds]
        assert [(each.seed, each.router) for each in found] == [(s, r) for s in seeds for r in case.routers]
        assert len({each.out for each in found}) == len(found)
        for settings in found:
            config = sized_preset(settings, "dmoe").config
            assert make_router(settings.router, config.grid_size).grid_size == config.grid_size
            assert settings.steps == case.words * 8192 / ((settings.batch_size or 1) * SEQ_LEN)
            assert config.layer.seq_len == SEQ_LEN


def test_costs_are_paired_by_seed() -> None:
    """In per cent of the plain router's perplexity at the same seed, beside the loss whose load is as even."""
    first = {
        PLAIN: {seed: Outcome(100.0 * (seed + 1), 0.7, 0) for seed in range(3)},
        BALANCED: {0: Outcome(101.0, 0.96, 0), 1: Outcome(204.0, 0.98, 0), 2: Outcome(309.0, 0.97, 1)},
        LOSSES[0]: {seed: Outcome(100.0, 0.8, 0) for seed in range(3)},
        LOSSES[1]: {0: Outcome(101.0, 0.96, 0), 1: Outcome(204.0, 0.96, 0), 2: Outcome(412.0, 0.96, 0)},
    }
    interval = cost(first, BALANCED)
    assert interval is not None
    # 1, 2 and 3 per cent: deviation 1, 4.303 / sqrt(3) of it to either side.
    assert (interval.mean, interval.ends) == (pytest.approx(2.0), pytest.approx((2 - 2.484, 2 + 2.484), abs=1e-3))
    figures = balance_figures({FIRST: first})
    assert figures["load_entropy"] == pytest.approx(0.97)
    assert figures["idle_experts"] == 1
    assert (figures["nearest_balancing_loss"], figures["over_balancing_loss"]) == (LOSSES[1], pytest.approx(-25 / 3))
    rows = {row[1]: row for row in balance_table(figures["cases"]).rows}
    assert rows[BALANCED][4] == "+2.0 % (-0.5 to +4.5)"
    assert rows[PLAIN][4] is None


@pytest.mark.slow
def test_a_case_is_trained_and_taken_up_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real program: two routers, a few updates, a report with its picture; a second time nothing is trained."""
    args = ["--part", "balance", "--case", "k1", "--seeds", "1", "--words", "4096", "--data", "embedded", "--json"]
    main(args=[*args, "--out", str(tmp_path / "run")])
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    routers = headline["cases"]["k1"]
    assert routers.keys() == {PLAIN, BALANCED}
    assert routers[BALANCED]["perplexity"] == pytest.approx(routers[PLAIN]["perplexity"], rel=0.05)
    assert 0 < routers[BALANCED]["load_entropy"] <= 1
    assert (tmp_path / "run" / "figure.png").stat().st_size > 10_000
    before = (tmp_path / "run/balance/k1/balanced-seed0/metrics.jsonl").read_bytes()
    main(args=[*args, "--out", str(tmp_path / "run"), "--resume"])
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["cases"] == headline["cases"]
    assert (tmp_path / "run/balance/k1/balanced-seed0/metrics.jsonl").read_bytes() == before
