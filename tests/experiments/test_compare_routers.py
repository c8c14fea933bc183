"""Routers put side by side: which runs are made, what becomes of them, and that nothing is trained twice."""

import json
from pathlib import Path
from typing import Any

import pytest

from dmoe_jax.routing.base import RouterError
from dmoe_jax.routing.registry import ROUTERS
from dmoe_jax.runs.run_folder import RunFolder, read_metrics
from dmoe_jax.training.plan import Plan
from dmoe_jax.training.saving import finished_headline, prepare_run
from experiments.compare_routers.__main__ import main
from experiments.compare_routers.measurement import load_routers, run_name
from experiments.compare_routers.settings import CompareRoutersSettings
from experiments.transformer_xl import training
from experiments.transformer_xl.presets import PRESETS
from experiments.transformer_xl.setup import Setup

GRID = PRESETS["dmoe", "tiny"].config.grid_size

MY_ROUTERS = f"""
from functools import partial

from dmoe_jax.routing.combinators import add_noise, chain
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.routing.switch import switch


def mine(grid_size):
    return switch(grid_size)._replace(name="my/router")


def clash(grid_size):
    return product_key(grid_size)


def broken(grid_size):
    return switch(grid_size)._replace(name="broken", combine=lambda logits, mask: -1.0 * mask)


noisy = partial(chain, product_key({GRID}))(partial(add_noise, stddev=0.1))
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
    return ["--data", "embedded", "--out", str(out), "--routers", "product_key", "hash", "--seeds", "3", "5", *more]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "--steps.*0"),
        ({"eval_every": 0}, "--eval-every.*0"),
        ({"eval_tokens": -1}, "--eval-tokens.*-1"),
        ({"failure_rate": 1.0}, "--failure-rate"),
        ({"routers": ("hash", "hash")}, "--routers.*hash hash"),
        ({"seeds": (1, 2, 1)}, "--seeds.*1 2 1"),
        ({"seeds": (-1,)}, "--seeds.*-1"),
        ({"resume": True}, "--resume needs --out"),
    ],
)
def test_settings_are_checked(wrong: dict[str, Any], message: str) -> None:
    """Whatever would fail later fails at once, with its name and value."""
    with pytest.raises(ValueError, match=message):
        CompareRoutersSettings(**wrong)


def test_what_is_compared_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every registered router on three seeds; quick: some on two; a tiny model in a simulated swarm."""
    monkeypatch.setattr(training, "check_router", lambda *_: None)  # its own tests try every registered router
    command, quick = CompareRoutersSettings(), CompareRoutersSettings(quick=True)
    assert list(load_routers(command)) == [ROUTERS[name](GRID).name for name in ROUTERS]
    assert len(load_routers(quick)) == 3
    assert (command.chosen_seeds, quick.chosen_seeds) == ((0, 1, 2), (0, 1))
    assert CompareRoutersSettings(quick=True, seeds=(7,), routers=("peer",)).chosen_seeds == (7,)
    assert [command.place, CompareRoutersSettings(size="full").place] == ["simulated", "local"]


def test_own_routers_go_by_their_names(my_file: Path) -> None:
    """A factory, or a router for this grid, beside registered ones."""
    specs = (f"{my_file}:mine", "switch", f"{my_file}:noisy")
    routers = load_routers(CompareRoutersSettings(routers=specs))
    assert tuple(routers.values()) == specs
    assert list(routers)[:2] == ["my/router", "switch"]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (("product_key", "FILE:clash"), "product_key and .*:clash are both called 'product_key'"),
        (("nonesuch",), "nonesuch.*product_key"),
        (("FILE:broken",), "broken"),
        (("FILE:nonesuch",), "nonesuch"),
    ],
)
def test_unusable_routers_are_refused_before_training(
    specs: tuple[str, ...],
    message: str,
    my_file: Path,
    tmp_path: Path,
    trainings: Trainings,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one line that names the router; no folder is made."""
    named = [spec.replace("FILE", str(my_file)) for spec in specs]
    with pytest.raises(SystemExit) as exit_:
        main(["--data", "embedded", "--out", str(tmp_path / "out"), "--routers", *named])
    assert exit_.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("compare_routers: error: ")
    assert len(error.splitlines()) == 1
    with pytest.raises(ValueError, match=message):
        load_routers(CompareRoutersSettings(routers=tuple(named)))
    assert not (tmp_path / "out").exists()
    assert not trainings.begun


@pytest.mark.parametrize(
    ("label", "name"),
    [("product_key+noise", "product_key+noise-seed3"), ("../my router", ".._my_router-seed3")],
)
def test_names_of_runs_stay_in_their_folder(label: str, name: str) -> None:
    """A router may be called anything."""
    assert run_name(label, 3) == name


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


def test_interrupted_before_anything_was_finished(tmp_path: Path, trainings: Trainings) -> None:
    """There is nothing to compare, and no figure; the headline says so."""
    trainings.errors["product_key-seed3"] = KeyboardInterrupt()
    with pytest.raises(SystemExit) as exit_:
        main(arguments(tmp_path / "out"))
    assert exit_.value.code == 130
    headline = read_metrics(tmp_path / "out" / "metrics.jsonl")[-1]
    assert (headline["kind"], headline["runs_finished"], headline["routers"]) == ("headline", 0, {})
    assert not (tmp_path / "out" / "figure.png").exists()


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


def test_quick_shortens_every_run(tmp_path: Path, trainings: Trainings) -> None:
    """Fewer updates and evaluated words, but never more than were asked for."""
    main(arguments(tmp_path / "a", "--quick"))
    main(arguments(tmp_path / "b", "--quick", "--steps", "5", "--eval-tokens", "100"))
    usual, short = trainings.plans[0], trainings.plans[-1]
    assert usual.steps <= 200
    assert 0 < usual.final_eval_items == usual.eval_items <= 8192
    assert (short.steps, short.eval_items, short.final_eval_items) == (5, 100, 100)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_comparison(my_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A registered and an own router, trained for a few steps in a small simulated swarm, end in figures of each."""
    flags = ["--routers", "product_key", f"{my_file}:mine", "--seeds", "0", "--trainers", "4", "--steps", "8"]
    flags += ["--eval-every", "4", "--quick", "--data", "embedded", "--out", str(tmp_path / "out"), "--json"]
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
