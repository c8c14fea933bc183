"""The paper's setting in virtual time: repeatable, resumable, as stale and as lossy as it says."""

import json
from typing import Any

import jax
import numpy as np
import pytest

from dmoe_jax.routing.base import Router, RouterError
from dmoe_jax.routing.combinators import add_noise
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.training.run import train_without_waiting
from experiments.transformer_xl.setup import Setup
from experiments.transformer_xl.simulated import SimulatedDmoe
from experiments.transformer_xl.simulated_dense import SimulatedDense
from experiments.transformer_xl.stretches import Setting
from tests.experiments.small_runs import small_corpus, small_preset

SETTING = Setting(num_trainers=4, num_nodes=2, grace_s=5.0)
RATES = {"dropout": 0.1, "input_dropout": 0.1, "warmup_steps": 0, "expert_warmup_steps": 0, "cutoffs": ()}
NOISY = add_noise(product_key((2, 2)), stddev=0.5)


def make_dmoe(*, seed: int = 0, router: Router = NOISY, setting: Setting = SETTING) -> SimulatedDmoe:
    preset = small_preset("dmoe", **RATES)
    return SimulatedDmoe(Setup(preset=preset, corpus=small_corpus(), steps=100, seed=seed, router=router), setting)


def make_dense(*, seed: int = 0, setting: Setting = SETTING) -> SimulatedDense:
    preset = small_preset("small", **RATES)
    return SimulatedDense(Setup(preset=preset, corpus=small_corpus(), steps=100, seed=seed), setting)


def train(engine: Any, *stretches: int) -> list[Any]:
    """Records of the steps of these stretches."""
    records: list[Any] = []
    for num_steps in stretches:
        train_without_waiting(engine.advance(num_steps, records.append, lambda trainer, error: None))
    return records


def evaluate(engine: Any, max_items: int | None = None) -> float:
    """Validation loss."""
    found = engine.evaluate("valid", max_items=max_items, on_batch=lambda done, total: None)
    return train_without_waiting(found).loss


def assert_same(left: Any, right: Any) -> None:
    """Equal to the last bit: the states, the counters, and what evaluation finds."""
    jax.tree.map(np.testing.assert_array_equal, left.state(), right.state())
    assert left.facts() == right.facts()
    assert left.totals() == right.totals()
    assert evaluate(left, 100) == evaluate(right, 100)


@pytest.mark.parametrize("make", [make_dmoe, make_dense])
def test_two_runs_with_one_seed_are_identical(make: Any) -> None:
    """Every step and the whole state, with delays, failures, dropout and noise; another seed gives another run."""
    first, second, other = make(), make(), make(seed=1)
    records = [train(engine, 6, 6) for engine in (first, second, other)]
    assert records[0] == records[1] != records[2]
    assert_same(first, second)


@pytest.mark.parametrize("make", [make_dmoe, make_dense])
def test_an_interrupted_run_resumed_equals_one_that_was_not(make: Any) -> None:
    """State and facts at a pause, through JSON and host arrays, are all that a new engine needs."""
    whole, until, after = make(), make(), make()
    records = train(whole, 6, 6)
    train(until, 6)
    state = jax.tree.map(np.array, until.state())
    after.load(until.step, state, json.loads(json.dumps(until.facts())))
    assert train(after, 6) == records[6:]
    assert_same(whole, after)


@pytest.mark.parametrize("make", [make_dmoe, make_dense])
def test_a_stretch_is_as_long_as_it_was_asked_to_be(make: Any) -> None:
    """Exactly so many updates, numbered without a gap, whichever trainers make them."""
    engine = make()
    records = train(engine, 5, 7)
    assert [record.step for record in records] == list(range(1, 13))
    assert engine.step == 12
    assert len({record.trainer for record in records}) == SETTING.num_trainers


@pytest.mark.parametrize("make", [make_dmoe, make_dense])
def test_evaluation_changes_nothing(make: Any) -> None:
    """Training goes on as if nobody had looked, and a second look sees the same."""
    looked, plain = make(), make()
    train(looked, 4)
    train(plain, 4)
    losses = {evaluate(looked) for _ in range(2)}
    assert len(losses) == 1
    assert train(looked, 4) == train(plain, 4)


@pytest.mark.parametrize("make", [make_dmoe, make_dense])
def test_staleness_is_that_of_asynchronous_trainers(make: Any) -> None:
    """With N trainers at work a gradient is N - 1 updates old on average, a little less as a stretch begins."""
    engine = make(setting=Setting(num_trainers=6, num_nodes=2))
    records = train(engine, 60)
    assert engine.totals().staleness == sum(record.staleness for record in records)
    # The first of each trainer saw fewer others: 15 updates of staleness are missing at most, a quarter of an update.
    assert 5 - 0.6 <= engine.totals().staleness / 60 <= 5


def test_the_share_of_lost_calls_is_the_failure_rate() -> None:
    """A fifth of the calls asked to fail fail, and next to no other; every answered sample is counted as load."""
    engine = make_dmoe(setting=Setting(num_trainers=4, num_nodes=2, failure_rate=0.2, grace_s=20.0))
    train(engine, 60)
    totals = engine.totals()
    share = totals.calls_failed / (totals.calls_ok + totals.calls_failed)
    assert share == pytest.approx(0.2, abs=0.06)
    assert 0 < max(totals.load.values()) <= 60
    assert (totals.virtual_s or 0.0) > 10


def test_without_delay_and_failures_nothing_is_lost() -> None:
    """The same code with both at zero: every call is answered at once."""
    engine = make_dmoe(setting=Setting(num_trainers=2, num_nodes=2, failure_rate=0.0, delay_s=0.0))
    train(engine, 6)
    totals = engine.totals()
    assert totals.calls_failed == totals.steps_lost == 0
    assert totals.calls_ok == 6 * 2 * 2 * 2  # steps x layers x k_best x (forward, backward), batch 1


def test_a_router_that_goes_wrong_ends_the_run_with_its_name() -> None:
    """NaN scores are an error that names the router, not a long row of lost steps."""
    sound = product_key((2, 2))

    def scores(params: Any, x: Any, *, key: Any = None, ids: Any = None) -> Any:
        return jax.tree.map(lambda part: part / 0.0 * 0.0, sound.scores(params, x, key=key, ids=ids))

    router = sound._replace(name="broken", scores=scores)
    with pytest.raises(RouterError, match=r"'broken'.*NaN"):
        train(make_dmoe(router=router), 2)


def test_a_setting_that_makes_no_sense_is_refused() -> None:
    """The message has the values."""
    with pytest.raises(ValueError, match="num_trainers=0"):
        Setting(num_trainers=0)
    with pytest.raises(ValueError, match=r"failure_rate=1\.0"):
        Setting(failure_rate=1.0)
