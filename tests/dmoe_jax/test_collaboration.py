"""One large batch by many peers, in virtual time: the result is one machine's, whoever joins, leaves or is slow."""

from dataclasses import replace

import optax
import pytest
import trio

from dmoe_jax.collaboration import Collaboration, open_collaboration
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.optim.tree_vectors import TreeLayout
from dmoe_jax.peers.peer import SIM_PORT, PeerConfig, SwarmPeer, open_peer
from dmoe_net.averaging.collaboration.progress import next_chain, report_to_wire
from dmoe_net.averaging.plan import wait_for_plan
from dmoe_net.identity import Address, Contact
from dmoe_net.rpc.base import Reply, Request, handlers
from dmoe_net.transport.sim import run, simulate
from dmoe_net.transport.sim.links import Constant
from dmoe_net.types import Array
from experiments.collaborative.world import ROOT, World, relative_difference
from tests.dmoe_jax.collaboration_swarm import (
    CONFIG,
    PROBLEM,
    check_one_machine,
    in_world,
    machines,
    padded,
    peer_of,
    start_assistant,
    until,
)


def test_unequal_peers_make_the_steps_of_one_machine() -> None:
    async def body(world: World) -> None:
        for spec in machines():
            world.start(spec)
        await world.wait_for_step(10)
        await trio.sleep(1)

    lives = in_world(body)
    check_one_machine(lives, 10)
    batches = [each.samples for each in lives[0].steps]
    assert all(abs(batch - CONFIG.target_batch_size) <= 0.05 * CONFIG.target_batch_size for batch in batches[1:])


@pytest.mark.slow
def test_nobody_misses_a_step_over_long_lines() -> None:
    """Eight machines, a round trip of 400 ms, two seconds to form a group. For the first step they do not know of each
    other yet."""
    specs = machines([0.05 * 1.4**number for number in range(8)])

    async def body(world: World) -> None:
        for spec in specs:
            world.start(spec)
        await world.wait_for_step(4)
        await trio.sleep(2)

    lives = in_world(body, latency_s=0.2, config=replace(CONFIG, target_batch_size=512))
    for number in (2, 3, 4):
        assert [done.peers for life in lives for done in life.steps if done.number == number] == [8] * 8


@pytest.mark.parametrize(
    ("victim", "silent"),
    [(0, False), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0, True), (3, False), (3, True)))],
)
def test_one_joins_and_one_is_killed_while_it_averages(victim: int, silent: bool) -> None:
    specs, took_s, joined_at = machines(), 0.0, 0

    async def body(world: World) -> None:
        nonlocal took_s, joined_at
        for spec in specs[:4]:
            world.start(spec)
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
        await world.wait_for_step(9)
        await trio.sleep(1)

    lives = in_world(body, latency_s=0.05)
    check_one_machine(lives, 9)
    newcomer = lives[4]
    assert newcomer.peer is not None
    assert newcomer.peer.totals.states_taken == 1
    assert newcomer.steps[0].number <= joined_at + 2
    assert took_s < 10


@pytest.mark.parametrize("silent", [False, True])
def test_a_client_that_is_killed_costs_no_more_than_others(silent: bool) -> None:
    """It dies when its group is there and before it has brought anything. Nobody can call it: the others ask over the
    connections that it has made."""
    specs, took_s, died_at = machines(), 0.0, 0
    specs[3] = replace(specs[3], client=True, micro_batch=16)  # of 2 s: the others are done sooner

    async def body(world: World) -> None:
        nonlocal took_s, died_at
        for spec in specs:
            world.start(spec)
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
        await trio.sleep(1)

    check_one_machine(in_world(body, latency_s=0.05), died_at + 2)
    assert took_s < 10


def test_clients_bring_and_auxiliaries_only_reduce() -> None:
    specs = [replace(spec, client=number in (1, 2)) for number, spec in enumerate(machines()[:4])]
    assisted: list[int] = []

    async def body(world: World) -> None:
        for spec in specs:
            world.start(spec)
        start_assistant(world, lambda done: assisted.append(len(done.members)))
        await world.wait_for_step(8)
        await trio.sleep(1)

    lives = in_world(body)
    check_one_machine(lives, 8)
    assert {len(life.steps) for life in lives} == {8}
    assert max(assisted) == 5
    assert len(assisted) >= 6


@pytest.mark.slow
def test_delayed_steps_overlap_with_the_next_batch_and_are_one_machines_too() -> None:
    """Nobody waits for an averaging. A newcomer, whose first gradients are of fresher parameters, is in step."""
    specs, joined_at = machines((0.05, 0.05, 0.1, 0.1)), 0

    async def body(world: World) -> None:
        nonlocal joined_at
        for spec in specs[:3]:
            world.start(spec)
        await world.wait_for_step(6)
        joined_at = world.step
        world.start(specs[3])
        await world.wait_for_step(10)
        await trio.sleep(1)

    lives = in_world(body, config=replace(CONFIG, delayed=True))
    check_one_machine(lives, joined_at - 1, delayed=True)
    newcomer = lives[3]
    assert newcomer.peer is not None
    assert newcomer.peer.totals.states_taken == 1
    assert newcomer.steps[0].number <= joined_at + 2
    for number in set(newcomer.params) & set(lives[0].params):
        assert relative_difference(newcomer.params[number], lives[0].params[number]) == 0
    now = max(life.stepped_at[-1] for life in lives)
    assert max(life.idle_share(now) for life in lives[:3]) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize(("delayed", "target"), [(False, 512), (True, 1024)])
def test_a_newcomer_is_in_step_though_its_state_takes_longer_than_a_step(delayed: bool, target: int) -> None:
    """The state has 12 MB, for which a line takes 10 s, or twice as long beside averaging; steps are shorter."""
    problem, specs, joined_at = padded(1_000_000), machines((0.05, 0.05, 0.1, 0.1)), 0

    async def body(world: World) -> None:
        nonlocal joined_at
        for spec in specs[:3]:
            world.start(spec)
        await world.wait_for_step(3)
        await trio.sleep(14.0 if delayed else 0.0)  # longer steps: so that the next one comes while the state travels
        joined_at = world.step
        world.start(specs[3])
        await world.wait_for_step(8)
        await trio.sleep(1)

    config = replace(CONFIG, target_batch_size=target, delayed=delayed)
    lives = in_world(body, config=config, problem=problem, bits_per_s=1e7)
    newcomer = lives[3]
    assert newcomer.peer is not None
    assert newcomer.peer.totals.states_taken == 1
    assert newcomer.peer.totals.steps_followed >= 1
    assert newcomer.steps[0].number <= joined_at + 3
    for life in lives:  # slow lines part nobody from the others
        assert all(step.peers >= 3 for step in life.steps)
    check_one_machine(lives, joined_at - 1 if delayed else 8, delayed=delayed, problem=problem)
    for number in newcomer.stepped & set(newcomer.params) & set(lives[0].params):
        assert relative_difference(newcomer.params[number], lives[0].params[number]) == 0


async def followed(peer: Collaboration, place: SwarmPeer, other: SwarmPeer, mean: Array) -> None:
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
        assert place.rpc.address is not None
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
