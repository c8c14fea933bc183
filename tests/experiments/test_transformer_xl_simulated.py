"""The paper's setting in virtual time: repeatable, resumable, as stale and as lossy as it says."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from dmoe_jax.autodiff import without_waiting
from dmoe_jax.routing import Router, add_noise, product_key
from dmoe_jax.trainer import StepRecord
from experiments.transformer_xl.asynchronous import SimulatedEngine
from experiments.transformer_xl.local import LocalEngine
from experiments.transformer_xl.settings import Model, TrainingSettings
from experiments.transformer_xl.setup import Setup
from tests.experiments.small_runs import UNBOUNDED, small_corpus, small_preset

NOISY = add_noise(product_key((2, 2)), stddev=0.5)

Make = Callable[..., SimulatedEngine]


def make_setup(model: Model, router: Router | None = NOISY, *, seed: int = 0, **settings: Any) -> Setup:
    """Four slow trainers, with dropout."""
    preset = small_preset(model, layer={"dropout": 0.1}, input_dropout=0.1, cutoffs=())
    preset = replace(preset, recipe=UNBOUNDED, expert_recipe=UNBOUNDED)
    return Setup(
        preset=preset,
        corpus=small_corpus(),
        steps=100,
        seed=seed,
        router=router if model == "dmoe" else None,
        settings=TrainingSettings(where="simulated", **{"trainers": 4, **settings}),
    )


@pytest.fixture(scope="module", params=[pytest.param("dmoe", marks=pytest.mark.slow), "small"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes an engine at its beginning."""
    return lambda **settings: SimulatedEngine(make_setup(request.param, **settings))


def train(engine: SimulatedEngine, *stretches: int) -> list[StepRecord]:
    """Records of the steps of these stretches."""
    records: list[StepRecord] = []
    for num_steps in stretches:
        without_waiting(engine.advance(num_steps, records.append, lambda trainer, error: None))
    return records


def evaluate(engine: SimulatedEngine | LocalEngine) -> float:
    """Validation loss."""
    return without_waiting(engine.evaluate("valid", max_items=None, on_batch=lambda done, total: None)).loss


@pytest.mark.slow
def test_a_run_repeats_itself(make: Make) -> None:
    """Every step and the whole state to the last bit, with delays, failures, dropout and noise: in a run that is
    evaluated at its pause, and in one that goes on from there, through JSON and host arrays. Another seed differs."""
    whole, evaluated, resumed = make(), make(), make()
    records = train(whole, 6, 7)
    assert train(evaluated, 6) == records[:6]
    assert evaluate(evaluated) == evaluate(evaluated)
    state = jax.tree.map(np.array, evaluated.state())
    resumed.load(evaluated.step, state, json.loads(json.dumps(evaluated.facts())))
    for engine in (evaluated, resumed):
        assert train(engine, 7) == records[6:]
        jax.tree.map(np.testing.assert_array_equal, whole.state(), engine.state())
        assert (whole.facts(), whole.totals()) == (engine.facts(), engine.totals())
        assert evaluate(whole) == evaluate(engine)
    assert train(make(seed=1), 6) != records[:6]


@pytest.mark.slow
def test_staleness_is_that_of_asynchronous_trainers(make: Make) -> None:
    """With N trainers at work a gradient is N - 1 updates old on average, a little less as a stretch begins."""
    engine = make(trainers=6)
    records = train(engine, 60)
    assert [record.step for record in records] == list(range(1, 61))
    assert engine.totals().staleness == sum(record.staleness for record in records)
    # The first of each trainer saw fewer others: 15 updates of staleness are missing at most, a quarter of an update.
    assert 5 - 0.6 <= engine.totals().staleness / 60 <= 5


@pytest.mark.slow
def test_a_dense_model_waits_its_delay() -> None:
    """One trainer without anybody beside it makes an update a second on average, none of them stale."""
    engine = SimulatedEngine(make_setup("small", trainers=1))
    assert {record.staleness for record in train(engine, 30)} == {0}
    # The mean of 30 exponential delays has a standard deviation of 1 / sqrt(30) = 0.18.
    assert engine.totals().virtual_s == pytest.approx(30, abs=5 * 0.18 * 30)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dmoe", "small"])
def test_one_trainer_without_delay_is_the_step_on_this_device(model: Model) -> None:
    """Synchronous training by the swarm's code: the model, the text and the batches of the one in one jit."""
    setup = make_setup(model, product_key((2, 2)), trainers=1, delay_s=0.0, failure_rate=0.0)
    swarm = SimulatedEngine(setup)
    device = LocalEngine(replace(setup, settings=TrainingSettings(where="local", batch_size=1)))
    theirs: list[StepRecord] = []
    without_waiting(device.advance(5, theirs.append, lambda trainer, error: None))
    losses = [record.loss for record in train(swarm, 5)]
    np.testing.assert_allclose(losses, [record.loss for record in theirs], rtol=1e-4)
    assert evaluate(swarm) == pytest.approx(evaluate(device), rel=1e-4)


@pytest.mark.slow
def test_the_share_of_lost_calls_is_the_failure_rate() -> None:
    """A fifth of the calls fail, and next to no other; every answered sample is counted as load."""
    engine = SimulatedEngine(make_setup("dmoe", failure_rate=0.2))
    train(engine, 60)
    totals = engine.totals()
    share = totals.calls_failed / (totals.calls_ok + totals.calls_failed)
    assert share == pytest.approx(0.2, abs=0.06)
    assert 0 < max(totals.load.values()) <= 60
    assert (totals.virtual_s or 0.0) > 10
