"""Machines that gather one large batch in virtual time, for the tests of collaborations."""

import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import trio

from dmoe_jax.arrays import PyTree
from dmoe_jax.collaboration import Collaboration, CollaborationConfig
from dmoe_jax.peers.peer import SIM_PORT, PeerConfig, open_peer
from dmoe_net.averaging.collaboration.assisting import assist_collaboration
from dmoe_net.averaging.collaboration.rounds import Averaged
from dmoe_net.identity import Address
from dmoe_net.transport.sim import run, simulate
from dmoe_net.transport.sim.links import Constant, HostOptions
from experiments.collaborative.regression import regression
from experiments.collaborative.world import ROOT, Life, PeerSpec, Problem, World, compare_with_one_machine

CONFIG = CollaborationConfig(target_batch_size=256, lead_s=2.0)
PROBLEM = regression()


def machines(sample_s: Sequence[float] = (0.025, 0.05, 0.09, 0.125, 0.25)) -> list[PeerSpec]:
    """Peers with these seconds a sample."""
    return [PeerSpec(name=f"peer{number}", sample_s=each) for number, each in enumerate(sample_s)]


def in_world(
    body: Callable[[World], Awaitable[None]],
    *,
    latency_s: float = 0.02,
    config: CollaborationConfig = CONFIG,
    problem: Problem = PROBLEM,
    bits_per_s: float = math.inf,
    lines: Callable[[str], HostOptions] | None = None,
    seed: int = 0,
) -> list[Life]:
    """Run a test's body in virtual time; what the machines did. Lines are all alike, or as `lines` says of a host."""
    lives: list[Life] = []

    async def main() -> None:
        alike = HostOptions(up_bps=bits_per_s, down_bps=bits_per_s)
        async with simulate(latency=Constant(latency_s), hosts=lines or (lambda name: alike)) as network:
            world = World(network, problem, config=config, seed=seed)
            await world.open()
            await body(world)
            lives.extend(world.lives)

    run(main)
    return lives


def lives_of(
    specs: Sequence[PeerSpec],
    steps: int,
    *,
    apart_s: float = 0.0,
    beside: Callable[[World], Awaitable[None]] | None = None,
    after_s: float = 1.0,
    **settings: Any,
) -> list[Life]:
    """Run machines until they have made so many steps, and a little longer; `beside` is awaited when all have begun."""

    async def body(world: World) -> None:
        for spec in specs:
            world.start(spec)
            if apart_s:
                await trio.sleep(apart_s)
        if beside is not None:
            await beside(world)
        await world.wait_for_step(steps)
        await trio.sleep(after_s)

    return in_world(body, **settings)


def start_assistant(world: World, told: Callable[[Averaged], None]) -> None:
    """Start a machine that only reduces, and tells of each step in which it took part."""

    async def assist() -> None:
        place_config = PeerConfig(network=world.network, host="helper", seed=9)
        async with open_peer([Address(ROOT, SIM_PORT)], place_config) as place:
            config, rng = world.config.rounds(), random.Random(9)
            await assist_collaboration(place.rpc, place.dht, prefix="run", rng=rng, config=config, on_step=told)

    world.network.start("helper", assist)


def peer_of(world: World, name: str) -> Collaboration:
    """The part of a machine that is up."""
    return next(life.peer for life in world.living if life.spec.name == name)


async def until(condition: Callable[[], bool], *, poll_s: float = 0.01) -> None:
    """Wait, in virtual time, for something that has no event."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(poll_s)


def check_one_machine(
    lives: list[Life], steps: int, *, delayed: bool = False, problem: Problem = PROBLEM, most: float = 1e-5
) -> float:
    """Check that this is one machine's work; return the largest relative difference, of `most` at most."""
    found = compare_with_one_machine(problem, lives, steps, delayed=delayed)
    assert not found.unexplained
    assert not found.chains_apart
    assert found.difference <= most
    return found.difference


def padded(num_more: int) -> Problem:
    """The problem with so many parameters more, which its gradient decides as well."""

    def with_padding(tree: PyTree) -> PyTree:
        return {**tree, "padding": jnp.full(num_more, tree["b"].sum())}

    def gradient(params: PyTree, *micro_batch: Any) -> PyTree:
        return with_padding(PROBLEM.gradient({name: params[name] for name in "wb"}, *micro_batch))

    def batch_gradient(params: PyTree, *micro_batches: Any) -> PyTree:
        return with_padding(PROBLEM.batch_gradient({name: params[name] for name in "wb"}, *micro_batches))

    params = {**PROBLEM.params, "padding": jnp.zeros(num_more)}
    return replace(PROBLEM, params=params, gradient=gradient, batch_gradient=batch_gradient)
