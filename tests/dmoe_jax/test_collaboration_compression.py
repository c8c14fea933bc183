"""One large batch whose numbers travel compressed, in virtual time: all peers make the same step, to the last bit."""

import math
from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
import pytest
import trio

from dmoe_jax.averaging.settings import CompressionName
from dmoe_net.averaging.collaboration.rounds import Averaged
from experiments.collaborative.world import Life, PeerSpec, World
from tests.dmoe_jax.collaboration_swarm import (
    CONFIG,
    check_one_machine,
    in_world,
    machines,
    peer_of,
    start_assistant,
    until,
)


def check_same_bits(lives: Sequence[Life], steps: int) -> None:
    """After every step; and somebody was there to compare with."""
    for number in range(1, steps + 1):
        trees = [life.params[number] for life in lives if number in life.params]
        found = [b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)) for tree in trees]
        assert len(found) >= 4
        assert len(set(found)) == 1


def trained(
    compression: CompressionName,
    steps: int,
    *,
    specs: Sequence[PeerSpec] = tuple(machines()),
    victim: tuple[str, float] | None = None,
    helped: list[Averaged] | None = None,
) -> list[Life]:
    """Lives of the machines; `victim` falls silent so many seconds after it has begun to average for step 6.

    The averages that an assistant made are put into `helped`.
    """

    async def body(world: World) -> None:
        for spec in specs:
            world.start(spec)
        if helped is not None:
            start_assistant(world, helped.append)
        if victim is not None:
            await world.wait_for_step(5)
            name, after_s = victim
            peer = peer_of(world, name)
            await until(lambda: peer.step >= 5 and peer.standing.is_averaging)
            await trio.sleep(after_s)
            world.kill(name, silent=True)
        await world.wait_for_step(steps)
        await trio.sleep(1)

    return in_world(body, latency_s=0.05, config=replace(CONFIG, compression=compression))


# What 16 weights of about 1 and their Adam updates may come apart by in ten steps, from a machine that rounds nothing.
LOST = [("none", 1e-5), ("float16", 5e-3), ("bfloat16", 5e-2), ("blockwise8", 5e-2)]


@pytest.mark.slow
@pytest.mark.parametrize(("compression", "most"), LOST)
def test_five_peers_end_with_the_same_bits(compression: CompressionName, most: float) -> None:
    lives = trained(compression, 10)
    check_same_bits(lives, 10)
    assert (check_one_machine(lives, 10, most=most) > 1e-5) == (compression != "none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compression", "victim"),
    [("float16", ("peer0", 0.03)), ("blockwise8", ("peer0", 0.08)), ("float16", ("peer3", 0.15))],
)
def test_also_when_one_dies_in_an_averaging(compression: CompressionName, victim: tuple[str, float]) -> None:
    """The others average once more."""
    lives = trained(compression, 10, victim=victim)
    check_same_bits(lives, 10)
    (dead,) = (life for life in lives if life.ended is not None)
    assert max(dead.params) == 5
    assert {step.attempts for life in lives for step in life.steps if step.number == 6} == {2}
    check_one_machine(lives, 10, most=math.inf)


@pytest.mark.parametrize("compression", ["none", "blockwise8"])
@pytest.mark.parametrize("count", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 5))])
def test_an_assistant_knows_how_many_samples_a_step_has(count: int, compression: CompressionName) -> None:
    """Also where two peers have all parts between them, and it has none."""
    helped: list[Averaged] = []
    lives = trained(compression, 8, specs=machines()[:count], helped=helped)
    whole = {step.samples for life in lives for step in life.steps}
    assert len(helped) >= 4
    assert all(done.weight in whole and done.weight > 0 for done in helped)
    assert {done.weight for done in helped} == {
        step.samples for life in lives for step in life.steps if step.peers == count + 1
    }
