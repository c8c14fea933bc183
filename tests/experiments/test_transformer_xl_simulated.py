"""The paper's setting in virtual time: repeatable, resumable, as stale and as lossy as it says."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from dmoe_jax.routing.base import Router
from dmoe_jax.routing.combinators import add_noise
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.trainer import StepRecord
from dmoe_jax.training.run import train_without_waiting
from experiments.transformer_xl.local import LocalEngine
from experiments.transformer_xl.settings import Model
from experiments.transformer_xl.setup import Setting, Setup
from experiments.transformer_xl.simulated import SimulatedDense, SimulatedEngine
from experiments.transformer_xl.simulated_dmoe import SimulatedDmoe
from tests.experiments.small_runs import UNBOUNDED, small_corpus, small_preset

SETTING = Setting(num_trainers=4, num_nodes=2)
NOISY = add_noise(product_key((2, 2)), stddev=0.5)

Make = Callable[..., SimulatedEngine]


def make_setup(model: Model, router: Router | None, seed: int, setting: Setting) -> Setup:
    preset = small_preset(model, layer={"dropout": 0.1}, input_dropout=0.1, cutoffs=())
    preset = replace(preset, recipe=UNBOUNDED, expert_recipe=UNBOUNDED)
    return Setup(preset=preset, corpus=small_corpus(), steps=100, seed=seed, router=router, setting=setting)


def make_dmoe(*, seed: int = 0, router: Router = NOISY, setting: Setting = SETTING) -> SimulatedDmoe:
    return SimulatedDmoe(make_setup("dmoe", router, seed, setting))


def make_dense(*, seed: int = 0, setting: Setting = SETTING) -> SimulatedDense:
    return SimulatedDense(make_setup("small", None, seed, setting))


@pytest.fixture(scope="module", params=[pytest.param(make_dmoe, marks=pytest.mark.slow), make_dense])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes an engine at its beginning."""
    found: Make = request.param
    return found


@pytest.fixture(scope="module")
def whole_run(make: Make) -> tuple[SimulatedEngine, list[StepRecord]]:
    """A run of two stretches that nothing interrupts or looks at, and its steps."""
    engine = make()
    return engine, train(engine, 6, 7)


def train(engine: SimulatedEngine, *stretches: int) -> list[StepRecord]:
    """Records of the steps of these stretches."""
    records: list[StepRecord] = []
    for num_steps in stretches:
        train_without_waiting(engine.advance(num_steps, records.append, lambda trainer, error: None))
    return records


def evaluate(engine: SimulatedEngine, max_items: int | None = None) -> float:
    """Validation loss."""
    found = engine.evaluate("valid", max_items=max_items, on_batch=lambda done, total: None)
    return train_without_waiting(found).loss


def _validation(engine: LocalEngine) -> Any:
    return engine.evaluate("valid", max_items=None, on_batch=lambda done, total: None)


def assert_same(left: SimulatedEngine, right: SimulatedEngine) -> None:
    """Equal to the last bit: the states, the counters, and what evaluation finds."""
    jax.tree.map(np.testing.assert_array_equal, left.state(), right.state())
    assert left.facts() == right.facts()
    assert left.totals() == right.totals()
    assert evaluate(left, 100) == evaluate(right, 100)


@pytest.mark.slow
def test_a_run_repeats_itself(make: Make, whole_run: tuple[SimulatedEngine, list[StepRecord]]) -> None:
    """Every step and the whole state to the last bit, with delays, failures, dropout and noise: in a run that is
    evaluated at its pause, and in one that goes on from there, through JSON and host arrays. Another seed differs."""
    whole, records = whole_run
    evaluated, resumed = make(), make()
    assert train(evaluated, 6) == records[:6]
    assert evaluate(evaluated) == evaluate(evaluated)
    state = jax.tree.map(np.array, evaluated.state())
    resumed.load(evaluated.step, state, json.loads(json.dumps(evaluated.facts())))
    for engine in (evaluated, resumed):
        assert train(engine, 7) == records[6:]
        assert_same(whole, engine)
    assert train(make(seed=1), 6) != records[:6]


@pytest.mark.slow
def test_staleness_is_that_of_asynchronous_trainers(make: Make) -> None:
    """With N trainers at work a gradient is N - 1 updates old on average, a little less as a stretch begins."""
    engine = make(setting=Setting(num_trainers=6, num_nodes=2))
    records = train(engine, 60)
    assert engine.totals().staleness == sum(record.staleness for record in records)
    # The first of each trainer saw fewer others: 15 updates of staleness are missing at most, a quarter of an update.
    assert 5 - 0.6 <= engine.totals().staleness / 60 <= 5


def test_with_one_trainer_at_work_nothing_is_stale(make: Make) -> None:
    """Trainers take turns: each step reads the parameters that the one before wrote, and all texts go on alike."""
    engine = make(setting=replace(SETTING, concurrency=1))
    records = train(engine, 8, 4)
    assert {record.staleness for record in records} == {0}
    assert [stream.position for stream in engine.streams] == [3] * SETTING.num_trainers
    repeated = make(setting=replace(SETTING, concurrency=1))
    assert train(repeated, 8, 4) == records


@pytest.mark.slow
def test_one_trainer_without_delay_is_the_step_on_this_device() -> None:
    """The synchronous mixture in the swarm's code: the model, the text and the batches of the one in one jit."""
    setup = make_setup("dmoe", product_key((2, 2)), 0, Setting(num_trainers=1, delay_s=0.0, failure_rate=0.0))
    swarm, device = SimulatedDmoe(setup), LocalEngine(replace(setup, setting=None, batch_size=1))
    theirs: list[StepRecord] = []
    train_without_waiting(device.advance(5, theirs.append, lambda trainer, error: None))
    losses = [record.loss for record in train(swarm, 5)]
    np.testing.assert_allclose(losses, [record.loss for record in theirs], rtol=1e-4)
    assert evaluate(swarm) == pytest.approx(train_without_waiting(_validation(device)).loss, rel=1e-4)


@pytest.mark.slow
def test_the_share_of_lost_calls_is_the_failure_rate() -> None:
    """A fifth of the calls asked to fail fail, and next to no other; every answered sample is counted as load."""
    engine = make_dmoe(setting=Setting(num_trainers=4, num_nodes=2, failure_rate=0.2, grace_s=20.0))
    train(engine, 60)
    totals = engine.totals()
    share = totals.calls_failed / (totals.calls_ok + totals.calls_failed)
    assert share == pytest.approx(0.2, abs=0.06)
    assert 0 < max(totals.load.values()) <= 60
    assert (totals.virtual_s or 0.0) > 10
