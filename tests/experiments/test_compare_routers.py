"""Routers put side by side: which runs are made, what becomes of them, and that nothing is trained twice."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dmoe_jax.routing import RouterError
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.training.prepared_run import finished_headline, prepare_run
from dmoe_jax.training.run import Plan
from experiments.bench import run_experiment
from experiments.compare_routers.measurement import load_routers
from experiments.compare_routers.pairs import all_pairs, means, ranking_table, sentences
from experiments.compare_routers.settings import CompareRoutersSettings
from experiments.transformer_xl import training
from experiments.transformer_xl.setup import Setup

MY_ROUTERS = """
from dmoe_jax.routing import product_key, switch


def mine(grid_size):
    return switch(grid_size)._replace(name="my/router")


def clash(grid_size):
    return product_key(grid_size)


def broken(grid_size):
    return switch(grid_size)._replace(name="broken", combine=lambda logits, mask: -1.0 * mask)
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
            folder.log("event", name="failed", detail="scores are NaN; at step 1")
            folder.log("headline", complete=False)
            raise error
        perplexity = 100.0 * len(setup.name) + 10 * setup.seed
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
    run_experiment(CompareRoutersSettings, args=arguments(out, "--steps", "50", "--where", "local", "--json"))
    names = ["product_key-seed3", "hash-seed3", "product_key-seed5", "hash-seed5"]
    assert trainings.begun == names
    assert {plan.steps for plan in trainings.plans} == {50}
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (headline["corpus"], headline["where"], headline["failed"]) == ("embedded", "local", [])
    assert headline["runs"] == headline["runs_finished"] == 4
    # "hash" has 4 letters, "product_key" 11; seeds 3 and 5 add 30 and 50.
    assert headline["routers"]["product_key"]["perplexity"] == 1140.0
    assert headline["routers"]["hash"]["test_perplexity"] == 441.0
    (pair,) = headline["pairs"]
    assert (pair["lower"], pair["difference"], pair["told_apart"]) == ("hash", pytest.approx(700), True)
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["config.json", "metrics.jsonl", "figure.png", "report.md", "results.csv", *names]
    )
    with (out / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    expected = [("product_key", "3", "1130.0"), ("product_key", "5", "1150.0"), ("hash", "3", "430.0")]
    assert [(row["label"], row["seed"], row["validation_perplexity"]) for row in rows][:3] == expected
    assert len(rows) == 4
    report = (out / "report.md").read_text()
    assert "| hash | 2 | 440 ± 14.1 | 441 |" in report
    assert headline["says"][1] in report
    assert RunFolder(out / "hash-seed5").config()["settings"]["seed"] == 5


@pytest.mark.slow
def test_finished_runs_are_not_trained_again(
    tmp_path: Path, trainings: Trainings, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the third run: status 130 and a report of two; resumed, the third and the fourth are trained."""
    out = tmp_path / "out"
    trainings.errors["product_key-seed5"] = BaseExceptionGroup("of a nursery", [KeyboardInterrupt()])
    with pytest.raises(SystemExit) as exit_:
        run_experiment(CompareRoutersSettings, args=arguments(out))
    assert exit_.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == "compare_routers: interrupted; --resume goes on"
    assert "| runs finished | 2 |" in (out / "report.md").read_text()
    assert "| product_key | 1 | 1,130 |" in (out / "report.md").read_text()
    run_experiment(CompareRoutersSettings, args=arguments(out, "--resume"))
    assert trainings.begun[2:] == ["product_key-seed5", "product_key-seed5", "hash-seed5"]
    assert "| runs finished | 4 |" in (out / "report.md").read_text()
    with pytest.raises(SystemExit):
        run_experiment(CompareRoutersSettings, args=arguments(out, "--resume", "--batch-size", "9"))
    assert "begun with batch_size None " in capsys.readouterr().err.splitlines()[-1]
    assert len(trainings.begun) == 5


@pytest.mark.slow
def test_a_failed_run_does_not_stop_the_others(
    tmp_path: Path, trainings: Trainings, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named at the end, status 1, and is no part of the means; what nobody expects is not held back."""
    out = tmp_path / "out"
    trainings.errors["product_key-seed3"] = BaseExceptionGroup("of a nursery", [RouterError("scores are NaN")])
    with pytest.raises(SystemExit) as exit_:
        run_experiment(CompareRoutersSettings, args=arguments(out, "--json"))
    assert exit_.value.code == 1
    captured = capsys.readouterr()
    last = "compare_routers: error: 1 runs failed: product_key-seed3: scores are NaN; at step 1"
    assert captured.err.splitlines()[-1] == last
    headline = json.loads(captured.out.splitlines()[-1])
    assert (headline["failed"], headline["runs_finished"]) == (["product_key-seed3"], 3)
    assert headline["routers"]["product_key"]["perplexity"] == 1150.0
    trainings.errors["product_key-seed3"] = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        run_experiment(CompareRoutersSettings, args=arguments(out, "--resume"))


def test_routers_are_tried_and_named(my_file: Path) -> None:
    """One's own are found in a file; one that breaks its contract, or has another's name, is refused."""

    def load(*routers: str) -> dict[str, str]:
        return load_routers(CompareRoutersSettings(routers=routers))

    assert load("hash", f"{my_file}:mine") == {"hash": "hash", "my_router": f"{my_file}:mine"}
    with pytest.raises(RouterError, match="broken"):
        load(f"{my_file}:broken")
    with pytest.raises(ValueError, match="both called 'product_key'"):
        load("product_key", f"{my_file}:clash")
    assert len(load()) >= 12


def test_a_quick_run_records_what_it_does() -> None:
    """A smaller number of one's own counts, also in the copies that are made of the settings."""
    quick = CompareRoutersSettings(quick=True)
    assert (quick.steps, quick.eval_tokens, quick.final_eval_tokens) == (32, 4096, 4096)
    own = replace(CompareRoutersSettings(quick=True, steps=8, eval_tokens=512), seeds=(3,))
    assert (own.steps, own.eval_tokens, own.final_eval_tokens) == (8, 512, 512)
    whole = CompareRoutersSettings()
    assert (whole.steps, whole.eval_tokens, whole.final_eval_tokens) == (None, 16_384, 0)


def test_who_is_told_apart() -> None:
    """By hand: differences of 10, 12 and 11 are told apart (p = 0.0027, three times that by Holm's correction for three
    pairs); 9, 15 and 9 were so alone (0.031, times two); 1, -3 and 2 are not; a seed alone says nothing."""
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
        ("close", "worst"): False,
    }
    far = pairs["best", "worst"].above
    # Mean 11, deviation 1, 4.303 / sqrt(3) of it to either side.
    assert (far.mean, far.low, far.high) == pytest.approx((11, 11 - 2.484, 11 + 2.484), abs=1e-3)
    rows = {row[1]: row for row in ranking_table(perplexities, list(pairs.values())).rows}
    assert (rows["best"][0], rows["best"][4], rows["best"][5]) == (1, None, "3")
    assert rows["worst"][4:] == ["11 (8.516 to 13.48)", "1"]
    said = sentences(perplexities, list(pairs.values()))
    assert said[0].startswith(
        "best has the lowest mean validation perplexity, 100.3, and worst the highest, 111.3, 11 %"
    )
    assert said[1] == "1 of 3 pairs are told apart by 3 seeds, corrected for the number of pairs (Holm)."
    like = {label: seeds for label, seeds in perplexities.items() if label != "worst"}
    said = sentences(like, all_pairs(like))
    assert said[0] == "No router is told apart from another by 3 seeds, corrected for the number of pairs (Holm)."
    assert said[1].startswith("best has the lowest")
    single = {"a": {0: 1.0}, "b": {0: 2.0}}
    assert sentences(single, all_pairs(single))[0] == "No router is told apart from another: that takes two seeds."
    assert sentences({"a": {0: 1.0}, "b": {}}, []) == []


@pytest.mark.slow
def test_a_real_comparison(my_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A registered and an own router, trained for a few steps in a small simulated swarm, end in figures of each."""
    flags = ["--routers", "product_key", f"{my_file}:mine", "--seeds", "0", "--trainers", "4", "--steps", "8"]
    flags += ["--eval-every", "4", "--quick", "--data", "embedded", "--out", str(tmp_path / "out"), "--json"]
    flags += ["--jobs", "1"]
    run_experiment(CompareRoutersSettings, args=flags)
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert headline["runs_finished"] == 2
    for label in ("product_key", "my_router"):
        figures = headline["routers"][label]
        assert 1 < figures["perplexity"] < 2225
        assert 0 < figures["calls_lost"] < 0.5
        assert 0 < figures["final_load_entropy"] <= 1
    run_experiment(CompareRoutersSettings, args=[*flags, "--resume"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == headline
