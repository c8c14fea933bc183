"""Trunks of different processes kept together, in virtual time."""

from collections.abc import Awaitable, Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio
from dmoe_jax.optim.trunk_averaging import MISSED_BEFORE_CATCHING_UP, TrunkAveraging, trunk_source

from dmoe_jax.device import InlineDevice
from dmoe_jax.optim.tree_vectors import layout_of
from dmoe_jax.trunk import SharedTrunk
from net.averaging.averager import Averager, AveragerConfig, AveragingStep, open_averager
from net.averaging.grouping.group_key import MoshpitGrid
from net.averaging.grouping.matchmaking import AssemblyConfig
from net.averaging.reduction.all_reduce import AllReduceConfig
from net.identity import PeerId
from net.transport.sim.events import HostDown
from tests.net.averaging_swarm import Swarm, in_swarm, open_place

CONFIG = AveragerConfig(
    step_timeout_s=4.0,
    assembly=AssemblyConfig(window_s=2.0, request_timeout_s=1.0),
    all_reduce=AllReduceConfig(sender_timeout_s=1.0, timeout_s=3.0),
)


def trunk_of(value: float) -> SharedTrunk:
    """Six parameters of one value, under Adam."""
    return SharedTrunk({"w": jnp.full((2, 3), value)}, optax.adam(0.1), InlineDevice())


def values(trunk: SharedTrunk) -> np.ndarray:
    """Its parameters."""
    return np.asarray(trunk.params["w"])


Live = Callable[[TrunkAveraging, SharedTrunk], Awaitable[Any]]


def start(swarm: Swarm, name: str, trunk: SharedTrunk, live: Live, *, max_step: int | None = None) -> None:
    """A process with this trunk, averaging in a group of two."""

    async def main() -> None:
        layout = layout_of(trunk.params)
        async with (
            open_place(swarm, name) as place,
            open_averager(
                place.rpc,
                place.dht,
                prefix="trunk",
                size=layout.size,
                grid=MoshpitGrid(side=2, dims=1),
                rng=place.rng,
                schema=layout.schema,
                state=trunk_source(trunk),
                config=CONFIG,
            ) as averager,
        ):
            await live(TrunkAveraging(trunk, averager, layout, InlineDevice(), max_step=max_step), trunk)
            await trio.sleep_forever()

    swarm.network.start(name, main)


def test_two_trunks_meet_in_the_middle_and_keep_their_progress() -> None:
    """1 and 5 become 3; what is added to one while the average is under way is added to the mean."""

    async def body(swarm: Swarm) -> None:
        ann, bob = trunk_of(1.0), trunk_of(5.0)

        async def waits(averaging: TrunkAveraging, trunk: SharedTrunk) -> None:
            await trio.sleep_until(5.0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(averaging.average)
                await trio.sleep(0.01)
                await trunk.shift({"w": jnp.full((2, 3), 0.25)})
            assert averaging.headline() == {
                "averages_done": 1,
                "averages_missed": 0,
                "averages_rejected": 0,
                "mean_group_size": 2.0,
                "states_taken": 0,
            }

        async def comes_later(averaging: TrunkAveraging, trunk: SharedTrunk) -> None:
            await trio.sleep_until(6.0)
            await averaging.average()

        start(swarm, "ann", ann, waits)
        start(swarm, "bob", bob, comes_later)
        await trio.sleep_until(20.0)
        np.testing.assert_allclose(values(ann), 3.25, rtol=1e-6)
        np.testing.assert_allclose(values(bob), 3.0, rtol=1e-6)

    in_swarm(body)


def test_a_latecomer_takes_parameters_statistics_and_step() -> None:
    """It begins where the other is; its next update is the other's next update."""

    async def body(swarm: Swarm) -> None:
        old, new = trunk_of(1.0), trunk_of(7.0)
        grads = {"w": jnp.ones((2, 3))}
        done = trio.Event()

        async def trains(averaging: TrunkAveraging, trunk: SharedTrunk) -> None:
            for _ in range(5):
                await trunk.apply(grads)

        async def joins(averaging: TrunkAveraging, trunk: SharedTrunk) -> None:
            await trio.sleep_until(40.0)  # announcements are renewed
            assert not await averaging.catch_up(min_lead=6)
            assert trunk.step == 0
            assert await averaging.catch_up(min_lead=5)
            done.set()

        start(swarm, "old", old, trains)
        start(swarm, "new", new, joins)
        await done.wait()
        assert new.step == 5
        await old.apply(grads)
        await new.apply(grads)
        jax.tree.map(np.testing.assert_array_equal, new.state, old.state)

    in_swarm(body)


def test_who_was_left_behind_catches_up() -> None:
    """After some rounds that met nobody it takes the state of one that is ahead, without being told to."""

    async def body(swarm: Swarm) -> None:
        ahead, behind = trunk_of(1.0), trunk_of(7.0)

        async def trains(averaging: TrunkAveraging, trunk: SharedTrunk) -> None:
            await trunk.apply({"w": jnp.ones((2, 3))})

        async def averages(averaging: TrunkAveraging, trunk: SharedTrunk) -> None:
            for number in range(MISSED_BEFORE_CATCHING_UP):
                assert trunk.step == 0
                assert averaging.totals.missed == number
                await averaging.average()
            assert averaging.totals.caught_up == 1

        start(swarm, "ahead", ahead, trains)
        start(swarm, "behind", behind, averages)
        await trio.sleep_until(100.0)
        assert behind.step == 1
        np.testing.assert_array_equal(values(behind), values(ahead))

    in_swarm(body)


class PoisonedAverager(Averager):
    """Its average is not a number."""

    def __init__(self) -> None: ...

    async def step(
        self, vector: np.ndarray | None, *, weight: float = 1.0, timeout_s: float | None = None
    ) -> AveragingStep:
        assert vector is not None
        us = (PeerId(bytes(32)), PeerId(b"\1" * 32))
        return AveragingStep(average=np.full_like(vector, np.nan), received=1.0, peers=us, round_number=0, weight=1.0)


def test_an_average_that_is_no_number_is_left_alone() -> None:
    """It is counted, and the parameters stay."""
    trunk = trunk_of(2.0)
    averaging = TrunkAveraging(trunk, PoisonedAverager(), layout_of(trunk.params), InlineDevice())
    trio.run(averaging.average)
    assert (averaging.totals.rejected, averaging.totals.done) == (1, 0)
    np.testing.assert_array_equal(values(trunk), 2.0)


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
        bad = SharedTrunk({"w": jnp.zeros((5, 5))}, optax.adam(0.1), InlineDevice())
        if fault != "another model":
            bad = trunk_of(float("nan") if fault == "not finite" else 3.0)
        honest, new, done = trunk_of(1.0), trunk_of(7.0), trio.Event()
        bad.step, honest.step = (2**60 if fault == "beyond the end" else 50), 40

        async def gives(averaging: TrunkAveraging, trunk: SharedTrunk) -> None: ...

        async def joins(averaging: TrunkAveraging, trunk: SharedTrunk) -> None:
            await trio.sleep_until(5.0)
            assert await averaging.catch_up(min_lead=5)
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
        gone, new, done = trunk_of(1.0), trunk_of(7.0), trio.Event()
        gone.step = 40

        async def gives(averaging: TrunkAveraging, trunk: SharedTrunk) -> None: ...

        async def joins(averaging: TrunkAveraging, trunk: SharedTrunk) -> None:
            await trio.sleep_until(5.0)
            assert not await averaging.catch_up(min_lead=5)
            assert "announced" in averaging.why_not
            assert await averaging.average() is None
            await trio.sleep_until(200.0)
            assert await averaging.average() is not None
            assert averaging.why_not == ""
            done.set()

        start(swarm, "gone", gone, gives)
        await trio.sleep(1.0)
        swarm.network.apply(HostDown("gone", silent=True))
        start(swarm, "new", new, joins, max_step=1000)
        await done.wait()
        assert new.step == 0

    in_swarm(body)
