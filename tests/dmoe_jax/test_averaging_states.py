"""Whole states among loops of one's own: who takes one, when, and how it travels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.averaging import MISSED_BEFORE_CATCHING_UP, TreeAverager
from dmoe_jax.averaging.donor import donor_source, table_of
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.optim import moshpit_average, noloco, streaming_diloco
from dmoe_jax.optim.host_state import host_state, is_going_over, taken_over, without_taken
from dmoe_net.errors import NetError
from tests.dmoe_jax.averaging_peers import Loop, live_together


def test_a_newcomer_takes_the_whole_state_and_goes_on_like_its_donor() -> None:
    """Parameters, statistics, step and Python numbers; what the donor had gathered, the donor sends itself."""
    optimizer = moshpit_average(optax.adam(0.1), every=100, what="gradients", weighted=True)
    old, new = Loop(optimizer, 1.0), Loop(optimizer, 7.0)

    async def trains(averager: TreeAverager, loop: Loop) -> None:
        for _ in range(5):
            await loop.step(averager, 1.0, samples=8.0)

    async def joins(averager: TreeAverager, loop: Loop) -> None:
        await trio.sleep_until(40.0)
        assert await averager.catch_up(*loop.state, min_lead=6) is None
        assert averager.why_not == ""
        assert await averager.catch_up(*loop.state, min_lead=5, max_version=4) is None
        loop.state = await averager.catch_up(*loop.state, min_lead=5)
        assert averager.totals.states_taken == 1

    live_together({"old": (old, trains), "new": (new, joins)}, donors=["old"])
    assert new.steps == 5
    np.testing.assert_array_equal(new.values, old.values)
    jax.tree.map(np.testing.assert_array_equal, new.opt_state.inner, old.opt_state.inner)
    assert float(old.opt_state.samples) == 40
    assert (float(new.opt_state.samples), int(new.opt_state.steps)) == (0, 0)
    assert np.asarray(new.opt_state.accumulated["w"]).tolist() == [0, 0, 0]


def test_who_meets_nobody_is_told_that_it_may_be_left_behind() -> None:
    """After some rounds in a row; whoever then takes a state drops the round that is under way."""
    optimizer = moshpit_average(optax.sgd(1.0))
    ahead, behind = Loop(optimizer, 1.0), Loop(optimizer, 7.0)
    ahead.steps = 50

    async def gives(averager: TreeAverager, loop: Loop) -> None: ...

    async def averages(averager: TreeAverager, loop: Loop) -> None:
        for _ in range(MISSED_BEFORE_CATCHING_UP):
            assert not averager.is_left_behind
            await loop.step(averager, 0.0, wait=True)
            loop.apply()
        assert averager.is_left_behind
        await loop.step(averager, 0.0)
        assert averager.is_under_way
        loop.state = await averager.catch_up(*loop.state)
        assert not averager.is_under_way
        assert not averager.is_left_behind
        # The next round begins when the old one has ended, and counts.
        await loop.step(averager, 0.0, wait=True)
        assert averager.totals.missed == MISSED_BEFORE_CATCHING_UP + 1

    live_together({"ahead": (ahead, gives), "behind": (behind, averages)}, donors=["ahead"])
    assert behind.steps == 51
    np.testing.assert_array_equal(behind.values, 1.0)


async def test_a_state_that_was_donated_is_asked_for_again() -> None:
    """Three times in all. What a newcomer gets has the types and shapes that were announced: float8 goes as bytes."""
    few, gone = jnp.array([0.5, -2.0], jnp.float8_e4m3fn), jnp.ones(2)
    state: Any = {"a": jnp.ones(2, jnp.bfloat16), "b": np.arange(3), "c": 5, "f": few, "k": jax.random.key(7)}
    gone.delete()
    states = iter([(3, state | {"a": gone}), (4, state), *[(5, {"a": gone})] * 3])
    source = donor_source(lambda: next(states), InlineDevice())
    shared = await source.snapshot()
    assert shared.version == 4
    assert [[each.dtype.name, list(each.shape)] for each in shared.tensors] == table_of(state)
    with pytest.raises(NetError, match="donated"):
        await source.snapshot()


AVERAGES = 20
OPTIMIZERS = {
    "parameters": moshpit_average(optax.adam(0.1)),
    "gradients": moshpit_average(optax.adam(0.1), what="gradients"),
    "pseudo_gradients": moshpit_average(optax.adam(0.1), what="pseudo_gradients"),
    "noloco": noloco(optax.adam(0.1), every=1),
    "streaming": streaming_diloco(optax.adam(0.1), every=1, fragments=1),
    "in_multi_steps": optax.MultiSteps(moshpit_average(optax.adam(0.1)), 1).gradient_transformation(),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=pytest.mark.slow if each != "pseudo_gradients" else ()) for each in OPTIMIZERS]
)
def test_who_joins_late_goes_on_from_the_others_without_a_word_in_its_loop(kind: str) -> None:
    """Two have made some averages before a third begins. Its first step takes the state; its next update leads to the
    others' parameters and state, and its first gradient, of its own parameters, is nowhere in them."""
    optimizer: Any = OPTIMIZERS[kind]
    old, other, new = Loop(optimizer, 1.0), Loop(optimizer, 3.0), Loop(optimizer, 7.0)

    async def trains(averager: TreeAverager, loop: Loop) -> None:
        while averager.totals.done < AVERAGES:
            await loop.step(averager, 1.0, wait=True)
        loop.apply()
        while loop is old:  # a donor hands out its state when it steps
            loop.opt_state = await averager.step(loop.opt_state, loop.params)
            await trio.sleep(0.1)

    async def joins(averager: TreeAverager, loop: Loop) -> None:
        await trio.sleep_until(100.0)
        await loop.step(averager, 5.0)
        assert averager.totals.states_taken == 1
        await loop.step(averager, -3.0)
        assert averager.totals.states_taken == 1

    live_together({"old": (old, trains), "other": (other, trains), "new": (new, joins)}, until=["new"])
    np.testing.assert_allclose(new.values, old.values, rtol=1e-6, atol=1e-6)  # seven, less seven, in float32
    assert host_state(new.opt_state).rounds == host_state(old.opt_state).rounds >= AVERAGES
    assert not is_going_over(new.opt_state)


def test_a_loop_that_stands_still_holds_nobody_up_who_joins() -> None:
    """It is ahead, and has ended: others average without it at once. Once it goes on, they take its state."""
    optimizer: Any = OPTIMIZERS["parameters"]
    old, one, two = Loop(optimizer, 1.0), Loop(optimizer, 3.0), Loop(optimizer, 7.0)
    goes_on = trio.Event()

    async def trains(averager: TreeAverager, loop: Loop) -> None:
        for _ in range(5):  # alone
            await loop.step(averager, 0.0, wait=True)
        await goes_on.wait()
        while True:
            loop.opt_state = await averager.step(loop.opt_state, loop.params)
            await trio.sleep(0.1)

    async def joins(averager: TreeAverager, loop: Loop) -> None:
        await trio.sleep_until(200.0)
        while averager.totals.done < 2:
            began = trio.current_time()
            await loop.step(averager, 0.0)
            assert trio.current_time() - began < 10
            await trio.sleep(1.0)
        assert trio.current_time() < 240
        assert averager.totals.missed == averager.totals.states_taken == 0
        goes_on.set()
        while not averager.totals.states_taken:
            await loop.step(averager, 0.0)
            await trio.sleep(1.0)
        assert trio.current_time() < 300

    live_together({"old": (old, trains), "one": (one, joins), "two": (two, joins)}, until=["one", "two"])


def test_a_state_that_was_taken_travels_no_further() -> None:
    """Whoever goes over to it hands out its own."""
    own = OPTIMIZERS["parameters"].init({"w": jnp.zeros(2)})
    taken = taken_over({"w": jnp.ones(2)}, own)
    assert is_going_over(taken)
    assert jax.tree.structure(without_taken(taken)) == jax.tree.structure(own)
