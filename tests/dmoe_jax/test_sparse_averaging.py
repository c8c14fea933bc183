"""Averaging in which only the largest values travel, among real averagers in virtual time, beside its oracle in JAX."""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.arrays import PyTree
from dmoe_jax.averaging import TreeAverager, TreeAveragerConfig, open_tree_averager
from dmoe_jax.checkpoints import Checkpoints
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.optim import ErrorFeedback, moshpit_average, what_to_send, with_average
from dmoe_net.identity import Address, Contact
from dmoe_net.rpc.base import Reply
from dmoe_net.rpc.peer import RpcPeer
from dmoe_net.transport.sim.events import HostDown
from dmoe_net.wire.sparse import SparseCoding, all_gather_nbytes
from tests.dmoe_jax.averaging_peers import Loop, peer_at, start, swarm_lived
from tests.dmoe_jax.test_optim_moshpit import train_peers
from tests.net.averaging_swarm import Swarm, in_swarm, open_place, swarm_test

FEEDBACK = ErrorFeedback(coding=SparseCoding(block_size=16, kept=3), decay=0.9)
OTHER = ErrorFeedback(coding=SparseCoding(block_size=16, kept=4), decay=0.9)
SHAPES = {"a": (5, 9), "b": (7,)}
EVERY = 2
RNG = np.random.default_rng(0)
PERIOD_S = 20.0


@functools.cache
def optimizer_of(what: Any = "pseudo_gradients", average: Any = None, feedback: ErrorFeedback = FEEDBACK) -> Any:
    """SparseLoCo in small, or gradients."""
    outer = optax.sgd(1.0) if what == "pseudo_gradients" else None
    return moshpit_average(
        optax.adam(0.1), every=EVERY, what=what, outer=outer, weighted=True, average=average, compress=feedback
    )


def config_of(side: int, **settings: Any) -> TreeAveragerConfig:
    """Averaging in groups of so many."""
    return TreeAveragerConfig(**{"side": side, "window_s": 2.0, "timeout_s": 12.0} | settings)


def grads_of(rounds: int, peers: int) -> list[PyTree]:
    """A tree of [peers, ...] for each step of so many rounds."""
    return [
        {name: RNG.normal(size=(peers, *shape)).astype(np.float32) for name, shape in SHAPES.items()}
        for _ in range(rounds * EVERY)
    ]


def stacked(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def at(tree: PyTree, peer: int) -> PyTree:
    """One peer's part."""
    return jax.tree.map(lambda leaf: leaf[peer], tree)


def loop_of(what: str = "pseudo_gradients", feedback: ErrorFeedback = FEEDBACK) -> Loop:
    """A training loop of one's own that begins at zeros."""
    return Loop(optimizer_of(what, feedback=feedback), {name: np.zeros(shape) for name, shape in SHAPES.items()})


async def one_round(averager: TreeAverager, loop: Loop, grads: Sequence[PyTree], samples: float) -> None:
    """The steps between two averages, and the average."""
    for each in grads:
        await loop.step(averager, each, wait=True, samples=samples)
    loop.apply()


class Peers:
    """Peers that live until they are done; `averagers` are theirs."""

    def __init__(self, loops: Sequence[Loop], config: TreeAveragerConfig, **roles: TreeAveragerConfig) -> None:
        self.loops = list(loops)
        self.averagers: dict[int, TreeAverager] = {}
        self._config, self._roles = config, roles

    def run(self, live: Callable[..., Any], *, dying: int | None = None, dies_at: int = 1, silent: bool = True) -> None:
        """Let all live, as `live(averager, loop, index=...)`; who is `dying` is gone at its n-th piece of round two."""

        async def body(swarm: Swarm) -> None:
            for index, loop in enumerate(self.loops):
                name, settings = f"peer{index}", dict[str, Any]()
                if index == dying:
                    death = HostDown(name, silent=silent)
                    settings["wrap"] = partial(Mortal, swarm=swarm, death=death, dies_at=dies_at)
                config = self._roles.get(name, self._config)
                start(swarm, name, loop, partial(live, index=index), config=config, **settings)
            alive = [index for index in range(len(self.loops)) if index != dying]
            await swarm_lived(swarm, *(f"peer{index}" for index in alive))
            self.averagers = {index: swarm.done[f"peer{index}"] for index in alive}

        in_swarm(body)


class Mortal:
    """A caller whose host dies when it would bring the n-th piece of a payload in the second round."""

    def __init__(self, caller: RpcPeer, swarm: Swarm, death: HostDown, dies_at: int) -> None:
        self._caller, self._swarm, self._death = caller, swarm, death
        self._left = dies_at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._caller, name)

    async def call(self, target: Contact | Address, method: str, *args: Any, **settings: Any) -> Reply:
        if method.endswith(".bring") and trio.current_time() >= 2 * PERIOD_S:
            self._left -= 1
            if self._left <= 0:
                await trio.sleep(0.5)  # what it has brought, and its word on the group if it leads, arrives
                self._swarm.network.apply(self._death)
                await trio.sleep_forever()
        return await self._caller.call(target, method, *args, **settings)


def on_one_device(what: str, grads: Sequence[PyTree], samples: Sequence[float]) -> PyTree:
    """Parameters of all peers at the end, [peers, ...], by `optim` over an axis of simulated peers."""

    def mean(tree: PyTree, round_number: Any, weight: Any) -> PyTree:
        total = jax.lax.psum(weight, "peers")
        return jax.tree.map(lambda leaf: jax.lax.psum(leaf * weight, "peers") / total, tree)

    params = {name: jnp.zeros((len(samples), *shape)) for name, shape in SHAPES.items()}
    of_steps = np.tile(np.float32(samples), (len(grads), 1))
    return train_peers(optimizer_of(what, mean), params, stacked(grads), samples=of_steps)[0]


async def together(
    grads: Sequence[PyTree], samples: Sequence[float], averager: TreeAverager, loop: Loop, *, index: int
) -> None:
    """All rounds, which all peers begin together."""
    for number in range(len(grads) // EVERY):
        await trio.sleep_until((number + 1) * PERIOD_S)
        steps = grads[number * EVERY : (number + 1) * EVERY]
        await one_round(averager, loop, [at(each, index) for each in steps], samples[index])


def check_close(found: PyTree, expected: PyTree) -> None:
    """Equal to rounding."""
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.parametrize("what", ["pseudo_gradients", pytest.param("gradients", marks=pytest.mark.slow)])
def test_four_peers_end_where_the_oracle_does(what: str) -> None:
    """They do to rounding, after three rounds in which each counts by its samples; one is a client, never called."""
    samples, grads = [1.0, 2.0, 3.0, 6.0], grads_of(3, 4)
    peers = Peers([loop_of(what) for _ in samples], config_of(4), peer3=config_of(4, role="client"))
    peers.run(partial(together, grads, samples))
    expected = on_one_device(what, grads, samples)
    for index, loop in enumerate(peers.loops):
        check_close(loop.params, at(expected, index))
        totals = peers.averagers[index].totals
        assert (totals.done, totals.peers_met, totals.missed, totals.rejected) == (3, 9, 0, 0)
        assert not totals.peers_lost
        # In each of three rounds to two others; what the client fetched last may not be counted any more.
        assert index == 3 or totals.moved_bytes >= 3 * all_gather_nbytes(FEEDBACK.coding, (45, 7), 3)
    # Not because nothing was kept back.
    residual = peers.loops[0].opt_state.residual
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(residual)) > 0.01


@pytest.mark.parametrize(("dies_at", "silent"), [(1, True), (1, False), (2, True)])
def test_who_dies_in_a_round_is_left_out_or_in_by_all(dies_at: int, silent: bool) -> None:
    """It brings its payload to nobody, or to one whom the others ask, and is gone; they end at the same anchor."""
    # A payload is one piece.
    peers = Peers([loop_of() for _ in range(4)], config_of(4))
    peers.run(partial(together, grads_of(3, 4), [1.0] * 4), dying=3, dies_at=dies_at, silent=silent)
    for index, averager in peers.averagers.items():
        # The third round begins without the fourth peer, and its group when the window ends.
        assert (averager.totals.done, averager.totals.missed) == (3, 0)
        assert averager.totals.peers_lost.total() == (1 if dies_at == 1 else 0)
        anchors = [peers.loops[each].opt_state.anchor for each in (0, index)]
        jax.tree.map(np.testing.assert_array_equal, *anchors)
    assert peers.averagers[0].totals.peers_met == 3 + 3 + 2


def test_what_a_lost_round_offered_is_offered_again() -> None:
    """It leaves residual and anchor as they were, and all end where pure functions lead in which it had no average."""
    samples, rounds = [1.0, 3.0], [grads_of(1, 2) for _ in range(3)]
    states: list[list[Any]] = [[], []]  # of each peer, at the beginning of each round

    async def live(averager: TreeAverager, loop: Loop, *, index: int) -> None:
        for number, grads in enumerate(rounds):
            # In the second round the other comes when the first one's step has ended.
            await trio.sleep_until(40.0 * (number + 1) + (20.0 if number == 1 and index == 1 else 0.0))
            states[index].append(loop.opt_state)
            await one_round(averager, loop, [at(each, index) for each in grads], samples[index])

    peers, pure = Peers([loop_of() for _ in samples], config_of(2)), [loop_of() for _ in samples]
    peers.run(live)
    for index, averager in peers.averagers.items():
        assert (averager.totals.done, averager.totals.missed, averager.why_not) == (2, 1, "")
        _, before, after = states[index]
        jax.tree.map(np.testing.assert_array_equal, (after.residual, after.anchor), (before.residual, before.anchor))
        assert any(leaf.any() for leaf in jax.tree.leaves(after.residual))
    for number, grads in enumerate(rounds):
        for index, loop in enumerate(pure):
            for each in grads:
                loop.learn(at(each, index), samples=samples[index])
        sent = [what_to_send(loop.opt_state, loop.params) for loop in pure]
        mean = partial(np.average, axis=0, weights=[float(each.weight) for each in sent])
        average = jax.tree.map(mean, stacked([each.tree for each in sent]))
        for loop, each in zip(pure, sent, strict=True):
            loop.opt_state = with_average(loop.opt_state, each, None if number == 1 else average)
            loop.apply()
    for loop, expected in zip(peers.loops, pure, strict=True):
        check_close(loop.params, expected.params)


def test_a_resumed_run_is_the_run(tmp_path: Path) -> None:
    """Two rounds, a checkpoint on disk, two rounds of new processes: bit for bit as four rounds at once."""
    samples, grads = [1.0, 3.0], grads_of(4, 2)

    def trained(rounds: Sequence[PyTree], loops: list[Loop]) -> list[dict[str, PyTree]]:
        peers = Peers(loops, config_of(2))
        peers.run(partial(together, rounds, samples))
        assert [averager.totals.done for averager in peers.averagers.values()] == [len(rounds) // EVERY] * 2
        return [{"params": loop.params, "opt_state": loop.opt_state} for loop in loops]

    whole, resumed = trained(grads, [loop_of() for _ in samples]), [loop_of() for _ in samples]
    for index, state in enumerate(trained(grads[: 2 * EVERY], [loop_of() for _ in samples])):
        checkpoints, new = Checkpoints(tmp_path / f"{index}"), resumed[index]
        checkpoints.save(1, state, {})
        _, state, _ = checkpoints.restore_latest({"params": new.params, "opt_state": new.opt_state})
        new.params, new.opt_state = jax.tree.map(jnp.asarray, (state["params"], state["opt_state"]))
        checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, trained(grads[2 * EVERY :], resumed), whole)


def test_numbers_that_are_none_are_not_sent() -> None:
    """They are counted, nobody gets them, and the residual stays finite."""

    async def live(averager: TreeAverager, loop: Loop, *, index: int) -> None:
        await trio.sleep_until(PERIOD_S)
        value = jnp.nan if index == 0 else 1.0
        await one_round(averager, loop, [{name: jnp.full(shape, value) for name, shape in SHAPES.items()}] * EVERY, 1.0)

    peers = Peers([loop_of() for _ in range(2)], config_of(2))
    peers.run(live)
    assert peers.averagers[0].why_not == "this peer's pseudo-gradients are not finite"
    assert (peers.averagers[0].totals.rejected, peers.averagers[1].totals.missed) == (1, 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(peers.loops[0].opt_state.residual))


@swarm_test
async def test_wrong_combinations_are_refused_at_start(swarm: Swarm) -> None:
    """Settings that contradict each other, or the optimiser."""
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    async with open_place(swarm, "ann") as place:
        for optimizer, settings, message in (
            (optimizer_of(), {"sparse": OTHER}, "give the same to the averager's config as `sparse`"),
            (moshpit_average(optax.sgd(1.0)), {"sparse": OTHER}, "make the optimiser with moshpit_av"),
            (optimizer_of(), {"compression": "float16"}, "compression 'float16' is for all"),
            (optimizer_of(), {"share": 0.5}, "is for an optimiser that averages parameters"),
            (optimizer_of(), {"side": 2**30}, "bytes of memory, more than the"),
        ):
            config = config_of(**{"side": 2} | settings)
            given = {"optimizer": optimizer, "name": "run", "device": InlineDevice(), "config": config}
            with pytest.raises(ValueError, match=message):
                async with open_tree_averager(peer_at(place), params, **given):
                    raise AssertionError("it was opened")


def test_peers_of_other_settings_do_not_meet() -> None:
    """Each keeps another number of values."""
    peers = Peers([loop_of(), loop_of(feedback=OTHER)], config_of(2))
    peers.run(partial(together, grads_of(1, 2), [1.0, 1.0]))
    assert [(each.totals.done, each.totals.missed) for each in peers.averagers.values()] == [(0, 1)] * 2
