"""Peers of a collaboration find out what their lines carry, and share out the reducing by it."""

from dataclasses import replace

import pytest
import trio

from dmoe_jax.collaboration import CollaborationConfig
from experiments.collaborative.world import Life, PeerSpec, World, compare_with_one_machine
from net.transport.sim import run, simulate
from net.transport.sim.links import Constant, HostOptions
from tests.dmoe_jax.test_collaboration import padded

MB = 8e6
"""Bits."""

SIZE = 500_000
STEPS = 6


def play(*, measures_line: bool) -> list[Life]:
    """Two machines on fast lines and four on slow ones make steps of some thirty seconds; nobody is told its line."""
    problem = padded(SIZE)
    lives: list[Life] = []
    config = CollaborationConfig(target_batch_size=256, lead_s=3.0, measures_line=measures_line)

    def line(host: str) -> HostOptions:
        if host.startswith("slow"):
            return HostOptions(up_bps=MB / 2, down_bps=2 * MB)
        return HostOptions(up_bps=8 * MB, down_bps=8 * MB)

    async def main() -> None:
        async with simulate(latency=Constant(0.02), hosts=line) as network:
            world = World(network, problem, config=config)
            await world.open()
            for name in ("fast0", "fast1", "slow0", "slow1", "slow2", "slow3"):
                world.start(PeerSpec(name=name, sample_s=0.7))
            await world.wait_for_step(STEPS)
            await trio.sleep(2)
            lives.extend(world.lives)

    run(main)
    found = compare_with_one_machine(problem, lives, STEPS)
    assert not found.unexplained
    assert not found.chains_apart
    assert found.difference <= 1e-5
    return lives


def averaged_s(lives: list[Life], number: int) -> float:
    """The longest that anybody waited for a step."""
    return max(done.averaged_s for life in lives for done in life.steps if done.number == number)


def test_shares_follow_the_lines_that_peers_measured() -> None:
    """With equal shares a slow line sends (1 + 4 / 6) vectors at half a MB a second; once the fast reduce all, one."""
    equal, measured = (play(measures_line=measures) for measures in (False, True))
    for number in (3, STEPS):
        print(number, averaged_s(equal, number), averaged_s(measured, number))
