"""One large batch by many peers, in virtual time: the result is one machine's, whoever joins, leaves or is slow; where
numbers travel compressed, all peers make the same step to the last bit."""

import math
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.averaging.settings import CompressionName
from dmoe_jax.collaboration import Collaboration, CollaborationConfig, open_collaboration
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.optim.tree_vectors import TreeLayout
from dmoe_jax.peers.peer import SIM_PORT, PeerConfig, SwarmPeer, open_peer
from dmoe_net.averaging.collaboration.progress import next_chain, report_to_wire
from dmoe_net.averaging.plan import wait_for_plan
from dmoe_net.identity import Address, Contact
from dmoe_net.rpc.base import Reply, Request, handlers
from dmoe_net.transport.sim import run, simulate
from dmoe_net.transport.sim.links import Constant, HostOptions
from experiments.collaborative.world import ROOT, Life, PeerSpec, World, relative_difference
from tests.dmoe_jax.collaboration_swarm import (
    CONFIG,
    PROBLEM,
    check_one_machine,
    lives_of,
    machines,
    padded,
    peer_of,
    start_assistant,
    until,
)


def check_newcomer(lives: list[Life], joined_at: int, *, within: int = 2, numbers: Set[int] = frozenset()) -> None:
    """The last one took one state, soon makes the others' steps, and has the same after those with these numbers."""
    newcomer = lives[-1]
    assert newcomer.peer.totals.states_taken == 1
    assert newcomer.steps[0].number <= joined_at + within
    for number in numbers & set(newcomer.params) & set(lives[0].params):
        assert relative_difference(newcomer.params[number], lives[0].params[number]) == 0


def test_unequal_peers_make_the_steps_of_one_machine() -> None:
    """All batches but the first are within 5 % of the target."""
    lives = lives_of(machines(), 10)
    check_one_machine(lives, 10)
    batches = [each.samples for each in lives[0].steps]
    assert all(abs(batch - CONFIG.target_batch_size) <= 0.05 * CONFIG.target_batch_size for batch in batches[1:])


@pytest.mark.slow
def test_nobody_misses_a_step_over_long_lines() -> None:
    """Eight machines, a round trip of 400 ms, two seconds to form a group; but for the first step."""
    specs, config = machines([0.05 * 1.4**number for number in range(8)]), replace(CONFIG, target_batch_size=512)
    lives = lives_of(specs, 4, after_s=2.0, latency_s=0.2, config=config)
    for number in (2, 3, 4):
        assert [done.peers for life in lives for done in life.steps if done.number == number] == [8] * 8


@pytest.mark.parametrize(
    ("victim", "silent"),
    [(0, False), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0, True), (3, False), (3, True)))],
)
def test_one_joins_and_one_is_killed_while_it_averages(victim: int, silent: bool) -> None:
    """The step is made by the others within ten seconds."""
    specs, took_s, joined_at = machines(), 0.0, 0

    async def changing(world: World) -> None:
        nonlocal took_s, joined_at
        await world.wait_for_step(3)
        joined_at = world.step
        world.start(specs[4])
        await world.wait_for_step(6)
        peer = peer_of(world, specs[victim].name)
        await until(lambda: peer.standing.is_averaging)
        await trio.sleep(0.03)
        world.kill(specs[victim].name, silent=silent)
        killed_at = trio.current_time()
        await world.wait_for_step(7)
        took_s = trio.current_time() - killed_at

    lives = lives_of(specs[:4], 9, beside=changing, latency_s=0.05)
    check_one_machine(lives, 9)
    check_newcomer(lives, joined_at)
    assert took_s < 10


@pytest.mark.parametrize("silent", [False, True])
def test_a_client_that_is_killed_costs_no_more_than_others(silent: bool) -> None:
    """It dies when its group is there and it has brought nothing; others ask over connections that it has made."""
    specs, took_s, died_at = machines(), 0.0, 0
    specs[3] = replace(specs[3], client=True, micro_batch=16)  # of 2 s: the others are done sooner

    async def killing(world: World) -> None:
        nonlocal took_s, died_at
        await world.wait_for_step(4)
        client = peer_of(world, specs[3].name)

        def others_wait() -> bool:
            coming = client.standing.coming
            return client.step >= 4 and coming is not None and coming.group is not None

        await until(lambda: others_wait() and not client.standing.is_averaging)
        world.kill(specs[3].name, silent=silent)
        died_at, killed_at = client.step, trio.current_time()
        await world.wait_for_step(died_at + 1)
        took_s = trio.current_time() - killed_at
        await world.wait_for_step(died_at + 2)

    check_one_machine(lives_of(specs, 0, beside=killing, latency_s=0.05), died_at + 2)
    assert took_s < 10


def test_clients_bring_and_auxiliaries_only_reduce() -> None:
    """All machines make all steps, with the auxiliary one in most of their groups."""
    specs = [replace(spec, client=number in (1, 2)) for number, spec in enumerate(machines()[:4])]
    assisted: list[int] = []

    async def helping(world: World) -> None:
        start_assistant(world, lambda done: assisted.append(len(done.members)))

    lives = lives_of(specs, 8, beside=helping)
    check_one_machine(lives, 8)
    assert {len(life.steps) for life in lives} == {8}
    assert max(assisted) == 5
    assert len(assisted) >= 6


@pytest.mark.slow
def test_delayed_steps_overlap_with_the_next_batch_and_are_one_machines_too() -> None:
    """Nobody waits for an averaging. A newcomer, whose first gradients are of fresher parameters, is in step."""
    specs, joined_at = machines((0.05, 0.05, 0.1, 0.1)), 0

    async def joining(world: World) -> None:
        nonlocal joined_at
        await world.wait_for_step(6)
        joined_at = world.step
        world.start(specs[3])

    lives = lives_of(specs[:3], 10, beside=joining, config=replace(CONFIG, delayed=True))
    check_one_machine(lives, joined_at - 1, delayed=True)
    check_newcomer(lives, joined_at, numbers=set(lives[0].params))
    now = max(life.stepped_at[-1] for life in lives)
    assert max(life.idle_share(now) for life in lives[:3]) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize(("delayed", "target"), [(False, 512), (True, 1024)])
def test_a_newcomer_is_in_step_though_its_state_takes_longer_than_a_step(delayed: bool, target: int) -> None:
    """The state has 12 MB, for which a line takes 10 s, or twice as long beside averaging; steps are shorter."""
    problem, specs, joined_at = padded(1_000_000), machines((0.05, 0.05, 0.1, 0.1)), 0

    async def joining(world: World) -> None:
        nonlocal joined_at
        await world.wait_for_step(3)
        await trio.sleep(14.0 if delayed else 0.0)  # longer steps: so that the next one comes while the state travels
        joined_at = world.step
        world.start(specs[3])

    config = replace(CONFIG, target_batch_size=target, delayed=delayed)
    lives = lives_of(specs[:3], 8, beside=joining, config=config, problem=problem, bits_per_s=1e7)
    check_newcomer(lives, joined_at, within=3, numbers=lives[3].stepped)
    newcomer = lives[3]
    assert newcomer.peer.totals.steps_followed >= 1
    for life in lives:  # slow lines part nobody from the others
        assert all(step.peers >= 3 for step in life.steps)
    check_one_machine(lives, joined_at - 1 if delayed else 8, delayed=delayed, problem=problem)


MB = 8e6
"""Bits."""


@pytest.mark.slow
def test_shares_follow_the_lines_that_peers_tell() -> None:
    """With equal shares a slow line sends (1 + 4 / 6) vectors at half a MB a second, 6.7 s; once the fast ones reduce
    nearly all, little more than one, 4 s."""
    problem, config, took_s = padded(500_000), CollaborationConfig(target_batch_size=256, lead_s=3.0), list[float]()

    def line(host: str) -> HostOptions:
        up_bps, down_bps = (MB / 2, 2 * MB) if host.startswith("slow") else (8 * MB, 8 * MB)
        return HostOptions(up_bps=up_bps, down_bps=down_bps)

    names = [*("fast0", "fast1"), *(f"slow{number}" for number in range(4))]
    for says_line in (False, True):  # they make steps of two minutes
        told = {name: line(name) if says_line else HostOptions() for name in names}
        specs = [PeerSpec(name=name, sample_s=3.0, line=said) for name, said in told.items()]
        lives = lives_of(specs, 2, after_s=2.0, config=config, problem=problem, lines=line)
        check_one_machine(lives, 2, problem=problem)
        for life in lives:
            assert [done.peers for done in life.steps] == [6] * len(life.steps)
        took_s.append(max(done.averaged_s for life in lives for done in life.steps if done.number == 2))
    equal, by_line = took_s
    assert equal > 6.5
    assert by_line < 0.85 * equal


def check_same_bits(lives: Sequence[Life], steps: int) -> None:
    """After every step; and somebody was there to compare with."""
    for number in range(1, steps + 1):
        trees = [life.params[number] for life in lives if number in life.params]
        found = [b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)) for tree in trees]
        assert len(found) >= 4
        assert len(set(found)) == 1


def trained(compression: CompressionName, steps: int, **settings: Any) -> list[Life]:
    """Lives of machines whose numbers travel so."""
    config = replace(CONFIG, compression=compression)
    return lives_of(settings.pop("specs", machines()), steps, latency_s=0.05, config=config, **settings)


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
    """The others average once more. It falls silent so many seconds after it has begun to average for step 6."""
    name, after_s = victim

    async def killing(world: World) -> None:
        await world.wait_for_step(5)
        peer = peer_of(world, name)
        await until(lambda: peer.step >= 5 and peer.standing.is_averaging)
        await trio.sleep(after_s)
        world.kill(name, silent=True)

    lives = trained(compression, 10, beside=killing)
    check_same_bits(lives, 10)
    (dead,) = (life for life in lives if life.ended is not None)
    assert max(dead.params) == 5
    assert {step.attempts for life in lives for step in life.steps if step.number == 6} == {2}
    check_one_machine(lives, 10, most=math.inf)


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["none", "blockwise8"])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_an_assistant_knows_how_many_samples_a_step_has(count: int, compression: CompressionName) -> None:
    """Also where two peers have all parts between them, and it has none."""
    helped: list[Any] = []

    async def helping(world: World) -> None:
        start_assistant(world, helped.append)

    lives = trained(compression, 8, specs=machines()[:count], beside=helping)
    whole = {step.samples for life in lives for step in life.steps}
    assert len(helped) >= 4
    assert all(done.weight in whole and done.weight > 0 for done in helped)
    of_all = {step.samples for life in lives for step in life.steps if step.peers == count + 1}
    assert {done.weight for done in helped} == of_all


async def followed(peer: Collaboration, place: SwarmPeer, other: SwarmPeer, mean: Any) -> None:
    """Have a peer hear of another one, which has made the next step with 8 samples and this mean."""
    here = peer.board.view.peers[0]
    prefix = (await wait_for_plan(other.dht, "run")).within("run")
    chain = next_chain(here.chain, b"g" * 16)
    there = replace(here, peer_id=other.rpc.peer_id, address=other.rpc.address, step=here.step + 1, chain=chain)
    there = replace(there, samples=0.0, rate=0.0)

    async def steps(request: Request) -> Reply:
        return Reply(body={"steps": [[there.step, here.chain, b"g" * 16, 8.0, 0.0]]})

    async def piece(request: Request) -> Reply:
        return Reply(tensors=(mean,))

    with handlers(other.rpc, {f"averaging.{prefix}.steps": steps, f"averaging.{prefix}.steps.piece": piece}):
        contact = Contact(place.rpc.peer_id, place.rpc.address)
        body = {"report": report_to_wire(there), "at": None}
        await other.rpc.call(contact, f"averaging.{prefix}.begin", body, timeout_s=5.0)
        assert await peer.add(PROBLEM.params, samples=8, took_s=1.0)


def test_who_follows_with_delayed_updates_applies_first_what_it_had_averaged() -> None:
    """Alone for two steps, of which the second is still to be applied; then it follows a third that others made."""

    async def main() -> None:
        async with (
            simulate(latency=Constant(0.02)) as network,
            open_peer((), PeerConfig(network=network, host=ROOT, seed=0)) as place,
            open_collaboration(
                place,
                PROBLEM.params,
                together=PROBLEM.together,
                name="run",
                config=replace(CONFIG, target_batch_size=8, delayed=True),
                device=InlineDevice(),
            ) as peer,
        ):
            brought = [PROBLEM.gradient(PROBLEM.params, "x", number, 8) for number in range(3)]
            for number in range(2):
                while peer.totals.steps == number:
                    await trio.sleep(1)
                    await peer.add(brought[number], samples=8, took_s=1.0)
                    await trio.sleep(3)
            assert peer.step == 2
            assert peer.standing.under_way is not None
            async with open_peer([Address(ROOT, SIM_PORT)], PeerConfig(network=network, host="other", seed=1)) as other:
                await followed(peer, place, other, TreeLayout(PROBLEM.params).to_vector(brought[2]))
            assert peer.step == 3
            assert (peer.totals.steps_followed, peer.totals.states_taken, peer.totals.samples_lost) == (1, 0, 8.0)
            params, state = PROBLEM.params, PROBLEM.optimizer.init(PROBLEM.params)
            for grads in brought:
                updates, state = PROBLEM.optimizer.update(grads, state, params)
                params = optax.apply_updates(params, updates)
            assert relative_difference(peer.params, params) <= 1e-6

    run(main)
