"""Peers of a collaboration share out the reducing by what they say of their lines."""

import pytest
import trio

from dmoe_jax.collaboration import CollaborationConfig
from dmoe_net.transport.sim.links import HostOptions
from experiments.collaborative.world import Life, PeerSpec, World
from tests.dmoe_jax.collaboration_swarm import check_one_machine, in_world, padded

MB = 8e6
"""Bits."""
FAST, SLOW = HostOptions(up_bps=8 * MB, down_bps=8 * MB), HostOptions(up_bps=MB / 2, down_bps=2 * MB)

SIZE = 500_000
STEPS = 2


def play(*, says_line: bool) -> list[Life]:
    """Two machines on fast lines and four on slow ones make steps of two minutes."""
    problem = padded(SIZE)

    def line(host: str) -> HostOptions:
        return SLOW if host.startswith("slow") else FAST

    async def body(world: World) -> None:
        for name in ("fast0", "fast1", "slow0", "slow1", "slow2", "slow3"):
            said = line(name) if says_line else HostOptions()
            world.start(PeerSpec(name=name, sample_s=3.0, line=said))
        await world.wait_for_step(STEPS)
        await trio.sleep(2)

    config = CollaborationConfig(target_batch_size=256, lead_s=3.0)
    lives = in_world(body, config=config, problem=problem, lines=line)
    check_one_machine(lives, STEPS, problem=problem)
    return lives


def averaged_s(lives: list[Life]) -> float:
    """The longest that anybody waited for the last step."""
    return max(done.averaged_s for life in lives for done in life.steps if done.number == STEPS)


@pytest.mark.slow
def test_shares_follow_the_lines_that_peers_tell() -> None:
    """With equal shares a slow line sends (1 + 4 / 6) vectors at half a MB a second, 6.7 s; once the fast ones reduce
    nearly all, little more than one, 4 s."""
    equal, told = (play(says_line=says) for says in (False, True))
    for life in (*equal, *told):
        assert [done.peers for done in life.steps] == [6] * len(life.steps)
    assert averaged_s(equal) > 6.5
    assert averaged_s(told) < 0.85 * averaged_s(equal)
