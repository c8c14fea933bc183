"""Trunks of different processes kept together, in virtual time, and trees as the vectors that travel."""

from collections.abc import Awaitable, Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.averaging import MISSED_BEFORE_CATCHING_UP, Round, TreeAverager
from dmoe_jax.cli.averaging_options import AveragingOptions
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.optim import moshpit_average
from dmoe_jax.optim.tree_vectors import TreeLayout
from dmoe_jax.trunk import SharedTrunk, open_trunk_averaging
from dmoe_net.transport.sim.events import HostDown
from tests.dmoe_jax.averaging_peers import CONFIG, peer_at
from tests.net.averaging_swarm import Swarm, open_place, swarm_test

GRADS = {value: {"w": jnp.full((2, 3), value)} for value in (0.0, 1.0, 5.0, -0.25)}
SGD = moshpit_average(optax.sgd(1.0))
ADAM = moshpit_average(optax.adam(0.1))

Live = Callable[[TreeAverager, SharedTrunk], Awaitable[Any]]


def trunk_of(value: float, optimizer: optax.GradientTransformation = ADAM) -> SharedTrunk:
    """Six parameters of one value."""
    return SharedTrunk({"w": jnp.full((2, 3), value)}, optimizer, InlineDevice())


def values(trunk: SharedTrunk) -> np.ndarray:
    """Its parameters."""
    return np.asarray(trunk.params["w"])


async def idle(trunk: SharedTrunk, *, until: float) -> None:
    """Updates of zero, one a second, so that averages begin and are applied."""
    while trio.current_time() < until:
        await trunk.apply(GRADS[0.0])
        await trio.sleep(1.0)


async def gives(averager: TreeAverager, trunk: SharedTrunk) -> None:
    """Nothing but stay as a donor."""


def start(swarm: Swarm, name: str, trunk: SharedTrunk, live: Live = gives, **settings: Any) -> None:
    """A process with this trunk, averaging in a group of two."""
    settings = {"name": "trunk", "config": CONFIG, "device": InlineDevice()} | settings

    async def main() -> None:
        async with (
            open_place(swarm, name) as place,
            open_trunk_averaging(peer_at(place), trunk, **settings) as averager,
        ):
            await live(averager, trunk)
            await trio.sleep_forever()

    swarm.network.start(name, main)


@swarm_test
async def test_two_trunks_meet_in_the_middle_and_keep_their_progress(swarm: Swarm) -> None:
    """1 and 5 become 3; what one learns while the average is under way is added to the mean."""
    ann, bob, rounds = trunk_of(1.0, SGD), trunk_of(5.0, SGD), list[Round]()

    async def learns(averager: TreeAverager, trunk: SharedTrunk) -> None:
        await trio.sleep_until(5.0)
        assert [await trunk.apply(GRADS[grad]) for grad in (0.0, -0.25)] == [1, 2]
        np.testing.assert_array_equal(values(trunk), 1.25)
        await trio.sleep_until(9.0)
        for _ in range(2):  # the outcome comes into the state, and from there into the parameters
            await trunk.apply(GRADS[0.0])
        np.testing.assert_allclose(values(trunk), 3.25, rtol=1e-6)
        assert averager.totals.headline() == {
            "averages_done": 1,
            "averages_missed": 0,
            "averages_rejected": 0,
            "mean_group_size": 2.0,
            "states_taken": 0,
            # Each of the two reduces three of six float32 numbers: it sends the other three, and three means.
            "averaged_mb_sent": 24e-6,
            "averaging_peers_lost": 0,
        }

    async def comes_later(averager: TreeAverager, trunk: SharedTrunk) -> None:
        await trio.sleep_until(6.0)
        await idle(trunk, until=9.0)
        np.testing.assert_allclose(values(trunk), 3.0, rtol=1e-6)

    start(swarm, "ann", ann, learns, on_round=rounds.append)
    start(swarm, "bob", bob, comes_later)
    await trio.sleep_until(12.0)
    assert [(done.peers, done.why_lost) for done in rounds[:1]] == [(2, "")]
    assert (ann.step, bob.step) == (4, 3)


@pytest.mark.parametrize("what", ["parameters", "gradients", "pseudo-gradients"])
@swarm_test
async def test_trunks_with_the_flags_of_dmoe_train_learn_together(swarm: Swarm, what: Any) -> None:
    """A process with 3 samples an update pulls three times as much as one with 1: gradients of 1 and 5 are 2 of both,
    which end at -2, and DiLoCo's first outer step is (1 + 0.9) * 0.7 of that."""
    optimizer = AveragingOptions(average_every=1, average=what).wrap(optax.sgd(1.0))
    trunks = {(1.0, 3): trunk_of(0.0, optimizer), (5.0, 1): trunk_of(0.0, optimizer)}

    async def learns(averager: TreeAverager, trunk: SharedTrunk) -> None:
        ((grad, samples),) = (key for key, each in trunks.items() if each is trunk)
        await trio.sleep_until(5.0)
        await trunk.apply(GRADS[grad], samples=samples)
        await trio.sleep_until(9.0)
        for _ in range(2):
            await trunk.apply(GRADS[0.0], samples=samples)
        assert averager.totals.done == 1

    for name, trunk in zip("ab", trunks.values(), strict=True):
        start(swarm, name, trunk, learns)
    await trio.sleep_until(10.0)
    expected = -2.0 * (0.7 * 1.9 if what == "pseudo-gradients" else 1.0)
    for trunk in trunks.values():
        assert trunk.step == 3
        np.testing.assert_allclose(values(trunk), expected, rtol=1e-6)


async def test_a_weighted_trunk_wants_samples() -> None:
    """They are not guessed; a trunk that does not weigh leaves them aside."""
    with pytest.raises(ValueError, match="wants the number of samples"):
        await trunk_of(1.0, AveragingOptions(average_every=1).wrap(optax.sgd(1.0))).apply(GRADS[1.0])
    for plain in (optax.sgd(1.0), SGD):
        trunk = trunk_of(1.0, plain)
        await trunk.apply(GRADS[1.0], samples=5)
        np.testing.assert_array_equal(values(trunk), 0.0)


@swarm_test
async def test_who_was_left_behind_catches_up(swarm: Swarm) -> None:
    """After some rounds that met nobody it takes the whole state of one that is ahead, without being told to."""
    ahead, behind = trunk_of(1.0), trunk_of(7.0)
    await ahead.apply(GRADS[1.0])
    ahead.step = 1000

    async def averages(averager: TreeAverager, trunk: SharedTrunk) -> None:
        while not averager.totals.states_taken:
            assert trunk.step < 1000
            await idle(trunk, until=trio.current_time() + 1.0)
        assert (averager.totals.missed, trunk.step) == (MISSED_BEFORE_CATCHING_UP, 1000)

    start(swarm, "ahead", ahead)
    start(swarm, "behind", behind, averages)
    await trio.sleep_until(100.0)
    assert behind.step == 1000
    for trunk in (ahead, behind):
        await trunk.apply(GRADS[1.0])
    np.testing.assert_array_equal(values(behind), values(ahead))
    jax.tree.map(np.testing.assert_array_equal, behind.opt_state.inner, ahead.opt_state.inner)


async def test_a_trunk_does_not_go_back() -> None:
    """A state that was ahead when it was asked for, and is not when it is there, is not taken."""
    trunk, other = trunk_of(2.0), trunk_of(7.0)
    trunk.step = 5
    assert not await trunk.replace(5, other.state)
    assert not await trunk.replace(7, other.state, min_lead=3)
    np.testing.assert_array_equal(values(trunk), 2.0)
    assert await trunk.replace(7, other.state, min_lead=2)
    assert trunk.step == 7
    np.testing.assert_array_equal(values(trunk), 7.0)


BAD = {
    "another model": (np.zeros((5, 5), np.float32), 50),
    "beyond the end": (np.full((2, 3), 3.0, np.float32), 2**60),
    "not finite": (np.full((2, 3), np.nan, np.float32), 50),
}


@pytest.mark.parametrize(("numbers", "step"), BAD.values(), ids=BAD)
@swarm_test
async def test_a_newcomer_passes_over_states_of_no_use(swarm: Swarm, numbers: np.ndarray, step: int) -> None:
    """The donor that is furthest has one; the state of the next is taken, if it is far enough ahead, and a checkpoint
    that is behind it does not undo that."""
    bad = SharedTrunk({"w": jnp.asarray(numbers)}, ADAM, InlineDevice())
    honest, new, done = trunk_of(1.0), trunk_of(7.0), trio.Event()
    bad.step, honest.step = step, 40

    async def joins(averager: TreeAverager, trunk: SharedTrunk) -> None:
        await trio.sleep_until(5.0)
        assert not await trunk.catch_up(min_lead=41, max_step=1000)
        assert await trunk.catch_up(min_lead=40, max_step=1000)
        trunk.restore(20, trunk_of(3.0).state)  # of an older checkpoint
        done.set()

    start(swarm, "bad", bad)
    start(swarm, "honest", honest)
    await trio.sleep(1.0)
    start(swarm, "new", new, joins, max_step=1000)
    await done.wait()
    assert new.step == 40
    np.testing.assert_array_equal(values(new), 1.0)


@swarm_test
async def test_no_averages_while_others_are_ahead_and_their_state_is_not_to_be_had(swarm: Swarm) -> None:
    """A random start would hold the others back. Once nobody is announced any more, averaging begins."""
    gone, new, done, rounds = trunk_of(1.0), trunk_of(7.0), trio.Event(), list[Round]()
    gone.step = 400

    async def joins(averager: TreeAverager, trunk: SharedTrunk) -> None:
        await trio.sleep_until(5.0)
        assert not await trunk.catch_up(min_lead=5)
        assert "announced" in averager.why_not
        await idle(trunk, until=200.0)
        done.set()

    start(swarm, "gone", gone)
    await trio.sleep(1.0)
    swarm.network.apply(HostDown("gone", silent=True))
    start(swarm, "new", new, joins, max_step=1000, on_round=rounds.append)
    await done.wait()
    assert new.step < 400
    held_back = [each for each in rounds if "announced" in each.why_lost]
    assert held_back
    assert rounds[: len(held_back)] == held_back
    assert {each.why_lost for each in rounds[len(held_back) :]} == {"nobody was met"}


def tree_of(offset: float = 0.0) -> dict[str, object]:
    """Arrays of several shapes and types, one of them a scalar and one empty."""
    return {
        "b": jnp.arange(6, dtype=jnp.float32).reshape(2, 3) + offset,
        "a": [jnp.asarray(7.5, jnp.bfloat16), jnp.zeros((0, 2), jnp.float32)],
    }


def test_a_tree_comes_back_from_its_vector() -> None:
    """Leaves in the tree's order, by hand; types and shapes as they were."""
    layout = TreeLayout(tree_of())
    vector = layout.to_vector(tree_of())
    np.testing.assert_array_equal(vector, np.array([7.5, 0, 1, 2, 3, 4, 5], np.float32))
    back = layout.to_tree(vector)
    jax.tree.map(np.testing.assert_array_equal, back, tree_of())
    assert jax.tree.map(lambda leaf: leaf.dtype, back) == jax.tree.map(lambda leaf: leaf.dtype, tree_of())
    assert layout.size == 7


def test_schemas_tell_trees_apart() -> None:
    """They differ by names, types and shapes, not by values."""
    assert TreeLayout(tree_of()).schema == TreeLayout(tree_of(5.0)).schema
    others = [{"b": jnp.zeros((3, 2))}, {"c": jnp.zeros((2, 3))}, {"b": jnp.zeros((2, 3), jnp.bfloat16)}]
    assert len({TreeLayout(other).schema for other in [{"b": jnp.zeros((2, 3))}, *others]}) == 4


def test_what_does_not_fit_is_refused() -> None:
    """Another tree, other shapes, another length, whole numbers, nothing."""
    layout = TreeLayout(tree_of())
    with pytest.raises(ValueError, match="layout"):
        layout.to_vector({"b": jnp.zeros((2, 3))})
    with pytest.raises(ValueError, match="shapes"):
        layout.to_vector(tree_of() | {"b": jnp.zeros((3, 2))})
    with pytest.raises(ValueError, match="7 numbers"):
        layout.to_tree(np.zeros(8, np.float32))
    with pytest.raises(ValueError, match=r"'count'.*int32"):
        TreeLayout({"count": jnp.zeros(3, jnp.int32)})
    with pytest.raises(ValueError, match="no array"):
        TreeLayout({})
