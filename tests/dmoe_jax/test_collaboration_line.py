"""Peers of a collaboration find out what their lines carry, and share out the reducing by it."""

import pytest
import trio

from dmoe_jax.collaboration import CollaborationConfig
from dmoe_net.transport.sim.links import HostOptions
from experiments.collaborative.world import Life, PeerSpec, World
from tests.dmoe_jax.collaboration_swarm import check_one_machine, in_world, padded

MB = 8e6
"""Bits."""

SIZE = 500_000
STEPS = 2


def play(
    *, measures_line: bool, target: int = 256, steps: int = STEPS, seed: int = 0, has_equal_lines: bool = False
) -> list[Life]:
    """Two machines on fast lines and four on slow ones make steps of two minutes; nobody is told its line.

    Args:
      target: samples of a step; with 40 of them one is made every 30 s.
      has_equal_lines: all of them at 2 MB a second instead.
    """
    problem = padded(SIZE)
    config = CollaborationConfig(target_batch_size=target, lead_s=3.0, measures_line=measures_line)

    def line(host: str) -> HostOptions:
        if has_equal_lines:
            return HostOptions(up_bps=2 * MB, down_bps=2 * MB)
        if host.startswith("slow"):
            return HostOptions(up_bps=MB / 2, down_bps=2 * MB)
        return HostOptions(up_bps=8 * MB, down_bps=8 * MB)

    async def body(world: World) -> None:
        for name in ("fast0", "fast1", "slow0", "slow1", "slow2", "slow3"):
            world.start(PeerSpec(name=name, sample_s=3.0))
        await world.wait_for_step(steps)
        await trio.sleep(2)

    lives = in_world(body, config=config, problem=problem, lines=line, seed=seed)
    check_one_machine(lives, steps, problem=problem)
    return lives


def averaged_s(lives: list[Life], number: int = STEPS) -> float:
    """The longest that anybody waited for a step."""
    return max(done.averaged_s for life in lives for done in life.steps if done.number == number)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_shares_follow_the_lines_that_peers_measured() -> None:
    """With equal shares a slow line sends (1 + 4 / 6) vectors at half a MB a second, 6.7 s; once the fast ones reduce
    nearly all, little more than one, 4 s. Before that, members wait behind vectors for longer than `silence_s` and take
    each other for dead; their patience grows, and one attempt later they settle."""
    equal, measured = (play(measures_line=measures) for measures in (False, True))
    for life in (*equal, *measured):
        assert [done.peers for done in life.steps] == [6] * len(life.steps)
        assert life.peer is not None
        assert life.peer.totals.reasons["the group did not settle"] == 1
    assert averaged_s(equal) > 6.5
    assert averaged_s(measured) < 0.85 * averaged_s(equal)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_where_steps_come_every_half_minute_no_averaging_is_slower_for_it_and_later_ones_are_faster(seed: int) -> None:
    """One or two measure between two steps. By the eighth all six have, and averages take little more than one vector
    instead of 1 + 4 / 6 over a slow line; on the way to that, no step takes longer than with equal shares."""
    steps, as_ever = 9, 4
    equal = play(measures_line=False, target=40, steps=as_ever, seed=seed)
    measured = play(measures_line=True, target=40, steps=steps, seed=seed)
    longest = max(averaged_s(equal, number) for number in range(2, as_ever + 1))
    for number in range(2, steps + 1):
        assert averaged_s(measured, number) <= 1.05 * longest
    for life in measured:
        assert life.peer is not None
        assert life.peer.rounds.measurements["measured"] == 1
    assert averaged_s(measured, steps) < 0.85 * averaged_s(equal, as_ever)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_where_all_lines_are_alike_measuring_changes_nothing() -> None:
    """Somebody takes the state meanwhile, which must make no line look faster than it is. To a tenth."""
    steps = 7
    equal, measured = (
        play(measures_line=measures, target=40, steps=steps, has_equal_lines=True) for measures in (False, True)
    )
    for number in range(2, steps + 1):
        assert averaged_s(measured, number) <= 1.1 * averaged_s(equal, number)
