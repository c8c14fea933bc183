"""The emulator: equal to the swarm on the swarm's order of events, and to one jit where nothing is asynchronous."""

import random
from contextlib import AsyncExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.device import InlineDevice
from dmoe_jax.emulator import Data, Emulator, OrderRecorder, draw_order, exponential_delays
from dmoe_jax.emulator.order import BACKWARD, FORWARD, STAGE
from dmoe_jax.grid import all_uids
from dmoe_jax.mixture.local import init_opt_states, update_experts
from dmoe_jax.models import mlp
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.swarm import open_swarm
from dmoe_jax.trainer import Trainer
from dmoe_jax.trunk import SharedTrunk
from net.clock import SwarmClock
from net.identity import Address, PeerId
from net.rpc.peer import open_rpc_peer
from net.transport.sim import run, simulate
from net.transport.sim.links import LogNormal
from tests.dmoe_jax.small_swarm import close

CONFIG = mlp.MLPConfig(input_dim=6, num_classes=3, d_model=8, num_layers=2, grid_size=(2, 3), k_best=2, expansion=2)
ROUTER = product_key(CONFIG.grid_size, init_scale=1.0)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.amsgrad(1e-2))
BATCH = 4
PREFIXES = ["layer0", "layer1"]


class Case(NamedTuple):
    """A model, and batches of it: leaves [trainers, steps, ...]."""

    make_model: Callable[[Any], Model]
    expert: Expert
    grid_size: tuple[int, ...]
    pairs: int
    batches: Any

    def data(self, *, num_trainers: int, steps: int) -> Data:
        """So many of the batches, and the chance of each."""
        batches = jax.tree.map(lambda leaf: leaf[:num_trainers, :steps], self.batches)
        some = jax.tree.map(lambda leaf: leaf[0, 0], batches)
        model = ModelStages(self.make_model).model
        keys = [[model.keys(some, seed=0, trainer=t, step=s) for s in range(steps)] for t in range(num_trainers)]
        stacked = [jax.tree.map(lambda *leaves: np.stack(leaves), *own) for own in keys]
        return Data(batches, jax.tree.map(lambda *leaves: np.stack(leaves), *stacked))


def make_data(model: Any, *, num_trainers: int, steps: int, seed: int = 0) -> Data:
    x = np.random.default_rng(seed).normal(size=(num_trainers, steps, BATCH, 6)).astype(np.float32)
    batches = mlp.Batch(x, x.reshape(*x.shape[:3], 3, 2).max(axis=-1).argmax(axis=-1).astype(np.int32))
    some = jax.tree.map(lambda leaf: leaf[0, 0], batches)
    keys = [[model.keys(some, seed=0, trainer=t, step=s) for s in range(steps)] for t in range(num_trainers)]
    return Data(batches, np.array(keys))


def make_emulator(num_trainers: int, **options: Any) -> Emulator:
    return Emulator(
        lambda swarm: mlp.MLP.on(swarm, CONFIG, ROUTER),
        optimizer=OPTIMIZER,
        expert_optimizer=OPTIMIZER,
        num_trainers=num_trainers,
        **options,
    )


async def train_swarm(case: Case, recorder: OrderRecorder, data: Data, *, num_updates: int) -> Any:
    """The real protocol on a simulated network; the trunk's parameters, the experts by layer, and the losses."""
    num_trainers = jax.tree.leaves(data)[0].shape[0]
    clock, losses = SwarmClock.virtual(), []
    async with simulate(seed=1, latency=LogNormal(median_s=0.1, sigma=0.5)) as network, AsyncExitStack() as stack:

        async def swarm_at(host: str, join: Any, *, listens: bool, **who: Any) -> Any:
            peer_id = PeerId.draw(random.Random(host))
            rpc = await stack.enter_async_context(
                open_rpc_peer(
                    network.transport(host, peer_id),
                    peer_id=peer_id,
                    listen=Address(host, 1) if listens else None,
                )
            )
            return await stack.enter_async_context(
                open_swarm(join, caller=recorder.caller(rpc, **who), clock=clock, device=InlineDevice(), seed=0)
            )

        first = await swarm_at("node0", [], listens=True)
        second = await swarm_at("node1", [Address("node0", 1)], listens=True)
        uids = [str(uid) for prefix in PREFIXES for uid in all_uids(prefix, case.grid_size)]
        served = [
            await node.serve(dict.fromkeys(own, case.expert), optimizer=OPTIMIZER, seed=5)
            for node, own in ((first, uids[::2]), (second, uids[1::2]))
        ]
        backends = {uid: backend for each in served for uid, backend in each.backends.items()}
        models = []
        for index in range(num_trainers):
            place = await swarm_at(f"trainer{index}", [Address("node0", 1)], listens=False, trainer=index)
            models.append(case.make_model(place))
            for mixture in models[-1].mixtures:
                await mixture.check()
        trunk = SharedTrunk(models[0].init(jax.random.key(3)), OPTIMIZER, InlineDevice())
        async with trio.open_nursery() as nursery:
            for index, model in enumerate(models):
                own = [jax.tree.map(lambda leaf, i=index, s=s: leaf[i, s], data.batches) for s in range(num_updates)]
                trainer = Trainer(
                    index, recorder.model(model, trainer=index), recorder.trunk(trunk, trainer=index), iter(own)
                )
                nursery.start_soon(trainer.run, num_updates, lambda record: losses.append((record.step, record.loss)))
        experts = [
            jax.tree.map(
                lambda *leaves: np.stack(leaves),
                *(backends[str(uid)].params for uid in all_uids(prefix, case.grid_size)),
            )
            for prefix in PREFIXES
        ]
        return trunk.params, experts, [loss for _, loss in sorted(losses)]


def test_equals_the_swarm() -> None:
    """On the order that a simulated swarm took, losses, trunk and experts are the swarm's after fifty updates.

    Calls compute the rows that they serve; where one trainer is one jit, below, they compute whole batches.
    """
    num_trainers, num_updates = 3, 50
    emulator = make_emulator(num_trainers, rows=True)
    data = make_data(emulator.stages.model, num_trainers=num_trainers, steps=num_updates)
    recorder = OrderRecorder(PREFIXES, CONFIG.grid_size)
    trunk, experts, losses = run(lambda: train_swarm(recorder, data, num_updates=num_updates), seed=1)
    order = recorder.order(num_trainers=num_trainers, num_pairs=BATCH * CONFIG.k_best)
    state = emulator.init(jax.random.key(3), jax.random.key(5), data, num_updates=num_updates)
    state = emulator.run(state, order, data)
    assert int(state.step) == num_updates
    assert np.asarray(state.totals.trunk_staleness).max() >= 2
    np.testing.assert_allclose(state.totals.losses, losses, atol=1e-5)
    close(state.params, trunk)
    close(state.experts.params, jax.tree.map(lambda *layers: np.concatenate(layers), *experts))


def test_one_trainer_is_one_jit() -> None:
    """Where nothing is asynchronous and nobody fails, a run is that of the whole model in one jit."""
    emulator, steps = make_emulator(1), 4
    data = make_data(emulator.stages.model, num_trainers=1, steps=steps)
    order = draw_order(
        num_updates=steps, num_trainers=1, num_layers=2, num_pairs=BATCH * CONFIG.k_best, delay=exponential_delays(0.1)
    )
    state = emulator.init(jax.random.key(3), jax.random.key(5), data, num_updates=steps)
    state = emulator.run(state, order, data)

    trunk = mlp.init_trunk(jax.random.key(3), CONFIG, ROUTER)
    experts = mlp.init_experts(jax.random.key(5), CONFIG)
    trunk_state, states = OPTIMIZER.init(trunk), [init_opt_states(OPTIMIZER, layer) for layer in experts]

    @jax.jit
    def step(trunk: Any, trunk_state: Any, experts: Any, states: Any, batch: Any) -> Any:
        run = jax.value_and_grad(mlp.local_forward, argnums=(0, 1), has_aux=True)
        (loss, aux), (trunk_grads, expert_grads) = run(trunk, experts, CONFIG, ROUTER, batch)
        updates, trunk_state = OPTIMIZER.update(trunk_grads, trunk_state, trunk)
        updated = [
            update_experts(OPTIMIZER, params, own, grads, layer.load > 0)
            for params, own, grads, layer in zip(experts, states, expert_grads, aux.layers, strict=True)
        ]
        experts, states = tuple(new[0] for new in updated), [new[1] for new in updated]
        return optax.apply_updates(trunk, updates), trunk_state, experts, states, loss

    losses = []
    for number in range(steps):
        batch = jax.tree.map(lambda leaf, number=number: jnp.asarray(leaf[0, number]), data.batches)
        trunk, trunk_state, experts, states, loss = step(trunk, trunk_state, experts, states, batch)
        losses.append(float(loss))
    np.testing.assert_allclose(state.totals.losses, losses, atol=1e-5)
    close(state.params, trunk)
    close(state.experts.params, jax.tree.map(lambda *layers: jnp.concatenate(layers), *experts))
    assert int(state.totals.expert_staleness) == 0
    assert np.asarray(state.totals.trunk_staleness).tolist() == [0] * steps
    assert int(state.totals.load.sum()) == steps * 2 * BATCH * CONFIG.k_best


def test_orders_are_those_of_the_protocol() -> None:
    """Every step has its stages in order and its calls between them; failures are as many as asked for."""
    order = draw_order(
        num_updates=200,
        num_trainers=8,
        num_layers=2,
        num_pairs=6,
        delay=exponential_delays(0.1),
        failure_rate=0.25,
        seed=3,
    )
    assert len(order.updates) == 200
    assert order.updates[-1] == len(order.kind) - 1
    for trainer in range(8):
        own = order.trainer == trainer
        kinds = order.kind[own].tolist()
        whole = [STAGE, *[FORWARD] * 6, STAGE + 1, *[FORWARD] * 6, STAGE + 2, *[BACKWARD] * 6, STAGE + 3]
        whole += [*[BACKWARD] * 6, STAGE + 4]
        assert kinds == (whole * (len(kinds) // len(whole) + 1))[: len(kinds)]
    calls = order.kind < STAGE
    assert abs(1 - order.answered[calls].mean() - 0.25) < 0.02
    with pytest.raises(ValueError, match="failure_rate must be from 0 to below 1, got 1"):
        draw_order(
            num_updates=1, num_trainers=1, num_layers=1, num_pairs=1, delay=exponential_delays(1.0), failure_rate=1.0
        )


def test_what_cannot_be_emulated_is_refused() -> None:
    emulator = make_emulator(2)
    data = make_data(emulator.stages.model, num_trainers=2, steps=2)
    state = emulator.init(jax.random.key(0), jax.random.key(0), data, num_updates=1)
    order = draw_order(num_updates=1, num_trainers=3, num_layers=2, num_pairs=8, delay=exponential_delays(1.0))
    with pytest.raises(
        ValueError, match=r"expected an order of \(trainers, layers, pairs\) \(2, 2, 8\), got \(3, 2, 8\)"
    ):
        emulator.run(state, order, data)
    longer = draw_order(num_updates=9, num_trainers=2, num_layers=2, num_pairs=8, delay=exponential_delays(1.0))
    with pytest.raises(ValueError, match=r"expected at least \d+ batches for each trainer, one a step, got 2"):
        emulator.run(state, longer, data)

    class NoMixture(mlp.MLP):
        def __init__(self) -> None:
            self.name = "dense"

    with pytest.raises(ValueError, match="model 'dense' has no mixture"):
        Emulator(lambda swarm: NoMixture(), optimizer=OPTIMIZER, expert_optimizer=None, num_trainers=1)
    with pytest.raises(ValueError, match="the recorder has seen no update"):
        OrderRecorder(PREFIXES, CONFIG.grid_size).order(num_trainers=1, num_pairs=1)
