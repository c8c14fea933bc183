"""NoLoCo and Streaming DiLoCo over the network, in virtual time, beside the same over an axis of simulated peers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.averaging import Round, TreeAverager
from dmoe_jax.optim import noloco, streaming_diloco
from dmoe_net.transport.sim.events import HostDown
from tests.dmoe_jax.averaging_peers import Loop, start, swarm_lived
from tests.net.averaging_swarm import Swarm, in_swarm

PEERS, STEPS, NAMES = 2, 12, ("a", "b", "c")
STEP_S = 10.0
"""Virtual seconds between two updates: a round takes about two."""
RNG = np.random.default_rng(0)
START = {name: RNG.normal(size=3).astype(np.float32) for name in NAMES}
GRADS = {name: RNG.normal(size=(STEPS, PEERS, 3)).astype(np.float32) for name in NAMES}


def over_the_network(optimizer: Any, *, at_once: bool, dies_at: float | None = None) -> tuple[list[Any], list[Round]]:
    """Parameters of each peer, and all rounds. `at_once`: wait for an average and apply it before the next update.

    `dies_at`: virtual seconds after which the second peer is gone.
    """
    loops, rounds = [Loop(optimizer, START) for _ in range(PEERS)], list[Round]()

    async def train(averager: TreeAverager, loop: Loop) -> None:
        for step in range(STEPS):
            await trio.sleep_until(STEP_S * (step + 1))
            grads = {name: value[step, loops.index(loop)] for name, value in GRADS.items()}
            await loop.step(averager, grads, wait=at_once)
            if at_once:
                loop.apply()

    async def body(swarm: Swarm) -> None:
        for number, loop in enumerate(loops):
            start(swarm, f"peer{number}", loop, train, on_round=rounds.append)
        if dies_at is not None:
            await trio.sleep_until(dies_at)
            swarm.network.apply(HostDown("peer1"))
        await swarm_lived(swarm, *(f"peer{number}" for number in range(PEERS if dies_at is None else 1)))

    in_swarm(body)
    return [loop.params for loop in loops], rounds


def over_an_axis(optimizer: Any) -> Any:
    """Parameters [peers, ...]."""

    @jax.jit
    @functools.partial(jax.vmap, axis_name="peers")
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {name: jnp.tile(value, (PEERS, 1)) for name, value in START.items()}
    state = jax.vmap(optimizer.init)(params)
    for number in range(STEPS):
        params, state = step(params, state, {name: value[number] for name, value in GRADS.items()})
    return params


def pmean(tree: Any, _: Any) -> Any:
    return jax.lax.pmean(tree, "peers")


@pytest.mark.parametrize(
    ("make", "at_once", "rounds"),
    [
        # Two fragments a period of four updates, in twelve updates: the first at 4, 8 and 12, the second at 2, 6, 10.
        (functools.partial(streaming_diloco, every=4, fragments=2, overlap=0), True, 6),
        (functools.partial(streaming_diloco, every=4, fragments=2, overlap=2), False, 6),
        (functools.partial(noloco, every=4), True, 3),
    ],
)
def test_peers_on_a_network_are_peers_along_an_axis(make: Any, at_once: bool, rounds: int) -> None:
    """With an overlap nobody waits: a fragment's average comes while training goes on, is put into the state after the
    next update, and used by the one after that."""
    found, told = over_the_network(make(optax.adam(0.1)), at_once=at_once)
    expected = over_an_axis(make(optax.adam(0.1), average=pmean))
    for number, params in enumerate(found):
        for name in NAMES:
            np.testing.assert_allclose(params[name], expected[name][number], rtol=1e-4, atol=1e-5)
    # The last fragment leaves with the last update: without waiting nobody hears of it.
    assert len(told) >= PEERS * (rounds - (not at_once))
    assert all(each.why_lost == "" and each.peers == PEERS for each in told)


@pytest.mark.parametrize(
    "make", [functools.partial(streaming_diloco, every=4, fragments=2), functools.partial(noloco, every=4)]
)
def test_who_is_left_alone_trains_on(make: Any) -> None:
    """The other dies before anything was averaged: rounds are lost with a reason, and the parameters are one's own."""
    found, told = over_the_network(make(optax.adam(0.1)), at_once=False, dies_at=15.0)
    own, adam = jax.tree.map(jnp.asarray, START), optax.adam(0.1)
    state = adam.init(own)
    for step in range(STEPS):
        updates, state = adam.update({name: value[step, 0] for name, value in GRADS.items()}, state, own)
        own = optax.apply_updates(own, updates)
    for name in NAMES:
        np.testing.assert_allclose(found[0][name], own[name], rtol=1e-4, atol=1e-5)
    assert told
    assert {each.why_lost for each in told} == {"nobody was met"}
