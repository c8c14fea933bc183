"""Averaging as a whole, in virtual time: many peers, several rounds, peers that die."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import trio

from dmoe_net.averaging.averager import Averager
from dmoe_net.averaging.grouping.group_key import MoshpitGrid
from dmoe_net.averaging.opening import open_averager
from dmoe_net.averaging.plan import AveragingPlan
from dmoe_net.averaging.state.sharing import SharedState, StateSource
from dmoe_net.errors import CallRefused
from dmoe_net.transport.sim.events import HostDown
from tests.net.averaging_peers import CONFIG, ROUND_S, SIZE, Peers, vector_of
from tests.net.averaging_swarm import Swarm, in_swarm, open_place

PLAN = AveragingPlan.of(size=SIZE, grid=MoshpitGrid(side=2))


@pytest.mark.parametrize("side", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_full_grid_has_the_mean_after_a_round_for_each_axis(side: int) -> None:
    """Groups of the grid's side, together at once; after two rounds all peers hold the mean, to 1e-6."""

    async def body(swarm: Swarm) -> None:
        peers = Peers(swarm, MoshpitGrid(side=side, dims=2), side**2)
        mean = peers.stacked().mean(axis=0, dtype=np.float64)
        await peers.rounds(1)
        assert {len(steps[0].peers) for steps in peers.steps.values()} == {side}
        assert np.abs(peers.stacked() - mean).max() > 0.05
        await peers.rounds(2)
        np.testing.assert_allclose(peers.stacked(), np.broadcast_to(mean, (side**2, SIZE)), atol=1e-6)
        # A full group does not wait for its window to end.
        assert max(peers.took_s) < CONFIG.assembly.window_s

    in_swarm(body)


def test_weights_travel_along() -> None:
    """Samples from 1 to 1000: after a round for each axis all hold the mean that counts each peer by its samples."""
    weights = [float(1 + 999 * (index % 5) // 4) for index in range(16)]

    async def body(swarm: Swarm) -> None:
        peers = Peers(swarm, MoshpitGrid(side=4, dims=2), 16, weights=weights)
        mean = np.average(peers.stacked(), axis=0, weights=weights)
        await peers.rounds(2)
        np.testing.assert_allclose(peers.stacked(), np.broadcast_to(mean, (16, SIZE)), atol=1e-5)
        assert {round(steps[1].weight, 9) for steps in peers.steps.values()} == {sum(weights) / 16}

    in_swarm(body)


@pytest.mark.parametrize(
    ("side", "num_dying", "seed"),
    [
        (4, 1, 0),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, 1, 1), (8, 3, 0), (8, 3, 1))),
    ],
)
def test_peers_that_die_take_only_their_own_part(side: int, num_dying: int, seed: int) -> None:
    """About five per cent of the peers die in each of six rounds, some in the middle of it: no step of the others
    passes its deadline, the spread falls by more than the dead could raise it, and the mean stays with the living."""

    async def body(swarm: Swarm) -> None:
        peers, rng = Peers(swarm, MoshpitGrid(side=side, dims=2), side**2), random.Random(seed)
        living = list(peers.names)
        spreads = [peers.stacked().std(axis=0).mean()]
        for number in range(6):
            await trio.sleep_until((number + 1) * ROUND_S - 1.0)
            before = peers.stacked(living).astype(np.float64)
            dying = rng.sample(living, num_dying)
            for name in dying:
                swarm.network.start(f"killer-{name}", _kill_later, swarm, name, 1.0 + rng.uniform(0.0, 2.0))
            await trio.sleep_until((number + 2) * ROUND_S - 2.0)
            living = [name for name in living if name not in dying]
            after = peers.stacked(living).astype(np.float64)
            spreads.append(float(after.std(axis=0).mean()))
            # A dead member's values may or may not be in its group's mean: the mean moves by what it took or left.
            moved = np.abs(after.mean(axis=0) - before.mean(axis=0)).max()
            assert moved <= 3 * len(dying) / len(living) * np.abs(before - before.mean(axis=0)).max() + 1e-6
        assert all(len(peers.steps[name]) == 6 for name in living)
        assert max(peers.took_s) <= CONFIG.step_timeout_s + 1e-6
        # Random groups would leave (r - 1) / N + r / N^2 of the variance after a round (the paper's theorem, for N
        # peers in r groups); a grid does better. One round is left over for chance and for the parts of dead reducers.
        count, groups = side**2, side
        factor = ((groups - 1) / count + groups / count**2) ** 0.5
        assert spreads[2] < factor**2 * spreads[0]
        assert spreads[6] < factor**5 * spreads[0]

    in_swarm(body, seed=seed)


async def _kill_later(swarm: Swarm, name: str, after_s: float) -> None:
    await trio.sleep(after_s)
    swarm.network.apply(HostDown(name, silent=name.endswith(("1", "3", "5", "7", "9"))))


def test_half_of_a_group_are_clients() -> None:
    """Peers that cannot be called send and receive as others do, and reduce nothing."""

    async def body(swarm: Swarm) -> None:
        peers = Peers(swarm, MoshpitGrid(side=4, dims=1), 4, clients=(1, 3))
        mean = peers.stacked().mean(axis=0, dtype=np.float64)
        await peers.rounds(1)
        np.testing.assert_allclose(peers.stacked(), np.broadcast_to(mean, (4, SIZE)), atol=1e-6)

    in_swarm(body)


def test_a_peer_alone_keeps_its_own() -> None:
    """Nobody else looks for the group: the step ends at its deadline, and the vector is as it was."""

    async def body(swarm: Swarm) -> None:
        peers = Peers(swarm, MoshpitGrid(side=4, dims=2), 1)
        await peers.rounds(1)
        (step,) = peers.steps["peer00"]
        assert step.received == 0.0
        assert len(step.peers) == 1
        np.testing.assert_array_equal(peers.values["peer00"], vector_of("peer00"))
        assert peers.took_s[0] <= CONFIG.step_timeout_s + 1e-6

    in_swarm(body)


def run_one(
    body: Any,
    *,
    prefix: str = "x",
    size: int = SIZE,
    grid: MoshpitGrid = MoshpitGrid(side=2),  # noqa: B008 (frozen)
    cell: int | None = None,
) -> None:
    """Run `body(averager, place)` in a swarm of one."""

    async def main(swarm: Swarm) -> None:
        async with (
            open_place(swarm, "one") as place,
            open_averager(
                *(place.rpc, place.dht, AveragingPlan.of(size=size, grid=grid)),
                prefix=prefix,
                rng=place.rng,
                config=replace(CONFIG, cell=cell),
            ) as averager,
        ):
            await body(averager)

    in_swarm(main)


@pytest.mark.parametrize(
    ("vector", "weight", "message"),
    [
        (np.zeros(SIZE, np.float64), 1.0, "float32"),
        (np.zeros(SIZE + 1, np.float32), 1.0, "51"),
        (np.zeros(2 * SIZE, np.float32)[::2], 1.0, "contiguous"),
        (None, 1.0, "auxiliary"),
        (np.zeros(SIZE, np.float32), 0.0, "weight"),
        (np.zeros(SIZE, np.float32), float("nan"), "weight"),
    ],
)
def test_what_cannot_be_averaged_is_refused(vector: Any, weight: float, message: str) -> None:
    """With a message that names it."""

    async def body(averager: Averager) -> None:
        with pytest.raises(ValueError, match=message):
            await averager.step(vector, weight=weight)

    run_one(body)


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"prefix": "a.b"}, "prefix"),
        ({"prefix": ""}, "prefix"),
        ({"cell": 4}, "0 to 3"),
        ({"size": 0}, "size 0"),
        ({"grid": MoshpitGrid(side=1)}, "side 1"),
    ],
)
def test_wrong_settings_are_refused(wishes: dict[str, Any], message: str) -> None:
    """Before anything is served."""

    async def body(averager: Averager) -> None:
        raise AssertionError("it was opened")

    with pytest.raises(ValueError, match=message):
        run_one(body, **wishes)


def test_one_step_at_a_time() -> None:
    """The second is refused, the first goes on."""

    async def body(averager: Averager) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(averager.step, np.zeros(SIZE, np.float32))
            await trio.sleep(1.0)
            with pytest.raises(RuntimeError, match="one step"):
                await averager.step(np.zeros(SIZE, np.float32))
        assert averager.round_number == 1

    run_one(body)


def test_a_newcomer_takes_the_whole_state() -> None:
    """From the peer that is furthest, through the averager."""

    async def body(swarm: Swarm) -> None:
        async def snapshot() -> SharedState:
            return SharedState(version=7, tensors=(vector_of("state"),))

        async def live() -> None:
            async with (
                open_place(swarm, "old") as place,
                open_averager(
                    *(place.rpc, place.dht, PLAN),
                    prefix="x",
                    rng=place.rng,
                    state=StateSource(lambda: 7, snapshot),
                    config=CONFIG,
                ),
            ):
                await trio.sleep_forever()

        swarm.network.start("old", live)
        await trio.sleep(1.0)
        async with (
            open_place(swarm, "new") as place,
            open_averager(place.rpc, place.dht, PLAN, prefix="x", rng=place.rng, config=CONFIG) as averager,
        ):
            state = await averager.download_state(timeout_s=10.0)
            assert state is not None
            np.testing.assert_array_equal(state.tensors[0], vector_of("state"))
            assert await averager.download_state(min_version=8, attempts=2) is None

    in_swarm(body)


def test_a_prefix_is_free_again_after_its_averager() -> None:
    """Also after one that could not be opened; in between its calls are refused."""

    async def body(swarm: Swarm) -> None:
        async def snapshot() -> SharedState:
            return SharedState(version=1, tensors=(vector_of("state"),))

        async with open_place(swarm, "peer") as place, open_place(swarm, "other") as other:
            assert place.rpc.address is not None

            async def call(name: str) -> None:
                await other.rpc.call(place.rpc.address, f"averaging.{within}.{name}", {}, timeout_s=5.0)

            within = PLAN.within("x")
            for cell in (0, 0, 4, 0):
                opening = open_averager(
                    *(place.rpc, place.dht, PLAN),
                    prefix="x",
                    rng=place.rng,
                    state=StateSource(lambda: 1, snapshot),
                    config=replace(CONFIG, cell=cell),
                )
                if cell == 4:
                    with pytest.raises(ValueError, match="cells go from 0 to 3"):
                        await opening.__aenter__()
                    continue
                async with opening:
                    with pytest.raises(CallRefused, match=r"^(?!unknown)"):
                        await call("reduce")
                for name in ("reduce", "ask", "join"):
                    with pytest.raises(CallRefused, match="unknown method"):
                        await call(name)

    in_swarm(body)
