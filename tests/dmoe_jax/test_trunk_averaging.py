"""Trunks of different processes kept together, in virtual time."""

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
from dmoe_jax.trunk import SharedTrunk, open_trunk_averaging
from dmoe_net.transport.sim.events import HostDown
from tests.dmoe_jax.averaging_peers import CONFIG, peer_at
from tests.net.averaging_swarm import Swarm, in_swarm, open_place

GRADS = {"w": jnp.ones((2, 3))}
SGD = moshpit_average(optax.sgd(1.0))
ADAM = moshpit_average(optax.adam(0.1))


def trunk_of(value: float, optimizer: optax.GradientTransformation = ADAM) -> SharedTrunk:
    """Six parameters of one value."""
    return SharedTrunk({"w": jnp.full((2, 3), value)}, optimizer, InlineDevice())


def values(trunk: SharedTrunk) -> np.ndarray:
    """Its parameters."""
    return np.asarray(trunk.params["w"])


async def idle(trunk: SharedTrunk, *, until: float) -> None:
    """Updates of zero, one a second, so that averages begin and are applied."""
    while trio.current_time() < until:
        await trunk.apply({"w": jnp.zeros((2, 3))})
        await trio.sleep(1.0)


Live = Callable[[TreeAverager, SharedTrunk], Awaitable[Any]]


def start(swarm: Swarm, name: str, trunk: SharedTrunk, live: Live, **settings: Any) -> None:
    """A process with this trunk, averaging in a group of two."""

    async def main() -> None:
        async with (
            open_place(swarm, name) as place,
            open_trunk_averaging(
                peer_at(place),
                trunk,
                name="trunk",
                config=CONFIG,
                device=InlineDevice(),
                **settings,
            ) as averager,
        ):
            await live(averager, trunk)
            await trio.sleep_forever()

    swarm.network.start(name, main)


def test_two_trunks_meet_in_the_middle_and_keep_their_progress() -> None:
    """1 and 5 become 3; what one learns while the average is under way is added to the mean."""

    async def body(swarm: Swarm) -> None:
        ann, bob, rounds = trunk_of(1.0, SGD), trunk_of(5.0, SGD), list[Round]()

        async def learns(averager: TreeAverager, trunk: SharedTrunk) -> None:
            await trio.sleep_until(5.0)
            assert await trunk.apply({"w": jnp.zeros((2, 3))}) == 1
            assert await trunk.apply({"w": jnp.full((2, 3), -0.25)}) == 2
            np.testing.assert_array_equal(values(trunk), 1.25)
            await trio.sleep_until(9.0)
            await trunk.apply({"w": jnp.zeros((2, 3))})  # the outcome comes into the state
            await trunk.apply({"w": jnp.zeros((2, 3))})  # and from there into the parameters
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

    in_swarm(body)


@pytest.mark.parametrize("what", ["parameters", "gradients", "pseudo-gradients"])
def test_trunks_with_the_flags_of_dmoe_train_learn_together(what: Any) -> None:
    """A process with 3 samples an update pulls the trunk three times as much as one with 1, to the same place.

    Gradients of the two are 1 and 5, so of both 2: trunks that began together are, once both have applied the same
    rounds, at -2 for each of them, and DiLoCo's first outer step is (1 + 0.9) * 0.7 of that.
    """
    options = AveragingOptions(average_every=1, average=what)
    swarm_of = [trunk_of(0.0, options.wrap(optax.sgd(1.0))) for _ in range(2)]

    async def body(swarm: Swarm) -> None:
        def learner(grad: float, samples: int) -> Live:
            async def learns(averager: TreeAverager, trunk: SharedTrunk) -> None:
                await trio.sleep_until(5.0)
                await trunk.apply({"w": jnp.full((2, 3), grad)}, samples=samples)
                await trio.sleep_until(9.0)
                await trunk.apply({"w": jnp.zeros((2, 3))}, samples=samples)
                await trunk.apply({"w": jnp.zeros((2, 3))}, samples=samples)
                assert averager.totals.done == 1
                done.append(averager)

            return learns

        done: list[TreeAverager] = []
        for name, trunk, grad, samples in zip("ab", swarm_of, (1.0, 5.0), (3, 1), strict=True):
            start(swarm, name, trunk, learner(grad, samples))
        await trio.sleep_until(10.0)
        assert len(done) == 2

    in_swarm(body)
    expected = -2.0 * (0.7 * 1.9 if what == "pseudo-gradients" else 1.0)
    for trunk in swarm_of:
        assert trunk.step == 3
        np.testing.assert_allclose(values(trunk), expected, rtol=1e-6)


def test_a_weighted_trunk_wants_samples() -> None:
    """They are not guessed; a trunk that does not weigh leaves them aside."""

    async def main() -> None:
        with pytest.raises(ValueError, match="wants the number of samples"):
            await trunk_of(1.0, AveragingOptions(average_every=1).wrap(optax.sgd(1.0))).apply(GRADS)
        for plain in (optax.sgd(1.0), SGD):
            trunk = trunk_of(1.0, plain)
            await trunk.apply(GRADS, samples=5)
            np.testing.assert_array_equal(values(trunk), 0.0)

    trio.run(main)


def test_a_latecomer_takes_parameters_statistics_and_step() -> None:
    """It begins where the other is; its next update is the other's next update."""

    async def body(swarm: Swarm) -> None:
        optimizer = moshpit_average(optax.adam(0.1), every=100)
        old, new, done = trunk_of(1.0, optimizer), trunk_of(7.0, optimizer), trio.Event()

        async def trains(averager: TreeAverager, trunk: SharedTrunk) -> None:
            for _ in range(5):
                await trunk.apply(GRADS)

        async def joins(averager: TreeAverager, trunk: SharedTrunk) -> None:
            await trio.sleep_until(40.0)  # announcements are renewed
            assert not await trunk.catch_up(min_lead=6)
            assert trunk.step == 0
            assert await trunk.catch_up(min_lead=5)
            done.set()

        start(swarm, "old", old, trains)
        start(swarm, "new", new, joins)
        await done.wait()
        assert new.step == 5
        await old.apply(GRADS)
        await new.apply(GRADS)
        np.testing.assert_array_equal(values(new), values(old))
        jax.tree.map(np.testing.assert_array_equal, new.opt_state.inner, old.opt_state.inner)
        assert (int(new.opt_state.steps), int(old.opt_state.steps)) == (1, 6)

    in_swarm(body)


def test_who_was_left_behind_catches_up() -> None:
    """After some rounds that met nobody it takes the state of one that is ahead, without being told to."""

    async def body(swarm: Swarm) -> None:
        ahead, behind = trunk_of(1.0), trunk_of(7.0)
        ahead.step = 1000

        async def gives(averager: TreeAverager, trunk: SharedTrunk) -> None: ...

        async def averages(averager: TreeAverager, trunk: SharedTrunk) -> None:
            while not averager.totals.states_taken:
                assert trunk.step < 1000
                await idle(trunk, until=trio.current_time() + 1.0)
            assert averager.totals.missed == MISSED_BEFORE_CATCHING_UP
            assert trunk.step == 1000

        start(swarm, "ahead", ahead, gives)
        start(swarm, "behind", behind, averages)
        await trio.sleep_until(100.0)
        assert behind.step == 1000
        np.testing.assert_array_equal(values(behind), values(ahead))

    in_swarm(body)


def test_a_trunk_does_not_go_back() -> None:
    """A state that was ahead when it was asked for, and is not when it is there, is not taken."""
    trunk, other = trunk_of(2.0), trunk_of(7.0)
    trunk.step = 5

    async def main() -> None:
        assert not await trunk.replace(5, other.state)
        assert not await trunk.replace(7, other.state, min_lead=3)
        np.testing.assert_array_equal(values(trunk), 2.0)
        assert await trunk.replace(7, other.state, min_lead=2)

    trio.run(main)
    assert trunk.step == 7
    np.testing.assert_array_equal(values(trunk), 7.0)


@pytest.mark.parametrize("fault", ["another model", "beyond the end", "not finite"])
def test_a_newcomer_passes_over_states_of_no_use(fault: str) -> None:
    """The donor that is furthest has one; the state of the next is taken."""

    async def body(swarm: Swarm) -> None:
        bad = SharedTrunk({"w": jnp.zeros((5, 5))}, ADAM, InlineDevice())
        if fault != "another model":
            bad = trunk_of(float("nan") if fault == "not finite" else 3.0)
        honest, new, done = trunk_of(1.0), trunk_of(7.0), trio.Event()
        bad.step, honest.step = (2**60 if fault == "beyond the end" else 50), 40

        async def gives(averager: TreeAverager, trunk: SharedTrunk) -> None: ...

        async def joins(averager: TreeAverager, trunk: SharedTrunk) -> None:
            await trio.sleep_until(5.0)
            assert await trunk.catch_up(min_lead=5, max_step=1000)
            done.set()

        start(swarm, "bad", bad, gives)
        start(swarm, "honest", honest, gives)
        await trio.sleep(1.0)
        start(swarm, "new", new, joins, max_step=1000)
        await done.wait()
        assert new.step == 40
        np.testing.assert_array_equal(values(new), 1.0)

    in_swarm(body)


def test_no_averages_while_others_are_ahead_and_their_state_is_not_to_be_had() -> None:
    """A random start would hold the others back. Once nobody is announced any more, averaging begins."""

    async def body(swarm: Swarm) -> None:
        gone, new, done, rounds = trunk_of(1.0), trunk_of(7.0), trio.Event(), list[Round]()
        gone.step = 400

        async def gives(averager: TreeAverager, trunk: SharedTrunk) -> None: ...

        async def joins(averager: TreeAverager, trunk: SharedTrunk) -> None:
            await trio.sleep_until(5.0)
            assert not await trunk.catch_up(min_lead=5)
            assert "announced" in averager.why_not
            await idle(trunk, until=200.0)
            done.set()

        start(swarm, "gone", gone, gives)
        await trio.sleep(1.0)
        swarm.network.apply(HostDown("gone", silent=True))
        start(swarm, "new", new, joins, max_step=1000, on_round=rounds.append)
        await done.wait()
        assert new.step < 400
        held_back = [each for each in rounds if "announced" in each.why_lost]
        assert held_back
        assert rounds[: len(held_back)] == held_back
        assert {each.why_lost for each in rounds[len(held_back) :]} == {"nobody was met"}

    in_swarm(body)
