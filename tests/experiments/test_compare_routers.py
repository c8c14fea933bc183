"""Routers put side by side: which runs are made, what becomes of them, and that nothing is trained twice."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dmoe_jax.routing.base import RouterError
from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.run_folder import RunFolder, read_metrics
from dmoe_jax.training.prepared_run import finished_headline, prepare_run
from dmoe_jax.training.run import Plan
from experiments.compare_routers import measurement
from experiments.compare_routers.__main__ import main
from experiments.compare_routers.budget import Cost, plan_runs
from experiments.compare_routers.pairs import all_pairs, means, ranking_table, sentences
from experiments.compare_routers.pieces import time_pieces
from experiments.compare_routers.settings import CompareRoutersSettings
from experiments.compare_routers.trainings import router_runs
from experiments.transformer_xl import training
from experiments.transformer_xl.presets import PRESETS
from experiments.transformer_xl.setup import Setup

GRID = PRESETS["dmoe", "tiny"].config.grid_size

MY_ROUTERS = f"""
from functools import partial

from dmoe_jax.routing.combinators import add_noise, chain_routers
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.routing.switch import switch


def mine(grid_size):
    return switch(grid_size)._replace(name="my/router")


def clash(grid_size):
    return product_key(grid_size)


def broken(grid_size):
    return switch(grid_size)._replace(name="broken", combine=lambda logits, mask: -1.0 * mask)


noisy = partial(chain_routers, product_key({GRID}))(partial(add_noise, stddev=0.1))
"""


@pytest.fixture
def my_file(tmp_path: Path) -> Path:
    """A user's own routers, under a name that no other test has run."""
    path = tmp_path / "my_file.py"
    path.write_text(MY_ROUTERS)
    return path


class Trainings:
    """Stands in for the training of a run: notes it, and writes what a whole run leaves behind."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.plans: list[Plan] = []
        self.errors: dict[str, BaseException] = {}

    def __call__(self, setup: Setup, plan: Plan, path: Path, *, resume: bool, **_: Any) -> None:
        folder = prepare_run(path, {"seed": setup.seed}, resume=resume).begin()
        if finished_headline(folder) is not None:
            return
        name = path.name
        self.begun.append(name)
        self.plans.append(plan)
        folder.log("train", step=1, items=10, time_s=1.0, staleness=2)
        if (error := self.errors.pop(name, None)) is not None:
            folder.log("headline", complete=False)
            raise error
        perplexity = 100.0 * len(setup.title) + 10 * setup.seed
        folder.log("eval", step=1, split="valid", perplexity=perplexity, items_seen=10)
        folder.log("eval", step=1, split="test", perplexity=perplexity + 1, items_seen=10)
        folder.log("headline", validation_perplexity=perplexity, complete=True)


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> Trainings:
    """`main` without training."""
    found = Trainings()
    monkeypatch.setattr(training, "train_in_folder", found)
    return found


def arguments(out: Path, *more: str) -> list[str]:
    own = ["--routers", "product_key", "hash", "--seeds", "3", "5", "--jobs", "1"]
    return ["--data", "embedded", "--out", str(out), *own, *more]


@pytest.mark.slow
def test_all_runs_are_made_and_compared(
    tmp_path: Path, trainings: Trainings, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every router before the next seed, a folder each; means over seeds in the table, the headline and the JSON."""
    out = tmp_path / "out"
    main(arguments(out, "--steps", "50", "--where", "local", "--json"))
    names = ["product_key-seed3", "hash-seed3", "product_key-seed5", "hash-seed5"]
    assert trainings.begun == names
    assert {plan.steps for plan in trainings.plans} == {50}
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name: headline[name] for name in ("corpus", "size", "where", "runs", "runs_finished", "failed")} == {
        "corpus": "embedded",
        "size": "tiny",
        "where": "local",
        "runs": 4,
        "runs_finished": 4,
        "failed": [],
    }
    # "hash" has 4 letters, "product_key" 11; seeds 3 and 5 add 30 and 50.
    assert (headline["best_router"], headline["best_validation_perplexity"]) == ("hash", 440.0)
    assert headline["routers"]["product_key"]["perplexity"] == 1140.0
    assert headline["routers"]["hash"]["test_perplexity"] == 441.0
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["config.json", "metrics.jsonl", "figure.png", "report.md", *names]
    )
    assert "| hash | 2 | 440 ± 14.1 | 441 |" in (out / "report.md").read_text()
    assert RunFolder(out / "hash-seed5").config()["settings"]["seed"] == 5


def test_finished_runs_are_not_trained_again(
    tmp_path: Path, trainings: Trainings, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the third run: status 130 and a report of two; resumed, the third and the fourth are trained."""
    out = tmp_path / "out"
    trainings.errors["product_key-seed5"] = BaseExceptionGroup("of a nursery", [KeyboardInterrupt()])
    with pytest.raises(SystemExit) as exit_:
        main(arguments(out))
    assert exit_.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == "compare_routers: interrupted; --resume goes on"
    assert "| runs finished | 2 |" in (out / "report.md").read_text()
    assert "| product_key | 1 | 1,130 |" in (out / "report.md").read_text()
    main(arguments(out, "--resume"))
    assert trainings.begun[2:] == ["product_key-seed5", "product_key-seed5", "hash-seed5"]
    assert "| runs finished | 4 |" in (out / "report.md").read_text()
    with pytest.raises(SystemExit):
        main(arguments(out))
    assert "not empty" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(arguments(out, "--resume", "--batch-size", "9"))
    assert "begun with batch_size None " in capsys.readouterr().err.splitlines()[-1]
    assert len(trainings.begun) == 5


def test_a_failed_run_does_not_stop_the_others(
    tmp_path: Path, trainings: Trainings, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named at the end, status 1, and is no part of the means; what nobody expects is not held back."""
    out = tmp_path / "out"
    error = RouterError("router 'product_key': scores in layer0 are NaN\nand much more")
    trainings.errors["product_key-seed3"] = BaseExceptionGroup("of a nursery", [error])
    with pytest.raises(SystemExit) as exit_:
        main(arguments(out, "--json"))
    assert exit_.value.code == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == "compare_routers: error: 1 runs failed: product_key-seed3"
    headline = json.loads(captured.out.splitlines()[-1])
    assert (headline["failed"], headline["runs_finished"]) == (["product_key-seed3"], 3)
    assert headline["routers"]["product_key"]["perplexity"] == 1150.0
    report = (out / "report.md").read_text()
    assert "| run failed | product_key-seed3: router 'product_key': scores in layer0 are NaN |" in report
    trainings.errors["product_key-seed3"] = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        main(arguments(out, "--resume"))


def test_every_router_under_every_condition() -> None:
    """Failing calls and a slow node are rows of their own, with the text and the seeds of the others."""
    settings = CompareRoutersSettings(quick=True, failures=(0.0, 0.3), slow_nodes=(10.0,), eval_tokens=50)
    runs = router_runs(settings, {"a": "product_key", "b": "hash"}, Path("out"), seeds=(0, 1), steps=100)
    assert [each.training.label for each in runs[:8]] == [
        *("a", "b", "a, failures 0", "b, failures 0", "a, failures 0.3", "b, failures 0.3"),
        *("a, slow node 10x", "b, slow node 10x"),
    ]
    found = [each.training.settings for each in runs]
    assert [own.seed for own in found] == [0] * 8 + [1] * 8
    assert [(own.failure_rate, own.slow_node) for own in found[:8:2]] == [(0.1, 1), (0.0, 1), (0.3, 1), (0.1, 10)]
    assert {(own.steps, own.eval_tokens, own.model, own.where) for own in found} == {(32, 50, ("dmoe",), "simulated")}
    assert [own.router for own in found[:2]] == ["product_key", "hash"]
    assert len({own.out for own in found}) == 16
    assert str(found[4].out) == "out/a__failures_0.3-seed0"


def test_who_is_told_apart() -> None:
    """By hand: differences of -10, -12 and -11 are told apart; -1, 3 and -2 are not; a seed alone says nothing."""
    perplexities = {
        "worst": {0: 110.0, 1: 113.0, 2: 111.0},
        "best": {0: 100.0, 1: 101.0, 2: 100.0},
        "close": {0: 101.0, 1: 98.0, 2: 102.0, 9: 0.0},
    }
    # Over the seeds that all have: 301 / 3 for both, told from each other by nobody.
    assert means(perplexities) == pytest.approx({"best": 301 / 3, "close": 301 / 3, "worst": 334 / 3})
    pairs = {(pair.lower, pair.higher): pair for pair in all_pairs(perplexities)}
    assert {names: pair.is_told_apart for names, pair in pairs.items()} == {
        ("best", "close"): False,
        ("best", "worst"): True,
        ("close", "worst"): True,
    }
    far = pairs["best", "worst"].difference
    # Mean -11, deviation 1, 4.303 / sqrt(3) of it to either side.
    assert (far.mean, far.low, far.high) == pytest.approx((-11, -11 - 2.484, -11 + 2.484), abs=1e-3)
    rows = {row[1]: row for row in ranking_table(perplexities, list(pairs.values()), "In order").rows}
    assert (rows["best"][0], rows["best"][4], rows["best"][5]) == (1, None, "3")
    assert rows["worst"][4:] == ["11 (8.516 to 13.48)", "1, 2"]
    said = sentences(perplexities, {"best": 0.9, "worst": 0.5, "close": None})
    assert len(said) == 3
    assert said[0].startswith(
        "best has the lowest mean validation perplexity, 100.3, and worst the highest, 111.3, 11 %"
    )
    assert "Of 3 pairs 2 are told apart by 3 seeds, where about 0.15 would be by chance" in said[1]
    assert "best ends below worst by 11 (8.516 to 13.48)" in said[1]
    assert "most even with best (entropy 0.90; 1 of 3" in said[2]
    alike = {"a": {0: 1.0, 1: 2.0}, "b": {0: 2.0, 1: 1.0}}
    assert sentences(alike, {})[1].startswith("None of 1 pairs is told apart by 2 seeds")
    assert sentences({"a": {0: 1.0}, "b": {0: 2.0}}, {})[1].startswith("With one seed")
    assert sentences({"a": {0: 1.0}, "b": {}}, {}) == []


COST = Cost(start_s=10.0, update_s=0.1, word_s=0.001)


def test_what_fits_into_a_budget() -> None:
    """Two rows; 85 % of the time; ten seconds and a thousand words' second for each run, then updates of 0.1 s."""
    fixed = {"spent_s": 20.0, "num_words": 1000, "num_jobs": 1}
    # 0.85 * 400 - 20 = 320 s for 2 * 3 runs: 53.3 each, 11 of them fixed, 42.3 for 423 updates.
    plan = plan_runs([COST] * 2, budget_s=400.0, most_steps=1000, **fixed)
    assert (plan.seeds, plan.steps) == ((0, 1, 2), 423)
    assert plan.expected_s == pytest.approx(20 + 6 * (11 + 42.3))
    # Two at once: 640 s.
    assert plan_runs([COST] * 2, budget_s=400.0, most_steps=10_000, **fixed | {"num_jobs": 2}).steps == 956
    # Whole runs take 31 s: 5 seeds of both are 310 s, 6 would be 372.
    assert plan_runs([COST] * 2, budget_s=400.0, most_steps=200, **fixed).seeds == (0, 1, 2, 3, 4)
    assert plan_runs([COST] * 2, budget_s=4e4, most_steps=200, **fixed).seeds == tuple(range(10))
    # What is given is kept, and the other chosen.
    assert plan_runs([COST] * 2, budget_s=400.0, most_steps=200, seeds=(7,), **fixed).steps == 200
    assert plan_runs([COST] * 2, budget_s=400.0, most_steps=80, steps=80, **fixed).seeds == tuple(range(8))
    for steps, least in ((None, 20), (5000, 5000)):
        with pytest.raises(
            UsageError, match=rf"too short for 2 rows: with 3 seeds and {least} updates .*fewer --routers"
        ):
            plan_runs([COST] * 2, budget_s=60.0, most_steps=steps or 1000, steps=steps, **fixed)


def test_a_budget_is_planned_once(
    tmp_path: Path, trainings: Trainings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each router is timed; the plan stays in the folder, so that a resumed comparison goes on with the same."""
    timed = []

    def time_pieces(pieces: Any, **_: Any) -> dict[str, Cost]:
        timed.extend(pieces)
        return dict.fromkeys(pieces, COST)

    monkeypatch.setattr(measurement, "time_pieces", time_pieces)
    out = tmp_path / "out"
    flags = ["--data", "embedded", "--out", str(out), "--routers", "product_key", "hash", "--jobs", "1", "--json"]
    trainings.errors["hash-seed1"] = KeyboardInterrupt()
    with pytest.raises(SystemExit):
        main([*flags, "--budget", "2h", "--eval-tokens", "100", "--failures", "0.5"])
    assert timed == ["product_key", "hash"]
    (record,) = [each for each in read_metrics(out / "metrics.jsonl") if each["kind"] == "plan"]
    main([*flags, "--budget", "2h", "--eval-tokens", "100", "--failures", "0.5", "--resume"])
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert timed == ["product_key", "hash"]
    assert {plan.steps for plan in trainings.plans} == {record["steps"]} == {headline["planned_steps"]}
    assert 20 <= record["steps"] <= 8000
    assert headline["runs_finished"] == 4 * len(record["seeds"]) == 4 * headline["planned_seeds"] >= 12
    assert set(headline["conditions"]) == {"failures 0.5"}
    assert set(headline["conditions"]["failures 0.5"]["routers"]) == {"product_key, failures 0.5", "hash, failures 0.5"}
    # The stand-in's perplexities differ by the length of the label, equally for all seeds.
    (pair,) = headline["pairs"]
    assert (pair["lower"], pair["higher"], pair["told_apart"]) == ("hash", "product_key", True)
    assert pair["difference"] == pytest.approx(-700)
    assert math.isclose(pair["interval"][0], pair["interval"][1])
    assert headline["pairs_told_apart"] == 1
    report = (out / "report.md").read_text()
    assert headline["says"][0] in report
    assert "Under failures 0.5: hash, failures 0.5 has the lowest" in report


@pytest.mark.slow
def test_a_real_comparison(my_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A registered and an own router, trained for a few steps in a small simulated swarm, end in figures of each."""
    flags = ["--routers", "product_key", f"{my_file}:mine", "--seeds", "0", "--trainers", "4", "--steps", "8"]
    flags += ["--eval-every", "4", "--quick", "--data", "embedded", "--out", str(tmp_path / "out"), "--json"]
    flags += ["--jobs", "1"]
    main(flags)
    captured = capsys.readouterr()
    headline = json.loads(captured.out.splitlines()[-1])
    assert headline["runs_finished"] == 2
    for label in ("product_key", "my/router"):
        figures = headline["routers"][label]
        assert 1 < figures["perplexity"] < 2225
        assert 0 < figures["calls_lost"] < 0.5
        assert 0 < figures["final_load_entropy"] <= 1
        assert figures["virtual_s"] > 0
    assert "run 2 of 2: my/router, seed 0" in captured.err
    main([*flags, "--resume"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == headline


@pytest.mark.slow
def test_pieces_are_timed_in_processes_of_their_own(my_file: Path, tmp_path: Path) -> None:
    """Two at once on their shares of the cores; a router that breaks its contract is one line that names it."""
    flags: dict[str, Any] = {"data": "embedded", "out": tmp_path, "batch_size": 1}
    settings = CompareRoutersSettings(**flags, where="local")
    routers = {"product_key": "product_key", "mine": f"{my_file}:mine", "hash": "hash"}
    runs = {run.router: run.training for run in router_runs(settings, routers, tmp_path, seeds=(0,))}
    noted: list[str] = []
    costs = time_pieces(runs, data="embedded", num_jobs=2, note=lambda router, cost: noted.append(router))
    assert list(costs) == noted == list(routers)
    assert all(min(cost.start_s, cost.update_s, cost.word_s) > 0 for cost in costs.values())
    broken = router_runs(settings, {"broken": f"{my_file}:broken"}, tmp_path, seeds=(0,))[0].training
    with pytest.raises(UsageError, match="broken: "):
        time_pieces({"broken": broken}, data="embedded", num_jobs=1, note=lambda router, cost: None)
