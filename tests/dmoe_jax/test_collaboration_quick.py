"""Batches that are full in a fraction of a second, or never quite, in virtual time: all samples count, nobody waits."""

from dataclasses import replace

import pytest
import trio

from dmoe_jax.collaboration import CollaborationConfig, CollaborationTotals, GlobalStep
from dmoe_jax.collaboration.collaboration import Remarks, open_collaboration
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.peers.peer import PeerConfig, open_peer
from dmoe_net.transport.sim import run, simulate
from dmoe_net.transport.sim.links import Constant
from experiments.collaborative.world import Life, PeerSpec, World
from tests.dmoe_jax.collaboration_swarm import PROBLEM, check_one_machine, in_world, lives_of, peer_of

TARGET, STEPS = 256, 30
SPECS = [PeerSpec(name=f"peer{number}", sample_s=0.05 / 16, micro_batch=16) for number in range(3)]
"""Each gathers 16 samples in 0.05 s: two fill the batch in 0.4 s, three in 0.27 s."""
SLOW = [replace(spec, sample_s=30 / 16) for spec in SPECS[:2]]


def share_made(lives: list[Life], last: int) -> float:
    """The share of the last steps that each peer made itself, the smallest of those that live."""
    return min(sum(STEPS - last < n <= STEPS for n in life.stepped) for life in lives if life.ended is None) / last


def check(lives: list[Life]) -> None:
    check_one_machine(lives, STEPS)
    for life in (each for each in lives if each.ended is None):
        totals = life.peer.totals
        assert totals.samples_lost <= 0.05 * life.computed
        assert all(step.samples <= 2 * TARGET for step in life.steps)
        mean = totals.whole / totals.steps
        assert abs(mean - TARGET) <= 0.1 * TARGET


@pytest.mark.parametrize(("count", "lead_s"), [(2, 3.0), pytest.param(3, 0.2, marks=pytest.mark.slow)])
def test_who_comes_a_little_later_takes_part_in_steps_of_a_fraction_of_a_second(count: int, lead_s: float) -> None:
    """Whoever has begun two seconds later makes the last fifteen steps with the others."""
    config = CollaborationConfig(target_batch_size=TARGET, lead_s=lead_s)
    lives = lives_of(SPECS[:count], STEPS, apart_s=2.0, latency_s=0.005, config=config)
    check(lives)
    assert share_made(lives, 15) == 1


@pytest.mark.parametrize("latency_s", [0.005, pytest.param(0.03, marks=pytest.mark.slow)])
def test_a_third_takes_the_place_of_one_that_was_killed(latency_s: float) -> None:
    """It soon takes part in nearly all steps."""

    async def replacing(world: World) -> None:
        await world.wait_for_step(10)
        world.kill("peer0")
        world.start(SPECS[2])

    config = CollaborationConfig(target_batch_size=TARGET, lead_s=0.3)
    lives = lives_of(SPECS[:2], STEPS, beside=replacing, latency_s=latency_s, config=config)
    assert share_made(lives, 15) >= 0.8
    check(lives)


@pytest.mark.parametrize(
    ("sample_s", "micro_batch", "target", "batches", "steps"),
    [
        # The target as close as whole micro-batches come to it: 6 of 16 for 100, at 30 s each; one of 16 for 4.
        (30 / 16, 16, 100, 6, 3),
        (1 / 16, 16, 4, 1, 20),
        (30 / 16, 16, 4, 1, 3),
        (1 / 32, 32, 4104, 128, 2),
    ],
)
def test_a_lone_peer_makes_a_step_of_the_micro_batches_that_are_nearest_to_the_target(
    sample_s: float, micro_batch: int, target: int, batches: int, steps: int
) -> None:
    async def body(world: World) -> None:
        began = trio.current_time()
        world.start(PeerSpec(name="peer0", sample_s=sample_s, micro_batch=micro_batch))
        await world.wait_for_step(steps)
        # Half a micro-batch is waited for at most, beside what was computed.
        assert trio.current_time() - began <= steps * (batches + 0.5) * sample_s * micro_batch + 10

    lives = in_world(body, config=CollaborationConfig(target_batch_size=target))
    assert [each.samples for each in lives[0].steps[:steps]] == [batches * micro_batch] * steps


def test_a_lone_peer_whose_micro_batch_takes_longer_than_foretold_fills_its_batch() -> None:
    """Nobody waits for it at the time at which the batch was to be full."""
    done: list[GlobalStep] = []

    async def main() -> None:
        config = CollaborationConfig(target_batch_size=6)
        async with (
            simulate(latency=Constant(0.02)) as network,
            open_peer((), PeerConfig(network=network, host="alone", seed=0)) as place,
            open_collaboration(
                place,
                PROBLEM.params,
                together=PROBLEM.together,
                name="run",
                config=config,
                device=InlineDevice(),
                on_step=done.append,
            ) as peer,
        ):
            for number, took_s in enumerate([1.0, 0.002, 0.3, 0.002, 2.0, 2.0, 0.01, 0.01, 0.01, 0.5]):
                await trio.sleep(took_s)
                await peer.add(PROBLEM.gradient(PROBLEM.params, "x", number, 3), samples=3)

    run(main)
    assert [each.samples for each in done] == [6.0] * 5


def test_who_is_left_by_the_other_goes_on() -> None:
    """It has waited for the end of a batch that the other was to fill."""

    async def leaving(world: World) -> None:
        await world.wait_for_step(2)
        await trio.sleep(70)
        world.kill("peer1", silent=True)
        left = world.step
        with trio.fail_after(600):
            await world.wait_for_step(left + 2)

    lives_of(SLOW, 0, beside=leaving, config=CollaborationConfig(target_batch_size=100))


@pytest.mark.slow
def test_nobody_waits_for_somebody_that_lives_and_computes_no_more() -> None:
    """Its loop is over, and it stays as a donor: its samples were expected, and its part in every group."""

    async def leaving(world: World) -> None:
        await world.wait_for_step(2)
        peer = peer_of(world, "peer1")

        async def does_something_else(*args: object, **named: object) -> bool:
            await trio.sleep_forever()
            return False

        peer.gathered = does_something_else  # type: ignore[method-assign]
        before = world.step
        await trio.sleep(600)
        # Alone it fills a batch in 96 s; it may lose two of them to finding out.
        assert world.step >= before + 4

    specs = [replace(spec, sample_s=1.0) for spec in SLOW]
    lives_of(specs, 0, beside=leaving, config=CollaborationConfig(target_batch_size=100))


def test_what_goes_wrong_is_said_once_with_counts(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is said of a step or two alone, nor where nobody else is there."""
    totals = CollaborationTotals()
    remarks = Remarks(256, totals)
    alone = GlobalStep(number=7, peers=1, samples=250.0, own_samples=250.0, gathered_s=0.4, averaged_s=0.1, attempts=0)
    two = replace(alone, peers=2)
    for done, num_behind in ([(alone, 0)] * 4 + [(alone, 1)] * 2 + [(two, 0)]) * 2:
        remarks.stepped(done, num_behind=num_behind)
    assert not caplog.records
    for done, num_behind in [(alone, 1)] * 9 + [(replace(two, samples=513.0), 0)] * 2:
        remarks.stepped(done, num_behind=num_behind)
    totals.reasons["no group found"] = 2
    for _ in range(9):
        totals.samples_lost += 20
        remarks.gathered()
    by_itself, too_large, without_it = caplog.messages
    assert "last 3 steps, up to 7, were made by this peer alone while 1 others report" in by_itself
    assert "step 7 has 513 samples of 2 peers, more than twice the target of 256" in too_large
    assert "others made steps without this peer 3 times in a row: 60 of its samples" in without_it
