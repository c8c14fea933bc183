"""A training loop of one's own, averaged with others over the network, in virtual time, and over an axis of peers."""

import functools
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.averaging import Round, TreeAverager, TreeAveragerConfig, open_tree_averager
from dmoe_jax.averaging.tree_averager import Fragment
from dmoe_jax.averaging.wire_form import wire_forms
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.optim import moshpit_average, noloco, streaming_diloco
from dmoe_jax.optim.peer_axis import moshpit_rounds, random_cells
from dmoe_jax.peers.security import Plain
from dmoe_jax.swarm.opening import open_swarm
from dmoe_net.averaging.averager import Averager, AveragingStep
from dmoe_net.averaging.grouping.group_key import MoshpitGrid
from dmoe_net.errors import NetError
from dmoe_net.transport.sim.events import HostDown
from tests.dmoe_jax.averaging_peers import CONFIG, Loop, live_together, peer_at
from tests.net.averaging_peers import Peers
from tests.net.averaging_swarm import Swarm, in_swarm, open_place

RNG = np.random.default_rng(0)
EVERYTHING = ("parameters", "gradients", "pseudo_gradients")


def train_two(
    loops: list[Loop], grads: np.ndarray, samples: np.ndarray | None = None, *, config: TreeAveragerConfig = CONFIG
) -> list[TreeAverager]:
    """Both loops take grads [steps, 2, 3], waiting for each average and applying it at once."""

    async def live(averager: TreeAverager, loop: Loop) -> None:
        number = loops.index(loop)
        await trio.sleep_until(5.0)
        for step in range(len(grads)):
            extra = {} if samples is None else {"samples": float(samples[step, number])}
            await loop.step(averager, grads[step, number], wait=True, **extra)
            loop.apply()

    return live_together({f"peer{number}": (loop, live) for number, loop in enumerate(loops)}, config=config)


@pytest.mark.parametrize("what", EVERYTHING)
def test_two_loops_end_at_the_same_parameters(what: Any) -> None:
    """After each round both are where the mean of what they offered leads, by hand for SGD and outer SGD of rate 1."""
    settings = {"outer": optax.sgd(1.0)} if what == "pseudo_gradients" else {}
    optimizer = moshpit_average(optax.sgd(0.1), every=2, what=what, **settings)
    other = 5.0 if what == "parameters" else 1.0  # only parameters are drawn together
    loops = [Loop(optimizer, 1.0), Loop(optimizer, other)]
    grads = RNG.normal(size=(4, 2, 3)).astype(np.float32)
    averagers = train_two(loops, grads)
    # Of two gradients, "gradients" takes the mean, the others the sum.
    taken = grads.mean(axis=1).sum(axis=0) / (2 if what == "gradients" else 1)
    for loop, averager in zip(loops, averagers, strict=True):
        np.testing.assert_allclose(loop.values, (1.0 + other) / 2 - 0.1 * taken, rtol=1e-6)
        assert (averager.totals.done, averager.totals.peers_met, averager.why_not) == (2, 2, "")
    one, another = (averager.totals.facts() for averager in averagers)
    assert one == another
    assert (one["averages"], one["met_peers"], len(str(one["met"]))) == (2, 2, 8)


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
    train_two(loops, np.zeros((1, 2, 3), np.float32), config=replace(CONFIG, compression="float16"))
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

    live_together({"ann": (ann, runs_on), "bob": (bob, comes_later)}, on_round=rounds.append)
    np.testing.assert_allclose(ann.values, 5.5, rtol=1e-6)
    assert [(done.number, done.peers, done.received, done.why_lost) for done in rounds] == [(0, 2, 1.0, "")] * 2
    assert 1.0 < max(done.took_s for done in rounds) < 2.5  # that of the first, who waits for the other


@pytest.mark.parametrize("method", [*EVERYTHING, "noloco", "streaming"])
def test_a_peer_that_dies_in_a_round_costs_the_round(method: Any) -> None:
    """The other goes on with its own updates, counts the loss with its reason, and its next round is a new one."""
    others = {"noloco": noloco, "streaming": functools.partial(streaming_diloco, fragments=1)}
    optimizer = (others.get(method) or functools.partial(moshpit_average, what=method))(optax.sgd(1.0), every=2)
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

    async def killing(swarm: Swarm) -> None:
        await trio.sleep_until(5.6)  # its round is under way, and the other's begins
        swarm.network.apply(HostDown("dead", silent=True))

    live_together({"alive": (alive, lives), "dead": (dead, dies)}, until=["alive"], beside=killing)
    if method == "gradients":  # one step with its own mean gradient for each lost round
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

    live_together({"bad": (bad, diverges), "other": (other, waits)})
    assert np.isfinite(bad.values).all() == (what == "gradients")
    np.testing.assert_array_equal(other.values, 2.0)


class BadAverager(Averager):
    """Gives an average that is no number, or an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.round_number = error, 0

    async def step(self, vector: Any, *, weight: float = 1.0, mark: str = "") -> AveragingStep:
        if self.error is not None:
            raise self.error
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
            fragment = Fragment(number=0, averager=averager, form=form)
            settings: dict[str, Any] = {"what": "parameters", "device": InlineDevice(), "on_round": lambda done: None}
            tree_averager = TreeAverager(fragments=[fragment], nursery=nursery, **settings)
            await loop.step(tree_averager, 0.0, wait=True, samples=weight)
        return tree_averager

    done = trio.run(main)
    assert (done.totals.rejected, done.totals.missed, done.why_not) == expected
    assert (done.totals.done, sum(done.totals.reasons.values())) == (0, 1)
    np.testing.assert_array_equal(loop.values, 2.0)
    assert int(loop.opt_state.lost) == 1


async def test_over_tcp_with_worker_threads_and_donated_arrays() -> None:
    """Two loops that donate all they have, in real time; one gives its state to the other in the middle of training."""
    optimizer = moshpit_average(optax.adam(0.1), every=2, what="gradients", weighted=True)
    config = TreeAveragerConfig(side=2, window_s=10.0, timeout_s=20.0)
    loops = [Loop(optimizer, 1.0), Loop(optimizer, 9.0)]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, opt_state: Any) -> Any:
        updates, opt_state = optimizer.update({"w": jnp.full(3, 0.5)}, opt_state, params, samples=4)
        return optax.apply_updates(params, updates), opt_state

    async def train(averager: TreeAverager, loop: Loop, rounds: int) -> None:
        while averager.totals.done < rounds or averager.is_under_way:
            loop.params, loop.opt_state = train_step(loop.params, loop.opt_state)
            loop.steps += 1
            loop.opt_state = await averager.step(loop.opt_state, loop.params, wait=averager.is_under_way)

    async with AsyncExitStack() as stack:
        averagers, known = [], list[str]()
        for loop in loops:
            swarm = await stack.enter_async_context(open_swarm(known, security=Plain()))
            known.append(swarm.contact)
            state = functools.partial(getattr, loop, "state")
            opened = swarm.averager(loop.params, optimizer, name="run", state=state, config=config)
            averagers.append(await stack.enter_async_context(opened))
        loops[0].steps = 100
        with trio.fail_after(30):
            while (taken := await averagers[1].catch_up(*loops[1].state, min_lead=50)) is None:
                pass
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


@pytest.mark.parametrize(
    ("optimizer", "config", "message"),
    [
        (optax.sgd(1.0), {}, "or streaming_diloco in it, found 0"),
        (moshpit_average(optax.sgd(1.0), average=lambda tree, number: tree), {}, "averages by itself"),
        (moshpit_average(optax.sgd(1.0)), {}, "is for parameters, the optimiser averages gradients"),
        (None, {"share": 0.1}, r"a share of 0\.1 is for an optimiser that averages parameters"),
        (None, {"share": 0.0}, "share must be above 0 and at most 1, got 0.0"),
        (None, {"role": "leader"}, "role is one of auto, node, client, got 'leader'|parameter 'role'"),
    ],
)
def test_what_cannot_work_is_refused(optimizer: Any, config: dict[str, Any], message: str) -> None:
    """An optimiser that averages nothing, or by itself, or something else than the loop's own; values out of range."""
    loop = Loop(moshpit_average(optax.sgd(1.0), what="gradients"))
    settings: dict[str, Any] = {"optimizer": optimizer or loop.optimizer, "device": InlineDevice(), "name": "run"}

    async def body(swarm: Swarm) -> None:
        async with open_place(swarm, "ann") as place:
            peer, params = peer_at(place), loop.params
            with pytest.raises((ValueError, TypeError), match=message):  # whoever looks first, we or the types
                async with open_tree_averager(peer, params, config=TreeAveragerConfig(**config), **settings) as opened:
                    await loop.step(opened, 0.0)

    in_swarm(body)


@pytest.mark.slow
@pytest.mark.parametrize(("side", "num_peers", "heaviest"), [(4, 11, 9.0), (4, 16, 1.0), (8, 64, 1.0)])
def test_network_and_peer_axis_and_mesh_agree(side: int, num_peers: int, heaviest: float) -> None:
    """Round by round to 1e-6, on full grids and on one with holes, where groups differ in size and peers in weight."""
    grid, weights = MoshpitGrid(side=side, dims=2), np.linspace(1.0, heaviest, num_peers)
    cells = np.asarray(random_cells(jax.random.key(num_peers), grid, num_peers))
    mesh = jax.make_mesh((1,), ("peers",), axis_types=(jax.sharding.AxisType.Auto,))
    on_mesh = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("peers"))
    rounds = functools.partial(moshpit_rounds, grid=grid, cells=cells, weights=weights)
    average = jax.jit(rounds, static_argnames="num_rounds")

    async def body(swarm: Swarm) -> None:
        peers = Peers(swarm, grid, num_peers, cells=cells.tolist(), weights=weights.tolist())
        begin = peers.stacked()
        for number in range(1, 4):
            await peers.rounds(number)
            expected = average(begin, num_rounds=number)
            np.testing.assert_allclose(peers.stacked(), expected, atol=1e-6)
        np.testing.assert_allclose(average(jax.device_put(begin, on_mesh), num_rounds=3), expected, atol=1e-6)

    in_swarm(body)


PEERS, STEPS, NAMES = 2, 12, ("a", "b", "c")
STEP_S = 10.0
"""Virtual seconds between two updates: a round takes about two."""
START = {name: RNG.normal(size=3).astype(np.float32) for name in NAMES}
GRADS = {name: RNG.normal(size=(STEPS, PEERS, 3)).astype(np.float32) for name in NAMES}


def over_the_network(optimizer: Any, *, at_once: bool) -> tuple[list[Any], list[Round]]:
    """Parameters of each peer, and all rounds. `at_once`: wait for an average and apply it before the next update."""
    loops, rounds = [Loop(optimizer, START) for _ in range(PEERS)], list[Round]()

    async def train(averager: TreeAverager, loop: Loop) -> None:
        for step in range(STEPS):
            await trio.sleep_until(STEP_S * (step + 1))
            grads = {name: value[step, loops.index(loop)] for name, value in GRADS.items()}
            await loop.step(averager, grads, wait=at_once)
            if at_once:
                loop.apply()

    live_together({f"peer{number}": (loop, train) for number, loop in enumerate(loops)}, on_round=rounds.append)
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
    """With an overlap nobody waits: an average is put into the state after the next update, and used one later."""
    found, told = over_the_network(make(optax.adam(0.1)), at_once=at_once)
    expected = over_an_axis(make(optax.adam(0.1), average=pmean))
    for number, params in enumerate(found):
        for name in NAMES:
            np.testing.assert_allclose(params[name], expected[name][number], rtol=1e-4, atol=1e-5)
    # The last fragment leaves with the last update: without waiting nobody hears of it.
    assert len(told) >= PEERS * (rounds - (not at_once))
    assert all(each.why_lost == "" and each.peers == PEERS for each in told)
