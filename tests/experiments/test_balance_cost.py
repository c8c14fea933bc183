"""Cost of balance: the runs that are made, what is taken from them, and one case from its beginning to its end."""

import json
from pathlib import Path

import pytest

from dmoe_jax.routing import make_router
from experiments.routing.__main__ import main
from experiments.routing.balance import Outcome, balance_figures, balance_table, cost
from experiments.routing.cases import BALANCED, CASES, FIRST, LOSSES, PLAIN, SEQ_LEN, case_trainings
from experiments.transformer_xl.presets import sized_preset


def metrics(perplexity: float, entropies: tuple[float, ...]) -> list[dict[str, object]]:
    """A run's records: four windows of one layer, and a curve."""
    found: list[dict[str, object]] = []
    for step, entropy in enumerate(entropies, start=1):
        found.append({"kind": "train", "step": step, "items": 1_000_000})
        found.append({"kind": "balance", "layer": "ffn0", "step": step, "entropy": entropy, "cv": 0.1, "dead": 0})
        found.append({"kind": "eval", "step": step, "split": "valid", "perplexity": perplexity + 4 - step})
    return found


def outcome(perplexity: float, entropy: float, idle: float = 0) -> Outcome:
    records = metrics(perplexity, (1.0, 0.5, entropy, entropy))
    return Outcome(perplexity=perplexity, entropy=entropy, idle=idle, metrics=records)


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_made_of_runs_that_can_be_trained(name: str, tmp_path: Path) -> None:
    """Each router with one seed before the next seed, at the words that were asked for, in a folder of its own."""
    case = CASES[name]
    runs = case_trainings(name, tmp_path, words=8192, seeds=(3, 5), data="embedded", resume=False)
    seeds = (3, 5)[: case.seeds]
    assert [run.settings.router for run in runs] == list(case.routers) * len(seeds)
    assert len({run.settings.out for run in runs}) == len(runs)
    for run in runs:
        preset = sized_preset(run.settings, "dmoe")
        assert make_router(run.settings.router, preset.config.grid_size).grid_size == preset.config.grid_size
        rows = run.settings.batch_size or 1
        assert run.settings.steps == case.words * 8192 / (rows * SEQ_LEN)
        assert preset.config.seq_len == SEQ_LEN
    assert {PLAIN, BALANCED} <= set(case.routers)


def test_costs_are_paired_by_seed() -> None:
    """In per cent of the plain router's perplexity at the same seed, beside the loss whose load is as even."""
    first = {
        PLAIN: {0: outcome(100.0, 0.7), 1: outcome(200.0, 0.7), 2: outcome(300.0, 0.7)},
        BALANCED: {0: outcome(101.0, 0.96), 1: outcome(204.0, 0.98), 2: outcome(309.0, 0.97, idle=1)},
        LOSSES[0]: {seed: outcome(100.0, 0.8) for seed in range(3)},
        LOSSES[1]: {0: outcome(101.0, 0.96), 1: outcome(204.0, 0.96), 2: outcome(412.0, 0.96)},
    }
    interval = cost(first, BALANCED)
    assert interval is not None
    assert interval.mean == pytest.approx(2.0)
    assert interval.ends == pytest.approx((2 - 2.484, 2 + 2.484), abs=1e-3)
    figures = balance_figures({FIRST: first})
    assert figures["load_entropy"] == pytest.approx(0.97)
    assert figures["idle_experts"] == 1
    assert figures["perplexity_cost_low"] < 0 < figures["perplexity_cost_high"]
    assert figures["nearest_balancing_loss"] == LOSSES[1]
    assert figures["over_balancing_loss"] == pytest.approx(-100 / 3 * (1 - 309 / 412))
    assert figures["cases"][FIRST][PLAIN]["perplexity_cost"] == 0
    rows = balance_table({FIRST: first}).rows
    assert [row[1] for row in rows] == list(first)
    assert rows[1][4] == "+2.0 % (-0.5 to +4.5)"


@pytest.mark.slow
def test_a_case_is_trained_and_taken_up_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real program: two routers, a few updates, a report with its picture; a second time nothing is trained."""
    args = ["--part", "balance", "--case", "k1", "--seeds", "1", "--words", "4096", "--data", "embedded", "--json"]
    main([*args, "--out", str(tmp_path / "run")])
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    routers = headline["cases"]["k1"]
    assert routers.keys() == {PLAIN, BALANCED}
    assert routers[BALANCED]["perplexity"] == pytest.approx(routers[PLAIN]["perplexity"], rel=0.05)
    assert 0 < routers[BALANCED]["load_entropy"] <= 1
    assert (tmp_path / "run" / "figure.png").stat().st_size > 10_000
    before = (tmp_path / "run/balance/k1/balanced-seed0/metrics.jsonl").read_bytes()
    main([*args, "--out", str(tmp_path / "run"), "--resume"])
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["cases"] == headline["cases"]
    assert (tmp_path / "run/balance/k1/balanced-seed0/metrics.jsonl").read_bytes() == before
