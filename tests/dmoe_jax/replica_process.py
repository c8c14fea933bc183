"""A process of a replica for `test_replicas`: it trains a small model that lies on the devices of all of its processes.

It prints a line of JSON for each thing that the test wants to know.
"""

import hashlib
import json
import sys
import tracemalloc
from typing import Any

import jax
import numpy as np
import optax
import trio

from tests.dmoe_jax.replica_model import BATCH, SPECS, WIDE, batch_of, loss_of, params_of

DEVICES = 8
"""Devices of all processes of a replica."""


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def main(settings: dict[str, Any]) -> None:
    processes, index = settings["processes"], settings["index"]
    jax.config.update("jax_num_cpu_devices", DEVICES // processes)
    if processes > 1:
        jax.config.update("jax_enable_preemption_service", False)
        times = {"heartbeat_timeout_seconds": 10, "shutdown_timeout_seconds": 10}
        jax.distributed.initialize(settings["coordinator"], processes, index, **times)
    trio.run(train, settings)


async def train(settings: dict[str, Any]) -> None:
    from dmoe_jax.peers.security import Plain
    from dmoe_jax.swarm.opening import open_swarm

    async with open_swarm(settings["join"] or (), listen="127.0.0.1:0", security=Plain()) as swarm:
        assert swarm.peer.own_contact is not None
        say(contact=swarm.peer.own_contact.full)
        for mode in settings["modes"]:
            await MODES[mode](swarm, settings)


class Replica:
    """The model on the mesh of all devices."""

    def __init__(self, *, wide: bool = False) -> None:
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
        self.shardings = {name: NamedSharding(mesh, PartitionSpec(*spec)) for name, spec in SPECS.items()}
        self.rows = NamedSharding(mesh, PartitionSpec("data"))
        host = params_of(WIDE if wide else 64)
        self.params = {name: self.put(array, self.shardings[name]) for name, array in host.items()}
        self.grads = jax.jit(jax.value_and_grad(loss_of))

    def put(self, array: np.ndarray, sharding: Any) -> jax.Array:
        return jax.make_array_from_callback(array.shape, sharding, lambda where: array[where])

    def batch(self, number: int, replica: int) -> tuple[jax.Array, jax.Array]:
        x, y = batch_of(number, replica)
        return self.put(x, self.rows), self.put(y, self.rows)

    def constrained(self, params: Any) -> Any:
        return jax.lax.with_sharding_constraint(params, self.shardings)


def pieces_of(tree: Any) -> dict[str, list[Any]]:
    """Name of each array -> [[first and end of each dimension], numbers] of the shards of this process."""
    found: dict[str, list[Any]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and leaf.ndim and not leaf.is_fully_addressable:
            shards = {str(shard.index): shard for shard in leaf.addressable_shards}
            found[jax.tree_util.keystr(path)] = [
                [
                    [each.indices(size)[:2] for each, size in zip(shard.index, leaf.shape, strict=True)],
                    shard.data.tolist(),
                ]
                for shard in shards.values()
            ]
    return found


async def average(swarm: Any, settings: dict[str, Any]) -> None:
    """Average gradients in every step, waiting: one large batch of all replicas."""
    from dmoe_jax import moshpit_average
    from dmoe_jax.averaging import TreeAveragerConfig
    from dmoe_jax.optim.host_state import apply_average

    replica, optimizer = Replica(), moshpit_average(optax.adam(1e-2), every=1, what="gradients")

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return replica.constrained(optax.apply_updates(params, updates)), state

    @jax.jit
    def apply(params: Any, state: Any) -> Any:
        params, state = apply_average(optimizer, state, params)
        return replica.constrained(params), state

    config = TreeAveragerConfig(side=2, window_s=30.0, timeout_s=60.0)
    async with swarm.averager(replica.params, optimizer, name="average", config=config) as averager:
        params, state, losses = replica.params, optimizer.init(replica.params), []
        for number in range(settings["steps"]):
            loss, grads = replica.grads(params, *replica.batch(number, settings["replica"]))
            params, state = step(params, state, grads)
            params, state = apply(params, await averager.step(state, params, wait=True))
            losses.append(float(loss))
        totals = {"done": averager.totals.done, "missed": averager.totals.missed}
    moments = {"mu": state.inner[0].mu, "nu": state.inner[0].nu}
    say(mode="average", losses=losses, pieces=pieces_of({"params": params, **moments}), **totals)


async def collaborate(swarm: Any, settings: dict[str, Any]) -> None:
    """Gather one large batch, as `Swarm.collaboration` does."""
    from dmoe_jax.collaboration import CollaborationConfig

    replica, made, done = Replica(), list[Any](), list[Any]()
    config = CollaborationConfig(lead_s=1.0, late_s=60.0)
    async with swarm.collaboration(
        replica.params, optax.adam(1e-2), target_batch_size=2 * BATCH, name="batch", config=config, on_step=done.append
    ) as peer:
        say(mode="opened", step=peer.step)
        if settings["index"] == 0 and settings["company"]:
            while "2 node" not in peer.facts()["peers"]:
                await peer.board.wait_for_news()
        number = settings["first_batch"]
        while peer.step < settings["steps"]:
            at = peer.step
            loss, grads = replica.grads(peer.params, *replica.batch(number, settings["replica"]))
            made.append([at, number, float(loss)])
            number += 1
            await trio.sleep(settings["pause_s"])
            done.clear()
            await peer.add(grads, samples=BATCH)
            digest = hashlib.sha256(repr(pieces_of(peer.params)).encode()).hexdigest()
            say(step=peer.step, peers=done[-1].peers if done else 0, digest=digest, taken=peer.totals.states_taken)
        inner = peer.state["inner"][0]
        totals = {"states_taken": peer.totals.states_taken, "alone": peer.totals.alone}
        pieces = pieces_of({"params": peer.params, "mu": inner.mu, "nu": inner.nu})
        say(mode="collaborate", made=made, at=peer.step, chain=peer.standing.chain.hex(), pieces=pieces, **totals)


async def overlap(swarm: Any, settings: dict[str, Any]) -> None:
    """Average the parameters of a larger model beside the training; measure what the host holds meanwhile."""
    from dmoe_jax import moshpit_average
    from dmoe_jax.averaging import TreeAveragerConfig

    replica, optimizer = Replica(wide=True), moshpit_average(optax.sgd(1e-3), every=3)

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return replica.constrained(optax.apply_updates(params, updates)), state

    config = TreeAveragerConfig(side=2, window_s=30.0, timeout_s=60.0)
    async with swarm.averager(replica.params, optimizer, name="overlap", config=config) as averager:
        params, state, beside = replica.params, optimizer.init(replica.params), 0
        whole = sum(leaf.size * 4 for leaf in jax.tree.leaves(params))
        number = 0
        while averager.totals.done < 4:
            if averager.totals.done == 1 and not tracemalloc.is_tracing():
                tracemalloc.start()
            _, grads = replica.grads(params, *replica.batch(number, 0))
            params, state = step(params, state, grads)
            beside += averager.is_under_way
            state = await averager.step(state, params)
            number += 1
        peak = tracemalloc.get_traced_memory()[1]
        piece = averager.totals.piece_bytes
    say(mode="overlap", whole=whole, piece=piece, peak=peak, beside=beside)


MODES = {"average": average, "collaborate": collaborate, "overlap": overlap}

if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
