"""A collaboration that averages in two rounds on a grid: 16 peers in rows of four, in virtual time."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import jax
import numpy as np
import pytest
import trio

from dmoe_jax.collaboration import Collaboration, CollaborationConfig
from dmoe_jax.peer import SIM_PORT, PeerConfig, open_peer
from experiments.collaborative.regression import regression
from experiments.collaborative.world import ROOT, Life, PeerSpec, World, compare_with_one_machine
from net.averaging.collaboration.assisting import assist_collaboration
from net.identity import Address
from net.transport.sim import run, simulate
from net.transport.sim.links import Constant
from tests.dmoe_jax.test_collaboration import until

PROBLEM = regression()
CONFIG = CollaborationConfig(target_batch_size=512, lead_s=1.5, group_size=4)
SPECS = [PeerSpec(name=f"peer{n}", sample_s=0.04 * (1 + n % 4), micro_batch=8) for n in range(16)]
"""A batch takes them 2.5 s."""


def in_world(body: Callable[[World], Awaitable[None]], *, latency_s: float = 0.02) -> list[Life]:
    """Run a test's body in virtual time; what the machines did."""
    lives: list[Life] = []

    async def main() -> None:
        async with simulate(latency=Constant(latency_s)) as network:
            world = World(network, PROBLEM, config=CONFIG)
            await world.open()
            await body(world)
            lives.extend(world.lives)

    run(main)
    return lives


def check(lives: list[Life], steps: int) -> None:
    """Nobody's parameters differ in a bit from another's after any step, nor by much from those of one machine."""
    found = compare_with_one_machine(PROBLEM, lives, steps)
    assert found.steps == steps
    assert not found.unexplained
    assert not found.chains_apart
    assert found.difference <= 1e-5
    for number in range(1, steps + 1):
        there = [life.params[number] for life in lives if number in life.params]
        assert len(there) >= 15
        bits = {b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)) for params in there}
        assert len(bits) == 1


@pytest.mark.slow
def test_sixteen_in_rows_of_four_make_the_steps_of_one_machine() -> None:
    async def body(world: World) -> None:
        for spec in SPECS:
            world.start(spec)
        await world.wait_for_step(10)
        await trio.sleep(1)

    lives = in_world(body)
    check(lives, 10)
    # For the first step they do not know of each other yet.
    later = [done for life in lives for done in life.steps if 2 <= done.number <= 10]
    assert [(done.peers, done.attempts) for done in later] == [(16, 1)] * 9 * 16


def in_round(peer: Collaboration) -> int:
    """1: its row brings it chunks, and none is whole; 2: the first mean of its row is under way across; else 0."""
    reducers = list(peer._stepping._rounds._all_reduce._running.values())
    rows = [each.reduction for each in reducers if each._most_vectors is None]
    across = [each.reduction for each in reducers if each._most_vectors is not None]
    if not rows or any(count is not None for reduction in across for count in reduction.num_senders):
        return 0
    if any(count is not None for reduction in rows for count in reduction.num_senders):
        return 2
    return int(any(reduction._arrived for reduction in rows))


@pytest.mark.parametrize(
    ("number", "silent"),
    [
        (1, False),
        (2, True),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
    ],
)
def test_one_is_killed_in_either_round(number: int, silent: bool) -> None:
    """It costs the others one more attempt at most, and everybody makes the same steps."""
    took_s = 0.0

    async def body(world: World) -> None:
        nonlocal took_s
        for spec in SPECS:
            world.start(spec)
        await world.wait_for_step(2)
        await trio.sleep(1)
        peer = next(life.peer for life in world.lives if life.spec.name == "peer5")
        assert peer is not None
        step = world.step
        await until(lambda: in_round(peer) == number, poll_s=0.002)
        world.kill("peer5", silent=silent)
        killed_at = trio.current_time()
        await world.wait_for_step(step + 1)
        took_s = trio.current_time() - killed_at
        await world.wait_for_step(step + 2)
        await trio.sleep(1)

    lives = in_world(body, latency_s=0.05)
    check(lives, 4)
    dead = next(life for life in lives if life.ended is not None)
    killed_in = max(dead.batches)
    again = {(done.peers, done.attempts) for life in lives for done in life.steps if done.number == killed_in}
    assert again == {(15, 2)}
    assert took_s < 10


@pytest.mark.slow
def test_one_joins() -> None:
    joined_at = 0

    async def body(world: World) -> None:
        nonlocal joined_at
        for spec in SPECS[:15]:
            world.start(spec)
        await world.wait_for_step(2)
        joined_at = world.step
        world.start(SPECS[15])
        await world.wait_for_step(joined_at + 3)
        await trio.sleep(1)

    lives = in_world(body)
    check(lives, joined_at + 3)
    newcomer = lives[15]
    assert newcomer.peer is not None
    assert newcomer.peer.totals.states_taken == 1
    assert newcomer.steps[0].number <= joined_at + 2


@pytest.mark.slow
def test_clients_bring_and_auxiliaries_only_reduce() -> None:
    """The auxiliary peer learns of the groups from the plan in the DHT."""
    assisted: list[int] = []

    async def body(world: World) -> None:
        async def assistant() -> None:
            async with open_peer(
                [Address(ROOT, SIM_PORT)], PeerConfig(network=world.network, host="helper", seed=9)
            ) as place:
                await assist_collaboration(
                    place.rpc,
                    place.dht,
                    prefix="run",
                    rng=random.Random(9),
                    config=CONFIG.rounds(),
                    on_step=lambda done: assisted.append(len(done.members)),
                )

        for number, spec in enumerate(SPECS):
            world.start(replace(spec, client=number in (1, 6, 7)))
        world.network.start("helper", assistant)
        await world.wait_for_step(4)
        await trio.sleep(1)

    lives = in_world(body)
    check(lives, 4)
    assert {len(life.steps) for life in lives} == {4}
    assert max(assisted) == 17
    assert len(assisted) >= 2


@pytest.mark.parametrize("group_size", [0, 1, 257])
def test_group_sizes_that_cannot_be(group_size: int) -> None:
    with pytest.raises(ValueError, match=f"group_size must be at least 2 .* got {group_size}"):
        replace(CONFIG, group_size=group_size)
