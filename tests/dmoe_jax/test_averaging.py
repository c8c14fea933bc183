"""A training loop of one's own, averaged with others over the network, in virtual time."""

import functools
import random
from contextlib import AsyncExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.averaging import (
    Round,
    TreeAverager,
    TreeAveragerConfig,
    open_tree_averager,
)
from dmoe_jax.averaging.tree_averager import Fragment
from dmoe_jax.averaging.wire_form import wire_forms
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.optim import moshpit_average
from dmoe_jax.peers.peer import SwarmPeer
from dmoe_net.averaging.assisting import assist
from dmoe_net.averaging.averager import Averager, AveragingStep
from dmoe_net.averaging.speeds import Speeds
from dmoe_net.clock import SwarmClock
from dmoe_net.dht.node import open_dht_node
from dmoe_net.errors import NetError
from dmoe_net.identity import Address
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.sim.events import HostDown
from dmoe_net.transport.tcp import TcpTransport
from tests.dmoe_jax.averaging_peers import CONFIG, Loop, peer_at, start, swarm_lived
from tests.dmoe_jax.small_swarm import identity_of
from tests.net.averaging_swarm import Swarm, in_swarm, open_place

RNG = np.random.default_rng(0)
EVERYTHING = ("parameters", "gradients", "pseudo_gradients")


def train_two(
    loops: list[Loop], grads: np.ndarray, samples: np.ndarray | None = None, *, config: TreeAveragerConfig = CONFIG
) -> list[TreeAverager]:
    """Both loops take grads [steps, 2, 3], waiting for each average and applying it at once."""

    async def body(swarm: Swarm) -> None:
        for number, loop in enumerate(loops):

            async def live(averager: TreeAverager, loop: Loop, number: int = number) -> None:
                await trio.sleep_until(5.0)
                for step in range(len(grads)):
                    extra = {} if samples is None else {"samples": float(samples[step, number])}
                    await loop.step(averager, grads[step, number], wait=True, **extra)
                    loop.apply()

            start(swarm, f"peer{number}", loop, live, config=config)
        await swarm_lived(swarm, "peer0", "peer1")
        averagers.extend(swarm.done[f"peer{number}"] for number in range(2))

    averagers: list[TreeAverager] = []
    in_swarm(body)
    return averagers


@pytest.mark.parametrize("what", EVERYTHING)
def test_two_loops_end_at_the_same_parameters(what: Any) -> None:
    """After each round both are where the mean of what they offered leads, by hand for SGD and outer SGD of rate 1.

    Both start at 1. Where parameters are averaged one starts at 5: only these are drawn together.
    """
    settings = {"outer": optax.sgd(1.0)} if what == "pseudo_gradients" else {}
    optimizer = moshpit_average(optax.sgd(0.1), every=2, what=what, **settings)
    other = 5.0 if what == "parameters" else 1.0
    loops = [Loop(optimizer, 1.0), Loop(optimizer, other)]
    grads = RNG.normal(size=(4, 2, 3)).astype(np.float32)
    averagers = train_two(loops, grads)
    # Of two gradients, "gradients" takes the mean, the others the sum.
    taken = grads.mean(axis=1).sum(axis=0) / (2 if what == "gradients" else 1)
    for loop, averager in zip(loops, averagers, strict=True):
        np.testing.assert_allclose(loop.values, (1.0 + other) / 2 - 0.1 * taken, rtol=1e-6)
        assert (averager.totals.done, averager.totals.peers_met, averager.why_not) == (2, 2, "")


def test_weighted_gradients_are_those_of_one_machine() -> None:
    """Adam on the mean over all samples of both peers; the means are taken in one place, in float64."""
    optimizer = moshpit_average(optax.adam(0.1), every=2, what="gradients", weighted=True)
    grads = RNG.normal(size=(4, 2, 3)).astype(np.float32)
    samples = np.array([[1, 6], [3, 2], [8, 8], [1, 5]], np.float64)
    loops = [Loop(optimizer), Loop(optimizer)]
    train_two(loops, grads, samples)
    adam, params = optax.adam(0.1), jnp.zeros(3)
    state = adam.init(params)
    for part, count in zip(grads.astype(np.float64).reshape(2, 4, 3), samples.reshape(2, 4), strict=True):
        mean = (part * count[:, None]).sum(axis=0) / count.sum()
        updates, state = adam.update(jnp.asarray(mean, jnp.float32), state)
        params = optax.apply_updates(params, updates)
    for loop in loops:
        np.testing.assert_allclose(loop.values, params, atol=1e-6)


def test_compressed_averages_are_near() -> None:
    """float16 on the way: three digits of the mean."""
    optimizer = moshpit_average(optax.sgd(0.0))
    loops = [Loop(optimizer, 1.001), Loop(optimizer, 2.002)]
    config = TreeAveragerConfig(side=2, window_s=2.0, timeout_s=4.0, compression="float16")
    train_two(loops, np.zeros((1, 2, 3), np.float32), config=config)
    for loop in loops:
        np.testing.assert_allclose(loop.values, 1.5015, rtol=2e-3)
        assert not np.array_equal(loop.values, np.float32([1.5015] * 3))


def test_a_step_never_waits_and_progress_made_meanwhile_stays() -> None:
    """1 and 5 meet at 3; the loop makes ten updates of +0.25 while the round is under way, and keeps them."""
    optimizer = moshpit_average(optax.sgd(1.0), every=1)
    ann, bob, rounds = Loop(optimizer, 1.0), Loop(optimizer, 5.0), list[Round]()

    async def runs_on(averager: TreeAverager, loop: Loop) -> None:
        await trio.sleep_until(5.0)
        await loop.step(averager, 0.0)
        for _ in range(10):
            began = trio.current_time()
            await loop.step(averager, -0.25)
            assert trio.current_time() == began
            assert averager.is_under_way
        await trio.sleep(10.0)
        await loop.step(averager, 0.0)
        assert not averager.is_under_way
        np.testing.assert_allclose(loop.values, 3.5)  # there, not applied yet
        loop.learn(0.0)

    async def comes_later(averager: TreeAverager, loop: Loop) -> None:
        await trio.sleep_until(6.0)
        await loop.step(averager, 0.0, wait=True)

    async def body(swarm: Swarm) -> None:
        start(swarm, "ann", ann, runs_on, on_round=rounds.append)
        start(swarm, "bob", bob, comes_later)
        await swarm_lived(swarm, "ann", "bob")

    in_swarm(body)
    np.testing.assert_allclose(ann.values, 5.5, rtol=1e-6)
    assert [(done.number, done.peers, done.received, done.why_lost) for done in rounds] == [(0, 2, 1.0, "")]
    assert 1.0 < rounds[0].took_s < 2.5


@pytest.mark.parametrize("what", EVERYTHING)
def test_a_peer_that_dies_in_a_round_costs_the_round(what: Any) -> None:
    """The other goes on with its own updates, counts the loss with its reason, and its next round is a new one."""
    optimizer = moshpit_average(optax.sgd(1.0), every=2, what=what)
    alive, dead = Loop(optimizer), Loop(optimizer)

    async def lives(averager: TreeAverager, loop: Loop) -> None:
        await trio.sleep_until(5.0)
        for _ in range(40):
            await loop.step(averager, 1.0)
            await trio.sleep(0.5)
        assert averager.totals.done == 0
        assert averager.totals.missed >= 2
        assert set(averager.totals.reasons) == {"nobody was met"}
        assert averager.why_not == "nobody was met"

    async def dies(averager: TreeAverager, loop: Loop) -> None:
        await trio.sleep_until(5.0)
        await loop.step(averager, 1.0)
        await loop.step(averager, 1.0)
        await trio.sleep_forever()

    async def body(swarm: Swarm) -> None:
        start(swarm, "alive", alive, lives)
        start(swarm, "dead", dead, dies)
        await trio.sleep_until(5.6)  # its round is under way, and the other's begins
        swarm.network.apply(HostDown("dead", silent=True))
        await swarm_lived(swarm, "alive")

    in_swarm(body)
    if what == "gradients":  # one step with its own mean gradient for each lost round
        assert -20.0 < alive.values[0] < -1.0
    else:
        np.testing.assert_array_equal(alive.values, -40.0)


@pytest.mark.parametrize("what", EVERYTHING)
def test_numbers_that_are_none_are_not_sent(what: Any) -> None:
    """They are counted, and the other peer meets nobody. With gradients the next round is a fresh one."""
    optimizer = moshpit_average(optax.sgd(1.0), what=what)
    bad, other = Loop(optimizer), Loop(optimizer, 2.0)

    async def diverges(averager: TreeAverager, loop: Loop) -> None:
        await trio.sleep_until(5.0)
        await loop.step(averager, np.nan, wait=True)
        name = what.replace("_", "-")
        assert averager.why_not == f"this peer's {name} are not finite"
        assert dict(averager.totals.reasons) == {averager.why_not: 1}
        assert (averager.totals.rejected, averager.totals.missed) == (1, 0)
        assert averager.is_left_behind == (what != "gradients")
        loop.apply()

    async def waits(averager: TreeAverager, loop: Loop) -> None:
        await trio.sleep_until(5.0)
        await loop.step(averager, 0.0, wait=True)
        assert averager.totals.missed == 1

    async def body(swarm: Swarm) -> None:
        start(swarm, "bad", bad, diverges)
        start(swarm, "other", other, waits)
        await swarm_lived(swarm, "bad", "other")

    in_swarm(body)
    assert np.isfinite(bad.values).all() == (what == "gradients")
    np.testing.assert_array_equal(other.values, 2.0)


class BadAverager(Averager):
    """Gives an average that is no number, or an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self.round_number = 0

    async def step(self, vector: Any, *, weight: float = 1.0) -> AveragingStep:
        if self._error is not None:
            raise self._error
        average = np.full_like(vector, np.nan)
        return AveragingStep(average=average, received=1.0, peers=(None, None), round_number=0, weight=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("averager", "weight", "expected"),
    [
        (BadAverager(), 1.0, (1, 0, "the average of parameters is not finite")),
        (BadAverager(NetError("no way")), 1.0, (0, 1, "the network failed: no way")),
        (BadAverager(), 0.0, (1, 0, "a weight of 0 samples is not from 1e-09 to 1e+12")),
    ],
)
def test_lost_rounds_have_their_reason(averager: Averager, weight: float, expected: tuple[int, int, str]) -> None:
    """The loop goes on, the parameters stay, and the optimiser counts a lost round."""
    loop = Loop(moshpit_average(optax.sgd(1.0), weighted=True), 2.0)
    _, (form,) = wire_forms(loop.optimizer, loop.params, CONFIG)

    async def main() -> TreeAverager:
        async with trio.open_nursery() as nursery:
            tree_averager = TreeAverager(
                fragments=[Fragment(number=0, averager=averager, form=form)],
                what="parameters",
                device=InlineDevice(),
                nursery=nursery,
                on_round=lambda done: None,
            )
            await loop.step(tree_averager, 0.0, wait=True, samples=weight)
        return tree_averager

    done = trio.run(main)
    assert (done.totals.rejected, done.totals.missed, done.why_not) == expected
    assert (done.totals.done, sum(done.totals.reasons.values())) == (0, 1)
    np.testing.assert_array_equal(loop.values, 2.0)
    assert int(loop.opt_state.lost) == 1


def test_an_auxiliary_peer_reduces_for_others() -> None:
    """Two clients, who cannot be called, average with its help."""
    optimizer = moshpit_average(optax.sgd(1.0))
    loops = {"ann": Loop(optimizer, 1.0), "bob": Loop(optimizer, 5.0)}
    config = TreeAveragerConfig(side=3, window_s=2.0, timeout_s=6.0, role="client", speeds=Speeds(up=1e6))

    async def averages(averager: TreeAverager, loop: Loop) -> None:
        await trio.sleep_until(15.0)
        await loop.step(averager, 0.0, wait=True)
        loop.apply()

    async def body(swarm: Swarm) -> None:
        async def assists() -> None:
            async with open_place(swarm, "aux") as place:
                await assist(place.rpc, place.dht, prefix="run", rng=place.rng, config=config.averager())

        swarm.network.start("aux", assists)
        for name, loop in loops.items():
            start(swarm, name, loop, averages, config=config)
        await swarm_lived(swarm, "ann", "bob")

    in_swarm(body)
    for loop in loops.values():
        np.testing.assert_allclose(loop.values, 3.0, rtol=1e-6)


async def test_over_tcp_with_worker_threads_and_donated_arrays() -> None:
    """Two loops that donate all they have, in real time; one gives its state to the other in the middle of training."""
    optimizer = moshpit_average(optax.adam(0.1), every=2, what="gradients", weighted=True)
    config = TreeAveragerConfig(side=2, window_s=10.0, timeout_s=20.0)
    loops = [Loop(optimizer, 1.0), Loop(optimizer, 9.0)]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, opt_state: Any, grad: Any) -> Any:
        updates, opt_state = optimizer.update({"w": grad}, opt_state, params, samples=4)
        return optax.apply_updates(params, updates), opt_state

    async def train(averager: TreeAverager, loop: Loop, rounds: int) -> None:
        while averager.totals.done < rounds or averager.is_under_way:
            loop.params, loop.opt_state = train_step(loop.params, loop.opt_state, jnp.full(3, 0.5))
            loop.steps += 1
            loop.opt_state = await averager.step(loop.opt_state, loop.params, wait=averager.is_under_way)

    async with AsyncExitStack() as stack:
        averagers, contacts = [], list[Address]()
        for number, loop in enumerate(loops):
            transport, identity = TcpTransport(), identity_of(number)
            rpc = await stack.enter_async_context(
                open_rpc_peer(transport, peer_id=identity.peer_id, listen=Address("127.0.0.1", 0))
            )
            dht = await stack.enter_async_context(
                open_dht_node(
                    rpc,
                    identity=identity,
                    clock=SwarmClock.wall(),
                    rng=random.Random(number),
                    initial_peers=tuple(contacts),
                )
            )
            assert rpc.address is not None
            contacts.append(rpc.address)
            opened = open_tree_averager(
                SwarmPeer(rpc=rpc, dht=dht, rng=random.Random(number), is_simulated=False),
                loop.params,
                optimizer=optimizer,
                name="run",
                state=lambda loop=loop: loop.state,
                config=config,
            )
            averagers.append(await stack.enter_async_context(opened))
        loops[0].steps = 100
        with trio.fail_after(30):
            taken = None
            while taken is None:
                taken = await averagers[1].catch_up(*loops[1].state, min_lead=50)
            loops[1].state = taken
            async with trio.open_nursery() as nursery:
                for averager, loop in zip(averagers, loops, strict=True):
                    nursery.start_soon(train, averager, loop, 3)
    assert loops[1].steps > 100
    assert [averager.totals.done for averager in averagers] == [3, 3]
    assert not any(averager.totals.reasons for averager in averagers)
    for loop in loops:  # two steps of Adam at rate 0.1 are in the parameters, the third average may be still to come
        assert loop.values[0] == pytest.approx(1.0 - 0.1 * int(loop.opt_state.inner[0].count), abs=1e-3)
        assert int(loop.opt_state.inner[0].count) >= 2


def test_peers_that_average_something_else_do_not_meet() -> None:
    """Gradients of one are not taken for the parameters of another."""
    loops = [Loop(moshpit_average(optax.sgd(0.0), what=what), 1.0) for what in ("parameters", "gradients")]
    for averager in train_two(loops, np.ones((1, 2, 3), np.float32)):
        assert (averager.totals.done, averager.totals.missed) == (0, 1)


def test_what_cannot_work_is_refused() -> None:
    """An optimiser that does not average, or does so by itself; another optimiser's state; values out of range."""

    async def opened(loop: Loop, place: Any, optimizer: Any, share: float = 1.0) -> TreeAverager:
        config = TreeAveragerConfig(share=share)
        async with open_tree_averager(
            peer_at(place), loop.params, optimizer=optimizer, name="run", config=config, device=InlineDevice()
        ) as averager:
            await loop.step(averager, 0.0)
            return averager

    async def body(swarm: Swarm) -> None:
        loop = Loop(moshpit_average(optax.sgd(1.0), what="gradients"))
        async with open_place(swarm, "ann") as place:
            with pytest.raises(ValueError, match="or streaming_diloco in it, found 0"):
                await opened(loop, place, optax.sgd(1.0))
            with pytest.raises(ValueError, match="averages by itself"):
                await opened(loop, place, moshpit_average(optax.sgd(1.0), average=lambda tree, number: tree))
            with pytest.raises(ValueError, match="is for parameters, the optimiser averages gradients"):
                await opened(loop, place, moshpit_average(optax.sgd(1.0)))
            with pytest.raises(ValueError, match=r"a share of 0\.1 is for an optimiser that averages parameters"):
                await opened(loop, place, loop.optimizer, share=0.1)

    in_swarm(body)
    for wrong, message in (
        ({"side": 1}, "side must be at least 2, got 1"),
        ({"dims": 0}, "dims"),
        ({"role": "leader"}, "role is one of auto, node, client, got 'leader'|parameter 'role'"),
        ({"window_s": 0.0}, "window_s"),
        ({"share": 0.0}, "share must be above 0 and at most 1, got 0.0"),
        ({"timeout_s": 0.0}, "timeout_s must be a positive number of seconds, got 0.0"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):  # whoever looks first, we or the types
            TreeAveragerConfig(**wrong)  # type: ignore[arg-type]
