"""The paper's setting as one compiled program: the same model, repeatable, resumable, as as stale as it says."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from dmoe_jax.arrays import host_copy
from dmoe_jax.checkpoints import Checkpoints
from dmoe_jax.layer_config import Route
from dmoe_jax.routing.base import Router
from dmoe_jax.routing.combinators import add_noise
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.trainer import StepRecord
from dmoe_jax.training.engine import Engine
from dmoe_jax.training.run import train_without_waiting
from experiments.transformer_xl.__main__ import main
from experiments.transformer_xl.emulated import EmulatedDmoe
from experiments.transformer_xl.local import LocalEngine
from experiments.transformer_xl.presets import PRESETS
from experiments.transformer_xl.setup import Setting, Setup
from tests.experiments.small_runs import UNBOUNDED, small_corpus, small_preset

SETTING = Setting(place="emulated", num_trainers=4, failure_rate=0.2)
NOISY = add_noise(product_key((2, 2)), stddev=0.5)


def make_setup(router: Router = NOISY, setting: Setting = SETTING, *, num_layers: int = 1) -> Setup:
    """A mixture with dropout; equal arguments share what is compiled."""
    preset = small_preset("dmoe", num_layers=num_layers, layer={"dropout": 0.1}, input_dropout=0.1, cutoffs=())
    preset = replace(preset, recipe=UNBOUNDED, expert_recipe=UNBOUNDED)
    return Setup(preset=preset, corpus=small_corpus(), steps=100, seed=0, router=router, setting=setting, batch_size=1)


def train(engine: Engine, *stretches: int) -> list[StepRecord]:
    """Records of the steps of these stretches."""
    records: list[StepRecord] = []
    for num_steps in stretches:
        train_without_waiting(engine.advance(num_steps, records.append, lambda trainer, error: None))
    return records


def evaluate(engine: Engine) -> float:
    """Validation loss."""
    return train_without_waiting(engine.evaluate("valid", max_items=None, on_batch=lambda done, total: None)).loss


@pytest.fixture(scope="module")
def whole_run() -> tuple[EmulatedDmoe, list[StepRecord]]:
    """A run that nothing interrupts or looks at, and its steps."""
    engine = EmulatedDmoe(make_setup())
    return engine, train(engine, 100)


@pytest.mark.slow
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted(
    whole_run: tuple[EmulatedDmoe, list[StepRecord]], tmp_path: Path
) -> None:
    """With delays, failures, dropout and noise; evaluated at its pause, while calls are under way, and taken up from
    a checkpoint on disk."""
    whole, records = whole_run
    paused, resumed = EmulatedDmoe(make_setup()), EmulatedDmoe(make_setup())
    assert train(paused, 7, 30) == records[:37]
    assert evaluate(paused) == evaluate(paused) != evaluate(whole)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(paused.step, host_copy(paused.state()), json.loads(json.dumps(paused.facts())))
    resumed.load(*checkpoints.restore_latest(resumed.state()))
    checkpoints.close()
    assert any(np.asarray(calls.answered).any() for calls in resumed.state().trainers.calls)
    assert resumed.totals() == paused.totals()
    assert train(resumed, 63) == records[37:]
    jax.tree.map(np.testing.assert_array_equal, whole.state(), resumed.state())
    assert whole.totals() == resumed.totals()
    assert evaluate(whole) == evaluate(resumed)


@pytest.mark.slow
def test_its_figures_are_those_of_the_setting(whole_run: tuple[EmulatedDmoe, list[StepRecord]]) -> None:
    """Every update is reported once, four trainers at work make it three updates stale, a fifth of the calls fail."""
    engine, records = whole_run
    assert isinstance(engine, Engine)
    assert [record.step for record in records] == list(range(1, 101))
    assert {record.trainer for record in records} == set(range(4))
    totals = engine.totals()
    assert totals.staleness == sum(record.staleness for record in records)
    # The first of each trainer saw fewer others: 6 updates of staleness are missing at most.
    assert 3 - 0.2 <= totals.staleness / 100 <= 3
    assert totals.items == sum(record.items for record in records) == 100 * 6
    # 100 steps x 2 experts x (forward, and backward of the four fifths that answered) = 360 calls, and what three
    # trainers have under way; a fifth failed.
    assert totals.calls_ok + totals.calls_failed == pytest.approx(360, abs=30)
    assert totals.calls_failed / (totals.calls_ok + totals.calls_failed) == pytest.approx(0.2, abs=0.05)
    # Each backward call that was answered trains its expert on its one sequence: 200 x 0.8 x 0.8 = 128.
    assert sum(totals.load.values()) == pytest.approx(128, abs=20)
    assert totals.load.keys() == {uid for layer in engine.layers.values() for uid in layer}
    assert 0 < (totals.figures["mean_expert_staleness"] or 0) < 6
    assert totals.virtual_s is None


@pytest.mark.slow
@pytest.mark.parametrize(("route", "steps"), [("sequence", 5), ("token", 2)])
def test_one_trainer_without_failures_is_the_step_on_this_device(route: Route, steps: int) -> None:
    """The model, the text and the batches are those of the mixture in one jit.

    Of tokens only until a choice between two experts is so close that rounding decides it, which is in the third step.
    """
    setup = make_setup(product_key((2, 2)), Setting(place="emulated", num_trainers=1, failure_rate=0.0), num_layers=2)
    setup = replace(setup, route=route)
    swarm, device = EmulatedDmoe(setup), LocalEngine(replace(setup, setting=None))
    losses = [record.loss for record in train(swarm, steps)]
    np.testing.assert_allclose(losses, [record.loss for record in train(device, steps)], rtol=1e-4)
    assert evaluate(swarm) == pytest.approx(evaluate(device), rel=1e-4)
    assert swarm.totals().load == device.totals().load
    # 2 layers x 2 experts x (forward, backward) a step; six tokens may choose all four.
    calls = 8 * steps
    assert swarm.totals().calls_ok == calls if route == "sequence" else calls < swarm.totals().calls_ok <= 2 * calls
    assert sum(swarm.totals().load.values()) == steps * 2 * 2 * (1 if route == "sequence" else 6)
    assert not swarm.totals().failures


@pytest.mark.slow
def test_the_command_emulates_the_mixture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dense model beside it is trained in virtual time, in the same setting and on as many words."""
    for model in ("dmoe", "small"):
        monkeypatch.setitem(PRESETS, (model, "tiny"), small_preset(model, num_layers=1))  # type: ignore[arg-type]
    monkeypatch.setattr("experiments.transformer_xl.training.load_corpus", lambda **_: small_corpus())
    flags = ["--where", "emulated", "--model", "dmoe", "small", "--steps", "6", "--eval-every", "4", "--trainers", "3"]
    main([*flags, "--jobs", "1", "--json", "--out", str(tmp_path / "run")])
    models = json.loads(capsys.readouterr().out.splitlines()[-1])["models"]
    assert models["dmoe"]["training_tokens"] == models["small"]["training_tokens"] == 36
    assert (models["dmoe"]["virtual_s"], models["small"]["virtual_s"] > 0) == (None, True)
    assert models["dmoe"]["load_cv"] is not None
    swarms = [RunFolder(tmp_path / "run" / model / "seed0").config()["settings"]["swarm"] for model in models]
    assert [swarm["place"] for swarm in swarms] == ["emulated", "simulated"]
    assert [swarm["num_trainers"] for swarm in swarms] == [3, 3]
    assert {"figure.png", "report.md"} <= {path.name for path in (tmp_path / "run").iterdir()}
