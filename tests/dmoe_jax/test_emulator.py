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
from dmoe_jax.grid import all_uids
from dmoe_jax.models import mlp
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.swarm import open_swarm
from dmoe_jax.trainer import Trainer
from dmoe_jax.trunk import SharedTrunk
from net.clock import SwarmClock
from net.identity import Address, PeerId
from net.rpc.faults import Fault, FaultInjector, FaultPlan
from net.rpc.peer import open_rpc_peer
from net.transport.sim import run, simulate
from net.transport.sim.links import LogNormal
from tests.dmoe_jax.small_swarm import close

CONFIG = mlp.MLPConfig(input_dim=6, num_classes=3, d_model=8, num_layers=2, grid_size=(2, 3), k_best=2, expansion=2)
ROUTER = product_key(CONFIG.grid_size, init_scale=1.0)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.amsgrad(1e-2))
BATCH = 4
PREFIXES = ["layer0", "layer1"]


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


async def train_swarm(recorder: OrderRecorder, data: Data, *, num_updates: int, faults: FaultPlan) -> Any:
    """The real protocol on a simulated network; the trunk's parameters, the experts by layer, and the losses."""
    num_trainers = data.batches.x.shape[0]
    clock, losses = SwarmClock.virtual(), []
    async with simulate(seed=1, latency=LogNormal(median_s=0.1, sigma=0.5)) as network, AsyncExitStack() as stack:

        async def swarm_at(host: str, join: Any, *, listens: bool, **who: Any) -> Any:
            peer_id = PeerId.draw(random.Random(host))
            rpc = await stack.enter_async_context(
                open_rpc_peer(
                    network.transport(host, peer_id),
                    peer_id=peer_id,
                    listen=Address(host, 1) if listens else None,
                    faults=FaultInjector(faults),
                )
            )
            return await stack.enter_async_context(
                open_swarm(join, caller=recorder.caller(rpc, **who), clock=clock, device=InlineDevice(), seed=0)
            )

        first = await swarm_at("node0", [], listens=True)
        second = await swarm_at("node1", [Address("node0", 1)], listens=True)
        uids = [str(uid) for prefix in PREFIXES for uid in all_uids(prefix, CONFIG.grid_size)]
        served = [
            await node.serve(dict.fromkeys(own, CONFIG.expert()), optimizer=OPTIMIZER, seed=5)
            for node, own in ((first, uids[::2]), (second, uids[1::2]))
        ]
        backends = {uid: backend for each in served for uid, backend in each.backends.items()}
        models = []
        for index in range(num_trainers):
            place = await swarm_at(f"trainer{index}", [Address("node0", 1)], listens=False, trainer=index)
            models.append(mlp.MLP.on(place, CONFIG, ROUTER))
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
            jax.tree.map(lambda *leaves: np.stack(leaves), *(backends[str(uid)].params for uid in all_uids(prefix, CONFIG.grid_size)))
            for prefix in PREFIXES
        ]
        return trunk.params, experts, [loss for _, loss in sorted(losses)]


@pytest.mark.parametrize("rows", [False, True], ids=["whole batches", "rows"])
def test_equals_the_swarm(rows: bool) -> None:
    """On the order that a simulated swarm took, losses, trunk and experts are the swarm's after fifty updates."""
    num_trainers, num_updates = 3, 50
    emulator = make_emulator(num_trainers, rows=rows)
    data = make_data(emulator.stages.model, num_trainers=num_trainers, steps=num_updates)
    recorder = OrderRecorder(PREFIXES, CONFIG.grid_size)
    trunk, experts, losses = run(
        lambda: train_swarm(recorder, data, num_updates=num_updates, faults=FaultPlan(rates={}, seed=0)), seed=1
    )
    order = recorder.order(num_trainers=num_trainers, num_pairs=BATCH * CONFIG.k_best)
    state = emulator.init(jax.random.key(3), jax.random.key(5), data, num_updates=num_updates)
    state = emulator.run(state, order, data)
    assert int(state.step) == num_updates
    assert np.asarray(state.totals.trunk_staleness).max() >= 2
    np.testing.assert_allclose(state.totals.losses, losses, atol=1e-5)
    close(state.params, trunk)
    close(state.experts.params, jax.tree.map(lambda *layers: np.concatenate(layers), *experts))
