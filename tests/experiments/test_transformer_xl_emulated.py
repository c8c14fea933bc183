"""The paper's setting as one compiled program: the same model, repeatable, resumable, as stale as it says."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from dmoe_jax.arrays import host_copy
from dmoe_jax.autodiff import without_waiting
from dmoe_jax.checkpoints import Checkpoints
from dmoe_jax.routing import Router, add_noise, product_key
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.trainer import StepRecord
from dmoe_jax.training.engine import Engine
from experiments.bench import run_experiment
from experiments.transformer_xl.asynchronous import EmulatedDmoe
from experiments.transformer_xl.local import LocalEngine
from experiments.transformer_xl.presets import PRESETS
from experiments.transformer_xl.settings import TrainingSettings, TransformerXLSettings
from experiments.transformer_xl.setup import Setup
from tests.experiments.small_runs import UNBOUNDED, small_corpus, small_preset

SLOW = TrainingSettings(where="emulated", trainers=4, failure_rate=0.2)
NOISY = add_noise(product_key((2, 2)), stddev=0.5)


def make_setup(router: Router = NOISY, settings: TrainingSettings = SLOW, *, num_layers: int = 1) -> Setup:
    """A mixture with dropout; equal arguments share what is compiled."""
    preset = small_preset("dmoe", num_layers=num_layers, layer={"dropout": 0.1}, input_dropout=0.1, cutoffs=())
    preset = replace(preset, recipe=UNBOUNDED, expert_recipe=UNBOUNDED)
    return Setup(preset=preset, corpus=small_corpus(), steps=100, seed=0, router=router, settings=settings)


def train(engine: Engine, *stretches: int) -> list[StepRecord]:
    """Records of the steps of these stretches."""
    records: list[StepRecord] = []
    for num_steps in stretches:
        without_waiting(engine.advance(num_steps, records.append, lambda trainer, error: None))
    return records


def evaluate(engine: Engine) -> float:
    """Validation loss."""
    return without_waiting(engine.evaluate("valid", max_items=None, on_batch=lambda done, total: None)).loss


@pytest.mark.slow
def test_a_run_repeats_itself_and_is_that_of_the_setting(tmp_path: Path) -> None:
    """With delays, failures, dropout and noise, to the last bit: evaluated at a pause, while calls are under way, and
    taken up from a checkpoint on disk. Four trainers make it three updates stale, a fifth of the calls fail."""
    whole, paused, resumed = (EmulatedDmoe(make_setup()) for _ in range(3))
    records = train(whole, 100)
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
    assert (whole.totals(), evaluate(whole)) == (resumed.totals(), evaluate(resumed))

    assert [record.step for record in records] == list(range(1, 101))
    assert {record.trainer for record in records} == set(range(4))
    totals = whole.totals()
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
    assert totals.virtual_s is None


@pytest.mark.slow
def test_one_trainer_without_failures_is_the_step_on_this_device() -> None:
    """The model, the text and the batches are those of the mixture in one jit."""
    alone = TrainingSettings(where="emulated", trainers=1, failure_rate=0.0)
    setup = make_setup(product_key((2, 2)), alone, num_layers=2)
    swarm = EmulatedDmoe(setup)
    device = LocalEngine(replace(setup, settings=TrainingSettings(where="local", batch_size=1)))
    losses = [record.loss for record in train(swarm, 5)]
    np.testing.assert_allclose(losses, [record.loss for record in train(device, 5)], rtol=1e-4)
    assert evaluate(swarm) == pytest.approx(evaluate(device), rel=1e-4)
    assert swarm.totals().load == device.totals().load
    # 5 steps x 2 layers x 2 experts x (forward, backward).
    assert (swarm.totals().calls_ok, swarm.totals().failures) == (40, {})


@pytest.mark.slow
def test_the_command_emulates_the_mixture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dense model beside it is trained in virtual time, in the same setting and on as many words."""
    monkeypatch.setitem(PRESETS, ("dmoe", "tiny"), small_preset("dmoe", num_layers=1))
    monkeypatch.setitem(PRESETS, ("small", "tiny"), small_preset("small", num_layers=1))
    monkeypatch.setattr("experiments.transformer_xl.training.load_corpus", lambda **_: small_corpus())
    flags = ["--where", "emulated", "--model", "dmoe", "small", "--steps", "6", "--eval-every", "4", "--trainers", "3"]
    run_experiment(TransformerXLSettings, args=[*flags, "--jobs", "1", "--json", "--out", str(tmp_path / "run")])
    models = json.loads(capsys.readouterr().out.splitlines()[-1])["models"]
    assert models["dmoe"]["training_tokens"] == models["small"]["training_tokens"] == 36
    assert models["small"]["virtual_s"] > 0
    assert models["dmoe"]["load_entropy"] is not None
    folders = [RunFolder(tmp_path / "run" / model / "seed0").config()["settings"] for model in models]
    assert [settings["where"] for settings in folders] == ["emulated", "simulated"]
    assert [settings["slow_trainers"]["trainers"] for settings in folders] == [3, 3]
